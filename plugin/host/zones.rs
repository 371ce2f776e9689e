//! The kernel's zones of memory (`/proc/zoneinfo`) and its page blocks (`/proc/pagetypeinfo`).
//!
//! Pages in ZONE_MOVABLE and in blocks of a contiguous area (CMA) must stay movable; a long-term pin
//! has to move them away first. The count per zone also holds what kexec handover lends out, which
//! CmaTotal in meminfo does not.

use super::procfs::Proc;

/// One zone of one node; amounts in pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Zone {
    /// The node.
    pub node: u32,
    /// The name, such as `Normal` or `Movable`.
    pub name: String,
    /// First page frame.
    pub start_pfn: Option<u64>,
    /// Page frames from first to last, holes included.
    pub spanned: Option<u64>,
    /// Pages that the allocator hands out.
    pub managed: Option<u64>,
    /// Pages in contiguous areas. Since Linux 5.12.
    pub cma: Option<u64>,
    /// Free pages in contiguous areas.
    pub free_cma: Option<u64>,
}

impl Zone {
    /// Whether everything in it must stay movable.
    pub fn is_movable(&self) -> bool {
        self.name == "Movable"
    }
}

/// All zones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Zones(pub Vec<Zone>);

impl Zones {
    /// Reads the text of the file. Lines that are not understood are skipped.
    pub fn parse(text: &str) -> Self {
        let mut zones: Vec<Zone> = Vec::new();
        for line in text.lines() {
            if let Some(header) = line.strip_prefix("Node ") {
                zones.extend(header.split_once(", zone").and_then(|(node, name)| {
                    let node = node.trim().parse().ok()?;
                    Some(Zone { node, name: name.trim().to_owned(), ..Zone::default() })
                }));
                continue;
            }
            let Some(zone) = zones.last_mut() else { continue };
            let mut words = line.split_whitespace();
            let (Some(name), Some(value)) = (words.next(), words.next()) else { continue };
            let field = match name {
                "start_pfn:" => &mut zone.start_pfn,
                "spanned" => &mut zone.spanned,
                "managed" => &mut zone.managed,
                "cma" => &mut zone.cma,
                "nr_free_cma" => &mut zone.free_cma,
                _ => continue,
            };
            *field = value.parse().ok();
        }
        Self(zones)
    }

    /// The zones of this machine.
    pub fn read(proc: &Proc) -> Self {
        proc.text("zoneinfo").map_or_else(Self::default, |text| Self::parse(&text))
    }

    /// Pages that the movable zones hand out; `None` where the zones cannot be read.
    pub fn movable(&self) -> Option<u64> {
        (!self.0.is_empty()).then(|| {
            let movable = self.0.iter().filter(|zone| zone.is_movable());
            movable.filter_map(|zone| zone.managed).fold(0, u64::saturating_add)
        })
    }

    /// Pages in contiguous areas; `None` where no zone says.
    pub fn cma(&self) -> Option<u64> {
        self.0.iter().filter_map(|zone| zone.cma).reduce(u64::saturating_add)
    }

    /// Free pages in contiguous areas; `None` where no zone says.
    pub fn free_cma(&self) -> Option<u64> {
        self.0.iter().filter_map(|zone| zone.free_cma).reduce(u64::saturating_add)
    }

    /// The zone that holds a page frame.
    pub fn of(&self, pfn: u64) -> Option<&Zone> {
        self.0.iter().find(|zone| {
            let (Some(start), Some(spanned)) = (zone.start_pfn, zone.spanned) else { return false };
            pfn.checked_sub(start).is_some_and(|offset| offset < spanned)
        })
    }
}

