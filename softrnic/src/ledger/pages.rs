//! Ranges of whole pages, and what the process has mapped there.

use std::ffi::c_void;
use std::sync::OnceLock;

/// Bytes of a page.
pub fn page_size() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| {
        // SAFETY: no arguments that matter.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).unwrap_or(4096)
    })
}

/// The pages that a range of bytes touches, by page number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// First page.
    pub first: u64,
    /// Number of pages.
    pub count: u64,
}

impl Pages {
    /// The pages of `len` bytes at `va`; `None` if there are none or the last one ends beyond the address space.
    pub fn of(va: u64, len: usize) -> Option<Self> {
        let page = page_size() as u64;
        let end = va.checked_add(len as u64)?.checked_next_multiple_of(page)?;
        let first = va / page;
        (len > 0).then(|| Self { first, count: end / page - first })
    }

    /// The page numbers.
    pub fn numbers(&self) -> std::ops::Range<u64> {
        self.first..self.first + self.count
    }

    /// Whether a page belongs to the range.
    pub fn contains(&self, page: u64) -> bool {
        self.numbers().contains(&page)
    }

    /// Whether two ranges have a page in common.
    pub fn meets(&self, other: &Self) -> bool {
        self.first < other.numbers().end && other.first < self.numbers().end
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.count * page_size() as u64
    }

    /// First address.
    pub fn start(&self) -> usize {
        usize::try_from(self.first).unwrap_or(usize::MAX).saturating_mul(page_size())
    }

    /// Bytes, as a size in memory.
    pub fn extent(&self) -> usize {
        usize::try_from(self.bytes()).unwrap_or(usize::MAX)
    }

    /// Faults the pages in, as pinning does; EFAULT where the process itself could not read (or write) all of them.
    pub fn fault_in(&self, write: bool) -> Result<(), i32> {
        let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
        let range: *mut c_void = std::ptr::with_exposed_provenance_mut(self.start());
        loop {
            // SAFETY: the advice faults pages in and changes no content; an invalid range is an error code.
            if unsafe { libc::madvise(range, self.extent(), advice) } == 0 {
                return Ok(());
            }
            return match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => continue,
                Some(libc::ENOMEM | libc::EFAULT) => Err(libc::EFAULT),
                // An old kernel, a forbidden access, or a mapping of device pages: the mapping's flags decide.
                _ if self.allows(write) => Ok(()),
                _ => Err(libc::EFAULT),
            };
        }
    }

    /// Whether the mappings of the range allow the access; `true` if that cannot be read.
    fn allows(&self, write: bool) -> bool {
        let Some(areas) = areas() else { return true };
        let (mut at, end) = (self.start(), self.start().saturating_add(self.extent()));
        for area in areas {
            if (area.start..area.end).contains(&at) && (if write { area.write } else { area.read })
            {
                at = area.end;
                if at >= end {
                    return true;
                }
            }
        }
        false
    }
}

/// Whether something is mapped at a page.
pub fn mapped(number: u64) -> bool {
    let mut resident = 0;
    let at = usize::try_from(number).unwrap_or(usize::MAX).saturating_mul(page_size());
    let at: *mut c_void = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: one page has one byte of answer; nothing is read through the address.
    unsafe { libc::mincore(at, 1, &raw mut resident) == 0 }
}

/// One line of the process's map.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    /// First address.
    pub start: usize,
    /// First address behind it.
    pub end: usize,
    read: bool,
    write: bool,
}

/// What the process has mapped, in the order of addresses; `None` if that cannot be read.
pub fn areas() -> Option<Vec<Area>> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    Some(maps.lines().filter_map(area).collect())
}

fn area(line: &str) -> Option<Area> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let hex = |text| usize::from_str_radix(text, 16).ok();
    let flag = |at, letter| rest.as_bytes().get(at) == Some(&letter);
    Some(Area { start: hex(start)?, end: hex(end)?, read: flag(0, b'r'), write: flag(1, b'w') })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_to_whole_pages() {
        let page = page_size();
        let at = |va: usize, len| Pages::of(va as u64, len).map(|p| (p.first, p.count));
        assert_eq!(at(page, page), Some((1, 1)));
        assert_eq!(at(2 * page - 1, 2), Some((1, 2)));
        assert_eq!(at(page + 1, 1), Some((1, 1)));
        assert_eq!(at(page, 0), None);
        assert_eq!(at(usize::MAX, 2), None, "wraps");
        assert_eq!(at(usize::MAX - 1, 1), None, "its last page ends where no address is");
    }

    #[test]
    fn a_line_of_the_map_is_read() {
        let line = "7f0000001000-7f0000003000 r--p 00000000 00:00 0  [name with spaces]";
        let area = area(line).expect("a line");
        assert_eq!((area.start, area.end), (0x7f00_0000_1000, 0x7f00_0000_3000));
        assert!(area.read && !area.write);
    }
}
