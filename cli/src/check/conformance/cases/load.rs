//! Rules of loading, devices and properties.

use super::super::Outcome;
use super::super::side::Side;
use super::broken;
use pinrail_client::failure::Result;
use pinrail_client::net::abi::NetAttr;
use pinrail_client::net::properties::{fields, most_members};
use pinrail_client::net::{Net, ONE_RECEIVE, Properties};

pub fn name(side: &mut Side) -> Result<Outcome> {
    let net = side.net()?;
    let first = net.name().to_owned();
    if first.is_empty() {
        return broken("load", "the table's name is empty");
    }
    let again = side.load()?;
    for seen in [net.current_name(), again.name().to_owned(), again.current_name()] {
        if seen != first {
            return broken("load", format!("the name was {first:?} and is {seen:?} after init"));
        }
    }
    again.close()?;
    Ok(Outcome::Pass)
}

pub fn devices(side: &mut Side) -> Result<Outcome> {
    let net = side.net()?;
    let first = net.device_count()?;
    if first <= 0 {
        return broken("devices", format!("{first} devices"));
    }
    for _ in 0..2 {
        let again = net.device_count()?;
        if again != first {
            return broken("devices", format!("{first} devices, then {again}"));
        }
    }
    Ok(Outcome::Pass)
}

/// Each device by its index.
fn each(net: &Net, mut look: impl FnMut(i32) -> Result<()>) -> Result<Outcome> {
    (0..net.device_count()?).try_for_each(&mut look)?;
    Ok(Outcome::Pass)
}

pub fn properties_written(side: &mut Side) -> Result<Outcome> {
    let net = side.net()?;
    each(net, |device| {
        // What reads as the filling both times was not written.
        let (one, other) = (net.property_bytes(device, 0xa5)?, net.property_bytes(device, 0x5b)?);
        let unwritten = |at: usize| one[at] == 0xa5 && other[at] == 0x5b;
        let missing: Vec<_> = fields(side.version())
            .into_iter()
            .filter(|field| (field.offset..field.offset + field.size).any(unwritten))
            .map(|field| field.name)
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        broken("getProperties", format!("device {device}: {} not written", missing.join(", ")))
    })
}

pub fn properties_stable(side: &mut Side) -> Result<Outcome> {
    let net = side.net()?;
    let count = net.device_count()?;
    let before = (0..count).map(|device| net.properties(device)).collect::<Result<Vec<_>>>()?;
    let more = side.load()?;
    for _ in 0..2 {
        for (device, before) in (0..count).zip(&before) {
            let after = net.properties(device)?;
            if after != *before {
                return broken(
                    "getProperties",
                    format!("device {device} was {before:?} and is {after:?}"),
                );
            }
        }
    }
    more.close()?;
    Ok(Outcome::Pass)
}

pub fn properties_range(side: &mut Side) -> Result<Outcome> {
    let net = side.net()?;
    let count = net.device_count()?;
    let all = (0..count).map(|device| net.properties(device)).collect::<Result<Vec<_>>>()?;
    for (index, device) in all.iter().enumerate() {
        if let Some(what) = out_of_range(device, side.version(), count) {
            return broken("getProperties", format!("device {index}: {what}"));
        }
        let twin = |other: &Properties| (&other.name, other.port) == (&device.name, device.port);
        if let Some(other) = all[..index].iter().position(twin) {
            return broken(
                "getProperties",
                format!("devices {other} and {index} are one by name and port"),
            );
        }
    }
    Ok(Outcome::Pass)
}

