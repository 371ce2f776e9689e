//! Rings in shared memory: receive entries and completions.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::abi::{Sge, Wc};
use crate::list::List;
use crate::shm::layout::{CQE_WORDS, CqSlot, rqe_words};
use crate::shm::region::Region;

/// Kind of a completion: void (its QP is gone), send or receive.
pub const KIND_VOID: u8 = 0;
/// A completion of the send queue.
pub const KIND_SEND: u8 = 1;
/// A completion of a receive queue.
pub const KIND_RECV: u8 = 2;

/// Value of a CQ's overrun word that lets nothing arrive any more.
pub const BROKEN: u32 = 2;

/// A receive entry, copied out of a ring.
#[derive(Clone, Debug)]
pub struct Receive {
    /// The application's id.
    pub wr_id: u64,
    sges: List<Sge, 4>,
}

impl Receive {
    /// An entry from a work request's parts; the list is cut at what any queue allows.
    pub fn new(wr_id: u64, list: impl Iterator<Item = Sge>) -> Self {
        Self { wr_id, sges: list.take(crate::env::MAX_SGE).collect() }
    }

    /// The scatter list.
    pub fn sges(&self) -> &[Sge] {
        self.sges.as_slice()
    }

    /// Stores the entry in a slot of a ring.
    pub fn store(&self, words: &[AtomicU64]) {
        // Relaxed: the ring's tail publishes the entry.
        let put = |i: usize, v: u64| {
            if let Some(word) = words.get(i) {
                word.store(v, Ordering::Relaxed);
            }
        };
        put(0, self.wr_id);
        put(1, self.sges().len() as u64);
        for (i, sge) in self.sges().iter().enumerate() {
            put(2 + 2 * i, sge.addr);
            put(3 + 2 * i, u64::from(sge.length) | u64::from(sge.lkey) << 32);
        }
    }

    /// Copies an entry out of a ring that somebody else may scribble on.
    pub fn load(words: &[AtomicU64]) -> Self {
        let get = |i: usize| words.get(i).map_or(0, |w| w.load(Ordering::Relaxed));
        let n = usize::try_from(get(1)).unwrap_or(0).min(words.len().saturating_sub(2) / 2);
        let sge = |i: usize| {
            let packed = get(3 + 2 * i);
            let length = u32::try_from(packed & 0xffff_ffff).unwrap_or(0);
            Sge { addr: get(2 + 2 * i), length, lkey: u32::try_from(packed >> 32).unwrap_or(0) }
        };
        Self::new(get(0), (0..n).map(sge))
    }
}

/// A receive ring as found in a slot; validated.
#[derive(Clone, Copy, Debug)]
pub struct RecvRing<'a> {
    words: &'a [AtomicU64],
    cap: u32,
    stride: usize,
    head: &'a AtomicU32,
    tail: &'a AtomicU32,
}

impl<'a> RecvRing<'a> {
    /// Views a ring; `None` if its numbers do not fit the region.
    pub fn view(
        region: &'a Region,
        off: u64,
        cap: u32,
        sge: u32,
        head: &'a AtomicU32,
        tail: &'a AtomicU32,
    ) -> Option<Self> {
        if !cap.is_power_of_two() || sge as usize > crate::env::MAX_SGE {
            return None;
        }
        let stride = rqe_words(sge);
        let words = region.heap_words(off, stride.checked_mul(cap as usize)?)?;
        Some(Self { words, cap, stride, head, tail })
    }

    fn entry(&self, at: u32) -> &'a [AtomicU64] {
        let start = (at & (self.cap - 1)) as usize * self.stride;
        self.words.get(start..start + self.stride).unwrap_or(&[])
    }

    /// Entries in the ring, as far as its indices make sense.
    pub fn used(&self) -> u32 {
        let used = self.tail.load(Ordering::SeqCst).wrapping_sub(self.head.load(Ordering::Relaxed));
        if used > self.cap { 0 } else { used }
    }

    /// Takes the oldest entry. The caller holds the consumer lock.
    pub fn pop(&self) -> Option<Receive> {
        // SeqCst: an empty ring leads to a waiter mark whose setter and the poster must not both miss each other.
        let tail = self.tail.load(Ordering::SeqCst);
        let head = self.head.load(Ordering::Relaxed);
        let used = tail.wrapping_sub(head);
        if used == 0 || used > self.cap {
            return None;
        }
        let entry = Receive::load(self.entry(head));
        // Release: the owner reuses the entry only after it was read.
        self.head.store(head.wrapping_add(1), Ordering::Release);
        Some(entry)
    }

    /// Appends an entry; `tail` is the owner's private count, so a scribbled shared one cannot mislead it.
    pub fn push(&self, tail: u32, entry: &Receive) {
        entry.store(self.entry(tail));
        self.tail.store(tail.wrapping_add(1), Ordering::SeqCst);
    }
}

/// A completion.
#[derive(Clone, Copy, Debug)]
pub struct Cqe {
    /// The public fields.
    pub wc: Wc,
    /// Kind.
    pub kind: u8,
    /// Send queue counter after this request.
    pub counter: u32,
}

impl Cqe {
    fn words(&self) -> [u64; 5] {
        let wc = &self.wc;
        let head = u64::from(wc.status & 0xff)
            | u64::from(wc.opcode & 0xff) << 8
            | u64::from(wc.wc_flags & 0xff) << 16
            | u64::from(self.kind) << 24
            | u64::from(wc.vendor_err) << 32;
        [
            wc.wr_id,
            head,
            u64::from(wc.byte_len) | u64::from(wc.imm_data) << 32,
            u64::from(wc.qp_num) | u64::from(wc.src_qp) << 32,
            u64::from(self.counter) | u64::from(wc.slid) << 32 | u64::from(wc.sl) << 48,
        ]
    }

