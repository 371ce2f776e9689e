//! `NCCL_IB_HCA`, read by the plugin's parser, against the ports that are there.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use crate::doctor::port::{Port, labels};

const CHECK: &str = "filter";

/// Says what the filter selects, and what it probably was not meant to.
pub fn check(machine: &Machine, ports: &[Port]) -> Vec<Finding> {
    let filter = &machine.settings.hca;
    let mut found = Vec::new();
    if ports.is_empty() {
        return found;
    }
    let present = || ports.iter().map(|port| (port.device.as_str(), port.number));
    for token in filter.unmatched(present()) {
        found.push(Finding::problem(
            CHECK,
            format!("NCCL_IB_HCA: `{token}` matches no port of this host"),
            format!("NCCL_IB_HCA={}; ports here: {}", filter.text, labels(ports)),
            "name devices as they are called here; a name without `=` in front of the list is a prefix",
        ));
    }
    if !filter.exact {
        for entry in &filter.entries {
            let more: Vec<_> = ports
                .iter()
                .filter(|port| port.device != entry.name && port.device.starts_with(&entry.name))
                .collect();
            // A prefix is meant as one unless it is a device's whole name.
            if ports.iter().any(|port| port.device == entry.name) && !more.is_empty() {
                let verb = if filter.exclude { "excludes" } else { "selects" };
                found.push(Finding::problem(
                    CHECK,
                    format!("NCCL_IB_HCA: `{}` also {verb} {}", entry.token, labels(more)),
                    format!(
                        "NCCL_IB_HCA={}; without `=` a name is a prefix, as in the stock transport",
                        filter.text
                    ),
                    format!(
                        "ask for exact names: NCCL_IB_HCA={}={}",
                        if filter.exclude { "^" } else { "" },
                        filter.text.trim_start_matches('^')
                    ),
                ));
            }
        }
    }
    let selected: Vec<_> = ports.iter().filter(|port| port.is_selected()).collect();
    if selected.is_empty() {
        found.push(Finding::problem(
            CHECK,
            "NCCL_IB_HCA leaves no port",
            format!("NCCL_IB_HCA={}; ports here: {}", filter.text, labels(ports)),
            "unset it, or name ports that are here",
        ));
    } else if found.is_empty() {
        let left: Vec<_> = ports.iter().filter(|port| !port.is_selected()).collect();
        found.push(Finding::fine(
            CHECK,
            format!("NCCL_IB_HCA selects {}", labels(selected)),
            format!(
                "{}; left out: {}",
                if filter.text.is_empty() { "not set".to_owned() } else { filter.text.clone() },
                labels(left)
            ),
        ));
    }
    found
}
