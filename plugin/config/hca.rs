//! `NCCL_IB_HCA`: which ports of which devices are used, and the rail and plane they belong to.
//!
//! The syntax and the matching are the stock transport's, faults included, because scripts rely on
//! them: an optional `^` (exclude), then an optional `=` (exact names), then a comma list of
//! `hca[:port[:rail[:plane]]]`. Without `=` a name is a prefix, so `mlx5_1` also selects `mlx5_11`.
//! What is added is that every decision has a reason and that an entry which selects nothing can be
//! found.

use std::ffi::OsStr;
use std::fmt;

use super::value::{Form, Reading, Refused, Value};

/// Stock keeps this many entries and drops the rest.
const MAX_ENTRIES: usize = 32;
/// A plane id that uses this bit collides with the ids of fused devices.
const PLANE_RESERVED_BIT: i32 = 1 << 14;
/// Why a name that begins with one of the two signs matches nothing.
pub(super) const PREFIX_RULE: &str = "`^` and `=` stand once, in this order, before the list";
/// The number stock gives a field that is absent.
const UNDEFINED: i32 = -1;

/// One entry of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HcaEntry {
    /// Device name, or its beginning.
    pub name: String,
    /// Port number; `None` means any.
    pub port: Option<i32>,
    /// Rail id given to the ports this entry selects.
    pub rail: Option<i32>,
    /// Plane id given to the ports this entry selects.
    pub plane: Option<i32>,
    /// The entry as it was written.
    pub token: String,
}

/// A parsed device filter. The default selects every port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HcaFilter {
    /// The text it was read from; empty when not set.
    pub text: String,
    /// `^`: the entries are excluded instead of selected.
    pub exclude: bool,
    /// `=`: names must match as a whole.
    pub exact: bool,
    /// The list.
    pub entries: Vec<HcaEntry>,
}

/// What the filter says about one port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The port may be used.
    pub selected: bool,
    /// Rail id, if an entry that selected the port names one.
    pub rail: Option<i32>,
    /// Plane id, if an entry that selected the port names one.
    pub plane: Option<i32>,
    /// Why, for the log.
    pub reason: Reason,
}

/// Why a port is selected or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// There is no filter.
    NoFilter,
    /// The list holds nothing but `^`, which in stock excludes everything.
    EmptyExclusion,
    /// Selected by this entry.
    Listed(String),
    /// Excluded by this entry.
    Excluded(String),
    /// No entry of the list matches.
    NotListed,
    /// No entry of the exclusion list matches.
    NotExcluded,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoFilter => f.write_str("NCCL_IB_HCA names no device, so all are used"),
            Self::EmptyExclusion => {
                f.write_str("NCCL_IB_HCA is `^` with an empty list: excludes all")
            }
            Self::Listed(token) => write!(f, "NCCL_IB_HCA lists `{token}`"),
            Self::Excluded(token) => write!(f, "NCCL_IB_HCA excludes `{token}`"),
            Self::NotListed => f.write_str("NCCL_IB_HCA does not list it"),
            Self::NotExcluded => f.write_str("NCCL_IB_HCA does not exclude it"),
        }
    }
}

/// C's `atoi`: leading blanks, a sign, digits; 0 when there are none. Saturates where C overflows.
fn atoi(text: &str) -> i32 {
    let text = text.trim_start_matches(|c: char| c.is_ascii_whitespace() || c == '\u{b}');
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    digits.bytes().take_while(u8::is_ascii_digit).fold(0i32, |number, digit| {
        let digit = i32::from(digit - b'0');
        number.saturating_mul(10).saturating_add(if negative { -digit } else { digit })
    })
}

