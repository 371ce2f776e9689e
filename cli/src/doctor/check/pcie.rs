//! The PCI bus between devices and GPUs: access control, IOMMU, relaxed ordering, and links that came up slow.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use crate::doctor::pci::Space;
use crate::doctor::port::Port;
use nccl_net_pinrail::config::RelaxedOrdering;
use nccl_net_pinrail::host::pci::PciAddress;

const ACS: &str = "acs";
const IOMMU: &str = "iommu";
const ORDERING: &str = "ordering";
const LINK: &str = "pcie";

/// Looks at the functions of the ports that are selected, and at GPUs.
pub fn check(machine: &Machine, ports: &[Port]) -> Vec<Finding> {
    let mut devices: Vec<(&str, Vec<String>)> = Vec::new();
    for port in ports.iter().filter(|port| port.is_selected()) {
        let Some(path) = &port.pci_path else { continue };
        if !devices.iter().any(|(device, _)| *device == port.device) {
            devices.push((&port.device, functions(path)));
        }
    }
    devices.retain(|(_, functions)| !functions.is_empty());
    if devices.is_empty() {
        return Vec::new();
    }
    let gpus: Vec<Vec<String>> = machine.gpus().iter().map(|gpu| ancestors(machine, gpu)).collect();
    let mut found = vec![access_control(machine, &devices, &gpus)];
    found.push(iommu(machine, &devices, &gpus));
    found.push(ordering(machine, &devices));
    found.extend(links(machine, &devices));
    found
}

/// The addresses on a path in the device tree, from the root to the function.
fn functions(path: &str) -> Vec<String> {
    let parts = path.split('/').filter(|part| PciAddress::parse(part).is_some());
    parts.map(str::to_owned).collect()
}

/// The same for a function whose address is known.
fn ancestors(machine: &Machine, address: &str) -> Vec<String> {
    let path = machine.sys(&format!("bus/pci/devices/{address}")).canonicalize();
    path.map_or_else(|_| Vec::new(), |path| functions(&path.to_string_lossy()))
}

fn space(machine: &Machine, address: &str) -> Option<Space> {
    machine.read(&machine.sys(&format!("bus/pci/devices/{address}/config"))).map(Space)
}

/// Bridges above devices and GPUs, each once.
fn bridges(devices: &[(&str, Vec<String>)], gpus: &[Vec<String>]) -> Vec<String> {
    let paths = devices.iter().map(|(_, path)| path).chain(gpus);
    let mut bridges: Vec<String> =
        paths.filter_map(|path| path.split_last()).flat_map(|(_, above)| above.to_vec()).collect();
    bridges.sort_unstable();
    bridges.dedup();
    bridges
}

fn access_control(
    machine: &Machine,
    devices: &[(&str, Vec<String>)],
    gpus: &[Vec<String>],
) -> Finding {
    let bridges = bridges(devices, gpus);
    let spaces: Vec<_> =
        bridges.iter().filter_map(|bridge| Some((bridge, space(machine, bridge)?))).collect();
    let redirecting: Vec<_> = spaces
        .iter()
        .filter(|(_, space)| space.redirects())
        .map(|(bridge, space)| {
            format!("{bridge} ACSCtl {:#06x}", space.access_control().unwrap_or(0))
        })
        .collect();
    let hidden = bridges.len() - spaces.iter().filter(|(_, space)| space.is_whole()).count();
    if !redirecting.is_empty() {
        let what = "PCI bridges send traffic between devices and GPUs up to the root (ACS)";
        let evidence = format!(
            "{} of {} bridges redirect: {}; GPUs: {}",
            redirecting.len(),
            bridges.len(),
            redirecting.join(", "),
            gpus.len()
        );
        return if gpus.is_empty() {
            Finding::advice(ACS, what, evidence, "nothing, as long as there is no GPU")
        } else {
            Finding::problem(
                ACS,
                what,
                evidence,
                "on bare metal turn ACS off, in the firmware or with setpci ECAP_ACS+6.w=0 for each bridge; in a virtual \
                 machine it must stay, and adapters need ATS",
            )
        };
    }
    if hidden > 0 {
        let what = "whether PCI bridges redirect traffic between devices (ACS) is hidden";
        let evidence = format!(
            "{hidden} of {} bridges show less than 256 bytes of their configuration",
            bridges.len()
        );
        return Finding::advice(
            ACS,
            what,
            evidence,
            "run this as root on the host to have it read",
        );
    }
    let what = "no PCI bridge redirects traffic between devices";
    Finding::fine(ACS, what, format!("{} bridges", bridges.len()))
}

