//! The credits of a receiving end: one work request per slot, prepared in advance.

use super::fifo::{CreditFifo, SLOTS};
use super::lane::{Kind, Lane, WrId};
use super::recv::Route;
use crate::memory::registry::Registered;
use crate::verbs::wr::{Flags, Local, Operation, Prepared, Remote};
use std::sync::Arc;

/// Slots of a lane's send queue. The credit of receive `k` belongs to slot `k` modulo [`SLOTS`] and goes over a lane
/// chosen by the slot; the last of each lane per round of slots is signalled, and is not posted again before its
/// completion was seen. So at most two rounds are outstanding.
pub const CREDIT_DEPTH: u32 = 2 * SLOTS as u32;
/// The same where every credit is signalled: none is posted again before its completion was seen.
pub const LEAST_CREDIT_DEPTH: u32 = SLOTS as u32;

/// The work request of each slot's credit, and how it goes.
pub(super) struct Credits {
    writes: Prepared<SLOTS>,
    slots: [CreditSlot; SLOTS],
    kind: Kind,
    max_inline: u32,
}

/// How the credit of one slot goes.
#[derive(Clone, Copy, Debug)]
struct CreditSlot {
    /// The place of its lane.
    lane: u8,
    /// Whether it makes a completion, which frees its lane's send queue up to it.
    signalled: bool,
    /// Whether that completion has not been seen yet.
    awaited: bool,
}

impl Credits {
    /// One for every slot of a route.
    pub(super) fn new(route: &Route, shadow: &CreditFifo) -> Self {
        let lanes = route.lanes.len();
        // Where credits may go another way, each tells that it arrived; and where the send queue holds one round only.
        let all = route.failover.is_some() || route.sizes.send < CREDIT_DEPTH;
        let slots: [CreditSlot; SLOTS] = std::array::from_fn(|slot| CreditSlot {
            lane: (slot % lanes) as u8,
            // The last slot of each lane.
            signalled: all || slot + lanes >= SLOTS,
            awaited: false,
        });
        let kind = if all { Kind::Credit } else { Kind::Progress };
        let id = |slot: usize| WrId::new(kind, slots[slot].lane.into(), slot, 0).0;
        let mut credits = Self {
            writes: Prepared::new(Operation::Write, |slot| (id(slot), Flags::SILENT)),
            slots,
            kind,
            max_inline: route.max_inline,
        };
        for (slot, at) in slots.iter().enumerate() {
            let lane = &route.lanes[usize::from(at.lane)];
            let (addr, rkeys) = (route.fifo_addr, &route.fifo_rkeys);
            credits.shape(slot, 1, lane, &route.local, addr, rkeys, shadow);
        }
        credits
    }

    /// The place of the lane of the credit of `slot`.
    #[inline(always)]
    pub(super) fn lane(&self, slot: usize) -> usize {
        self.slots[slot % SLOTS].lane.into()
    }

    /// The identifier of the work request of `slot`.
    pub(super) fn id(&self, slot: usize) -> WrId {
        WrId(self.writes.id(slot))
    }

    /// Makes the work request of `slot` one for `members` members.
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of a route, which is taken apart meanwhile"
    )]
    pub(super) fn shape(
        &mut self,
        slot: usize,
        members: usize,
        lane: &Lane,
        local: &[Arc<Registered>],
        fifo_addr: u64,
        fifo_rkeys: &[u32],
        shadow: &CreditFifo,
    ) {
        let len = (members * shadow.stride()) as u32;
        let from = Local { addr: shadow.addr(slot, 0), len, lkey: local[lane.rail].lkey() };
        let to = Remote {
            addr: fifo_addr.wrapping_add(shadow.offset(slot, 0) as u64),
            rkey: fifo_rkeys[lane.remote_rail],
        };
        let flags = if len <= self.max_inline { Flags::SILENT.inline() } else { Flags::SILENT };
        self.writes.prepare(slot, from, to, flags.signaled_if(self.slots[slot].signalled));
    }

    /// Whether the credit of `slot` must wait for the completion of the one before.
    #[inline(always)]
    pub(super) fn is_blocked(&self, slot: usize) -> bool {
        self.slots[slot % SLOTS].awaited
    }

    /// The write that carries the credit of `slot`.
    pub(super) fn entry(&self, slot: usize) -> (Local, Remote) {
        self.writes.entry(slot)
    }

    /// Sends the credit of `slot` over the lane in another place, and with this number, from now on; its work request must
    /// be shaped anew.
    pub(super) fn move_to(&mut self, slot: usize, place: usize, number: usize) {
        self.slots[slot] = CreditSlot { lane: place as u8, awaited: false, ..self.slots[slot] };
        self.writes.set_id(slot, WrId::new(self.kind, number, slot, 0).0);
    }

    /// Posts the credit of `slot`.
    #[inline(always)]
    pub(super) fn post(&mut self, slot: usize, lane: &Lane) -> Result<(), i32> {
        let at = &mut self.slots[slot % SLOTS];
        at.awaited = at.signalled;
        lane.qp().post_prepared(&mut self.writes, slot)
    }

    /// The credit of `slot` completed.
    #[inline(always)]
    pub(super) fn complete(&mut self, slot: usize) {
        self.slots[slot % SLOTS].awaited = false;
    }
}

impl std::fmt::Debug for Credits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credits").field("slots", &self.slots).finish_non_exhaustive()
    }
}
