//! The report as one JSON document. Keys are only ever added; `format` counts the times when that was not so.

use super::ask::Outcome;
use super::matrix::Hosts;
use super::protocol::Host;
use super::{Cell, End, Report};
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
        "hosts": report.hosts.iter().map(|(asked, told)| host(asked, told)).collect::<Vec<_>>(),
        "transfers": report.cells.iter().map(|one| cell(&report.hosts, one)).collect::<Vec<_>>(),
        "findings": report.findings.iter().map(finding).collect::<Vec<_>>(),
    });
    format!("{value:#}\n")
}

fn host(asked: &str, told: &Result<Host, String>) -> Value {
    match told {
        Ok(told) => json!({
            "asked": asked,
            "name": told.name,
            "pid": told.pid,
            "version": told.version,
            "rails": told.rails,
            "left_out": told.left_out,
            "error": told.error,
        }),
        Err(why) => json!({ "asked": asked, "error": why }),
    }
}

fn end(hosts: &Hosts, (host, rail): End) -> Value {
    let known = hosts[host].1.as_ref().ok().and_then(|host| host.rails.get(rail));
    json!({
        "host": hosts[host].0,
        "rail": known.map(|known| &known.label),
        "gid": known.map(|known| &known.address),
    })
}

fn cell(hosts: &Hosts, cell: &Cell) -> Value {
    let mut value = json!({ "from": end(hosts, cell.from), "to": end(hosts, cell.to) });
    let more = match &cell.outcome {
        Outcome::Reached { micros } => json!({ "outcome": "reached", "micros": micros }),
        Outcome::Failed { sender, receiver } => {
            json!({ "outcome": "failed", "sender": sender, "receiver": receiver })
        }
        Outcome::Untried(why) => json!({ "outcome": "not tried", "why": why }),
    };
    if let (Some(value), Value::Object(more)) = (value.as_object_mut(), more) {
        value.extend(more);
    }
    value
}