/// Pages in blocks of migrate type CMA, by `/proc/pagetypeinfo`, which root alone may read; `None`
/// where the text does not say.
pub fn cma_in_blocks(text: &str) -> Option<u64> {
    const TITLE: &str = "Number of blocks type";
    let per_block = text.lines().find_map(|line| line.strip_prefix("Pages per block:"))?;
    let per_block: u64 = per_block.trim().parse().ok()?;
    let mut lines = text.lines().skip_while(|line| !line.starts_with(TITLE));
    let titles = lines.next()?.strip_prefix(TITLE)?;
    let Some(column) = titles.split_whitespace().position(|title| title == "CMA") else {
        return Some(0);
    };
    // "Node 0, zone   Normal" and then one number per title.
    let blocks = lines
        .filter(|line| line.starts_with("Node"))
        .filter_map(|line| line.split_whitespace().nth(4 + column)?.parse::<u64>().ok());
    blocks.reduce(u64::saturating_add)?.checked_mul(per_block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 1122
  pages free     3840
        spanned  4095
        present  3998
        managed  3840
        cma      0
        protection: (0, 3019, 24090, 24090, 24090)
      nr_free_cma  0
  pagesets
    cpu: 0
              count:    0
  start_pfn:           1
Node 0, zone   Normal
        spanned  1000000
        managed  900000
        cma      512
      nr_free_cma  100
  start_pfn:           4096
Node 1, zone  Movable
        spanned  2048
        managed  2000
        cma      1
      nr_free_cma  1
  start_pfn:           1004096
";

    #[test]
    fn zones_with_their_amounts() {
        let zones = Zones::parse(TEXT);
        assert_eq!(zones.0.len(), 3);
        assert_eq!(
            (zones.movable(), zones.cma(), zones.free_cma()),
            (Some(2000), Some(513), Some(101))
        );
        let name = |pfn| zones.of(pfn).map(|zone| zone.name.as_str());
        assert_eq!(
            [name(0), name(1), name(4095), name(4096)],
            [None, Some("DMA"), Some("DMA"), Some("Normal")]
        );
        assert!(zones.of(1_004_096).unwrap().is_movable());
        assert_eq!((name(1_006_144), name(u64::MAX)), (None, None));
    }

    #[test]
    fn an_old_kernel_does_not_count_contiguous_areas() {
        let zones = Zones::parse("Node 0, zone Normal\n managed 5\n");
        assert_eq!((zones.movable(), zones.cma()), (Some(0), None));
        assert_eq!(Zones::parse("managed 5\n").movable(), None);
        assert_eq!(Zones::read(&Proc::at("/no/such/folder")).movable(), None);
    }

    #[test]
    fn this_machine_has_a_zone() {
        assert!(Zones::read(&Proc::default()).0.iter().any(|zone| zone.managed.unwrap_or(0) > 0));
    }

    #[test]
    fn blocks_by_type() {
        let with = "Page block order: 9\nPages per block:  512\n\n\
            Free pages count per migrate type at order 0 1\n\
            Node    0, zone   Normal, type          CMA      7      7\n\n\
            Number of blocks type     Unmovable      Movable  Reclaimable   HighAtomic          CMA      Isolate\n\
            Node 0, zone      DMA            1            7            0            0            0            0\n\
            Node 0, zone   Normal          187         6844          104            0         4650            0\n";
        assert_eq!(cma_in_blocks(with), Some(4650 * 512));
        assert_eq!(cma_in_blocks(&with.replace("CMA", "XXX")), Some(0));
        assert_eq!(cma_in_blocks(&with.replace("Number", "Amount")), None);
        assert_eq!(cma_in_blocks(&with.replace("4650", "18446744073709551615")), None);
        assert_eq!(cma_in_blocks(""), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>(), pfn in any::<u64>(), n in "[0-9]{0,22}") {
            let zones = Zones::parse(&format!("{text}\nNode {n}, zone Movable\n managed {n}\n \
                spanned {n}\n cma {n}\n start_pfn: {n}\nNode 0, zone Movable\n managed {n}\n cma {n}\n"));
            let _ = (zones.of(pfn), zones.movable(), zones.cma());
            let _ = cma_in_blocks(&text);
            let _ = cma_in_blocks(&format!("Pages per block: {n}\nNumber of blocks type CMA\n\
                Node 0, zone N {n}\nNode 1, zone N {n}\n"));
        }
    }
}
