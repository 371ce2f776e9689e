//! SIGUSR2 as a request to write down the status. The handler sets a flag and does nothing else; the event thread serves it.
//!
//! A handler that the program has is left alone. Ours is taken back with the last connection, unless the program replaced it;
//! but a signal may have been on its way then, and a program may have kept our handler to put it back later. So the library
//! stays loaded once there was one.

use crate::library::Library;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);

/// Whether somebody asked since the last time.
pub fn was_asked() -> bool {
    ASKED.swap(false, Ordering::Relaxed)
}

/// The handler in its place; taken back when dropped.
#[derive(Debug)]
pub struct Handler(());

extern "C" fn on_signal(_: c_int) {
    ASKED.store(true, Ordering::Relaxed);
}

fn ours() -> usize {
    on_signal as *const () as usize
}

/// What the program does on the signal; and does now, if there is something new.
fn exchange(new: Option<&libc::sigaction>) -> std::io::Result<libc::sigaction> {
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: NULL or a whole action, and a valid out-pointer.
    if unsafe { libc::sigaction(libc::SIGUSR2, new, old.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the call succeeded and filled it.
    Ok(unsafe { old.assume_init() })
}

fn action(handler: usize) -> libc::sigaction {
    // SAFETY: all zeroes are an action: the default, with an empty mask.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_RESTART;
    action
}

impl Handler {
    /// Puts the handler in its place. `None`: the program has one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn install() -> std::io::Result<Option<Self>> {
        if exchange(None)?.sa_sigaction != libc::SIG_DFL {
            return Ok(None);
        }
        // Never given back, see above.
        std::mem::forget(Library::own());
        let old = exchange(Some(&action(ours())))?;
        if old.sa_sigaction != libc::SIG_DFL && old.sa_sigaction != ours() {
            // The program was faster.
            exchange(Some(&old))?;
            return Ok(None);
        }
        Ok(Some(Self(())))
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        let still = exchange(None).is_ok_and(|action| action.sa_sigaction == ours());
        if still && let Err(e) = exchange(Some(&action(libc::SIG_DFL))) {
            tracing::warn!("the handler of SIGUSR2 stays: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test: the signal belongs to the whole process.
    #[test]
    fn only_a_signal_without_a_handler_is_taken_and_it_is_given_back() {
        let handler = Handler::install().unwrap().unwrap();
        assert!(!was_asked());
        // SAFETY: there is a handler.
        unsafe { libc::raise(libc::SIGUSR2) };
        assert!(was_asked() && !was_asked());
        drop(handler);
        assert_eq!(exchange(None).unwrap().sa_sigaction, libc::SIG_DFL);
        // Somebody else's is left alone, before and afterwards.
        exchange(Some(&action(libc::SIG_IGN))).unwrap();
        assert!(Handler::install().unwrap().is_none());
        exchange(Some(&action(libc::SIG_DFL))).unwrap();
        let handler = Handler::install().unwrap().unwrap();
        exchange(Some(&action(libc::SIG_IGN))).unwrap();
        drop(handler);
        assert_eq!(exchange(None).unwrap().sa_sigaction, libc::SIG_IGN);
        exchange(Some(&action(libc::SIG_DFL))).unwrap();
    }
}
