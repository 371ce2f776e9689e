//! One slot of a port's GID table.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use crate::config::same_prefix;

/// Leading bits of an IPv6 subnet.
const IPV6_SUBNET_BITS: u8 = 64;

/// The network interface behind a GID.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum NetDev {
    /// Nothing is known, as on software devices and InfiniBand.
    Unknown,
    /// It exists in the network namespace of this process.
    Here(String),
    /// It belongs to another network namespace: connections from this GID fail.
    Elsewhere(String),
}

/// One slot of a GID table.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GidEntry {
    /// Index in the table.
    pub index: u32,
    /// The GID, as on the wire.
    pub gid: [u8; 16],
    /// RoCE version, where known.
    pub version: Option<u8>,
    /// The interface it belongs to.
    pub netdev: NetDev,
}

impl GidEntry {
    /// The GID as an IP address; IPv4-mapped ones as IPv4.
    pub fn address(&self) -> IpAddr {
        let address = Ipv6Addr::from(self.gid);
        address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
    }

    /// The slot holds an address: neither zero nor a link-local prefix without an interface id.
    pub fn is_configured(&self) -> bool {
        let bits = u128::from_be_bytes(self.gid);
        bits != 0 && bits != 0xfe80 << 112
    }

    /// The address is only valid on its link.
    pub fn is_link_local(&self) -> bool {
        is_link_local(self.address())
    }

    /// The routable identifier in an InfiniBand GID; 0 if there is none.
    pub fn flid(&self) -> u16 {
        u16::from_be_bytes([self.gid[4], self.gid[5]])
    }
}

impl fmt::Display for GidEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.index, self.address())?;
        if let Some(version) = self.version {
            write!(f, " v{version}")?;
        }
        match &self.netdev {
            NetDev::Unknown => Ok(()),
            NetDev::Here(name) => write!(f, " {name}"),
            NetDev::Elsewhere(name) => write!(f, " {name} (not in this network namespace)"),
        }
    }
}

/// Whether an address is only valid on its link.
pub(in crate::host) fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Whether two GIDs lie in one subnet: the given number of bits for IPv4, 64 for IPv6.
pub fn same_subnet(a: IpAddr, b: IpAddr, ipv4_bits: u8) -> bool {
    let bits = if a.is_ipv4() { ipv4_bits } else { IPV6_SUBNET_BITS };
    same_prefix(a, b, bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(address: &str) -> GidEntry {
        let gid = match address.parse().unwrap() {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        GidEntry { index: 3, gid, version: Some(2), netdev: NetDev::Elsewhere("eth0".into()) }
    }

    #[test]
    fn scopes() {
        // (address, configured, link-local)
        let rows = [
            ("::", false, false),
            ("fe80::", false, true),
            ("fe80::1", true, true),
            ("169.254.1.1", true, true),
            ("10.0.0.1", true, false),
            ("fd00::1", true, false),
        ];
        for (address, configured, link_local) in rows {
            let entry = entry(address);
            let facts = (entry.is_configured(), entry.is_link_local());
            assert_eq!(facts, (configured, link_local), "{address}");
        }
    }

    #[test]
    fn a_slot_is_shown_with_all_that_is_known() {
        let shown = entry("10.0.0.1").to_string();
        assert_eq!(shown, "3 10.0.0.1 v2 eth0 (not in this network namespace)");
    }

    #[test]
    fn the_routable_identifier_follows_the_fixed_prefix() {
        assert_eq!(entry("fe80:0:1234::1").flid(), 0x1234);
        assert_eq!(entry("fe80::1").flid(), 0);
    }

    #[test]
    fn subnets() {
        let same =
            |a: &str, b: &str, bits| same_subnet(a.parse().unwrap(), b.parse().unwrap(), bits);
        assert!(same("10.0.0.1", "10.0.0.200", 24) && !same("10.0.0.1", "10.0.1.1", 24));
        assert!(same("fd00::1", "fd00::2", 24) && !same("fd00::1", "fd00:0:0:1::1", 24));
        assert!(!same("10.0.0.1", "fd00::1", 0));
    }
}
