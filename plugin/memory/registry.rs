//! The registrations of one protection domain.
//!
//! NCCL registers the same buffers again for every connection, so a range that an existing registration covers with
//! the same access is shared. Identity includes the access bits: a strongly ordered request is never served by a
//! relaxed region. No lock is held across a verbs call: one slow pin does not block others.
//!
//! DMA-BUF registrations are not shared: their addresses are offsets that several buffers have in common.

use super::extent::{Extent, wraps};
use super::inventory::{Entry, Kind};
use super::ledger::{Pin, PinLedger, PinRecord};
use super::page::{PageOwned, page_size};
use super::ranges::Ranges;
use super::region::RegionKind;
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};
use crate::verbs::mr::Access;
use crate::verbs::{MemoryRegion, ProtectionDomain};
use crossbeam_utils::CachePadded;
use std::fmt::Display;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// One live registration. Deregistered when the last user drops it.
#[derive(Debug)]
pub struct Registered {
    region: Option<MemoryRegion>,
    start: usize,
    end: usize,
    shared_in: Weak<Registry>,
    usage: Arc<Usage>,
    // After the region: the books say that a pin is held as long as it is.
    _pin: Option<PinRecord>,
    /// What others can read about it. After the region, too.
    entry: Entry,
    /// Memory that is kept by whoever uses its registration. Last: nothing of it is in use or in the books any more.
    memory: Option<Arc<PageOwned>>,
}

/// What registrations of one protection domain amount to.
#[derive(Debug, Default)]
pub struct Usage {
    live: AtomicU64,
    bytes: AtomicU64,
    most_live: AtomicU64,
    most_bytes: AtomicU64,
    failed: AtomicU64,
}

