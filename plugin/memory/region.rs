//! A range of memory registered on every rail of a communicator: what a memory handle (`mhandle`) points at.

use super::registry::Registered;
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
    start: u64,
    len: u64,
    lkeys: [u32; MAX_RAILS],
    rkeys: [u32; MAX_RAILS],
    kind: RegionKind,
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
    live: HashMap<u64, Vec<Arc<Registered>>>,
}

impl Regions {
    /// A region over one registration per rail, in rail order, for the range the caller asked for.
    pub fn add(
        &self,
        addr: usize,
        len: usize,
        kind: RegionKind,
        registered: Vec<Arc<Registered>>,
    ) -> Region {
        let mut region = Region::bare(addr, len, kind, &registered);
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        region.id = table.next;
        region.home = Arc::downgrade(&self.0);
        table.next += 1;
        table.live.insert(region.id, registered);
        region
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade() else { return };
        let gone = home.lock().unwrap_or_else(PoisonError::into_inner).live.remove(&self.id);
        // The verb runs here, after the lock was released.
        drop(gone);
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
        Self { start: addr as u64, len: len as u64, lkeys, rkeys, kind, id: 0, home: Weak::new() }
    }

    /// Whether `len` bytes at `addr` lie inside what was registered.
    #[inline]
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        let offset = addr.wrapping_sub(self.start);
        offset <= self.len && len <= self.len - offset
    }

    /// The registered range as (address, bytes).
    pub fn range(&self) -> (u64, u64) {
        (self.start, self.len)
    }

    /// The kind of pointer it was registered as.
    pub fn kind(&self) -> RegionKind {
        self.kind
    }

    /// The key for this host's work requests on `rail`.
    #[inline]
    pub fn lkey(&self, rail: usize) -> u32 {
        self.lkeys[rail % MAX_RAILS]
    }

    /// The keys to give to a peer, in rail order; unused entries are 0.
    #[inline]
    pub fn rkeys(&self) -> &[u32; MAX_RAILS] {
        &self.rkeys
    }

    /// A local range of this region on `rail`.
    #[inline]
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
    }
}
