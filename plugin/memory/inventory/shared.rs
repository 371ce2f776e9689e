//! A part of the inventory's file in memory that other processes may look at.
//!
//! A mapping of its own, which no device ever sees. The memory behind it was set aside before, so that no access ends in
//! a bus error; only this process writes it. Everything is an atomic word.

use crate::sync::AtomicU64;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

/// The mapping; ended when dropped.
#[derive(Debug)]
pub struct Shared {
    base: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the mapping belongs to this value, and all access goes through atomics.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Maps `len` bytes from `offset` of a file, which has memory for them.
    ///
    /// # Errors
    /// The mapping is refused.
    pub fn map(file: BorrowedFd<'_>, offset: usize, len: usize) -> rustix::io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nobody.
        let base =
            unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, offset as u64) }?;
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base, len })
    }

    /// The word with this number.
    ///
    /// # Panics
    /// It is beyond the mapping.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len / size_of::<u64>());
        // SAFETY: in bounds, and aligned because the mapping is; shared memory is only seen as atomics.
        unsafe { self.base.add(index).as_ref() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`, which nothing refers to any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        if let Err(errno) = unmapped {
            tracing::warn!("munmap of {} bytes at {:p} failed: {errno}", self.len, self.base);
        }
    }
}
