//! Which device a connection uses where hosts are joined by several subnets: RoCE ports that are cabled to each other
//! without a switch between the pairs, or planes that do not meet.
//!
//! NCCL chooses a device without knowing who is behind it. So the listener puts the subnets of its ports into the
//! handle, and either end that was handed a device of which some port shares no subnet with the other end takes another
//! one. The connector decides first and says in its hello what it took; the listener decides by that.
//!
//! The rule is stock's: the given device if each of its ports shares a subnet with some port over there, else the first
//! device of which that is true, else the given one all the same. A fused device is never the first: its members come
//! before it. Beyond stock, the ports of a fused device are put in an order in which every lane joins two ports of one
//! subnet, and the handle names up to eight subnets, not two.

use super::Transport;
use super::device::Rail;
use super::wire::WireRail;
use crate::verbs::sys::LINK_LAYER_ETHERNET;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The part of a RoCE address that says where it can be reached: an IPv4 address, of which the settings say how much
/// counts, or the first half of an IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subnet {
    /// An IPv4 address.
    V4(u32),
    /// The first 64 bits of an IPv6 address.
    V6(u64),
}

impl Subnet {
    /// Of a GID; `None` for an empty one.
    pub fn of(gid: &[u8; 16]) -> Option<Self> {
        let address = Ipv6Addr::from(*gid);
        if address.is_unspecified() {
            return None;
        }
        let [high @ .., _, _, _, _, _, _, _, _] = *gid;
        Some(match address.to_ipv4_mapped() {
            Some(v4) => Self::V4(v4.to_bits()),
            None => Self::V6(u64::from_be_bytes(high)),
        })
    }

    /// Of a port as its end describes it; `None` where subnets mean nothing, as on InfiniBand.
    pub fn of_wire(rail: &WireRail) -> Option<Self> {
        (rail.link_layer == LINK_LAYER_ETHERNET).then(|| Self::of(&rail.gid)).flatten()
    }

    /// Whether it is an IPv4 address.
    pub fn is_ipv4(self) -> bool {
        matches!(self, Self::V4(_))
    }

    /// Its bytes in a handle, in network order.
    pub fn bytes(self) -> [u8; 8] {
        match self {
            Self::V4(address) => (u64::from(address) << 32).to_be_bytes(),
            Self::V6(prefix) => prefix.to_be_bytes(),
        }
    }

    /// Reads what [`Self::bytes`] wrote.
    pub fn from_bytes(ipv4: bool, bytes: [u8; 8]) -> Self {
        let [a, b, c, d, ..] = bytes;
        if ipv4 {
            Self::V4(u32::from_be_bytes([a, b, c, d]))
        } else {
            Self::V6(u64::from_be_bytes(bytes))
        }
    }

    /// Whether both lie in one subnet; of IPv4 addresses the first `bits` must agree.
    pub fn shares(self, other: Self, bits: u32) -> bool {
        match (self, other) {
            (Self::V4(a), Self::V4(b)) => (a ^ b).leading_zeros() >= bits,
            (Self::V6(a), Self::V6(b)) => a == b,
            _ => false,
        }
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V4(address) => write!(f, "{}", Ipv4Addr::from_bits(*address)),
            Self::V6(prefix) => {
                write!(f, "{}/64", Ipv6Addr::from_bits(u128::from(*prefix) << 64))
            }
        }
    }
}

/// Whether every port has a peer in its subnet.
fn reach(ports: &[Option<Subnet>], remote: &[Subnet], bits: u32) -> bool {
    let met =
        |port: &Option<Subnet>| port.is_some_and(|p| remote.iter().any(|r| p.shares(*r, bits)));
    !ports.is_empty() && ports.iter().all(met)
}

