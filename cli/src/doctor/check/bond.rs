//! Bonded interfaces: whether the RDMA device spreads its traffic over them.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use crate::doctor::port::Port;
use std::path::Path;

const CHECK: &str = "bond";

/// Modes in which an adapter bonds its RDMA device too.
const MODES: [&str; 3] = ["active-backup", "balance-xor", "802.3ad"];

/// Looks at the interfaces of the ports that are used.
pub fn check(machine: &Machine, ports: &[Port]) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut seen: Vec<String> = Vec::new();
    for port in ports.iter().filter(|port| port.is_active() && port.is_selected()) {
        for interface in &port.netdevs {
            let Some(bond) = bond_of(machine, interface) else { continue };
            if !seen.contains(&bond) {
                found.extend(of_bond(machine, port, &bond));
                seen.push(bond);
            }
        }
    }
    found
}

/// The bond that an interface is, or is a part of.
fn bond_of(machine: &Machine, interface: &str) -> Option<String> {
    if machine.sysfs.netdev_text(interface, "bonding/mode").is_some() {
        return Some(interface.to_owned());
    }
    // Interfaces of a bridge have a master too.
    let master = machine.sys_link(&format!("class/net/{interface}/master"))?;
    let name = Path::new(&master).file_name()?.to_str()?.to_owned();
    machine.sysfs.netdev_text(&name, "bonding/mode").map(|_| name)
}

fn of_bond(machine: &Machine, port: &Port, bond: &str) -> Vec<Finding> {
    let text = |file: &str| machine.sysfs.netdev_text(bond, &format!("bonding/{file}"));
    let word = |text: Option<String>| {
        text.and_then(|text| text.split_whitespace().next().map(str::to_owned))
    };
    let mode = word(text("mode")).unwrap_or_default();
    let hash = word(text("xmit_hash_policy")).unwrap_or_else(|| "unknown".into());
    let slaves: Vec<String> =
        text("slaves").unwrap_or_default().split_whitespace().map(str::to_owned).collect();
    let down: Vec<&String> = slaves
        .iter()
        .filter(|slave| {
            machine.sysfs.netdev_text(slave, "operstate").is_some_and(|state| state != "up")
        })
        .collect();
    let queues = machine.settings.qps_per_connection;
    let evidence = format!(
        "{}: {bond} mode {mode}, hash {hash}, interfaces {}; NCCL_IB_QPS_PER_CONNECTION={queues}",
        port.label,
        slaves.join(", ")
    );
    let mut found = Vec::new();
    if !MODES.contains(&mode.as_str()) {
        found.push(Finding::problem(
            CHECK,
            format!("{bond} has a mode in which the adapter does not bond RDMA"),
            &evidence,
            format!(
                "use one of {}, or no bond and both ports as devices of their own",
                MODES.join(", ")
            ),
        ));
        return found;
    }
    for slave in down {
        found.push(Finding::problem(
            CHECK,
            format!("{slave}, a part of {bond}, is down: its share of the bandwidth is missing"),
            &evidence,
            "look at its cable and switch port",
        ));
    }
    if mode != "active-backup" && slaves.len() > 1 {
        if hash == "layer2" {
            found.push(Finding::problem(
                CHECK,
                format!("{bond} sends everything to one peer over one of its interfaces"),
                &evidence,
                format!("hash ports too: xmit_hash_policy layer3+4 for {bond}, and the same at the switch"),
            ));
        } else if (queues as usize) < slaves.len() {
            found.push(Finding::problem(
                CHECK,
                format!("a connection has fewer queue pairs than {bond} has interfaces, and each takes one way"),
                &evidence,
                format!(
                    "set NCCL_IB_QPS_PER_CONNECTION={} or more, and NCCL_IB_SPLIT_DATA_ON_QPS=1 where messages are large",
                    slaves.len()
                ),
            ));
        }
    }
    if found.is_empty() {
        let members = machine.names(&machine.sys("class/net")).len();
        let what = format!("{bond} spreads RDMA over its interfaces");
        found.push(Finding::fine(CHECK, what, format!("{evidence}; {members} interfaces here")));
    }
    found
}
