//! The findings as text for a person.

use super::finding::{Finding, Origin, Owner, Withheld};
use super::place::{Place, Sight};
use super::target::{Known, Target};
use crate::output::{Colour, Style};
use nccl_net_pinrail::config::printable;
use nccl_net_pinrail::host::amount;
use nccl_net_pinrail::host::smaps::Mapping;
use nccl_net_pinrail::memory::inventory::{Kind, Record};
use std::ops::Range;
use std::path::PathBuf;

/// Registrations that are shown for one mapping; JSON has all of them.
const SHOWN: usize = 8;

/// Lines of a report.
struct Lines {
    text: String,
    colour: Colour,
}

impl Lines {
    fn say(&mut self, indent: usize, line: &str) {
        self.text.push_str(&" ".repeat(indent));
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn paint(&self, style: Style, text: &str) -> String {
        self.colour.paint(style, text)
    }
}

/// Everything, or what concerns one address.
pub fn report(
    target: &Target,
    finding: &Finding<'_>,
    place: Option<&Place<'_>>,
    removed: &[PathBuf],
    colour: Colour,
) -> String {
    let mut lines = Lines { text: String::new(), colour };
    let title = format!("process {} ({})", target.pid, target.name);
    let title = lines.paint(Style::Strong, &title);
    lines.say(0, &title);
    lines.say(0, &known(&target.known));
    for path in removed {
        lines.say(0, &format!("removed {}, left by a process that is gone", path.display()));
    }
    lines.say(0, "");
    match place {
        Some(place) => lines.place(target, place),
        None => lines.table(target, finding),
    }
    lines.text
}

fn known(known: &Known) -> String {
    match known {
        Known::Absent => "registrations: inventory unknown; the process publishes none (it does not use pinrail, has \
                          nothing registered with it, or PINRAIL_INVENTORY=off)"
            .into(),
        Known::Unreadable(reason) => format!("registrations: inventory unknown: {reason}"),
        Known::Read(inventory) => {
            let mut text = format!(
                "registrations: {} ({})",
                inventory.records.len(),
                printable(&inventory.path.to_string_lossy())
            );
            if inventory.unlisted > 0 {
                text += &format!("; {} more found no room there", inventory.unlisted);
            }
            if inventory.unsteady > 0 {
                text += &format!("; {} could not be read", inventory.unsteady);
            }
            text
        }
    }
}

fn span(range: &Range<u64>) -> String {
    format!("{:#x}-{:#x}", range.start, range.end)
}

/// What a mapping is called.
fn called(path: &str) -> String {
    if path.is_empty() { "anonymous memory".into() } else { printable(path) }
}

fn bytes(count: u64) -> String {
    if count == 1 { "1 byte".into() } else { format!("{count} bytes") }
}

/// One registration: who asked for what.
fn registration(record: &Record) -> String {
    let device =
        if record.device.is_empty() { "no device".into() } else { printable(&record.device) };
    let site = printable(&record.site);
    let asked = record.asked.end.saturating_sub(record.asked.start);
    match record.kind {
        Kind::Own => format!("{site}, {device} (registration {})", record.number),
        _ => {
            let times = match record.requests {
                0 | 1 => String::new(),
                more => format!(", asked for {more} times in all"),
            };
            format!(
                "{} asked for at {:#x} by {site}, {device} (registration {}{times})",
                bytes(asked),
                record.asked.start,
                record.number
            )
        }
    }
}

/// Where a withheld mapping lies.
fn origin(one: &Withheld<'_>) -> String {
    match &one.origin {
        Some(Origin { name, range }) => format!("cut out of {} {}", called(name), span(range)),
        None if one.mapping.path.is_empty() => "a mapping by itself".into(),
        None => called(&one.mapping.path),
    }
}

impl Lines {
    fn registrations(&mut self, indent: usize, records: &[&Record]) {
        for record in records.iter().take(SHOWN) {
            self.say(indent, &registration(record));
        }
        if let Some(more) = records.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            self.say(indent, &format!("and {more} more registrations (--json lists all)"));
        }
    }

    /// What was asked for and what went with it.
    fn account(&mut self, indent: usize, target: &Target, one: &Withheld<'_>) {
        if one.unexplained() > 0 && one.owner != Owner::Device {
            let why = match target.known.inventory() {
                None => "by which registration is unknown, because there is no inventory",
                Some(_) => {
                    "not by a registration of pinrail: by another RDMA library, or by the program's own \
                     madvise(MADV_DONTFORK)"
                }
            };
            self.say(indent, &format!("{} withheld; {why}", bytes(one.unexplained())));
        }
        if matches!(one.owner, Owner::Given | Owner::Partly) {
            let line = format!(
                "{} asked for, {} withheld: {} of collateral",
                bytes(one.asked),
                bytes(one.explained),
                bytes(one.collateral())
            );
            let line = self.paint(Style::Bad, &line);
            self.say(indent, &line);
        }
    }

