//! What follows from what was tried: would NCCL use the plugin, and if not, why and what helps.

use super::candidate::{Candidate, Trial, Use};
use super::probe::End;
use super::refusal;
use super::release::{Release, is_the_program};
use crate::doctor::finding::Finding;
use pinrail_client::failure::Result;
use pinrail_client::net::{ONE_RECEIVE, Properties};

/// What a device's memory may be: the GPU's by address, the GPU's by DMA-BUF.
const GPU_MEMORY: i32 = 2 | 4;
/// Largest value that NCCL takes for a message.
const MOST_BYTES: u64 = 1 << 40;

/// NCCL goes on without saying so loudly.
pub const FALLBACK: &str = "NCCL falls back to its own network, with one line at INFO";

/// Verdicts about one plugin. `wanted`: the network that `NCCL_NET` asks for.
pub fn judge(
    candidate: &Candidate,
    trial: &Trial<'_>,
    wanted: Option<&str>,
) -> Result<Vec<Finding>> {
    if is_the_program(&candidate.plugin) {
        return Ok(vec![Finding::unknown(
            "search",
            format!("{:?} makes NCCL look for the plugin in the program itself", candidate.plugin),
            "a name that STATIC_PLUGIN begins with, upper or lower case, means that",
            "check the program, or give the plugin another name",
        )]);
    }
    let Some(opened) = &candidate.opened else {
        return Ok(vec![refusal::judge(candidate, trial)?]);
    };
    let mut findings = Vec::new();
    let file = opened.file.as_deref().unwrap_or(&opened.name);
    let tried: Vec<_> = candidate.refused.iter().map(|(_, why)| why.as_str()).collect();
    findings.push(Finding::fine(
        "search",
        format!("NCCL opens {file}"),
        if tried.is_empty() {
            format!("as {}", opened.name)
        } else {
            format!("as {}, after {}", opened.name, tried.join("; "))
        },
    ));
    if let End::Lost { step, how } = &candidate.end {
        findings.push(Finding::problem(
            "search",
            format!("{step} ends badly: {how}"),
            "NCCL does that in every process that loads the plugin",
            "report it to whoever made the plugin",
        ));
    }
    let Some(version) = candidate.taken(trial.release) else {
        findings.push(no_table(candidate, trial.release));
        return Ok(findings);
    };
    findings.push(Finding::fine(
        "table",
        format!("NCCL {} takes ncclNetPlugin_v{version}", trial.release),
        format!("it looks for {}", list(trial.release.tables)),
    ));
    let Some(seen) = candidate.uses.get(&version) else {
        findings.push(Finding::unknown(
            "table",
            format!("what ncclNetPlugin_v{version} does is not known here"),
            "tables before v5 belong to NCCL 2.11 and earlier, and are not called",
            "use a newer NCCL, or --nccl to judge as one does",
        ));
        return Ok(findings);
    };
    findings.extend(name(seen, wanted));
    match failure(seen, version) {
        Some(finding) => findings.push(finding),
        None => {
            findings.push(Finding::fine(
                "init",
                format!("init succeeds and finds {}", count(seen.devices.len())),
                format!("as {:?}", seen.name.as_deref().unwrap_or_default()),
            ));
            for (index, device) in seen.devices.iter().enumerate() {
                findings.extend(properties(index, device));
            }
            findings.extend(names(&seen.devices));
        }
    }
    findings.extend(others(candidate, version));
    Ok(findings)
}

/// Other releases take other tables; what is wrong there is nothing that this one sees. Equal failures are told once.
fn others(candidate: &Candidate, taken: u8) -> Vec<Finding> {
    let mut findings: Vec<(Vec<u8>, Finding)> = Vec::new();
    for (version, seen) in candidate.uses.iter().rev().filter(|(version, _)| **version != taken) {
        let Some(finding) = failure(seen, *version) else { continue };
        match findings.iter_mut().find(|(_, known)| known.evidence == finding.evidence) {
            Some((versions, _)) => versions.push(*version),
            None => findings.push((vec![*version], finding)),
        }
    }
    let told = |(versions, finding): (Vec<u8>, Finding)| {
        let what = format!(
            "releases that take {} would not use the plugin: {}",
            list(&versions),
            finding.what
        );
        Finding::advice("other-table", what, finding.evidence, finding.remedy)
    };
    findings.into_iter().map(told).collect()
}

fn count(devices: usize) -> String {
    if devices == 1 { "1 device".into() } else { format!("{devices} devices") }
}

fn list(tables: &[u8]) -> String {
    let names: Vec<_> = tables.iter().map(|version| format!("v{version}")).collect();
    names.join(", ")
}

fn name(seen: &Use, wanted: Option<&str>) -> Option<Finding> {
    let name = seen.name.as_deref()?;
    match wanted {
        None => Some(Finding::advice(
            "name",
            "NCCL_NET is not set: should the plugin fail on one rank, that rank goes on with another network, silently",
            "NCCL does not compare the networks of the ranks",
            format!("NCCL_NET={name} on every rank turns that into an error"),
        )),
        Some(wanted) if wanted.eq_ignore_ascii_case(name) => {
            Some(Finding::fine("name", format!("NCCL_NET={wanted} asks for it"), String::new()))
        }
        Some(wanted) => Some(Finding::problem(
            "name",
            format!("NCCL_NET={wanted} keeps NCCL from using it"),
            format!("the plugin's name is {name:?}; NCCL passes over what has another name"),
            format!("NCCL_NET={name}"),
        )),
    }
}

