//! One mapping and the bounds-checked views into it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Types that may be viewed inside memory which other processes write.
///
/// # Safety
/// The type must consist of atomics only, so that any bit pattern is valid and concurrent stores are no data race.
pub unsafe trait Shared: Sync {}

/// An owned mapping, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory; all access goes through atomics (`Shared`) or through raw copies whose
// callers state their own invariant. Nothing in it is tied to the creating thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn map(len: usize, prot: i32, flags: i32, fd: i32, offset: i64) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address the kernel chooses touches no existing memory.
        let p = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, fd, offset) };
        if p == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(p.cast()).ok_or_else(|| io::Error::other("mmap returned NULL"))?;
        Ok(Self { base, len })
    }

    /// Maps `len` bytes of a file, shared and writable.
    pub fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        Self::map(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd.as_raw_fd(), 0)
    }

    /// Maps a window of a file with the given protection.
    pub fn window(fd: BorrowedFd<'_>, offset: u64, len: usize, write: bool) -> io::Result<Self> {
        let prot = if write { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let offset =
            i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        Self::map(len, prot, libc::MAP_SHARED, fd.as_raw_fd(), offset)
    }

    /// Maps private zeroed memory that costs nothing until touched.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::map(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    }

    /// Address of the first byte.
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Views a `T` at a byte offset; `None` if it does not lie inside or is misaligned.
    pub fn view<T: Shared>(&self, offset: usize) -> Option<&T> {
        let end = offset.checked_add(size_of::<T>())?;
        if end > self.len || !(self.addr() + offset).is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: the range is inside the mapping and aligned; `Shared` makes every content valid and every
        // concurrent access atomic; the borrow of `self` keeps it mapped.
        Some(unsafe { &*self.base.as_ptr().add(offset).cast::<T>() })
    }

    /// Views `n` 64-bit words at a byte offset.
    pub fn words(&self, offset: usize, n: usize) -> Option<&[AtomicU64]> {
        let end = offset.checked_add(n.checked_mul(8)?)?;
        if end > self.len || !offset.is_multiple_of(8) {
            return None;
        }
        // SAFETY: as in `view`; the base of a mapping is page aligned, so a multiple of 8 is aligned.
        Some(unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), n) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` and every view borrows `self`, so none is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_outside_or_misaligned_are_refused() {
        let map = Mapping::anonymous(4096).expect("map");
        assert!(map.words(4096 - 8, 1).is_some());
        assert!(map.words(4096 - 8, 2).is_none());
        assert!(map.words(4, 1).is_none());
        assert!(map.words(usize::MAX - 7, 1).is_none());
        assert!(map.words(0, usize::MAX / 4).is_none());
    }
}