    fn from_words(w: [u64; 5]) -> Self {
        let low = |v: u64| u32::try_from(v & 0xffff_ffff).unwrap_or(0);
        let high = |v: u64| low(v >> 32);
        let byte = |v: u64, shift: u32| u32::from(u8::try_from(v >> shift & 0xff).unwrap_or(0));
        let wc = Wc {
            wr_id: w[0],
            status: byte(w[1], 0),
            opcode: byte(w[1], 8),
            wc_flags: byte(w[1], 16),
            vendor_err: high(w[1]),
            byte_len: low(w[2]),
            imm_data: high(w[2]),
            qp_num: low(w[3]),
            src_qp: high(w[3]),
            pkey_index: 0,
            slid: u16::try_from(w[4] >> 32 & 0xffff).unwrap_or(0),
            sl: u8::try_from(w[4] >> 48 & 0xf).unwrap_or(0),
            dlid_path_bits: 0,
        };
        Self { wc, kind: u8::try_from(w[1] >> 24 & 0xff).unwrap_or(0), counter: low(w[4]) }
    }
}

/// A completion ring as found in a slot; validated.
#[derive(Clone, Copy, Debug)]
pub struct CqRing<'a> {
    words: &'a [AtomicU64],
    slot: &'a CqSlot,
    cap: u32,
}

/// What became of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// It is in the ring.
    Done,
    /// The ring was full; `first` if this is the first loss.
    Overrun {
        /// First loss of this CQ.
        first: bool,
    },
}

impl<'a> CqRing<'a> {
    /// Views a ring; `None` if its numbers do not fit the region.
    pub fn view(region: &'a Region, slot: &'a CqSlot) -> Option<Self> {
        let cap = slot.cap.load(Ordering::Acquire);
        if !cap.is_power_of_two() || cap > 1 << 22 {
            return None;
        }
        let words =
            region.heap_words(slot.off.load(Ordering::Relaxed), cap as usize * CQE_WORDS)?;
        Some(Self { words, slot, cap })
    }

    fn entry(&self, at: u32) -> &'a [AtomicU64] {
        let start = (at & (self.cap - 1)) as usize * CQE_WORDS;
        self.words.get(start..start + CQE_WORDS).unwrap_or(&[])
    }

    /// Appends a completion. The caller holds the producer lock.
    pub fn push(&self, cqe: &Cqe) -> Pushed {
        let tail = self.slot.tail.load(Ordering::Relaxed);
        // Acquire: the consumer has read the entry that is overwritten.
        let used = tail.wrapping_sub(self.slot.head.load(Ordering::Acquire));
        if used >= self.cap || self.slot.overrun.load(Ordering::Relaxed) == BROKEN {
            return Pushed::Overrun {
                first: self.slot.overrun.fetch_max(1, Ordering::AcqRel) == 0,
            };
        }
        for (word, value) in self.entry(tail).iter().zip(cqe.words()) {
            word.store(value, Ordering::Relaxed);
        }
        // Release: publishes the entry and every payload byte stored before it.
        self.slot.tail.store(tail.wrapping_add(1), Ordering::Release);
        Pushed::Done
    }

    /// Whether a just-pushed completion has to wake the channel; disarms it if so.
    pub fn fires(&self, solicited: bool) -> bool {
        // Pairs with the fence in `Cq::arm`: either the consumer sees the entry or this sees the request.
        fence(Ordering::SeqCst);
        match self.slot.armed.load(Ordering::Relaxed) {
            0 => false,
            1 if !solicited => false,
            _ => self.slot.armed.swap(0, Ordering::AcqRel) != 0,
        }
    }

    /// Reads an entry.
    pub fn load(&self, at: u32) -> Cqe {
        let words = self.entry(at);
        Cqe::from_words(std::array::from_fn(|i| {
            words.get(i).map_or(0, |w| w.load(Ordering::Relaxed))
        }))
    }

    /// Makes the entries of a destroyed QP invisible.
    pub fn void(&self, from: u32, qpn: u32) {
        let tail = self.slot.tail.load(Ordering::Acquire);
        for at in (0..tail.wrapping_sub(from).min(self.cap)).map(|i| from.wrapping_add(i)) {
            let cqe = self.load(at);
            if cqe.wc.qp_num == qpn
                && let Some(word) = self.entry(at).get(1)
            {
                word.fetch_and(!(0xff << 24), Ordering::Relaxed);
            }
        }
    }

    /// Entries.
    pub fn cap(&self) -> u32 {
        self.cap
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_survives_packing() {
        let wc = Wc {
            wr_id: u64::MAX - 1,
            status: 12,
            opcode: 129,
            vendor_err: 0x81,
            byte_len: 1 << 31,
            imm_data: 0xdead_beef,
            qp_num: 0x00ab_cdef,
            src_qp: 77,
            wc_flags: 2,
            pkey_index: 0,
            slid: 0x1234,
            sl: 5,
            dlid_path_bits: 0,
        };
        let back = Cqe::from_words(Cqe { wc, kind: KIND_RECV, counter: 99 }.words());
        assert_eq!(format!("{:?}", back.wc), format!("{wc:?}"));
        assert_eq!((back.kind, back.counter), (KIND_RECV, 99));
    }

    #[test]
    fn a_scribbled_receive_entry_is_cut_to_its_slot() {
        let words: Vec<AtomicU64> = (0..6).map(|_| AtomicU64::new(u64::MAX)).collect();
        assert_eq!(Receive::load(&words).sges().len(), 2);
        assert_eq!(Receive::load(&[]).sges().len(), 0);
    }
}
