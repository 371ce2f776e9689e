//! What a receiving end knows of one advertised receive.

use super::fifo::SLOTS;
use super::stripe::Imm;

/// Stands for no request.
pub(super) const NO_REQUEST: u16 = u16::MAX;
/// In [`Slot::usual`]: nothing is awaited. No usual answer has this value, because it has a record.
pub(super) const NOTHING: u32 = u32::MAX;
/// One advertised receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// The immediate of the usual answer to a receive with one member: one part without a record. For others one that
    /// can never come to this slot. Else [`NOTHING`].
    pub(super) usual: u32,
    /// Bytes advertised for the only member.
    pub(super) limit: u32,
    /// The request from the free list that waits for it. The usual receive has the slot's own instead, and one that
    /// was completed early none.
    pub(super) request: u16,
    /// Number of members.
    pub(super) members: u8,
    /// Parts that came in so far.
    pub(super) arrived: u8,
    /// The high byte of the first part's immediate, which all parts share: their number and whether there is a record.
    pub(super) shape: u8,
    /// Their bytes.
    pub(super) bytes: u32,
    /// What [`Self::usual`] would be, where that is one that can never come.
    pub(super) unusual: u32,
    /// All has come and is being copied to where it belongs.
    pub(super) copying: bool,
}

pub(super) const IDLE: Slot = Slot {
    usual: NOTHING,
    limit: 0,
    request: NO_REQUEST,
    members: 1,
    arrived: 0,
    shape: 0,
    bytes: 0,
    unusual: 0,
    copying: false,
};

impl Slot {
    /// Starts waiting, from idle, for the answer to a receive with one member.
    #[inline(always)]
    pub(super) fn await_one(&mut self, sequence: u32, limit: u32) {
        self.usual = Imm::new(sequence, 1, false).0;
        self.limit = limit;
    }

    /// Starts waiting, from idle, for the answer to a receive with `members` members whose answer is never the usual
    /// one: there are several, or data must be copied. `limit`: bytes advertised for the only member.
    pub(super) fn await_unusual(&mut self, sequence: u32, members: u8, limit: u32) {
        // The neighbour's sequence: immediates with it are looked up in the neighbour's slot. The bit tells the two
        // kinds of waiting apart.
        self.usual = Imm::new(sequence ^ 1, 1, true).0;
        self.unusual = Imm::new(sequence, 1, false).0;
        self.members = members;
        self.limit = limit;
    }

    /// Whether a receive is outstanding.
    #[inline(always)]
    pub(super) fn is_waiting(&self) -> bool {
        self.usual != NOTHING
    }

    /// Whether `imm` ends a part of the receive that this slot waits for.
    pub(super) fn is_answered_by(&self, imm: Imm) -> bool {
        let usual = if Imm(self.usual).has_record() { self.unusual } else { self.usual };
        self.is_waiting() && !self.copying && imm.matches(usual)
    }
}

/// Of the receives before number `next` the last one with this slot.
pub(super) fn last_in(slot: usize, next: u32) -> u32 {
    let last = next.wrapping_sub(1);
    last.wrapping_sub(last.wrapping_sub(slot as u32) % SLOTS as u32)
}
