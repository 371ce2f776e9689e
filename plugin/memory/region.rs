//! A range of memory registered on every rail of a communicator: what a memory handle (`mhandle`) points at.

use super::bounce::Bounced;
use super::collateral::Entry;
use super::ledger::PinRecord;
use super::registry::Registered;
use super::status::Board;
use super::status::layout::board;
use crate::verbs::wr::Local;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What kind of pointer a range was registered as (`NCCL_PTR_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RegionKind {
    /// Host memory.
    Host,
    /// Device memory, reached by address through a peer-memory kernel module.
    Cuda,
    /// Device memory, reached through a DMA-BUF.
    DmaBuf,
}

/// Rails that one communicator can have.
pub const MAX_RAILS: usize = 8;

/// A registered range. Keys are copied out of the regions so that posting reads one cache line.
#[derive(Debug)]
pub struct Region {
    /// What devices reach directly: nothing of a range that is reached through copies.
    start: u64,
    len: u64,
    lkeys: [u32; MAX_RAILS],
    rkeys: [u32; MAX_RAILS],
    kind: RegionKind,
    /// What the caller asked for.
    asked: (u64, u64),
    /// How the range is reached if not directly.
    bounced: Option<Weak<Bounced>>,
    id: u64,
    home: Weak<Mutex<Table>>,
}

/// The registrations behind the regions of one communicator.
///
/// They belong to the communicator: when it is closed they end, whether or not their handles were deregistered, so
/// that no device can reach memory that nobody watches over any more. A handle that is left is an empty shell.
#[derive(Debug, Default)]
pub struct Regions(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    live: HashMap<u64, Backing>,
    /// Where they are counted.
    board: Board,
}

impl Table {
    /// Counts a region that was added, or went: `sign` is 1 or its negative.
    fn count(&self, region: &Region, sign: u64) {
        let (number, bytes) = if region.is_bounced() {
            (board::BOUNCED, board::BOUNCED_BYTES)
        } else {
            (board::REGISTERED, board::REGISTERED_BYTES)
        };
        self.board.share(number, sign);
        self.board.share(bytes, region.asked.1.wrapping_mul(sign));
    }
}

/// What is on record about the memory of a region, for as long as that may be used.
#[derive(Debug, Default)]
pub struct Records {
    /// A pin that somebody else took before.
    pub earlier: Option<PinRecord>,
    /// That it shares its pages.
    pub shared: Option<Entry>,
}

/// What a region needs for as long as it may be used.
#[derive(Debug)]
struct Backing {
    /// Ends first.
    _registered: Vec<Arc<Registered>>,
    bounced: Option<Arc<Bounced>>,
    _records: Records,
}

impl Regions {
    /// None yet. They are counted on a board.
    pub fn new(board: Board) -> Self {
        Self(Arc::new(Mutex::new(Table { board, ..Table::default() })))
    }

    /// A region over one registration per rail, in rail order, for the range the caller asked for.
    pub fn add(
        &self,
        addr: usize,
        len: usize,
        kind: RegionKind,
        registered: Vec<Arc<Registered>>,
        records: Records,
    ) -> Region {
        let region = Region::bare(addr, len, kind, &registered);
        self.keep(region, Backing { _registered: registered, bounced: None, _records: records })
    }

    /// A region of host memory that is reached through copies.
    pub fn add_bounced(
        &self,
        addr: usize,
        len: usize,
        bounced: Bounced,
        records: Records,
    ) -> Region {
        let bounced = Arc::new(bounced);
        // Directly reachable: nothing, not even the empty range at its first address.
        let mut region = Region::bare(addr, len, RegionKind::Host, &[]);
        (region.start, region.len) = (u64::MAX, 0);
        region.bounced = Some(Arc::downgrade(&bounced));
        let backing =
            Backing { _registered: Vec::new(), bounced: Some(bounced), _records: records };
        self.keep(region, backing)
    }

    fn keep(&self, mut region: Region, backing: Backing) -> Region {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        region.id = table.next;
        region.home = Arc::downgrade(&self.0);
        table.next += 1;
        table.count(&region, 1);
        table.live.insert(region.id, backing);
        region
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade() else { return };
        let mut table = home.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = table.live.remove(&self.id);
        if gone.is_some() {
            table.count(self, 1_u64.wrapping_neg());
        }
        drop(table);
        // Verbs run here, after the lock was released.
        if let Some(Backing { bounced: Some(bounced), .. }) = &gone {
            bounced.close();
        }
    }
}

impl Region {
    fn bare(addr: usize, len: usize, kind: RegionKind, registered: &[Arc<Registered>]) -> Self {
        let mut lkeys = [0; MAX_RAILS];
        let mut rkeys = [0; MAX_RAILS];
        for (rail, r) in registered.iter().take(MAX_RAILS).enumerate() {
            lkeys[rail] = r.lkey();
            rkeys[rail] = r.rkey();
        }
        Self {
            start: addr as u64,
            len: len as u64,
            lkeys,
            rkeys,
            kind,
            asked: (addr as u64, len as u64),
            bounced: None,
            id: 0,
            home: Weak::new(),
        }
    }

    /// Whether `len` bytes at `addr` lie inside what devices reach directly.
    #[inline(always)]
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        let offset = addr.wrapping_sub(self.start);
        // No region is as long as the largest number.
        offset.saturating_add(len) <= self.len
    }

    /// Whether the byte at `addr` lies there.
    #[inline(always)]
    pub fn holds(&self, addr: u64) -> bool {
        addr.wrapping_sub(self.start) < self.len
    }

    /// Whether the range is reached through copies.
    pub fn is_bounced(&self) -> bool {
        self.bounced.is_some()
    }

    /// How to reach `len` bytes at `addr` through copies, if that is how this range is reached and they lie inside.
    pub fn bounced(&self, addr: u64, len: u64) -> Option<Arc<Bounced>> {
        let offset = addr.wrapping_sub(self.asked.0);
        let inside = offset <= self.asked.1 && len <= self.asked.1 - offset;
        self.bounced.as_ref().filter(|_| inside)?.upgrade()
    }

    /// The registered range as (address, bytes).
    pub fn range(&self) -> (u64, u64) {
        self.asked
    }

    /// The kind of pointer it was registered as.
    pub fn kind(&self) -> RegionKind {
        self.kind
    }

    /// The key for this host's work requests on `rail`.
    #[inline(always)]
    pub fn lkey(&self, rail: usize) -> u32 {
        self.lkeys[rail % MAX_RAILS]
    }

    /// The keys to give to a peer, in rail order; unused entries are 0.
    #[inline(always)]
    pub fn rkeys(&self) -> &[u32; MAX_RAILS] {
        &self.rkeys
    }

    /// A local range of this region on `rail`.
    #[inline(always)]
    pub fn local(&self, rail: usize, addr: u64, len: u32) -> Local {
        Local { addr, len, lkey: self.lkey(rail) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containment_is_exact_at_both_ends() {
        let region = Region::bare(0x1000, 0x100, RegionKind::Host, &[]);
        assert!(region.contains(0x1000, 0x100));
        assert!(region.contains(0x10ff, 1));
        assert!(region.contains(0x1100, 0));
        assert!(!region.contains(0xfff, 1));
        assert!(!region.contains(0x1000, 0x101));
        assert!(!region.contains(0x1101, 0));
        assert!(!region.contains(u64::MAX, 2));
        assert!(!region.contains(0x1080, u64::MAX));
        let held = [0xfff, 0x1000, 0x10ff, 0x1100, u64::MAX].map(|addr| region.holds(addr));
        assert_eq!(held, [false, true, true, false, false]);
    }
}
