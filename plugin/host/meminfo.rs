//! `/proc/meminfo`: free memory and the contiguous area (CMA) that long-term pins must leave.

use std::fs;
use std::io;

/// Amounts in bytes; `None` where the kernel does not report one. A kernel without CMA has neither
/// of its two lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Meminfo {
    /// All memory.
    pub total: Option<u64>,
    /// Memory nobody uses.
    pub free: Option<u64>,
    /// Memory that can be had without swapping.
    pub available: Option<u64>,
    /// Memory that is mlocked.
    pub mlocked: Option<u64>,
    /// Size of the contiguous area.
    pub cma_total: Option<u64>,
    /// Its free part.
    pub cma_free: Option<u64>,
}

impl Meminfo {
    /// Reads the text of the file. Lines that are not understood are skipped.
    pub fn parse(text: &str) -> Self {
        let mut meminfo = Self::default();
        for line in text.lines() {
            let Some((name, amount)) = line.split_once(':') else { continue };
            let field = match name {
                "MemTotal" => &mut meminfo.total,
                "MemFree" => &mut meminfo.free,
                "MemAvailable" => &mut meminfo.available,
                "Mlocked" => &mut meminfo.mlocked,
                "CmaTotal" => &mut meminfo.cma_total,
                "CmaFree" => &mut meminfo.cma_free,
                _ => continue,
            };
            *field = kilobytes(amount);
        }
        meminfo
    }

    /// The state of this machine.
    pub fn read() -> io::Result<Self> {
        fs::read_to_string("/proc/meminfo").map(|text| Self::parse(&text))
    }

    /// The part of the contiguous area that is in use: pages that a long-term pin has to move out
    /// of it first.
    pub fn cma_used(&self) -> Option<u64> {
        Some(self.cma_total?.saturating_sub(self.cma_free?))
    }
}

/// An amount such as `  123 kB`, in bytes.
pub(super) fn kilobytes(text: &str) -> Option<u64> {
    text.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "\
MemTotal:       32662820 kB
MemFree:         1000000 kB
MemAvailable:    2000000 kB
Mlocked:              32 kB
HugePages_Total:       0
CmaTotal:        1048576 kB
CmaFree:          524288 kB
";

    #[test]
    fn a_kernel_with_cma() {
        let meminfo = Meminfo::parse(TEXT);
        assert_eq!(meminfo.free, Some(1_000_000 << 10));
        assert_eq!((meminfo.cma_total, meminfo.cma_free), (Some(1 << 30), Some(1 << 29)));
        assert_eq!(meminfo.cma_used(), Some(1 << 29));
    }

    #[test]
    fn a_kernel_without_cma() {
        let meminfo = Meminfo::parse("MemTotal: 1 kB\nMemFree: x kB\nCmaTotal: 5\n");
        assert_eq!(meminfo, Meminfo { total: Some(1024), ..Meminfo::default() });
        assert_eq!(meminfo.cma_used(), None);
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(Meminfo::read().unwrap().total.unwrap() > 0);
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>(), amount in any::<u64>()) {
            let _ = Meminfo::parse(&text);
            let line = Meminfo::parse(&format!("MemFree: {amount} kB"));
            prop_assert_eq!(line.free, amount.checked_mul(1024));
        }
    }
}
