//! The bench itself, on a plugin made for these tests: every table version, every mistake a plugin can make, every way
//! a run can end badly.

mod common;

use common::{
    alive, bench, children, dist, finish, fixture, json, kill, not_a_plugin, on_fixture, scratch,
    until,
};

#[test]
fn every_table_version_is_driven_through_its_own_signatures() {
    for version in 6..=12u8 {
        let file = scratch(&format!("v{version}.json"));
        let mut command = on_fixture(version);
        command.args(["-b", "0", "-e", "20k", "-f", "7", "--recvs", "3", "--rounds", "1"]);
        command.args(["--iters", "50", "--json"]).arg(&file);
        let (code, out, err) = finish(command);
        assert_eq!(code, 0, "v{version}: {out}{err}");
        let json = json(&file);
        assert_eq!(json["plugins"][0]["abi"], version);
        let sizes: Vec<u64> = json["rows"]
            .as_array()
            .expect("rows")
            .iter()
            .map(|row| row["plugins"][0]["size"].as_u64().expect("a size"))
            .collect();
        assert_eq!(sizes, [0, 1, 7, 49, 343, 2401, 16807]);
        for row in json["rows"].as_array().expect("rows") {
            assert_eq!(row["plugins"][0]["wrong"], 0);
            assert_eq!(row["plugins"][0]["count"], 50);
        }
    }
}

#[test]
fn the_newest_table_is_taken_unless_another_is_asked_for() {
    let mut command = on_fixture(9);
    command.args(["--abi", "12", "-e", "8"]);
    let (code, _, err) = finish(command);
    assert_eq!(code, 1);
    assert!(err.contains("ncclNetPlugin_v12"), "{err}");
}

#[test]
fn each_mistake_of_a_plugin_is_found_and_named() {
    let expectations = [
        ("byte", "byte 77 of 128 is wrong"),
        ("guard", "byte 0 behind the message was written"),
        ("size", "128 bytes were sent, test says 127"),
        ("stall", "rank 1: irecv of the checked pass: no progress for 1 s"),
        ("error", "rank 1: test: ncclSystemError (2); the plugin says: fixture: receive"),
        ("unwritten", "rank 0: isend: the plugin left its out-pointer unwritten"),
        ("exit", "rank 1 exited with status 3 during check of 128 B"),
        (
            "init",
            "rank 0: init: ncclSystemError (2); the plugin says: fixture: init fails on purpose, 42",
        ),
        ("properties", "getProperties: the plugin wrote behind the struct"),
    ];
    for (fault, expected) in expectations {
        let mut command = on_fixture(12);
        command.env("FIXTURE_FAULT", fault);
        command.args(["-b", "128", "-e", "128", "--timeout", "1", "--rounds", "1"]);
        let (code, out, err) = finish(command);
        assert_eq!(code, 1, "{fault}: {out}{err}");
        assert!(err.contains(expected), "{fault}: {err}");
    }
}

#[test]
fn a_plugin_call_that_never_returns_ends_the_run() {
    let mut command = on_fixture(12);
    command.env("FIXTURE_FAULT", "block");
    command.args(["-b", "128", "-e", "128", "--timeout", "1"]);
    let (code, _, err) = finish(command);
    assert_eq!(code, 1);
    assert!(err.contains("rank 1 did not answer in time"), "{err}");
}

#[test]
fn a_killed_rank_is_an_error_and_not_a_hang() {
    for victim in 0..2 {
        let mut command = on_fixture(12);
        command.args(["--no-check", "-b", "8", "-e", "8", "--iters", "2000000000"]);
        let child = command.spawn().expect("started");
        let parent = child.id();
        until("both ranks run", || children(parent).len() == 2);
        let ranks = children(parent);
        kill(ranks[victim]);
        let output = child.wait_with_output().expect("ended");
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains(&format!("rank {victim} was killed by signal 9 during")), "{err}");
        assert!(!alive(ranks[1 - victim]), "the other rank is gone too");
    }
}

#[test]
fn ranks_do_not_outlive_a_killed_sweep() {
    let mut command = on_fixture(12);
    command.args(["--no-check", "-b", "8", "-e", "8", "--iters", "2000000000"]);
    let mut child = command.spawn().expect("started");
    let parent = child.id();
    until("both ranks run", || children(parent).len() == 2);
    let ranks = children(parent);
    child.kill().expect("killed");
    child.wait().expect("ended");
    until("both ranks are gone", || !ranks.iter().any(|&rank| alive(rank)));
}

#[test]
fn plugins_are_compared_side_by_side() {
    let file = scratch("ab.json");
    let mut command = on_fixture(12);
    command.arg("--plugin").arg(fixture(6));
    command.args(["-b", "64", "-e", "128", "--iters", "100", "--json"]).arg(&file);
    let (code, out, err) = finish(command);
    assert_eq!(code, 0, "{err}");
    let json = json(&file);
    assert_eq!(json["plugins"][1]["abi"], 6);
    for row in json["rows"].as_array().expect("rows") {
        assert_eq!(row["plugins"].as_array().map(Vec::len), Some(2));
        assert_eq!(row["plugins"][1]["bandwidth_gbs"].as_array().map(Vec::len), Some(3));
    }
    assert!(out.contains("to A"), "{out}");
    assert_eq!(out.lines().filter(|line| line.starts_with("  B")).count(), 2, "{out}");
}

