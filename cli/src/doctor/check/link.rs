//! State, speed and MTU of the ports.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use crate::doctor::port::{Port, labels};

const DEVICES: &str = "devices";
const STATE: &str = "port";
const SPEED: &str = "speed";
const MTU: &str = "mtu";

/// Below this an MTU costs on links of today.
const FULL_MTU: u64 = 4096;
/// What an interface needs for it: the payload, the headers, and some room as administrators round it.
const NETDEV_MTU: u64 = 4200;

/// Looks at every port.
pub fn check(machine: &Machine, ports: &[Port]) -> Vec<Finding> {
    if ports.is_empty() {
        return none(machine);
    }
    let mut found = states(ports);
    found.extend(speeds(ports));
    found.extend(mtus(ports));
    found
}

/// Adapters on the PCI bus that could be RDMA devices: those of one vendor, which is known to make nothing else.
fn adapters(machine: &Machine) -> Vec<String> {
    let folder = "bus/pci/devices";
    let is_adapter = |name: &String| {
        let file = |file: &str| machine.sys_text(&format!("{folder}/{name}/{file}"));
        file("vendor").as_deref() == Some("0x15b3")
            && file("class").is_some_and(|class| class.starts_with("0x02"))
    };
    machine.names(&machine.sys(folder)).into_iter().filter(is_adapter).collect()
}

fn none(machine: &Machine) -> Vec<Finding> {
    let facts = machine.verbs.as_ref();
    let listed: Vec<&str> = facts
        .map(|facts| facts.devices.iter().map(|device| device.name.as_str()).collect())
        .unwrap_or_default();
    let offered = facts.and_then(|facts| facts.offered.as_ref()).map_or(0, Vec::len);
    let kernel = "/sys/class/infiniband is empty";
    if offered > 0 {
        let what =
            format!("the kernel has no RDMA device; the library has {offered} ports of its own");
        return vec![Finding::fine(DEVICES, what, kernel)];
    }
    if !listed.is_empty() {
        let what = format!(
            "the library lists {}, and pinrail offers none of its ports",
            listed.join(", ")
        );
        let reasons = facts.map(|facts| facts.left_out.join("; ")).unwrap_or_default();
        let (evidence, remedy) = if reasons.is_empty() {
            (
                format!("{kernel}; NCCL_IB_HCA={}", machine.settings.hca.text),
                "correct NCCL_IB_HCA, or unset it; with NCCL_DEBUG=INFO a job says why each port is left out",
            )
        } else {
            (format!("{kernel}; {reasons}"), "correct what the reason names")
        };
        return vec![Finding::problem(DEVICES, what, evidence, remedy)];
    }
    if !machine.sys("class").is_dir() {
        let evidence = format!("there is no folder {}", machine.sys("class").display());
        let what = "whether there are RDMA devices cannot be told";
        return vec![Finding::unknown(DEVICES, what, evidence, "mount sysfs, or capture it whole")];
    }
    let adapters = adapters(machine);
    let remedy = if adapters.is_empty() {
        "nothing, if this host has no RDMA adapter: NCCL uses TCP. In a virtual machine pass the adapter through"
    } else {
        "load the driver's RDMA module (mlx5_ib), and look into the kernel's log if it does not stay"
    };
    let found = if adapters.is_empty() { "none".to_owned() } else { adapters.join(", ") };
    let evidence = format!("{kernel}; NVIDIA network adapters on the PCI bus: {found}");
    vec![Finding::problem(DEVICES, "the kernel has no RDMA device", evidence, remedy)]
}

fn states(ports: &[Port]) -> Vec<Finding> {
    let any_active = ports.iter().any(Port::is_active);
    let mut found = Vec::new();
    for port in ports.iter().filter(|port| !port.is_active()) {
        let evidence = format!("state {}; {}", port.state_text(), port.rate);
        let linked = port.physical.as_deref() == Some("LinkUp");
        let (what, remedy) = if linked && !port.ethernet {
            (
                format!("{} has a link and no subnet manager brought it up", port.label),
                "start a subnet manager (opensm) in the fabric, or look at the one that runs",
            )
        } else if linked {
            (
                format!("{} has a link and is not active", port.label),
                "bring its network interface up: ip link set dev INTERFACE up",
            )
        } else {
            (
                format!("{} is not active", port.label),
                "connect it and bring it up at both ends, or leave it out of NCCL_IB_HCA",
            )
        };
        // A second port without a cable is usual; one that a list names is missed.
        let matters = port.is_asked_for() || !any_active || (linked && port.is_selected());
        found.push(if matters {
            Finding::problem(STATE, what, evidence, remedy)
        } else {
            Finding::advice(STATE, what, evidence, "nothing, if it is not meant to be used")
        });
    }
    let active: Vec<_> = ports.iter().filter(|port| port.is_active()).collect();
    if !active.is_empty() {
        let shown: Vec<_> = active.iter().map(|p| format!("{} {}", p.label, p.rate)).collect();
        let what = format!("active: {}", labels(active));
        found.push(Finding::fine(STATE, what, shown.join(", ")));
    }
    found
}

/// Ports that are used in turn should be alike: the slowest decides for all.
fn speeds(ports: &[Port]) -> Vec<Finding> {
    let used: Vec<_> = ports
        .iter()
        .filter(|port| port.is_used())
        .filter_map(|port| Some((port, port.speed?)))
        .collect();
    let Some(best) = used.iter().map(|(_, speed)| *speed).max() else { return Vec::new() };
    let fast = || used.iter().filter(|(_, speed)| *speed == best).map(|(port, _)| *port);
    used.iter()
        .filter(|(_, speed)| *speed < best)
        .map(|(port, speed)| {
            Finding::problem(
                SPEED,
                format!("{} is slower than other ports that are used", port.label),
                format!("{} ({speed} Mb/s); {} {best} Mb/s", port.rate, labels(fast())),
                format!(
                    "look at cable, switch port and negotiated width; or leave it out: NCCL_IB_HCA=^={}",
                    port.device
                ),
            )
        })
        .collect()
}

fn mtus(ports: &[Port]) -> Vec<Finding> {
    let used: Vec<_> = ports
        .iter()
        .filter(|port| port.is_used())
        .filter_map(|port| Some((port, port.mtu()?)))
        .collect();
    let Some(best) = used.iter().map(|(_, mtu)| *mtu).max() else { return Vec::new() };
    let interface = |port: &Port| {
        format!(
            "{} mtu {}",
            port.netdevs.first().map_or("?", String::as_str),
            port.netdev_mtu.unwrap_or(0)
        )
    };
    let mut found = Vec::new();
    for (port, mtu) in &used {
        let evidence =
            format!("{}: room for an RDMA MTU of {mtu} bytes, not {FULL_MTU}", interface(port));
        let remedy = format!(
            "raise the interface and every switch on the way: ip link set dev {} mtu {NETDEV_MTU} or more, the same on all \
             hosts",
            port.netdevs.first().map_or("INTERFACE", String::as_str)
        );
        if *mtu < best {
            let what = format!("{} has a smaller MTU than other ports that are used", port.label);
            let evidence = format!("{evidence}; others have {best}");
            found.push(Finding::problem(MTU, what, evidence, remedy));
        } else if *mtu < FULL_MTU {
            let what = format!("{} sends packets of at most {mtu} bytes", port.label);
            found.push(Finding::advice(MTU, what, evidence, remedy));
        }
    }
    if found.is_empty() {
        let shown: Vec<_> = used.iter().map(|(port, _)| interface(port)).collect();
        found.push(Finding::fine(MTU, format!("RDMA MTU {best} bytes"), shown.join(", ")));
    }
    found
}
