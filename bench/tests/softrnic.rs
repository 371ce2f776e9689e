//! The bench on what this project ships: the built plugin on softrnic, every byte checked.

mod common;

use common::{children, finish, json, kill, on_softrnic, scratch, until};
use serde_json::Value;

/// Runs with a JSON file and returns it; the checked pass found nothing wrong.
fn checked(name: &str, arguments: &[&str]) -> Value {
    let file = scratch(&format!("{name}.json"));
    let mut command = on_softrnic();
    command.args(arguments).arg("--json").arg(&file);
    let (code, out, err) = finish(command);
    assert_eq!(code, 0, "{name}: {out}{err}");
    assert!(out.lines().next().is_some_and(|line| line.contains("soft fabric")), "{out}");
    let json = json(&file);
    for row in json["rows"].as_array().expect("rows") {
        assert_eq!(row["plugins"][0]["wrong"], 0, "{out}{err}");
    }
    assert_eq!(json["plugins"][0]["name"], "pinrail");
    json
}

#[test]
fn every_byte_arrives_at_sizes_around_powers_of_two() {
    let json = checked("sizes", &["-b", "0", "-e", "300k", "--rounds", "1", "--iters", "40"]);
    assert_eq!(json["plugins"][0]["abi"], 12);
    checked("odd", &["-b", "127", "-e", "2m", "-f", "3", "--rounds", "1", "--iters", "20"]);
}

#[test]
fn every_byte_arrives_in_grouped_receives_over_several_queue_pairs() {
    for (recvs, qps) in [("8", "1"), ("1", "4"), ("3", "4")] {
        let name = format!("r{recvs}q{qps}");
        let limits = ["-b", "1", "-e", "256k", "-f", "5", "--rounds", "1", "--iters", "20"];
        let shape = ["--recvs", recvs, "--qps", qps, "--window", "32"];
        checked(&name, &[&limits[..], &shape[..]].concat());
    }
}

#[test]
fn every_table_version_moves_the_same_bytes() {
    for version in 6..=12u8 {
        let text = version.to_string();
        let limits = ["-b", "8", "-e", "64k", "-f", "16", "--rounds", "1", "--iters", "20"];
        let json = checked(&format!("abi{text}"), &[&limits[..], &["--abi", &text]].concat());
        assert_eq!(json["plugins"][0]["abi"], version);
    }
}

#[test]
fn perftest_runs_on_the_same_library_beside_the_plugin() {
    let options = ["-b", "1m", "-e", "1m", "--rounds", "1", "--iters", "20", "--perftest"];
    let json = checked("perftest", &options);
    let reference = &json["rows"][0]["perftest_gbs"];
    assert!(reference[0].as_f64().is_some_and(|gbs| gbs > 0.0), "{json}");
}

#[test]
fn a_killed_rank_is_an_error_and_not_a_hang() {
    for victim in 0..2 {
        let mut command = on_softrnic();
        command.args(["--no-check", "-b", "8", "-e", "8", "--iters", "2000000000"]);
        command.args(["--timeout", "10"]);
        let child = command.spawn().expect("started");
        let parent = child.id();
        until("both ranks run", || children(parent).len() == 2);
        kill(children(parent)[victim]);
        let output = child.wait_with_output().expect("ended");
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains(&format!("rank {victim} was killed by signal 9 during")), "{err}");
    }
}