/// The bench on a fixture beside softrnic, with buffers that cannot be pinned.
fn bounced_fixture(loaded: bool, fault: &str) -> (i32, String, String) {
    let softrnic = dist("softrnic/libibverbs.so.1");
    let mut command = bench();
    command.arg("--plugin").arg(fixture(12)).arg("--verbs-lib").arg(&softrnic);
    command.args(["--bounce", "recv", "-b", "8", "-e", "9k", "-f", "1000", "--iters", "20"]);
    command.env("FIXTURE_FAULT", fault);
    if loaded {
        command.env("LD_PRELOAD", &softrnic);
    }
    finish(command)
}

#[test]
fn how_buffers_are_reached_is_proved_and_not_believed() {
    let (code, out, err) = bounced_fixture(true, "");
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(out.lines().filter(|line| line.starts_with("  bounced")).count(), 2, "{out}");
    for (fault, expected) in [
        ("stolen", "of the incoming buffer is reached directly, not through copies"),
        ("unpinned", "of the outgoing buffer is in no memory region"),
    ] {
        let (code, out, err) = bounced_fixture(true, fault);
        assert_eq!(code, 1, "{fault}: {out}{err}");
        assert!(err.contains("rank 0: bounce: page 0 of ") && err.contains(expected), "{err}");
        assert!(!out.contains("to direct"), "nothing is measured: {out}");
    }
    let (code, out, err) = bounced_fixture(false, "");
    assert_eq!(code, 1, "{out}{err}");
    assert!(err.contains("softrnic/libibverbs.so.1 is not loaded by the plugin"), "{err}");
}

#[test]
fn the_first_line_says_where_it_runs_and_the_list_names_devices() {
    let mut command = on_fixture(10);
    command.arg("--list");
    let (code, out, _) = finish(command);
    assert_eq!(code, 0);
    assert!(out.lines().next().is_some_and(|line| line.contains("verbs library")), "{out}");
    assert!(out.contains("loop0") && out.contains("receives of up to 8"), "{out}");
}

#[test]
fn warnings_of_the_plugin_are_shown_and_its_other_lines_on_request() {
    for (verbose, shown) in [(&[][..], false), (&["--verbose"][..], true)] {
        let mut command = on_fixture(12);
        command.env("FIXTURE_FAULT", "init").args(["-e", "8"]).args(verbose);
        let (_, _, err) = finish(command);
        assert!(err.contains("rank 1: fixture: init fails on purpose, 42\n"), "{err}");
        assert_eq!(err.contains("rank 0: fixture: version 12\n"), shown, "{err}");
    }
}

#[test]
fn bad_options_exit_with_2_and_say_why() {
    let plugin = fixture(12);
    let plugin = plugin.to_str().expect("UTF-8");
    let cases: [(&[&str], &str); 11] = [
        (&["--window", "0"], "--window"),
        (&["--window", "33"], "--window"),
        (&["--recvs", "9"], "--recvs"),
        (&["-b", "1x"], "unknown suffix"),
        (&["--abi", "5"], "--abi"),
        (&["--bounce", "all"], "[possible values: send, recv, both]"),
        (&["--no-such-option"], "--no-such-option"),
        (&["-b", "64", "-e", "8"], "smallest size"),
        (&["-e", "4G"], "2147483647"),
        (&["--plugin", "/nonexistent/plugin.so"], "/nonexistent/plugin.so"),
        (&["--device", "nothere"], "no device nothere; it has loop0"),
    ];
    for (arguments, expected) in cases {
        let mut command = bench();
        command.args(["--plugin", plugin, "--verbs-lib", plugin]).args(arguments);
        let (code, out, err) = finish(command);
        assert_eq!(code, 2, "{arguments:?}: {out}{err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
    let mut command = bench();
    command.args(["--plugin", plugin, "--verbs-lib", "/nonexistent/libibverbs.so.1"]);
    let (code, _, err) = finish(command);
    assert_eq!(code, 2);
    assert!(err.contains("/nonexistent/libibverbs.so.1"), "{err}");
}

#[test]
fn what_is_no_plugin_is_refused_with_the_reason() {
    let library = not_a_plugin();
    let text = scratch("text.so");
    std::fs::write(&text, "no library\n").expect("written");
    for (path, expected) in [(library, "is not an NCCL network plugin"), (text, "text.so")] {
        let mut command = bench();
        command.arg("--plugin").arg(&path).arg("--verbs-lib").arg(&path);
        let (code, _, err) = finish(command);
        assert_eq!(code, 1, "{err}");
        assert!(err.contains(expected), "{err}");
    }
}
