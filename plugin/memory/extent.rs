//! Whole pages that may be registered: of memory of the plugin, which owns its pages, or of memory that a caller gave.
//!
//! There is no other way to make an [`Extent`], and nothing else is registered. So a registration of the plugin's own
//! never reaches a page with anything else on it, which a forked child would lose:
//!
//! ```compile_fail,E0451
//! # use nccl_net_pinrail::memory::extent::Extent;
//! let scratch = 0_u32;
//! Extent { start: std::ptr::from_ref(&scratch).addr(), end: 1 << 40 };
//! ```

use super::given::Given;
use super::page::{PageOwned, page_size};
use crate::error::{Error, Result};
use std::ops::Range;

/// Whole pages, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    start: usize,
    end: usize,
}

impl Extent {
    /// All of a mapping of the plugin.
    pub fn of_own(pages: &PageOwned) -> Self {
        Self { start: pages.addr(), end: pages.addr() + pages.len() }
    }

    /// The whole pages that memory of a caller touches.
    ///
    /// # Errors
    /// The range wraps around the address space.
    pub fn of_given(given: &Given) -> Result<Self> {
        let (start, end) = page_range(given.addr(), given.len())?;
        Ok(Self { start, end })
    }

    /// The whole pages of `len` bytes at `addr`, if they lie inside.
    pub fn part(&self, addr: usize, len: usize) -> Option<Self> {
        let (start, end) = page_range(addr, len).ok()?;
        (self.start <= start && end <= self.end).then_some(Self { start, end })
    }

    /// The first address.
    pub fn start(&self) -> usize {
        self.start
    }

    /// One past the last address.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether there are none; never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The addresses.
    pub fn range(&self) -> Range<usize> {
        self.start..self.end
    }
}

/// The whole pages that the range touches.
pub(super) fn page_range(addr: usize, len: usize) -> Result<(usize, usize)> {
    let page = page_size();
    let start = addr - addr % page;
    let end = addr
        .checked_add(len.max(1))
        .and_then(|end| end.checked_next_multiple_of(page))
        .ok_or_else(|| wraps(addr, len))?;
    Ok((start, end))
}

/// The error for a range that has no end.
pub(super) fn wraps(addr: usize, len: usize) -> Error {
    Error::argument(format!("the range of {len} bytes at {addr:#x} wraps around the address space"))
}

#[cfg(test)]
#[allow(unsafe_code, reason = "stands in for a caller's promise")]
mod tests {
    use super::*;
    use crate::memory::ledger::Purpose;

    #[test]
    fn a_part_lies_inside() {
        let pages = PageOwned::new(3 * page_size(), Purpose::Probe).unwrap();
        let whole = Extent::of_own(&pages);
        assert_eq!((whole.range(), whole.len()), (pages.range(), pages.len()));
        assert_eq!(whole.part(pages.addr() + 5, whole.len() - 5), Some(whole));
        let first = whole.part(pages.addr(), 1).unwrap();
        assert_eq!((first.start(), first.len()), (pages.addr(), page_size()));
        assert_eq!(whole.part(pages.addr() - 1, 5), None);
        assert_eq!(whole.part(pages.addr(), whole.len() + 1), None);
        assert_eq!(first.part(pages.addr() + page_size(), 1), None);
        assert_eq!(whole.part(usize::MAX, 5), None);
    }

    #[test]
    fn given_memory_is_rounded_to_pages() {
        let mut bytes = [0_u8; 100];
        // SAFETY: the array outlives the value.
        let given = unsafe { Given::new(bytes.as_mut_ptr().cast(), bytes.len()) }.unwrap();
        let extent = Extent::of_given(&given).unwrap();
        assert!(extent.start() <= given.addr() && given.addr() + 100 <= extent.end());
        assert!(extent.start().is_multiple_of(page_size()) && extent.len() <= 2 * page_size());
        // SAFETY: never touched.
        let endless = unsafe { Given::new(std::ptr::with_exposed_provenance_mut(8), usize::MAX) };
        assert!(Extent::of_given(&endless.unwrap()).is_err());
    }
}