/// Splits `^`, `=` and the tokens of a stock interface or device list.
pub(super) fn split_list(text: &str) -> (bool, bool, impl Iterator<Item = &str>) {
    let (exclude, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
    let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
    (exclude, exact, rest.split(',').filter(|token| !token.is_empty()))
}

/// Stock's name test.
pub(super) fn name_matches(name: &str, wanted: &str, exact: bool) -> bool {
    if exact { name == wanted } else { name.starts_with(wanted) }
}

impl HcaEntry {
    /// Reads one token; `None` if it has no name, which stock skips.
    fn parse(token: &str, remarks: &mut Vec<String>) -> Option<Self> {
        let mut fields = token.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let mut number = |what: &str| {
            let field = fields.next().filter(|field| !field.is_empty())?;
            let number = atoi(field);
            if field.parse::<i32>() != Ok(number) {
                remarks.push(format!(
                    "`{token}`: {what} `{field}` is not a number and counts as {number}"
                ));
            }
            (number != UNDEFINED).then_some(number)
        };
        let port = number("port");
        let rail = number("rail");
        let plane = number("plane").filter(|plane| {
            let usable = *plane >= 0 && plane & PLANE_RESERVED_BIT == 0;
            if !usable {
                remarks.push(format!(
                    "`{token}`: plane {plane} is reserved; the plane stays undefined"
                ));
            }
            usable
        });
        if fields.next().is_some() {
            remarks
                .push(format!("`{token}`: only hca:port:rail:plane are read; the rest is ignored"));
        }
        Some(Self { name: name.to_owned(), port, rail, plane, token: token.to_owned() })
    }

    fn matches(&self, name: &str, port: u8, exact: bool) -> bool {
        name_matches(name, &self.name, exact)
            && self.port.is_none_or(|wanted| wanted == i32::from(port))
    }
}

impl HcaFilter {
    /// Reads a filter. Every text is a filter; `remarks` receives what is probably not meant.
    pub fn parse(text: &str, remarks: &mut Vec<String>) -> Self {
        let (exclude, exact, tokens) = split_list(text);
        let mut entries = Vec::new();
        for token in tokens {
            if let Some(entry) = HcaEntry::parse(token, remarks) {
                entries.push(entry);
            } else {
                remarks.push(format!("`{token}` has no device name and is ignored"));
            }
        }
        if entries.len() > MAX_ENTRIES {
            remarks.push(format!(
                "{} entries given; as in stock only the first {MAX_ENTRIES} count",
                entries.len()
            ));
            entries.truncate(MAX_ENTRIES);
        }
        for entry in &entries {
            if entry.name.starts_with(['^', '=']) {
                remarks.push(format!("`{}` will match nothing: {PREFIX_RULE}", entry.token));
            } else if entry.name.trim() != entry.name {
                remarks.push(format!(
                    "`{}` will match nothing: blanks belong to the name",
                    entry.token
                ));
            }
        }
        if exclude && entries.is_empty() {
            remarks.push("an empty list after `^` excludes every device, as in stock".to_owned());
        } else if entries.is_empty() && !text.trim().is_empty() {
            remarks.push("the list names no device, so that all are used".to_owned());
        }
        Self { text: text.to_owned(), exclude, exact, entries }
    }

    /// Decides about one port.
    pub fn matches(&self, name: &str, port: u8) -> Decision {
        let plain = |selected, reason| Decision { selected, rail: None, plane: None, reason };
        if self.entries.is_empty() {
            return if self.exclude {
                plain(false, Reason::EmptyExclusion)
            } else {
                plain(true, Reason::NoFilter)
            };
        }
        let hit = self.entries.iter().find(|entry| entry.matches(name, port, self.exact));
        match (hit, self.exclude) {
            (Some(entry), true) => plain(false, Reason::Excluded(entry.token.clone())),
            (Some(entry), false) => Decision {
                selected: true,
                rail: entry.rail,
                plane: entry.plane,
                reason: Reason::Listed(entry.token.clone()),
            },
            (None, true) => plain(true, Reason::NotExcluded),
            (None, false) => plain(false, Reason::NotListed),
        }
    }

    /// The entries that match none of the ports present: probably a spelling error.
    pub fn unmatched<'a>(&self, present: impl IntoIterator<Item = (&'a str, u8)>) -> Vec<&str> {
        let present: Vec<_> = present.into_iter().collect();
        let idle = |entry: &&HcaEntry| {
            !present.iter().any(|(name, port)| entry.matches(name, *port, self.exact))
        };
        self.entries.iter().filter(idle).map(|entry| entry.token.as_str()).collect()
    }
}

