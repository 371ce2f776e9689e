//! The address of a local port, chosen anew for every connection, and the path from it to a peer's.

use super::device::Port;
use super::wire::WireRail;
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::host::gid::{self, Wanted};
use crate::host::sysfs::Sysfs;
use crate::verbs::qp::{GlobalRoute, Path};
use crate::verbs::sys::{LINK_LAYER_ETHERNET, LINK_LAYER_INFINIBAND};
use crate::verbs::{Context, PortAttr};
use std::net::Ipv6Addr;

/// Hops a packet may take: no limit in practice.
const HOP_LIMIT: u8 = 255;

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
}

impl PortAddress {
    /// Reads the port's state and picks a GID.
    ///
    /// # Errors
    /// The port is not active, has no usable GID, or a verb fails.
    pub fn of(context: &Context, port: &Port, settings: &Settings) -> Result<Self> {
        let attr = context.query_port(port.number)?;
        if attr.state != crate::verbs::sys::PORT_ACTIVE {
            return Err(Error::system(format!(
                "{} is not active (port state {})",
                port.label, attr.state
            )));
        }
        let link_layer = link_layer(&attr);
        let (gid, gid_index) = choose_gid(context, port, &attr, settings)?;
        Ok(Self {
            port: port.number,
            lid: attr.lid,
            link_layer,
            mtu: attr.active_mtu,
            gid,
            gid_index,
            global_required: attr.flags & 1 != 0,
            pkey_index: pkey_index(context, port, &attr, settings)?,
        })
    }

    /// This port for the peer, with the key of the memory that it writes.
    pub fn wire(&self, rkey: u32) -> WireRail {
        WireRail {
            lid: self.lid,
            link_layer: self.link_layer,
            mtu: self.mtu as u8,
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
        let other_subnet = remote.gid[..8] != self.gid[..8];
        let global = (ethernet || self.global_required || other_subnet).then_some(GlobalRoute {
            dgid: remote.gid,
            sgid_index: self.gid_index,
            hop_limit: HOP_LIMIT,
            traffic_class,
        });
        Ok(Path { mtu, dest_qp, rq_psn, port: self.port, dlid: remote.lid, global, sl })
    }

    /// The path from this port to itself.
    ///
    /// # Errors
    /// None in practice; see [`Self::path`].
    pub fn loopback(&self, qp: u32) -> Result<Path> {
        self.path(&self.wire(0), qp, 0, 0, 0)
    }
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
) -> Result<([u8; 16], u8)> {
    let sysfs = Sysfs::from_settings(settings);
    let wanted = Wanted::for_device(settings, &port.device);
    // Some devices answer unused slots with an error instead of zeroes; both mean that nothing is there.
    let table: Vec<_> = (0..attr.gid_tbl_len)
        .filter_map(|index| {
            let gid = context.query_gid(port.number, index).ok()?;
            Some(sysfs.gid_entry(&port.device, port.number, index.unsigned_abs(), gid))
        })
        .collect();
    let choice = if attr.link_layer == LINK_LAYER_ETHERNET {
        gid::choose_roce(&table, &wanted)
            .map_err(|e| Error::usage(format!("{}: {e}", port.label)))?
    } else {
        gid::choose_infiniband(&table, &wanted)
    };
    if let Some(warning) = &choice.warning {
        tracing::warn!("{}: {warning}", port.label);
    }
    let index = u8::try_from(choice.entry.index).map_err(|_| {
        Error::usage(format!(
            "{}: GID index {} does not fit an address",
            port.label, choice.entry.index
        ))
    })?;
    Ok((choice.entry.gid, index))
}

fn pkey_index(context: &Context, port: &Port, attr: &PortAttr, settings: &Settings) -> Result<u16> {
    let Some(wanted) = settings.pkey_value else {
        let index = settings.pkey_index;
        if attr.pkey_tbl_len != 0 && index >= attr.pkey_tbl_len {
            return Err(Error::usage(format!(
                "NCCL_IB_PKEY={index}, but {} has {} partition keys",
                port.label, attr.pkey_tbl_len
            )));
        }
        return Ok(index);
    };
    // The top bit is the membership type, not part of the partition's identity.
    (0..attr.pkey_tbl_len)
        .find(|i| context.query_pkey(port.number, *i).is_ok_and(|p| p & 0x7fff == wanted & 0x7fff))
        .ok_or_else(|| Error::usage(format!("{} has no partition key {wanted:#06x}", port.label)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_is_told_by_what_its_link_layer_routes_by() {
        let mut rail =
            WireRail { lid: 7, link_layer: LINK_LAYER_INFINIBAND, mtu: 5, gid: [0; 16], rkey: 1 };
        assert_eq!(place(&rail, 5), "QP 5 at LID 7");
        rail.gid = Ipv6Addr::LOCALHOST.octets();
        assert_eq!(place(&rail, 5), "QP 5 at LID 7, GID ::1");
        rail.link_layer = LINK_LAYER_ETHERNET;
        rail.gid = std::net::Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().octets();
        assert_eq!(place(&rail, 5), "QP 5 at GID 10.0.0.1");
    }
}