impl Usage {
    fn add(&self, bytes: u64) {
        let live = self.live.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.most_live.fetch_max(live, Ordering::Relaxed);
        self.most_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    fn sub(&self, bytes: u64) {
        self.live.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Registrations that are live, and their bytes.
    pub fn live(&self) -> (u64, u64) {
        (self.live.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// Registrations that the verb refused, those of a diagnosis included.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// The most there ever were at once.
    pub fn most(&self) -> (u64, u64) {
        (self.most_live.load(Ordering::Relaxed), self.most_bytes.load(Ordering::Relaxed))
    }
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

    /// Notes that somebody asked for `len` bytes at `addr`, which it serves.
    pub fn asked_by(&self, kind: RegionKind, addr: usize, len: usize, site: impl Display) {
        let kind = match kind {
            RegionKind::Host => Kind::Host,
            RegionKind::Cuda => Kind::Cuda,
            RegionKind::DmaBuf => Kind::DmaBuf,
        };
        self.entry.asked_by(kind, &(addr..addr.saturating_add(len)), site);
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(registry) = self.shared_in.upgrade() {
            registry.forget(self);
        }
        // The verb runs here, after the registry's lock was released.
        self.region = None;
        self.usage.sub((self.end - self.start) as u64);
    }
}

/// The shared registrations of one protection domain, by address.
pub struct Registry {
    pd: Arc<ProtectionDomain>,
    device: Arc<str>,
    usage: Arc<Usage>,
    /// The device refuses access bits that it need not know.
    plain_only: AtomicBool,
    /// The device reported an error that it does not recover from.
    broken: AtomicBool,
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
            device: Arc::from(pd.context().name()),
            usage: Arc::default(),
            plain_only: AtomicBool::new(false),
            broken: AtomicBool::new(false),
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

    /// The name of the device.
    pub fn device(&self) -> &Arc<str> {
        &self.device
    }

    /// Remembers that the device refuses optional access bits.
    pub fn set_plain_only(&self) {
        self.plain_only.store(true, Ordering::Relaxed);
    }

    /// Whether the device refuses optional access bits, as far as anybody has tried.
    pub fn is_plain_only(&self) -> bool {
        self.plain_only.load(Ordering::Relaxed)
    }

    /// Remembers that the device is of no use any more.
    pub fn set_broken(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    /// Whether the device is of no use any more: it must be opened anew.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// What its registrations amount to.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// An existing registration that covers `len` bytes at `addr` with exactly `access`.
    pub fn find(&self, addr: usize, len: usize, access: Access) -> Option<Arc<Registered>> {
        let (start, end) = super::extent::page_range(addr, len).ok()?;
        let found = self.ranges().covering(start, end, access)?;
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(found)
    }

    /// Registers a mapping of the plugin's own that others will register parts of: each of them is served by this
    /// registration and keeps the memory mapped, even after its owner let go.
    ///
    /// # Errors
    /// The verb fails.
    pub fn register_kept(
        self: &Arc<Self>,
        pages: &Arc<PageOwned>,
        access: Access,
    ) -> Result<Arc<Registered>> {
        // Never shared with one that exists: that would be of memory which was at this address before.
        let mut new = self.register_alone(Extent::of_own(pages), access)?;
        self.registrations.fetch_add(1, Ordering::Relaxed);
        new.shared_in = Arc::downgrade(self);
        new.memory = Some(Arc::clone(pages));
        let new = Arc::new(new);
        self.ranges().add(new.start, new.end, access, &new);
        Ok(new)
    }

    /// A registration made by [`Self::register_kept`] that covers `len` bytes at `addr` with exactly `access`.
    pub fn find_kept(&self, addr: usize, len: usize, access: Access) -> Option<Arc<Registered>> {
        let (start, end) = super::extent::page_range(addr, len).ok()?;
        let kept = |registered: &Registered| registered.memory.is_some();
        // Dropped after the lock: one of them may end with it.
        let mut refused = Vec::new();
        let found = self.ranges().covering_if(start, end, access, kept, &mut refused)?;
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(found)
    }

    /// A registration that covers these pages with exactly `access`: an existing one, or a new one.
    ///
    /// # Errors
    /// The verb fails.
    pub fn register(
        self: &Arc<Self>,
        extent: Extent,
        kind: RegionKind,
        access: Access,
    ) -> Result<Arc<Registered>> {
        if let Some(found) = self.find(extent.start(), extent.len(), access) {
            return Ok(found);
        }
        let mut new = self.register_pages(extent, kind, access)?;
        let (start, end) = (new.start, new.end);
        new.shared_in = Arc::downgrade(self);
        let new = Arc::new(new);
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

    /// A new registration of these pages of host memory that nobody else will be given.
    ///
    /// # Errors
    /// The verb fails.
    pub fn register_alone(&self, extent: Extent, access: Access) -> Result<Registered> {
        self.register_pages(extent, RegionKind::Host, access)
    }

    fn register_pages(
        &self,
        extent: Extent,
        kind: RegionKind,
        access: Access,
    ) -> Result<Registered> {
        let (start, end) = (extent.start(), extent.end());
        // In the books before the kernel is asked, so that the order is right there too.
        let api = MemoryRegion::api(&self.pd, access);
        let pin = Pin::registration(&self.device, api, kind == RegionKind::Cuda);
        let pin = PinLedger::process().pin(start..end, pin, &[])?;
        let region =
            MemoryRegion::register(&self.pd, start, end - start, access).inspect_err(|_| {
                self.usage.failed.fetch_add(1, Ordering::Relaxed);
            })?;
        pin.taken();
        self.usage.add((end - start) as u64);
        tracing::debug!(
            device = &*self.device,
            address = format_args!("{start:#x}"),
            bytes = end - start,
            access = format_args!("{:#x}", access.bits()),
            lkey = format_args!("{:#x}", region.lkey()),
            "registered"
        );
        let entry = match PinLedger::process().purpose(start..end) {
            Some(purpose) => Entry::new(&self.device, Kind::Own, start..end, start..end, purpose),
            // Until whoever asked has said for what.
            None => Entry::new(&self.device, Kind::Host, start..end, start..end, "regMr"),
        };
        Ok(Registered {
            region: Some(region),
            start,
            end,
            shared_in: Weak::new(),
            usage: Arc::clone(&self.usage),
            _pin: Some(pin),
            entry,
            memory: None,
        })
    }

    /// A registration of `len` bytes from `offset` of a DMA-BUF that answers to the addresses from `addr` on. Never
    /// shared; the descriptor is not kept.
    ///
    /// # Errors
    /// The range wraps around, address and offset lie differently in their pages, or the verb fails.
    pub fn register_dmabuf(
        self: &Arc<Self>,
        addr: usize,
        len: usize,
        fd: BorrowedFd<'_>,
        offset: u64,
        access: Access,
    ) -> Result<Arc<Registered>> {
        let end = addr.checked_add(len).ok_or_else(|| wraps(addr, len))?;
        let into_page = (addr % page_size(), offset % page_size() as u64);
        if into_page.0 as u64 != into_page.1 {
            return Err(Error::argument(format!(
                "a DMA-BUF from offset {offset:#x} on cannot be known by address {addr:#x}: devices map whole pages, so \
                 both must lie equally far into a page"
            )));
        }
        let region = MemoryRegion::register_dmabuf(&self.pd, fd, offset, len, addr as u64, access)
            .inspect_err(|_| {
                self.usage.failed.fetch_add(1, Ordering::Relaxed);
            })?;
        self.registrations.fetch_add(1, Ordering::Relaxed);
        self.usage.add(len as u64);
        tracing::debug!(
            device = &*self.device,
            address = format_args!("{addr:#x}"),
            bytes = len,
            offset,
            access = format_args!("{:#x}", access.bits()),
            "registered a DMA-BUF"
        );
        // No pin: the exporter moves or holds its memory, and tells the device.
        Ok(Arc::new(Registered {
            region: Some(region),
            start: addr,
            end,
            shared_in: Weak::new(),
            usage: Arc::clone(&self.usage),
            _pin: None,
            entry: Entry::new(&self.device, Kind::DmaBuf, addr..end, addr..end, "regMrDmaBuf"),
            memory: None,
        }))
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

/// Registers a mapping of the plugin's own with these devices, in their order: its first long-term pins. Never shared with
/// a registration that exists: that would be of memory which was at this address before.
///
/// # Errors
/// The verb fails for one of them. Then none holds it.
pub fn register_owned(
    pages: &PageOwned,
    registries: &[Arc<Registry>],
    access: Access,
) -> Result<Vec<Arc<Registered>>> {
    let mut done: Vec<Arc<Registered>> = Vec::with_capacity(registries.len());
    for (index, registry) in registries.iter().enumerate() {
        // Two ports of one device are two rails.
        let twin = registries[..index].iter().position(|other| Arc::ptr_eq(other, registry));
        let registered = match twin.and_then(|twin| done.get(twin)) {
            Some(registered) => Arc::clone(registered),
            None => {
                let new = registry.register_alone(Extent::of_own(pages), access)?;
                registry.registrations.fetch_add(1, Ordering::Relaxed);
                Arc::new(new)
            }
        };
        done.push(registered);
    }
    Ok(done)
}

#[cfg(test)]
mod tests;