fn out_of_range(device: &Properties, version: u8, count: i32) -> Option<String> {
    let limit = 1 << 40;
    let bytes = |bytes: Option<u64>| bytes.is_none_or(|bytes| (1..=limit).contains(&bytes));
    let kind = (device.net_device_type.unwrap_or(0), device.net_device_version.unwrap_or(0));
    let most = ONE_RECEIVE as i32;
    let members = device.members.as_deref();
    let ids = [device.rail_id, device.plane_id];
    if device.name.as_deref().unwrap_or_default().is_empty() {
        Some("it has no name".into())
    } else if device.ptr_support & 1 == 0 {
        Some(format!("ptrSupport {:#x} lacks host memory", device.ptr_support))
    } else if device.ptr_support & !7 != 0 {
        Some(format!("ptrSupport {:#x} has bits that mean nothing", device.ptr_support))
    } else if device.speed <= 0 {
        Some(format!("speed {}", device.speed))
    } else if !device.latency.is_finite() || device.latency < 0.0 {
        Some(format!("latency {}", device.latency))
    } else if device.max_comms <= 0 {
        Some(format!("maxComms {}", device.max_comms))
    } else if !(1..=most).contains(&device.max_recvs) {
        Some(format!("maxRecvs {}; NCCL has 1 to {most} receives in one", device.max_recvs))
    } else if kind.0 != 0 && kind != (1, 7) {
        Some(format!("netDeviceType {} of version {}, which NCCL does not take", kind.0, kind.1))
    } else if !bytes(device.max_p2p_bytes) || !bytes(device.max_coll_bytes) {
        Some(format!(
            "maxP2pBytes {:?}, maxCollBytes {:?}",
            device.max_p2p_bytes, device.max_coll_bytes
        ))
    } else if members
        .is_some_and(|members| members.is_empty() || members.len() > most_members(version))
    {
        Some(format!("vProps has {} members", members.map_or(0, <[i32]>::len)))
    } else if members.is_some_and(|members| members.iter().any(|one| !(0..count).contains(one))) {
        Some(format!("vProps names devices {members:?} of {count}"))
    } else if ids.iter().flatten().any(|id| *id < -1) {
        Some(format!("railId {:?}, planeId {:?}", device.rail_id, device.plane_id))
    } else {
        None
    }
}

pub fn init_again(side: &mut Side) -> Result<Outcome> {
    let net = side.net()?;
    let count = net.device_count()?;
    let contexts = (1..=3).map(|id| net.init_again(id)).collect::<Result<Vec<_>>>()?;
    for index in [1, 0, 2] {
        if let Some(context) = contexts[index] {
            net.finalize(Some(context))?;
        }
        let now = net.device_count()?;
        if now != count {
            return broken(
                "devices",
                format!("{count} devices, and {now} after another communicator"),
            );
        }
    }
    let (listener, _) = side.listen()?;
    side.net()?.close_listener(listener)?;
    Ok(Outcome::Pass)
}

pub fn finalize_null(side: &mut Side) -> Result<Outcome> {
    if side.version() < 11 {
        return Ok(Outcome::NotApplicable("the table has no finalize before v11".into()));
    }
    side.net()?.finalize(None)?;
    Ok(Outcome::Pass)
}

pub fn net_attr(side: &mut Side) -> Result<Outcome> {
    // A collective before anything is known, then point-to-point: the values that NCCL gives.
    let attrs = [
        NetAttr { comms: [[4, 1, 16, 1]; 2], masks: [u32::MAX; 3] },
        NetAttr { comms: [[64, 1, 2, 1]; 2], masks: [0x3e0, 0, 0] },
        NetAttr { comms: [[1, 1, 1, 1]; 2], masks: [1 << 4, 1 << 1, 1 << 2] },
    ];
    for attr in attrs {
        if !side.net()?.set_net_attr(attr)? {
            return Ok(Outcome::NotApplicable("setNetAttr is NULL or not in the table".into()));
        }
    }
    Ok(Outcome::Pass)
}

pub fn reload(side: &mut Side) -> Result<Outcome> {
    side.close()?;
    for round in 1..=3 {
        side.step(&format!("dlopen, round {round}"))?;
        let net = side.load()?;
        net.properties(side.device())?;
        let (listener, _) = net.listen(side.device())?;
        net.close_listener(listener)?;
        side.step(&format!("finalize and dlclose, round {round}"))?;
        net.close()?;
    }
    Ok(Outcome::Pass)
}
