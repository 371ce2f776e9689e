//! A library that the process has loaded already, and functions in it.

use std::ffi::{CStr, c_void};
use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::OnceLock;

/// The CUDA driver.
pub(super) static CUDA: Library = Library::new(c"libcuda.so.1");
/// NVML.
pub(super) static NVML: Library = Library::new(c"libnvidia-ml.so.1");

/// A library that somebody else may load.
#[derive(Debug)]
pub(super) struct Library {
    name: &'static CStr,
    found: OnceLock<Loaded>,
}

/// A library that somebody else has loaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loaded(NonNull<c_void>);

// SAFETY: a handle is a name in the dynamic linker, which any thread may use.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Library {
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: OnceLock::new() }
    }

    /// The library, if it is there; it is never loaded from here. It is looked for until it is found. One reference is
    /// kept, so that functions stay where they are: these libraries are not made to be unloaded.
    pub(super) fn loaded(&self) -> Option<Loaded> {
        if let Some(library) = self.found.get() {
            return Some(*library);
        }
        // SAFETY: a NUL-terminated name; NOLOAD only looks.
        let library =
            unsafe { libc::dlopen(self.name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        let library = Loaded(NonNull::new(library)?);
        if self.found.set(library).is_err() {
            // SAFETY: gives back the reference that was taken above; another thread was first and keeps its own.
            unsafe { libc::dlclose(library.0.as_ptr()) };
        }
        Some(library)
    }
}

impl Loaded {
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
    fn one_reference_is_kept_however_often_it_is_asked_for() {
        // Of the C library, and used by nobody.
        static UNUSED: Library = Library::new(c"libBrokenLocale.so.1");
        let name = UNUSED.name.as_ptr();
        assert!(UNUSED.loaded().is_none(), "this test needs a library that is not loaded");
        // SAFETY: a NUL-terminated name of a library whose initialisers do nothing.
        let library = unsafe { libc::dlopen(name, libc::RTLD_NOW) };
        assert!(!library.is_null());
        let threads = [(); 4].map(|()| {
            std::thread::spawn(|| [(); 5].map(|()| UNUSED.loaded().unwrap().0.as_ptr().addr()))
        });
        for thread in threads {
            assert_eq!(thread.join().unwrap(), [library.addr(); 5]);
        }
        // SAFETY: as above; NOLOAD only looks.
        let look = || unsafe { libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        let mut references = 0;
        while let Some(handle) = NonNull::new(look()) {
            // SAFETY: gives back the reference of looking and one that was there before; nobody uses the library.
            unsafe { [libc::dlclose(handle.as_ptr()), libc::dlclose(handle.as_ptr())] };
            references += 1;
        }
        assert_eq!(references, 2, "this test's and the one that is kept");
    }

    #[test]
    fn only_what_is_loaded_is_found() {
        assert!(Library::new(c"libno-such-library.so.1").loaded().is_none());
        let libc = Library::new(c"libc.so.6").loaded().unwrap();
        // SAFETY: getpid takes nothing and returns an int.
        let getpid = unsafe { libc.function::<unsafe extern "C" fn() -> i32>(c"getpid") }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { getpid() }.cast_unsigned(), std::process::id());
        // SAFETY: there is none, so nothing is made.
        assert!(unsafe { libc.function::<unsafe extern "C" fn()>(c"no_such_function") }.is_none());
    }
}
