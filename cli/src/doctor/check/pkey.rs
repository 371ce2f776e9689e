//! The partition key that the plugin takes on each port.

use crate::doctor::finding::Finding;
use crate::doctor::port::Port;
use nccl_net_pinrail::host::pkey::is_limited;

const CHECK: &str = "pkey";

/// Looks at the ports that are active and selected.
pub fn check(ports: &[Port]) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut good = Vec::new();
    for port in ports.iter().filter(|port| port.is_active() && port.is_selected()) {
        match &port.pkey {
            Err(error) => found.push(Finding::problem(
                CHECK,
                format!("{} is left out: there is no partition key for {}", port.label, error.wanted),
                format!("its table holds {}", error.held),
                "set NCCL_IB_PKEY to an index, or NCCL_IB_PKEY_VALUE to a key, that the table holds; what it holds the \
                 subnet manager decides",
            )),
            Ok(index) => {
                let key = port.pkeys.iter().find(|(known, _)| known == index).map(|(_, key)| *key);
                let shown = key.map_or_else(|| "no table".into(), |key| format!("{key:#06x}"));
                if key.is_some_and(is_limited) {
                    found.push(Finding::advice(
                        CHECK,
                        format!("{} is a limited member of its partition", port.label),
                        format!("index {index}: {shown}"),
                        "two limited members cannot talk: let the subnet manager give this host full membership",
                    ));
                } else {
                    good.push(format!("{} index {index} {shown}", port.label));
                }
            }
        }
    }
    if found.is_empty() && !good.is_empty() {
        found.push(Finding::fine(CHECK, "each port has its partition key", good.join(", ")));
    }
    found
}
