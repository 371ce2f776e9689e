//! The address of a local port, chosen anew for every connection, and the path from it to a peer's.

use super::device::Port;
use super::wire::WireRail;
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::host::gid::{self, Choice, GidEntry, NetDev, Wanted};
use crate::host::pkey;
use crate::host::sysfs::Sysfs;
use crate::verbs::qp::{GlobalRoute, Path};
use crate::verbs::sys::{LINK_LAYER_ETHERNET, LINK_LAYER_INFINIBAND, PORT_ACTIVE};
use crate::verbs::{Context, PortAttr};
use std::fmt;
use std::net::Ipv6Addr;
use std::sync::{Mutex, PoisonError};

/// Hops a packet may take: no limit in practice.
const HOP_LIMIT: u8 = 255;
/// How the GIDs begin that may carry a routable identifier.
const LINK_LOCAL_PREFIX: [u8; 4] = [0xfe, 0x80, 0, 0];

/// One local port as connections use it.
#[derive(Clone, Copy, Debug)]
pub struct PortAddress {
    /// Port number, from 1.
    pub port: u8,
    /// LID; 0 on RoCE.
    pub lid: u16,
    /// `IBV_LINK_LAYER_*`.
    pub link_layer: u8,
    /// Active MTU, `IBV_MTU_*`.
    pub mtu: u32,
    /// The GID that peers address.
    pub gid: [u8; 16],
    /// Its index.
    pub gid_index: u8,
    /// Whether the subnet demands a global header.
    pub global_required: bool,
    /// Partition key index.
    pub pkey_index: u16,
    /// Links behind the port; more than one where it is a bond.
    pub links: u8,
}

impl PortAddress {
    /// Whether connections from both carry the same source address.
    pub fn same_gid(&self, other: &Self) -> bool {
        (self.gid, self.gid_index) == (other.gid, other.gid_index)
    }

    /// This port for the peer, with the key of the memory that it writes; without what only its device knows.
    pub fn wire(&self, rkey: u32) -> WireRail {
        WireRail {
            lid: self.lid,
            link_layer: self.link_layer,
            mtu: self.mtu as u8,
            port: 0,
            speed: 0,
            gid: self.gid,
            rkey,
        }
    }

    /// The path to another port, given as the peer described it.
    ///
    /// # Errors
    /// The two ports cannot talk: different link layers.
    pub fn path(
        &self,
        remote: &WireRail,
        dest_qp: u32,
        rq_psn: u32,
        traffic_class: u8,
        sl: u8,
    ) -> Result<Path> {
        if remote.link_layer != self.link_layer {
            return Err(Error::remote(format!(
                "link layers differ: {} here, {} at the peer",
                layer_name(self.link_layer),
                layer_name(remote.link_layer)
            )));
        }
        let mtu = self.mtu.min(remote.mtu.into());
        if !(1..=5).contains(&mtu) {
            return Err(Error::remote(format!("the peer states an MTU code of {}", remote.mtu)));
        }
        let ethernet = self.link_layer == LINK_LAYER_ETHERNET;
        let other_subnet = subnet(&remote.gid) != subnet(&self.gid);
        let flid = u16::from_be_bytes([remote.gid[4], remote.gid[5]]);
        let dlid = if ethernet {
            // Some adapters state one all the same, and it means nothing.
            0
        } else if other_subnet && flid != 0 {
            // Routers deliver to the port that has this identifier.
            flid
        } else {
            remote.lid
        };
        let global = (ethernet || self.global_required || other_subnet).then_some(GlobalRoute {
            dgid: remote.gid,
            sgid_index: self.gid_index,
            hop_limit: HOP_LIMIT,
            traffic_class,
        });
        Ok(Path { mtu, dest_qp, rq_psn, port: self.port, dlid, global, sl })
    }

    /// The path from this port to itself.
    ///
    /// # Errors
    /// None in practice; see [`Self::path`].
    pub fn loopback(&self, qp: u32) -> Result<Path> {
        self.path(&self.wire(0), qp, 0, 0, 0)
    }
}

impl fmt::Display for PortAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entry = GidEntry {
            index: self.gid_index.into(),
            gid: self.gid,
            version: None,
            netdev: NetDev::Unknown,
        };
        entry.fmt(f)
    }
}

/// The addresses that the ports of a device were last used under.
#[derive(Debug, Default)]
pub struct KnownAddresses(Mutex<Vec<PortAddress>>);

