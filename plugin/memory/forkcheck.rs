//! Whether a forked child would have all memory of its parent but the plugin's: looked at in smaps, and tried.
//!
//! Smaps says which mappings a child does not get. Each of them must lie in a mapping of the plugin, or be memory that a
//! caller had registered and that owns its pages; devices' own memory does not count. Then a child is forked which looks for
//! every other mapping. It reads anonymous memory and only asks whether the rest is mapped: to read a file's pages could
//! mean to load or even to allocate them.

use super::child::{self, Look};
use super::collateral::Shared;
use super::ledger::PinLedger;
use super::page::page_size;
use crate::error::{Error, Result};
use crate::host::smaps::{Mapping, Smaps, VmFlags};
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long the child may look.
const TIME: Duration = Duration::from_secs(2);
/// Pages of one mapping that are read at most, spread evenly: the kernel keeps mappings whole when it forks.
const PAGES: usize = 1 << 16;

/// Memory that a child does not have and should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The addresses.
    pub range: Range<usize>,
    /// What the kernel calls the mapping.
    pub name: String,
    /// Its flags.
    pub flags: VmFlags,
    /// Whether the kernel marks it as kept from children.
    pub marked: bool,
    /// Whether the child missed it.
    pub missed: bool,
    /// What the plugin knows of registrations of these pages.
    pub known: Vec<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.range;
        let name = if self.name.is_empty() { "anonymous memory" } else { &self.name };
        write!(f, "{} bytes at {start:#x}-{end:#x} ({name}; flags {})", end - start, self.flags)?;
        f.write_str(match (self.marked, self.missed) {
            (true, true) => " are kept from forked children, and a child did not have them",
            (true, false) => " are kept from forked children",
            (false, _) => " were missing in a forked child, although nothing keeps them from it",
        })?;
        if self.known.is_empty() {
            f.write_str(
                "; pinrail did not register them: another user of a verbs library in this process did, or they are queues \
                 of the adapter's driver library, or somebody called madvise",
            )
        } else {
            write!(f, "; {}", self.known.join("; "))
        }
    }
}

/// The result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Check {
    /// What children should have and do not.
    pub findings: Vec<Finding>,
    /// Bytes of the plugin that children do not have.
    pub own: usize,
    /// Bytes of registered memory that owns its pages and that children do not have.
    pub given: usize,
    /// Mappings that were looked for, and pages.
    pub mappings: usize,
    /// Pages that the child looked at; `None`: no child was forked.
    pub pages: Option<u64>,
    /// Whether the child came to the end.
    pub finished: bool,
    /// How long it took.
    pub elapsed: Duration,
}

impl fmt::Display for Check {
    /// What there is to say where nothing was found.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { own, given, mappings, elapsed, .. } = self;
        write!(
            f,
            "forked children lack {own} bytes of pinrail and {given} bytes of registered memory that owns its pages"
        )?;
        if let Some(pages) = self.pages {
            let all = if self.finished { "all" } else { "in the time it had a part" };
            write!(
                f,
                "; a child had {all} of the other {mappings} mappings ({pages} pages looked at)"
            )?;
        }
        write!(f, "; {} ms", elapsed.as_millis())
    }
}

/// What is known about who keeps which memory from children.
#[derive(Clone, Debug, Default)]
struct Owners {
    own: Vec<Range<usize>>,
    /// Registered, and owning its pages.
    given: Vec<Range<usize>>,
    /// Registered with other data on its pages.
    shared: Vec<Shared>,
}

impl Owners {
    fn of_process(shared: Vec<Shared>) -> Self {
        let ledger = PinLedger::process();
        let own = ledger.owned().into_iter().map(|(range, _)| range).collect();
        let pages: Vec<_> = shared.iter().map(|shared| shared.pages.clone()).collect();
        let given = without(ledger.given(), &pages);
        Self { own, given, shared }
    }
}

/// The parts of some ranges that lie in none of the others.
fn without(ranges: Vec<Range<usize>>, others: &[Range<usize>]) -> Vec<Range<usize>> {
    others.iter().fold(ranges, |left, other| {
        left.into_iter()
            .flat_map(|range| {
                let before = range.start..range.end.min(other.start);
                let behind = range.start.max(other.end)..range.end;
                [before, behind]
            })
            .filter(|range| range.start < range.end)
            .collect()
    })
}

