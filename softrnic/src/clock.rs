//! The time that limits and delays are measured in: the machine's, or in the stepped engine a virtual one that only
//! steps move.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::env::{Engine, settings};

static VIRTUAL: AtomicU64 = AtomicU64::new(0);

/// Nanoseconds since some fixed moment.
pub fn now() -> u64 {
    if settings().engine == Engine::Stepped {
        return VIRTUAL.load(Ordering::Relaxed);
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is our own.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// Moves the virtual clock; the machine's is left alone.
pub fn advance(ns: u64) {
    VIRTUAL.fetch_add(ns, Ordering::Relaxed);
}

/// Sets the virtual clock to its beginning.
pub fn restart() {
    VIRTUAL.store(0, Ordering::Relaxed);
}

/// A duration in nanoseconds.
pub fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
