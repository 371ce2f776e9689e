//! What the threads of one connection tell each other and the other end.
//!
//! The side channel belongs to the event thread. Others leave their messages here and wake it.

use super::wire::Message;
use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes of a reason that are kept.
const LONGEST: usize = 1024;

/// The messages of one connection. Empty until it is watched and again after each look of the event thread.
#[derive(Default)]
pub struct Mail {
    out: Mutex<Vec<Message>>,
    reason: OnceLock<String>,
    waker: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Mail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mail").field("out", &self.out).finish_non_exhaustive()
    }
}

impl Mail {
    /// How to make the event thread look here.
    pub(super) fn set_waker(&self, wake: impl Fn() + Send + Sync + 'static) {
        // Given once, when the watch begins.
        let _ = self.waker.set(Box::new(wake));
    }

    fn out(&self) -> MutexGuard<'_, Vec<Message>> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a message for the other end.
    pub(super) fn post(&self, message: Message) {
        self.out().push(message);
        self.wake();
    }

    /// Makes the event thread look here, if it watches yet.
    pub(super) fn wake(&self) {
        if let Some(wake) = self.waker.get() {
            wake();
        }
    }

    /// What is to be sent.
    pub(super) fn take(&self) -> Vec<Message> {
        std::mem::take(&mut self.out())
    }

    /// The other end failed, and said why. The first reason stays.
    pub(super) fn set_reason(&self, mut reason: String) {
        let end = (0..=LONGEST.min(reason.len())).rev().find(|end| reason.is_char_boundary(*end));
        reason.truncate(end.unwrap_or(0));
        let _ = self.reason.set(reason);
    }

    /// Why the other end failed.
    pub(super) fn reason(&self) -> &str {
        self.reason.get().map_or("", String::as_str)
    }
}