impl KnownAddresses {
    /// Notes an address, and says which one its port had before.
    pub fn replace(&self, address: PortAddress) -> Option<PortAddress> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = known.iter_mut().find(|a| a.port == address.port) {
            return Some(std::mem::replace(before, address));
        }
        known.push(address);
        None
    }

    /// What became of the GID that a port is used under, in words for a line in the log.
    pub fn news(&self, context: &Context, port: u8) -> String {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(used) = known.iter().find(|a| a.port == port).copied() else {
            return "no connection uses the port".to_owned();
        };
        drop(known);
        let now = context.query_gid(port, used.gid_index.into()).unwrap_or_default();
        if now == used.gid {
            return format!("GID {used}, which connections use, is as it was");
        }
        let now = PortAddress { gid: now, ..used };
        format!(
            "GID {used}, which connections use, is {now} now: they go on under the old address as long as the network \
             delivers to it, new ones take what the table holds then"
        )
    }
}

/// The address that a port has now, and why it is that one.
///
/// # Errors
/// The port is not active, has no usable GID or lacks the partition key, or a verb fails.
pub fn resolve(
    context: &Context,
    port: &Port,
    settings: &Settings,
) -> Result<(PortAddress, Choice)> {
    let attr = context.query_port(port.number)?;
    if attr.state != PORT_ACTIVE {
        return Err(Error::system(format!(
            "{} is not active (port state {})",
            port.label, attr.state
        )));
    }
    let choice = choose_gid(context, port, &attr, settings)?;
    let gid_index = u8::try_from(choice.entry.index).map_err(|_| {
        Error::usage(format!(
            "{}: GID index {} does not fit an address",
            port.label, choice.entry.index
        ))
    })?;
    let address = PortAddress {
        port: port.number,
        lid: attr.lid,
        link_layer: link_layer(&attr),
        mtu: attr.active_mtu,
        gid: choice.entry.gid,
        gid_index,
        global_required: attr.flags & 1 != 0,
        pkey_index: pkey_index(context, port, &attr, settings)?,
        links: match &choice.entry.netdev {
            NetDev::Here(name) => Sysfs::from_settings(settings).links(name),
            NetDev::Elsewhere(_) | NetDev::Unknown => 1,
        },
    };
    Ok((address, choice))
}

/// Where a queue pair is, for messages: by GID on RoCE, by LID and the GID if there is one on InfiniBand.
pub(super) fn place(rail: &WireRail, qp: u32) -> String {
    let gid = Ipv6Addr::from(rail.gid);
    let gid = gid.to_ipv4_mapped().map_or_else(|| gid.to_string(), |ip| ip.to_string());
    match (rail.link_layer == LINK_LAYER_ETHERNET, rail.gid == [0; 16]) {
        (true, _) => format!("QP {qp} at GID {gid}"),
        (false, true) => format!("QP {qp} at LID {}", rail.lid),
        (false, false) => format!("QP {qp} at LID {}, GID {gid}", rail.lid),
    }
}

/// The link layer, with "unspecified" told as InfiniBand, which it means.
fn link_layer(attr: &PortAttr) -> u8 {
    if attr.link_layer == LINK_LAYER_ETHERNET { LINK_LAYER_ETHERNET } else { LINK_LAYER_INFINIBAND }
}

fn layer_name(layer: u8) -> &'static str {
    if layer == LINK_LAYER_ETHERNET { "Ethernet (RoCE)" } else { "InfiniBand" }
}

fn choose_gid(
    context: &Context,
    port: &Port,
    attr: &PortAttr,
    settings: &Settings,
) -> Result<Choice> {
    let sysfs = Sysfs::from_settings(settings);
    let wanted = Wanted::for_device(settings, &port.device);
    // Some devices answer unused slots with an error instead of zeroes; both mean that nothing is there.
    let table: Vec<_> = (0..attr.gid_tbl_len)
        .filter_map(|index| {
            let gid = context.query_gid(port.number, index).ok()?;
            Some(sysfs.gid_entry(&port.device, port.number, index.unsigned_abs(), gid))
        })
        .collect();
    if attr.link_layer == LINK_LAYER_ETHERNET {
        gid::choose_roce(&table, &wanted).map_err(|e| Error::usage(format!("{}: {e}", port.label)))
    } else {
        Ok(gid::choose_infiniband(&table, &wanted))
    }
}

fn pkey_index(context: &Context, port: &Port, attr: &PortAttr, settings: &Settings) -> Result<u16> {
    let table: Vec<_> = (0..attr.pkey_tbl_len)
        .filter_map(|index| Some((index, context.query_pkey(port.number, index).ok()?)))
        .collect();
    pkey::choose(&table, settings).map_err(|e| Error::usage(format!("{}: {e}", port.label)))
}

