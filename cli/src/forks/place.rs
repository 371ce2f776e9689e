//! What a child finds at one address.

use super::cover::whole_pages;
use super::finding::{Finding, Withheld};
use super::target::Target;
use nccl_net_pinrail::host::smaps::{Mapping, VmFlags};
use nccl_net_pinrail::memory::inventory::{Kind, Record};

/// The answer.
#[derive(Debug)]
pub enum Sight<'a> {
    /// The parent has nothing there either.
    Unmapped,
    /// A child has nothing there.
    Withheld(&'a Withheld<'a>),
    /// A child finds zeroes.
    Wiped(&'a Mapping),
    /// Nobody can read it, parent or child.
    Unreadable(&'a Mapping),
    /// A child has it.
    Inherited(&'a Mapping),
}

/// One address.
#[derive(Debug)]
pub struct Place<'a> {
    /// The address.
    pub address: u64,
    /// What is there.
    pub sight: Sight<'a>,
    /// Registrations that touch the address's page.
    pub records: Vec<&'a Record>,
}

impl<'a> Place<'a> {
    /// Looks at an address.
    pub fn of(target: &'a Target, finding: &'a Finding<'a>, address: u64) -> Self {
        let mapping = target.smaps.at(address);
        let sight = match mapping {
            None => Sight::Unmapped,
            Some(mapping) => {
                let withheld =
                    finding.withheld.iter().find(|one| std::ptr::eq(one.mapping, mapping));
                match withheld {
                    Some(withheld) => Sight::Withheld(withheld),
                    None if mapping.flags.has(VmFlags::WIPEONFORK) => Sight::Wiped(mapping),
                    None if !mapping.permissions.starts_with('r') => Sight::Unreadable(mapping),
                    None => Sight::Inherited(mapping),
                }
            }
        };
        let page = mapping.and_then(|mapping| mapping.kernel_page_size).unwrap_or(4096);
        let records = target.known.inventory().map_or_else(Vec::new, |inventory| {
            let touches = |record: &&Record| {
                record.kind != Kind::DmaBuf && whole_pages(&record.range, page).contains(&address)
            };
            inventory.records.iter().filter(touches).collect()
        });
        Self { address, sight, records }
    }

    /// Children do not have it.
    pub fn is_withheld(&self) -> bool {
        matches!(self.sight, Sight::Withheld(_))
    }

    /// Its name in JSON.
    pub fn name(&self) -> &'static str {
        match self.sight {
            Sight::Unmapped => "not-mapped",
            Sight::Withheld(_) => "withheld",
            Sight::Wiped(_) => "zero-filled",
            Sight::Unreadable(_) => "not-readable",
            Sight::Inherited(_) => "inherited",
        }
    }
}
