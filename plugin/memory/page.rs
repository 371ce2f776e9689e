//! Memory that owns its pages.
//!
//! Registering memory pins, and with some libraries withholds from forked children, whole pages. So whatever the plugin
//! registers lives in a mapping of its own: page-aligned base, page-rounded extent, an inaccessible page on either side
//! so that no neighbour can ever be merged into or overrun it, and nothing else inside.
//!
//! This file and `given.rs`, which copies in and out, dereference such memory. A device or a peer may write it at any
//! time, so that access is atomic or volatile where one may be at work, and no reference to plain data is ever handed out.

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

/// What pages a mapping is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// The machine's page size.
    Small,
    /// The machine's page size, placed so that the kernel may put huge pages of this size behind it, which it is asked
    /// to do.
    Transparent(usize),
    /// Huge pages of this size from the pool that the administrator set aside.
    Huge(usize),
}

impl Pages {
    /// Bytes that a mapping is a multiple of, bytes that its address is a multiple of, and how it is asked for. Pages of
    /// the pool are not reserved: they are there or not when the mapping is faulted in.
    fn shape(self) -> (usize, usize, MapFlags) {
        let page = page_size();
        match self {
            Self::Small => (page, page, MapFlags::PRIVATE),
            Self::Transparent(size) => (page, size, MapFlags::PRIVATE),
            Self::Huge(size) => {
                (size, size, MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::NORESERVE)
            }
        }
    }
}

/// A zero-filled mapping of whole pages that nothing else shares.
#[derive(Debug)]
pub struct PageOwned {
    base: NonNull<u8>,
    len: usize,
    // Ends last.
    _whole: Whole,
}

/// The mapping with what is inaccessible on either side; ended when dropped.
#[derive(Debug)]
struct Whole {
    start: NonNull<u8>,
    len: usize,
}

impl Whole {
    fn new(len: usize, flags: MapFlags) -> Result<Self> {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs nobody.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags) };
        let start = start.map_err(|e| Error::io(format_args!("mapping {len} bytes"), &e.into()))?;
        let start = NonNull::new(start.cast::<u8>());
        Ok(Self { start: start.ok_or_else(|| Error::system("mmap returned NULL"))?, len })
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        // SAFETY: this is the mapping of `new`; whoever registered a part holds it longer than the registration.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        if let Err(errno) = unmapped {
            tracing::warn!("munmap of {} bytes at {:p} failed: {errno}", self.len, self.start);
        }
    }
}

// SAFETY: the mapping belongs to this value. What a device or several threads may touch is met through atomics and volatile
// copies; the plain copies and fills are for this module's neighbours, who do them where nobody else is at work: a chunk
// that is not posted, a piece that is not advertised yet.
unsafe impl Send for PageOwned {}
// SAFETY: as above.
unsafe impl Sync for PageOwned {}

impl PageOwned {
    /// Maps at least `len` bytes, faulted in, and enters them in the ledger.
    ///
    /// # Errors
    /// The mapping is refused.
    pub fn new(len: usize, purpose: Purpose) -> Result<Self> {
        Self::of(Pages::Small, len, purpose, None)
    }

    /// The same of other pages, preferably of one NUMA node.
    ///
    /// # Errors
    /// The mapping is refused, there are not enough pages, or no such node.
    pub fn of(pages: Pages, len: usize, purpose: Purpose, node: Option<u32>) -> Result<Self> {
        let too_much =
            || Error::argument(format!("{len} bytes is too much")).with_errno(libc::ENOMEM);
        let (unit, align, flags) = pages.shape();
        let len = len.max(1).checked_next_multiple_of(unit).ok_or_else(too_much)?;
        let around = len.checked_add(unit + align).ok_or_else(too_much)?;
        let whole = Whole::new(around, flags)?;
        let front =
            (whole.start.addr().get() + unit).next_multiple_of(align) - whole.start.addr().get();
        // SAFETY: `front` is at most `align` behind the first unit, so a unit is left on either side.
        let base = unsafe { whole.start.add(front) };
        let owned = Self { base, len, _whole: whole };
        // From here on the value's end is in the books too.
        PinLedger::process().own(owned.range(), purpose);
        owned.open(pages, node)?;
        Ok(owned)
    }

