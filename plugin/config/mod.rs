//! The settings of the plugin.
//!
//! One table ([`TABLE`]) declares every variable that has an effect: name, type, default, range and
//! prose. The [`Settings`] struct, its defaults, the log line and `docs/settings.md` all come from
//! it. Stock `NCCL_*` names keep their stock meaning; names of our own start with `PINRAIL_`. A
//! number out of range is clamped, text that cannot be read leaves the default, a name nobody knows
//! is reported with the nearest known one; each is one [`Notice`] for the log and none is an error.

mod address;
mod choice;
mod docs;
mod folder;
mod gid_index;
mod hca;
mod ifname;
mod inert;
mod nearest;
mod notice;
mod row;
mod source;
mod table;
mod value;

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

pub use address::{AddrRange, Family, same_prefix};
pub use choice::{
    FlushMethod, FlushPolicy, ForkCollateral, ForkPolicy, LogLevel, ProfilerPolicy, RegFallback,
    RelaxedOrdering,
};
pub use docs::markdown;
pub use folder::Folder;
pub use gid_index::GidIndex;
pub use hca::{Decision, HcaEntry, HcaFilter, Reason};
pub use ifname::IfnameFilter;
pub use inert::INERT;
pub use notice::{Notice, Origin, Severity, Topic, printable};
pub use row::{Inert, Row};
pub use source::{UNREADABLE, Variable, odd_lines, of_process as variables_of_process};
pub use table::{Settings, TABLE};
pub use value::{Form, Unit};

/// The name NCCL knows the plugin by.
const PLUGIN_NAME: &str = "pinrail";
/// Links of a bond that get a queue pair each without being asked for.
const MAX_BONDED_QPS: u8 = 4;
/// Names with these beginnings are checked for spelling.
const CHECKED_PREFIXES: [&str; 4] = ["PINRAIL_", "NCCL_IB_", "NCCL_SOCKET_", "NCCL_GDR_"];

/// One variable that was set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// Its name.
    pub name: &'static str,
    /// The text it was set to.
    pub text: String,
    /// The effective value as text.
    pub effective: String,
    /// The default, as text.
    pub default: &'static str,
    /// Where it was set.
    pub origin: Origin,
}

impl Settings {
    /// Reads settings from name and value pairs; the first of several equal names counts.
    pub fn parse(variables: impl IntoIterator<Item = (String, String)>) -> (Self, Vec<Notice>) {
        Self::from_variables(variables.into_iter().map(|(name, value)| Variable {
            name,
            value: OsString::from(value),
            origin: Origin::Environment,
        }))
    }

    /// Reads the environment of the process and NCCL's configuration files. Meant to be called
    /// once, when the plugin is initialised: a process may change its environment at any time.
    pub fn from_process() -> (Self, Vec<Notice>) {
        let (variables, mut notices) = source::of_process();
        let (settings, more) = Self::from_variables(variables);
        notices.extend(more);
        (settings, notices)
    }

    /// The same of a process whose files were captured below `root`.
    pub fn from_tree(root: &Path) -> (Self, Vec<Notice>) {
        let (variables, mut notices) = source::of_tree(root);
        let (settings, more) = Self::from_variables(variables);
        notices.extend(more);
        (settings, notices)
    }

    /// Reads settings from variables with known origins, most important first.
    pub fn from_variables(variables: impl IntoIterator<Item = Variable>) -> (Self, Vec<Notice>) {
        let mut settings = Self::default();
        let mut notices = Vec::new();
        let mut seen = std::collections::HashSet::new();
        for variable in variables {
            if relevant(&variable.name) && seen.insert(variable.name.clone()) {
                settings.take(&variable, &mut notices);
            }
        }
        settings.reconcile(&mut notices);
        let place = |name| TABLE.iter().position(|row| row.name == name);
        settings.given.sort_by_key(|given| place(given.name));
        (settings, notices)
    }

    /// Applies one variable. An empty text counts as not set, as in stock.
    fn take(&mut self, variable: &Variable, notices: &mut Vec<Notice>) {
        let Variable { name, value, origin } = variable;
        let text = value.to_string_lossy();
        let shown = printable(&text);
        let mut note = |topic, text| notices.push(Notice { subject: name.clone(), topic, text });
        if text.trim().is_empty() {
            if unknown(name) {
                note(Topic::Unknown, unknown_text(name, origin));
            }
            return;
        }
        let Some(row) = TABLE.iter().find(|row| row.name == name) else {
            match INERT.iter().find(|inert| inert.name == name) {
                Some(inert) if inert.core || text.trim() == inert.default => {}
                Some(inert) => note(
                    Topic::NotApplicable,
                    format!("{name}={shown} ({origin}) has no effect in pinrail: {}", inert.reason),
                ),
                None if unknown(name) => note(Topic::Unknown, unknown_text(name, origin)),
                None => {}
            }
            return;
        };
        match self.assign(name, value) {
            None => {}
            Some(Err(value::Refused)) => note(
                Topic::Unparsable,
                format!(
                    "{name}=\"{shown}\" ({origin}) cannot be read; accepted is {}; using the \
                     default{}",
                    row.form.accepts(),
                    if row.default.is_empty() {
                        ", not set".to_owned()
                    } else {
                        format!(" {}", row.default)
                    },
                ),
            ),
            Some(Ok(reading)) => {
                let effective = self.shown(name).unwrap_or_default();
                if reading.clamped {
                    note(
                        Topic::Clamped,
                        format!(
                            "{name}={shown} ({origin}) is out of range; accepted is {}; using {}{}",
                            row.form.accepts(),
                            printable(&effective),
                            self.in_seconds(name),
                        ),
                    );
                }
                for remark in reading.remarks {
                    note(Topic::Remark, format!("{name} ({origin}): {}", printable(&remark)));
                }
                self.given.push(Given {
                    name: row.name,
                    text: text.into_owned(),
                    effective,
                    default: row.default,
                    origin: origin.clone(),
                });
            }
        }
    }

