//! Buffers that cannot be pinned where they lie, reached through copies.
//!
//! A sending end copies a buffer in pieces into a few chunks and sends those, one after the other, while the device is
//! still busy with the one before. A receiving end lets the peer write into a landing place of the buffer's size, and
//! copies from there when all has come. Both are made when the buffer is registered; nothing is allocated afterwards.
//!
//! The place where a peer may write is given back only when whoever advertised it has let go, after its queue pairs are
//! gone. The buffer itself is not touched any more once its handle is deregistered: a copy holds the buffer's lock,
//! which nobody else ever asks for but that deregistration.

use super::arena::{Arena, Lease};
use super::given::Given;
use super::ledger::Purpose;
use super::page::PageOwned;
use super::region::MAX_RAILS;
use super::registry::{Registered, Registry};
use crate::error::Result;
use crate::sync::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

/// Bytes of one chunk of a sending end.
pub const CHUNK: usize = 256 << 10;
/// Chunks of a sending end.
pub const CHUNKS: usize = 16;
/// Bytes of a landing place in use beyond which another receive waits, unless there is one only: data of the next shall
/// arrive while the one before is copied. More would keep no network busier, and a place that is used again soon is still
/// in a cache.
const ENOUGH: u64 = 8 << 20;
/// Units that a landing place is cut into.
const UNITS: usize = 64;
/// Units that receives which together fill the buffer may waste, one for each member of a group.
const WASTE: usize = 8;
/// Bytes that a unit is a multiple of: a cache line.
const LINE: usize = 64;

/// Chunks for all buffers of one sending end.
#[derive(Debug)]
pub struct Chunks {
    lease: Lease,
}

impl Chunks {
    /// Borrows them.
    ///
    /// # Errors
    /// See [`Arena::lend`].
    pub fn new(arena: &Arc<Arena>, registries: &[Arc<Registry>]) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { lease: arena.lend(CHUNK * CHUNKS, registries)? }))
    }

    /// The key of the chunks on a rail.
    pub fn lkey(&self, rail: usize) -> u32 {
        self.lease.registered().get(rail).map_or(0, |r| r.lkey())
    }

    /// Address of a chunk.
    pub fn addr(&self, chunk: usize) -> u64 {
        (self.lease.addr() + chunk % CHUNKS * CHUNK) as u64
    }
}

/// Where a peer writes what is meant for a buffer.
#[derive(Debug)]
pub struct Landing {
    lease: Lease,
    /// Bytes of one of the units.
    unit: usize,
    /// A bit for each unit in use. Changed by the thread that moves data only, like the next.
    used: AtomicU64,
    /// Bytes of what they were taken for, and how often that was.
    bytes: AtomicU64,
    runs: AtomicU64,
}

/// Adjacent units of a landing place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    first: u8,
    count: u8,
    /// Where in the first unit the data begin: as far from a word boundary as in the buffer, so that words are copied
    /// whole.
    phase: u8,
    /// Bytes of data.
    len: u32,
}

impl Run {
    fn mask(self) -> u64 {
        (u64::MAX >> (UNITS - usize::from(self.count))) << self.first
    }
}

/// The first of `count` adjacent clear bits.
fn find_clear(used: u64, count: usize) -> Option<u32> {
    let mut starts = !used;
    let mut more = count.checked_sub(1)?;
    if more >= UNITS {
        return None;
    }
    // Each round keeps the bits that have twice as many clear ones behind them.
    let mut step = 1;
    while more > 0 {
        let shift = step.min(more);
        starts &= starts >> shift;
        more -= shift;
        step *= 2;
    }
    (starts != 0).then(|| starts.trailing_zeros())
}

impl Landing {
    /// Bytes of a unit, so that receives which together fill `len` bytes fit.
    fn unit(len: usize) -> usize {
        (len + WASTE * size_of::<u64>()).div_ceil(UNITS - WASTE).next_multiple_of(LINE)
    }

    /// Borrows a place for a buffer of `len` bytes.
    ///
    /// # Errors
    /// See [`Arena::lend`].
    pub fn new(arena: &Arc<Arena>, registries: &[Arc<Registry>], len: usize) -> Result<Self> {
        let unit = Self::unit(len);
        let lease = arena.lend(unit * UNITS, registries)?;
        Ok(Self {
            lease,
            unit,
            used: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            runs: AtomicU64::new(0),
        })
    }

