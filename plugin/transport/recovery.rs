//! Bringing a rail back that failed, in the background, while the connection goes on over the others.
//!
//! All lanes between two rails fail together ([`super::failover`]) and come back together: a [`Bridge`]. Nothing happens
//! before both ends have nothing left of the lost queue pairs, every completion included, so that new ones find room in
//! the completion queues, and nothing old can be taken for something new. The receiver says when it is so far and its
//! port is up; the sender begins, when it is so far too and has waited a while.
//!
//! A probe comes first, a queue pair with a completion queue of its own: a path that is still dead costs an attempt and
//! nothing else. If it is well, both ends make new lanes and hand them to the thread that moves data, under the other
//! number of each place. The receiver may get data over them as soon as they are made, and posts credits when the sender's
//! ends are ready too.
//!
//! Everything here is done by the event thread. Nothing waits: each step is a message on the side channel, and an attempt
//! that gets no answer is given up. If a new lane fails, that is a failed rail as any other.

mod bridge;
mod means;

pub use means::Means;

use self::bridge::Bridge;
use super::device::OpenDevice;
use super::failover::Failover;
use super::wire::Step;
use crate::verbs::QueuePair;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How rails of one end come back.
#[derive(Debug)]
pub struct Recovery {
    works: Mutex<Option<Works>>,
    /// Queue pairs to be destroyed.
    discarded: Mutex<Vec<QueuePair>>,
    /// There may be something to do.
    roused: AtomicBool,
    /// How often a rail was taken into use again.
    back: AtomicU32,
}

#[derive(Debug)]
struct Works {
    means: Means,
    bridges: Vec<Bridge>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recovery {
    /// Of a sending end.
    pub fn of_sender(means: Means, remote_rails: usize, lanes: usize) -> Self {
        Self::new(means, remote_rails, lanes, true)
    }

    /// Of a receiving end.
    pub fn of_receiver(means: Means, remote_rails: usize, lanes: usize) -> Self {
        Self::new(means, remote_rails, lanes, false)
    }

    fn new(means: Means, remote_rails: usize, lanes: usize, sends: bool) -> Self {
        let mut bridges: Vec<Bridge> = Vec::new();
        for place in 0..lanes {
            let rails = (place % means.rails.len(), place % remote_rails);
            match bridges.iter_mut().find(|bridge| bridge.rails() == rails) {
                Some(bridge) => bridge.add(place),
                None => bridges.push(Bridge::new(rails, place, sends)),
            }
        }
        Self {
            works: Mutex::new(Some(Works { means, bridges })),
            discarded: Mutex::default(),
            roused: AtomicBool::new(false),
            back: AtomicU32::new(0),
        }
    }

    /// There may be something to do for the event thread.
    pub(super) fn rouse(&self) {
        self.roused.store(true, Ordering::Release);
    }

    /// Whether there may be.
    pub(super) fn is_roused(&self) -> bool {
        self.roused.load(Ordering::Acquire)
    }

    /// Takes a queue pair that is to be destroyed.
    pub(super) fn discard(&self, qp: QueuePair) {
        lock(&self.discarded).push(qp);
        self.rouse();
    }

    /// Without the lock, for which nobody should have to wait that long.
    fn destroy(&self) {
        let discarded = std::mem::take(&mut *lock(&self.discarded));
        drop(discarded);
    }

    /// How often a rail was taken into use again.
    pub(super) fn back(&self) -> u32 {
        self.back.load(Ordering::Relaxed)
    }

    /// The connection's queue pairs go, and all that is here.
    pub(super) fn end(&self) {
        let works = lock(&self.works).take();
        drop(works);
        self.destroy();
    }

    /// Goes on with what is due; when to look again. Called by the event thread, with no lock of its own held: making and
    /// destroying queue pairs takes its time.
    pub(super) fn attend(&self, failover: &Failover) -> Option<Instant> {
        self.roused.store(false, Ordering::Release);
        self.destroy();
        let mut works = lock(&self.works);
        let Works { means, bridges } = works.as_mut().filter(|_| failover.is_alive())?;
        let now = Instant::now();
        let due = bridges.iter_mut().filter_map(|bridge| bridge.go_on(failover, means, now)).min();
        if due.is_some() {
            self.rouse();
        }
        due
    }

    /// Takes note of what the other end says. Called by the event thread.
    pub(super) fn hear(&self, failover: &Failover, rails: (u8, u8), attempt: u32, step: Step) {
        let mut works = lock(&self.works);
        let alive = works.as_mut().filter(|_| failover.is_alive());
        let Some(Works { means, bridges }) = alive else { return };
        let (senders, receivers) = (usize::from(rails.0), usize::from(rails.1));
        let meant = |bridge: &&mut Bridge| bridge.wire_rails() == (senders, receivers);
        if let Some(bridge) = bridges.iter_mut().find(meant) {
            if bridge.hear(failover, means, attempt, step) {
                self.back.fetch_add(1, Ordering::Relaxed);
            }
        } else {
            tracing::debug!("{}: no lanes join rails {rails:?}", failover.peer());
        }
        self.rouse();
    }

    /// A port of a device is up. Called by the event thread.
    pub(super) fn hear_port(&self, open: &Arc<OpenDevice>, port: u8) {
        let mut works = lock(&self.works);
        let Some(Works { means, bridges }) = works.as_mut() else { return };
        for bridge in bridges.iter_mut().filter(|b| means.is_port(b.rails().0, open, port)) {
            bridge.hurry(means);
        }
        self.rouse();
    }
}
