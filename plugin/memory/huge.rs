//! Sizes of the machine's huge pages.

use crate::host::procfs::Proc;
use std::path::Path;

/// Bytes of a page of the pool that an administrator sets aside (hugetlb), in its default size.
pub fn pool_page() -> Option<usize> {
    from_meminfo(&Proc::default().text("meminfo")?)
}

/// Bytes of the huge pages that the kernel puts behind ordinary memory by itself.
pub fn transparent_page() -> Option<usize> {
    let file = Path::new("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
    usable(std::fs::read_to_string(file).ok()?.trim().parse().ok()?)
}

fn from_meminfo(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    let kilobytes: usize = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    usable(kilobytes.checked_mul(1024)?)
}

/// A size that mappings can be made of: anything else is not understood.
fn usable(size: usize) -> Option<usize> {
    let page = super::page::page_size();
    (size.is_power_of_two() && size >= page && size <= 1 << 36).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_or_not_used() {
        let of = |text: &str| from_meminfo(&format!("HugePages_Free: 3\n{text}\nHugetlb: 0 kB\n"));
        assert_eq!(of("Hugepagesize:       2048 kB"), Some(2 << 20));
        assert_eq!(of("Hugepagesize:     524288 kB"), Some(512 << 20));
        assert_eq!(of("Hugepagesize:    1048576 kB"), Some(1 << 30));
        for wrong in [
            "",
            "Hugepagesize: 2048",
            "Hugepagesize: 3000 kB",
            "Hugepagesize: 0 kB",
            "Hugepagesize: x kB",
        ] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
        assert_eq!(of(&format!("Hugepagesize: {} kB", usize::MAX)), None);
    }
}