impl Value for HcaFilter {
    fn read(text: &OsStr, _: &Form) -> Result<Reading<Self>, Refused> {
        let mut remarks = Vec::new();
        let value = Self::parse(text.to_str().ok_or(Refused)?, &mut remarks);
        Ok(Reading { value, clamped: false, remarks })
    }
    fn show(&self, _: &Form) -> String {
        self.text.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filter(text: &str) -> HcaFilter {
        HcaFilter::parse(text, &mut Vec::new())
    }

    fn remarks(text: &str) -> Vec<String> {
        let mut remarks = Vec::new();
        HcaFilter::parse(text, &mut remarks);
        remarks
    }

    #[test]
    fn stock_semantics() {
        // (filter, device, port, selected), after section 3.2 of the specification.
        let rows = [
            ("", "mlx5_0", 1, true),
            ("mlx5", "mlx5_11", 1, true),
            ("mlx5_1", "mlx5_11", 1, true),
            ("=mlx5_1", "mlx5_11", 1, false),
            ("=mlx5_1", "mlx5_1", 2, true),
            ("^mlx5_1", "mlx5_11", 1, false),
            ("^=mlx5_1", "mlx5_11", 1, true),
            ("^=mlx5_1", "mlx5_1", 1, false),
            ("=mlx5_0:1,mlx5_3", "mlx5_0", 2, false),
            ("=mlx5_0:1,mlx5_3", "mlx5_3", 2, true),
            ("=^mlx5_1", "mlx5_0", 1, false),
            (",,mlx5_0,", "mlx5_0", 1, true),
            ("mlx5_0:", "mlx5_0", 7, true),
            ("mlx5_0:-1", "mlx5_0", 7, true),
            ("mlx5_0:x", "mlx5_0", 1, false),
            ("mlx5_0, mlx5_1", "mlx5_1", 1, false),
            ("^", "mlx5_0", 1, false),
            ("=", "mlx5_0", 1, true),
            (":1", "mlx5_0", 1, true),
        ];
        for (text, name, port, selected) in rows {
            let decision = filter(text).matches(name, port);
            assert_eq!(
                decision.selected, selected,
                "{text:?} on {name}:{port}: {}",
                decision.reason
            );
        }
    }

    #[test]
    fn rail_and_plane_come_from_the_matching_entry() {
        let filter = filter("=mlx5_0:1:0:2,mlx5_1::1,mlx5_2:1::3");
        let ids = |name| {
            let decision = filter.matches(name, 1);
            (decision.rail, decision.plane)
        };
        assert_eq!(ids("mlx5_0"), (Some(0), Some(2)));
        assert_eq!(ids("mlx5_1"), (Some(1), None));
        assert_eq!(ids("mlx5_2"), (None, Some(3)));
        assert_eq!(filter.matches("mlx5_9", 1).reason, Reason::NotListed);
    }

    #[test]
    fn an_excluding_entry_gives_no_ids() {
        let decision = filter("^mlx5_0:1:4:5").matches("mlx5_1", 1);
        assert_eq!((decision.selected, decision.rail, decision.plane), (true, None, None));
    }

    #[test]
    fn entries_that_match_nothing_are_found() {
        let present = [("mlx5_0", 1), ("mlx5_1", 1)];
        assert_eq!(filter("=mlx5_0,mlx5_2,mlx5_1:2").unmatched(present), ["mlx5_2", "mlx5_1:2"]);
        assert!(filter("mlx5,mlx5_1").unmatched(present).is_empty());
    }

    #[test]
    fn what_is_probably_not_meant_is_said() {
        for text in ["=^mlx5_0", "mlx5_0, mlx5_1", "^", "mlx5_0:x", "mlx5_0:1:2:16384", "a:1:2:3:4"]
        {
            assert_eq!(remarks(text).len(), 1, "{text:?}: {:?}", remarks(text));
        }
        for text in ["", "mlx5", "^=mlx5_0:1:2:3,mlx5_1", "mlx5_0::", "mlx5_0:-1"] {
            assert!(remarks(text).is_empty(), "{text:?}: {:?}", remarks(text));
        }
        let long = (0..40).map(|i| format!("d{i}")).collect::<Vec<_>>().join(",");
        assert_eq!(filter(&long).entries.len(), MAX_ENTRIES);
        assert_eq!(remarks(&long).len(), 1);
    }

    proptest! {
        #[test]
        fn any_text_is_a_filter(
            text in any::<String>(),
            name in any::<String>(),
            port in any::<u8>(),
        ) {
            let filter = filter(&text);
            let idle = filter.unmatched([(name.as_str(), port)]).len();
            let hit = filter.entries.is_empty() || idle < filter.entries.len();
            prop_assert_eq!(filter.matches(&name, port).selected, hit != filter.exclude);
        }

        #[test]
        fn excluding_is_the_complement_of_listing(
            list in "[a-c0-2_,:=]{1,24}",
            name in "[a-c0-2_]{1,6}",
            port in 1u8..4,
        ) {
            prop_assume!(!list.starts_with('='));
            let included = filter(&list).matches(&name, port).selected;
            let excluded = filter(&format!("^{list}")).matches(&name, port).selected;
            prop_assert_ne!(included, excluded);
        }
    }
}
