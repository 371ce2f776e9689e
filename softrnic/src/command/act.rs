//! What the command does to a process.

use std::path::Path;
use std::sync::Arc;

use super::{Failure, refused, usage};
use crate::abi::Gid;
use crate::device;
use crate::faults;
use crate::faults::parse::{self, Plan};
use crate::faults::table;
use crate::inject;
use crate::process::Process;
use crate::shm::peer::Peer;

/// A plan for a process with these devices.
fn read(file: &str, devices: &[String]) -> Result<Plan, Failure> {
    let text = if file == "-" {
        faults::read_all(std::io::stdin())
    } else {
        faults::read_file(Path::new(file))
    };
    let text = text.map_err(|error| Failure::Refused(format!("{file}: {error}")))?;
    Plan::parse(&text, devices).map_err(|why| Failure::Refused(format!("{file}, {why}")))
}

/// Shows how a plan was understood.
pub fn check(file: &str, devices: &[String]) -> Result<String, Failure> {
    let plan = read(file, devices)?;
    let seed = plan.seed.map(|seed| format!("seed={seed}\n"));
    let rules = plan.rules.iter().map(|rule| parse::show(rule, devices) + "\n");
    Ok(seed.into_iter().chain(rules).collect())
}

/// Replaces the rules of a process, or adds some.
pub fn plan(us: &Process, peer: &Arc<Peer>, file: &str, keep: bool) -> Result<String, Failure> {
    let plan = read(file, &device::names(peer.region.header()))?;
    if !table::put(us, &peer.region, &plan, keep) {
        return refused(format!("more than {} rules; leave some out", parse::MAX_RULES));
    }
    Ok(String::new())
}

/// Ends the plan of a process.
pub fn clear(us: &Process, peer: &Arc<Peer>) -> Result<String, Failure> {
    // No rules always have room.
    table::put(us, &peer.region, &Plan::default(), false);
    Ok(String::new())
}

fn number<T: TryFrom<u64>>(name: &str, text: &str) -> Result<T, Failure> {
    let value = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    match value.and_then(|value| T::try_from(value).ok()) {
        Some(value) => Ok(value),
        None => usage(format!("{name} {text} is no number that it could have")),
    }
}

fn find(peer: &Peer, name: &str) -> Result<usize, Failure> {
    let names = device::names(peer.region.header());
    match names.iter().position(|n| n == name) {
        Some(index) => Ok(index),
        None => refused(format!("no device {name}; the process has {}", names.join(", "))),
    }
}

/// The answer to an errno of [`inject`].
fn done(result: Result<(), i32>, missing: impl FnOnce() -> String) -> Result<String, Failure> {
    match result {
        Ok(()) => Ok(String::new()),
        Err(_) => refused(missing()),
    }
}

/// Takes a port down or up.
pub fn port(peer: &Peer, name: &str, port: &str, up: bool) -> Result<String, Failure> {
    let device = find(peer, name)?;
    let result = inject::port(peer, device, number("port", port)?, up);
    done(result, || format!("{name} has no port {port}; softrnic ps shows its ports"))
}

/// Changes an entry of a GID table.
pub fn gid(
    peer: &Peer,
    name: &str,
    port: &str,
    index: &str,
    address: &str,
) -> Result<String, Failure> {
    let device = find(peer, name)?;
    let raw = match address.parse() {
        Ok(std::net::IpAddr::V4(v4)) => v4.to_ipv6_mapped().octets(),
        Ok(std::net::IpAddr::V6(v6)) => v6.octets(),
        Err(_) => return usage(format!("{address} is no address; write 10.0.0.9 or fe80::1")),
    };
    let (at, entry) = (number("port", port)?, number("index", index)?);
    let result = inject::gid(peer, device, at, entry, Gid { raw });
    done(result, || {
        format!("port {port} of {name} has no GID {index}; softrnic ps shows what there is")
    })
}

/// Breaks a queue pair.
pub fn kill_qp(us: &Process, peer: &Arc<Peer>, qpn: &str) -> Result<String, Failure> {
    let result = inject::kill_qp(us, peer, number("queue pair", qpn)?);
    done(result, || format!("no queue pair {qpn}; softrnic qps {} shows them", peer.pid))
}

/// Lets a device die.
pub fn device_fatal(us: &Process, peer: &Arc<Peer>, name: &str) -> Result<String, Failure> {
    let device = find(peer, name)?;
    done(inject::device_fatal(us, peer, device), || format!("no device {name}"))
}
