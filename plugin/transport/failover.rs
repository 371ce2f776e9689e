//! Going on over the other rails when one fails, with every message delivered exactly once.
//!
//! Both ends of a lane count the ends of parts in the order in which they went over it: the sender those that were
//! acknowledged, the receiver those that it has taken. Stopping a lane freezes an end's count, in one atomic step, and
//! moves its queue pair to error, after which nothing comes in any more. Each end tells the other its count over the side
//! channel. What is within either count is delivered: the receiver takes it even now, and the sender asks no more for
//! it. What is beyond both is sent again over another lane. A lane that was stopped is never used again.
//!
//! The event thread answers for an end that nobody drives at the moment: a receiver that has all its data is not asked
//! for more, while the sender still waits to hear so.

use super::comm::Peer;
use super::lane::Lane;
use super::mail::Mail;
use super::wire::Message;
use crate::error::{Error, Result};
use crate::memory::{Gate, GateState};
use crate::verbs::cq::status_name;
use crate::verbs::qp::Fuse;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// In the word of a lane: it was stopped, and the count stays.
const STOPPED: u32 = 1 << 31;

/// What one end knows of its lanes, for the thread that moves data and the event thread.
#[derive(Debug)]
pub struct Failover {
    lanes: Box<[Way]>,
    told: Mutex<Told>,
    gate: Gate,
    mail: Arc<Mail>,
    /// For messages.
    peer: String,
    /// Queue pairs of flushes, as events call them, with their rails.
    flushes: Box<[(usize, usize)]>,
    /// The other end closed.
    closed: AtomicBool,
}

/// One lane.
#[derive(Debug)]
struct Way {
    /// Ends of parts, and [`STOPPED`].
    word: AtomicU32,
    fuse: Fuse,
    /// The rails that it joins.
    rails: (usize, usize),
    queue: usize,
}

/// What both ends said.
#[derive(Debug)]
struct Told {
    /// What the other end counted on lanes that it stopped.
    theirs: Box<[Option<u32>]>,
    /// The first reason.
    why: Option<String>,
}

/// Whether another rail may do better: the path failed, or the queue pair, and not what was asked of it.
pub(super) fn is_survivable(status: u32) -> bool {
    matches!(status_name(status), "RETRY_EXC_ERR" | "WR_FLUSH_ERR" | "RESP_TIMEOUT_ERR")
}

/// Why lanes are stopped.
pub(super) fn failed_by(peer: &Peer, lane: usize, status: u32) -> String {
    format!("{peer}: {}: IBV_WC_{}", peer.way(lane), status_name(status))
}

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

