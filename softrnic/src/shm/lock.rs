//! A lock in shared memory that survives the death of its holder.
//!
//! The word holds the owner's identity (directory slot and its generation). Whoever waits too long asks the
//! directory whether that owner still lives and takes the lock over if not. Every critical section is written so
//! that a holder that dies anywhere inside leaves either the old or the new state: the last store publishes.

use std::sync::atomic::{AtomicU32, Ordering};

/// Spins before the waiter starts to yield.
const SPINS: u32 = 64;
/// Yields between two checks of the owner's life.
const YIELDS: u32 = 32;

/// The lock word; zero is free.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct RobustLock(AtomicU32);

/// Releases the lock on drop.
#[derive(Debug)]
pub struct Guard<'a> {
    lock: &'a RobustLock,
    me: u32,
}

impl RobustLock {
    /// Takes the lock for `me` (non-zero). `alive` says whether another owner still runs.
    pub fn lock(&self, me: u32, alive: impl Fn(u32) -> bool) -> Guard<'_> {
        // SeqCst, because the holder's later loads must not move before this store: deregistration stores "key
        // invalid" and then looks at this word, and one of the two sides has to see the other.
        if self.0.compare_exchange(0, me, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            self.contended(me, alive);
        }
        Guard { lock: self, me }
    }

    #[cold]
    fn contended(&self, me: u32, alive: impl Fn(u32) -> bool) {
        let mut round = 0_u32;
        loop {
            let owner = self.0.load(Ordering::Relaxed);
            let takeover =
                owner != 0 && round > SPINS && round.is_multiple_of(YIELDS) && !alive(owner);
            if (owner == 0 || takeover)
                && self.0.compare_exchange(owner, me, Ordering::SeqCst, Ordering::Relaxed).is_ok()
            {
                return;
            }
            round = round.wrapping_add(1);
            if round < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Waits until nobody who holds the lock now is still inside.
    pub fn quiesce(&self, me: u32, alive: impl Fn(u32) -> bool) {
        // Pairs with the SeqCst exchange in `lock`.
        if self.0.load(Ordering::SeqCst) != 0 {
            drop(self.lock(me, alive));
        }
    }

    /// Forgets any holder; only for a slot that is being set up.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // A failed exchange means that somebody declared us dead or corrupted the word: then it is not ours to free.
        let _ = self.lock.0.compare_exchange(self.me, 0, Ordering::Release, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_owner_is_replaced_and_cannot_unlock() {
        let lock = RobustLock::default();
        let dead = lock.lock(7, |_| true);
        let mine = lock.lock(9, |owner| owner != 7);
        drop(dead);
        assert_eq!(
            lock.0.load(Ordering::Relaxed),
            9,
            "the old owner must not free the new owner's lock"
        );
        drop(mine);
        assert_eq!(lock.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn threads_exclude_each_other() {
        let lock = RobustLock::default();
        let value = std::cell::Cell::new(0_u64);
        struct Share<'a>(&'a std::cell::Cell<u64>);
        // SAFETY: the cell is only touched under the lock that this test checks.
        unsafe impl Sync for Share<'_> {}
        let share = &Share(&value);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..10_000 {
                        let _g = lock.lock(3, |_| true);
                        let Share(cell) = share;
                        cell.set(cell.get() + 1);
                    }
                });
            }
        });
        assert_eq!(value.get(), 40_000);
    }
}
