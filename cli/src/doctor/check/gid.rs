//! The GID that the plugin takes on each port.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use crate::doctor::port::Port;
use nccl_net_pinrail::host::gid::{Choice, NetDev};

const CHECK: &str = "gid";

/// Looks at the ports that are active and selected.
pub fn check(machine: &Machine, ports: &[Port]) -> Vec<Finding> {
    let mut found = Vec::new();
    let candidates: Vec<_> =
        ports.iter().filter(|port| port.is_active() && port.is_selected()).collect();
    for port in &candidates {
        found.push(match &port.gid {
            Err(error) => {
                let what = format!("{} is left out: {}", port.label, error.why);
                let held: Vec<_> = error.table.iter().map(ToString::to_string).collect();
                let held = if held.is_empty() { "nothing".to_owned() } else { held.join(", ") };
                Finding::problem(
                    CHECK,
                    what,
                    format!("its GID table holds {held}"),
                    none_remedy(machine, port),
                )
            }
            Ok(choice) if port.ethernet => of_choice(machine, port, choice),
            Ok(choice) => Finding::fine(
                CHECK,
                format!("{} uses GID {}", port.label, choice.entry),
                &choice.reason,
            ),
        });
    }
    let names = || ports.iter().map(|port| port.device.as_str());
    for name in machine.settings.gid_index.unmatched(names()) {
        found.push(Finding::problem(
            CHECK,
            format!("NCCL_IB_GID_INDEX names {name}, which is no device of this host"),
            format!("NCCL_IB_GID_INDEX={}", machine.settings.gid_index),
            "correct the name; it stands there in full",
        ));
    }
    found
}

/// How a port without a usable GID gets one.
fn none_remedy(machine: &Machine, port: &Port) -> String {
    let settings = &machine.settings;
    let elsewhere: Vec<&str> = port
        .gids
        .iter()
        .filter_map(|entry| match &entry.netdev {
            NetDev::Elsewhere(name) => Some(name.as_str()),
            _ => None,
        })
        .collect();
    let usable: Vec<_> = port.usable_gids().map(|entry| entry.index.to_string()).collect();
    if settings.gid_index.for_device(&port.device).is_some() {
        return if usable.is_empty() {
            "unset NCCL_IB_GID_INDEX and give the interface an address".to_owned()
        } else {
            format!(
                "unset NCCL_IB_GID_INDEX, which chooses on each port; indices in use here: {}",
                usable.join(", ")
            )
        };
    }
    if let Some(name) = elsewhere.first() {
        return format!(
            "bring the interface {name} into this network namespace (host networking, or a CNI plugin that moves it), \
             since RoCE takes its addresses from it"
        );
    }
    if let Some(range) = settings.addr_range {
        return format!("correct NCCL_IB_ADDR_RANGE ({range}), or unset it");
    }
    let interface = port.netdevs.first().map_or("of the port", String::as_str);
    format!("give the interface {interface} an address, and bring it up")
}

fn of_choice(machine: &Machine, port: &Port, choice: &Choice) -> Finding {
    let entry = &choice.entry;
    let fixed = machine.settings.gid_index.for_device(&port.device);
    let mut faults: Vec<String> = choice.warning.iter().cloned().collect();
    // Whoever names an index gets it, right or wrong.
    if fixed.is_some() && faults.is_empty() {
        let wanted = machine.settings.roce_version;
        if entry.version.is_some_and(|version| version != wanted) {
            let version = entry.version.unwrap_or(0);
            faults.push(format!("it is RoCE v{version}, and v{wanted} is wanted"));
        }
        if entry.is_link_local() {
            faults
                .push("its address is link-local, which peers behind a router cannot reach".into());
        }
    }
    let others: Vec<_> = port.usable_gids().map(ToString::to_string).collect();
    let evidence = format!("{}; usable: {}", choice.reason, others.join(", "));
    let what = format!("{} uses GID {entry}", port.label);
    if faults.is_empty() {
        return Finding::fine(CHECK, what, evidence);
    }
    let remedy = if fixed.is_some() {
        "unset NCCL_IB_GID_INDEX, which chooses the best entry on each port, or give an index for each device: \
         NCCL_IB_GID_INDEX=device:index,…"
            .to_owned()
    } else {
        format!(
            "give the interface {} a routable address, and use RoCE v2 at both ends",
            port.netdevs.first().map_or("of the port", String::as_str)
        )
    };
    Finding::problem(CHECK, format!("{what}, but {}", faults.join("; ")), evidence, remedy)
}
