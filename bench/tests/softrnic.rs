//! The bench on what this project ships: the built plugin on softrnic, every byte checked.

mod common;

use common::{bench, children, dist, finish, json, kill, on_softrnic, scratch, until};
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
fn every_byte_arrives_in_buffers_that_cannot_be_pinned() {
    let limits = ["-b", "1", "-e", "300k", "-f", "7", "--rounds", "1", "--iters", "20"];
    for (recvs, qps) in [("1", "1"), ("3", "4")] {
        let pages = ["send", "recv", "both"].map(|ends| {
            let name = format!("bounce-{ends}-r{recvs}q{qps}");
            let shape = ["--bounce", ends, "--recvs", recvs, "--qps", qps];
            let json = checked(&name, &[&limits[..], &shape[..]].concat());
            assert_eq!(json["bounce"]["ends"], ends);
            for row in json["rows"].as_array().expect("rows") {
                assert_eq!(row["bounced"][0]["wrong"], 0, "{row}");
                assert_eq!(row["bounced"][0]["size"], row["plugins"][0]["size"]);
                let ratio = &row["bounced_to_direct"][0];
                assert!(ratio["median"].as_f64().is_some_and(|ratio| ratio > 0.0), "{row}");
            }
            json["bounce"]["pages"][0].as_u64().expect("a number of pages")
        });
        // Each of the two ranks has one buffer to send from and one to receive in.
        assert!(pages[0] > 0 && pages[0] == pages[1] && pages[2] == 2 * pages[0], "{pages:?}");
    }
}

#[test]
fn bounced_buffers_are_measured_beside_other_plugins_and_perftest() {
    let second = dist("libnccl-net-pinrail.so");
    let second = second.to_str().expect("UTF-8");
    let options = ["-b", "1m", "-e", "1m", "--rounds", "2", "--iters", "10", "--window", "4"];
    let others = ["--bounce", "both", "--plugin", second, "--perftest"];
    let json = checked("bounce-ab", &[&options[..], &others[..]].concat());
    let row = &json["rows"][0];
    for figures in [&row["plugins"], &row["bounced"]] {
        assert_eq!(figures.as_array().map(Vec::len), Some(2), "{row}");
        assert_eq!(figures[1]["bandwidth_gbs"].as_array().map(Vec::len), Some(2), "{row}");
    }
    assert_eq!(row["bounced_to_direct"].as_array().map(Vec::len), Some(2), "{row}");
    assert_eq!(row["perftest_gbs"].as_array().map(Vec::len), Some(2), "{row}");
}

#[test]
fn without_a_way_out_the_plugins_error_ends_the_run() {
    let mut command = on_softrnic();
    command.env("PINRAIL_REG_FALLBACK", "fail");
    command.args(["--bounce", "send", "-b", "8", "-e", "8", "--iters", "20"]);
    let (code, out, err) = finish(command);
    assert_eq!(code, 1, "{out}{err}");
    assert!(err.contains("connect: rank 0: regMr: ncclSystemError (2); the plugin says:"), "{err}");
}

#[test]
fn only_softrnic_can_simulate_buffers_that_cannot_be_pinned() {
    let other = concat!(env!("OUT_DIR"), "/null_provider.so");
    let mut command = bench();
    command.arg("--plugin").arg(dist("libnccl-net-pinrail.so")).args(["--verbs-lib", other]);
    command.args(["--bounce", "both", "-b", "8", "-e", "8", "--iters", "20"]);
    let (code, out, err) = finish(command);
    assert_eq!(code, 1, "{out}{err}");
    assert!(err.contains(&format!("bounce: {other} has no softrnic_cma")), "{err}");
    assert!(err.contains("only softrnic"), "{err}");
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
