//! What a receiving end knows of one advertised receive.

use super::stripe::Imm;

/// Stands for no request.
pub(super) const NO_REQUEST: u16 = u16::MAX;
/// In [`Slot::usual`]: nothing is awaited. No usual answer has this value, because it has a record.
pub(super) const NOTHING: u32 = u32::MAX;
/// One advertised receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// The immediate of the usual answer to a receive with one member: one part without a record. For several members
    /// one that can never come to this slot. Else [`NOTHING`].
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
    /// For several members: the immediate of one part without a record.
    pub(super) several: u32,
}

pub(super) const IDLE: Slot = Slot {
    usual: NOTHING,
    limit: 0,
    request: NO_REQUEST,
    members: 1,
    arrived: 0,
    shape: 0,
    bytes: 0,
    several: 0,
};

impl Slot {
    /// Starts waiting, from idle, for the answer to a receive with one member.
    #[inline(always)]
    pub(super) fn await_one(&mut self, sequence: u32, limit: u32) {
        self.usual = Imm::new(sequence, 1, false).0;
        self.limit = limit;
    }

    /// Starts waiting, from idle, for the answer to a receive with `members` members, more than one.
    pub(super) fn await_several(&mut self, sequence: u32, members: u8) {
        // The neighbour's sequence: immediates with it are looked up in the neighbour's slot.
        self.usual = Imm::new(sequence ^ 1, 1, true).0;
        self.several = Imm::new(sequence, 1, false).0;
        self.members = members;
    }

    /// Whether a receive is outstanding.
    #[inline(always)]
    pub(super) fn is_waiting(&self) -> bool {
        self.usual != NOTHING
    }

    /// Whether `imm` ends a part of the receive that this slot waits for.
    pub(super) fn is_answered_by(&self, imm: Imm) -> bool {
        let usual = if self.members > 1 { self.several } else { self.usual };
        self.is_waiting() && imm.matches(usual)
    }
}
