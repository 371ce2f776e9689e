//! Events of one end of a connection for NCCL's profiler: one for each queue pair that a message uses.
//!
//! NCCL gives every plugin a callback, whether or not anybody listens, and only an answer tells. So an end begins with
//! telling of every transfer, and when nobody answers for long it asks again once in [`SLOTS`] transfers. In between the
//! usual transfer does not know of profilers: what asks goes the general way, by the test of the slot's own request
//! that is made anyway.

use super::comm::Peer;
use super::device::Rail;
use super::fifo::SLOTS;
use super::lane::Lane;
use super::request::RequestPool;
use crate::config::ProfilerPolicy;
use crate::memory::diagnosis::Direction;
use crate::memory::status::{About, Board};
use crate::profiler::{Event, Parent, Profiler, Work};
use std::ffi::c_int;

/// Questions without an answer after which an end stops asking each time.
const PATIENCE: u32 = 256;
/// The slot whose transfers always ask.
const ASKING: usize = 0;

/// What a connection is made for, as far as the table version tells.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origin {
    /// NCCL's identifier of the communicator.
    pub id: Option<u64>,
    /// NCCL's way to the profiler.
    pub profiler: Option<Profiler>,
}

impl Origin {
    /// The board of an end over these rails.
    pub(super) fn board(
        self,
        direction: Direction,
        number: u64,
        peer: &Peer,
        rails: &[Rail],
        lanes: usize,
    ) -> Board {
        let port = |rail: &Rail| (rail.device.port.label.clone(), rail.device.speed);
        let ports: Vec<_> = rails.iter().map(port).collect();
        Board::of(&About {
            direction,
            number,
            comm: self.id,
            peer: (&peer.host, peer.pid, &peer.device, &peer.addr),
            rails: ports.iter().map(|(name, speed)| (&**name, *speed)).collect(),
            lanes,
        })
    }
}

/// The events of one end.
#[derive(Debug)]
pub struct Profile {
    profiler: Profiler,
    always: bool,
    unanswered: u32,
    /// How the transfers were directed last, once that is so for all slots.
    directed: Option<bool>,
    /// The number of each rail among the devices.
    devices: Vec<c_int>,
    /// Events of each slot, with the lane that ends them. The lists keep the room that they once needed.
    running: Box<[Vec<(usize, Event)>; SLOTS]>,
}

impl Profile {
    /// For an end over the devices with these numbers, unless nobody may ask.
    pub fn new(
        profiler: Option<Profiler>,
        policy: ProfilerPolicy,
        devices: Vec<c_int>,
    ) -> Option<Self> {
        let profiler = profiler.filter(|_| policy != ProfilerPolicy::Off)?;
        let always = policy == ProfilerPolicy::On;
        Some(Self {
            profiler,
            always,
            unanswered: 0,
            directed: None,
            devices,
            running: Box::default(),
        })
    }

    /// Whether every transfer asks.
    pub(super) fn is_attentive(&self) -> bool {
        self.always || self.unanswered < PATIENCE
    }

    /// Whether the transfer of `slot` asks, should it come this way.
    pub(super) fn asks(&self, slot: usize) -> bool {
        slot == ASKING || self.is_attentive()
    }

    /// Sees to it that the transfers that ask come this way, by the requests that usual ones would take.
    #[cold]
    #[inline(never)]
    pub(super) fn direct(&mut self, pool: &RequestPool) {
        let attentive = self.is_attentive();
        if self.directed != Some(attentive) {
            let done = |slot| pool.withhold(slot, self.asks(slot));
            // Not those in use, which are looked at again.
            let all = (0..SLOTS).map(done).fold(true, |all, done| all & done);
            self.directed = all.then_some(attentive);
        }
    }

    /// The same where only the slot that always asks needs it.
    pub(super) fn direct_one(pool: &RequestPool) {
        pool.withhold(ASKING, true);
    }

    /// Begins an event for a work request of `slot` on `lane`, ended by lane number `end`. Whether anybody listens.
    #[cold]
    #[inline(never)]
    pub(super) fn start(
        &mut self,
        (slot, end): (usize, usize),
        lane: &Lane,
        parent: Parent,
        (id, opcode, bytes): (u64, u32, u32),
    ) -> bool {
        let event = self.profiler.start(
            parent,
            Work {
                device: self.devices.get(lane.rail).copied().unwrap_or(-1),
                id,
                opcode: opcode.cast_signed(),
                queue_pair: lane.qp().number().cast_signed(),
                bytes: bytes as usize,
            },
        );
        self.unanswered = if event.is_some() { 0 } else { self.unanswered.saturating_add(1) };
        let answered = event.is_some();
        self.running[slot % SLOTS].extend(event.map(|event| (end, event)));
        answered
    }

    /// Ends the events of `slot` that lane number `end` ends.
    #[cold]
    #[inline(never)]
    pub(super) fn stop(&mut self, slot: usize, end: usize) {
        self.running[slot % SLOTS].retain(|(lane, _)| *lane != end);
    }

    /// Ends all events: the connection failed.
    #[cold]
    #[inline(never)]
    pub(super) fn stop_all(&mut self) {
        self.running.iter_mut().for_each(Vec::clear);
    }
}