    /// `begun`: other members of the same receive have their room already, and it must not wait half-way.
    fn take(&self, addr: u64, len: u32, begun: bool) -> Option<Run> {
        let phase = addr % size_of::<u64>() as u64;
        let count = (len as usize + phase as usize).div_ceil(self.unit).max(1);
        let bytes = self.bytes.load(Ordering::Relaxed) + u64::from(len);
        if self.runs.load(Ordering::Relaxed) > 1 && bytes > ENOUGH && !begun {
            return None;
        }
        let first = find_clear(self.used.load(Ordering::Relaxed), count)?;
        let run = Run { first: first as u8, count: count as u8, phase: phase as u8, len };
        self.used.fetch_or(run.mask(), Ordering::Relaxed);
        self.bytes.fetch_add(len.into(), Ordering::Relaxed);
        self.runs.fetch_add(1, Ordering::Relaxed);
        Some(run)
    }

    fn give(&self, run: Run) {
        self.used.fetch_and(!run.mask(), Ordering::Relaxed);
        self.bytes.fetch_sub(run.len.into(), Ordering::Relaxed);
        self.runs.fetch_sub(1, Ordering::Relaxed);
    }

    /// Where in the lease a run's data begin.
    fn offset(&self, run: Run) -> usize {
        usize::from(run.first) * self.unit + usize::from(run.phase)
    }
}

#[derive(Debug)]
enum Side {
    Send(Arc<Chunks>),
    Recv(Landing),
}

/// Bytes per second of a copy from memory that no cache holds, measured once per process; `None` if there is no memory
/// to measure with, or no clock that moves.
pub fn copy_rate() -> Option<u64> {
    static RATE: OnceLock<Option<u64>> = OnceLock::new();
    *RATE.get_or_init(|| {
        const BYTES: usize = 16 << 20;
        let from = PageOwned::new(BYTES, Purpose::Probe).ok()?;
        let to = PageOwned::new(BYTES, Purpose::Probe).ok()?;
        let start = Instant::now();
        to.copy_from(&from);
        (BYTES as u64 * 1_000_000_000).checked_div(start.elapsed().as_nanos() as u64)
    })
}

/// A buffer that is reached through copies.
#[derive(Debug)]
pub struct Bounced {
    /// The buffer; gone when its handle is.
    given: Mutex<Option<Given>>,
    side: Side,
}

impl Bounced {
    /// A buffer of a sending end.
    pub fn send(given: Given, chunks: &Arc<Chunks>) -> Self {
        Self { given: Mutex::new(Some(given)), side: Side::Send(Arc::clone(chunks)) }
    }

    /// A buffer of a receiving end, whose landing place was made for its size.
    pub fn receive(given: Given, landing: Landing) -> Self {
        Self { given: Mutex::new(Some(given)), side: Side::Recv(landing) }
    }

    /// Runs `copy` unless the buffer is gone; whether it ran.
    fn with(&self, copy: impl FnOnce(&Given)) -> bool {
        let given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        given.as_ref().map(copy).is_some()
    }

