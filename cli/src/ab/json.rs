//! The comparison for programs.

use super::child::Ending;
use super::compare::Spread;
use super::log::Said;
use super::side::differences;
use super::study::Study;
use serde_json::{Value, json};

/// Counts the times when keys of the document changed otherwise than by being added.
const FORMAT: u32 = 1;

fn spread(spread: Option<Spread>) -> Value {
    spread.map_or(Value::Null, |one| {
        json!({ "median": one.median, "lowest": one.least, "highest": one.most, "rounds": one.count })
    })
}

fn said(said: &Said) -> Vec<&String> {
    said.keys().collect()
}

/// Everything.
pub fn document(study: &Study) -> String {
    let sides = |side: usize| {
        let (one, log) = (&study.sides[side], &study.logs[side]);
        json!({
            "plugin": one.environment.get("NCCL_NET_PLUGIN").cloned().flatten(),
            "environment": one.environment,
            "network": study.networks[side],
            "networks": log.used(),
            "loaded": said(&log.loaded),
            "nccl": log.version,
            "settings": said(&log.settings),
        })
    };
    let points: Vec<Value> = study
        .points
        .iter()
        .map(|point| {
            json!({
                "size": point.size,
                "label": point.label,
                "series": point.series.name(),
                "time_us": { "a": spread(point.time[0]), "b": spread(point.time[1]) },
                "bandwidth_gbs": { "a": spread(point.bandwidth[0]), "b": spread(point.bandwidth[1]) },
                "ratio": spread(point.ratio),
                "one_sided": point.ratio.is_some_and(|ratio| ratio.is_one_sided()),
                "wrong": { "a": point.wrong[0], "b": point.wrong[1] },
            })
        })
        .collect();
    let summaries: Vec<Value> = study
        .summaries
        .iter()
        .map(|short| {
            json!({
                "series": short.series.name(),
                "label": short.label,
                "ratio": short.ratio.median,
                "lowest": { "ratio": short.ratio.least, "size": short.at[0] },
                "highest": { "ratio": short.ratio.most, "size": short.at[1] },
            })
        })
        .collect();
    let runs: Vec<Value> = study
        .runs
        .iter()
        .map(|run| {
            json!({
                "side": study.sides[run.side].letter,
                "round": run.round,
                "ok": run.ended.ending == Ending::Well,
                "ending": run.ended.ending.to_string(),
                "seconds": run.ended.seconds,
                "figures": run.rows,
                "last_lines": if run.ended.ending == Ending::Well { &[] } else { run.ended.tail.as_slice() },
            })
        })
        .collect();
    let remarks: Vec<Value> = study
        .remarks
        .iter()
        .map(|one| {
            json!({
                "level": one.level.name(),
                "side": one.side.map(|side| study.sides[side].letter),
                "rounds": one.rounds,
                "what": one.text,
            })
        })
        .collect();
    let [a, b] = &study.sides;
    let differences: Vec<Value> = differences(a, b)
        .into_iter()
        .map(|(name, a, b)| json!({ "name": name, "a": a, "b": b }))
        .collect();
    let value = json!({
        "format": FORMAT,
        "exit_code": study.code(),
        "verdict": study.verdict(),
        "command": study.command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>(),
        "parameters": study.parameters,
        "nccl_tests": study.releases,
        "a": sides(0),
        "b": sides(1),
        "rounds": { "asked": study.asked, "whole": study.whole_rounds() },
        "findings": remarks,
        "points": points,
        "summaries": summaries,
        "differences": differences,
        "runs": runs,
        "page": study.page.as_ref().map(|page| page.to_string_lossy()),
    });
    format!("{value:#}\n")
}

/// It came to nothing.
pub fn failure(reason: &str, code: u8) -> String {
    let value =
        json!({ "format": FORMAT, "exit_code": code, "verdict": "unknown", "error": reason });
    format!("{value:#}\n")
}
