//! Going on over the other rails when one fails, with every message delivered exactly once.
//!
//! Both ends of a lane count the ends of parts in the order in which they went over it: the sender those that were
//! acknowledged, the receiver those that it has taken. Stopping a lane freezes an end's count, in one atomic step, and
//! moves its queue pair to error, after which nothing comes in any more. Each end tells the other its count over the side
//! channel. What is within either count is delivered: the receiver takes it even now, and the sender asks no more for
//! it. What is beyond both is sent again over another lane. A queue pair that was stopped is never used again; what may
//! take its place is in [`super::recovery`].
//!
//! The event thread answers for an end that nobody drives at the moment: a receiver that has all its data is not asked
//! for more, while the sender still waits to hear so.

use super::comm::Peer;
use super::lane::{Lane, PLACE};
use super::mail::Mail;
use super::recovery::Recovery;
use super::way::{STOPPED, Way, index, number};
use super::wire::Message;
use crate::memory::{Gate, GateState};
use crate::verbs::QueuePair;
use crate::verbs::cq::status_name;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What one end knows of its lanes, for the thread that moves data and the event thread. A lane is meant by its number,
/// see [`super::way`].
#[derive(Debug)]
pub struct Failover {
    /// For each place its own way, then for each the other, where rails come back.
    ways: Box<[Way]>,
    /// For each place the number that its lane has.
    current: Box<[AtomicUsize]>,
    told: Mutex<Told>,
    gate: Gate,
    mail: Arc<Mail>,
    /// For messages.
    peer: String,
    flushes: Box<[FlushWay]>,
    /// The other end closed.
    closed: AtomicBool,
    /// How rails come back, where they do.
    pub(super) recovery: Option<Recovery>,
}

/// What both ends said.
#[derive(Debug)]
struct Told {
    /// What the other end counted on lanes that it stopped.
    theirs: Box<[Option<u32>]>,
    /// The first reason.
    why: Option<String>,
    /// Queue pairs for the thread that moves data.
    fresh: Vec<Fresh>,
}

/// The queue pair of flushes on one rail.
#[derive(Debug)]
struct FlushWay {
    rail: usize,
    /// As events call it.
    queue: AtomicUsize,
    failed: AtomicBool,
    /// Nothing is left of what was posted on it.
    drained: AtomicBool,
}

/// New queue pairs in place of some that failed.
#[derive(Debug)]
pub(super) struct Fresh {
    /// With the numbers of their lanes.
    pub(super) lanes: Vec<(usize, QueuePair)>,
    /// The one for flushes, with its rail, if the one before failed too.
    pub(super) flush: Option<(usize, QueuePair)>,
}

/// Whether another rail may do better: the path failed, or the queue pair, and not what was asked of it.
pub(super) fn is_survivable(status: u32) -> bool {
    matches!(status_name(status), "RETRY_EXC_ERR" | "WR_FLUSH_ERR" | "RESP_TIMEOUT_ERR")
}

