//! The owner's allocator for rings inside its region: power-of-two blocks, bookkeeping in private memory only.

use std::sync::Mutex;

use crate::sync::lock;

/// Smallest block.
const MIN: usize = 256;

/// The allocator. Offsets are relative to the region.
#[derive(Debug)]
pub struct Heap {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    next: usize,
    end: usize,
    free: [Vec<usize>; 48],
}

fn class(bytes: usize) -> usize {
    bytes.max(MIN).next_power_of_two().ilog2() as usize
}

impl Heap {
    /// An allocator over `start..end`.
    pub fn new(start: usize, end: usize) -> Self {
        Self {
            inner: Mutex::new(Inner {
                next: start,
                end,
                free: std::array::from_fn(|_| Vec::new()),
            }),
        }
    }

    /// Takes a block of at least `bytes`; `None` when the region is full.
    pub fn alloc(&self, bytes: usize) -> Option<usize> {
        let class = class(bytes);
        let mut inner = lock(&self.inner);
        if let Some(offset) = inner.free.get_mut(class)?.pop() {
            return Some(offset);
        }
        let size = 1_usize << class;
        // Blocks of a page or more start on a page, so that a ring never shares its first page with another.
        let align = size.min(4096);
        let offset = inner.next.next_multiple_of(align);
        let next = offset.checked_add(size)?;
        if next > inner.end {
            return None;
        }
        inner.next = next;
        Some(offset)
    }

    /// Returns a block.
    pub fn free(&self, offset: usize, bytes: usize) {
        if let Some(list) = lock(&self.inner).free.get_mut(class(bytes)) {
            list.push(offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_do_not_overlap_and_are_reused() {
        let heap = Heap::new(4096, 65536);
        let a = heap.alloc(300).expect("space");
        let b = heap.alloc(300).expect("space");
        assert!(a.abs_diff(b) >= 512);
        heap.free(a, 300);
        assert_eq!(heap.alloc(500), Some(a));
        assert_eq!(heap.alloc(1 << 20), None);
    }
}
