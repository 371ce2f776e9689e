//! Whether this machine hands out memory that a long-term pin must first move elsewhere.
//!
//! Such memory is harmless until somebody pins it without saying for how long. From then on it
//! cannot move, and no registration of it succeeds.

use std::path::Path;

use super::amount::amount;
use super::bootlog::{self, Area};
use super::kernel::Cmdline;
use super::meminfo::Meminfo;
use super::pagemap::Frame;
use super::procfs::{Proc, text};
use super::zones::Zones;

fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Why ordinary memory of this machine may be refused for a long-term pin, with numbers; `None`:
/// nothing that can be read says so. Reads three small files.
pub fn placement_risk(proc: &Proc) -> Option<String> {
    let meminfo = proc.text("meminfo").map(|text| Meminfo::parse(&text)).unwrap_or_default();
    risk(&meminfo, &Zones::read(proc), &Cmdline::read(proc).unwrap_or_default())
}

/// The same from what was read already.
pub fn risk(meminfo: &Meminfo, zones: &Zones, cmdline: &Cmdline) -> Option<String> {
    let mut reasons = Vec::new();
    let shown = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".into(), amount);
    if has_cma(meminfo) {
        let mut reason =
            format!("CmaTotal {}, CmaFree {}", shown(meminfo.cma_total), shown(meminfo.cma_free));
        if more_free_than_total(meminfo) {
            reason.push_str(", more free than there is: memory of kexec handover");
        }
        reasons.push(reason);
    }
    // What the zones count beyond CmaTotal is lent out by kexec handover.
    let in_zones = zones.cma().unwrap_or(0).saturating_mul(page_size());
    if in_zones > meminfo.cma_total.unwrap_or(0) {
        reasons.push(format!("{} in CMA page blocks by /proc/zoneinfo", amount(in_zones)));
    }
    let movable = zones.movable().unwrap_or(0).saturating_mul(page_size());
    if movable > 0 {
        reasons.push(format!("{} in ZONE_MOVABLE", amount(movable)));
    }
    let risky = cmdline.risky();
    if !risky.is_empty() {
        reasons.push(format!("kernel command line {}", risky.join(" ")));
    }
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

/// Kexec handover adds to CmaFree and not to CmaTotal.
fn more_free_than_total(meminfo: &Meminfo) -> bool {
    meminfo.cma_free.unwrap_or(0) > meminfo.cma_total.unwrap_or(0)
}

fn has_cma(meminfo: &Meminfo) -> bool {
    meminfo.cma_total.unwrap_or(0) > 0 || more_free_than_total(meminfo)
}

/// Where the contiguous areas lie, by the kernel's log, which is not short: read only where there are some.
pub fn areas(proc: &Proc, meminfo: &Meminfo) -> Vec<Area> {
    let log = has_cma(meminfo).then(|| bootlog::read(&proc.log())).flatten();
    log.map_or_else(Vec::new, |log| bootlog::areas(&log))
}

/// Free memory that lies in contiguous areas, where nothing may be pinned for long.
pub fn free_in_cma(meminfo: &Meminfo, zones: &Zones) -> Option<u64> {
    let in_zones = zones.free_cma().map(|pages| pages.saturating_mul(page_size()));
    meminfo.cma_free.max(in_zones)
}

/// Where a page frame lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In a zone whose pages must stay movable.
    MovableZone,
    /// In the contiguous area of this name, or with the address `at 0x…` where the name is not known.
    Cma(String),
    /// In this zone; whether in a block of a contiguous area is not known.
    Zone(String),
}

