//! The receives of a lane: all alike, without a buffer, posted a batch at a time.

use super::fifo::SLOTS;
use super::lane::{Kind, Lane, WrId};
use crate::verbs::QueuePair;
use crate::memory::region::MAX_RAILS;
use crate::memory::status::Board;
use crate::memory::status::layout::board as word;
use crate::verbs::wr::RecvChain;

/// Receives posted with one doorbell when as many were consumed.
pub const RECV_BATCH: u32 = SLOTS as u32;
/// Receives posted on each lane. Every advertised receive consumes at most one per lane, and at most SLOTS are
/// advertised; with up to a batch consumed and not yet replaced, SLOTS are always left.
pub const RECV_DEPTH: u32 = SLOTS as u32 + RECV_BATCH;
/// Receives posted on each lane of a connection with `lanes` of them. With `failover` all parts of a message may come
/// over one lane, which this covers for the connections that there are; a peer's adapter waits for the others.
pub fn depth(lanes: usize, failover: bool) -> u32 {
    if failover { (lanes.min(16) * SLOTS) as u32 + RECV_BATCH } else { RECV_DEPTH }
}

/// A lane with its receives.
pub(super) struct RecvLane {
    /// The lane.
    pub(super) lane: Lane,
    /// Receives consumed and not yet replaced.
    pub(super) consumed: u32,
    /// How often a batch was posted beside the receives that there were at first.
    pub(super) refills: u32,
    refill: RecvChain,
}

impl RecvLane {
    /// Lane number `number`, whose receives are posted.
    pub(super) fn new(number: usize, lane: Lane) -> Self {
        Self { lane, consumed: 0, refills: 0, refill: receives(number) }
    }

    /// Goes on as number `number` with another queue pair, whose receives are posted; gives the one before.
    pub(super) fn renew(&mut self, number: usize, qp: QueuePair) -> QueuePair {
        (self.consumed, self.refills, self.refill) = (0, 0, receives(number));
        self.lane.renew(qp)
    }

    /// A receive was consumed; the last of a batch is replaced with the whole batch.
    #[inline(always)]
    pub(super) fn consume(&mut self) -> Result<(), i32> {
        self.consumed += 1;
        if self.consumed == RECV_BATCH { self.refill() } else { Ok(()) }
    }

    /// Counts the batch that the last [`Self::consume`] posted, if it did.
    pub(super) fn count_refill(&self, board: &Board) {
        if self.consumed == 0 {
            let rail = self.lane.rail % MAX_RAILS;
            board.add(word::POSTS.start + rail, RECV_BATCH.into());
        }
    }

    /// Whether the next receive to be consumed is the last of a batch.
    #[inline(always)]
    pub(super) fn is_batch_end(&self) -> bool {
        self.consumed == RECV_BATCH - 1
    }

    #[cold]
    #[inline(never)]
    fn refill(&mut self) -> Result<(), i32> {
        self.consumed = 0;
        self.refills = self.refills.wrapping_add(1);
        self.lane.qp().post_recv(&mut self.refill)
    }

    /// Whether any data came this way.
    pub(super) fn is_used(&self) -> bool {
        self.refills > 0 || self.consumed > 0
    }
}

impl std::fmt::Debug for RecvLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvLane").field("lane", &self.lane).finish_non_exhaustive()
    }
}

/// The receives that are posted on lane number `lane` in one go.
pub fn receives(lane: usize) -> RecvChain {
    RecvChain::new(RECV_BATCH as usize, WrId::new(Kind::Receive, lane, 0, 0).0)
}
