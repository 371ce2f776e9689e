//! Memory regions: keys, bounds, access.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use crate::abi::*;
use crate::env::settings;
use crate::faults::rule::REG_MR;
use crate::ledger::pages::{Pages, page_size};
use crate::ledger::quota::{self, Charge};
use crate::objects::{MRS, QPS};
use crate::pd::Pd;
use crate::public::Public;
use crate::shm::layout::MrSlot;
use crate::shm::mapping::Mapping;
use crate::stats::{self, Counter};

/// Flags that a registration may carry.
const KNOWN: u32 = ACCESS_LOCAL_WRITE
    | ACCESS_REMOTE_WRITE
    | ACCESS_REMOTE_READ
    | ACCESS_REMOTE_ATOMIC
    | ACCESS_MW_BIND
    | ACCESS_HUGETLB
    | ACCESS_OPTIONAL_RANGE;

/// A memory region.
#[repr(C)]
#[derive(Debug)]
pub struct Mr {
    public: Public<IbvMr>,
    /// Parent.
    pub pd: Arc<Pd>,
    index: u32,
    len: u64,
    /// The pages that it holds and that count against the quota; a dma-buf's are its exporter's business.
    pages: Option<Pages>,
    /// The mapping and descriptor of a dma-buf, kept for the life of the MR.
    _dmabuf: Option<(Mapping, OwnedFd)>,
}

/// What to register.
#[derive(Debug)]
pub struct Registration {
    /// First address in this process.
    pub va: u64,
    /// Bytes.
    pub len: usize,
    /// First address as keys see it.
    pub iova: u64,
    /// Access flags.
    pub access: u32,
}

/// What a region lies in.
enum Backing {
    /// Memory of the process, with what it counts against the quota.
    Memory(Charge),
    /// A dma-buf: its mapping, its descriptor, where the region begins, and the descriptor's number if peers need it.
    Dmabuf { map: Mapping, fd: OwnedFd, offset: u64, number: u32 },
}

static REGISTRATIONS: AtomicU64 = AtomicU64::new(0);

/// Makes a registration take the time that the settings or a test say. No lock is held here.
fn take_time(pages: u64) {
    crate::control::wait_if_paused();
    let delay = settings().reg_delay(pages);
    if delay.is_zero() {
        return;
    }
    stats::add(Counter::RegDelayNs, u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX));
    let end = Instant::now() + delay;
    // A timer is late by some tens of microseconds: the rest is waited for awake.
    std::thread::sleep(delay.saturating_sub(Duration::from_micros(200)));
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

