//! Functions of an adapter that is used, left unused: half an adapter gives half its bandwidth.

use crate::doctor::finding::Finding;
use crate::doctor::port::{Port, labels};

const CHECK: &str = "sibling";

/// Looks at adapters with several ports that could be used.
pub fn check(ports: &[Port]) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut whole = 0;
    for port in ports.iter().filter(|port| port.is_usable()) {
        let Some(adapter) = &port.adapter else { continue };
        let used: Vec<_> = ports
            .iter()
            .filter(|other| other.is_used() && other.adapter.as_ref() == Some(adapter))
            .collect();
        if port.is_used() {
            whole += usize::from(used.len() > 1);
            continue;
        }
        if used.is_empty() {
            continue;
        }
        let place = |port: &Port| {
            port.pci_path.as_deref().and_then(|p| p.rsplit('/').next()).unwrap_or("?").to_owned()
        };
        let mut together: Vec<&str> = used.iter().map(|other| other.device.as_str()).collect();
        together.push(&port.device);
        together.sort_unstable();
        together.dedup();
        let of: Vec<_> =
            used.iter().map(|other| format!("{} ({})", other.label, place(other))).collect();
        found.push(Finding::problem(
            CHECK,
            format!("{} is a part of the same adapter as {} and is left unused", port.label, labels(used.iter().copied())),
            format!(
                "sys_image_guid {adapter}: {} ({}) {}, active; used: {}; {}",
                port.label,
                place(port),
                port.rate,
                of.join(", "),
                port.decision.reason
            ),
            format!(
                "use all of it: NCCL_IB_HCA=={} (NCCL fuses them with NCCL_IB_MERGE_NICS=1), or unset NCCL_IB_HCA",
                together.join(",")
            ),
        ));
    }
    if found.is_empty() && whole > 0 {
        let what = "adapters with several ports are used whole";
        found.push(Finding::fine(CHECK, what, format!("{whole} ports share an adapter")));
    }
    found
}
