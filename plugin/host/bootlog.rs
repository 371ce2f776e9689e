//! The kernel's log, for what it said while booting about the contiguous areas (CMA) that it set aside.
//!
//! debugfs says where an area lies on few kernels, the log does on nearly all: to whoever may read it, until its first
//! lines are overwritten.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// More than any kernel keeps.
const LONGEST: usize = 16 << 20;

/// A contiguous area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// Its first byte, as a physical address.
    pub start: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl Area {
    /// Whether a physical address lies in it.
    pub fn holds(&self, address: u64) -> bool {
        address.checked_sub(self.start).is_some_and(|offset| offset < self.bytes)
    }
}

/// The areas that the log names. None if it says that one of them could not be used, as it does not say where that lies.
pub fn areas(log: &str) -> Vec<Area> {
    if log.lines().any(|line| line.contains("CMA area") && line.contains("could not be activated"))
    {
        return Vec::new();
    }
    log.lines().filter_map(area).collect()
}

/// `cma: Reserved 600 MiB at 0x59e00000`, or what a device tree asks for:
/// `created CMA memory pool at 0x3c000000, size 64 MiB`.
fn area(line: &str) -> Option<Area> {
    let (start, mib) = if let Some((_, said)) = line.split_once("cma: Reserved ") {
        let (mib, start) = said.split_once(" MiB at ")?;
        (start, mib)
    } else {
        let (_, said) = line.split_once("created CMA memory pool at ")?;
        said.split_once(", size ")?
    };
    let first = |text: &str| text.split_whitespace().next().map(str::to_owned);
    let start = u64::from_str_radix(first(start)?.strip_prefix("0x")?, 16).ok()?;
    let bytes = first(mib)?.parse::<u64>().ok()?.checked_mul(1 << 20)?;
    Some(Area { start, bytes })
}

/// The log by its device, whose every read gives a line, or by a file; `None` where it cannot be read.
pub fn read(path: &Path) -> Option<String> {
    // Not to wait for the next line at the end.
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let (mut log, mut line) = (Vec::new(), [0; 8192]);
    while log.len() < LONGEST {
        match file.read(&mut line) {
            Ok(0) => break,
            Ok(length) => log.extend_from_slice(line.get(..length)?),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // Lines were overwritten meanwhile; the next read goes on with the oldest that is left.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
    Some(String::from_utf8_lossy(&log).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;

    const LOG: &str = "6,1,0,-;Command line: quiet cma=600M\n\
        6,52,0,-;cma: Reserved 600 MiB at 0x0000000059e00000\n\
        6,53,0,-;cma: Reserved 16 MiB at 0x00000000fe000000 on node 1\n\
        6,54,0,-;Reserved memory: created CMA memory pool at 0x000000003c000000, size 64 MiB\n\
        6,55,0,-;cma: Reserved 1024 MiB in 1 range\n\
        6,56,0,-;cma: Reserved x MiB at 0x1000\n\
        6,57,0,-;cma: Reserved 1 MiB at 1000\n";

    #[test]
    fn areas_are_those_with_an_address() {
        let area = |start, mib: u64| Area { start, bytes: mib << 20 };
        let all = [area(0x59e0_0000, 600), area(0xfe00_0000, 16), area(0x3c00_0000, 64)];
        assert_eq!(areas(LOG), all);
        assert_eq!(areas(""), []);
        let broken = format!("{LOG}3,90,0,-;cma: CMA area hugetlb0 could not be activated\n");
        assert_eq!(areas(&broken), []);
    }

    #[test]
    fn an_area_ends_where_it_ends() {
        let area = Area { start: 0x1000, bytes: 0x2000 };
        let inside = [0, 0xfff, 0x1000, 0x2fff, 0x3000, u64::MAX].map(|at| area.holds(at));
        assert_eq!(inside, [false, false, true, true, false, false]);
    }

    #[test]
    fn the_log_is_read_to_its_end() {
        let long = LOG.repeat(100);
        let tree = Tree::new(&[("kmsg", &long)]);
        assert_eq!(read(&tree.root().join("kmsg")), Some(long));
        assert_eq!(read(&tree.root().join("absent")), None);
        assert_eq!(read(tree.root()), None);
    }
}