impl Mr {
    /// Registers memory of the process. What can go wrong is asked in the kernel's order: the arguments, the quota, the
    /// pages, the device.
    pub fn register(pd: &Arc<Pd>, what: &Registration) -> Result<Arc<Self>, i32> {
        let pages = Pages::of(what.va, what.len).ok_or(libc::EINVAL)?;
        if pages.count > u64::from(u32::MAX) {
            return Err(libc::EINVAL);
        }
        Self::check(pd, what, what.va)?;
        let charge = Charge::take(pages)?;
        let write =
            what.access & (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0;
        pages.fault_in(write)?;
        take_time(pages.count);
        crate::ledger::register(pages)?;
        Self::publish(pd, what, Backing::Memory(charge))
    }

    /// Registers a dma-buf: anything that can be mapped from a descriptor.
    pub fn register_fd(
        pd: &Arc<Pd>,
        fd: BorrowedFd<'_>,
        offset: u64,
        what: Registration,
    ) -> Result<Arc<Self>, i32> {
        Self::check(pd, &what, offset)?;
        let page = page_size() as u64;
        if what.len == 0 {
            return Err(libc::EINVAL);
        }
        let errno = |e: std::io::Error| e.raw_os_error().unwrap_or(libc::EINVAL);
        let fd = fd.try_clone_to_owned().map_err(errno)?;
        let skip = usize::try_from(offset % page).unwrap_or(0);
        let write =
            what.access & (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0;
        let end = offset.checked_add(what.len as u64).ok_or(libc::EINVAL)?;
        // A mapping beyond the end of a file faults only when touched; refuse it here. Buffers without a size say 0.
        let size =
            std::fs::File::from(fd.try_clone().map_err(errno)?).metadata().map_or(0, |m| m.len());
        if size != 0 && end > size {
            return Err(libc::EINVAL);
        }
        let map = Mapping::window(fd.as_fd(), offset - offset % page, what.len + skip, write)
            .map_err(errno)?;
        let what = Registration { va: (map.addr() + skip) as u64, ..what };
        // Pages that the kernel refuses to hand to process_vm are reached by mapping the descriptor in the peer.
        let mut byte = [0];
        let own = std::process::id().cast_signed();
        let reachable = crate::mover::probe(own, what.va, &mut byte).is_ok();
        let number = if reachable { 0 } else { fd.as_raw_fd().cast_unsigned() };
        take_time(Pages::of(offset, what.len).map_or(0, |pages| pages.count));
        Self::publish(pd, &what, Backing::Dmabuf { map, fd, offset, number })
    }

    /// The arguments. A device maps whole pages, so both addresses of a region lie equally far into one.
    fn check(pd: &Pd, what: &Registration, begin: u64) -> Result<(), i32> {
        let remote = what.access & (ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0;
        if what.len == 0
            || what.access & !KNOWN != 0
            || what.access & ACCESS_RELAXED_ORDERING != 0 && !settings().relaxed_ordering
            || remote && what.access & ACCESS_LOCAL_WRITE == 0
            || !(what.iova ^ begin).is_multiple_of(page_size() as u64)
        {
            return Err(libc::EINVAL);
        }
        let len = what.len as u64;
        if what.iova.checked_add(len).is_none() || what.va.checked_add(len).is_none() {
            return Err(libc::EINVAL);
        }
        let n = REGISTRATIONS.fetch_add(1, Ordering::Relaxed) + 1;
        pd.context.works()?;
        let (process, device) = (&pd.context.process, pd.context.device.index);
        crate::control::injected_failure(n)
            .or_else(|| crate::faults::refusal(process, device, REG_MR, len))
            .map_or(Ok(()), Err)
    }

    /// Registrations tried so far, for the fault setting.
    pub fn registrations() -> u64 {
        REGISTRATIONS.load(Ordering::Relaxed)
    }

    fn publish(pd: &Arc<Pd>, what: &Registration, backing: Backing) -> Result<Arc<Self>, i32> {
        if MRS.count() >= settings().mr_limit() as usize {
            return Err(libc::ENOMEM);
        }
        let process = &pd.context.process;
        let index = process.mr_indices.take().ok_or(libc::ENOMEM)?;
        let variant = process.key_variant.fetch_add(1, Ordering::Relaxed) & 0xff;
        let key = process.slot() << 24 | index << 8 | variant;
        let (fd, offset) = match &backing {
            Backing::Memory(_) => (0, 0),
            Backing::Dmabuf { number, offset, .. } => (*number, *offset),
        };
        for slot in [process.local_mr(index), process.region.mr(index)].into_iter().flatten() {
            slot.pd.store(pd.id, Ordering::Relaxed);
            slot.access.store(what.access, Ordering::Relaxed);
            slot.iova.store(what.iova, Ordering::Relaxed);
            slot.len.store(what.len as u64, Ordering::Relaxed);
            slot.va.store(what.va, Ordering::Relaxed);
            slot.fd.store(fd, Ordering::Relaxed);
            slot.fd_off.store(offset, Ordering::Relaxed);
            // Publishes the entry; lookups load the key with SeqCst.
            slot.key.store(key, Ordering::SeqCst);
        }
        let public = IbvMr {
            context: pd.context.ptr(),
            pd: pd.ptr(),
            addr: std::ptr::with_exposed_provenance_mut(usize::try_from(what.va).unwrap_or(0)),
            length: what.len,
            handle: index,
            lkey: key,
            rkey: key,
        };
        let (pages, dmabuf) = match backing {
            Backing::Memory(charge) => (Some(charge.keep()), None),
            Backing::Dmabuf { map, fd, .. } => (None, Some((map, fd))),
        };
        let mr = Arc::new(Self {
            public: Public::new(public),
            pd: Arc::clone(pd),
            index,
            len: what.len as u64,
            pages,
            _dmabuf: dmabuf,
        });
        pd.users.0.fetch_add(1, Ordering::AcqRel);
        stats::add(Counter::RegMr, 1);
        stats::add(Counter::RegisteredBytes, mr.len);
        MRS.insert(Arc::clone(&mr));
        Ok(mr)
    }

    /// The handle for C.
    pub fn ptr(&self) -> *mut IbvMr {
        self.public.ptr()
    }

    /// The pages of the process that it holds; none for a dma-buf.
    pub fn pages(&self) -> Option<Pages> {
        self.pages
    }

    /// The pages that live regions hold: one range for each that is not a dma-buf.
    pub fn pinned() -> Vec<Pages> {
        MRS.all().iter().filter_map(|mr| mr.pages).collect()
    }

    /// The MR behind a handle.
    pub fn find(handle: *mut IbvMr) -> Option<Arc<Self>> {
        MRS.get(handle as usize)
    }

    /// Deregisters. When this returns, no copy that used the key is running any more.
    pub fn deregister(self: &Arc<Self>) -> Result<(), i32> {
        MRS.remove(Arc::as_ptr(self) as usize).ok_or(libc::EINVAL)?;
        let process = &self.pd.context.process;
        for slot in
            [process.local_mr(self.index), process.region.mr(self.index)].into_iter().flatten()
        {
            slot.key.store(0, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
        // Every copy runs under a send-queue lock of ours or under the responder lock of one of our QPs, and looks the
        // key up inside. So whoever is inside now may have seen the key; whoever comes later has not.
        for qp in QPS.all() {
            if qp.pd.id == self.pd.id {
                qp.quiesce();
            }
        }
        process.mr_indices.give(self.index);
        self.pd.users.0.fetch_sub(1, Ordering::AcqRel);
        stats::add(Counter::DeregMr, 1);
        stats::sub(Counter::RegisteredBytes, self.len);
        if let Some(pages) = self.pages {
            quota::give_back(pages);
        }
        Ok(())
    }
}

/// A checked piece of a memory region.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// First address in the owner's address space.
    pub va: u64,
    /// Descriptor through which it must be reached, 0 = none.
    pub fd: u32,
    /// Offset inside the descriptor.
    pub fd_off: u64,
}

/// Checks a key, the bounds, the protection domain and the access rights in an MR table entry.
pub fn check(slot: &MrSlot, key: u32, pd: u32, addr: u64, len: u64, need: u32) -> Option<Piece> {
    if key == 0 || slot.key.load(Ordering::SeqCst) != key {
        return None;
    }
    if slot.pd.load(Ordering::Relaxed) != pd || slot.access.load(Ordering::Relaxed) & need != need {
        return None;
    }
    let offset = addr.checked_sub(slot.iova.load(Ordering::Relaxed))?;
    let end = offset.checked_add(len)?;
    if end > slot.len.load(Ordering::Relaxed) {
        return None;
    }
    let va = slot.va.load(Ordering::Relaxed).checked_add(offset)?;
    let fd_off = slot.fd_off.load(Ordering::Relaxed).checked_add(offset)?;
    Some(Piece { va, fd: slot.fd.load(Ordering::Relaxed), fd_off })
}

/// Index inside a key.
pub fn key_index(key: u32) -> u32 {
    key >> 8 & 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_exact_and_do_not_wrap() {
        let slot = MrSlot::default();
        slot.key.store(7, Ordering::Relaxed);
        slot.pd.store(1, Ordering::Relaxed);
        slot.access.store(ACCESS_REMOTE_WRITE, Ordering::Relaxed);
        slot.iova.store(1000, Ordering::Relaxed);
        slot.len.store(100, Ordering::Relaxed);
        slot.va.store(5000, Ordering::Relaxed);
        let try_at = |addr, len| check(&slot, 7, 1, addr, len, ACCESS_REMOTE_WRITE).map(|p| p.va);
        assert_eq!(try_at(1000, 100), Some(5000));
        assert_eq!(try_at(1099, 1), Some(5099));
        assert_eq!(try_at(999, 1), None);
        assert_eq!(try_at(1000, 101), None);
        assert_eq!(try_at(1001, 100), None);
        assert_eq!(try_at(1050, u64::MAX), None);
        assert_eq!(try_at(u64::MAX, 1), None);
        assert!(check(&slot, 7, 2, 1000, 1, 0).is_none(), "other protection domain");
        assert!(check(&slot, 8, 1, 1000, 1, 0).is_none(), "other key");
        assert!(check(&slot, 7, 1, 1000, 1, ACCESS_REMOTE_READ).is_none(), "missing access");
    }
}
