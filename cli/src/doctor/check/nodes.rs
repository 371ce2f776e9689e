//! Device nodes, which a container has to be given, against the devices that sysfs shows.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use rustix::fs::{Access, access};

/// The name of this check.
pub const CHECK: &str = "nodes";

/// Looks at the node of each device.
pub fn check(machine: &Machine) -> Vec<Finding> {
    let folder = machine.path("dev/infiniband");
    let present = machine.names(&folder);
    let mut found = Vec::new();
    let mut good = Vec::new();
    let pairs: Vec<(String, String)> = machine
        .names(&machine.sys("class/infiniband_verbs"))
        .into_iter()
        .filter_map(|node| {
            let file = format!("class/infiniband_verbs/{node}/ibdev");
            Some((machine.sys_text(&file)?, node))
        })
        .collect();
    let devices = machine.sysfs.devices();
    for device in &devices {
        let Some((_, node)) = pairs.iter().find(|(owner, _)| owner == device) else {
            found.push(Finding::problem(
                CHECK,
                format!("{device} has no node for programs"),
                format!(
                    "none of {} nodes in /sys/class/infiniband_verbs belongs to it",
                    pairs.len()
                ),
                "load the kernel module ib_uverbs",
            ));
            continue;
        };
        if !present.contains(node) {
            found.push(missing(machine, device, node, &present));
            continue;
        }
        // Of a captured tree only presence is known; what the library could open it says itself.
        let allowed = Access::READ_OK | Access::WRITE_OK;
        match machine.live.then(|| access(folder.join(node), allowed)) {
            Some(Err(errno)) => found.push(Finding::problem(
                CHECK,
                format!("this process may not use {device}"),
                format!("/dev/infiniband/{node}: {}", std::io::Error::from(errno)),
                "give its user read and write permission (usually a udev rule with MODE=0666)",
            )),
            _ => good.push(node.as_str()),
        }
    }
    if found.is_empty() && !devices.is_empty() {
        let what = "every device has its node";
        found.push(Finding::fine(CHECK, what, format!("/dev/infiniband: {}", good.join(", "))));
    }
    found
}

fn missing(machine: &Machine, device: &str, node: &str, present: &[String]) -> Finding {
    let held = if present.is_empty() { "nothing".to_owned() } else { present.join(", ") };
    let remedy = if machine.contained() {
        format!(
            "give the container the device: --device=/dev/infiniband/{node} (or all of /dev/infiniband), in Kubernetes \
             a resource of the RDMA device plugin"
        )
    } else {
        "load the kernel module ib_uverbs and let udev make the node".to_owned()
    };
    Finding::problem(
        CHECK,
        format!("{device} is in sysfs, and its device node /dev/infiniband/{node} is missing"),
        format!(
            "/dev/infiniband holds {held}{}",
            if machine.contained() { "; this is a container" } else { "" }
        ),
        remedy,
    )
}
