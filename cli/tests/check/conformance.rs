//! The rules as cases: all are kept where nothing is wrong, and exactly those are broken that a mistake breaks.

use super::{Report, dist, pinrail, plugins, report};
use std::collections::BTreeSet;
use std::process::Command;

/// A case that must end has as long as the slowest machine needs.
const PATIENT: &str = "300";
/// One that never ends need not be waited for.
const HASTY: &str = "2";

/// Cases of a run by their outcome, as `table/name`.
fn cases(report: &Report, outcome: &str) -> BTreeSet<String> {
    let tables = report.document["conformance"].as_array().expect("tables");
    let of = |table: &serde_json::Value| {
        let version = table["table"].as_u64().expect("a version");
        let cases = table["cases"].as_array().expect("cases").clone();
        cases
            .into_iter()
            .filter(|case| case["outcome"] == outcome)
            .map(move |case| format!("v{version}/{}", case["case"].as_str().expect("a name")))
            .collect::<Vec<_>>()
    };
    tables.iter().flat_map(of).collect()
}

fn names(table: &str, names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| format!("{table}/{name}")).collect()
}

/// All cases that there are.
fn all() -> Vec<String> {
    let output = pinrail().arg("--list").output().expect("the command starts");
    let text = String::from_utf8(output.stdout).expect("text");
    let all: Vec<_> =
        text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect();
    assert!(all.len() > 30, "{all:?}");
    all
}

fn on_softrnic() -> Command {
    let mut command = pinrail();
    command.env("NCCL_IBVERBS_LIB", dist("softrnic/libibverbs.so.1")).env("NCCL_NET", "pinrail");
    command.env("SOFTRNIC_FABRIC", format!("check-{}", std::process::id())).args([
        "--conformance",
        "--timeout",
        PATIENT,
    ]);
    command
}

#[test]
fn pinrail_keeps_every_rule_in_every_table() {
    let mut command = on_softrnic();
    command.args(["--table", "all"]).arg(dist("libnccl-net-pinrail.so"));
    let report = report(command);
    assert_eq!((cases(&report, "fail"), report.code), (BTreeSet::new(), 0));
    // setNetAttr is not offered; the rest does not apply to old tables.
    let mut expected = BTreeSet::new();
    for version in 6..=12 {
        expected.insert(format!("v{version}/net_attr"));
        if version < 11 {
            expected.insert(format!("v{version}/finalize_null"));
        }
        if version < 9 {
            expected.insert(format!("v{version}/optional_completion"));
        }
    }
    assert_eq!(cases(&report, "not applicable"), expected);
    assert_eq!(cases(&report, "pass").len() + expected.len(), 7 * all().len());
}

/// Several devices, each of several ports, on the one that is named.
#[test]
fn a_device_is_chosen_by_name() {
    let play = |device: &str| {
        let mut command = on_softrnic();
        command.env("SOFTRNIC_NAME", "left,right").env("SOFTRNIC_DEVICES", "2");
        command.args(["--case", "sizes", "--device", device]).arg(dist("libnccl-net-pinrail.so"));
        report(command)
    };
    let good = play("right");
    assert_eq!((cases(&good, "pass"), good.code), (names("v12", &["sizes"]), 0));
    let bad = play("middle");
    assert_eq!(bad.code, 2);
    let error = bad.document["error"].as_str().expect("an error");
    assert!(error.contains("no device \"middle\"; it has left, right"), "{error}");
}

#[test]
fn the_fixture_keeps_every_rule_in_every_table() {
    for version in 5..=12u8 {
        let mut command = pinrail();
        command.args(["--conformance", "--timeout", PATIENT, "--table", &version.to_string()]);
        // v5 belongs to releases that take words only, of which one takes paths.
        command.args(["--nccl", if version == 5 { "2.25" } else { "2.32" }]);
        command.arg(plugins::fixture(version));
        let report = report(command);
        assert_eq!((cases(&report, "fail"), report.code), (BTreeSet::new(), 0), "v{version}");
        assert!(cases(&report, "pass").len() >= 36, "v{version}");
    }
}

