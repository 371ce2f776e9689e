//! The seam: a table of verbs filled from a shared object with the libibverbs C ABI.
//!
//! Symbols are looked up with their version, because libibverbs keeps old variants under the same name. A missing
//! mandatory symbol makes the library unusable and is named; a missing optional one switches a feature off.

use super::sys::{
    ibv_async_event, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_ece, ibv_gid, ibv_mr,
    ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};
use crate::error::{Error, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

/// The library that the dynamic linker finds when no path is set.
pub const DEFAULT_LIBRARY: &str = "libibverbs.so.1";

macro_rules! verbs_table {
    (
        required { $($(#[$rdoc:meta])* $rname:ident = $rsym:literal @ $rver:literal : fn($($rarg:ty),*) $(-> $rret:ty)?;)* }
        optional { $($(#[$odoc:meta])* $oname:ident = $osym:literal @ $over:literal : fn($($oarg:ty),*) $(-> $oret:ty)?;)* }
    ) => {
        /// Function pointers of one verbs library. Keeps the library open.
        pub struct Verbs {
            path: PathBuf,
            $($(#[$rdoc])* pub(super) $rname: unsafe extern "C" fn($($rarg),*) $(-> $rret)?,)*
            $($(#[$odoc])* pub(super) $oname: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)*
            // Last field: dropped after nothing can call through the pointers any more.
            _library: Library,
        }

        impl Verbs {
            /// Opens `path`, or the system's libibverbs.
            ///
            /// # Errors
            /// The library cannot be opened, or lacks a mandatory symbol; both are named.
            pub fn load(path: Option<&Path>) -> Result<Arc<Self>> {
                let path = path.unwrap_or_else(|| Path::new(DEFAULT_LIBRARY)).to_path_buf();
                let library = Library::open(&path)?;
                Ok(Arc::new(Self {
                    $($rname: {
                        let symbol = library.symbol($rsym, $rver).ok_or_else(|| {
                            Error::system(format!("{} has no {}@{}", path.display(), $rsym, $rver))
                        })?;
                        // SAFETY: the symbol with this version has this signature in every libibverbs since rdma-core 20.
                        unsafe { std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($rarg),*) $(-> $rret)?>(symbol) }
                    },)*
                    $($oname: library.symbol($osym, $over).map(|symbol| {
                        // SAFETY: as above; the version tells which signature the symbol has.
                        unsafe { std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($oarg),*) $(-> $oret)?>(symbol) }
                    }),)*
                    path,
                    _library: library,
                }))
            }
        }
    };
}

verbs_table! {
    required {
        /// List the devices.
        get_device_list = "ibv_get_device_list" @ "IBVERBS_1.1": fn(*mut c_int) -> *mut *mut ibv_device;
        /// Give the list back.
        free_device_list = "ibv_free_device_list" @ "IBVERBS_1.1": fn(*mut *mut ibv_device);
        /// A device's kernel name.
        get_device_name = "ibv_get_device_name" @ "IBVERBS_1.1": fn(*mut ibv_device) -> *const c_char;
        /// Open a device.
        open_device = "ibv_open_device" @ "IBVERBS_1.1": fn(*mut ibv_device) -> *mut ibv_context;
        /// Close it.
        close_device = "ibv_close_device" @ "IBVERBS_1.1": fn(*mut ibv_context) -> c_int;
        /// Read one asynchronous event.
        get_async_event = "ibv_get_async_event" @ "IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        /// Acknowledge it; objects cannot be destroyed before.
        ack_async_event = "ibv_ack_async_event" @ "IBVERBS_1.1": fn(*mut ibv_async_event);
        /// Device attributes.
        query_device = "ibv_query_device" @ "IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        /// Port attributes; fills the short form only.
        query_port = "ibv_query_port" @ "IBVERBS_1.1": fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        /// One GID.
        query_gid = "ibv_query_gid" @ "IBVERBS_1.1": fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        /// One partition key.
        query_pkey = "ibv_query_pkey" @ "IBVERBS_1.1": fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int;
        /// Make a protection domain.
        alloc_pd = "ibv_alloc_pd" @ "IBVERBS_1.1": fn(*mut ibv_context) -> *mut ibv_pd;
        /// Free it.
        dealloc_pd = "ibv_dealloc_pd" @ "IBVERBS_1.1": fn(*mut ibv_pd) -> c_int;
        /// Register memory.
        reg_mr = "ibv_reg_mr" @ "IBVERBS_1.1": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        /// Deregister it.
        dereg_mr = "ibv_dereg_mr" @ "IBVERBS_1.1": fn(*mut ibv_mr) -> c_int;
        /// Make a completion queue.
        create_cq = "ibv_create_cq" @ "IBVERBS_1.1": fn(*mut ibv_context, c_int, *mut c_void, *mut c_void, c_int) -> *mut ibv_cq;
        /// Destroy it.
        destroy_cq = "ibv_destroy_cq" @ "IBVERBS_1.1": fn(*mut ibv_cq) -> c_int;
        /// Make a queue pair.
        create_qp = "ibv_create_qp" @ "IBVERBS_1.1": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        /// Change its state or attributes.
        modify_qp = "ibv_modify_qp" @ "IBVERBS_1.1": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        /// Destroy it.
        destroy_qp = "ibv_destroy_qp" @ "IBVERBS_1.1": fn(*mut ibv_qp) -> c_int;
        /// Arm the library's fork handling.
        fork_init = "ibv_fork_init" @ "IBVERBS_1.1": fn() -> c_int;
    }
    optional {
        /// Registration with optional access bits.
        reg_mr_iova2 = "ibv_reg_mr_iova2" @ "IBVERBS_1.8": fn(*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr;
        /// Read a queue pair's state and attributes.
        query_qp = "ibv_query_qp" @ "IBVERBS_1.1": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        /// Read the enhanced connection establishment options.
        query_ece = "ibv_query_ece" @ "IBVERBS_1.10": fn(*mut ibv_qp, *mut ibv_ece) -> c_int;
        /// Set them.
        set_ece = "ibv_set_ece" @ "IBVERBS_1.10": fn(*mut ibv_qp, *mut ibv_ece) -> c_int;
        /// DMA-BUF registration.
        reg_dmabuf_mr = "ibv_reg_dmabuf_mr" @ "IBVERBS_1.12": fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        /// Whether and why fork handling is on.
        is_fork_initialized = "ibv_is_fork_initialized" @ "IBVERBS_1.13": fn() -> c_int;
        /// Port speed in units of 100 Mb/s.
        query_port_speed = "ibv_query_port_speed" @ "IBVERBS_1.16": fn(*mut ibv_context, u32, *mut u64) -> c_int;
    }
}

impl Verbs {
    /// Whether memory can be registered with optional access bits such as relaxed ordering.
    pub fn has_optional_access(&self) -> bool {
        self.reg_mr_iova2.is_some()
    }

    /// The library as it was asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that the linker took, with links resolved: its name tells the release.
    pub fn file(&self) -> Option<PathBuf> {
        // SAFETY: zeroes are a valid value: NULL pointers.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: an address inside the library, which is open, and a valid out-pointer.
        let found = unsafe { libc::dladdr(self.fork_init as *const c_void, &raw mut info) };
        if found == 0 || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the linker's NUL-terminated string for an object that is open.
        let name = unsafe { CStr::from_ptr(info.dli_fname) };
        Path::new(std::ffi::OsStr::from_bytes(name.to_bytes())).canonicalize().ok()
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verbs").field("path", &self.path).finish_non_exhaustive()
    }
}

/// An open shared object.
struct Library(NonNull<c_void>);

// SAFETY: a dlopen handle may be used and closed on any thread; the dynamic linker has its own lock.
unsafe impl Send for Library {}
// SAFETY: as above; lookups do not change the handle.
unsafe impl Sync for Library {}

impl Library {
    /// Opens without making symbols global. NODELETE, because verbs providers keep fork handlers and thread state
    /// and are not written to be unmapped; closing then only gives the reference back.
    fn open(path: &Path) -> Result<Self> {
        let c_path = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::argument(format!("{} contains a NUL byte", path.display())))?;
        // SAFETY: the path is NUL-terminated; running the library's initialisers is what loading it means.
        let handle = unsafe {
            libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE)
        };
        NonNull::new(handle).map(Self).ok_or_else(|| {
            // SAFETY: dlerror returns NULL or a NUL-terminated string that stays valid until the next dl call of this
            // thread.
            let reason = unsafe {
                let text = libc::dlerror();
                if text.is_null() {
                    "no reason given".into()
                } else {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
            };
            Error::system(format!("cannot open the verbs library {}: {reason}", path.display()))
        })
    }

    fn symbol(&self, name: &str, version: &str) -> Option<NonNull<c_void>> {
        let name = CString::new(name).ok()?;
        let version = CString::new(version).ok()?;
        // SAFETY: the handle is open as long as self lives and both strings are NUL-terminated.
        NonNull::new(unsafe { libc::dlvsym(self.0.as_ptr(), name.as_ptr(), version.as_ptr()) })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle came from dlopen and is closed once.
        unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named() {
        let error = Verbs::load(Some(Path::new("/nonexistent/libibverbs.so"))).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/libibverbs.so"), "{error}");
    }

    #[test]
    fn a_library_without_verbs_is_refused_by_symbol() {
        let error = Verbs::load(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(error.to_string().contains("ibv_get_device_list@IBVERBS_1.1"), "{error}");
    }

    #[test]
    fn the_system_library_has_every_mandatory_symbol() {
        let verbs = Verbs::load(None).expect("libibverbs1 is a package of the test environment");
        assert!(verbs.reg_mr_iova2.is_some());
        let file = verbs.file().expect("a file that is mapped");
        assert!(file.file_name().unwrap().to_str().unwrap().starts_with("libibverbs.so.1."));
    }
}
