//! What the thread that moves data does about lanes that were stopped, alike at both ends: it waits until both ends have
//! told their counts, and knows which lanes it has.

use super::comm::Peer;
use super::failover::Failover;
use super::lane::PLACE;
use super::way::STOPPED;
use crate::error::{Error, Result};
use std::time::Instant;

/// What ends a connection that rails have failed. `left`: some go on.
fn given_up(peer: &Peer, why: &str, left: bool) -> Error {
    Error::remote(if left {
        format!(
            "{why}; the other end did not tell in {:?} what it has received (PINRAIL_FAILOVER_TIMEOUT)",
            peer.failures.answer
        )
    } else {
        format!("{peer}: no rail is left; the first that failed: {why}")
    })
}

/// How many of the `waiting` ends of parts behind the `ours` that this end counts the other end has in its count.
///
/// # Errors
/// It counts ends that never were.
pub(super) fn ahead(ours: u32, theirs: u32, waiting: usize) -> Result<usize> {
    let ahead = theirs.wrapping_sub(ours) & !STOPPED;
    // Counts wrap; the other end may also be behind.
    if ahead >= STOPPED / 2 {
        return Ok(0);
    }
    let ahead = ahead as usize;
    if ahead > waiting {
        return Err(Error::remote(format!(
            "{ahead} parts more were counted than the {waiting} that can be"
        )));
    }
    Ok(ahead)
}

/// What the thread that moves data has still to settle about lanes that were stopped, and which lanes it has.
#[derive(Debug)]
pub(super) struct Settling {
    /// For each place the number of its lane.
    numbers: Box<[usize]>,
    settled: Box<[bool]>,
    /// Lanes may have been stopped.
    pub(super) busy: bool,
    since: Option<Instant>,
}

impl Settling {
    pub(super) fn new(lanes: usize) -> Self {
        let (numbers, settled) = ((0..lanes).collect(), vec![false; lanes].into());
        Self { numbers, settled, busy: false, since: None }
    }

    /// The number of the lane in a place.
    pub(super) fn number(&self, place: usize) -> usize {
        self.numbers[place]
    }

    /// Where the lane with this number is, if this end has it.
    pub(super) fn place(&self, number: usize) -> Option<usize> {
        let place = number & PLACE;
        (self.numbers.get(place) == Some(&number)).then_some(place)
    }

    /// Another lane is in the place of one that was settled.
    pub(super) fn renew(&mut self, number: usize) {
        let place = number & PLACE;
        if let (Some(known), Some(settled)) =
            (self.numbers.get_mut(place), self.settled.get_mut(place))
        {
            (*known, *settled) = (number, false);
            self.busy = true;
        }
    }

    /// The first place from `place` on whose lane may be posted on.
    pub(super) fn pick(&self, shared: &Failover, place: usize) -> Option<usize> {
        let count = self.numbers.len();
        let places = (0..count).map(|step| (place + step) % count);
        places.into_iter().find(|place| shared.is_usable(self.numbers[*place]))
    }

    /// Whether it is decided what of the lane in a place was delivered.
    pub(super) fn is_settled(&self, place: usize) -> bool {
        self.settled[place]
    }

    /// The places of lanes that can be settled now, with the other end's counts, and whether others are waited for: it has
    /// to tell, and here a lane must be quiet.
    ///
    /// # Errors
    /// No lane is left, or it took too long.
    pub(super) fn look(
        &mut self,
        shared: &Failover,
        peer: &Peer,
        is_quiet: impl Fn(usize) -> bool,
    ) -> Result<(Vec<(usize, u32)>, bool)> {
        let stopped =
            |place: &usize| !self.settled[*place] && shared.is_stopped(self.numbers[*place]);
        let open = (0..self.settled.len()).filter(stopped);
        let (mut now, mut waiting) = (Vec::new(), false);
        for place in open {
            match shared.theirs(self.numbers[place]).filter(|_| is_quiet(place)) {
                Some(theirs) => now.push((place, theirs)),
                None => waiting = true,
            }
        }
        let patience = self.since.get_or_insert_with(Instant::now).elapsed() < peer.failures.answer;
        if !waiting {
            self.since = None;
        }
        let left = shared.is_any_left();
        // What the other end counted when it closed may be all that is missing.
        if (!left && !shared.is_closed()) || (waiting && !patience) {
            return Err(given_up(peer, &shared.why(), left));
        }
        now.iter().for_each(|(place, _)| self.settled[*place] = true);
        Ok((now, waiting))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_compare_across_the_wrap(ours in 0..STOPPED, ahead_by in 0..100_u32, behind_by in 1..100_u32) {
            let theirs = ours.wrapping_add(ahead_by) & !STOPPED;
            prop_assert_eq!(ahead(ours, theirs, 100).unwrap(), ahead_by as usize);
            let theirs = ours.wrapping_sub(behind_by) & !STOPPED;
            prop_assert_eq!(ahead(ours, theirs, 0).unwrap(), 0);
        }
    }

    #[test]
    fn parts_that_never_were_are_an_error() {
        assert!(ahead(5, 8, 2).is_err());
        assert_eq!(ahead(5, 7, 2).unwrap(), 2);
    }
}
