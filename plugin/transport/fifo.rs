//! The credit FIFO and the size records: the two places that a peer writes into this process.
//!
//! The sender owns the FIFO. The receiver advertises receive number `k` (from 0) by writing its members as entries of
//! slot `k % SLOTS` with sequence `k + 1`, the sequence last. The sender owns nothing of the receiver's memory but the
//! slots of size records, into which it writes how much of each member it sent when the completion cannot say.
//!
//! Why [`SLOTS`] slots are enough: a receiver has at most that many receives which are not complete, and the sender
//! consumes slots in order, so a slot is rewritten only after the receive that used it completed. What would break
//! this: completing a receive before all its members were matched.
//!
//! Entries are little-endian. An entry is one 32-byte half for up to two rails, two halves for more; the last aligned
//! eight bytes of every half carry the sequence, and adapters make an aligned half visible in address order.
//!
//! A peer may write anything here at any time. Words are read once into locals, validated by whoever uses them, and
//! never decide a local address.

use crate::memory::piece::Piece;
use crate::memory::region::MAX_RAILS;
use crate::sync::{AtomicU32, AtomicU64, OBSERVE, Ordering, fence, read_half};
use std::ptr::NonNull;
use std::sync::Arc;

/// Receives that may be advertised and not complete.
pub const SLOTS: usize = 32;
/// Members of one receive.
pub const MEMBERS: usize = 8;
/// Bytes of an entry that names keys for up to two rails.
const HALF: usize = 32;
/// Bytes of one slot of size records.
const RECORD: usize = MEMBERS * size_of::<u32>();

/// Bytes of one entry on a connection whose receiver has `rails` rails.
pub fn stride(rails: usize) -> usize {
    if rails <= 2 { HALF } else { 2 * HALF }
}

/// One advertised member, as the receiver writes it and the sender reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// Address of the buffer at the receiver.
    pub addr: u64,
    /// Bytes that may be sent.
    pub len: u32,
    /// Tag that the send must have.
    pub tag: u32,
    /// Remote keys in the receiver's rail order.
    pub rkeys: [u32; MAX_RAILS],
    /// Members of this receive, 1 to [`MEMBERS`].
    pub members: u32,
    /// Receive number + 1, wrapping.
    pub sequence: u32,
}

#[inline(always)]
fn pack(low: u32, high: u32) -> u64 {
    (u64::from(low) | u64::from(high) << 32).to_le()
}

#[inline(always)]
fn unpack(word: u64) -> (u32, u32) {
    let word = u64::from_le(word);
    #[expect(clippy::cast_possible_truncation, reason = "the two halves are taken on purpose")]
    (word as u32, (word >> 32) as u32)
}

/// A grid of slots × members in memory that the other side writes or reads by RDMA.
#[derive(Debug)]
pub struct CreditFifo {
    /// The first word of the grid.
    base: NonNull<AtomicU64>,
    stride: usize,
    piece: Arc<Piece>,
}

// SAFETY: the words are atomics inside the mapping that `piece` keeps alive.
unsafe impl Send for CreditFifo {}

/// The head of a one-member receive in a FIFO of one-half entries.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    words: &'a [AtomicU64; HALF / 8],
    rkeys: &'a [AtomicU32; 2],
}

impl Head<'_> {
    /// Bytes that may be sent and the tag that the send must have.
    #[inline(always)]
    pub fn len_and_tag(self) -> (u32, u32) {
        unpack(self.words[1].load(Ordering::Relaxed))
    }

    /// Address of the buffer at the receiver.
    #[inline(always)]
    pub fn addr(self) -> u64 {
        u64::from_le(self.words[0].load(Ordering::Relaxed))
    }

    /// The key of the receiver's `rail`, 0 or 1.
    #[inline(always)]
    pub fn rkey(self, rail: usize) -> u32 {
        u32::from_le(self.rkeys[rail % 2].load(Ordering::Relaxed))
    }
}

/// What the head of the FIFO holds.
#[derive(Clone, Copy, Debug)]
pub enum Front<'a> {
    /// The receive asked for has not been advertised.
    Empty,
    /// It has one member, and this is it.
    One(Head<'a>),
    /// It has several members.
    Several,
}

impl CreditFifo {
    /// Bytes of a one-half entry.
    pub const SHORT: u32 = HALF as u32;

    /// Offset of the first entry of `slot` from the start of a grid of one-half entries.
    #[inline(always)]
    pub fn short_offset(slot: usize) -> u64 {
        (slot % SLOTS * (MEMBERS * HALF)) as u64
    }

    /// Bytes of the grid with this stride.
    pub fn bytes(stride: usize) -> usize {
        SLOTS * MEMBERS * stride
    }

