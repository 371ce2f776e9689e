//! Memory for messages: anonymous pages of its own, and the pattern that makes every byte of every message different.

use crate::failure::{Failure, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ptr::null_mut;

/// Bytes kept on each side of a message; they must not change.
pub const GUARD: usize = 64;

/// What a receive's memory holds before the message: guards, and the part behind a short message.
pub const POISON: u8 = 0xe7;

/// An anonymous private mapping.
#[derive(Debug)]
pub struct Buffer {
    base: *mut u8,
    size: usize,
}

impl Buffer {
    /// Maps at least `size` bytes.
    pub fn new(size: usize) -> Result<Self> {
        let page = page_size();
        let size = size.max(1).next_multiple_of(page);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            mmap_anonymous(null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let base = base.map_err(|error| {
            Failure::io("buffers", &format!("{size} bytes cannot be mapped"), &error.into())
        })?;
        Ok(Self { base: base.cast(), size })
    }

    /// Start of the mapping.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The address `offset` bytes in, with `length` bytes behind it.
    pub fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(
            offset.checked_add(length).is_some_and(|end| end <= self.size),
            "inside the buffer"
        );
        // SAFETY: the assertion keeps the result inside the mapping.
        unsafe { self.base.add(offset) }
    }

    /// The bytes of a range that no request is using.
    ///
    /// # Safety
    /// No send or receive that covers the range is in flight.
    pub unsafe fn bytes(&mut self, offset: usize, length: usize) -> &mut [u8] {
        // SAFETY: `at` checks the bounds, the mapping is readable and writable, `&mut self` keeps local aliases out and
        // the caller keeps the device out.
        unsafe { std::slice::from_raw_parts_mut(self.at(offset, length), length) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; registrations of it ended before (Endpoint::close).
        if let Err(error) = unsafe { munmap(self.base.cast(), self.size) } {
            eprintln!("munmap of a message buffer: {error}");
        }
    }
}

/// The size of a page. From the C library: rustix looks it up beside the vDSO, which valgrind hides.
pub fn page_size() -> usize {
    // SAFETY: sysconf only reads.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// SplitMix64: word `index` of the message whose key is `key`. Any byte at a wrong place or of a wrong message differs
/// with probability 255/256, a wrong word practically always.
fn word(key: u64, index: u64) -> u64 {
    let mut z = key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The key of one message of a pass.
pub fn key(size: usize, message: u64) -> u64 {
    word(0x7069_6e72_6169_6c00 ^ size as u64, message)
}

/// Writes a message.
pub fn fill(key: u64, bytes: &mut [u8]) {
    let mut index = 0;
    let mut words = bytes.chunks_exact_mut(8);
    for chunk in &mut words {
        chunk.copy_from_slice(&word(key, index).to_le_bytes());
        index += 1;
    }
    let tail = words.into_remainder();
    let last = word(key, index).to_le_bytes();
    tail.copy_from_slice(&last[..tail.len()]);
}

/// The first byte that is not the message's.
pub fn first_wrong(key: u64, bytes: &[u8]) -> Option<usize> {
    let mut index = 0;
    let mut words = bytes.chunks_exact(8);
    for chunk in &mut words {
        let expected = word(key, index).to_le_bytes();
        if chunk != expected {
            let inside = chunk.iter().zip(expected).position(|(have, want)| *have != want);
            return Some(index as usize * 8 + inside.unwrap_or(0));
        }
        index += 1;
    }
    let last = word(key, index).to_le_bytes();
    let tail = words.remainder();
    tail.iter().zip(last).position(|(have, want)| *have != want).map(|at| index as usize * 8 + at)
}

#[cfg(test)]
mod tests {
    use super::{Buffer, fill, first_wrong, key, page_size};

    #[test]
    fn finds_each_single_wrong_byte() {
        let mut bytes = [0u8; 29];
        fill(key(29, 5), &mut bytes);
        assert_eq!(first_wrong(key(29, 5), &bytes), None);
        assert!(first_wrong(key(29, 6), &bytes).is_some());
        for at in 0..bytes.len() {
            bytes[at] ^= 1;
            assert_eq!(first_wrong(key(29, 5), &bytes), Some(at));
            bytes[at] ^= 1;
        }
    }

    #[test]
    fn a_mapping_is_whole_pages() {
        let buffer = Buffer::new(5).expect("five bytes can be mapped");
        assert_eq!(buffer.size() % page_size(), 0);
    }
}
