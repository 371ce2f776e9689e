//! The plugin's one thread, made so that the library can be unloaded.
//!
//! `std::thread::spawn` leaves a thread-local destructor of this library behind on the calling thread, which keeps the
//! library mapped until that thread ends. NCCL unloads plugins from threads that live on, so the thread is made with
//! pthread_create. All signals are blocked in it: they belong to the application's threads.

use crate::error::{Error, Result};
use crate::library::Library;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

type Body = Box<dyn FnOnce() + Send>;

/// A running thread. Must be joined: dropping it without is a bug that is logged.
#[derive(Debug)]
pub struct Thread {
    id: libc::pthread_t,
    joined: bool,
    // Given back after the thread has ended.
    _library: Option<Library>,
}

impl Thread {
    /// Starts a thread with a name of at most 15 bytes.
    ///
    /// # Errors
    /// The process may not have more threads.
    pub fn spawn(name: &std::ffi::CStr, body: impl FnOnce() + Send + 'static) -> Result<Self> {
        // Before the thread exists: it may be scheduled at any time.
        let library = Library::own();
        let body: Box<Body> = Box::new(Box::new(body));
        let argument = Box::into_raw(body);
        let mut id = MaybeUninit::<libc::pthread_t>::uninit();
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut old = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the sets are filled before they are read; the new thread inherits the mask of this one, which is
        // restored at once.
        let rc = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
            let rc = libc::pthread_create(id.as_mut_ptr(), ptr::null(), run, argument.cast());
            libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), ptr::null_mut());
            rc
        };
        if rc != 0 {
            // SAFETY: no thread took the argument.
            drop(unsafe { Box::from_raw(argument) });
            return Err(Error::io("pthread_create", &std::io::Error::from_raw_os_error(rc)));
        }
        // SAFETY: pthread_create succeeded, so the identifier is written; the name is NUL-terminated.
        let id = unsafe { id.assume_init() };
        // SAFETY: the thread is not joined yet; a name that is too long is refused, which does no harm.
        unsafe { libc::pthread_setname_np(id, name.as_ptr()) };
        Ok(Self { id, joined: false, _library: library })
    }

    /// Waits until the thread has ended.
    pub fn join(mut self) {
        self.joined = true;
        // SAFETY: joined once, here.
        unsafe { libc::pthread_join(self.id, ptr::null_mut()) };
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if !self.joined {
            tracing::warn!("a thread of the plugin was not joined");
        }
    }
}

extern "C" fn run(argument: *mut c_void) -> *mut c_void {
    // SAFETY: the box made in `spawn`, given to exactly this thread.
    let body = unsafe { Box::from_raw(argument.cast::<Body>()) };
    // A panic must not unwind into libc. The panic hook has told what happened.
    if catch_unwind(AssertUnwindSafe(body)).is_err() {
        tracing::warn!("the event thread ended by a panic; peers are no longer watched");
    }
    ptr::null_mut()
}
