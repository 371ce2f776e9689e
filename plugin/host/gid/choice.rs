//! Which GID a port uses: a pure function over the port's table and the settings.
//!
//! On RoCE the source GID is the source IP address and UDP or not: one that the peer cannot route
//! back to looks fine until the first transfer times out. So the choice prefers, in this order: the
//! wanted RoCE version, an address that is not link-local, the wanted family, the lowest index.
//! Empty slots, addresses outside the wanted range and interfaces of another network namespace
//! never count. Stock lets the family outrank the version, and falls back to slot 0 when nothing
//! fits.

use std::cmp::Reverse;

use super::{GidEntry, NetDev};
use crate::config::{AddrRange, Family, Settings};

/// What the settings ask for on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// A fixed index.
    pub index: Option<u32>,
    /// Preferred family.
    pub family: Family,
    /// The subnet the choice is confined to.
    pub range: Option<AddrRange>,
    /// Preferred RoCE version.
    pub version: u8,
    /// On InfiniBand, the slot that may carry a routable identifier.
    pub flid_index: u32,
}

impl Wanted {
    /// The wishes of the settings for this device.
    pub fn for_device(settings: &Settings, device: &str) -> Self {
        Self {
            index: settings.gid_index.for_device(device),
            family: settings.addr_family,
            range: settings.addr_range,
            version: settings.roce_version,
            flid_index: settings.flid_gid_index,
        }
    }
}

/// A chosen GID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The slot.
    pub entry: GidEntry,
    /// Why, for the log.
    pub reason: String,
    /// What is likely to go wrong with it.
    pub warning: Option<String>,
}

/// No slot of a port's table can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}; the table holds: {}", listing(.table))]
pub struct NoGid {
    /// What was asked for and not found.
    pub why: String,
    /// The slots that are in use.
    pub table: Vec<GidEntry>,
}

fn listing(table: &[GidEntry]) -> String {
    let rows: Vec<_> = table.iter().map(ToString::to_string).collect();
    if rows.is_empty() { "nothing".to_owned() } else { rows.join(", ") }
}

/// The refusal of a table.
fn refuse(why: String, table: &[GidEntry]) -> NoGid {
    NoGid { why, table: table.iter().filter(|entry| entry.is_configured()).cloned().collect() }
}

/// Chooses the GID of an InfiniBand port: the slot with a routable identifier if it has one, else
/// slot 0. InfiniBand addresses by LID, so that even an empty table is no obstacle.
pub fn choose_infiniband(table: &[GidEntry], wanted: &Wanted) -> Choice {
    let slot = |index| table.iter().find(|entry| entry.index == index);
    let pick =
        |entry: GidEntry, reason: &str| Choice { entry, reason: reason.to_owned(), warning: None };
    if let Some(routable) = slot(wanted.flid_index).filter(|entry| entry.flid() != 0) {
        return pick(routable.clone(), "it carries a routable identifier (FLID)");
    }
    let first = slot(0).cloned().unwrap_or(GidEntry {
        index: 0,
        gid: [0; 16],
        version: None,
        netdev: NetDev::Unknown,
    });
    pick(first, "it is the first entry, as always on InfiniBand")
}

/// Chooses the GID of a RoCE port.
pub fn choose_roce(table: &[GidEntry], wanted: &Wanted) -> Result<Choice, NoGid> {
    if let Some(index) = wanted.index {
        return fixed(table, index);
    }
    let usable: Vec<_> = table
        .iter()
        .filter(|entry| entry.is_configured() && !matches!(entry.netdev, NetDev::Elsewhere(_)))
        .collect();
    if usable.is_empty() {
        return Err(refuse(
            "no GID belongs to an interface of this network namespace".into(),
            table,
        ));
    }
    let in_range =
        |entry: &&&GidEntry| wanted.range.is_none_or(|range| range.contains(entry.address()));
    let best = usable.iter().filter(in_range).max_by_key(|entry| rank(entry, wanted));
    match (best, wanted.range) {
        (Some(best), _) => Ok(explain(best, wanted)),
        (None, Some(range)) => {
            Err(refuse(format!("no GID lies in NCCL_IB_ADDR_RANGE {range}"), table))
        }
        (None, None) => Err(refuse("no GID can be used".into(), table)),
    }
}

/// The slot a user insists on.
fn fixed(table: &[GidEntry], index: u32) -> Result<Choice, NoGid> {
    let entry = table.iter().find(|entry| entry.index == index);
    let Some(entry) = entry.filter(|entry| entry.is_configured()) else {
        let why = format!("NCCL_IB_GID_INDEX {index} is an empty slot");
        return Err(refuse(why, table));
    };
    let warning = match &entry.netdev {
        NetDev::Elsewhere(name) => Some(format!(
            "interface {name} is not in this network namespace; connections from it will fail"
        )),
        _ => None,
    };
    Ok(Choice { entry: entry.clone(), reason: "NCCL_IB_GID_INDEX names it".to_owned(), warning })
}

