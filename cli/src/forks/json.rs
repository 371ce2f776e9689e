//! The findings as one JSON document. Keys are only ever added; `format` counts the times when that was not so.

use super::finding::{Finding, Withheld};
use super::place::{Place, Sight};
use super::target::{Known, Target};
use nccl_net_pinrail::host::smaps::Mapping;
use nccl_net_pinrail::memory::inventory::{Inventory, Record};
use serde_json::{Value, json};
use std::ops::Range;
use std::path::PathBuf;

const FORMAT: u32 = 1;

fn document_text(value: &Value) -> String {
    format!("{value:#}\n")
}

/// It could not be told.
pub fn failure(pid: u32, reason: &str, code: u8) -> String {
    document_text(&json!({
        "format": FORMAT,
        "process": { "pid": pid },
        "verdict": "unknown",
        "exit_code": code,
        "error": reason,
    }))
}

/// Everything.
pub fn document(
    target: &Target,
    finding: &Finding<'_>,
    place: Option<&Place<'_>>,
    removed: &[PathBuf],
    code: u8,
) -> String {
    let verdict = match (place, finding.is_harmful()) {
        (Some(place), _) => place.name(),
        (None, true) => "withheld",
        (None, false) if finding.withheld.is_empty() => "nothing-withheld",
        (None, false) => "harmless",
    };
    let totals = &finding.totals;
    document_text(&json!({
        "format": FORMAT,
        "process": { "pid": target.pid, "name": target.name },
        "verdict": verdict,
        "exit_code": code,
        "inventory": inventory(&target.known),
        "address": place.map(address),
        "withheld": finding.withheld.iter().map(withheld).collect::<Vec<_>>(),
        "zero_filled": finding.wiped.iter().map(|one| mapping(one)).collect::<Vec<_>>(),
        "totals": {
            "withheld_bytes": totals.withheld,
            "own_bytes": totals.own,
            "asked_bytes": totals.asked,
            "collateral_bytes": totals.collateral,
            "unexplained_bytes": totals.unexplained,
        },
        "removed_stale": removed.iter().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
    }))
}

fn hex(address: u64) -> String {
    format!("{address:#x}")
}

fn range(range: &Range<u64>) -> Value {
    json!({ "start": hex(range.start), "end": hex(range.end), "bytes": range.end.saturating_sub(range.start) })
}

fn mapping(mapping: &Mapping) -> Value {
    let mut value = range(&mapping.range);
    value["permissions"] = json!(mapping.permissions);
    value["path"] = json!(mapping.path);
    value["flags"] = json!(mapping.flags.to_string());
    value["page_bytes"] = json!(mapping.kernel_page_size);
    value["is_inventory"] = json!(Inventory::is_mapping(mapping));
    value
}

fn registration(record: &Record) -> Value {
    json!({
        "number": record.number,
        "kind": record.kind.name(),
        "device": record.device,
        "site": record.site,
        "requests": record.requests,
        "registered": range(&record.range),
        "asked": range(&record.asked),
    })
}

fn withheld(one: &Withheld<'_>) -> Value {
    let mut value = mapping(one.mapping);
    value["owner"] = json!(one.owner.name());
    value["cut_out_of"] = one.origin.as_ref().map_or(Value::Null, |origin| {
        let mut value = range(&origin.range);
        value["name"] = json!(origin.name);
        value
    });
    value["asked_bytes"] = json!(one.asked);
    value["collateral_bytes"] = json!(one.collateral());
    value["unexplained_bytes"] = json!(one.unexplained());
    value["registrations"] = one.records.iter().map(|record| registration(record)).collect();
    value
}

fn address(place: &Place<'_>) -> Value {
    let shown = match place.sight {
        Sight::Unmapped => Value::Null,
        Sight::Withheld(one) => withheld(one),
        Sight::Wiped(one) | Sight::Unreadable(one) | Sight::Inherited(one) => mapping(one),
    };
    json!({
        "address": hex(place.address),
        "state": place.name(),
        "mapping": shown,
        "registrations": place.records.iter().map(|record| registration(record)).collect::<Vec<_>>(),
    })
}

fn inventory(known: &Known) -> Value {
    match known {
        Known::Absent => json!({ "state": "absent" }),
        Known::Unreadable(reason) => json!({ "state": "unreadable", "reason": reason }),
        Known::Read(inventory) => json!({
            "state": "read",
            "path": inventory.path.to_string_lossy(),
            "registrations": inventory.records.len(),
            "unlisted": inventory.unlisted,
            "unsteady": inventory.unsteady,
        }),
    }
}