/// An order of `ports` in which every lane joins two ports of one subnet, if there is one: lane *i* joins port *i*
/// modulo the number of ports at either end.
fn aligned(ports: &[Option<Subnet>], remote: &[Subnet], bits: u32) -> Option<Vec<usize>> {
    let places = ports.len();
    let fits = |place: usize, port: usize| {
        let lanes = (place..places.max(remote.len())).step_by(places);
        ports[port].is_some_and(|p| {
            lanes.map(|lane| remote[lane % remote.len()]).all(|r| p.shares(r, bits))
        })
    };
    // Which place a port has; a place that wants a port which is taken moves its owner on, if that can go elsewhere.
    fn find(
        place: usize,
        fits: &dyn Fn(usize, usize) -> bool,
        tried: &mut [bool],
        owner: &mut [Option<usize>],
    ) -> bool {
        for port in 0..owner.len() {
            if tried[port] || !fits(place, port) {
                continue;
            }
            tried[port] = true;
            if owner[port].is_none_or(|other| find(other, fits, tried, owner)) {
                owner[port] = Some(place);
                return true;
            }
        }
        false
    }
    if remote.is_empty() {
        return None;
    }
    if (0..places).all(|place| fits(place, place)) {
        return Some((0..places).collect());
    }
    let mut owner = vec![None; places];
    for place in 0..places {
        if !find(place, &fits, &mut vec![false; places], &mut owner) {
            return None;
        }
    }
    let mut order = vec![0; places];
    for (port, place) in owner.iter().enumerate() {
        order[(*place)?] = port;
    }
    Some(order)
}

/// The subnets of rails; nothing for a port that has none.
fn of_rails(rails: &[Rail]) -> Vec<Option<Subnet>> {
    rails
        .iter()
        .map(|rail| rail.device.ethernet.then(|| Subnet::of(&rail.address.gid)).flatten())
        .collect()
}

/// The rails' names and subnets, for the log.
fn listing(rails: &[Rail]) -> String {
    let names: Vec<_> = rails
        .iter()
        .zip(of_rails(rails))
        .map(|(rail, subnet)| match subnet {
            Some(subnet) => format!("{} ({subnet})", rail.device.port.label),
            None => rail.device.port.label.clone(),
        })
        .collect();
    names.join("+")
}

impl Transport {
    /// The subnets of `rails` for a handle; none where devices are not chosen by subnet, or without RoCE.
    pub fn advertised_subnets(&self, rails: &[Rail]) -> Vec<Subnet> {
        if !self.settings.subnet_aware_routing {
            return Vec::new();
        }
        of_rails(rails).into_iter().collect::<Option<_>>().unwrap_or_default()
    }

    /// `rails`, or those of a device that reaches a peer with ports in the subnets `remote`, in an order in which lanes
    /// join ports of one subnet.
    pub fn rails_in_reach(&self, rails: Vec<Rail>, remote: &[Subnet]) -> Vec<Rail> {
        if !self.settings.subnet_aware_routing || remote.is_empty() {
            return rails;
        }
        let bits = self.settings.subnet_prefix_len;
        let theirs = || remote.iter().map(Subnet::to_string).collect::<Vec<_>>().join(", ");
        let given = of_rails(&rails);
        // Ports of one device have one link layer; subnets mean nothing on InfiniBand.
        if !rails.iter().all(|rail| rail.device.ethernet) {
            return rails;
        }
        if reach(&given, remote, bits) {
            return self.in_order(rails, &given, remote);
        }
        let plain = self.devices().all_ports().len();
        let other = (0..plain).find_map(|index| {
            let other = self.rails(i32::try_from(index).ok()?).ok()?;
            reach(&of_rails(&other), remote, bits).then_some(other)
        });
        match other {
            Some(other) => {
                tracing::info!(
                    "{} used instead of {}, which does not share a subnet of {bits} bits with the peer's {}",
                    listing(&other),
                    listing(&rails),
                    theirs(),
                );
                other
            }
            None => {
                tracing::info!(
                    "no device shares a subnet of {bits} bits with the peer's {}; {} it is all the same",
                    theirs(),
                    listing(&rails),
                );
                rails
            }
        }
    }

