//! Which network interface carries the TCP side channel.
//!
//! The order is the stock transport's: `NCCL_SOCKET_IFNAME` if set, else `ib*`, else the subnet of
//! `NCCL_COMM_ID`, else anything but docker, lo and virbr, else those. Stock takes the first
//! address it meets; here an address that is only valid on its link is taken only when no other is
//! left, and then with its scope id, without which a peer's connect fails.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};

use super::gid::is_link_local;
use crate::config::{Family, IfnameFilter, Settings, same_prefix};

/// Interfaces that the automatic choice takes only when nothing else is there, in this order.
const LAST_RESORT: [&str; 3] = ["docker", "lo", "virbr"];

/// One address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// Its index, which is the scope id of its link-local addresses.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// Leading bits of its subnet.
    pub prefix: u8,
    /// The interface is up and has a carrier.
    pub running: bool,
}

impl Interface {
    fn link_local(&self) -> bool {
        is_link_local(self.address)
    }

    /// Only reachable from this host by a rule of its own: IPv6 loopback.
    fn ipv6_loopback(&self) -> bool {
        self.address.is_ipv6() && self.address.is_loopback()
    }

    /// The address to bind to, with any port.
    pub fn socket_address(&self) -> SocketAddr {
        match self.address {
            IpAddr::V6(address) if self.link_local() => {
                SocketAddr::V6(SocketAddrV6::new(address, 0, 0, self.index))
            }
            address => SocketAddr::new(address, 0),
        }
    }
}

/// The interface that was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SideChannel {
    /// Its name.
    pub name: String,
    /// The address to bind to, port 0.
    pub address: SocketAddr,
    /// Why, for the log.
    pub reason: &'static str,
}

/// No interface fits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}; present: {present}")]
pub struct NoInterface {
    /// What was asked for and not found.
    pub why: String,
    /// The interfaces there are, with their addresses.
    pub present: String,
}

/// What the settings ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The user's list.
    pub filter: IfnameFilter,
    /// The only family allowed.
    pub family: Option<Family>,
    /// An address whose subnet is preferred.
    pub root: Option<IpAddr>,
}

impl Wanted {
    /// The wishes of the settings.
    pub fn from_settings(settings: &Settings) -> Self {
        Self {
            filter: settings.socket_ifname.clone(),
            family: settings.socket_family,
            root: settings.comm_id.as_deref().and_then(literal_address),
        }
    }
}

/// The address in `address:port`, `[address%interface]:port` or `address`; a host name gives none.
pub fn literal_address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    if let Some(rest) = text.strip_prefix('[') {
        let (inside, _) = rest.split_once(']')?;
        let address = inside.split_once('%').map_or(inside, |(address, _)| address);
        return address.parse().ok();
    }
    let address = text.split_once(':').map_or(text, |(address, _)| address);
    address.parse::<Ipv4Addr>().ok().map(IpAddr::V4).or_else(|| text.parse().ok())
}

/// Chooses the interface of the side channel.
pub fn choose(interfaces: &[Interface], wanted: &Wanted) -> Result<SideChannel, NoInterface> {
    let of_family = |interface: &Interface| {
        wanted.family.is_none_or(|family| Family::of(interface.address) == family)
    };
    let usable: Vec<&Interface> = interfaces
        .iter()
        .filter(|interface| interface.running && of_family(interface) && !interface.ipv6_loopback())
        .collect();
    let found = if wanted.filter.is_automatic() {
        automatic(&usable, wanted.root)
    } else {
        let listed = |interface: &Interface| wanted.filter.matches(&interface.name);
        first(&usable, listed).map(|hit| (hit, "NCCL_SOCKET_IFNAME selects it"))
    };
    match found {
        Some((hit, reason)) => {
            Ok(SideChannel { name: hit.name.clone(), address: hit.socket_address(), reason })
        }
        None => {
            Err(NoInterface { why: complaint(interfaces, wanted), present: listing(interfaces) })
        }
    }
}

/// Whether an address means something only together with a link of this host.
pub fn needs_scope(address: SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local())
}

