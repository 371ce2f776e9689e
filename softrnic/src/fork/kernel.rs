//! The system's part: advice about pages, and how large they are.

use std::ffi::c_void;
use std::fs::File;
use std::io::{BufRead, BufReader};

use super::ranges::Kernel;
use crate::ledger::pages::page_size;
use crate::shm::mapping::Mapping;
use crate::stats::{self, Counter};

/// Gives advice on a range; the errno if it is refused.
fn advise(first: usize, len: usize, advice: i32) -> Result<(), i32> {
    let address: *mut c_void = std::ptr::with_exposed_provenance_mut(first);
    // SAFETY: the advice changes what later children inherit and no content of this process; a range that is not mapped is an
    // error code.
    if unsafe { libc::madvise(address, len, advice) } == 0 {
        return Ok(());
    }
    Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL))
}

/// This process.
#[derive(Debug)]
pub struct Process {
    /// The page size that ranges were widened to.
    pub page: usize,
}

impl Kernel for Process {
    fn withhold(&mut self, first: usize, last: usize) -> Result<(), i32> {
        stats::add(Counter::DontFork, 1);
        advise(first, (last - first).saturating_add(1), libc::MADV_DONTFORK)
    }

    fn give_back(&mut self, first: usize, last: usize) {
        stats::add(Counter::DoFork, 1);
        if advise(first, (last - first).saturating_add(1), libc::MADV_DOFORK).is_ok() {
            return;
        }
        // A part was unmapped or is of a kind that keeps its mark. As in rdma-core, page by page saves the rest.
        if last - first >= self.page {
            for page in (first..=last).step_by(self.page) {
                let _ = advise(page, self.page, libc::MADV_DOFORK);
            }
        }
    }
}

/// Whether the kernel knows the advice; ENOSYS if not. Tried on a page of its own.
pub fn try_advice() -> Result<(), i32> {
    let page = Mapping::anonymous(page_size()).map_err(|_| libc::ENOMEM)?;
    advise(page.addr(), page.len(), libc::MADV_DONTFORK)
        .and_then(|()| advise(page.addr(), page.len(), libc::MADV_DOFORK))
        .map_err(|_| libc::ENOSYS)
}

/// The size of the pages of the mapping at an address; `None` if there is no mapping or it cannot be read.
pub fn page_size_at(address: usize) -> Option<usize> {
    page_size_in(BufReader::new(File::open("/proc/self/smaps").ok()?), address)
}

fn page_size_in(smaps: impl BufRead, address: usize) -> Option<usize> {
    let mut inside = false;
    for line in smaps.lines() {
        let line = line.ok()?;
        if let Some(range) = range(&line) {
            inside = range.contains(&address);
        } else if inside && let Some(size) = line.strip_prefix("KernelPageSize:") {
            let kib: usize = size.trim().strip_suffix("kB")?.trim().parse().ok()?;
            // What is no power of two would make nonsense of every range.
            return kib.checked_mul(1024).filter(|size| size.is_power_of_two());
        }
    }
    None
}

/// The addresses of a line that begins a mapping.
fn range(line: &str) -> Option<std::ops::Range<usize>> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000200000 rw-p 00000000 00:0f 1   /anon_hugepage (deleted)
Size:               2048 kB
KernelPageSize:     2048 kB
MMUPageSize:        2048 kB
VmFlags: rd wr mr mw me ht
7f0000200000-7f0000201000 rw-p 00000000 00:00 0   [name with KernelPageSize: 8 kB]
Size:                  4 kB
KernelPageSize:        4 kB
";

    #[test]
    fn a_mapping_says_how_large_its_pages_are() {
        let at = |address| page_size_in(SMAPS.as_bytes(), address);
        assert_eq!(at(0x7f00_0000_0000), Some(2 << 20));
        assert_eq!(at(0x7f00_001f_ffff), Some(2 << 20));
        assert_eq!(at(0x7f00_0020_0000), Some(4096));
        assert_eq!(at(0x7f00_0020_1000), None, "not mapped");
        assert_eq!(at(0), None);
    }

    #[test]
    fn ordinary_memory_has_base_pages() {
        let map = Mapping::anonymous(page_size()).expect("map");
        assert_eq!(page_size_at(map.addr()), Some(page_size()));
    }
}
