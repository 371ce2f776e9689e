//! A shared object opened the way NCCL opens plugins.

use crate::failure::Failure;
use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr::NonNull;

/// An open shared object. Closing is explicit: on a failed run the plugin's threads may still execute its code.
#[derive(Debug)]
pub struct Library {
    handle: NonNull<c_void>,
    path: String,
}

impl Library {
    /// dlopen with RTLD_NOW | RTLD_LOCAL: one unresolved symbol makes the library unusable, as in NCCL.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Failure::new("load", "the library's path contains a NUL byte"))?;
        // SAFETY: `name` is a NUL-terminated string; loading runs the library's constructors, which is what is asked for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let handle = NonNull::new(handle).ok_or_else(|| Failure::new("load", last_error()))?;
        Ok(Self { handle, path: path.display().to_string() })
    }

    /// One more reference to a library that is loaded; `None` if it is not.
    pub fn loaded(path: &Path) -> Option<Self> {
        let name = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: `name` is a NUL-terminated string, and nothing is loaded.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        Some(Self { handle: NonNull::new(handle)?, path: path.display().to_string() })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The file that a symbol of it lies in, as the loader knows it.
    pub fn file_of(&self, name: &str) -> Option<String> {
        let symbol = self.symbol(name)?;
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: the address lies in a loaded library, and the struct may be filled.
        if unsafe { libc::dladdr(symbol.as_ptr(), info.as_mut_ptr()) } == 0 {
            return None;
        }
        // SAFETY: all zeroes is a valid value, and dladdr filled it.
        let name = unsafe { info.assume_init() }.dli_fname;
        // SAFETY: the loader's own string, alive while the library is open.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }

    /// The address of an exported symbol.
    pub fn symbol(&self, name: &str) -> Option<NonNull<c_void>> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle is open and `name` is NUL-terminated.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) })
    }

    /// Closes the library.
    ///
    /// # Safety
    /// Nothing of it is used afterwards: no table, no comm, no thread inside it.
    pub unsafe fn close(self) {
        // SAFETY: the handle is open, and the caller keeps the rest of the contract.
        unsafe { libc::dlclose(self.handle.as_ptr()) };
    }
}

/// The version of the C library that this process runs on.
pub fn glibc_version() -> String {
    // SAFETY: the call returns a static string.
    unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) }.to_string_lossy().into_owned()
}

fn last_error() -> String {
    // SAFETY: dlerror returns NULL or a string valid until this thread's next dl call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "dlopen failed without a reason".into();
    }
    // SAFETY: not NULL, hence NUL-terminated.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
