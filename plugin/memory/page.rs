//! Memory that owns its pages.
//!
//! Registering memory pins, and with some libraries withholds from forked children, whole pages. So whatever the plugin
//! registers lives in a mapping of its own: page-aligned base, page-rounded extent, an inaccessible page on either side
//! so that no neighbour can ever be merged into or overrun it, and nothing else inside.
//!
//! This is the only file that dereferences such memory. A device or a peer may write it at any time, so that every
//! access is atomic or volatile and no reference to plain data is ever handed out.

use super::ledger::{PinLedger, Purpose};
use crate::error::{Error, Result};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap,
};
use std::ffi::c_void;
use std::ptr::{self, NonNull};

/// The machine's page size in bytes.
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// `len` rounded up to whole pages; at least one.
pub fn round_up(len: usize) -> usize {
    len.max(1).next_multiple_of(page_size())
}

/// A zero-filled mapping of whole pages that nothing else shares.
#[derive(Debug)]
pub struct PageOwned {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value; all access goes through atomics or volatile copies.
unsafe impl Send for PageOwned {}
// SAFETY: as above.
unsafe impl Sync for PageOwned {}

impl PageOwned {
    /// Maps at least `len` bytes, faulted in, and enters them in the ledger.
    ///
    /// # Errors
    /// The mapping is refused.
    pub fn new(len: usize, purpose: Purpose) -> Result<Self> {
        let fail = |e: rustix::io::Errno| Error::io(format_args!("mapping {len} bytes"), &e.into());
        let page = page_size();
        let len = round_up(len);
        let whole = len
            .checked_add(2 * page)
            .ok_or_else(|| Error::argument(format!("{len} bytes is too much")))?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs nobody.
        let guard = unsafe {
            mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE)
        };
        let guard = guard.map_err(fail)?;
        let base =
            NonNull::new(guard.cast::<u8>()).ok_or_else(|| Error::system("mmap returned NULL"))?;
        // SAFETY: the guard page is inside the mapping made above.
        let owned = Self { base: unsafe { base.add(page) }, len };
        // SAFETY: the range is the inside of the mapping made above and nothing uses it yet.
        unsafe { mprotect(owned.pointer(), len, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(fail)?;
        for offset in (0..len).step_by(page) {
            // SAFETY: inside the mapping, which is writable now.
            unsafe { owned.base.add(offset).write_volatile(0) };
        }
        PinLedger::process().own(owned.range(), purpose);
        Ok(owned)
    }

    /// Asks the kernel to give forked children zeroes instead of this content.
    ///
    /// # Errors
    /// The kernel is older than 4.14.
    pub fn wipe_on_fork(&self) -> Result<()> {
        // SAFETY: the range is this mapping; the advice changes only what a child sees.
        unsafe { madvise(self.pointer(), self.len, Advice::LinuxWipeOnFork) }
            .map_err(|e| Error::io("madvise(MADV_WIPEONFORK)", &e.into()))
    }

    fn pointer(&self) -> *mut c_void {
        self.base.as_ptr().cast()
    }

    /// The first byte; good for the whole mapping as long as this lives.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Address of the first byte.
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// The addresses.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.addr()..self.addr() + self.len
    }

    /// Bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty; it never is.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The place of `len` bytes at `offset`.
    ///
    /// # Panics
    /// They are not inside the mapping.
    pub(super) fn place(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset <= self.len && len <= self.len - offset, "outside the mapping");
        // SAFETY: inside the mapping, by the assertion.
        unsafe { self.base.add(offset) }
    }

    /// Copies another mapping of the same size, where no device is at work on either.
    ///
    /// # Panics
    /// This one is smaller.
    pub fn copy_from(&self, other: &Self) {
        let to = self.place(0, other.len);
        // SAFETY: both ranges are inside their mappings, which are different ones.
        unsafe { ptr::copy_nonoverlapping(other.base.as_ptr(), to.as_ptr(), other.len) };
    }

