//! The budgets of the shipped plugin. Instructions are counted, not timed: the same binaries give the same numbers on
//! any machine and under any load.

mod common;

use common::{bench, dist, finish, json, scratch};
use serde_json::Value;
use std::sync::OnceLock;

const SHAPES: [(&str, &str); 4] =
    [("8 B", "1 QP"), ("8 KiB", "1 QP"), ("8 B", "4 QPs"), ("8 KiB", "4 QPs")];

/// The figures of the shipped plugin by name, and the printed table for messages.
fn figures() -> &'static (Value, String) {
    static FIGURES: OnceLock<(Value, String)> = OnceLock::new();
    FIGURES.get_or_init(|| {
        let file = scratch("cpu.json");
        let mut command = bench();
        command.arg("cpu").arg("--plugin").arg(dist("libnccl-net-pinrail.so"));
        command.args(["--count", "512", "--record", "/nonexistent"]).arg("--json").arg(&file);
        let (code, out, err) = finish(command);
        assert_eq!(code, 0, "{out}{err}");
        (json(&file)["figures"].clone(), out)
    })
}

fn at(name: &str) -> f64 {
    let (figures, table) = figures();
    figures[name].as_f64().unwrap_or_else(|| panic!("no figure '{name}':\n{table}"))
}

#[test]
fn the_count_is_complete() {
    let table = &figures().1;
    for (size, qp) in SHAPES {
        // No other thread works for a message, so its two halves are the whole.
        let whole = at(&format!("message, {size}, {qp}"));
        let halves =
            at(&format!("isend + test, {size}, {qp}")) + at(&format!("irecv + test, {size}, {qp}"));
        assert!(whole > 0.0 && (halves - whole).abs() <= 0.01 * whole, "{table}");
        // On the null provider everything is complete at once.
        assert_eq!(at(&format!("message: tests in vain, {size}, {qp}")), 0.0, "{table}");
        assert_eq!(at(&format!("iflush: tests in vain, {size}, {qp}")), 0.0, "{table}");
        // At least the data and the credit are posted.
        assert!(at(&format!("message: work requests, {size}, {qp}")) >= 2.0, "{table}");
    }
}

#[test]
fn a_message_stays_within_its_instructions() {
    let table = &figures().1;
    for (size, qp) in SHAPES {
        assert!(at(&format!("message, {size}, {qp}")) <= 400.0, "{table}");
        assert!(at(&format!("message: doorbells, {size}, {qp}")) <= 3.0, "{table}");
    }
}

#[test]
fn a_test_that_finds_nothing_stays_within_its_instructions() {
    let table = &figures().1;
    for qp in ["1 QP", "4 QPs"] {
        assert!(at(&format!("test of a pending send, 8 B, {qp}")) <= 25.0, "{table}");
        assert!(at(&format!("test of a pending receive, 8 B, {qp}")) <= 25.0, "{table}");
    }
}

#[test]
fn a_flush_stays_within_its_instructions() {
    let table = &figures().1;
    for (size, qp) in SHAPES {
        assert!(at(&format!("iflush + test, {size}, {qp}")) <= 150.0, "{table}");
    }
}

#[test]
fn a_connection_holds_a_quarter_of_stock_and_leaves_nothing() {
    let table = &figures().1;
    for qp in ["1 QP", "4 QPs"] {
        assert!(at(&format!("bytes per send comm, {qp}")) <= 259_488.0 / 4.0, "{table}");
        assert!(at(&format!("bytes per receive comm, {qp}")) <= 277_344.0 / 4.0, "{table}");
        assert!(at(&format!("bytes kept after close, {qp}")) <= 0.0, "{table}");
    }
}

#[test]
fn a_plugin_that_uses_no_verbs_is_reported_not_measured() {
    let mut command = bench();
    command.arg("cpu").arg("--plugin").arg(common::fixture(12)).args(["--count", "16"]);
    let (code, _, err) = finish(command);
    assert_eq!(code, 1);
    assert!(err.contains("a request completed out of nothing"), "{err}");
}

/// Times are printed and not judged; that there is a row for each number, and that each range becomes one region (which the
/// program itself checks), is.
#[test]
fn registrations_of_distinct_ranges_are_timed() {
    let mut command = bench();
    command.arg("register").arg("--plugin").arg(dist("libnccl-net-pinrail.so"));
    command.args(["--counts", "100,3000", "--rounds", "1"]);
    let (code, out, err) = finish(command);
    assert_eq!(code, 0, "{out}{err}");
    let rows: Vec<Vec<f64>> = out
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().map(|word| word.parse().expect("a number")).collect())
        .collect();
    assert_eq!(rows.len(), 2, "{out}");
    for (row, ranges) in rows.iter().zip([100.0, 3000.0]) {
        assert!(row.len() == 6 && row[0] == ranges && row.iter().all(|n| *n > 0.0), "{out}");
    }
}