/// Mistakes of the fixture, with the rules that they break: what is found out, and what never ends.
const MISTAKES: [(&str, &[&str], &[&str]); 26] = [
    ("renamed", &["name"], &[]),
    ("counted", &["devices", "init_again"], &[]),
    ("unset", &["properties_written", "properties_range"], &[]),
    (
        "properties",
        &[
            "properties_written",
            "properties_stable",
            "properties_range",
            "reload",
            "flush",
            "many_in_flight",
            "multi_receive",
            "later_tags",
        ],
        &[],
    ),
    ("restless", &["properties_stable"], &[]),
    ("groups", &["properties_range"], &[]),
    ("once", &["name", "properties_stable", "init_again"], &[]),
    ("null", &["finalize_null"], &[]),
    ("attr", &["net_attr"], &[]),
    ("long", &["listen"], &[]),
    (
        "waits",
        &[],
        &["self_connection", "connect_does_not_wait", "close_unaccepted", "several_connections"],
    ),
    ("blocks", &[], &["accept_does_not_wait"]),
    ("foreign", &["foreign_handle"], &[]),
    ("empty", &[], &["zero_bytes"]),
    ("room", &["zero_bytes", "shorter_send"], &[]),
    ("nowhere", &["null_sizes"], &[]),
    ("more", &["sizes_bound"], &[]),
    ("marker", &["optional_completion"], &[]),
    ("position", &["multi_receive", "later_tags"], &[]),
    ("early", &["later_tags"], &[]),
    ("few", &["many_in_flight"], &[]),
    ("flush", &["flush"], &[]),
    ("aligned", &["registration_ranges"], &[]),
    ("dereg", &["deregister_null"], &[]),
    ("thread", &["another_thread"], &[]),
    ("busy", &["close_in_flight", "receiver_outlives_sender", "sender_outlives_receiver"], &[]),
];

fn with_mistake(mistake: &str, timeout: &str, names: impl IntoIterator<Item = String>) -> Report {
    let mut command = pinrail();
    command.args(["--conformance", "--timeout", timeout]).env("FIXTURE_FAULT", mistake);
    for name in names {
        command.args(["--case", &name]);
    }
    command.arg(plugins::fixture(12));
    report(command)
}

fn exactly_these(mistake: &str, found: &[&str], endless: &[&str]) {
    let others = all().into_iter().filter(|name| !endless.contains(&name.as_str()));
    // Where the plugin itself would not be used, nothing more is to be seen.
    let report = with_mistake(mistake, PATIENT, others);
    assert_eq!(cases(&report, "fail"), names("v12", found), "{mistake}");
    if !found.is_empty() {
        let problems = report.findings("problem");
        assert!(problems.iter().any(|[check, ..]| check == "conformance"), "{problems:?}");
        assert_eq!(report.code, 1);
    }
    if !endless.is_empty() {
        let report = with_mistake(mistake, HASTY, endless.iter().map(|name| (*name).to_owned()));
        assert_eq!(cases(&report, "fail"), names("v12", endless), "{mistake}");
        let text = report.document["conformance"].to_string();
        assert!(text.contains("no end within 2 s: process"), "{text}");
    }
}

/// In two tests, which run at once.
#[test]
fn exactly_the_rules_are_broken_that_a_mistake_breaks() {
    for (mistake, found, endless) in &MISTAKES[..MISTAKES.len() / 2] {
        exactly_these(mistake, found, endless);
    }
}

#[test]
fn exactly_the_rules_are_broken_that_another_mistake_breaks() {
    for (mistake, found, endless) in &MISTAKES[MISTAKES.len() / 2..] {
        exactly_these(mistake, found, endless);
    }
}

/// A dead peer that is waited for: both cases of it, and nothing else.
#[test]
fn waiting_for_a_dead_peer_is_found_out() {
    exactly_these("lost", &[], &["receiver_outlives_sender", "sender_outlives_receiver"]);
}

#[test]
fn a_crash_is_told_with_the_call() {
    let report = with_mistake("nowhere", PATIENT, ["null_sizes".to_owned()]);
    let text = report.document["conformance"][0]["cases"][0]["text"].as_str().expect("evidence");
    assert!(text.contains("was killed by signal 6 during"), "{text}");
    let report = with_mistake("leak", PATIENT, ["name".to_owned()]);
    let text = report.document["conformance"][0]["cases"][0]["text"].as_str().expect("evidence");
    assert!(text.contains("finalize and dlclose"), "{text}");
}