/// Where the page at an address lies; `None` where the kernel does not tell this process.
pub fn place_of(
    proc: &Proc,
    sysfs: &Path,
    zones: &Zones,
    areas: &[Area],
    address: u64,
) -> Option<(u64, Place)> {
    let Frame::Number(pfn) = Frame::at(proc, address)? else { return None };
    let by_log = || {
        let at = pfn.checked_mul(page_size())?;
        let area = areas.iter().find(|area| area.holds(at))?;
        Some(format!("at {:#x}", area.start))
    };
    let area = cma_area(sysfs, pfn).or_else(|| handover_area(sysfs, pfn)).or_else(by_log);
    if let Some(area) = area {
        return Some((pfn, Place::Cma(area)));
    }
    let zone = zones.of(pfn)?;
    let place = if zone.is_movable() { Place::MovableZone } else { Place::Zone(zone.name.clone()) };
    Some((pfn, place))
}

/// The contiguous area that holds a page frame, by debugfs, which root alone may read.
fn cma_area(sysfs: &Path, pfn: u64) -> Option<String> {
    let number = |path: &Path| text(path)?.trim().parse::<u64>().ok();
    std::fs::read_dir(sysfs.join("kernel/debug/cma")).ok()?.flatten().find_map(|area| {
        // Of an area in several ranges (hugetlb_cma=, Linux 6.15) the length of each is not told.
        if area.path().join("ranges/1").exists() {
            return None;
        }
        let (base, count) =
            (number(&area.path().join("base_pfn"))?, number(&area.path().join("count"))?);
        let inside = pfn.checked_sub(base).is_some_and(|offset| offset < count);
        inside.then(|| area.file_name().to_string_lossy().into_owned())
    })
}

