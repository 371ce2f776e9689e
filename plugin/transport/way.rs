//! A way from one end of a connection to the other, as both threads of an end know it: what was counted on a queue pair,
//! and whether it was stopped.
//!
//! Each place among the lanes of a connection has two numbers, its own and the one with [`OTHER`], and so two ways, which
//! its queue pairs have by turns. A number is used again only when both ends have nothing left of its last queue pair,
//! and of the messages about it: so a number alone says which queue pair is meant.

use super::lane::PLACE;
use crate::verbs::qp::Fuse;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// In a number: the second of its place.
pub const OTHER: usize = PLACE + 1;

/// Where the way of a number is among those of so many places: their own, then the others. `None`: there is no such place.
pub(super) fn index(number: usize, places: usize) -> Option<usize> {
    let place = number & PLACE;
    let turn = if number & OTHER == 0 { 0 } else { places };
    (place < places && number <= PLACE | OTHER).then_some(place + turn)
}

/// The number of the way that is there.
pub(super) fn number(index: usize, places: usize) -> usize {
    if index < places { index } else { index - places + OTHER }
}

/// In the word of a way: it was stopped, and the count stays.
pub(super) const STOPPED: u32 = 1 << 31;

/// One way.
#[derive(Debug)]
pub(super) struct Way {
    /// Ends of parts, and [`STOPPED`].
    word: AtomicU32,
    /// The other end is not ready: nothing is posted on it.
    muted: AtomicBool,
    /// Nothing is left of a queue pair that was stopped, see [`super::recovery`].
    drained: AtomicBool,
    /// The rails that it joins.
    pub(super) rails: (usize, usize),
    /// The queue pair, as events call it; 0 without one.
    queue: AtomicUsize,
    pair: Mutex<Pair>,
}

/// What is known of the queue pair of a way.
#[derive(Debug, Default)]
struct Pair {
    fuse: Option<Fuse>,
    /// Both queue pairs and their addresses, for messages.
    text: String,
}

impl Way {
    /// Without a queue pair, and so stopped.
    pub(super) fn vacant(rails: (usize, usize)) -> Self {
        Self {
            word: AtomicU32::new(STOPPED),
            muted: AtomicBool::new(false),
            drained: AtomicBool::new(true),
            rails,
            queue: AtomicUsize::new(0),
            pair: Mutex::default(),
        }
    }

    fn pair(&self) -> MutexGuard<'_, Pair> {
        self.pair.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins anew with a queue pair, and nothing counted. `muted`: the other end is not ready yet.
    pub(super) fn begin(&self, fuse: Fuse, queue: usize, text: String, muted: bool) {
        *self.pair() = Pair { fuse: Some(fuse), text };
        self.queue.store(queue, Ordering::Release);
        self.muted.store(muted, Ordering::Release);
        self.drained.store(false, Ordering::Release);
        self.word.store(0, Ordering::Release);
    }

    /// Whether it was stopped.
    #[inline]
    pub(super) fn is_stopped(&self) -> bool {
        self.word.load(Ordering::Acquire) & STOPPED != 0
    }

    /// Whether something may be posted on it.
    pub(super) fn is_usable(&self) -> bool {
        !self.is_stopped() && !self.muted.load(Ordering::Acquire)
    }

    /// The other end is ready.
    pub(super) fn unmute(&self) {
        self.muted.store(false, Ordering::Release);
    }

    /// Counts the end of a part, unless it was stopped.
    #[inline]
    pub(super) fn count(&self) -> bool {
        let one_more = |word: u32| (word & STOPPED == 0).then(|| word.wrapping_add(1) & !STOPPED);
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }

    /// The count, which is final once it was stopped.
    pub(super) fn counted(&self) -> u32 {
        self.word.load(Ordering::Acquire) & !STOPPED
    }

    /// Stops it; the count, if it was not stopped before.
    pub(super) fn stop(&self) -> Option<u32> {
        let before = self.word.fetch_or(STOPPED, Ordering::AcqRel);
        if before & STOPPED != 0 {
            return None;
        }
        if let Some(fuse) = &self.pair().fuse
            && let Err(e) = fuse.blow()
        {
            // It is in error already, or the device is gone; then nothing comes in either.
            tracing::info!("{e}");
        }
        Some(before)
    }

    /// Nothing is left of its queue pair.
    pub(super) fn set_drained(&self) {
        self.queue.store(0, Ordering::Release);
        self.drained.store(true, Ordering::Release);
    }

    /// Whether nothing is left of its queue pair.
    pub(super) fn is_drained(&self) -> bool {
        self.drained.load(Ordering::Acquire)
    }

    /// Whether the device means its queue pair.
    pub(super) fn is_queue(&self, queue: usize) -> bool {
        queue != 0 && self.queue.load(Ordering::Acquire) == queue
    }

    /// Both queue pairs and their addresses.
    pub(super) fn text(&self) -> String {
        self.pair().text.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_and_their_places_agree(places in 1..=PLACE + 1, at in any::<prop::sample::Index>()) {
            let way = at.index(2 * places);
            let number = number(way, places);
            prop_assert!(u8::try_from(number).is_ok());
            prop_assert_eq!(index(number, places), Some(way));
            prop_assert_eq!(index(number ^ OTHER, places), Some((way + places) % (2 * places)));
            prop_assert_eq!(number & PLACE, way % places);
        }

        #[test]
        fn no_number_leads_elsewhere(places in 1..=PLACE + 1, number: u16) {
            let found = index(number.into(), places);
            prop_assert!(found.is_none_or(|way| way < 2 * places));
            prop_assert_eq!(found.is_some(), usize::from(number) & PLACE < places && number < 256);
        }
    }

    #[test]
    fn a_count_is_final_once_it_was_stopped() {
        let way = Way::vacant((0, 1));
        assert!(way.is_stopped() && way.is_drained() && !way.is_usable() && !way.count());
        assert_eq!(way.stop(), None);
        // As it begins, without a queue pair.
        way.muted.store(true, Ordering::Release);
        way.drained.store(false, Ordering::Release);
        way.word.store(0, Ordering::Release);
        assert!(!way.is_stopped() && !way.is_usable());
        assert!(way.count() && way.count());
        way.unmute();
        assert!(way.is_usable());
        assert_eq!((way.stop(), way.stop()), (Some(2), None));
        assert!(!way.count() && way.counted() == 2 && !way.is_drained());
        way.set_drained();
        assert!(way.is_drained());
    }

    #[test]
    fn counts_wrap_below_the_bit() {
        let way = Way::vacant((0, 0));
        way.word.store(STOPPED - 1, Ordering::Release);
        assert!(way.count());
        assert_eq!((way.counted(), way.is_stopped()), (0, false));
    }

    #[test]
    fn a_queue_that_is_no_more_is_not_meant() {
        let way = Way::vacant((0, 0));
        assert!(!way.is_queue(0));
        way.queue.store(77, Ordering::Release);
        assert!(way.is_queue(77) && !way.is_queue(78));
        way.set_drained();
        assert!(!way.is_queue(77));
    }
}