    /// Rails that reach the peer, in the order in which each lane stays in one subnet.
    fn in_order(&self, rails: Vec<Rail>, given: &[Option<Subnet>], remote: &[Subnet]) -> Vec<Rail> {
        match aligned(given, remote, self.settings.subnet_prefix_len) {
            Some(order) if order.iter().copied().eq(0..rails.len()) => rails,
            Some(order) => {
                let sorted: Vec<_> =
                    order.iter().filter_map(|port| rails.get(*port)).cloned().collect();
                tracing::info!("ports in the order of the peer's subnets: {}", listing(&sorted));
                sorted
            }
            None => rails,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn subnet(address: &str) -> Subnet {
        let gid = match address.parse().unwrap() {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(v6) => v6.octets(),
        };
        Subnet::of(&gid).unwrap()
    }

    fn ports(addresses: &[&str]) -> Vec<Option<Subnet>> {
        addresses.iter().map(|a| Some(subnet(a))).collect()
    }

    fn subnets(addresses: &[&str]) -> Vec<Subnet> {
        addresses.iter().map(|a| subnet(a)).collect()
    }

    #[test]
    fn the_prefix_decides_for_ipv4_and_half_the_address_for_ipv6() {
        let shares = |a, b, bits| subnet(a).shares(subnet(b), bits);
        assert!(shares("10.0.1.1", "10.0.1.200", 24));
        assert!(!shares("10.0.1.1", "10.0.2.1", 24));
        assert!(shares("10.0.1.1", "10.0.2.1", 16));
        assert!(!shares("10.0.1.1", "10.0.1.2", 32) && shares("10.0.1.1", "10.0.1.1", 32));
        assert!(shares("10.1.1.1", "127.1.1.1", 1) && !shares("10.1.1.1", "200.1.1.1", 1));
        assert!(shares("fd00:1::1", "fd00:1::ffff:ffff:0:9", 1));
        assert!(!shares("fd00:1::1", "fd00:2::1", 1));
        assert!(!shares("fd00:1::1", "10.0.0.1", 1));
        assert_eq!(Subnet::of(&[0; 16]), None);
    }

    #[test]
    fn every_port_must_meet_somebody() {
        let reach = |a: &[&str], b: &[&str]| reach(&ports(a), &subnets(b), 24);
        assert!(reach(&["10.0.1.1"], &["10.0.2.2", "10.0.1.2"]));
        assert!(!reach(&["10.0.1.1", "10.0.3.1"], &["10.0.2.2", "10.0.1.2"]));
        assert!(!reach(&[], &["10.0.1.1"]) && !reach(&["10.0.1.1"], &[]));
        assert!(!super::reach(&[None], &subnets(&["10.0.1.1"]), 24));
    }

    #[test]
    fn ports_are_put_in_the_peers_order() {
        let order = |a: &[&str], b: &[&str]| aligned(&ports(a), &subnets(b), 24);
        assert_eq!(order(&["10.0.1.1", "10.0.2.1"], &["10.0.1.2", "10.0.2.2"]), Some(vec![0, 1]));
        assert_eq!(order(&["10.0.1.1", "10.0.2.1"], &["10.0.2.2", "10.0.1.2"]), Some(vec![1, 0]));
        assert_eq!(order(&["10.0.1.1", "10.0.1.2"], &["10.0.1.9"]), Some(vec![0, 1]));
        // Two ports against four: each of the two takes every other lane.
        let four = ["10.0.2.1", "10.0.1.1", "10.0.2.2", "10.0.1.2"];
        assert_eq!(order(&["10.0.1.1", "10.0.2.1"], &four), Some(vec![1, 0]));
        let paired = ["10.0.1.1", "10.0.1.2", "10.0.2.1", "10.0.2.2"];
        assert_eq!(order(&["10.0.1.1", "10.0.2.1"], &paired), None);
        assert_eq!(order(&paired, &["10.0.2.9", "10.0.1.9"]).map(|o| o[0] / 2 + o[1] / 2), Some(1));
    }

    proptest! {
        #[test]
        fn an_order_is_found_where_there_is_one(
            remote in vec(0..3_u32, 1..=4), shuffle in Just((0..4_usize).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let remote: Vec<_> = remote.iter().map(|n| Subnet::V4(n << 8)).collect();
            let order: Vec<_> = shuffle.into_iter().filter(|i| *i < remote.len()).collect();
            let ports: Vec<_> = order.iter().map(|i| Some(remote[*i])).collect();
            let found = aligned(&ports, &remote, 24).expect("a shuffled list can be put in order");
            let mut sorted = found.clone();
            sorted.sort_unstable();
            prop_assert!(sorted.iter().copied().eq(0..remote.len()));
            for (place, port) in found.iter().enumerate() {
                prop_assert_eq!(ports[*port], Some(remote[place]));
            }
        }

        #[test]
        fn subnets_survive_the_handle(gid: [u8; 16]) {
            if let Some(subnet) = Subnet::of(&gid) {
                prop_assert_eq!(Subnet::from_bytes(subnet.is_ipv4(), subnet.bytes()), subnet);
            }
        }
    }
}
