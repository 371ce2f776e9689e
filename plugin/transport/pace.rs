//! When requests were posted, as the event thread saw it.
//!
//! Nobody reads a clock when a message is posted. A sending end stores how many receives it has answered, the credits of a
//! receiving end are numbered anyway, and the event thread looks once in a while. So how long ago one was posted is known from one look to the next, which is all that
//! matters when a device gives up after many seconds.

use super::fifo::SLOTS;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Changes that are kept. A request that is not complete lets fewer than SLOTS others begin behind it.
const KEPT: usize = SLOTS + 1;

/// What was seen of one end.
#[derive(Debug)]
pub struct Pace(Mutex<Seen>);

#[derive(Debug)]
struct Seen {
    /// Oldest first.
    changes: VecDeque<Change>,
    count: u32,
    looked: Instant,
}

/// A look that found more than the one before.
#[derive(Clone, Copy, Debug)]
struct Change {
    count: u32,
    before: Instant,
    at: Instant,
}

/// How long ago something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age {
    /// At least.
    pub least: Duration,
    /// At most.
    pub most: Duration,
}

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = self.most.as_secs() + 1;
        match self.least.as_secs() {
            0 => write!(f, "less than {most} s ago"),
            least => write!(f, "{least} to {most} s ago"),
        }
    }
}

impl Default for Pace {
    fn default() -> Self {
        let changes = VecDeque::with_capacity(KEPT);
        Self(Mutex::new(Seen { changes, count: 0, looked: Instant::now() }))
    }
}

impl Pace {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The event thread looks: `count` were posted by now.
    pub fn look(&self, count: u32, now: Instant) {
        let mut seen = self.seen();
        if count != seen.count {
            if seen.changes.len() == KEPT {
                seen.changes.pop_front();
            }
            let before = seen.looked;
            seen.changes.push_back(Change { count, before, at: now });
            seen.count = count;
        }
        seen.looked = now;
    }

    /// How long ago request `number`, counted from 0, was posted.
    pub fn age(&self, number: u32, now: Instant) -> Age {
        let seen = self.seen();
        // Counts wrap.
        let posted = |change: &&Change| change.count.wrapping_sub(number).cast_signed() > 0;
        let (least, most) = match seen.changes.iter().find(posted) {
            Some(change) => (now.duration_since(change.at), now.duration_since(change.before)),
            None => (Duration::ZERO, now.duration_since(seen.looked)),
        };
        Age { least, most }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn ages(pace: &Pace, now: Instant, numbers: &[u32]) -> Vec<(u64, u64)> {
        let age = |number: &u32| pace.age(*number, now);
        numbers.iter().map(age).map(|age| (age.least.as_secs(), age.most.as_secs())).collect()
    }

    #[test]
    fn a_request_is_as_old_as_the_look_that_saw_it_first() {
        let pace = Pace::default();
        let start = pace.seen().looked;
        for (second, count) in [(1, 0), (2, 5), (3, 5), (4, 7)] {
            pace.look(count, start + second * SECOND);
        }
        let now = start + 10 * SECOND;
        assert_eq!(
            ages(&pace, now, &[0, 4, 5, 6, 7]),
            [(8, 9), (8, 9), (6, 7), (6, 7), (0, 6)],
            "{pace:?}"
        );
        assert_eq!(pace.age(4, now).to_string(), "8 to 10 s ago");
        assert_eq!(pace.age(7, now).to_string(), "less than 7 s ago");
    }

    #[test]
    fn counts_wrap_and_only_what_can_be_asked_for_is_kept() {
        let pace = Pace::default();
        let start = pace.seen().looked;
        let first = u32::MAX - 50;
        for step in 0..200_u32 {
            pace.look(first.wrapping_add(step), start + step * SECOND);
        }
        let last = first.wrapping_add(199);
        let now = start + 300 * SECOND;
        // The request number 31 below the newest is the oldest that can be in flight.
        let oldest = last.wrapping_sub(SLOTS as u32);
        assert_eq!(ages(&pace, now, &[last.wrapping_sub(1), oldest]), [(101, 102), (132, 133)]);
        assert_eq!(pace.seen().changes.len(), KEPT);
    }
}