impl Failover {
    /// Of an end with these lanes; `None` where they join one pair of rails only.
    pub(super) fn new(
        lanes: &mut [Lane],
        flushes: Box<[(usize, usize)]>,
        gate: &Gate,
        peer: &Peer,
    ) -> Option<Arc<Self>> {
        let ways: Box<[_]> = lanes
            .iter_mut()
            .map(|lane| Way {
                word: AtomicU32::new(0),
                rails: (lane.rail, lane.remote_rail),
                queue: lane.qp().identity(),
                fuse: lane.fuse(),
            })
            .collect();
        let first = ways.first()?.rails;
        let told = Told { theirs: vec![None; ways.len()].into(), why: None };
        ways.iter().any(|way| way.rails != first).then(|| {
            let (told, mail) = (Mutex::new(told), Arc::clone(&peer.mail));
            Arc::new(Self {
                lanes: ways,
                told,
                gate: gate.clone(),
                mail,
                peer: peer.to_string(),
                flushes,
                closed: AtomicBool::new(false),
            })
        })
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a lane was stopped.
    #[inline]
    pub(super) fn is_stopped(&self, lane: usize) -> bool {
        self.lanes.get(lane).is_none_or(|way| way.word.load(Ordering::Acquire) & STOPPED != 0)
    }

    /// Whether the lanes of a local rail were all stopped.
    pub(super) fn is_rail_stopped(&self, rail: usize) -> bool {
        let lanes = 0..self.lanes.len();
        lanes.filter(|lane| self.lanes[*lane].rails.0 == rail).all(|lane| self.is_stopped(lane))
    }

    /// The first lane from `lane` on that was not stopped.
    pub(super) fn pick(&self, lane: usize) -> Option<usize> {
        let count = self.lanes.len();
        (0..count).map(|step| (lane + step) % count).find(|lane| !self.is_stopped(*lane))
    }

    /// Counts the end of a part, unless the lane was stopped.
    #[inline]
    pub(super) fn count(&self, lane: usize) -> bool {
        let Some(way) = self.lanes.get(lane) else { return false };
        let one_more = |word: u32| (word & STOPPED == 0).then(|| word.wrapping_add(1) & !STOPPED);
        way.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }

    /// The count of a lane that was stopped.
    pub(super) fn counted(&self, lane: usize) -> u32 {
        self.lanes.get(lane).map_or(0, |way| way.word.load(Ordering::Acquire) & !STOPPED)
    }

    /// What the other end counted, if it has stopped the lane too.
    pub(super) fn theirs(&self, lane: usize) -> Option<u32> {
        self.told().theirs.get(lane).copied().flatten()
    }

    /// Why lanes were stopped at first.
    pub(super) fn why(&self) -> String {
        self.told().why.clone().unwrap_or_default()
    }

    /// Stops the lanes that join the same rails as `lane`. `false`: no lane would be left, and nothing was done.
    pub(super) fn stop_like(&self, lane: usize, why: impl FnOnce() -> String) -> bool {
        let Some(rails) = self.lanes.get(lane).map(|way| way.rails) else { return false };
        self.stop_all(|way| way.rails == rails, why)
    }

    /// Stops the lanes of a local rail. `false`: no lane would be left, and nothing was done.
    pub(super) fn stop_rail(&self, rail: usize, why: impl FnOnce() -> String) -> bool {
        self.stop_all(|way| way.rails.0 == rail, why)
    }

    /// Stops the lanes that are like the one whose queue pair the device reported, or those of the rail that it flushes.
    /// `false`: it is of neither kind, or no lane would be left.
    pub(super) fn stop_queue(&self, queue: usize, event: &str) -> bool {
        let why = || format!("{}: IBV_EVENT_{event}", self.peer);
        let lane = self.lanes.iter().position(|way| way.queue == queue);
        let rail = self.flushes.iter().find(|(known, _)| *known == queue).map(|(_, rail)| *rail);
        let stopped = match (lane, rail) {
            (Some(lane), _) => self.stop_like(lane, why),
            (None, Some(rail)) => self.stop_rail(rail, why),
            (None, None) => false,
        };
        if stopped {
            self.gate.report(GateState::Rerouted);
        }
        stopped
    }

    fn stop_all(&self, which: impl Fn(&Way) -> bool, why: impl FnOnce() -> String) -> bool {
        let (all, count) = (0..self.lanes.len(), self.lanes.len());
        let left = all.clone().filter(|lane| !self.is_stopped(*lane));
        let left = left.filter(|lane| !which(&self.lanes[*lane])).count();
        if left == 0 {
            return false;
        }
        let stopped = self.stop(all.filter(|lane| which(&self.lanes[*lane])));
        if stopped > 0 {
            let why = why();
            tracing::warn!(
                "{why}: {stopped} queue pairs are not used any more, {left} of {count} go on"
            );
            self.told().why.get_or_insert(why);
        }
        true
    }

    /// Stops lanes and tells the other end; how many were not stopped before.
    fn stop(&self, lanes: impl Iterator<Item = usize>) -> usize {
        let stopped = self.freeze(lanes);
        let count = stopped.len();
        if count > 0 {
            self.mail.post(Message::Stopped(stopped));
        }
        count
    }

    /// Stops lanes; those that were not before, with their counts.
    fn freeze(&self, lanes: impl Iterator<Item = usize>) -> Vec<(u8, u32)> {
        let mut stopped = Vec::new();
        for lane in lanes {
            let way = &self.lanes[lane];
            let before = way.word.fetch_or(STOPPED, Ordering::AcqRel);
            if before & STOPPED != 0 {
                continue;
            }
            if let Err(e) = way.fuse.blow() {
                // It is in error already, or the device is gone; then nothing comes in either.
                tracing::info!("{e}");
            }
            stopped.push((lane as u8, before));
        }
        stopped
    }

    /// What this end counted on each lane, which is final: it closes.
    pub(super) fn close(&self) -> Vec<(u8, u32)> {
        self.freeze(0..self.lanes.len());
        (0..self.lanes.len()).map(|lane| (lane as u8, self.counted(lane))).collect()
    }

    /// The other end closed and told its counts: what both ends counted together is all that will ever be delivered.
    /// Called by the event thread.
    pub(super) fn hear_last(&self, lanes: &[(u8, u32)]) {
        self.closed.store(true, Ordering::Release);
        self.note(lanes);
        self.freeze(0..self.lanes.len());
    }

    /// Whether the other end closed.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Takes note of what the other end counted.
    fn note(&self, lanes: &[(u8, u32)]) {
        let mut told = self.told();
        for (lane, count) in lanes {
            if let Some(theirs) = told.theirs.get_mut(usize::from(*lane)) {
                theirs.get_or_insert(*count & !STOPPED);
            }
        }
    }

    /// Takes note of what the other end stopped, and does the same. Called by the event thread.
    pub(super) fn hear(&self, lanes: &[(u8, u32)]) {
        self.note(lanes);
        let known = lanes.iter().map(|(lane, _)| usize::from(*lane));
        let stopped = self.stop(known.filter(|lane| *lane < self.lanes.len()));
        if stopped > 0 {
            let why = format!("{}: the peer gave up a rail", self.peer);
            tracing::warn!(
                "{why}: {stopped} of {} queue pairs are not used any more",
                self.lanes.len()
            );
            self.told().why.get_or_insert(why);
        }
        self.gate.report(GateState::Rerouted);
    }
}

/// What the thread that moves data has still to settle about lanes that were stopped.
#[derive(Debug)]
pub(super) struct Settling {
    settled: Box<[bool]>,
    /// Lanes may have been stopped.
    pub(super) busy: bool,
    since: Option<Instant>,
}

impl Settling {
    pub(super) fn new(lanes: usize) -> Self {
        Self { settled: vec![false; lanes].into(), busy: false, since: None }
    }

