//! The limit of locked memory, counted as the kernel counts it for memory regions: per region in whole pages, so that
//! two regions of one page count twice.

use super::pages::{Pages, page_size};
use crate::env::settings;
use crate::stats::{self, Counter};

/// Where the limit comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quota {
    /// There is none.
    #[default]
    Off,
    /// The soft RLIMIT_MEMLOCK at the time of the registration; CAP_IPC_LOCK lifts it.
    Rlimit,
    /// This many bytes, capability or not.
    Bytes(u64),
}

impl Quota {
    /// The limit that holds for the calling thread now.
    fn limit(self) -> Option<u64> {
        match self {
            Self::Off => None,
            Self::Bytes(bytes) => Some(bytes),
            Self::Rlimit => soft_limit().filter(|_| !may_lock()),
        }
    }
}

/// Pages that count against the quota; given back when dropped.
#[derive(Debug)]
pub struct Charge(Pages);

impl Charge {
    /// Counts the pages of a new region. Beyond the limit ENOMEM, as the kernel says; a limit of nothing forbids any
    /// pinning with EPERM.
    pub fn take(pages: Pages) -> Result<Self, i32> {
        let total = stats::add(Counter::PinnedBytes, pages.bytes());
        let charge = Self(pages);
        match settings().memlock.limit() {
            Some(0) => Err(libc::EPERM),
            // The kernel compares pages: what the limit has beyond the last whole one is lost.
            Some(limit) if total > limit - limit % page_size() as u64 => Err(libc::ENOMEM),
            _ => Ok(charge),
        }
    }

    /// Leaves the pages counted until [`give_back`].
    pub fn keep(self) -> Pages {
        let pages = self.0;
        std::mem::forget(self);
        pages
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        give_back(self.0);
    }
}

/// Ends what [`Charge::keep`] left counted.
pub fn give_back(pages: Pages) {
    stats::sub(Counter::PinnedBytes, pages.bytes());
}

fn soft_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: our own structure.
    let done = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (done == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Whether the calling thread has CAP_IPC_LOCK in its effective set.
fn may_lock() -> bool {
    const VERSION_3: u32 = 0x2008_0522;
    const CAP_IPC_LOCK: u32 = 14;
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Sets {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    let mut header = Header { version: VERSION_3, pid: 0 };
    let mut sets = [Sets::default(); 2];
    // SAFETY: this version of the call reads the header and fills two elements, both ours.
    let done = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) };
    done == 0 && sets[0].effective & 1 << CAP_IPC_LOCK != 0
}