fn iommu(machine: &Machine, devices: &[(&str, Vec<String>)], gpus: &[Vec<String>]) -> Finding {
    let kind = |path: &[String]| {
        let address = path.last()?;
        machine.sys_text(&format!("bus/pci/devices/{address}/iommu_group/type"))
    };
    let kinds: Vec<_> = devices
        .iter()
        .filter_map(|(device, path)| Some(((*device).to_owned(), kind(path)?)))
        .collect();
    let translated: Vec<_> = kinds
        .iter()
        .filter(|(_, kind)| kind.starts_with("DMA"))
        .map(|(device, kind)| format!("{device} {kind}"))
        .collect();
    if translated.is_empty() {
        let shown: Vec<_> = kinds.iter().map(|(device, kind)| format!("{device} {kind}")).collect();
        let shown = if shown.is_empty() { "no IOMMU group".to_owned() } else { shown.join(", ") };
        return Finding::fine(IOMMU, "no IOMMU translates addresses of devices", shown);
    }
    let what = "the IOMMU translates addresses of RDMA devices";
    let evidence = format!("{}; GPUs: {}", translated.join(", "), gpus.len());
    // Platforms of this architecture need it.
    if gpus.is_empty() || machine.architecture() == "aarch64" {
        let remedy = "nothing, unless bandwidth is low; iommu=pt on the kernel's command line lets addresses pass";
        return Finding::advice(IOMMU, what, evidence, remedy);
    }
    Finding::problem(
        IOMMU,
        what,
        evidence,
        "iommu=pt on the kernel's command line (on bare metal also: IOMMU off in the firmware). Translated, traffic between \
         devices and GPUs goes through the root, slowly or not at all",
    )
}

fn ordering(machine: &Machine, devices: &[(&str, Vec<String>)]) -> Finding {
    let wanted = machine.settings.relaxed_ordering;
    let setting = match wanted {
        RelaxedOrdering::Off => "0",
        RelaxedOrdering::Required => "1",
        RelaxedOrdering::Auto => "2",
    };
    let setting = format!("NCCL_IB_PCI_RELAXED_ORDERING={setting}");
    let states: Vec<(&str, Option<bool>)> = devices
        .iter()
        .map(|(device, path)| {
            let space = path.last().and_then(|address| space(machine, address));
            (*device, space.and_then(|space| space.relaxed_ordering()))
        })
        .collect();
    let word = |state| match state {
        Some(true) => "allowed",
        Some(false) => "not allowed",
        None => "hidden",
    };
    let shown: Vec<_> =
        states.iter().map(|(device, state)| format!("{device} {}", word(*state))).collect();
    let evidence = format!("{setting}; by the device's control word: {}", shown.join(", "));
    let refused: Vec<&str> = states
        .iter()
        .filter(|(_, state)| *state == Some(false))
        .map(|(device, _)| *device)
        .collect();
    if wanted == RelaxedOrdering::Off || refused.is_empty() {
        return Finding::fine(ORDERING, "relaxed ordering is as the settings ask", evidence);
    }
    let what = format!("{} may not use relaxed ordering on the PCI bus", refused.join(", "));
    let remedy = "let firmware and kernel allow it (PCI_WR_ORDERING of the adapter, setpci CAP_EXP+8.w), which matters most \
                  in virtual machines; or set NCCL_IB_PCI_RELAXED_ORDERING=0";
    if wanted == RelaxedOrdering::Required {
        Finding::problem(ORDERING, what, evidence, remedy)
    } else {
        Finding::advice(ORDERING, what, evidence, remedy)
    }
}

/// Devices whose link is slower or narrower than they can.
fn links(machine: &Machine, devices: &[(&str, Vec<String>)]) -> Vec<Finding> {
    let mut found = Vec::new();
    for (device, _) in devices {
        let text = |file: &str| machine.sysfs.device_text(device, &format!("device/{file}"));
        let pair = |what: &str| {
            let number = |text: String| text.split_whitespace().next()?.parse::<f64>().ok();
            let now = text(&format!("current_link_{what}"))?;
            let best = text(&format!("max_link_{what}"))?;
            // Virtual functions show no link of their own.
            let less = number(now.clone()).filter(|now| *now > 0.0)? < number(best.clone())?;
            Some((now, best, less))
        };
        for what in ["speed", "width"] {
            let Some((now, best, true)) = pair(what) else { continue };
            let unit = if what == "width" { " lanes" } else { "" };
            found.push(Finding::problem(
                LINK,
                format!("the PCI link of {device} came up with less {what} than it can"),
                format!("{what} {now}{unit} of {best}{unit}"),
                "look at slot, riser and firmware: the slot may have fewer lanes than the adapter, or the card sits badly",
            ));
        }
    }
    if found.is_empty() {
        found.push(Finding::fine(LINK, "PCI links have the speed and width they can", "sysfs"));
    }
    found
}
