//! The report as one JSON document. Keys are only ever added; `format` counts the times when that was not so.

use super::Report;
use super::candidate::{Candidate, Use};
use super::conformance::{Case, Outcome};
use super::probe::End;
use super::release::RELEASES;
use crate::doctor::json::{finding, verdict};
use serde_json::{Value, json};

const FORMAT: u32 = 1;

/// Everything.
pub fn document(report: &Report, code: u8) -> String {
    let value = json!({
        "format": FORMAT,
        "version": env!("CARGO_PKG_VERSION"),
        "verdict": verdict(code),
        "exit_code": code,
        "nccl": report.release.to_string(),
        "plugin": report.request.value,
        "origin": report.request.origin,
        "network": report.request.network,
        "candidates": report
            .candidates
            .iter()
            .map(|one| candidate(one, report))
            .collect::<Vec<_>>(),
        "conformance": report
            .played
            .iter()
            .map(|(version, outcomes)| {
                json!({
                    "table": version,
                    "cases": outcomes.iter().map(|(one, outcome)| case(one, outcome)).collect::<Vec<_>>(),
                })
            })
            .collect::<Vec<_>>(),
        "findings": report.findings.iter().map(finding).collect::<Vec<_>>(),
    });
    format!("{value:#}\n")
}

fn candidate(candidate: &Candidate, report: &Report) -> Value {
    let opened = candidate.opened.as_ref();
    let tables = opened.map_or(&[] as &[u8], |opened| &opened.tables);
    let releases: Vec<_> = RELEASES
        .iter()
        .map(|release| {
            json!({
                "first": release.first.to_string(),
                "last": release.last.to_string(),
                "takes": release.takes(tables),
            })
        })
        .collect();
    let refused: Vec<_> =
        candidate.refused.iter().map(|(name, why)| json!({ "name": name, "why": why })).collect();
    let elf = candidate.file.as_ref().and_then(|(_, elf)| elf.as_ref().ok());
    json!({
        "plugin": candidate.plugin,
        "file": candidate.file.as_ref().map(|(path, _)| path.to_string_lossy()),
        "opened_as": opened.map(|opened| &opened.name),
        "refused": refused,
        "tables": tables,
        "collnet": opened.map(|opened| &opened.collnet),
        "symbols": elf.map(|elf| &elf.plugin_symbols),
        "needed": elf.map(|elf| &elf.needed),
        "glibc": elf.and_then(super::elf::Elf::glibc).map(|(major, minor)| format!("{major}.{minor}")),
        "taken": candidate.taken(report.release),
        "releases": releases,
        "uses": candidate.uses.iter().map(|(version, seen)| usage(*version, seen)).collect::<Vec<_>>(),
    })
}

fn case(case: &Case, outcome: &Outcome) -> Value {
    let (word, text) = match outcome {
        Outcome::Pass => ("pass", None),
        Outcome::Fail(text) => ("fail", Some(text)),
        Outcome::NotApplicable(text) => ("not applicable", Some(text)),
    };
    json!({ "case": case.name, "rule": case.rule, "outcome": word, "text": text })
}

fn usage(version: u8, seen: &Use) -> Value {
    let error = match &seen.end {
        End::Done => None,
        End::Failed { stage, text, .. } => Some(json!({ "call": stage, "text": text })),
        End::Lost { step, how } => Some(json!({ "call": step, "text": how })),
    };
    json!({
        "table": version,
        "name": seen.name,
        "count": seen.count,
        "devices": seen.devices,
        "error": error,
    })
}