    /// Fills `len` bytes at `offset` with zeroes, where no device is at work.
    ///
    /// # Panics
    /// They are not inside the mapping.
    pub fn clear(&self, offset: usize, len: usize) {
        // SAFETY: inside the mapping, which is writable.
        unsafe { self.place(offset, len).write_bytes(0, len) };
    }

    /// The aligned 32-bit word at `offset`.
    ///
    /// # Panics
    /// The offset is beyond the mapping or not a multiple of 4.
    #[inline]
    pub fn u32_at(&self, offset: usize) -> &AtomicU32 {
        assert!(offset < self.len && offset.is_multiple_of(4));
        // SAFETY: in bounds and aligned (the length is a multiple of 4); shared memory is only seen as atomics.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    /// The aligned 64-bit word at `offset`.
    ///
    /// # Panics
    /// The offset is beyond the mapping or not a multiple of 8.
    #[inline]
    pub fn u64_at(&self, offset: usize) -> &AtomicU64 {
        assert!(offset < self.len && offset.is_multiple_of(8));
        // SAFETY: in bounds and aligned (the length is a multiple of 8); shared memory is only seen as atomics.
        unsafe { self.base.add(offset).cast().as_ref() }
    }
}

impl Drop for PageOwned {
    fn drop(&mut self) {
        let page = page_size();
        PinLedger::process().disown(self.addr());
        // SAFETY: this is the mapping of `new` with both guard pages; whoever registered it holds it longer than the
        // registration.
        let unmapped = unsafe { munmap(self.base.as_ptr().sub(page).cast(), self.len + 2 * page) };
        if let Err(errno) = unmapped {
            tracing::warn!("munmap of {} bytes at {:#x} failed: {errno}", self.len, self.addr());
        }
    }
}

/// One 32-bit word of a mapping that is kept alive with it.
#[derive(Clone, Debug)]
pub struct Word {
    word: NonNull<AtomicU32>,
    _pages: std::sync::Arc<PageOwned>,
}

// SAFETY: an atomic in a mapping that the Arc keeps.
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Word {
    /// The word at `offset` of `pages`.
    ///
    /// # Panics
    /// As [`PageOwned::u32_at`].
    pub fn new(pages: std::sync::Arc<PageOwned>, offset: usize) -> Self {
        Self { word: NonNull::from(pages.u32_at(offset)), _pages: pages }
    }

    /// Reads it.
    #[inline(always)]
    pub fn load(&self, order: Ordering) -> u32 {
        // SAFETY: the word is inside the mapping that `_pages` keeps.
        unsafe { self.word.as_ref() }.load(order)
    }

    /// Writes it.
    pub fn store(&self, value: u32, order: Ordering) {
        // SAFETY: as above.
        unsafe { self.word.as_ref() }.store(value, order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_whole_zeroed_pages() {
        let pages = PageOwned::new(1, Purpose::Gates).unwrap();
        assert_eq!(pages.len(), page_size());
        assert_eq!(pages.addr() % page_size(), 0);
        assert!((0..pages.len()).step_by(8).all(|o| pages.u64_at(o).load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn both_neighbours_are_inaccessible() {
        let pages = PageOwned::new(3 * page_size(), Purpose::Gates).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let find = |start: usize, end: usize| {
            maps.lines().any(|line| {
                let (range, rest) = line.split_once(' ').unwrap();
                let (a, b) = range.split_once('-').unwrap();
                let a = usize::from_str_radix(a, 16).unwrap();
                let b = usize::from_str_radix(b, 16).unwrap();
                a <= start && end <= b && rest.starts_with("---p")
            })
        };
        assert!(find(pages.addr() - page_size(), pages.addr()));
        assert!(find(pages.addr() + pages.len(), pages.addr() + pages.len() + page_size()));
    }

    #[test]
    fn a_size_that_overflows_is_an_error() {
        assert!(PageOwned::new(usize::MAX - 3 * page_size(), Purpose::Gates).is_err());
    }

    #[test]
    #[should_panic(expected = "offset")]
    fn out_of_bounds_is_caught() {
        let pages = PageOwned::new(1, Purpose::Gates).unwrap();
        pages.u32_at(page_size());
    }
}
