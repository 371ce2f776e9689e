//! The null provider: a verbs library the bench carries inside itself, and its counters.

use crate::failure::{Failure, Result};
use std::ffi::{CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/null_provider.so"));

/// The library as a file, in a folder that goes away with this value.
#[derive(Debug)]
pub struct ProviderFile {
    folder: PathBuf,
}

impl ProviderFile {
    /// Writes it out.
    pub fn new() -> Result<Self> {
        let folder =
            std::env::temp_dir().join(format!("pinrail-bench-null-{}", std::process::id()));
        let write = || {
            std::fs::create_dir_all(&folder)?;
            std::fs::write(folder.join("libibverbs.so.1"), LIBRARY)
        };
        write()
            .map_err(|error| Failure::io("null provider", &folder.display().to_string(), &error))?;
        Ok(Self { folder })
    }

    /// Its path.
    pub fn path(&self) -> PathBuf {
        self.folder.join("libibverbs.so.1")
    }

    /// The folder, for other files of the run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for ProviderFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            eprintln!("{}: {error}", self.folder.display());
        }
    }
}

/// `struct null_counters` of null/null.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Counters {
    pub post_send_calls: u64,
    pub send_wrs: u64,
    pub post_recv_calls: u64,
    pub recv_wrs: u64,
    pub poll_cq_calls: u64,
    pub poll_cq_empty: u64,
    pub completions: u64,
    pub inline_wrs: u64,
    pub signaled_wrs: u64,
    pub early_imms: u64,
    pub faults: u64,
    pub live_qps: u64,
    pub live_cqs: u64,
    pub live_mrs: u64,
    pub live_mr_bytes: u64,
}

/// The library as loaded by this process, the same copy that the plugin opened.
#[derive(Debug)]
pub struct Provider {
    counters: *const Counters,
    hold: unsafe extern "C" fn(c_int),
}

impl Provider {
    /// Opens it; it stays open until the process ends.
    pub fn open(path: &Path) -> Result<Self> {
        let missing =
            |what: &str| Failure::new("null provider", format!("{}: {what}", path.display()));
        let name =
            CString::new(path.as_os_str().as_bytes()).map_err(|_| missing("NUL in its path"))?;
        // SAFETY: `name` is NUL-terminated; the library's constructor maps memory and nothing else.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(missing("cannot be opened"));
        }
        let symbol = |name: &std::ffi::CStr| -> Result<*mut c_void> {
            // SAFETY: the handle is open and `name` is NUL-terminated.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            if address.is_null() { Err(missing("not the null provider")) } else { Ok(address) }
        };
        let read = symbol(c"pinrail_null_counters")?;
        let hold = symbol(c"pinrail_null_hold")?;
        // SAFETY: both are functions of these types in null/data.c.
        unsafe {
            let read: unsafe extern "C" fn() -> *const Counters = std::mem::transmute(read);
            let hold: unsafe extern "C" fn(c_int) = std::mem::transmute(hold);
            Ok(Self { counters: read(), hold })
        }
    }

    /// The counters now.
    pub fn counters(&self) -> Counters {
        // SAFETY: the struct is static data of a library that stays open, and this thread is the one that posts.
        unsafe { std::ptr::read_volatile(self.counters) }
    }

    /// Hides completions, or shows them again.
    pub fn hold(&self, hold: bool) {
        // SAFETY: sets one static word.
        unsafe { (self.hold)(hold.into()) };
    }
}
