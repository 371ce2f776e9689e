//! `NCCL_IB_ADDR_FAMILY`, `NCCL_IB_ADDR_RANGE`, `NCCL_SOCKET_FAMILY`: which addresses are wanted.

use std::ffi::OsStr;
use std::fmt;
use std::net::IpAddr;

use super::value::{Form, Reading, Refused, Value, trimmed};

/// An address family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4; as a GID, an IPv4-mapped address.
    #[default]
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The words the variables accept.
    pub const WORDS: &'static [&'static str] = &["AF_INET", "AF_INET6"];

    /// The family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::V4 { "AF_INET" } else { "AF_INET6" })
    }
}

impl Value for Family {
    fn read(text: &OsStr, _: &Form) -> Result<Reading<Self>, Refused> {
        match trimmed(text)? {
            "AF_INET" => Ok(Reading::exact(Self::V4)),
            "AF_INET6" => Ok(Reading::exact(Self::V6)),
            _ => Err(Refused),
        }
    }
    fn show(&self, _: &Form) -> String {
        self.to_string()
    }
}

impl Value for Option<Family> {
    fn read(text: &OsStr, form: &Form) -> Result<Reading<Self>, Refused> {
        Family::read(text, form).map(|reading| Reading::exact(Some(reading.value)))
    }
    fn show(&self, _: &Form) -> String {
        self.map_or_else(String::new, |family| family.to_string())
    }
}

/// An address prefix in CIDR notation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AddrRange {
    /// An address of the range; bits behind the prefix do not count.
    pub address: IpAddr,
    /// Leading bits that must agree.
    pub prefix: u8,
}

impl AddrRange {
    /// Reads `address/bits`.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/')?;
        let address: IpAddr = address.trim().parse().ok()?;
        let prefix: u8 = prefix.trim().parse().ok()?;
        let limit = if address.is_ipv4() { 32 } else { 128 };
        (prefix <= limit).then_some(Self { address, prefix })
    }

    /// The family of the range.
    pub fn family(&self) -> Family {
        Family::of(self.address)
    }

    /// Whether an address lies in the range.
    pub fn contains(&self, address: IpAddr) -> bool {
        same_prefix(self.address, address, self.prefix)
    }
}

/// Whether two addresses of one family agree in their first `bits` bits.
pub fn same_prefix(a: IpAddr, b: IpAddr, bits: u8) -> bool {
    let (a, b, width) = match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits()), u128::from(b.to_bits()), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
        _ => return false,
    };
    let ignored = width - u32::from(bits).min(width);
    (a ^ b).checked_shr(ignored).unwrap_or(0) == 0
}

impl fmt::Display for AddrRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl Value for Option<AddrRange> {
    fn read(text: &OsStr, _: &Form) -> Result<Reading<Self>, Refused> {
        AddrRange::parse(trimmed(text)?).map(|range| Reading::exact(Some(range))).ok_or(Refused)
    }
    fn show(&self, _: &Form) -> String {
        self.map_or_else(String::new, |range| range.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_contain_their_prefix() {
        let contains = |range: &str, address: &str| {
            AddrRange::parse(range).unwrap().contains(address.parse().unwrap())
        };
        assert!(contains("192.168.3.9/24", "192.168.3.200"));
        assert!(!contains("192.168.3.9/24", "192.168.4.9"));
        assert!(contains("0.0.0.0/0", "8.8.8.8"));
        assert!(!contains("0.0.0.0/0", "::1"));
        assert!(contains("fd00:1::/33", "fd00:1:7fff::1"));
        assert!(!contains("fd00:1::/33", "fd00:1:8000::1"));
        assert!(contains("::/0", "ff::"));
        assert!(contains("10.0.0.1/32", "10.0.0.1"));
        assert!(!contains("10.0.0.1/32", "10.0.0.0"));
    }

    #[test]
    fn malformed_ranges_are_refused() {
        for bad in ["", "10.0.0.0", "10.0.0.0/33", "10.0.0.0/-1", "::/129", "x/8", "10.0.0/8", "/8"]
        {
            assert_eq!(AddrRange::parse(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn shown_ranges_read_back(address in any::<IpAddr>(), prefix in 0u8..=32) {
            let range = AddrRange { address, prefix };
            prop_assert_eq!(AddrRange::parse(&range.to_string()), Some(range));
            prop_assert!(range.contains(address));
        }

        #[test]
        fn any_text_is_read_or_refused(text in any::<String>()) {
            let _ = AddrRange::parse(&text);
        }
    }
}