impl Failover {
    /// Of an end with these lanes; `None` where they join one pair of rails only.
    pub(super) fn new(
        lanes: &mut [Lane],
        flushes: &[(usize, usize)],
        gate: &Gate,
        peer: &Peer,
        recovery: Option<Recovery>,
    ) -> Option<Arc<Self>> {
        let rails: Vec<_> = lanes.iter().map(|lane| (lane.rail, lane.remote_rail)).collect();
        let first = rails.first()?;
        if rails.iter().all(|rails| rails == first) {
            return None;
        }
        let turns = if recovery.is_some() { 2 } else { 1 };
        let ways: Box<[_]> =
            rails.iter().cycle().take(turns * rails.len()).copied().map(Way::vacant).collect();
        for (place, (lane, way)) in lanes.iter_mut().zip(&ways).enumerate() {
            way.begin(lane.fuse(), lane.qp().identity(), peer.way(place), false);
        }
        let flush = |(queue, rail): &(usize, usize)| FlushWay {
            rail: *rail,
            queue: AtomicUsize::new(*queue),
            failed: AtomicBool::new(false),
            drained: AtomicBool::new(false),
        };
        Some(Arc::new(Self {
            told: Mutex::new(Told {
                theirs: vec![None; ways.len()].into(),
                why: None,
                fresh: Vec::new(),
            }),
            ways,
            current: (0..lanes.len()).map(AtomicUsize::new).collect(),
            gate: gate.clone(),
            mail: Arc::clone(&peer.mail),
            peer: peer.to_string(),
            flushes: flushes.iter().map(flush).collect(),
            closed: AtomicBool::new(false),
            recovery,
        }))
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the way of a number is.
    fn index(&self, number: usize) -> Option<usize> {
        index(number, self.current.len()).filter(|index| *index < self.ways.len())
    }

    fn way(&self, number: usize) -> Option<&Way> {
        self.index(number).map(|index| &self.ways[index])
    }

    /// Every number that a lane may have.
    fn numbers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ways.len()).map(|i| number(i, self.current.len()))
    }

    /// The number of the lane in a place.
    pub(super) fn number(&self, place: usize) -> usize {
        self.current.get(place).map_or(place, |number| number.load(Ordering::Acquire))
    }

    /// Whether a lane was stopped.
    #[inline]
    pub(super) fn is_stopped(&self, number: usize) -> bool {
        self.way(number).is_none_or(Way::is_stopped)
    }

    /// Whether something may be posted on a lane.
    pub(super) fn is_usable(&self, number: usize) -> bool {
        self.way(number).is_some_and(Way::is_usable)
    }

    /// Whether nothing is left of a lane that was stopped.
    pub(super) fn is_drained(&self, number: usize) -> bool {
        self.way(number).is_some_and(|way| way.is_stopped() && way.is_drained())
    }

    /// The queue pairs of a lane and their addresses.
    pub(super) fn text(&self, number: usize) -> String {
        self.way(number).map(Way::text).unwrap_or_default()
    }

    /// For messages.
    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    /// What is told to the other end.
    pub(super) fn mail(&self) -> &Mail {
        &self.mail
    }

    /// How many lanes are in use, and how many there are.
    pub(super) fn in_use(&self) -> (usize, usize) {
        (self.ways.iter().filter(|way| way.is_usable()).count(), self.current.len())
    }

    /// Counts the end of a part, unless the lane was stopped.
    #[inline]
    pub(super) fn count(&self, number: usize) -> bool {
        self.way(number).is_some_and(Way::count)
    }

    /// The count of a lane that was stopped.
    pub(super) fn counted(&self, number: usize) -> u32 {
        self.way(number).map_or(0, Way::counted)
    }

    /// What the other end counted, if it has stopped the lane too.
    pub(super) fn theirs(&self, number: usize) -> Option<u32> {
        let index = self.index(number)?;
        self.told().theirs[index]
    }

    /// Why lanes were stopped at first.
    pub(super) fn why(&self) -> String {
        self.told().why.clone().unwrap_or_default()
    }

    /// Why a lane is stopped, whose work request ended like this.
    pub(super) fn failed_by(&self, number: usize, status: u32) -> String {
        format!("{}: {}: IBV_WC_{}", self.peer, self.text(number), status_name(status))
    }

    /// Stops the lanes that join the same rails as this one. `false`: no lane would be left, and nothing was done.
    pub(super) fn stop_like(&self, number: usize, why: impl FnOnce() -> String) -> bool {
        let Some(rails) = self.way(number).map(|way| way.rails) else { return false };
        self.stop_all(|way| way.rails == rails, why)
    }

    /// The queue pair that flushes a local rail failed: stops the lanes of that rail. `false`: no lane would be left, and
    /// nothing was done.
    pub(super) fn stop_flush(&self, rail: usize, why: impl FnOnce() -> String) -> bool {
        let stopped = self.stop_all(|way| way.rails.0 == rail, why);
        if stopped {
            let flush = self.flushes.iter().filter(|flush| flush.rail == rail);
            flush.for_each(|flush| flush.failed.store(true, Ordering::Release));
        }
        stopped
    }

    /// Whether the queue pair that flushes a local rail failed.
    pub(super) fn is_flush_failed(&self, rail: usize) -> bool {
        self.flushes.iter().any(|flush| flush.rail == rail && flush.failed.load(Ordering::Acquire))
    }

    /// Whether such a failed queue pair has nothing left, or there is none.
    pub(super) fn is_flush_drained(&self, rail: usize) -> bool {
        let left = |flush: &&FlushWay| {
            flush.failed.load(Ordering::Acquire) && !flush.drained.load(Ordering::Acquire)
        };
        !self.flushes.iter().filter(|flush| flush.rail == rail).any(|flush| left(&flush))
    }

    /// Nothing is left of a lane that was stopped: every completion was seen. Called by the thread that moves data.
    pub(super) fn drained(&self, number: usize) {
        if let (Some(recovery), Some(way)) = (&self.recovery, self.way(number)) {
            way.set_drained();
            recovery.rouse();
            self.mail.wake();
        }
    }

    /// The same of the queue pair that flushed a rail, and failed.
    pub(super) fn flush_drained(&self, rail: usize) {
        if let Some(recovery) = &self.recovery {
            let flush = self.flushes.iter().filter(|flush| flush.rail == rail);
            flush.for_each(|flush| flush.drained.store(true, Ordering::Release));
            recovery.rouse();
            self.mail.wake();
        }
    }

    /// Whether a queue of the device is one that lanes or flushes use.
    pub(super) fn is_queue(&self, queue: usize) -> bool {
        self.ways.iter().any(|way| way.is_queue(queue))
            || self.flushes.iter().any(|flush| flush.queue.load(Ordering::Acquire) == queue)
    }

    /// Those of an end's queues that stay as they are.
    pub(super) fn kept(&self, mut queues: Vec<usize>) -> Vec<usize> {
        if self.recovery.is_some() {
            queues.retain(|queue| !self.is_queue(*queue));
        }
        queues
    }

    /// Stops the lanes that are like the one whose queue pair the device reported, or those of the rail that it flushes.
    /// `false`: it is of neither kind, or no lane would be left.
    pub(super) fn stop_queue(&self, queue: usize, event: &str) -> bool {
        let why = || format!("{}: IBV_EVENT_{event}", self.peer);
        let lane = self.ways.iter().find(|way| way.is_queue(queue)).map(|way| way.rails);
        let flush = self.flushes.iter().find(|flush| flush.queue.load(Ordering::Acquire) == queue);
        let stopped = match (lane, flush) {
            (Some(rails), _) => self.stop_all(|way| way.rails == rails, why),
            (None, Some(flush)) => self.stop_flush(flush.rail, why),
            (None, None) => false,
        };
        if stopped {
            self.gate.report(GateState::Rerouted);
        }
        stopped
    }

    fn stop_all(&self, which: impl Fn(&Way) -> bool, why: impl FnOnce() -> String) -> bool {
        let left = self.ways.iter().filter(|way| way.is_usable() && !which(way)).count();
        if left == 0 {
            return false;
        }
        let like = |number: &usize| self.way(*number).is_some_and(&which);
        let stopped = self.stop(self.numbers().filter(like));
        if stopped > 0 {
            let (why, count) = (why(), self.current.len());
            tracing::warn!(
                "{why}: {stopped} queue pairs are not used any more, {left} of {count} go on"
            );
            self.told().why.get_or_insert(why);
        }
        true
    }

    /// Whether any lane is left.
    pub(super) fn is_any_left(&self) -> bool {
        self.ways.iter().any(Way::is_usable)
    }

    /// Stops lanes and tells the other end; how many were not stopped before.
    pub(super) fn stop(&self, numbers: impl Iterator<Item = usize>) -> usize {
        let stopped = self.freeze(numbers);
        let count = stopped.len();
        if count > 0 {
            if let Some(recovery) = &self.recovery {
                recovery.rouse();
            }
            self.mail.post(Message::Stopped(stopped));
        }
        count
    }

    /// Stops lanes; those that were not before, with their counts.
    fn freeze(&self, numbers: impl Iterator<Item = usize>) -> Vec<(u8, u32)> {
        let stop = |number: usize| Some((number as u8, self.way(number)?.stop()?));
        numbers.filter_map(stop).collect()
    }

    /// What this end counted on the lane of each place, which is final: it closes.
    pub(super) fn close(&self) -> Vec<(u8, u32)> {
        self.freeze(self.numbers());
        let current = (0..self.current.len()).map(|place| self.number(place));
        current.map(|number| (number as u8, self.counted(number))).collect()
    }

    /// The other end closed and told its counts: what both ends counted together is all that will ever be delivered.
    /// Called by the event thread.
    pub(super) fn hear_last(&self, lanes: &[(u8, u32)]) {
        self.closed.store(true, Ordering::Release);
        self.note(lanes);
        // It does not know of a lane that is new here, and took nothing from it.
        let current: Vec<_> =
            (0..self.current.len()).map(|place| (self.number(place) as u8, 0)).collect();
        self.note(&current);
        self.freeze(self.numbers());
    }

    /// Whether the other end closed.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether the connection goes on, as far as is known outside the data path.
    pub(super) fn is_alive(&self) -> bool {
        !self.is_closed() && matches!(self.gate.state(), GateState::Open | GateState::Rerouted)
    }

    /// Takes note of what the other end counted.
    fn note(&self, lanes: &[(u8, u32)]) {
        let mut told = self.told();
        for (number, count) in lanes {
            if let Some(index) = self.index(usize::from(*number)) {
                told.theirs[index].get_or_insert(*count & !STOPPED);
            }
        }
    }

    /// Takes note of what the other end stopped, and does the same. Called by the event thread.
    pub(super) fn hear(&self, lanes: &[(u8, u32)]) {
        self.note(lanes);
        let stopped = self.stop(lanes.iter().map(|(number, _)| usize::from(*number)));
        if stopped > 0 {
            let why = format!("{}: the peer gave up a rail", self.peer);
            let count = self.current.len();
            tracing::warn!("{why}: {stopped} of {count} queue pairs are not used any more");
            self.told().why.get_or_insert(why);
        }
        self.gate.report(GateState::Rerouted);
    }

    /// Hands new queue pairs, with texts for messages, to the thread that moves data, in place of some of which nothing is
    /// left. From here on the lanes count, and may be stopped. `muted`: nothing is posted on them yet. Called by the event
    /// thread.
    pub(super) fn renew(&self, mut fresh: Fresh, texts: Vec<String>, muted: bool) {
        let mut told = self.told();
        for ((number, qp), text) in fresh.lanes.iter_mut().zip(texts) {
            let Some(index) = self.index(*number) else { continue };
            told.theirs[index] = None;
            self.current[*number & PLACE].store(*number, Ordering::Release);
            self.ways[index].begin(qp.fuse(), qp.identity(), text, muted);
        }
        if let Some((rail, qp)) = &fresh.flush {
            for flush in self.flushes.iter().filter(|flush| flush.rail == *rail) {
                flush.queue.store(qp.identity(), Ordering::Release);
                flush.drained.store(false, Ordering::Release);
                flush.failed.store(false, Ordering::Release);
            }
        }
        told.fresh.push(fresh);
        drop(told);
        self.gate.report(GateState::Rerouted);
    }

    /// The other ends of these lanes are ready too.
    pub(super) fn unmute(&self, numbers: impl Iterator<Item = usize>) {
        numbers.filter_map(|number| self.way(number)).for_each(Way::unmute);
        self.gate.report(GateState::Rerouted);
    }

    /// Nothing is stopped any more: whatever fails next is the first.
    pub(super) fn forget_why(&self) {
        if (0..self.current.len()).all(|place| !self.is_stopped(self.number(place))) {
            self.told().why = None;
        }
    }

    /// Whether [`Self::renew`] left something.
    pub(super) fn has_fresh(&self) -> bool {
        !self.told().fresh.is_empty()
    }

    /// What [`Self::renew`] left.
    pub(super) fn take_fresh(&self) -> Vec<Fresh> {
        std::mem::take(&mut self.told().fresh)
    }

    /// Takes a queue pair of which nothing is left, to be destroyed by the event thread: that may take a while.
    pub(super) fn discard(&self, qp: QueuePair) {
        if let Some(recovery) = &self.recovery {
            recovery.discard(qp);
            self.mail.wake();
        }
    }

    /// How often a rail was taken into use again.
    pub(super) fn back(&self) -> u32 {
        self.recovery.as_ref().map_or(0, Recovery::back)
    }

    /// This end's queue pairs go: so do those that nobody took, and no more are made.
    pub(super) fn end(&self) {
        if let Some(recovery) = &self.recovery {
            recovery.end();
        }
        drop(self.take_fresh());
    }
}