    /// A grid at the start of `piece`.
    pub fn new(piece: Arc<Piece>, stride: usize) -> Self {
        assert!(piece.len() >= Self::bytes(stride) && stride.is_multiple_of(HALF));
        Self { base: piece.base().cast(), stride, piece }
    }

    /// Bytes of one entry.
    #[inline(always)]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Offset of an entry from the start of the grid.
    #[inline(always)]
    pub fn offset(&self, slot: usize, member: usize) -> usize {
        (slot % SLOTS * MEMBERS + member % MEMBERS) * self.stride
    }

    /// Address of an entry in this process.
    #[inline(always)]
    pub fn addr(&self, slot: usize, member: usize) -> u64 {
        (self.piece.addr() + self.offset(slot, member)) as u64
    }

    /// The four words of the first entry of `slot` in a FIFO of one-half entries; in one of long entries some other words
    /// of the grid.
    #[inline(always)]
    fn short_half(&self, slot: usize) -> NonNull<[AtomicU64; HALF / 8]> {
        // SAFETY: `new` checked that the mapping holds the whole grid, of which this is an entry; the mapping lives as
        // long as `piece`.
        unsafe { self.base.byte_add(slot % SLOTS * (MEMBERS * HALF)).cast() }
    }

    /// Looks at the first entry of `slot`, expecting `sequence`, without copying it. Only for one-half entries.
    #[inline(always)]
    pub fn front(&self, slot: usize, sequence: u32) -> Front<'_> {
        let half = self.short_half(slot);
        // SAFETY: inside the mapping, see `short_half`; peers and devices are only met through atomics. The keys are
        // read alone as the two halves of the third word.
        let (words, rkeys) = unsafe { (half.as_ref(), half.byte_add(16).cast().as_ref()) };
        // See `read`.
        let word = words[3].load(OBSERVE);
        if word == pack(1, sequence) {
            Front::One(Head { words, rkeys })
        } else if unpack(word).1 == sequence {
            Front::Several
        } else {
            Front::Empty
        }
    }

    /// Fills the first entry of `slot` of the local copy with a one-member receive, in a FIFO of one-half entries.
    #[inline(always)]
    pub fn fill_one(
        &self,
        slot: usize,
        addr: u64,
        len: u32,
        tag: u32,
        rkeys: [u32; 2],
        sequence: u32,
    ) {
        // SAFETY: inside the mapping, see `short_half`.
        let half = unsafe { self.short_half(slot).as_ref() };
        half[0].store(addr.to_le(), Ordering::Relaxed);
        half[1].store(pack(len, tag), Ordering::Relaxed);
        half[2].store(pack(rkeys[0], rkeys[1]), Ordering::Relaxed);
        half[3].store(pack(1, sequence), Ordering::Relaxed);
    }

    /// Whether entries are one half long: keys for up to two rails.
    #[inline(always)]
    pub fn is_short(&self) -> bool {
        self.stride == HALF
    }

    /// The entry if it carries `sequence`.
    pub fn read(&self, slot: usize, member: usize, sequence: u32) -> Option<Credit> {
        let at = self.offset(slot, member);
        let half = |at: usize| {
            // Pairs with the adapter's in-order write of the half. What is read after its end was written before.
            let word = |index: usize| self.piece.u64_at(at + index * size_of::<u64>());
            read_half(word, |last| unpack(last).1 == sequence)
        };
        let [addr, len_and_tag, first, last] = half(at)?;
        let mut rkeys = [0; MAX_RAILS];
        (rkeys[0], rkeys[1]) = unpack(first);
        if self.stride > HALF {
            for (pair, word) in (1..MAX_RAILS / 2).zip(half(at + HALF)?) {
                (rkeys[2 * pair], rkeys[2 * pair + 1]) = unpack(word);
            }
        }
        let (len, tag) = unpack(len_and_tag);
        let (members, sequence) = unpack(last);
        Some(Credit { addr: u64::from_le(addr), len, tag, rkeys, members, sequence })
    }

    /// Fills an entry of the local copy, from which it is written to the peer.
    pub fn fill(&self, slot: usize, member: usize, credit: &Credit) {
        let at = self.offset(slot, member);
        let put = |offset: usize, word: u64| {
            self.piece.u64_at(at + offset).store(word, Ordering::Relaxed);
        };
        put(0, credit.addr.to_le());
        put(8, pack(credit.len, credit.tag));
        put(16, pack(credit.rkeys[0], credit.rkeys[1]));
        if self.stride > HALF {
            for pair in 0..3 {
                put(HALF + 8 * pair, pack(credit.rkeys[2 + 2 * pair], credit.rkeys[3 + 2 * pair]));
            }
            put(HALF + 24, pack(0, credit.sequence));
        }
        put(24, pack(credit.members, credit.sequence));
    }
}

/// Sizes of the members of each outstanding receive, one slot per receive.
#[derive(Debug)]
pub struct SizeRecords {
    piece: Arc<Piece>,
    base: usize,
}