/// A peer's link-local address with the link of this host over which it is reached: the one that the side channel would
/// use if it had to use link-local addresses too. Other addresses stay as they are.
pub fn with_scope(
    address: SocketAddr,
    interfaces: &[Interface],
    wanted: &Wanted,
) -> Result<SocketAddr, NoInterface> {
    let SocketAddr::V6(mut v6) = address else { return Ok(address) };
    if !needs_scope(address) {
        return Ok(address);
    }
    let links: Vec<_> = interfaces
        .iter()
        .filter(|interface| interface.address.is_ipv6() && interface.link_local())
        .cloned()
        .collect();
    let wanted = Wanted { family: Some(Family::V6), ..wanted.clone() };
    if let SocketAddr::V6(own) = choose(&links, &wanted)?.address {
        v6.set_scope_id(own.scope_id());
    }
    Ok(v6.into())
}

/// The first interface that fits, one that is not link-local if there is one.
fn first<'a>(usable: &[&'a Interface], fits: impl Fn(&Interface) -> bool) -> Option<&'a Interface> {
    let fitting = || usable.iter().copied().filter(|interface| fits(interface));
    fitting().find(|interface| !interface.link_local()).or_else(|| fitting().next())
}

/// One step of the automatic choice: what it takes, and the reason it gives.
type Step<'a> = (&'a dyn Fn(&Interface) -> bool, &'static str);

/// The choice when the user names no interface.
fn automatic<'a>(
    usable: &[&'a Interface],
    root: Option<IpAddr>,
) -> Option<(&'a Interface, &'static str)> {
    let last_resort = |i: &Interface| LAST_RESORT.iter().any(|name| i.name.starts_with(name));
    let near_root = |i: &Interface| root.is_some_and(|r| same_prefix(i.address, r, i.prefix));
    // Global addresses first, over all the ordinary steps; only then the same steps without that
    // wish.
    for link_local in [false, true] {
        let steps: [Step<'_>; 3] = [
            (&|i| i.name.starts_with("ib"), "its name begins with ib"),
            (&near_root, "it is in the subnet of NCCL_COMM_ID"),
            (&|i| !last_resort(i), "it is the first ordinary interface"),
        ];
        for (fits, reason) in steps {
            let allowed = |i: &&&Interface| i.link_local() == link_local && fits(i);
            if let Some(hit) = usable.iter().find(allowed) {
                return Some((hit, reason));
            }
        }
    }
    LAST_RESORT.iter().find_map(|name| {
        first(usable, |i| i.name.starts_with(name)).map(|hit| (hit, "no other interface is usable"))
    })
}

/// Says what was asked for.
fn complaint(interfaces: &[Interface], wanted: &Wanted) -> String {
    let family = wanted.family.map_or_else(String::new, |family| format!(" of family {family}"));
    if wanted.filter.is_automatic() {
        return format!("no running interface has an address{family}");
    }
    let text = &wanted.filter.text;
    let idle = wanted.filter.unmatched(interfaces.iter().map(|i| i.name.as_str()));
    if idle.is_empty() || wanted.filter.exclude {
        format!("NCCL_SOCKET_IFNAME {text} leaves no running interface with an address{family}")
    } else {
        format!("NCCL_SOCKET_IFNAME {text}: there is no interface {}", idle.join(", "))
    }
}

/// The interfaces for an error message.
fn listing(interfaces: &[Interface]) -> String {
    let rows: Vec<_> = interfaces
        .iter()
        .map(|i| {
            format!("{} {}{}", i.name, i.address, if i.running { "" } else { " (not running)" })
        })
        .collect();
    if rows.is_empty() { "none".to_owned() } else { rows.join(", ") }
}

/// The interfaces of this process's network namespace, one entry per address, in the kernel's
/// order.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let found = if_addrs::get_if_addrs()?;
    Ok(found
        .into_iter()
        .map(|interface| Interface {
            index: interface.index.unwrap_or(0),
            address: interface.ip(),
            prefix: match &interface.addr {
                if_addrs::IfAddr::V4(address) => address.prefixlen,
                if_addrs::IfAddr::V6(address) => address.prefixlen,
            },
            running: interface.is_oper_up(),
            name: interface.name,
        })
        .collect())
}