/// The same for what kexec handover keeps free for the next kernel and lends out until then: a line for each range,
/// addresses in one file and lengths in the other.
fn handover_area(sysfs: &Path, pfn: u64) -> Option<String> {
    let numbers = |name: &str| -> Option<Vec<u64>> {
        let text = text(&sysfs.join("kernel/debug/kho/out").join(name))?;
        let hex = |line: &str| u64::from_str_radix(line.trim().strip_prefix("0x")?, 16).ok();
        text.lines().map(hex).collect()
    };
    let address = pfn.checked_mul(page_size())?;
    let (starts, lengths) = (numbers("scratch_phys")?, numbers("scratch_len")?);
    let mut ranges = starts.iter().zip(&lengths);
    let inside = |(start, len): (&u64, &u64)| {
        address.checked_sub(*start).is_some_and(|offset| offset < *len)
    };
    ranges.any(inside).then(|| "kexec handover".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;

    const ORDINARY: &str = "MemTotal: 1000000 kB\nMemFree: 500000 kB\n";
    const ZONES: &str =
        "Node 0, zone Normal\n managed 100\n cma 0\nNode 0, zone Movable\n managed 0\n";

    fn risk_of(meminfo: &str, zones: &str, cmdline: &str) -> Option<String> {
        let tree = Tree::new(&[("meminfo", meminfo), ("zoneinfo", zones), ("cmdline", cmdline)]);
        placement_risk(&Proc::at(tree.root()))
    }

    #[test]
    fn an_ordinary_machine_shows_no_risk() {
        assert_eq!(risk_of(ORDINARY, ZONES, "quiet kho=off cma=0"), None);
        let none = format!("{ORDINARY}CmaTotal: 0 kB\nCmaFree: 0 kB\n");
        assert_eq!(risk_of(&none, ZONES, ""), None);
        assert_eq!(placement_risk(&Proc::at("/no/such/folder")), None);
    }

    #[test]
    fn each_sign_is_named_with_its_number() {
        let cma = |total, free| format!("{ORDINARY}CmaTotal: {total} kB\nCmaFree: {free} kB\n");
        for (meminfo, zones, cmdline, expected) in [
            (cma(1_048_576, 524_288), ZONES.into(), "", "CmaTotal 1 GiB, CmaFree 512 MiB"),
            (
                cma(0, 9_751_756),
                ZONES.into(),
                "",
                "CmaTotal 0 bytes, CmaFree 9.3 GiB, more free than there is: memory of kexec handover",
            ),
            (
                cma(0, 0),
                ZONES.replace("cma 0", "cma 51200"),
                "",
                "in CMA page blocks by /proc/zoneinfo",
            ),
            (ORDINARY.into(), ZONES.replace("managed 0", "managed 131072"), "", "in ZONE_MOVABLE"),
            (ORDINARY.into(), ZONES.into(), "kho=on", "kernel command line kho=on"),
            (ORDINARY.into(), ZONES.into(), "hugetlb_cma=6G", "kernel command line hugetlb_cma=6G"),
        ] {
            let risk = risk_of(&meminfo, &zones, cmdline).unwrap();
            assert!(risk.contains(expected), "{risk:?} lacks {expected:?}");
            assert!(!risk.contains(';'), "more than one reason: {risk:?}");
        }
        let both = risk_of(&cma(1024, 2048), ZONES, "kho=on").unwrap();
        assert!(both.contains("2 MiB") && both.ends_with("; kernel command line kho=on"));
    }

    #[test]
    fn zones_count_free_pages_that_meminfo_does_not_show() {
        let zones = Zones::parse("Node 0, zone Normal\n nr_free_cma 3\n");
        let (page, without) = (page_size(), Meminfo::default());
        assert_eq!(free_in_cma(&without, &zones), Some(3 * page));
        assert_eq!(free_in_cma(&without, &Zones::default()), None);
        let with = Meminfo { cma_free: Some(9 * page), ..without };
        assert_eq!(free_in_cma(&with, &zones), Some(9 * page));
    }

    #[test]
    fn a_page_is_placed_where_the_kernel_tells() {
        let tree = Tree::new(&[
            ("debug-off/x", ""),
            ("kernel/debug/cma/hugetlb0/base_pfn", "100\n"),
            ("kernel/debug/cma/hugetlb0/count", "50\n"),
            ("kernel/debug/cma/damaged/count", "x\n"),
            ("kernel/debug/cma/several/base_pfn", "300\n"),
            ("kernel/debug/cma/several/count", "100\n"),
            ("kernel/debug/cma/several/ranges/0/base_pfn", "300\n"),
            ("kernel/debug/cma/several/ranges/1/base_pfn", "450\n"),
        ]);
        let bytes = |pages: [u64; 2]| pages.map(|n| format!("{:#x}\n", n * page_size())).concat();
        tree.write("kernel/debug/kho/out/scratch_phys", bytes([600, 800]).as_bytes());
        tree.write("kernel/debug/kho/out/scratch_len", bytes([1, 50]).as_bytes());
        let frames = [149, 150, 900, 0, 5000, 390, 600, 601, 849];
        let entries = frames.map(|frame| 1u64 << 63 | frame);
        tree.write("self/pagemap", &entries.map(u64::to_ne_bytes).concat());
        let zones = Zones::parse(
            "Node 0, zone Normal\n spanned 500\n start_pfn: 0\nNode 0, zone Movable\n spanned 500\n start_pfn: 500\n",
        );
        let proc = Proc::at(tree.root());
        let logged = [Area { start: 5000 * page_size(), bytes: page_size() }];
        let place = |n: u64| place_of(&proc, tree.root(), &zones, &logged, n * page_size());
        assert_eq!(place(0), Some((149, Place::Cma("hugetlb0".into()))));
        assert_eq!(place(1), Some((150, Place::Zone("Normal".into()))));
        assert_eq!(place(2), Some((900, Place::MovableZone)));
        assert_eq!((place(3), place(9)), (None, None));
        let logged = format!("at {:#x}", 5000 * page_size());
        assert_eq!(place(4), Some((5000, Place::Cma(logged))));
        let unknown = place_of(&proc, tree.root(), &zones, &[], 4 * page_size());
        assert_eq!(unknown, None);
        let handover = Place::Cma("kexec handover".into());
        assert_eq!(place(6), Some((600, handover.clone())));
        assert_eq!(place(7), Some((601, Place::MovableZone)));
        assert_eq!(place(8), Some((849, handover)));
        assert_eq!(place(5), Some((390, Place::Zone("Normal".into()))));
    }
}