fn bytes(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// Whether a child can be expected to have the mapping: not what shows a device's memory, nor pages of the kernel.
fn counts(mapping: &Mapping) -> bool {
    let special = mapping.flags.has(VmFlags::IO) || mapping.flags.has(VmFlags::PFNMAP);
    let readable = mapping.permissions.starts_with('r');
    readable && !special && !mapping.path.starts_with("[v") && mapping.range.end <= 1 << 63
}

/// The plan, and what smaps alone shows.
fn plan(smaps: &Smaps, owners: &Owners) -> (Check, Vec<Look>, Vec<Finding>) {
    let (mut check, mut looks, mut places) = (Check::default(), Vec::new(), Vec::new());
    for mapping in smaps.mappings.iter().filter(|mapping| counts(mapping)) {
        let whole = mapping.range.start as usize..mapping.range.end as usize;
        let others = without(vec![whole.clone()], &owners.own);
        let marked = mapping.flags.has(VmFlags::DONTCOPY);
        let rest = if marked { without(others.clone(), &owners.given) } else { others.clone() };
        if marked {
            check.own += whole.len() - bytes(&others);
            check.given += bytes(&others) - bytes(&rest);
        }
        let read = mapping.is_anonymous()
            && mapping.permissions.ends_with('p')
            && !mapping.flags.has(VmFlags::HUGETLB);
        for range in rest {
            let step = (range.len() / PAGES).next_multiple_of(page_size()).max(page_size());
            looks.push(Look { start: range.start, end: range.end, step, read });
            places.push(Finding {
                known: known(&range, &owners.shared),
                name: mapping.path.clone(),
                flags: mapping.flags.clone(),
                marked,
                missed: false,
                range,
            });
        }
    }
    check.mappings = looks.len();
    (check, looks, places)
}

/// What is on record about pages of a range.
fn known(range: &Range<usize>, shared: &[Shared]) -> Vec<String> {
    let shared = shared.iter().filter(|s| s.pages.start < range.end && range.start < s.pages.end);
    let asked = shared.map(|s| format!("{} bytes at {:#x} were asked for", s.len, s.addr));
    asked.chain(PinLedger::process().describe(range.clone())).collect()
}

/// Looks at the memory of this process. `shared`: memory that is registered although it does not own its pages. `fork`:
/// whether to try it with a child, which must be safe.
///
/// # Errors
/// Smaps cannot be read, or no child can be forked.
pub fn check(shared: Vec<Shared>, fork: bool) -> Result<Check> {
    let started = Instant::now();
    let owners = Owners::of_process(shared);
    let smaps = || Smaps::of_self().map_err(|e| Error::io("/proc/self/smaps", &e));
    let (mut check, looks, mut places) = plan(&smaps()?, &owners);
    if fork {
        let seen = child::look(&looks, TIME)?;
        (check.pages, check.finished) = (Some(seen.pages), seen.finished);
        for (index, hole) in &seen.holes {
            if let Some(place) = places.get_mut(*index) {
                place.missed = true;
                if !place.marked {
                    place.range.start = *hole;
                }
            }
        }
    }
    places.retain(|place| place.marked || place.missed);
    if !places.is_empty() {
        // Other threads map and unmap meanwhile: what is not as it was says nothing.
        let (_, _, again) = plan(&smaps()?, &Owners::of_process(owners.shared));
        places.retain(|place| {
            let same = |other: &&Finding| {
                other.range.start <= place.range.start && place.range.end <= other.range.end
            };
            again.iter().find(same).is_some_and(|other| other.marked == place.marked)
        });
    }
    check.findings = places;
    check.elapsed = started.elapsed();
    Ok(check)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PageOwned;
    use crate::memory::ledger::Purpose;
    use proptest::prelude::*;

    fn smaps(lines: &[(&str, &str)]) -> Smaps {
        let one = |(head, flags): &(&str, &str)| format!("{head}\nVmFlags: {flags}\n");
        Smaps::parse(&lines.iter().map(one).collect::<String>())
    }

    #[test]
    fn every_marked_page_has_an_owner_or_is_a_finding() {
        let smaps = smaps(&[
            ("10000-14000 rw-p 0 0:0 0 [heap]", "rd wr mr mw me ac"),
            ("14000-15000 rw-p 0 0:0 0 [heap]", "rd wr mr mw me dc ac"),
            ("20000-24000 rw-p 0 0:0 0", "rd wr dc"),
            ("30000-32000 rw-p 0 0:0 0", "rd wr dc"),
            ("40000-42000 rw-s 0 0:5 7 /dev/gpu", "rd wr sh io pf dc"),
            ("50000-52000 ---p 0 0:0 0", "mr mw dc"),
            ("60000-61000 r--p 0 0:0 0 [vvar]", "rd mr dc"),
            ("70000-79000 r--s 0 0:5 8 /data", "rd mr sh"),
        ]);
        let owners = Owners {
            own: vec![0x20000..0x22000, 0x22000..0x23000],
            given: vec![0x23000..0x24000, 0x31000..0x32000],
            shared: vec![Shared {
                addr: 0x14010,
                len: 4,
                pages: 0x14000..0x15000,
                how: crate::memory::collateral::How::Registered,
            }],
        };
        let (check, looks, places) = plan(&smaps, &owners);
        assert_eq!((check.own, check.given), (0x3000, 0x2000));
        let found: Vec<_> =
            places.iter().filter(|p| p.marked).map(|p| (p.range.clone(), &*p.name)).collect();
        assert_eq!(found, [(0x14000..0x15000, "[heap]"), (0x30000..0x31000, "")]);
        let looked: Vec<_> = looks.iter().map(|l| (l.start..l.end, l.read)).collect();
        assert_eq!(
            looked,
            [
                (0x10000..0x14000, true),
                (0x14000..0x15000, true),
                (0x30000..0x31000, true),
                (0x70000..0x79000, false),
            ]
        );
        let text = places[1].to_string();
        for part in ["4096 bytes at 0x14000", "[heap]", "dc ac", "4 bytes at 0x14010 were asked"] {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
        assert!(places[2].to_string().contains("anonymous memory"));
        assert!(places[2].to_string().contains("pinrail did not register them"));
    }

    #[test]
    fn large_mappings_are_sampled() {
        let smaps = smaps(&[("100000000000-500000000000 rw-p 0 0:0 0", "rd wr")]);
        let (_, looks, _) = plan(&smaps, &Owners::default());
        let count = (looks[0].end - looks[0].start).div_ceil(looks[0].step);
        assert!(count <= PAGES && count > PAGES / 2 && looks[0].step.is_multiple_of(page_size()));
    }

    /// On this very process, whose heap, stacks and libraries a child has.
    #[test]
    fn memory_that_is_kept_from_children_is_found() {
        let pages = PageOwned::new(2 * page_size(), Purpose::Application).unwrap();
        pages.keep_from_children().unwrap();
        let own = |check: &Check| {
            check
                .findings
                .iter()
                .filter(|f| f.range.start <= pages.addr() && pages.addr() < f.range.end)
                .count()
        };
        let found = check(Vec::new(), true).unwrap();
        assert!(own(&found) == 0 && found.own >= pages.len(), "{found:?}");
        assert!(found.finished && found.pages.unwrap() > 0, "{found}");
        // The same memory, had it no owner.
        PinLedger::process().disown(pages.addr());
        let found = check(Vec::new(), true).unwrap();
        let finding = found.findings.iter().find(|f| f.range == pages.range()).expect("found");
        assert!(finding.marked && finding.missed, "{finding}");
        PinLedger::process().own(pages.range(), Purpose::Application);
    }

    proptest! {
        #[test]
        fn what_is_left_is_what_is_in_no_other(
            ranges in prop::collection::vec((0..60_usize, 1..20_usize), 0..6),
            others in prop::collection::vec((0..60_usize, 1..20_usize), 0..6),
        ) {
            let of = |list: Vec<(usize, usize)>| -> Vec<_> {
                list.into_iter().map(|(start, len)| start..start + len).collect()
            };
            let (ranges, others) = (of(ranges), of(others));
            let left = without(ranges.clone(), &others);
            for at in 0..80 {
                let in_any = |list: &[Range<usize>]| list.iter().filter(|r| r.contains(&at)).count();
                let expected = if in_any(&others) > 0 { 0 } else { in_any(&ranges) };
                prop_assert_eq!(in_any(&left), expected);
            }
        }
    }
}
