//! A reference on the shared object that this code is in: it stays mapped while something needs it, even if the
//! application unloads it meanwhile.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

/// One reference, given back when dropped. Whoever drops it must know that it is not the last one.
#[derive(Debug)]
pub struct Library(NonNull<c_void>);

// SAFETY: a dlopen handle may be closed on any thread.
unsafe impl Send for Library {}

impl Library {
    /// Another reference. `None` where this code is part of the program itself.
    pub fn own() -> Option<Self> {
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: the address of a function of this object, and a valid out-pointer.
        let found = unsafe { libc::dladdr(Self::own as *const c_void, info.as_mut_ptr()) };
        // SAFETY: all-zero is a value of this struct of pointers; dladdr filled it if it found something.
        let info = unsafe { info.assume_init() };
        if found == 0 || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the loader's own name of the object, NUL-terminated; NOLOAD only takes a reference.
        let handle = unsafe { libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        NonNull::new(handle).map(Self)
    }

    /// The handle, for whoever gives the reference back by a call of dlclose that does not return here: this may be the
    /// last one.
    pub fn into_raw(self) -> *mut c_void {
        let handle = self.0.as_ptr();
        std::mem::forget(self);
        handle
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle came from dlopen and is closed once. Not the last reference: whoever called into this
        // object holds another.
        unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}
