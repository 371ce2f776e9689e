//! The findings as one JSON document. Keys are only ever added; `format` counts the times when that was not so.

use super::finding::Finding;
use super::machine::Machine;
use super::port::Port;
use nccl_net_pinrail::host::gid::GidEntry;
use nccl_net_pinrail::host::kernel;
use serde_json::{Value, json};

const FORMAT: u32 = 1;

/// The word for an exit status.
pub fn verdict(code: u8) -> &'static str {
    match code {
        0 => "fine",
        1 => "problems",
        _ => "unknown",
    }
}

/// It could not be told.
pub fn failure(reason: &str, code: u8) -> String {
    let value = json!({
        "format": FORMAT,
        "verdict": verdict(code),
        "exit_code": code,
        "error": reason,
    });
    format!("{value:#}\n")
}

/// Everything.
pub fn document(machine: &Machine, ports: &[Port], findings: &[Finding], code: u8) -> String {
    let value = json!({
        "format": FORMAT,
        "version": env!("CARGO_PKG_VERSION"),
        "verdict": verdict(code),
        "exit_code": code,
        "captured": !machine.live,
        "kernel": kernel::release(&machine.proc),
        "architecture": machine.architecture(),
        "container": machine.container.inside(),
        "container_runtime": machine.container.runtime,
        "verbs": machine.verbs.as_ref().map(super::verbs::VerbsFacts::document),
        "ports": ports.iter().map(port).collect::<Vec<_>>(),
        "findings": findings.iter().map(finding).collect::<Vec<_>>(),
    });
    format!("{value:#}\n")
}

/// One finding.
pub fn finding(finding: &Finding) -> Value {
    json!({
        "check": finding.check,
        "level": finding.level.name(),
        "what": finding.what,
        "evidence": finding.evidence,
        "remedy": finding.remedy,
    })
}

fn gid(entry: &GidEntry) -> Value {
    json!({
        "index": entry.index,
        "address": entry.address().to_string(),
        "roce_version": entry.version,
    })
}

fn port(port: &Port) -> Value {
    json!({
        "port": port.label,
        "state": port.state.as_ref().map(|(_, word)| word),
        "link": port.physical,
        "mbps": port.speed,
        "rate": port.rate,
        "link_layer": if port.ethernet { "Ethernet" } else { "InfiniBand" },
        "interfaces": port.netdevs,
        "interface_mtu": port.netdev_mtu,
        "mtu": port.mtu(),
        "selected": port.is_selected(),
        "reason": port.decision.reason.to_string(),
        "used": port.is_used(),
        "gid": port.gid.as_ref().ok().map(|choice| gid(&choice.entry)),
        "usable_gids": port.usable_gids().map(gid).collect::<Vec<_>>(),
        "pkey_index": port.pkey.as_ref().ok(),
        "pci": port.pci_path,
        "adapter": port.adapter,
    })
}
