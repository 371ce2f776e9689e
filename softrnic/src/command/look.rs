//! What the command shows of a process.

use std::fmt::Write as _;
use std::net::Ipv6Addr;
use std::sync::atomic::Ordering;

use super::{Failure, refused};
use crate::abi::*;
use crate::device;
use crate::env::MAX_GIDS;
use crate::faults::parse;
use crate::faults::table;
use crate::inject;
use crate::mover;
use crate::process::Process;
use crate::shm::fabric::Record;
use crate::shm::layout::DEAD;
use crate::shm::peer::{Peer, Unreachable};
use crate::stats;

/// The other members of the fabric that run.
pub fn members(us: &Process) -> impl Iterator<Item = Record> {
    (1..=0xff_usize)
        .filter_map(|slot| us.fabric.record(slot))
        .filter(|record| record.id != us.id() && us.fabric.alive(record.id))
}

/// Processes, a line for each port. Writing into a string cannot fail, here and below.
pub fn processes(us: &Process) -> String {
    let mut text = String::from("PID/SLOT      DEVICE       PORT  STATE   LID    GIDS\n");
    for record in members(us) {
        let who = format!("{}/{}", record.pid, record.id & 0xff);
        let peer = match us.peer(record.id & 0xff) {
            Ok(peer) => peer,
            Err(Unreachable::Gone) => continue,
            Err(Unreachable::Refused(error)) => {
                let _ = writeln!(text, "{who:<13} cannot be reached: {error}");
                continue;
            }
        };
        let header = peer.region.header();
        for (index, name) in device::names(header).iter().enumerate() {
            let dead = header.dead[index].load(Ordering::Relaxed) == DEAD;
            for (number, port) in (1..).zip(&header.ports[index]) {
                if port.link.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let state = match port.state.load(Ordering::Relaxed) {
                    _ if dead => "dead",
                    PORT_ACTIVE => "active",
                    _ => "down",
                };
                let count = (port.gids.load(Ordering::Relaxed) as usize).min(MAX_GIDS);
                let gids: Vec<String> = port.gid[..count]
                    .iter()
                    .map(|words| {
                        let mut raw = [0; 16];
                        for (half, word) in raw.chunks_exact_mut(8).zip(words) {
                            half.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
                        }
                        Ipv6Addr::from(raw).to_string()
                    })
                    .collect();
                let lid = port.lid.load(Ordering::Relaxed);
                let gids = gids.join(" ");
                let _ =
                    writeln!(text, "{who:<13} {name:<12} {number:<5} {state:<7} {lid:<6} {gids}");
            }
        }
    }
    text
}

/// Queue pairs.
pub fn queue_pairs(peer: &Peer) -> String {
    let names = device::names(peer.region.header());
    let mut text = String::from("QPN       ORDINAL  STATE  DEVICE       PORT  TO\n");
    for (_, slot) in inject::qps(peer) {
        let at = slot.port.load(Ordering::Relaxed);
        // A queue pair gets its port on the way to INIT.
        let (device, port) = match at & 0xff {
            0 => ("-", "-".into()),
            port => (names.get((at >> 8) as usize).map_or("?", String::as_str), port.to_string()),
        };
        let state = match slot.state.load(Ordering::Relaxed) {
            QPS_RESET => "RESET",
            QPS_INIT => "INIT",
            QPS_RTR => "RTR",
            QPS_RTS => "RTS",
            QPS_SQD => "SQD",
            _ => "ERR",
        };
        let qpn = format!("{:#x}", slot.qpn.load(Ordering::Relaxed));
        let ordinal = slot.ordinal.load(Ordering::Relaxed);
        let to = slot.dest_qpn.load(Ordering::Relaxed);
        let _ = writeln!(text, "{qpn:<9} {ordinal:<8} {state:<6} {device:<12} {port:<5} {to:#x}");
    }
    text
}

/// Counters that are not zero.
pub fn counters(peer: &Peer) -> Result<String, Failure> {
    let header = peer.region.header();
    if header.stats_len.load(Ordering::Relaxed) as usize != stats::NAMES.len() {
        return refused("its library is of another version");
    }
    let mut bytes = vec![0; 8 * stats::NAMES.len()];
    mover::probe(peer.pid, header.stats.load(Ordering::Relaxed), &mut bytes)
        .map_err(|error| Failure::Refused(format!("its counters cannot be read: {error}")))?;
    let mut text = String::new();
    for (name, bytes) in stats::NAMES.iter().zip(bytes.chunks_exact(8)) {
        let value = u64::from_ne_bytes(std::array::from_fn(|i| bytes[i]));
        if value != 0 {
            let _ = writeln!(text, "{name:<18} {value}");
        }
    }
    Ok(text)
}

/// Fault rules with their counts.
pub fn rules(us: &Process, peer: &Peer) -> String {
    let names = device::names(peer.region.header());
    let mut text = String::new();
    for (index, counted) in table::list(us, &peer.region).iter().enumerate() {
        let rule = parse::show(&counted.rule, &names);
        let (matched, fired) = (counted.matched, counted.fired);
        let _ = writeln!(text, "rule {index}: matched {matched}, fired {fired}: {rule}");
    }
    if text.is_empty() {
        text.push_str("no rules\n");
    }
    text
}
