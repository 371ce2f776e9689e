//! `NCCL_SOCKET_IFNAME`: which network interfaces may carry the TCP side channel.
//!
//! Stock syntax: an optional `^` (exclude), then an optional `=` (exact names), then a comma list
//! of name prefixes. An empty filter means that the interface is chosen automatically.

use std::ffi::OsStr;

use super::hca::{PREFIX_RULE, name_matches, split_list};
use super::value::{Form, Reading, Refused, Value};

/// A parsed interface filter. The default leaves the choice to the plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IfnameFilter {
    /// The text it was read from; empty when not set.
    pub text: String,
    /// `^`: the names are excluded instead of selected.
    pub exclude: bool,
    /// `=`: names must match as a whole.
    pub exact: bool,
    /// The names or prefixes.
    pub names: Vec<String>,
}

impl IfnameFilter {
    /// Reads a filter. Every text is a filter; `remarks` receives what is probably not meant.
    pub fn parse(text: &str, remarks: &mut Vec<String>) -> Self {
        let (exclude, exact, tokens) = split_list(text);
        // Stock reads this list with the device parser: what follows a colon is a port nobody looks
        // at.
        let names: Vec<_> = tokens
            .map(|token| token.split_once(':').map_or(token, |(name, _)| name))
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect();
        for name in &names {
            if name.starts_with(['^', '=']) {
                remarks.push(format!("`{name}` will match nothing: {PREFIX_RULE}"));
            } else if name.trim() != name {
                remarks.push(format!("`{name}` will match nothing: blanks belong to the name"));
            }
        }
        if exclude && names.is_empty() {
            remarks.push("an empty list after `^` excludes nothing".to_owned());
        } else if names.is_empty() && !text.trim().is_empty() {
            remarks.push("the list names no interface, so that the choice is automatic".to_owned());
        }
        Self { text: text.to_owned(), exclude, exact, names }
    }

    /// The user named no interface; the choice is automatic.
    pub fn is_automatic(&self) -> bool {
        self.names.is_empty()
    }

    /// Whether an interface passes the filter. Everything passes the automatic one.
    pub fn matches(&self, interface: &str) -> bool {
        self.is_automatic() || self.lists(interface) != self.exclude
    }

    /// Whether an entry of the list names this interface, `^` aside.
    fn lists(&self, interface: &str) -> bool {
        self.names.iter().any(|name| name_matches(interface, name, self.exact))
    }

    /// The names that match none of the interfaces present.
    pub fn unmatched<'a>(&self, present: impl IntoIterator<Item = &'a str>) -> Vec<&str> {
        let present: Vec<_> = present.into_iter().collect();
        let idle =
            |wanted: &&str| !present.iter().any(|name| name_matches(name, wanted, self.exact));
        self.names.iter().map(String::as_str).filter(idle).collect()
    }
}

impl Value for IfnameFilter {
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

    fn filter(text: &str) -> IfnameFilter {
        IfnameFilter::parse(text, &mut Vec::new())
    }

    #[test]
    fn stock_semantics() {
        let rows = [
            ("eth", "eth10", true),
            ("=eth1", "eth10", false),
            ("=eth1,eth10", "eth10", true),
            ("^docker,lo", "lo", false),
            ("^docker,lo", "ens1", true),
            ("^=lo", "lo0", true),
            ("", "anything", true),
            ("^", "anything", true),
            ("eth0:80", "eth0", true),
        ];
        for (text, name, passes) in rows {
            assert_eq!(filter(text).matches(name), passes, "{text:?} on {name}");
        }
        assert!(filter("").is_automatic() && !filter("lo").is_automatic());
    }

    #[test]
    fn names_that_match_nothing_are_found() {
        assert_eq!(filter("eth,ib0").unmatched(["eth0", "lo"]), ["ib0"]);
    }

    #[test]
    fn what_is_probably_not_meant_is_said() {
        let count = |text| {
            let mut remarks = Vec::new();
            IfnameFilter::parse(text, &mut remarks);
            remarks.len()
        };
        assert_eq!(
            [count("=^lo"), count("eth0, eth1"), count("^"), count("^=lo,eth")],
            [1, 1, 1, 0]
        );
    }

    proptest! {
        #[test]
        fn any_text_is_a_filter(text in any::<String>(), name in any::<String>()) {
            let filter = filter(&text);
            let listed = filter.unmatched([name.as_str()]).len() < filter.names.len();
            let expected = filter.is_automatic() || listed != filter.exclude;
            prop_assert_eq!(filter.matches(&name), expected);
        }
    }
}