impl SizeRecords {
    /// Bytes of all records.
    pub const BYTES: usize = SLOTS * RECORD;

    /// Records that begin `base` bytes into `piece`.
    pub fn new(piece: Arc<Piece>, base: usize) -> Self {
        assert!(piece.len() >= base + Self::BYTES && base.is_multiple_of(RECORD));
        Self { piece, base }
    }

    /// Address of the record of `slot` in this process.
    #[inline(always)]
    pub fn addr(&self, slot: usize) -> u64 {
        (self.piece.addr() + self.base) as u64 + Self::offset(slot)
    }

    /// Offset of the record of `slot` from the first.
    #[inline(always)]
    pub fn offset(slot: usize) -> u64 {
        (slot % SLOTS * RECORD) as u64
    }

    fn word(&self, slot: usize, member: usize) -> &AtomicU32 {
        self.piece.u32_at(self.base + slot % SLOTS * RECORD + member % MEMBERS * size_of::<u32>())
    }

    /// Puts a size into the local copy.
    pub fn fill(&self, slot: usize, member: usize, size: u32) {
        self.word(slot, member).store(size.to_le(), Ordering::Relaxed);
    }

    /// Reads the size of the first member. Called after the completion that follows the record.
    pub fn read_one(&self, slot: usize) -> u32 {
        // Acquire: see `read`.
        u32::from_le(self.word(slot, 0).load(Ordering::Acquire))
    }

    /// Reads the sizes of the first `members` members. Called after the completion that follows the record.
    pub fn read(&self, slot: usize, members: usize) -> [u32; MEMBERS] {
        // Pairs with the peer's write, which its completion said is here.
        fence(OBSERVE);
        let mut sizes = [0; MEMBERS];
        for (member, size) in sizes.iter_mut().enumerate().take(members) {
            *size = u32::from_le(self.word(slot, member).load(Ordering::Relaxed));
        }
        sizes
    }
}

/// Bytes of a grid and, behind it, the records.
pub fn grid_and_records_bytes(stride: usize) -> usize {
    CreditFifo::bytes(stride) + SizeRecords::BYTES
}

/// A grid and, behind it, the records.
pub fn grid_and_records(piece: &Arc<Piece>, stride: usize) -> (CreditFifo, SizeRecords) {
    let records = SizeRecords::new(Arc::clone(piece), CreditFifo::bytes(stride));
    (CreditFifo::new(Arc::clone(piece), stride), records)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::ledger::Purpose;
    use proptest::prelude::*;

    fn grid(rails: usize) -> (Arc<Piece>, CreditFifo, SizeRecords) {
        let bytes = grid_and_records_bytes(stride(rails));
        let piece = Piece::unregistered(bytes, Purpose::Credits).unwrap();
        let (fifo, records) = grid_and_records(&piece, stride(rails));
        (piece, fifo, records)
    }

    proptest! {
        #[test]
        fn what_is_filled_is_read(
            slot in 0..SLOTS, member in 0..MEMBERS, rails in 1..=MAX_RAILS,
            addr: u64, len: u32, tag: u32, mut rkeys: [u32; MAX_RAILS], members in 1..=8_u32, sequence: u32,
        ) {
            let (_, fifo, _) = grid(rails);
            if rails <= 2 {
                rkeys[2..].fill(0);
            }
            let credit = Credit { addr, len, tag, rkeys, members, sequence };
            fifo.fill(slot, member, &credit);
            prop_assert_eq!(fifo.read(slot, member, sequence), Some(credit));
            prop_assert_eq!(fifo.read(slot, member, sequence.wrapping_add(1)), None);
        }

        #[test]
        fn sizes_do_not_mix(slot in 0..SLOTS, sizes: [u32; MEMBERS], n in 1..=MEMBERS) {
            let (_, _, records) = grid(1);
            for (member, size) in sizes.iter().enumerate() {
                records.fill(slot, member, *size);
                records.fill((slot + 1) % SLOTS, member, !size);
            }
            let read = records.read(slot, n);
            prop_assert_eq!(&read[..n], &sizes[..n]);
            prop_assert!(read[n..].iter().all(|s| *s == 0));
        }
    }

    #[test]
    fn entries_do_not_overlap() {
        for rails in [1, 3] {
            let (piece, fifo, records) = grid(rails);
            let mut end = piece.addr() as u64;
            for slot in 0..SLOTS {
                for member in 0..MEMBERS {
                    assert_eq!(fifo.addr(slot, member), end);
                    end += fifo.stride() as u64;
                }
            }
            assert_eq!(records.addr(0), end);
            assert!(records.addr(SLOTS - 1) + RECORD as u64 <= (piece.addr() + piece.len()) as u64);
        }
    }
}
