//! A process's region: typed access to its tables, and the creation of our own.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::*;
use super::mapping::{Mapping, Shared};
use crate::faults::table::FaultTable;

/// A mapped region, our own or a peer's.
#[derive(Debug)]
pub struct Region {
    map: Mapping,
}

fn entry<T: Shared>(map: &Mapping, table: usize, count: usize, index: u32) -> Option<&T> {
    let index = index as usize;
    if index >= count {
        return None;
    }
    map.view(table + index * size_of::<T>())
}

impl Region {
    /// Creates our region: a sealed memfd, so that no peer can shrink it under us.
    pub fn create(heap: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a constant C string.
        let fd = unsafe { libc::memfd_create(c"softrnic-region".as_ptr(), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let len = HEAP_OFF + heap;
        std::fs::File::from(fd.try_clone()?).set_len(len as u64)?;
        // SAFETY: a plain system call on a descriptor that `fd` keeps open.
        unsafe {
            libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW);
        }
        let map = Mapping::shared(fd.as_fd(), len)?;
        Ok((Self { map }, fd))
    }

    /// Maps a peer's region from an opened descriptor.
    pub fn attach(file: &std::fs::File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).unwrap_or(0);
        // SAFETY: a plain system call on a descriptor that `file` keeps open.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if len < HEAP_OFF || seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::other(
                "the peer's region is not a sealed region of this version",
            ));
        }
        Ok(Self { map: Mapping::shared(file.as_fd(), len)? })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        // The mapping is at least HEAP_OFF long, checked at creation and attachment.
        self.map.view(0).unwrap_or_else(|| unreachable!("region shorter than its header"))
    }

    /// The fault rules.
    pub fn faults(&self) -> &FaultTable {
        // Inside the part that every region has, see `header`.
        self.map.view(FAULT_OFF).unwrap_or_else(|| unreachable!("region shorter than its tables"))
    }

    /// A context's event pipe.
    pub fn context(&self, index: u32) -> Option<&PipeSlot> {
        entry(&self.map, CTX_OFF, CONTEXTS, index)
    }

    /// A completion channel's pipe.
    pub fn channel(&self, index: u32) -> Option<&PipeSlot> {
        entry(&self.map, CHAN_OFF, CHANNELS, index)
    }

    /// A QP.
    pub fn qp(&self, index: u32) -> Option<&QpSlot> {
        entry(&self.map, QP_OFF, QPS, index)
    }

    /// A CQ.
    pub fn cq(&self, index: u32) -> Option<&CqSlot> {
        entry(&self.map, CQ_OFF, CQS, index)
    }

    /// An SRQ.
    pub fn srq(&self, index: u32) -> Option<&SrqSlot> {
        entry(&self.map, SRQ_OFF, SRQS, index)
    }

    /// An MR.
    pub fn mr(&self, index: u32) -> Option<&MrSlot> {
        entry(&self.map, MR_OFF, MRS, index)
    }

    /// `n` heap words at a region offset taken from shared memory: checked to lie in the heap.
    pub fn heap_words(&self, offset: u64, n: usize) -> Option<&[AtomicU64]> {
        let offset = usize::try_from(offset).ok()?;
        if offset < HEAP_OFF {
            return None;
        }
        self.map.words(offset, n)
    }

    /// The requesters' wake-up word.
    pub fn kick(&self) {
        let word = &self.header().kick;
        word.fetch_add(1, Ordering::Release);
        // SAFETY: the word lives in a mapping that `self` keeps; FUTEX_WAKE only uses its address.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }

    /// Sleeps until the wake-up word differs from `seen`, or the time is over.
    pub fn wait_kick(&self, seen: u32, timeout: std::time::Duration) {
        let word = &self.header().kick;
        let time = libc::timespec {
            tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(1),
            tv_nsec: libc::c_long::from(timeout.subsec_nanos().cast_signed()),
        };
        // SAFETY: the word lives in a mapping that `self` keeps; the timeout outlives the call.
        unsafe {
            let none = std::ptr::null::<u32>();
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAIT,
                seen,
                &raw const time,
                none,
                0,
            )
        };
    }
}
