//! The receives of a lane: all alike, without a buffer, posted a batch at a time.

use super::connection::Sizes;
use super::credits::{CREDIT_DEPTH, LEAST_CREDIT_DEPTH};
use super::fifo::SLOTS;
use super::flush::{FLUSH_DEPTH, LEAST_FLUSH_DEPTH};
use super::lane::{Kind, Lane, WrId};
use crate::memory::region::MAX_RAILS;
use crate::memory::status::Board;
use crate::memory::status::layout::board as word;
use crate::verbs::QueuePair;
use crate::verbs::wr::RecvChain;

/// Receives posted with one doorbell when as many were consumed, and how many are posted on each lane then. Every
/// advertised receive consumes at most one per lane, and at most SLOTS are advertised; with less than a batch consumed and
/// not yet replaced, SLOTS are always left. A device is asked for the first and gets less where it refuses.
const DEPTHS: [(u32, u32); 4] = [(32, 64), (16, 48), (8, 40), (1, 32)];
/// Bytes of inline payload a receiver can use: credits of one receive with up to two members.
const INLINE: u32 = 64;

/// Sizes of the queues of a receiving end with `lanes` of them, the best first. With `failover` all parts of a message may
/// come over one lane, which the first covers for the connections that there are; with less a peer's adapter waits.
pub fn sizes(lanes: usize, failover: bool) -> Vec<Sizes> {
    let sizes =
        |send, batch, recv, extra| Sizes { send, counted: 0, recv, batch, extra, inline: INLINE };
    let (batch, _) = DEPTHS[0];
    let mut all = Vec::with_capacity(DEPTHS.len() + 1);
    if failover && lanes > 1 {
        let parts = (lanes.min(16) * SLOTS) as u32;
        all.push(sizes(CREDIT_DEPTH, batch, parts + batch, FLUSH_DEPTH));
    }
    all.extend(DEPTHS.iter().enumerate().map(|(step, (batch, recv))| match step {
        0 => sizes(CREDIT_DEPTH, *batch, *recv, FLUSH_DEPTH),
        // Then every credit tells that it arrived, and no flush is uncounted.
        _ => sizes(LEAST_CREDIT_DEPTH, *batch, *recv, LEAST_FLUSH_DEPTH),
    }));
    all
}

/// A lane with its receives.
pub(super) struct RecvLane {
    /// The lane.
    pub(super) lane: Lane,
    /// Receives that are consumed before the next batch replaces them. Small, because lanes lie side by side.
    left: u8,
    batch: u8,
    /// How often a batch was posted beside the receives that there were at first.
    refills: u32,
    refill: RecvChain,
}

impl RecvLane {
    /// Lane number `number`, whose receives are posted in batches of this size.
    pub(super) fn new(number: usize, lane: Lane, batch: u32) -> Self {
        let refill = receives(number, batch);
        let batch = batch as u8;
        Self { lane, left: batch, batch, refills: 0, refill }
    }

    /// Goes on as number `number` with another queue pair, whose receives are posted; gives the one before.
    pub(super) fn renew(&mut self, number: usize, qp: QueuePair) -> QueuePair {
        (self.left, self.refills) = (self.batch, 0);
        self.refill = receives(number, self.batch.into());
        self.lane.renew(qp)
    }

    /// A receive was consumed; the last of a batch is replaced with the whole batch, which is counted.
    #[inline(always)]
    pub(super) fn consume(&mut self, board: &Board) -> Result<(), i32> {
        self.left -= 1;
        if self.left == 0 { self.refill(board) } else { Ok(()) }
    }

    /// A receive was consumed that is not the last of a batch.
    #[inline(always)]
    pub(super) fn consume_early(&mut self) {
        self.left -= 1;
    }

    /// Whether the next receive to be consumed is the last of a batch.
    #[inline(always)]
    pub(super) fn is_batch_end(&self) -> bool {
        self.left == 1
    }

    #[cold]
    #[inline(never)]
    fn refill(&mut self, board: &Board) -> Result<(), i32> {
        self.left = self.batch;
        self.refills = self.refills.wrapping_add(1);
        self.lane.qp().post_recv(&mut self.refill)?;
        board.add(word::POSTS.start + self.lane.rail % MAX_RAILS, self.batch.into());
        Ok(())
    }

    /// Receives posted beside those that there were at first, modulo 2^32.
    pub(super) fn replaced(&self) -> u32 {
        self.refills.wrapping_mul(self.batch.into())
    }

    /// Whether any data came this way.
    pub(super) fn is_used(&self) -> bool {
        self.refills > 0 || self.left < self.batch
    }
}

impl std::fmt::Debug for RecvLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvLane").field("lane", &self.lane).finish_non_exhaustive()
    }
}

/// The receives that are posted on lane `lane` in one go.
pub fn receives(lane: usize, batch: u32) -> RecvChain {
    RecvChain::new(batch as usize, WrId::new(Kind::Receive, lane, 0, 0).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_holds_what_can_be_in_flight() {
        for (lanes, failover) in [(1, false), (4, false), (4, true), (128, true)] {
            let all = sizes(lanes, failover);
            for size in &all {
                // What is left when the last but one of a batch was consumed.
                assert!(size.recv - (size.batch - 1) >= SLOTS as u32, "{size:?}");
                assert_eq!(size.recv % size.batch, 0, "{size:?}");
                assert!(size.send >= SLOTS as u32 && size.extra >= SLOTS as u32, "{size:?}");
            }
            assert!(all.is_sorted_by(|a, b| a.recv > b.recv && a.send >= b.send), "{all:?}");
        }
        assert_eq!(sizes(4, true)[0].recv, 160);
        assert_eq!(sizes(1, true), sizes(1, false));
    }
}
