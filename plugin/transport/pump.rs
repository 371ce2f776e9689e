//! What every call of the data path looks at first: may it go on, and is there a completion.

use crate::memory::Gate;
use crate::verbs::CompletionQueue;
use crate::verbs::cq::{Completions, Poller};
use std::sync::Arc;

/// The gate and the completion queues of one end, with room for one poll's completions.
///
/// The first field of either kind of communicator, so that test finds it without knowing the kind.
#[repr(C)]
pub struct Pump {
    /// Completions of the last poll.
    pub wc: Completions,
    gate: Gate,
    first: Poller,
    others: Vec<Poller>,
}

impl Pump {
    /// A pump over the completion queues in rail order, at least one.
    pub fn new(gate: Gate, cqs: Vec<Arc<CompletionQueue>>) -> Self {
        let mut pollers: Vec<_> = cqs.into_iter().map(Poller::new).collect();
        let first = pollers.remove(0);
        Self { wc: Completions::new(), gate, first, others: pollers }
    }

    /// The gate.
    #[inline(always)]
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Number of completion queues.
    pub fn rails(&self) -> usize {
        1 + self.others.len()
    }

    /// Polls the first rail's queue; the number of completions, or negative when the queue is broken.
    #[inline(always)]
    pub fn poll_first(&mut self) -> i32 {
        self.first.poll(&mut self.wc)
    }

    /// Polls the queue of `rail`, below [`Self::rails`].
    pub fn poll(&mut self, rail: usize) -> i32 {
        let poller = rail.checked_sub(1).and_then(|r| self.others.get(r)).unwrap_or(&self.first);
        poller.poll(&mut self.wc)
    }
}

impl std::fmt::Debug for Pump {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pump").field("gate", &self.gate).field("rails", &self.rails()).finish()
    }
}