    /// The handle was deregistered: no copy touches the buffer after this returns.
    pub fn close(&self) {
        *self.given.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The chunks of the sending end.
    pub fn chunks(&self) -> Option<&Arc<Chunks>> {
        match &self.side {
            Side::Send(chunks) => Some(chunks),
            Side::Recv(_) => None,
        }
    }

    /// Copies up to [`CHUNK`] bytes at `addr` into a chunk that nobody uses. `false`: the buffer is gone.
    pub fn copy_in(&self, addr: u64, len: u32, chunk: usize) -> bool {
        let Side::Send(chunks) = &self.side else { return false };
        let lease = &chunks.lease;
        let at = lease.offset() + chunk % CHUNKS * CHUNK;
        self.with(|given| given.copy_in(addr as usize, lease.pages(), at, len as usize))
    }

    /// Finds room for `len` bytes that are meant for `addr`; `None` if there is none now. `begun`: other members of the
    /// same receive have theirs already.
    pub fn take(&self, addr: u64, len: u32, begun: bool) -> Option<Run> {
        let Side::Recv(landing) = &self.side else { return None };
        landing.take(addr, len, begun)
    }

    /// Gives room back that no peer writes to any more.
    pub fn give(&self, run: Run) {
        if let Side::Recv(landing) = &self.side {
            landing.give(run);
        }
    }

    /// Whether no room is taken: what does not fit now never will.
    pub fn is_empty(&self) -> bool {
        matches!(&self.side, Side::Recv(landing) if landing.used.load(Ordering::Relaxed) == 0)
    }

    /// The address that a peer writes to for a run.
    pub fn landing_addr(&self, run: Run) -> u64 {
        match &self.side {
            Side::Recv(landing) => (landing.lease.addr() + landing.offset(run)) as u64,
            Side::Send(_) => 0,
        }
    }

    /// The keys to give to a peer, in rail order; unused entries are 0.
    pub fn landing_rkeys(&self) -> [u32; MAX_RAILS] {
        let registered: &[Arc<Registered>] = match &self.side {
            Side::Recv(landing) => landing.lease.registered(),
            Side::Send(_) => &[],
        };
        std::array::from_fn(|rail| registered.get(rail).map_or(0, |r| r.rkey()))
    }

    /// Copies `len` bytes that came `done` bytes into a run to `addr`. `false`: the buffer is gone.
    pub fn copy_out(&self, run: Run, done: u32, addr: u64, len: u32) -> bool {
        let Side::Recv(landing) = &self.side else { return false };
        let lease = &landing.lease;
        let at = lease.offset() + landing.offset(run) + done as usize;
        let copied =
            self.with(|given| given.copy_out(lease.pages(), at, addr as usize, len as usize));
        // Whoever is told of the copy afterwards, by whatever means, sees it.
        fence(Ordering::Release);
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn clear_bits_are_found_where_there_are_some(used: u64, count in 1..=UNITS) {
            let fits = |first: usize| (first..first + count).all(|bit| used >> bit & 1 == 0);
            let expected = (0..=UNITS - count).find(|first| fits(*first));
            prop_assert_eq!(find_clear(used, count).map(|first| first as usize), expected);
        }

        #[test]
        fn receives_that_fill_a_buffer_fit(len in 1..200_000_usize, cuts in prop::collection::vec(0..200_000_usize, 7)) {
            let arena = Arena::new(1 << 20);
            let landing = Landing::new(&arena, &[], len).unwrap();
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut % (len + 1)).chain([0, len]).collect();
            cuts.sort_unstable();
            let mut runs = Vec::new();
            for pair in cuts.windows(2) {
                let begun = !runs.is_empty();
                let len = (pair[1] - pair[0]) as u32;
                let run = landing.take(0x1003 + pair[0] as u64, len, begun);
                prop_assert!(run.is_some(), "{:?} of {}", pair, len);
                let run = run.unwrap();
                let end = landing.offset(run) + pair[1] - pair[0];
                prop_assert!(end <= (usize::from(run.first) + usize::from(run.count)) * landing.unit);
                prop_assert!(end <= landing.lease.len());
                runs.push(run);
            }
            runs.into_iter().for_each(|run| landing.give(run));
            prop_assert_eq!(landing.used.load(Ordering::Relaxed), 0);
            prop_assert_eq!(landing.bytes.load(Ordering::Relaxed), 0);
        }
    }

    /// Whatever the size of the buffer, and so of a unit: what counts is the bytes.
    #[test]
    fn enough_is_in_flight_with_a_few_large_receives() {
        let (quarter, all) = ((ENOUGH / 4) as u32, ENOUGH as u32);
        for size in [4, 20] {
            let arena = Arena::new(1 << 30);
            let landing = Landing::new(&arena, &[], size * ENOUGH as usize).unwrap();
            let runs: Vec<_> = (0..8).map_while(|_| landing.take(0x1000, quarter, false)).collect();
            assert_eq!(runs.len(), 4);
            assert!(landing.take(0x1000, quarter, true).is_some(), "the rest of a receive waits");
            let other = Landing::new(&arena, &[], size * ENOUGH as usize).unwrap();
            let large = [(); 3].map(|()| other.take(0x1000, all, false).is_some());
            assert_eq!(large, [true, true, false]);
        }
    }

    #[test]
    fn more_than_there_is_does_not_fit() {
        assert_eq!(find_clear(0, 0), None);
        assert_eq!(find_clear(0, UNITS + 1), None);
        assert_eq!(find_clear(1, UNITS), None);
    }

    #[test]
    fn a_buffer_that_is_gone_is_not_touched() {
        let arena = Arena::new(8 << 20);
        let mut bytes = [1_u8; 64];
        // SAFETY: the array outlives its use below.
        #[allow(unsafe_code, reason = "stands in for a caller's promise")]
        let mut given = || unsafe { Given::new(bytes.as_mut_ptr().cast(), 64) }.unwrap();
        let (sent, received) = (given(), given());
        let addr = sent.addr() as u64;
        let chunks = Chunks::new(&arena, &[]).unwrap();
        let out = Bounced::send(sent, &chunks);
        let back = Bounced::receive(received, Landing::new(&arena, &[], 64).unwrap());
        let run = back.take(addr, 64, false).unwrap();
        assert!(out.copy_in(addr, 64, 3) && back.copy_out(run, 0, addr, 64));
        out.close();
        back.close();
        assert!(!out.copy_in(addr, 64, 3) && !back.copy_out(run, 0, addr, 64));
        assert!(!back.is_empty());
        back.give(run);
        assert!(back.is_empty());
    }
}
