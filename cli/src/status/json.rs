//! The findings as one JSON document. Keys are only ever added; `format` counts the times when that was not so.

use super::finding::Finding;
use super::port::Counters;
use super::process::Shown;
use super::{FINE, PROBLEMS};
use nccl_net_pinrail::memory::status::json as status;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const FORMAT: u32 = 1;

/// Everything. `on_a_line`: one of several.
pub fn document(
    findings: &[Finding<'_>],
    ports: &BTreeMap<String, Counters>,
    error: Option<&str>,
    code: u8,
    on_a_line: bool,
) -> String {
    let document = json!({
        "format": FORMAT,
        "verdict": match code { FINE => "fine", PROBLEMS => "problems", _ => "unknown" },
        "exit_code": code,
        "error": error,
        // Of all users of the port since the machine started.
        "ports": ports,
        "processes": findings.iter().map(process).collect::<Vec<_>>(),
    });
    if on_a_line { format!("{document}\n") } else { format!("{document:#}\n") }
}

fn process(finding: &Finding<'_>) -> Value {
    let process = finding.process;
    let (state, reason) = match &process.shown {
        Shown::Status(_) => ("read", None),
        Shown::Nothing => ("no-connection", None),
        Shown::Unreadable(reason) => ("unreadable", Some(reason)),
    };
    json!({
        "pid": process.pid,
        "name": process.name,
        "stopped": process.stopped,
        "state": state,
        "reason": reason,
        "problems": finding.problems.iter().map(|(end, text)| json!({ "end": end, "text": text })).collect::<Vec<_>>(),
        "doubts": finding.doubts,
        "status": process.status().map(status),
    })
}