/// The subnet of an InfiniBand GID: its prefix, but for the routable identifier (FLID), which belongs to one port.
fn subnet(gid: &[u8; 16]) -> [u8; 8] {
    let mut prefix = [0; 8];
    prefix.copy_from_slice(&gid[..8]);
    if prefix[..4] == LINK_LOCAL_PREFIX {
        prefix[4..6].fill(0);
    }
    prefix
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::qp::GlobalRoute;

    fn port(lid: u16, link_layer: u8, gid: &str) -> PortAddress {
        PortAddress {
            port: 2,
            lid,
            link_layer,
            mtu: 5,
            gid: gid.parse::<Ipv6Addr>().unwrap().octets(),
            gid_index: 3,
            global_required: false,
            pkey_index: 0,
            links: 1,
        }
    }

    fn way(from: &PortAddress, to: &PortAddress) -> (u16, Option<GlobalRoute>) {
        let path = from.path(&to.wire(0), 7, 0, 106, 0).unwrap();
        (path.dlid, path.global)
    }

    #[test]
    fn infiniband_goes_by_lid_within_a_subnet_and_by_routable_identifier_beyond() {
        let ib = LINK_LAYER_INFINIBAND;
        // (own GID, the peer's GID, LID, whether with a global header)
        let rows = [
            ("fe80::1", "fe80::2", 9, false),
            // Identifiers of two ports of one subnet differ; their subnet is the same.
            ("fe80:0:11::1", "fe80:0:12::2", 9, false),
            ("fe80:0:11:1::1", "fe80:0:12:2::2", 0x12, true),
            // No identifier: the LID is what there is.
            ("fe80:0:0:1::1", "fe80:0:0:2::2", 9, true),
        ];
        for (own, peer, lid, global) in rows {
            let (dlid, route) = way(&port(5, ib, own), &port(9, ib, peer));
            assert_eq!((dlid, route.is_some()), (lid, global), "{own} to {peer}");
        }
        let demanding = PortAddress { global_required: true, ..port(5, ib, "fe80::1") };
        let (dlid, route) = way(&demanding, &port(9, ib, "fe80::2"));
        assert_eq!((dlid, route.unwrap().sgid_index), (9, 3));
    }

    #[test]
    fn roce_always_has_a_global_header_and_never_a_lid() {
        let ethernet = |lid, gid| port(lid, LINK_LAYER_ETHERNET, gid);
        let (dlid, route) = way(&ethernet(5, "::ffff:10.0.0.1"), &ethernet(9, "::ffff:10.0.0.2"));
        let route = route.unwrap();
        assert_eq!((dlid, route.hop_limit, route.traffic_class), (0, 255, 106));
        let other = way(&ethernet(0, "fe80:0:11:1::1"), &ethernet(0, "fe80:0:12:2::2"));
        assert_eq!(other.0, 0);
    }

    #[test]
    fn each_port_says_its_own_number_and_the_smaller_mtu_wins_for_this_connection_only() {
        // Stock takes the port number from the peer, and lowers the MTU of the device for good.
        let own = port(5, LINK_LAYER_ETHERNET, "::ffff:10.0.0.1");
        let peer = PortAddress { port: 1, mtu: 3, ..own };
        let path = own.path(&peer.wire(0), 7, 0, 0, 0).unwrap();
        assert_eq!((path.port, path.mtu), (2, 3));
        assert_eq!(own.path(&own.wire(0), 7, 0, 0, 0).unwrap().mtu, 5);
        let wrong = port(5, LINK_LAYER_INFINIBAND, "fe80::1");
        let error = own.path(&wrong.wire(0), 7, 0, 0, 0).unwrap_err().to_string();
        assert!(error.contains("link layers differ"), "{error}");
    }

    #[test]
    fn the_last_address_of_each_port_is_known() {
        let known = KnownAddresses::default();
        let first = port(5, LINK_LAYER_ETHERNET, "::ffff:10.0.0.1");
        let other_port = PortAddress { port: 1, ..first };
        assert!(known.replace(first).is_none() && known.replace(other_port).is_none());
        let second = port(5, LINK_LAYER_ETHERNET, "::ffff:10.0.0.9");
        let before = known.replace(second).unwrap();
        assert!(before.same_gid(&first) && !before.same_gid(&second));
        assert_eq!(before.to_string(), "3 10.0.0.1");
        assert!(known.replace(first).unwrap().same_gid(&second));
    }

    #[test]
    fn a_queue_pair_is_told_by_what_its_link_layer_routes_by() {
        let mut rail = WireRail {
            lid: 7,
            link_layer: LINK_LAYER_INFINIBAND,
            mtu: 5,
            port: 0,
            speed: 0,
            gid: [0; 16],
            rkey: 1,
        };
        assert_eq!(place(&rail, 5), "QP 5 at LID 7");
        rail.gid = Ipv6Addr::LOCALHOST.octets();
        assert_eq!(place(&rail, 5), "QP 5 at LID 7, GID ::1");
        rail.link_layer = LINK_LAYER_ETHERNET;
        rail.gid = std::net::Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().octets();
        assert_eq!(place(&rail, 5), "QP 5 at GID 10.0.0.1");
    }
}
