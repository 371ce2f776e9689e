//! The file in memory. A mapping of its own, whole pages that no device ever sees and that forked children do not have.
//! Everything is an atomic word.
//!
//! The file is sealed: nobody can make it shorter, so that no access ends in a bus error. Blocks that are written have memory
//! behind them before.

use super::layout::{BLOCK, LARGEST, WORD, WORDS};
use crate::memory::ledger::{PinLedger, Purpose};
use crate::sync::AtomicU64;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

/// The words of a block.
pub(super) type Words = [AtomicU64; WORDS];

/// The mapping; ended when dropped.
#[derive(Debug)]
pub(super) struct Pages {
    base: NonNull<AtomicU64>,
    len: usize,
    /// It is in the ledger of the plugin's own memory.
    entered: bool,
}

// SAFETY: the mapping belongs to this value, and all access goes through atomics.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps the whole file of this process, to write it. Children have a hole there.
    ///
    /// # Errors
    /// The mapping is refused.
    pub(super) fn own(file: BorrowedFd<'_>) -> rustix::io::Result<Self> {
        let mut pages = Self::map(file, LARGEST, ProtFlags::READ | ProtFlags::WRITE)?;
        let start = pages.base.as_ptr().addr();
        PinLedger::process().own(start..start + LARGEST, Purpose::Status);
        pages.entered = true;
        let base = pages.base.as_ptr().cast();
        // SAFETY: the range is this mapping; the advice changes only what a child sees.
        unsafe { madvise(base, LARGEST, Advice::LinuxDontFork) }?;
        // A core file would have all blocks, most of them blank. Where the advice is refused, it has.
        // SAFETY: as above, only what a core file has.
        let _ = unsafe { madvise(base, LARGEST, Advice::LinuxDontDump) };
        Ok(pages)
    }

    /// Maps whole blocks of a sealed file, to read them.
    ///
    /// # Errors
    /// The mapping is refused.
    pub(super) fn view(file: BorrowedFd<'_>, blocks: usize) -> rustix::io::Result<Self> {
        Self::map(file, blocks * BLOCK, ProtFlags::READ)
    }

    fn map(file: BorrowedFd<'_>, len: usize, access: ProtFlags) -> rustix::io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nobody.
        let base = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base, len, entered: false })
    }

    /// Blocks that are mapped.
    pub(super) fn blocks(&self) -> usize {
        self.len / BLOCK
    }

    /// A block.
    ///
    /// # Panics
    /// It is beyond the mapping.
    pub(super) fn block(&self, index: usize) -> &Words {
        assert!(index < self.blocks());
        // SAFETY: in bounds, and aligned because the mapping is; shared memory is only seen as atomics.
        unsafe { self.base.byte_add(index * WORDS * WORD).cast().as_ref() }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.entered {
            // Before the mapping ends: the books never name memory that is not there.
            PinLedger::process().disown(self.base.as_ptr().addr());
        }
        // SAFETY: the mapping of `map`, which nothing refers to any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        if let Err(errno) = unmapped {
            tracing::warn!("munmap of {} bytes at {:p} failed: {errno}", self.len, self.base);
        }
    }
}
