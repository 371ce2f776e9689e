//! The budgets of the shipped plugin. Instructions are counted, not timed: the same binaries give the same numbers on
//! any machine and under any load.

mod common;

use common::{bench, dist, finish, json, scratch};

#[test]
fn the_shipped_plugin_is_within_its_budgets() {
    let file = scratch("cpu.json");
    let mut command = bench();
    command.arg("cpu").arg("--plugin").arg(dist("libnccl-net-pinrail.so"));
    command
        .args(["--count", "320", "--enforce", "--record", "/nonexistent"])
        .arg("--json")
        .arg(&file);
    let (code, out, err) = finish(command);
    assert_eq!(code, 0, "{out}{err}");
    let figures = &json(&file)["figures"];
    for qp in ["1 QP", "4 QPs"] {
        for size in ["8 B", "8 KiB"] {
            let at = |what: &str| figures[format!("{what}, {size}, {qp}")].as_f64().expect(what);
            assert!(at("message") <= 400.0, "{out}");
            // The halves are the whole: no other thread works for a message.
            let halves = at("isend + test") + at("irecv + test");
            assert!((halves - at("message")).abs() <= 2.0, "{out}");
            assert_eq!(at("message: tests in vain"), 0.0, "{out}");
            assert!(at("iflush + test") <= 150.0, "{out}");
        }
        for side in ["send", "receive"] {
            let name = format!("test of a pending {side}, 8 B, {qp}");
            assert!(figures[&name].as_f64().is_some_and(|count| count <= 25.0), "{out}");
        }
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
