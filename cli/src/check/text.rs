//! The report as text for a person.

use super::Report;
use super::candidate::{Candidate, Use};
use super::conformance::Outcome;
use super::probe::End;
use super::release::RELEASES;
use crate::doctor::text::{clean, findings_text};
use crate::output::{Colour, Style};
use pinrail_client::net::Properties;

/// Everything: what was looked for, what each release takes, the devices, then the verdicts.
pub fn report(report: &Report, colour: Colour) -> String {
    let mut text = String::new();
    let mut say = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    let Report { release, request, .. } = report;
    let value = request.value.as_deref().map_or_else(String::new, |value| format!("={value}"));
    let title = format!("NCCL_NET_PLUGIN{value} ({}), judged as by NCCL {release}", request.origin);
    say(&colour.paint(Style::Strong, &clean(&title)));
    for candidate in &report.candidates {
        for line in tables(candidate).into_iter().chain(devices(candidate, report)) {
            say(&clean(&line));
        }
    }
    for (version, outcomes) in &report.played {
        say("");
        say(&colour.paint(Style::Strong, &format!("conformance of v{version}")));
        for (case, outcome) in outcomes {
            let (word, style, more) = match outcome {
                Outcome::Pass => ("ok", Style::Good, None),
                Outcome::Fail(evidence) => ("FAIL", Style::Bad, Some(("evidence", evidence))),
                Outcome::NotApplicable(why) => ("n/a", Style::Doubtful, Some(("because", why))),
            };
            say(&format!(
                "{} {}: {}",
                colour.paint(style, &format!("{word:4}")),
                case.name,
                case.rule
            ));
            if let Some((label, more)) = more {
                say(&format!("     {label}: {}", clean(more)));
            }
        }
        let count =
            |wanted: fn(&Outcome) -> bool| outcomes.iter().filter(|(_, o)| wanted(o)).count();
        say(&format!(
            "v{version}: {} kept, {} broken, {} not applicable",
            count(|o| *o == Outcome::Pass),
            count(|o| matches!(o, Outcome::Fail(_))),
            count(|o| matches!(o, Outcome::NotApplicable(_)))
        ));
    }
    say("");
    text + &findings_text(&report.findings, colour)
}

fn tables(candidate: &Candidate) -> Vec<String> {
    let Some(opened) = &candidate.opened else {
        return vec![format!("{}: not opened", candidate.plugin)];
    };
    let list = |versions: &[u8]| match versions {
        [] => "none".to_owned(),
        versions => {
            versions.iter().map(|version| format!("v{version}")).collect::<Vec<_>>().join(" ")
        }
    };
    let file = opened.file.as_deref().unwrap_or(&opened.name);
    let mut lines = vec![
        format!("{}: {file}", candidate.plugin),
        format!("  network tables: {}; CollNet: {}", list(&opened.tables), list(&opened.collnet)),
    ];
    for release in &RELEASES {
        let taken = release.takes(&opened.tables);
        let taken = taken.map_or_else(|| "none: falls back".to_owned(), |v| format!("takes v{v}"));
        lines.push(format!("  NCCL {:<17} {taken}", release.to_string()));
    }
    lines
}

/// The devices by the table that is taken, then by those tables that show them otherwise.
fn devices(candidate: &Candidate, report: &Report) -> Vec<String> {
    let Some(version) = candidate.taken(report.release) else { return Vec::new() };
    let Some(seen) = candidate.uses.get(&version) else { return Vec::new() };
    let mut lines = by_table(version, seen);
    let facts = |seen: &Use| -> Vec<_> {
        let fact = |d: &Properties| (d.name.clone(), d.port, d.speed, d.ptr_support, d.max_recvs);
        seen.devices.iter().map(fact).collect()
    };
    for (other, differs) in candidate.uses.iter().rev() {
        if differs.end == End::Done && facts(differs) != facts(seen) {
            lines.extend(by_table(*other, differs));
        }
    }
    lines
}

fn by_table(version: u8, seen: &Use) -> Vec<String> {
    let name = seen.name.as_deref().unwrap_or("unnamed");
    let devices = seen.devices.iter().enumerate();
    let devices = devices.map(|(index, device)| format!("    {index} {}", line(device)));
    std::iter::once(format!("  devices by v{version} ({name}):")).chain(devices).collect()
}

/// One device on one line.
fn line(device: &Properties) -> String {
    let memory = [(1, "host"), (2, "GPU"), (4, "GPU by DMA-BUF")];
    let memory: Vec<_> = memory
        .iter()
        .filter(|(bit, _)| device.ptr_support & bit != 0)
        .map(|(_, name)| *name)
        .collect();
    let mut line = format!(
        "{} port {}: {} Mb/s, memory {}, {} receives in one, {} connections",
        device.name.as_deref().unwrap_or("(unnamed)"),
        device.port,
        device.speed,
        memory.join(" and "),
        device.max_recvs,
        device.max_comms
    );
    if let Some(bytes) = device.max_p2p_bytes {
        line += &format!(", messages up to {bytes} bytes");
    }
    if let Some(path) = &device.pci_path {
        line += &format!(", {path}");
    }
    if let Some(members) = device.members.as_ref().filter(|members| members.len() > 1) {
        line += &format!(", made of {members:?}");
    }
    line
}
