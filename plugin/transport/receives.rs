//! The receives of a lane: all alike, without a buffer, posted a batch at a time.

use super::fifo::SLOTS;
use super::lane::{Kind, Lane, WrId};
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
    refill: RecvChain,
    /// Whether any data came this way.
    used: bool,
}

impl RecvLane {
    /// Lane number `index`, whose receives are posted.
    pub(super) fn new(index: usize, lane: Lane) -> Self {
        Self { lane, consumed: 0, refill: receives(index), used: false }
    }

    /// A receive was consumed; the last of a batch is replaced with the whole batch, which is counted.
    #[inline(always)]
    pub(super) fn consume(&mut self, board: &Board) -> Result<(), i32> {
        self.consumed += 1;
        if self.consumed == RECV_BATCH { self.refill(board) } else { Ok(()) }
    }

    /// Whether the next receive to be consumed is the last of a batch.
    #[inline(always)]
    pub(super) fn is_batch_end(&self) -> bool {
        self.consumed == RECV_BATCH - 1
    }

    #[cold]
    #[inline(never)]
    fn refill(&mut self, board: &Board) -> Result<(), i32> {
        self.consumed = 0;
        self.used = true;
        self.lane.qp().post_recv(&mut self.refill)?;
        board.add(word::POSTS.start + self.lane.rail % MAX_RAILS, RECV_BATCH.into());
        Ok(())
    }

    /// Whether any data came this way.
    pub(super) fn is_used(&self) -> bool {
        self.used || self.consumed > 0
    }
}

impl std::fmt::Debug for RecvLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvLane").field("lane", &self.lane).finish_non_exhaustive()
    }
}

/// The receives that are posted on lane `lane` in one go.
pub fn receives(lane: usize) -> RecvChain {
    RecvChain::new(RECV_BATCH as usize, WrId::new(Kind::Receive, lane, 0, 0).0)
}
