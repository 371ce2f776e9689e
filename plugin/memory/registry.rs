//! The registrations of one protection domain.
//!
//! NCCL registers the same buffers again for every connection, so a range that an existing registration covers with
//! the same access is shared. Identity includes the access bits: a strongly ordered request is never served by a
//! relaxed region. No lock is held across a verbs call: one slow pin does not block others.
//!
//! DMA-BUF registrations are not shared: their addresses are offsets that several buffers have in common.

use super::page::page_size;
use super::ranges::Ranges;
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};
use crate::verbs::mr::Access;
use crate::verbs::{MemoryRegion, ProtectionDomain};
use crossbeam_utils::CachePadded;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// One live registration. Deregistered when the last user drops it.
#[derive(Debug)]
pub struct Registered {
    region: Option<MemoryRegion>,
    start: usize,
    end: usize,
    shared_in: Weak<Registry>,
}

impl Registered {
    /// The key for this host's work requests.
    pub fn lkey(&self) -> u32 {
        self.region.as_ref().map_or(0, MemoryRegion::lkey)
    }

    /// The key to give to a peer.
    pub fn rkey(&self) -> u32 {
        self.region.as_ref().map_or(0, MemoryRegion::rkey)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(registry) = self.shared_in.upgrade() {
            registry.forget(self);
        }
        // The verb runs here, after the registry's lock was released.
        self.region = None;
    }
}

/// The shared registrations of one protection domain, by address.
pub struct Registry {
    pd: Arc<ProtectionDomain>,
    ranges: CachePadded<Mutex<Ranges<Registered>>>,
    registrations: AtomicU64,
    /// Counted without the lock, so on a line of its own: it must not take the lock's line from who holds it.
    hits: CachePadded<AtomicU64>,
}

impl Registry {
    /// An empty registry.
    pub fn new(pd: &Arc<ProtectionDomain>) -> Arc<Self> {
        Arc::new(Self {
            pd: Arc::clone(pd),
            ranges: CachePadded::default(),
            registrations: AtomicU64::new(0),
            hits: CachePadded::default(),
        })
    }

    /// The protection domain.
    pub fn pd(&self) -> &Arc<ProtectionDomain> {
        &self.pd
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges<Registered>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A registration that covers `len` bytes at `addr` with exactly `access`: an existing one, or a new one of the
    /// page-rounded range.
    ///
    /// # Errors
    /// The range wraps around the address space, or the verb fails.
    pub fn register(
        self: &Arc<Self>,
        addr: usize,
        len: usize,
        access: Access,
    ) -> Result<Arc<Registered>> {
        let (start, end) = page_range(addr, len)?;
        if let Some(found) = self.ranges().covering(start, end, access) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(found);
        }
        let region = MemoryRegion::register(&self.pd, start, end - start, access)?;
        let new = Arc::new(Registered {
            region: Some(region),
            start,
            end,
            shared_in: Arc::downgrade(self),
        });
        let mut ranges = self.ranges();
        // Somebody else may have registered the range meanwhile. Theirs is shared, ours dropped after the lock.
        if let Some(found) = ranges.covering(start, end, access) {
            drop(ranges);
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(found);
        }
        ranges.add(start, end, access, &new);
        self.registrations.fetch_add(1, Ordering::Relaxed);
        Ok(new)
    }

    /// A registration of `len` bytes from `offset` of a DMA-BUF that answers to the addresses from `addr` on. Never
    /// shared; the descriptor is not kept.
    ///
    /// # Errors
    /// The range wraps around, or the verb fails.
    pub fn register_dmabuf(
        self: &Arc<Self>,
        addr: usize,
        len: usize,
        fd: BorrowedFd<'_>,
        offset: u64,
        access: Access,
    ) -> Result<Arc<Registered>> {
        let end = addr.checked_add(len).ok_or_else(|| wraps(addr, len))?;
        let region = MemoryRegion::register_dmabuf(&self.pd, fd, offset, len, addr as u64, access)?;
        self.registrations.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Registered { region: Some(region), start: addr, end, shared_in: Weak::new() }))
    }

    fn forget(&self, gone: &Registered) {
        self.ranges().forget(gone.start, gone.end);
    }

    /// Distinct live shared registrations.
    pub fn live(&self) -> usize {
        self.ranges().live()
    }

    /// (registrations made, requests served by an existing one) since the start.
    pub fn counts(&self) -> (u64, u64) {
        (self.registrations.load(Ordering::Relaxed), self.hits.load(Ordering::Relaxed))
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry")
            .field("device", &self.pd.context().name())
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

fn wraps(addr: usize, len: usize) -> Error {
    Error::argument(format!("the range of {len} bytes at {addr:#x} wraps around the address space"))
}

/// The whole pages that the range touches.
fn page_range(addr: usize, len: usize) -> Result<(usize, usize)> {
    let page = page_size();
    let start = addr - addr % page;
    let end = addr
        .checked_add(len.max(1))
        .and_then(|end| end.checked_next_multiple_of(page))
        .ok_or_else(|| wraps(addr, len))?;
    Ok((start, end))
}

#[cfg(test)]
mod tests;