/// The preference of a usable slot; larger is better.
fn rank(entry: &GidEntry, wanted: &Wanted) -> (u8, bool, bool, Reverse<u32>) {
    let version = match entry.version {
        Some(version) if version == wanted.version => 2,
        None => 1,
        Some(_) => 0,
    };
    let family = Family::of(entry.address()) == wanted.family;
    (version, !entry.is_link_local(), family, Reverse(entry.index))
}

/// Puts a choice into words, wishes first that could not be met.
fn explain(entry: &GidEntry, wanted: &Wanted) -> Choice {
    let mut missed = Vec::new();
    let mut warning = None;
    if Family::of(entry.address()) != wanted.family {
        missed.push(format!("no better entry is {}", wanted.family));
    }
    if entry.is_link_local() {
        missed.push("every better entry is link-local".to_owned());
        warning =
            Some("its address is link-local, which peers behind a router cannot reach".into());
    }
    match entry.version {
        Some(version) if version != wanted.version => {
            missed.push(format!("no entry is RoCE v{}", wanted.version));
            warning = Some(format!(
                "it is RoCE v{version}; a peer that uses v{} cannot talk to it",
                wanted.version
            ));
        }
        None => missed.push("its RoCE version is unknown".to_owned()),
        Some(_) => {}
    }
    let reason = if missed.is_empty() {
        format!("first {} entry of RoCE v{}", wanted.family, wanted.version)
    } else {
        format!("best of the table: {}", missed.join(", "))
    };
    Choice { entry: entry.clone(), reason, warning }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::IpAddr;

    fn entry(index: u32, address: &str, version: u8) -> GidEntry {
        let gid = match address.parse().unwrap() {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        let version = (version != 0).then_some(version);
        GidEntry { index, gid, version, netdev: NetDev::Unknown }
    }

    fn table(rows: &[(&str, u8)]) -> Vec<GidEntry> {
        (0..).zip(rows).map(|(index, (address, version))| entry(index, address, *version)).collect()
    }

    fn wanted() -> Wanted {
        Wanted::for_device(&Settings::default(), "mlx5_0")
    }

    fn chosen(rows: &[(&str, u8)], wanted: &Wanted) -> u32 {
        choose_roce(&table(rows), wanted).unwrap().entry.index
    }

    /// What an adapter with one IPv4 and one IPv6 address shows.
    const USUAL: [(&str, u8); 6] = [
        ("fe80::1", 1),
        ("fe80::1", 2),
        ("10.0.0.1", 1),
        ("10.0.0.1", 2),
        ("2001:db8::1", 1),
        ("2001:db8::1", 2),
    ];

    #[test]
    fn the_usual_table() {
        assert_eq!(chosen(&USUAL, &wanted()), 3);
        assert_eq!(chosen(&USUAL, &Wanted { family: Family::V6, ..wanted() }), 5);
        assert_eq!(chosen(&USUAL, &Wanted { version: 1, ..wanted() }), 2);
        assert_eq!(chosen(&[("10.0.0.1", 2), ("10.0.0.2", 2), ("10.0.0.3", 2)], &wanted()), 0);
        let choice = choose_roce(&table(&USUAL), &wanted()).unwrap();
        assert_eq!(
            (choice.reason.as_str(), choice.warning),
            ("first AF_INET entry of RoCE v2", None)
        );
    }

    #[test]
    fn sparse_tables_are_normal() {
        let rows = [("fe80::1", 1), ("::", 0), ("::", 0), ("fe80::", 2), ("10.0.0.1", 2)];
        assert_eq!(chosen(&rows, &wanted()), 4);
        assert_eq!(choose_roce(&[entry(9, "10.0.0.1", 2)], &wanted()).unwrap().entry.index, 9);
    }

    #[test]
    fn an_ipv6_only_fabric_falls_back_and_says_so() {
        let rows = [("fe80::1", 1), ("fe80::1", 2), ("fd00::1", 1), ("fd00::1", 2)];
        let choice = choose_roce(&table(&rows), &wanted()).unwrap();
        assert_eq!((choice.entry.index, choice.warning), (3, None));
        assert!(choice.reason.contains("no better entry is AF_INET"), "{}", choice.reason);
    }

    #[test]
    fn version_one_and_link_local_come_last_and_with_a_warning() {
        let old = choose_roce(&table(&[("fe80::1", 1), ("10.0.0.1", 1)]), &wanted()).unwrap();
        assert_eq!(old.entry.index, 1);
        assert!(old.warning.unwrap().contains("RoCE v1"));
        let local = choose_roce(&table(&[("fe80::1", 1), ("fe80::1", 2)]), &wanted()).unwrap();
        assert_eq!(local.entry.index, 1);
        assert!(local.warning.unwrap().contains("link-local"));
    }

    #[test]
    fn an_unknown_version_is_better_than_the_wrong_one() {
        assert_eq!(chosen(&[("10.0.0.1", 1), ("10.0.0.1", 0)], &wanted()), 1);
        assert_eq!(chosen(&[("10.0.0.1", 0), ("10.0.0.1", 2)], &wanted()), 1);
        assert_eq!(chosen(&[("fe80::1", 0), ("10.0.0.1", 0)], &wanted()), 1);
    }

    #[test]
    fn the_range_confines_the_choice() {
        let rows = [("10.0.0.1", 2), ("192.168.1.1", 2)];
        let range = |text| Wanted { range: AddrRange::parse(text), ..wanted() };
        assert_eq!(chosen(&rows, &range("192.168.0.0/16")), 1);
        let error = choose_roce(&table(&rows), &range("172.16.0.0/12")).unwrap_err().to_string();
        for part in ["172.16.0.0/12", "0 10.0.0.1 v2, 1 192.168.1.1 v2"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_fixed_index_is_taken_or_refused() {
        let fixed = |index| Wanted { index: Some(index), ..wanted() };
        assert_eq!(chosen(&USUAL, &fixed(0)), 0);
        for index in [6, 255] {
            let error = choose_roce(&table(&USUAL), &fixed(index)).unwrap_err();
            assert!(error.why.contains(&index.to_string()));
            assert_eq!(error.table.len(), USUAL.len());
        }
        let empty = table(&[("::", 0)]);
        assert!(choose_roce(&empty, &fixed(0)).unwrap_err().to_string().ends_with("nothing"));
    }

    #[test]
    fn interfaces_of_another_namespace_do_not_count() {
        let mut rows = table(&USUAL);
        for row in &mut rows {
            row.netdev = NetDev::Elsewhere("eth0".into());
        }
        let error = choose_roce(&rows, &wanted()).unwrap_err().to_string();
        assert!(error.contains("network namespace"), "{error}");
        rows[1].netdev = NetDev::Here("net1".into());
        assert_eq!(choose_roce(&rows, &wanted()).unwrap().entry.index, 1);
        let fixed = Wanted { index: Some(3), ..wanted() };
        assert!(choose_roce(&rows, &fixed).unwrap().warning.is_some());
    }

    #[test]
    fn infiniband_takes_the_first_or_the_routable_entry() {
        let mut rows = table(&[("fe80::1", 0), ("fe80::2", 0)]);
        assert_eq!(choose_infiniband(&rows, &wanted()).entry.index, 0);
        rows[1].gid[5] = 7;
        assert_eq!(choose_infiniband(&rows, &wanted()).entry.index, 1);
        let elsewhere = Wanted { flid_index: 9, index: Some(1), ..wanted() };
        assert_eq!(choose_infiniband(&rows, &elsewhere).entry.index, 0);
        assert_eq!(choose_infiniband(&[], &wanted()).entry.index, 0);
    }

    fn any_entry() -> impl Strategy<Value = GidEntry> {
        let gid = prop_oneof![
            Just([0u8; 16]),
            any::<[u8; 16]>(),
            any::<[u8; 4]>().prop_map(|a| std::net::Ipv4Addr::from(a).to_ipv6_mapped().octets()),
            any::<u64>().prop_map(|id| ((0xfe80u128 << 112) | u128::from(id)).to_be_bytes()),
        ];
        let netdev = prop_oneof![
            Just(NetDev::Unknown),
            Just(NetDev::Here("a".into())),
            Just(NetDev::Elsewhere("b".into())),
        ];
        (0u32..16, gid, proptest::option::of(0u8..4), netdev)
            .prop_map(|(index, gid, version, netdev)| GidEntry { index, gid, version, netdev })
    }

    proptest! {
        #[test]
        fn the_choice_is_the_best_usable_entry(
            table in proptest::collection::vec(any_entry(), 0..12),
            version in 1u8..3,
        ) {
            let wanted = Wanted { version, ..wanted() };
            let usable = |e: &&GidEntry| {
                e.is_configured() && !matches!(e.netdev, NetDev::Elsewhere(_))
            };
            match choose_roce(&table, &wanted) {
                Err(_) => prop_assert!(!table.iter().any(|e| usable(&e))),
                Ok(choice) => {
                    prop_assert!(usable(&&choice.entry));
                    let better = |e: &&GidEntry| rank(e, &wanted) > rank(&choice.entry, &wanted);
                    prop_assert!(!table.iter().filter(usable).any(|e| better(&e)));
                }
            }
            let _ = choose_infiniband(&table, &wanted);
        }
    }
}