    fn withheld(&mut self, target: &Target, one: &Withheld<'_>) {
        let whose = match one.owner {
            Owner::Pinrail => self.paint(Style::Good, "pinrail's own"),
            Owner::Device => self.paint(Style::Good, "a device's"),
            Owner::Given => self.paint(Style::Bad, "registered by pinrail for its caller"),
            Owner::Partly => self.paint(Style::Bad, "in part registered by pinrail for its caller"),
            Owner::Unknown => self.paint(Style::Bad, "unknown"),
        };
        self.say(
            2,
            &format!(
                "{}  {}  {}  {whose}",
                span(&one.mapping.range),
                amount(one.bytes()),
                origin(one)
            ),
        );
        self.say(6, &format!("{} [{}]", one.mapping.permissions, one.mapping.flags));
        self.registrations(6, &one.records);
        self.account(6, target, one);
    }

    fn table(&mut self, target: &Target, finding: &Finding<'_>) {
        if finding.withheld.is_empty() {
            self.say(0, "no mapping is withheld from forked children (none has the flag dc)");
        } else {
            self.say(0, "withheld from forked children (flag dc: MADV_DONTFORK)");
            for one in &finding.withheld {
                self.withheld(target, one);
            }
        }
        if !finding.wiped.is_empty() {
            self.say(0, "zero-filled in forked children (flag wf: MADV_WIPEONFORK)");
            for one in &finding.wiped {
                self.say(2, &format!("{}  {}", span(&one.range), called(&one.path)));
            }
        }
        self.say(0, "");
        let totals = &finding.totals;
        if totals.withheld > 0 {
            let rest = match target.known.inventory() {
                None => "who asked, and for how much of it, is unknown".into(),
                Some(_) => format!(
                    "{} of them pinrail's own; {} asked for by others, {} of collateral, {} not explained",
                    totals.own,
                    bytes(totals.asked),
                    totals.collateral,
                    totals.unexplained
                ),
            };
            self.say(0, &format!("in all: {} withheld; {rest}", bytes(totals.withheld)));
        }
        let verdict = if finding.is_harmful() {
            self.paint(
                Style::Bad,
                "pages are withheld that a forked child may need: it is killed by SIGSEGV when it touches one",
            )
        } else {
            self.paint(Style::Good, "nothing is withheld that a forked child could need")
        };
        self.say(0, &verdict);
        if finding.is_harmful() {
            self.say(
                0,
                "an address that a child crashed on: --core-address ADDR tells about it. Remedies: docs/forks-command.md",
            );
        }
    }

    fn place(&mut self, target: &Target, place: &Place<'_>) {
        let address = format!("{:#x}", place.address);
        match place.sight {
            Sight::Withheld(one) => self.cause(target, place, one),
            Sight::Unmapped => {
                self.elsewhere(&format!("{address} is not mapped in the parent either"));
                self.say(0, "a child cannot have inherited it: look for a pointer that is wrong, or memory given back");
            }
            Sight::Wiped(mapping) => {
                self.elsewhere(&format!("{address} is zero-filled in forked children, not absent"));
                self.mapping(mapping);
                self.say(
                    0,
                    "flag wf: somebody asked for MADV_WIPEONFORK. A child reads zeroes and does not crash here; no \
                     registration does that",
                );
            }
            Sight::Unreadable(mapping) => {
                self.elsewhere(&format!("{address} is mapped without permission to read"));
                self.mapping(mapping);
                self.say(0, "it faults in the parent in the same way: a guard page, or memory that is only reserved");
            }
            Sight::Inherited(mapping) => {
                self.elsewhere(&format!(
                    "{address} is not withheld: a child that is forked now has it"
                ));
                self.mapping(mapping);
                if !place.records.is_empty() {
                    self.say(
                        0,
                        "registered all the same; the kernel copies such pages on fork, or fork support was not asked for:",
                    );
                    self.registrations(2, &place.records);
                }
                self.say(
                    0,
                    "a child that was forked while a registration was there, which is gone now, has lacked it since",
                );
            }
        }
    }

    fn elsewhere(&mut self, what: &str) {
        let what = self.paint(Style::Strong, what);
        self.say(0, &format!("{what}; look elsewhere"));
    }

    fn mapping(&mut self, mapping: &Mapping) {
        self.say(
            2,
            &format!(
                "{}  {}  {} [{}]",
                span(&mapping.range),
                called(&mapping.path),
                mapping.permissions,
                mapping.flags
            ),
        );
    }

    fn cause(&mut self, target: &Target, place: &Place<'_>, one: &Withheld<'_>) {
        let line = format!("{:#x} is withheld: forked children have nothing there", place.address);
        let line = self.paint(Style::Bad, &line);
        self.say(0, &line);
        self.mapping(one.mapping);
        self.say(2, &origin(one));
        if place.records.is_empty() {
            self.say(0, "because of: unknown");
        } else {
            self.say(0, "because of:");
            self.registrations(2, &place.records);
        }
        self.account(0, target, one);
        let remedy = match one.owner {
            Owner::Pinrail => {
                "it is the plugin's own page and holds nothing of the program: no child has a reason to read it"
            }
            Owner::Device => "it belongs to a device: no child has a reason to read it",
            Owner::Given | Owner::Partly | Owner::Unknown => {
                "what is registered must own its pages: a mapping of its own, in whole pages. Remedies: \
                 docs/forks-command.md"
            }
        };
        self.say(0, remedy);
    }
}