/// The index of an interface in this process's network namespace.
pub fn index_of(name: &str) -> io::Result<u32> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};
    let any = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .or_else(|_| {
            socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        })?;
    Ok(netdevice::name_to_index(&any, name)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host(rows: &[(&str, &str)]) -> Vec<Interface> {
        (1..)
            .zip(rows)
            .map(|(index, (name, address))| {
                let (address, prefix) = address.split_once('/').unwrap();
                Interface {
                    name: (*name).to_owned(),
                    index,
                    address: address.parse().unwrap(),
                    prefix: prefix.parse().unwrap(),
                    running: true,
                }
            })
            .collect()
    }

    fn wanted(variables: &[(&str, &str)]) -> Wanted {
        let (settings, _) =
            Settings::parse(variables.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())));
        Wanted::from_settings(&settings)
    }

    fn chosen(rows: &[(&str, &str)], variables: &[(&str, &str)]) -> String {
        match choose(&host(rows), &wanted(variables)) {
            Ok(channel) => format!("{} {}", channel.name, channel.address),
            Err(error) => error.to_string(),
        }
    }

    const LO: (&str, &str) = ("lo", "127.0.0.1/8");
    const LO6: (&str, &str) = ("lo", "::1/128");
    const ETH: (&str, &str) = ("eth0", "10.0.0.1/24");
    const ETH6: (&str, &str) = ("eth0", "fe80::1/64");
    const ENS: (&str, &str) = ("ens1", "192.168.1.1/24");
    const IB: (&str, &str) = ("ib0", "172.16.0.1/16");
    const DOCKER: (&str, &str) = ("docker0", "172.17.0.1/16");

    #[test]
    fn the_automatic_order_is_stocks() {
        assert_eq!(chosen(&[LO, ETH, IB], &[]), "ib0 172.16.0.1:0");
        assert_eq!(chosen(&[LO, ETH, ENS], &[]), "eth0 10.0.0.1:0");
        let id = [("NCCL_COMM_ID", "192.168.1.77:5000")];
        assert_eq!(chosen(&[LO, ETH, ENS], &id), "ens1 192.168.1.1:0");
        assert_eq!(chosen(&[LO, ETH, IB, ENS], &id), "ib0 172.16.0.1:0");
        assert_eq!(chosen(&[LO, DOCKER], &[]), "docker0 172.17.0.1:0");
        assert_eq!(chosen(&[LO, LO6], &[]), "lo 127.0.0.1:0");
    }

    #[test]
    fn link_local_is_the_last_choice_and_carries_its_scope() {
        assert_eq!(chosen(&[ETH6, ENS], &[]), "ens1 192.168.1.1:0");
        assert_eq!(chosen(&[LO, ETH6], &[]), "eth0 [fe80::1%2]:0");
        let ib = ("ib0", "fe80::2/64");
        assert_eq!(chosen(&[ib, ETH], &[]), "eth0 10.0.0.1:0");
        assert_eq!(chosen(&[ib, ETH], &[("NCCL_SOCKET_IFNAME", "ib")]), "ib0 [fe80::2%1]:0");
        let two = [ETH6, ("eth0", "fd00::1/64")];
        assert_eq!(chosen(&two, &[("NCCL_SOCKET_IFNAME", "=eth0")]), "eth0 [fd00::1]:0");
    }

    #[test]
    fn filter_and_family_are_obeyed() {
        let rows = [LO, ETH, ("eth0", "fd00::1/64"), ENS];
        assert_eq!(chosen(&rows, &[("NCCL_SOCKET_IFNAME", "^eth,lo")]), "ens1 192.168.1.1:0");
        assert_eq!(chosen(&rows, &[("NCCL_SOCKET_FAMILY", "AF_INET6")]), "eth0 [fd00::1]:0");
        assert_eq!(chosen(&rows, &[("NCCL_SOCKET_IFNAME", "lo")]), "lo 127.0.0.1:0");
    }

    #[test]
    fn a_name_that_is_not_there_is_answered_with_those_that_are() {
        let error = chosen(&[LO, ETH], &[("NCCL_SOCKET_IFNAME", "bond0")]);
        for part in ["bond0", "there is no interface", "lo 127.0.0.1, eth0 10.0.0.1"] {
            assert!(error.contains(part), "{error}");
        }
        let both = [("NCCL_SOCKET_IFNAME", "eth0"), ("NCCL_SOCKET_FAMILY", "AF_INET6")];
        assert!(chosen(&[ETH], &both).contains("of family AF_INET6"));
        let excluded = chosen(&[LO, ETH], &[("NCCL_SOCKET_IFNAME", "^eth,lo,bond")]);
        assert!(excluded.contains("leaves no running interface"), "{excluded}");
        assert!(chosen(&[], &[]).ends_with("present: none"));
    }

    #[test]
    fn an_interface_that_is_down_does_not_count() {
        let mut rows = host(&[ETH, ENS]);
        rows[0].running = false;
        assert_eq!(choose(&rows, &wanted(&[])).unwrap().name, "ens1");
        rows[1].running = false;
        assert!(choose(&rows, &wanted(&[])).unwrap_err().to_string().contains("(not running)"));
    }

    #[test]
    fn addresses_of_the_root() {
        let literal = |text| literal_address(text).map(|address| address.to_string());
        assert_eq!(literal("10.0.0.1:99").as_deref(), Some("10.0.0.1"));
        assert_eq!(literal("10.0.0.1").as_deref(), Some("10.0.0.1"));
        assert_eq!(literal("[fe80::1%eth0]:99").as_deref(), Some("fe80::1"));
        assert_eq!(literal("fd00::1").as_deref(), Some("fd00::1"));
        for name in ["node1:99", "", "[", "[]:1", ":1"] {
            assert_eq!(literal(name), None, "{name}");
        }
    }

    #[test]
    fn this_machine_can_be_asked() {
        for interface in interfaces().unwrap() {
            assert_eq!(index_of(&interface.name).unwrap(), interface.index, "{interface:?}");
        }
        for name in ["", "no-such-if", "a-name-that-is-much-too-long", "a\0b"] {
            assert!(index_of(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_link_local_peer_is_reached_over_a_link_of_this_host() {
        let rows = host(&[LO, LO6, ETH, ("eth0", "fe80::a/64"), ("eth1", "fe80::b/64")]);
        let reach = |text: &str, variables: &[(&str, &str)]| {
            with_scope(text.parse().unwrap(), &rows, &wanted(variables)).map(|a| a.to_string())
        };
        // The scope in the handle is the listener's: 9 is no link of this host.
        assert_eq!(reach("[fe80::1%9]:5", &[]).unwrap(), "[fe80::1%4]:5");
        assert_eq!(
            reach("[fe80::1%9]:5", &[("NCCL_SOCKET_IFNAME", "eth1")]).unwrap(),
            "[fe80::1%5]:5"
        );
        assert_eq!(
            reach("[fe80::1%9]:5", &[("NCCL_SOCKET_FAMILY", "AF_INET")]).unwrap(),
            "[fe80::1%4]:5"
        );
        for other in ["10.0.0.2:5", "[fd00::1]:5"] {
            assert_eq!(reach(other, &[]).unwrap(), other);
        }
        let none = with_scope("[fe80::1]:5".parse().unwrap(), &host(&[LO, ETH]), &wanted(&[]));
        assert!(none.unwrap_err().to_string().contains("AF_INET6"));
    }

    proptest! {
        #[test]
        fn any_text_is_an_address_or_none(text in any::<String>()) {
            let _ = literal_address(&text);
        }

        #[test]
        fn the_choice_is_one_of_those_present(
            rows in proptest::collection::vec(
                ("(ib|eth|lo|docker)[0-2]", any::<IpAddr>(), 0u8..129),
                0..6,
            ),
            root in any::<IpAddr>(),
        ) {
            let rows: Vec<_> = rows
                .into_iter()
                .map(|(name, address, prefix)| Interface {
                    name, index: 1, address, prefix, running: true,
                })
                .collect();
            let wanted = Wanted { root: Some(root), ..wanted(&[]) };
            match choose(&rows, &wanted) {
                Ok(hit) => {
                    let same = |r: &Interface| {
                        r.name == hit.name && r.address == hit.address.ip()
                    };
                    prop_assert!(rows.iter().any(same));
                }
                Err(_) => prop_assert!(rows.iter().all(Interface::ipv6_loopback)),
            }
        }
    }
}
