//! `/proc/self/pagemap`: which page frame is behind an address. The kernel hides the numbers from
//! processes without CAP_SYS_ADMIN.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::procfs::Proc;

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const NUMBER: u64 = (1 << 55) - 1;

/// What is behind a page of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame {
    /// This page frame.
    Number(u64),
    /// A page frame that the kernel does not name to this process.
    Hidden,
    /// Nothing in memory.
    Absent,
}

impl Frame {
    fn decode(entry: u64) -> Self {
        match entry & NUMBER {
            _ if entry & PRESENT == 0 || entry & SWAPPED != 0 => Self::Absent,
            0 => Self::Hidden,
            number => Self::Number(number),
        }
    }

    /// What is behind an address; `None` where it cannot be read.
    pub fn at(proc: &Proc, address: u64) -> Option<Self> {
        let page = rustix::param::page_size() as u64;
        let mut entry = [0; 8];
        let file = File::open(proc.path("self/pagemap")).ok()?;
        file.read_exact_at(&mut entry, (address / page).checked_mul(8)?).ok()?;
        Some(Self::decode(u64::from_ne_bytes(entry)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;

    #[test]
    fn entries_of_all_kinds() {
        for (entry, expected) in [
            (PRESENT | 91, Frame::Number(91)),
            (PRESENT | 1 << 61 | 1 << 55 | NUMBER, Frame::Number(NUMBER)),
            (PRESENT, Frame::Hidden),
            (0, Frame::Absent),
            (91, Frame::Absent),
            (SWAPPED | 91, Frame::Absent),
        ] {
            assert_eq!(Frame::decode(entry), expected, "{entry:#x}");
        }
    }

    #[test]
    fn the_entry_of_an_address_is_found() {
        let entries = [0, PRESENT | 7, PRESENT].map(u64::to_ne_bytes).concat();
        let tree = Tree::new(&[]);
        tree.write("self/pagemap", &entries);
        let proc = Proc::at(tree.root());
        let page = rustix::param::page_size() as u64;
        assert_eq!(Frame::at(&proc, 2 * page - 1), Some(Frame::Number(7)));
        assert_eq!(Frame::at(&proc, 2 * page), Some(Frame::Hidden));
        assert_eq!((Frame::at(&proc, 3 * page), Frame::at(&proc, u64::MAX)), (None, None));
    }

    #[test]
    fn a_page_in_use_is_present() {
        let on_stack = 1u8;
        let address = std::ptr::from_ref(std::hint::black_box(&on_stack)).addr() as u64;
        let frame = Frame::at(&Proc::default(), address);
        assert!(matches!(frame, None | Some(Frame::Number(_) | Frame::Hidden)), "{frame:?}");
        assert_eq!(Frame::at(&Proc::default(), 0), frame.map(|_| Frame::Absent));
    }
}