    /// Whether it is decided what of a lane was delivered.
    pub(super) fn is_settled(&self, lane: usize) -> bool {
        self.settled[lane]
    }

    /// The lanes that can be settled now, with the other end's counts, and whether others are waited for: it has to tell,
    /// and here a lane must be quiet.
    ///
    /// # Errors
    /// No lane is left, or it took too long.
    pub(super) fn look(
        &mut self,
        shared: &Failover,
        peer: &Peer,
        is_quiet: impl Fn(usize) -> bool,
    ) -> Result<(Vec<(usize, u32)>, bool)> {
        let open =
            (0..self.settled.len()).filter(|lane| !self.settled[*lane] && shared.is_stopped(*lane));
        let (mut now, mut waiting) = (Vec::new(), false);
        for lane in open {
            match shared.theirs(lane).filter(|_| is_quiet(lane)) {
                Some(theirs) => now.push((lane, theirs)),
                None => waiting = true,
            }
        }
        let patience = self.since.get_or_insert_with(Instant::now).elapsed() < peer.failures.answer;
        if !waiting {
            self.since = None;
        }
        let left = shared.pick(0).is_some();
        // What the other end counted when it closed may be all that is missing.
        if (!left && !shared.is_closed()) || (waiting && !patience) {
            return Err(given_up(peer, &shared.why(), left));
        }
        now.iter().for_each(|(lane, _)| self.settled[*lane] = true);
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