    /// What one value means only in the light of another.
    fn reconcile(&mut self, notices: &mut Vec<Notice>) {
        if let Some(range) = self.addr_range
            && range.family() != self.addr_family
        {
            let name = "NCCL_IB_ADDR_RANGE";
            self.addr_range = None;
            self.given.retain(|given| given.name != name);
            notices.push(Notice {
                subject: name.to_owned(),
                topic: Topic::Remark,
                text: format!(
                    "{name}={range} has no effect: NCCL_IB_ADDR_FAMILY is {}",
                    self.addr_family
                ),
            });
        }
    }

    /// How long a transport waits for one acknowledgement; `None`: for ever.
    pub fn ack_timeout(&self) -> Option<Duration> {
        (self.timeout != 0)
            .then(|| Duration::from_nanos(4096u64.saturating_mul(1 << self.timeout.min(31))))
    }

    /// About how long it takes until a dead peer is noticed; `None`: never.
    pub fn failure_time(&self) -> Option<Duration> {
        Some(self.ack_timeout()? * (u32::from(self.retry_cnt) + 1))
    }

    /// For the two settings that make up the failure time: what they amount to.
    fn in_seconds(&self, name: &str) -> String {
        match (name, self.ack_timeout()) {
            ("NCCL_IB_TIMEOUT", Some(once)) => {
                format!(" ({:.3} s per attempt)", once.as_secs_f64())
            }
            ("NCCL_IB_RETRY_CNT", Some(once)) => {
                format!(
                    " ({} attempts of {:.3} s)",
                    u32::from(self.retry_cnt) + 1,
                    once.as_secs_f64()
                )
            }
            _ => String::new(),
        }
    }

    /// Queue pairs per rail of a connection whose most bonded port has `links` links.
    pub fn qps_per_rail(&self, links: u8) -> usize {
        let given = self.given.iter().any(|given| given.name == "NCCL_IB_QPS_PER_CONNECTION");
        let links = if given { 1 } else { u32::from(links.clamp(1, MAX_BONDED_QPS)) };
        self.qps_per_connection.max(links) as usize
    }

    /// `NCCL_NET` asks for this plugin by name.
    pub fn asked_for_by_name(&self) -> bool {
        self.net_name.as_deref().is_some_and(|name| name.eq_ignore_ascii_case(PLUGIN_NAME))
    }

    /// `NCCL_IB_DISABLE` turns the plugin off: it is set and nobody asked for the plugin by name.
    pub fn disabled(&self) -> bool {
        self.ib_disable && !self.asked_for_by_name()
    }

    /// Whether NCCL is to ask for a flush on every GPU: asked for, and not turned off.
    pub fn forces_flush(&self) -> bool {
        self.force_flush && !self.gdr_flush_disable && self.flush != FlushPolicy::Never
    }

    /// One line with every value that differs from its default, with its origin, and with what
    /// differs from stock by default.
    pub fn summary(&self) -> String {
        let changed: Vec<_> = self
            .given
            .iter()
            .filter(|given| given.effective != given.default)
            .map(|given| {
                let effective = printable(&given.effective);
                let text = given.text.trim();
                if text == given.effective {
                    format!("{}={effective} ({})", given.name, given.origin)
                } else {
                    format!("{}={effective} ({}: {})", given.name, given.origin, printable(text))
                }
            })
            .collect();
        let changed =
            if changed.is_empty() { "all default".to_owned() } else { changed.join(", ") };
        let failure = self.failure_time().map_or_else(
            || "a dead peer is never noticed".to_owned(),
            |time| format!("a dead peer is noticed after about {:.1} s", time.as_secs_f64()),
        );
        format!("settings: {changed}; unlike stock: {}; {failure}", self.unlike_stock())
    }

    /// The settings whose effective value is not what the stock transport would use by default.
    fn unlike_stock(&self) -> String {
        let differs: Vec<_> = TABLE
            .iter()
            .filter(|row| row.is_stock() && !self.given.iter().any(|given| given.name == row.name))
            .filter_map(|row| {
                let stock = row.stock_default?;
                Some(format!("{}={} (stock {stock})", row.name, row.default))
            })
            .collect();
        if differs.is_empty() { "nothing".to_owned() } else { differs.join(", ") }
    }
}

/// Whether a variable can concern the plugin at all; the rest of the environment is not looked at.
fn relevant(name: &str) -> bool {
    name.starts_with("NCCL_") || name.starts_with("PINRAIL_")
}

/// Every name the tables know.
fn known_names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|row| row.name).chain(INERT.iter().map(|inert| inert.name))
}

/// The name looks like one of ours or the stock transport's and is neither.
fn unknown(name: &str) -> bool {
    CHECKED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        && !known_names().any(|known| known == name)
}

/// The notice for a name nobody knows.
fn unknown_text(name: &str, origin: &Origin) -> String {
    let prefix = CHECKED_PREFIXES.iter().find(|prefix| name.starts_with(*prefix)).unwrap_or(&"");
    let hint = nearest::nearest(name, prefix, known_names())
        .map_or_else(String::new, |near| format!("; the nearest known name is {near}"));
    format!("{} ({origin}) is not known and has no effect{hint}", printable(name))
}

#[cfg(test)]
mod tests;