/// What keeps one table from being used.
fn failure(seen: &Use, version: u8) -> Option<Finding> {
    match &seen.end {
        End::Failed { stage, text, line } => {
            let line =
                line.as_ref().map_or_else(String::new, |line| format!("; its last line: {line}"));
            Some(Finding::problem(
                if stage == "init" { "init" } else { "table" },
                format!("{stage} of v{version} fails, and {FALLBACK}"),
                format!("{text}{line}"),
                remedy(stage, seen),
            ))
        }
        End::Lost { step, how } => Some(Finding::problem(
            "init",
            format!("{step} of v{version} takes the process with it or never returns"),
            how.clone(),
            "report it to whoever made the plugin; NCCL_NET_PLUGIN=none keeps NCCL away from it",
        )),
        End::Done if seen.devices.is_empty() => Some(Finding::problem(
            "devices",
            format!("v{version} finds no device, and {FALLBACK}"),
            format!("devices says {}", seen.count.unwrap_or(0)),
            remedy("devices", seen),
        )),
        End::Done => None,
    }
}

fn remedy(stage: &str, seen: &Use) -> &'static str {
    let ours = seen.name.as_deref() == Some("pinrail");
    match stage {
        "load" => "the plugin is incomplete: report it to whoever made it",
        "init" | "devices" if ours => "pinrail doctor says what this host lacks",
        "init" | "devices" => "run again with --verbose for all that the plugin says",
        _ => "report it to whoever made the plugin",
    }
}

fn properties(index: usize, device: &Properties) -> Vec<Finding> {
    let mut findings = Vec::new();
    let who = format!("device {index} ({})", device.name.as_deref().unwrap_or("unnamed"));
    let report = "report it to whoever made the plugin";
    if device.name.is_none() {
        findings.push(Finding::problem(
            "properties",
            format!("{who} has no name, and NCCL reads one"),
            "name is NULL",
            report,
        ));
    }
    // UNPACK is taken in one version only.
    let kind = (device.net_device_type.unwrap_or(0), device.net_device_version.unwrap_or(0));
    if kind.0 != 0 && kind != (1, 7) {
        findings.push(Finding::problem(
            "properties",
            format!("{who} offers a device side that NCCL does not take, and {FALLBACK}"),
            format!("netDeviceType {}, netDeviceVersion {}", kind.0, kind.1),
            report,
        ));
    }
    if let Some(bytes) = device.max_p2p_bytes.filter(|bytes| *bytes == 0 || *bytes > MOST_BYTES) {
        findings.push(Finding::problem(
            "properties",
            format!("{who}: NCCL refuses its maxP2pBytes"),
            format!("{bytes}; from 1 to {MOST_BYTES} are taken"),
            report,
        ));
    }
    if !(1..=ONE_RECEIVE as i32).contains(&device.max_recvs) {
        findings.push(Finding::problem(
            "properties",
            format!("{who}: maxRecvs is out of range"),
            format!("{}; NCCL has 1 to {ONE_RECEIVE} receives in one", device.max_recvs),
            report,
        ));
    }
    if device.speed <= 0 {
        findings.push(Finding::advice(
            "properties",
            format!("{who} states no speed"),
            format!("{} Mb/s; NCCL takes it for 10 Gb/s", device.speed),
            report,
        ));
    }
    if device.ptr_support & GPU_MEMORY == 0 {
        findings.push(Finding::advice(
            "gpu",
            format!("{who} reaches host memory only: NCCL copies what comes from and goes to GPUs"),
            format!("ptrSupport {:#x}", device.ptr_support),
            "GPUDirect needs the kernel module nvidia_peermem, or DMA-BUF of kernel, driver and adapter",
        ));
    }
    findings
}

/// NCCL's topology tells devices apart by name, and by port where names are equal.
fn names(devices: &[Properties]) -> Option<Finding> {
    let key = |device: &Properties| (device.name.clone(), device.port, device.guid);
    let twin = devices.iter().enumerate().find_map(|(index, device)| {
        let first = devices[..index].iter().position(|other| key(other) == key(device))?;
        Some((first, index))
    });
    twin.map(|(first, second)| {
        Finding::advice(
            "properties",
            format!("devices {first} and {second} cannot be told apart"),
            format!("both are {:?}, port {}", devices[second].name, devices[second].port),
            "report it to whoever made the plugin",
        )
    })
}

fn no_table(candidate: &Candidate, release: &Release) -> Finding {
    let tables = candidate.opened.as_ref().map_or(&[] as &[u8], |opened| &opened.tables);
    let others: Vec<_> = match &candidate.file {
        Some((_, Ok(elf))) => elf.plugin_symbols.clone(),
        _ => Vec::new(),
    };
    let (what, remedy) = if tables.is_empty() {
        ("it is no network plugin", "name the file of a network plugin in NCCL_NET_PLUGIN")
    } else if tables[0] > release.tables[0] {
        (
            "its tables are too new",
            "build the plugin with a table that this NCCL knows, or use a newer NCCL",
        )
    } else {
        ("its tables are too old", "use a newer build of the plugin")
    };
    let has = if others.is_empty() { list(tables) } else { others.join(", ") };
    Finding::problem(
        "table",
        format!("NCCL {release} takes none of its tables, and {FALLBACK}: {what}"),
        format!(
            "it looks for {}; the file has {}",
            list(release.tables),
            if has.is_empty() { "none".into() } else { has }
        ),
        remedy,
    )
}
