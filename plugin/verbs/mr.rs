//! A memory region: one range of memory that the device may use.

use super::library::Verbs;
use super::sys::{access, ibv_mr};
use super::{ProtectionDomain, errno, log_destroy};
use crate::error::{Error, Result};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// What the device and peers may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access(c_int);

impl Access {
    /// The device may write on behalf of this host: a read's destination.
    pub const LOCAL: Self = Self(access::LOCAL_WRITE);
    /// Peers may write: credit FIFOs and size records. Never relaxed.
    pub const REMOTE_WRITE: Self = Self(access::LOCAL_WRITE | access::REMOTE_WRITE);
    /// Everything a user buffer needs: peers write it, the flush reads it.
    pub const BULK: Self = Self(access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ);

    /// The same with PCIe relaxed ordering, for bulk data only.
    #[must_use]
    pub fn relaxed(self) -> Self {
        Self(self.0 | access::RELAXED_ORDERING)
    }

    /// Whether relaxed ordering is asked for.
    pub fn is_relaxed(self) -> bool {
        self.0 & access::RELAXED_ORDERING != 0
    }

    /// The `IBV_ACCESS_*` bits.
    pub fn bits(self) -> c_int {
        self.0
    }
}

/// A registered range. Deregistered when dropped; the memory itself belongs to somebody else, who must keep it mapped
/// as long as a peer may use the key.
#[derive(Debug)]
pub struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    pd: Arc<ProtectionDomain>,
}

// SAFETY: a memory region is an identifier in the library; verbs that take one may be called from any thread.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// The verb that registers memory with this access.
    pub fn api(pd: &ProtectionDomain, flags: Access) -> &'static str {
        if flags.is_relaxed() && pd.context().verbs().reg_mr_iova2.is_some() {
            "ibv_reg_mr_iova2"
        } else {
            "ibv_reg_mr"
        }
    }

    /// Registers `len` bytes at `addr`.
    ///
    /// # Errors
    /// The verb's errno, with range, access and device.
    pub fn register(
        pd: &Arc<ProtectionDomain>,
        addr: usize,
        len: usize,
        flags: Access,
    ) -> Result<Self> {
        let verbs = pd.context().verbs();
        let pointer = addr as *mut c_void;
        let verb = Self::api(pd, flags);
        let raw = match (flags.is_relaxed(), verbs.reg_mr_iova2) {
            (true, Some(reg)) => {
                // SAFETY: the domain is alive. The kernel checks the range; memory of this process that a device may
                // write is the caller's to keep mapped.
                unsafe { reg(pd.raw(), pointer, len, addr as u64, flags.bits().cast_unsigned()) }
            }
            _ => {
                let bits = flags.bits() & !access::RELAXED_ORDERING;
                // SAFETY: as above.
                unsafe { (verbs.reg_mr)(pd.raw(), pointer, len, bits) }
            }
        };
        Self::wrap(pd, raw).ok_or_else(|| {
            let object = format!(
                "{} (address {addr:#x}, {len} bytes, access {:#x})",
                pd.context().name(),
                flags.bits()
            );
            Error::verb(verb, object, errno())
        })
    }

    /// Registers `len` bytes from `offset` of a DMA-BUF, to be addressed as `iova`. The descriptor is not kept.
    ///
    /// # Errors
    /// The verb's errno, or that the library cannot register DMA-BUFs.
    pub fn register_dmabuf(
        pd: &Arc<ProtectionDomain>,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        iova: u64,
        flags: Access,
    ) -> Result<Self> {
        let object = || {
            format!(
                "{} (fd {}, offset {offset}, {len} bytes, access {:#x})",
                pd.context().name(),
                fd.as_raw_fd(),
                flags.bits()
            )
        };
        let Some(reg) = pd.context().verbs().reg_dmabuf_mr else {
            return Err(Error::verb("ibv_reg_dmabuf_mr", object(), libc::EOPNOTSUPP));
        };
        // SAFETY: the domain is alive and the descriptor open during the call; the kernel checks range and offset.
        let raw = unsafe { reg(pd.raw(), offset, len, iova, fd.as_raw_fd(), flags.bits()) };
        Self::wrap(pd, raw).ok_or_else(|| Error::verb("ibv_reg_dmabuf_mr", object(), errno()))
    }

    /// Whether the device can register DMA-BUFs at all: a descriptor that cannot exist is refused as such, not as an
    /// unsupported operation.
    pub fn dmabuf_supported(pd: &Arc<ProtectionDomain>, verbs: &Verbs) -> bool {
        let Some(reg) = verbs.reg_dmabuf_mr else { return false };
        // SAFETY: the domain is alive; -1 is no descriptor, so nothing is registered.
        let raw = unsafe { reg(pd.raw(), 0, 1, 0, -1, access::LOCAL_WRITE) };
        let errno = errno();
        match Self::wrap(pd, raw) {
            Some(region) => {
                drop(region);
                true
            }
            None => {
                errno != libc::EOPNOTSUPP && errno != libc::EPROTONOSUPPORT && errno != libc::ENOSYS
            }
        }
    }

    fn wrap(pd: &Arc<ProtectionDomain>, raw: *mut ibv_mr) -> Option<Self> {
        let raw = NonNull::new(raw)?;
        // SAFETY: a region the library just made; its keys never change.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        super::context::add(&pd.context().objects().mrs);
        Some(Self { raw, lkey, rkey, pd: Arc::clone(pd) })
    }

    /// The key for this host's own work requests.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key to give to a peer.
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        super::context::sub(&self.pd.context().objects().mrs);
        // SAFETY: made by this library and deregistered once; the domain is kept alive by the Arc.
        let rc = unsafe { (self.pd.context().verbs().dereg_mr)(self.raw.as_ptr()) };
        log_destroy("ibv_dereg_mr", &self.pd.context().name(), rc);
    }
}