    /// Makes the inside accessible and puts memory behind it.
    fn open(&self, pages: Pages, node: Option<u32>) -> Result<()> {
        let fail =
            |e: rustix::io::Errno| Error::io(format_args!("mapping {} bytes", self.len), &e.into());
        // SAFETY: the range is the inside of the mapping and nothing uses it yet.
        unsafe { mprotect(self.pointer(), self.len, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(fail)?;
        if let Some(node) = node {
            self.prefer(node)?;
        }
        if let Pages::Transparent(_) = pages {
            // SAFETY: the range is this mapping; the advice changes no content. A kernel without such pages refuses it,
            // and small ones do as well.
            let _ = unsafe { madvise(self.pointer(), self.len, Advice::LinuxHugepage) };
        }
        loop {
            // SAFETY: the range is this mapping; the advice changes no content.
            match unsafe { madvise(self.pointer(), self.len, Advice::LinuxPopulateWrite) } {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                // Before Linux 5.14. Touching a page of the pool could end the process: there may be none.
                Err(rustix::io::Errno::INVAL) if !matches!(pages, Pages::Huge(_)) => break,
                // A page would have been a bus error: none of the pool is left.
                Err(rustix::io::Errno::FAULT) => return Err(fail(rustix::io::Errno::NOMEM)),
                Err(e) => return Err(fail(e)),
            }
        }
        for offset in (0..self.len).step_by(page_size()) {
            // SAFETY: inside the mapping, which is writable now.
            unsafe { self.base.add(offset).write_volatile(0) };
        }
        Ok(())
    }

    /// Asks for memory of one node, and of others only when it has none left.
    fn prefer(&self, node: u32) -> Result<()> {
        const NODES: usize = 1024;
        const WORD: usize = u64::BITS as usize;
        let fail = |errno: i32| {
            let hint = match errno {
                libc::EINVAL => {
                    "; there is no such node, it has no memory, or the process may not use it"
                }
                libc::EPERM => "; the container forbids mbind (CAP_SYS_NICE allows it)",
                _ => "",
            };
            let reason = std::io::Error::from_raw_os_error(errno);
            Error::system(format!("memory of NUMA node {node}: mbind failed: {reason}{hint}"))
                .with_errno(errno)
        };
        let mut mask = [0_u64; NODES / WORD];
        let word = mask.get_mut(node as usize / WORD).ok_or_else(|| fail(libc::EINVAL))?;
        *word = 1 << (node as usize % WORD);
        // SAFETY: the range is this mapping and the mask has one bit less than is said, as the call wants it.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.pointer(),
                self.len,
                libc::c_long::from(libc::MPOL_PREFERRED),
                mask.as_ptr(),
                NODES + 1,
                0_usize,
            )
        };
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        match (done, errno, node) {
            (0, ..) | (_, libc::ENOSYS, 0) => Ok(()),
            // A kernel without NUMA has node 0 only.
            (_, libc::ENOSYS, _) => Err(fail(libc::EINVAL)),
            _ => Err(fail(errno)),
        }
    }

    /// Keeps it from forked children: they have a hole there. Pages that a device uses would be copied for each of them.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn keep_from_children(&self) -> Result<()> {
        // SAFETY: the range is this mapping; the advice changes only what a child sees.
        unsafe { madvise(self.pointer(), self.len, Advice::LinuxDontFork) }
            .map_err(|e| Error::io("madvise(MADV_DONTFORK)", &e.into()))
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
    pub(super) fn copy_from(&self, other: &Self) {
        let to = self.place(0, other.len);
        // SAFETY: both ranges are inside their mappings, which are different ones.
        unsafe { ptr::copy_nonoverlapping(other.base.as_ptr(), to.as_ptr(), other.len) };
    }

    /// Fills `len` bytes at `offset` with zeroes, where no device is at work.
    ///
    /// # Panics
    /// They are not inside the mapping.
    pub(super) fn clear(&self, offset: usize, len: usize) {
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
        // Before the mapping ends with its field: the books never name memory that is not there.
        PinLedger::process().disown(self.addr());
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

    /// Replaces it by what `new` makes of it, in one step; `None` leaves it.
    pub fn update(&self, new: impl FnMut(u32) -> Option<u32>) {
        // SAFETY: as above.
        let word = unsafe { self.word.as_ref() };
        // An error says that it was left.
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, new);
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
    fn every_size_that_cannot_be_is_an_error() {
        for len in [usize::MAX, usize::MAX / 2, usize::MAX - page_size()] {
            for pages in [Pages::Small, Pages::Transparent(2 << 20), Pages::Huge(2 << 20)] {
                let error = PageOwned::of(pages, len, Purpose::Application, None).unwrap_err();
                assert_eq!(error.errno(), Some(libc::ENOMEM), "{len} {pages:?}: {error}");
            }
        }
    }

    #[test]
    fn the_base_is_where_a_huge_page_may_be() {
        for size in [2 << 20, 32 << 20] {
            let pages = Pages::Transparent(size);
            let pages = PageOwned::of(pages, (4 << 20) + 1, Purpose::Application, None).unwrap();
            assert_eq!(pages.addr() % size, 0);
            assert_eq!(pages.len(), (4 << 20) + page_size());
            let (start, end) = (pages._whole.start.addr().get(), pages._whole.len);
            assert!(start + page_size() <= pages.addr());
            assert!(pages.range().end + page_size() <= start + end);
            assert_eq!(pages.u64_at(pages.len() - 8).load(Ordering::Relaxed), 0);
        }
    }

    /// Where the machine has pages set aside, they are what is mapped; where it has none, that is an error and no signal.
    #[test]
    fn huge_pages_come_from_the_pool() {
        let pool = std::fs::read_to_string("/proc/meminfo").unwrap();
        let field = |name: &str| {
            let line = pool.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok())
        };
        let Some(size) = field("Hugepagesize").map(|kb| kb << 10) else {
            return; // A kernel without any.
        };
        let asked = (field("HugePages_Free").unwrap() + 1) * size;
        let error =
            PageOwned::of(Pages::Huge(size), asked, Purpose::Application, None).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOMEM), "{error}");
        if field("HugePages_Free").unwrap() > field("HugePages_Rsvd").unwrap() {
            let pages = PageOwned::of(Pages::Huge(size), 5, Purpose::Application, None).unwrap();
            assert_eq!((pages.len(), pages.addr() % size), (size, 0));
        }
    }

    #[test]
    fn a_node_that_does_not_exist_is_refused() {
        for node in [1023, 1024, u32::MAX] {
            let error =
                PageOwned::of(Pages::Small, 1, Purpose::Application, Some(node)).unwrap_err();
            assert!(error.to_string().contains(&node.to_string()), "{error}");
            assert!(matches!(error.errno(), Some(libc::EINVAL | libc::EPERM)), "{error}");
        }
    }

    #[test]
    #[should_panic(expected = "offset")]
    fn out_of_bounds_is_caught() {
        let pages = PageOwned::new(1, Purpose::Gates).unwrap();
        pages.u32_at(page_size());
    }
}
