//! What is withheld from children, whose it is, and what shares its pages.

use super::cover::{covered, whole_pages};
use super::target::Target;
use nccl_net_pinrail::host::smaps::{Mapping, Smaps, VmFlags};
use nccl_net_pinrail::memory::inventory::{Kind, Record};
use nccl_net_pinrail::memory::status::layout::NAME;
use std::ops::Range;

/// Whose the pages of a mapping are that children do not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The plugin's own memory, which shares its pages with nothing.
    Pinrail,
    /// Registers, queues or other things of a driver that no child could use.
    Device,
    /// Memory that was given to the plugin to be registered, with whatever else lies on its pages.
    Given,
    /// Some of it the inventory does not explain.
    Partly,
    /// None of it the inventory explains, or there is none.
    Unknown,
}

impl Owner {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pinrail => "pinrail",
            Self::Device => "device",
            Self::Given => "given",
            Self::Partly => "partly-unknown",
            Self::Unknown => "unknown",
        }
    }

    /// A child may need what is there.
    pub fn is_harmful(self) -> bool {
        !matches!(self, Self::Pinrail | Self::Device)
    }
}

/// The memory that a withheld mapping was cut out of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// `[heap]`, `[stack]`, a file, or nothing for anonymous memory.
    pub name: String,
    /// All of it that is still side by side, the withheld part too.
    pub range: Range<u64>,
}

/// One mapping that children do not have.
#[derive(Debug)]
pub struct Withheld<'a> {
    /// The mapping.
    pub mapping: &'a Mapping,
    /// Whose it is.
    pub owner: Owner,
    /// Registrations that touch its pages.
    pub records: Vec<&'a Record>,
    /// What it was cut out of; `None`: it is a mapping by itself.
    pub origin: Option<Origin>,
    /// Bytes that somebody asked for, as far as they are known.
    pub asked: u64,
    /// Bytes on the pages of known registrations.
    pub explained: u64,
}

impl Withheld<'_> {
    /// Bytes that children do not have.
    pub fn bytes(&self) -> u64 {
        self.mapping.range.end - self.mapping.range.start
    }

    /// Bytes that nobody asked for and that went with those that somebody did.
    pub fn collateral(&self) -> u64 {
        self.explained.saturating_sub(self.asked)
    }

    /// Bytes that no known registration touches.
    pub fn unexplained(&self) -> u64 {
        self.bytes().saturating_sub(self.explained)
    }
}

/// Bytes of all mappings that children do not have, devices left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Withheld.
    pub withheld: u64,
    /// The plugin's own.
    pub own: u64,
    /// Asked for in memory that was given.
    pub asked: u64,
    /// Withheld with it.
    pub collateral: u64,
    /// Not explained.
    pub unexplained: u64,
}

/// Everything that was found.
#[derive(Debug)]
pub struct Finding<'a> {
    /// Mappings that children do not have, by address.
    pub withheld: Vec<Withheld<'a>>,
    /// Mappings that children find zeroed, by address.
    pub wiped: Vec<&'a Mapping>,
    /// Bytes.
    pub totals: Totals,
}

impl<'a> Finding<'a> {
    /// Looks at everything that was read.
    pub fn of(target: &'a Target) -> Self {
        let records: Vec<&Record> = target
            .known
            .inventory()
            .map_or_else(Vec::new, |inventory| inventory.records.iter().collect());
        let mappings = &target.smaps.mappings;
        let withheld: Vec<_> = mappings
            .iter()
            .zip(Origin::of_all(&target.smaps))
            .filter(|(mapping, _)| mapping.flags.has(VmFlags::DONTCOPY))
            .map(|(mapping, origin)| Withheld::of(mapping, origin, &records))
            .collect();
        let wiped = mappings
            .iter()
            .filter(|m| m.flags.has(VmFlags::WIPEONFORK) && !m.flags.has(VmFlags::DONTCOPY));
        Self { totals: Totals::of(&withheld), wiped: wiped.collect(), withheld }
    }

    /// Something is withheld that a child may need.
    pub fn is_harmful(&self) -> bool {
        self.withheld.iter().any(|withheld| withheld.owner.is_harmful())
    }
}

