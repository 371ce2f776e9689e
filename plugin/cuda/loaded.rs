//! A library that the process has loaded already, and functions in it.

use std::ffi::{CStr, c_void};
use std::mem::size_of;
use std::ptr::NonNull;

/// A library that somebody else has loaded.
#[derive(Debug)]
pub(super) struct Loaded(NonNull<c_void>);

impl Loaded {
    /// The library, if it is there; it is never loaded from here. The reference is kept: these libraries are not made
    /// to be unloaded.
    pub(super) fn find(name: &CStr) -> Option<Self> {
        // SAFETY: a NUL-terminated name; NOLOAD only looks.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        NonNull::new(library).map(Self)
    }

    /// A function, if the library has it.
    ///
    /// # Safety
    /// `F` is the type of a function pointer, and the one of the function of that name.
    pub(super) unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle is open, the name NUL-terminated.
        let symbol = unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) };
        // SAFETY: both are pointers of one size, and the caller answers for the type.
        NonNull::new(symbol).map(|symbol| unsafe { std::mem::transmute_copy(&symbol) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_loaded_is_found() {
        assert!(Loaded::find(c"libno-such-library.so.1").is_none());
        let libc = Loaded::find(c"libc.so.6").unwrap();
        // SAFETY: getpid takes nothing and returns an int.
        let getpid = unsafe { libc.function::<unsafe extern "C" fn() -> i32>(c"getpid") }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { getpid() }.cast_unsigned(), std::process::id());
        // SAFETY: there is none, so nothing is made.
        assert!(unsafe { libc.function::<unsafe extern "C" fn()>(c"no_such_function") }.is_none());
    }
}
