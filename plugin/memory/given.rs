//! Memory that a caller lets the plugin use, and copies between it and the plugin's own.
//!
//! A device reaches such memory through its registration and the plugin never touches it, unless the memory could not
//! be registered: then every byte passes through here.

use super::page::PageOwned;
use crate::sync::{AtomicU64, Ordering};
use std::ffi::c_void;
use std::ptr::NonNull;

/// A range that belongs to a caller. It was promised to stay mapped, readable and writable for as long as this lives.
#[derive(Debug)]
pub struct Given {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; what may be done with them is the promise of `new`, which names no thread.
unsafe impl Send for Given {}
// SAFETY: as above; copies that overlap in time are the callers' to avoid, and would mix data, not break memory.
unsafe impl Sync for Given {}

impl Given {
    /// `len` bytes at `data`; `None` for NULL.
    ///
    /// # Safety
    /// Host memory stays mapped, readable and writable until this value is dropped. Memory that the host cannot
    /// reach may be given too; nothing here may then be called but what tells the range.
    pub unsafe fn new(data: *mut c_void, len: usize) -> Option<Self> {
        // Exposed: addresses inside the range come back as numbers.
        let _ = data.expose_provenance();
        NonNull::new(data.cast()).map(|base| Self { base, len })
    }

    /// The first address.
    pub fn addr(&self) -> usize {
        self.base.addr().get()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The place of `len` bytes at `addr`.
    fn place(&self, addr: usize, len: usize) -> NonNull<u8> {
        let offset = addr.wrapping_sub(self.addr());
        assert!(offset <= self.len && len <= self.len - offset, "outside the range");
        // SAFETY: inside the range, by the assertion.
        unsafe { self.base.add(offset) }
    }

    /// Copies `len` bytes at `addr`, which lie inside, to `at` bytes into `pages`, where no device reads meanwhile.
    ///
    /// # Panics
    /// Either range is not inside its memory.
    pub(super) fn copy_in(&self, addr: usize, pages: &PageOwned, at: usize, len: usize) {
        let from = self.place(addr, len);
        let to = pages.place(at, len);
        // SAFETY: both ranges are inside their memory, which is mapped as long as `self` and `pages` live; they cannot
        // overlap, because a mapping of the plugin is nobody's to give.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
    }

    /// Copies `len` bytes from `at` bytes into `pages` to `addr`, which lie inside. Words of eight bytes are stored
    /// whole and in ascending order where the destination is aligned: whoever polls a flag in the same word as its
    /// data finds both or neither.
    ///
    /// # Panics
    /// Either range is not inside its memory.
    pub(super) fn copy_out(&self, pages: &PageOwned, at: usize, addr: usize, len: usize) {
        const WORD: usize = size_of::<u64>();
        let from = pages.place(at, len);
        let to = self.place(addr, len);
        let head = to.align_offset(WORD).min(len);
        let words = (len - head) / WORD;
        let bytes = |range: std::ops::Range<usize>| {
            for offset in range {
                // SAFETY: both ends are inside their memory, see `copy_in`; volatile, because a device may have
                // written the one and anybody may be looking at the other.
                unsafe { to.add(offset).write_volatile(from.add(offset).read_volatile()) };
            }
        };
        bytes(0..head);
        // SAFETY: inside, like the copies above; the source may be unaligned.
        let (target, source) = unsafe { (to.add(head).cast::<AtomicU64>(), from.add(head)) };
        let aligned = source.align_offset(WORD) == 0;
        for index in 0..words {
            // SAFETY: `index` is below the number of words that both ranges hold, and the target is aligned by the
            // choice of `head`. Whoever looks meanwhile sees words.
            unsafe {
                let value = if aligned {
                    source.cast::<AtomicU64>().add(index).as_ref().load(Ordering::Relaxed)
                } else {
                    // Eight loads of a byte each, and several times slower; places that a peer writes to are aligned
                    // like what they stand for.
                    u64::from_ne_bytes(source.cast::<[u8; WORD]>().add(index).read_volatile())
                };
                target.add(index).as_ref().store(value, Ordering::Relaxed);
            }
        }
        bytes(head + words * WORD..len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::ledger::Purpose;
    use proptest::prelude::*;

    fn given(bytes: &mut [u8]) -> Given {
        // SAFETY: the slice outlives the value in these tests.
        unsafe { Given::new(bytes.as_mut_ptr().cast(), bytes.len()) }.unwrap()
    }

    proptest! {
        #[test]
        fn what_goes_in_comes_out(
            data in prop::collection::vec(any::<u8>(), 0..300), at in 0..64_usize, from in 0..16_usize, to in 0..16_usize,
        ) {
            let pages = PageOwned::new(1, Purpose::BounceArena).unwrap();
            let len = data.len();
            let mut source = vec![0; from + len];
            source[from..].copy_from_slice(&data);
            let mut target = vec![0xa5; to + len + 16];
            let sender = given(&mut source);
            sender.copy_in(sender.addr() + from, &pages, at, len);
            let receiver = given(&mut target);
            receiver.copy_out(&pages, at, receiver.addr() + to, len);
            prop_assert_eq!(&target[to..to + len], &data[..]);
            prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|b| *b == 0xa5));
        }
    }

    #[test]
    #[should_panic(expected = "outside the range")]
    fn a_range_that_was_not_given_is_caught() {
        let pages = PageOwned::new(1, Purpose::BounceArena).unwrap();
        let mut bytes = [0; 8];
        let given = given(&mut bytes);
        given.copy_out(&pages, 0, given.addr() + 4, 5);
    }

    #[test]
    fn nothing_is_no_range() {
        // SAFETY: NULL is refused.
        assert!(unsafe { Given::new(std::ptr::null_mut(), 5) }.is_none());
    }
}