impl Totals {
    fn of(withheld: &[Withheld<'_>]) -> Self {
        let mut totals = Self::default();
        let add = |sum: &mut u64, bytes: u64| *sum = sum.saturating_add(bytes);
        for one in withheld.iter().filter(|one| one.owner != Owner::Device) {
            add(&mut totals.withheld, one.bytes());
            if one.owner == Owner::Pinrail {
                add(&mut totals.own, one.bytes());
            } else {
                add(&mut totals.asked, one.asked);
                add(&mut totals.collateral, one.collateral());
                add(&mut totals.unexplained, one.unexplained());
            }
        }
        totals
    }
}

/// Bytes of a page of a mapping.
fn page(mapping: &Mapping) -> u64 {
    mapping.kernel_page_size.unwrap_or(4096)
}

/// Whether a mapping shows something of a driver.
fn is_device(mapping: &Mapping) -> bool {
    mapping.flags.has(VmFlags::IO)
        || mapping.flags.has(VmFlags::PFNMAP)
        || (mapping.path.starts_with("/dev/") && !mapping.path.starts_with("/dev/shm/"))
        || mapping.path.starts_with("anon_inode:")
}

/// Whether a mapping is what the plugin shows of its connections. No device sees it, so that it is no registration.
fn is_status(mapping: &Mapping) -> bool {
    mapping.path.strip_suffix(" (deleted)").and_then(|path| path.strip_prefix("/memfd:"))
        == Some(NAME)
}

impl<'a> Withheld<'a> {
    fn of(mapping: &'a Mapping, origin: Option<Origin>, records: &[&'a Record]) -> Self {
        let whole = &mapping.range;
        let page = page(mapping);
        let records: Vec<&Record> = records
            .iter()
            .copied()
            // Addresses of a DMA-BUF are no addresses of the process.
            .filter(|record| record.kind != Kind::DmaBuf)
            .filter(|record| {
                let pages = whole_pages(&record.range, page);
                pages.start < whole.end && whole.start < pages.end
            })
            .collect();
        let of_kind =
            |own: bool| records.iter().filter(move |record| (record.kind == Kind::Own) == own);
        let own = covered(whole, of_kind(true).map(|record| record.range.clone()));
        let pages = records.iter().map(|record| whole_pages(&record.range, page));
        let bytes = whole.end - whole.start;
        let explained = if is_status(mapping) { bytes } else { covered(whole, pages) };
        let owner = if is_device(mapping) {
            Owner::Device
        } else if own == bytes || is_status(mapping) {
            Owner::Pinrail
        } else if explained == bytes {
            Owner::Given
        } else if explained > 0 {
            Owner::Partly
        } else {
            Owner::Unknown
        };
        let asked = covered(
            whole,
            of_kind(true).map(|r| r.range.clone()).chain(of_kind(false).map(|r| r.asked.clone())),
        );
        Self { mapping, owner, records, origin, asked, explained }
    }
}

impl Origin {
    /// For each mapping what it was one with before the advice about forks cut it out: neighbours without a gap that are
    /// alike in everything else. There may be very many, so each run of them is looked at once.
    fn of_all(smaps: &Smaps) -> Vec<Option<Self>> {
        let runs = smaps.mappings.chunk_by(alike);
        runs.flat_map(|run| std::iter::repeat_n(Self::of_run(run), run.len())).collect()
    }

    fn of_run(run: &[Mapping]) -> Option<Self> {
        let [first, .., last] = run else { return None };
        let name = run.iter().map(|mapping| &mapping.path).find(|name| !name.is_empty());
        let range = first.range.start..last.range.end;
        Some(Self { name: name.cloned().unwrap_or_default(), range })
    }
}

/// Whether two mappings could be parts of one.
fn alike(before: &Mapping, after: &Mapping) -> bool {
    let len = before.range.end - before.range.start;
    // The kernel names the part of a stack that holds its beginning, and no other.
    let named = |mapping: &Mapping| !mapping.path.is_empty() && mapping.path != "[stack]";
    before.range.end == after.range.start
        && before.permissions == after.permissions
        && before.inode == after.inode
        && (before.path == after.path || !(named(before) || named(after)))
        && (before.is_anonymous() || before.offset.checked_add(len) == Some(after.offset))
}

#[cfg(test)]
mod tests;
