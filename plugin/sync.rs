//! Atomics, and how memory is read that somebody else writes.
//!
//! Under `cfg(loom)` the atomics are the model checker's, and `tests/loom` checks the protocols of this file in every
//! order that the memory model allows. Nothing here assumes that stores become visible in program order.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// How the word is written that says what was written before it may be read. An adapter's last eight bytes of an
/// aligned half, and the completion after its data, count as such a write.
pub const PUBLISH: Ordering = Ordering::Release;

/// How that word is read before anything that it vouches for.
pub const OBSERVE: Ordering = Ordering::Acquire;

/// Words of one half of a credit entry.
pub const HALF_WORDS: usize = 4;

/// The words of a half if its last one, which is looked at first, is `complete`.
#[inline(always)]
pub fn read_half<'a>(
    word: impl Fn(usize) -> &'a AtomicU64,
    complete: impl FnOnce(u64) -> bool,
) -> Option<[u64; HALF_WORDS]> {
    let last = word(HALF_WORDS - 1).load(OBSERVE);
    complete(last).then(|| {
        let early = |index: usize| word(index).load(Ordering::Relaxed);
        [early(0), early(1), early(2), last]
    })
}
