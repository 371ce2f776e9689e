//! Ends that nobody asks for anything.
//!
//! A credit that is lost breaks its queue pair, and the completion says so to whoever polls. After a receive that was
//! complete at once nobody does, while the other end waits for that credit. So the event thread asks for the state of the
//! queue pairs of a receiving end that posts nothing: not for its completions, which belong to the thread that moves data.

use crate::verbs::qp::Fuse;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the state is asked for while nothing is posted. A device may take four times as long to give up as it was told.
const LOOKS: u32 = 4;

/// The queue pairs of an end, and when they are looked at.
#[derive(Clone, Debug)]
pub struct Idle {
    queues: Arc<[Fuse]>,
    /// How long a device tries before it gives up.
    patience: Duration,
    /// What was posted when something was posted last, and since when.
    posted: u32,
    since: Instant,
    looks: u32,
}

impl Idle {
    /// Of an end with these queue pairs, whose devices give up after `patience`.
    pub(super) fn new(queues: impl Iterator<Item = Fuse>, patience: Duration) -> Self {
        Self { queues: queues.collect(), patience, posted: 0, since: Instant::now(), looks: 0 }
    }

    /// Whether it is time to look again: nothing was posted for as long as a device tries, twice, four and eight times as
    /// long.
    fn is_due(&mut self, posted: u32, now: Instant) -> bool {
        if posted != self.posted {
            (self.posted, self.since, self.looks) = (posted, now, 0);
        }
        let wait = self.patience.saturating_mul(1 << self.looks);
        let due = posted != 0 && self.looks < LOOKS && now.duration_since(self.since) > wait;
        self.looks += u32::from(due);
        due
    }

    /// Whether a queue pair is found to have failed, with so many receives posted by now.
    pub(super) fn has_failed(&mut self, posted: u32, now: Instant) -> bool {
        self.is_due(posted, now) && self.queues.iter().any(Fuse::is_blown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_end_is_looked_at_a_few_times() {
        let mut idle = Idle::new(std::iter::empty(), Duration::from_secs(10));
        let start = idle.since;
        let mut dues = |posted: u32, seconds: std::ops::Range<u64>| -> Vec<u64> {
            seconds.filter(|s| idle.is_due(posted, start + Duration::from_secs(*s))).collect()
        };
        assert_eq!(dues(0, 0..100), Vec::<u64>::new(), "nothing can have been lost");
        assert_eq!(dues(5, 100..300), [111, 121, 141, 181]);
        assert_eq!(dues(6, 300..312), [311]);
        assert_eq!(dues(7, 312..330), [323]);
    }
}
