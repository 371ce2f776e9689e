//! The kernel lab (docs/kernel-lab.md): a real kernel's RDMA stack in an emulated guest.
//!
//! Needs a Debian host and minutes, so Cargo.toml keeps it out of a plain `cargo test`. `make lab-quick` runs the quick
//! list, which is CI's; `make lab` those that are marked as of the whole list too. Nothing here skips itself: a guest that
//! cannot be built or does not boot is a failure.

use std::process::{Command, Output, Stdio};

/// A lab script, run from the repository's root.
fn lab(script: &str, args: &[&str]) -> Command {
    let root = env!("CARGO_MANIFEST_DIR");
    let mut command = Command::new(format!("{root}/lab/{script}"));
    command.args(args).current_dir(root).stdin(Stdio::null());
    command
}

/// The output of a command in the guest.
fn guest(args: &[&str]) -> Output {
    lab("run", args).output().expect("lab/run starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("the guest writes UTF-8")
}

/// Runs a list of checks in the guest; its output is the test's.
fn list(script: &str, args: &[&str]) {
    let status = lab(script, args).status().expect("the script starts");
    assert!(status.success(), "lab/{script} {args:?}: {status}");
}

#[test]
fn output_arguments_and_exit_code_come_through() {
    let script = r#"printf '%s|' "$0" "$@"; echo; echo to stderr >&2; pwd; touch Cargo.toml 2>/dev/null || echo read-only; exit 7"#;
    let output = guest(&["--timeout", "60", "--", "bash", "-c", script, "a b", "", "$c", "'d'"]);
    let want = format!("a b||$c|'d'|\n{}\nread-only\n", env!("CARGO_MANIFEST_DIR"));
    assert_eq!(text(&output.stdout), want);
    // The lab's own remarks begin with its name, such as that a boot was repeated.
    let lines = text(&output.stderr).lines().filter(|line| !line.starts_with("lab: "));
    assert_eq!(lines.collect::<Vec<_>>(), ["to stderr"]);
    assert_eq!(output.status.code(), Some(7));
}

#[test]
fn a_command_past_its_limit_is_ended() {
    let output = guest(&["--no-rdma", "--timeout", "3", "--", "echo begun; sleep 1000"]);
    assert_eq!(text(&output.stdout), "begun\n");
    assert_eq!(output.status.code(), Some(124), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("past its limit of 3 s"));
}

#[test]
fn a_crashed_guest_is_no_result() {
    let output = guest(&["--no-rdma", "--timeout", "60", "--", "echo c >/proc/sysrq-trigger"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(
        text(&output.stderr).contains("Kernel panic - not syncing"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn a_guest_that_does_not_boot_is_tried_three_times() {
    let output = lab("run", &["--no-rdma", "--", "true"]).env("LAB_BOOT_TIMEOUT", "0").output();
    let output = output.expect("lab/run starts");
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(text(&output.stderr).matches("starting it again").count(), 2);
}

#[test]
fn a_guest_that_panics_before_its_command_is_tried_three_times() {
    let output = guest(&["--no-rdma", "--append", "rdinit=/no-such-file", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    let said = text(&output.stderr);
    assert_eq!(said.matches("starting it again").count(), 2, "{said}");
    assert!(said.contains("Kernel panic - not syncing"), "{said}");
}

#[test]
fn the_kernels_rdma_devices_work() {
    list("check", &[]);
}

/// The shipped plugin with the distribution's libibverbs: every table, each way in which a message travels once, and what
/// children and the `pinrail` command have of it.
#[test]
fn the_plugin_moves_data_through_the_kernel() {
    let cases = [
        "transfer:hello",
        "transfer:sizes_1_qp:v12",
        "transfer:sizes_4_qps_split:v12",
        "transfer:sizes_adaptive_routing:v12",
        "group:shuffled_2_qps_split:v12",
        "inflight:thirty_two_shuffled:v12",
        "killed:sender_dies_after_one_message:v12",
        "rxe:fused_to_one",
        "rxe:fused_flush_4_qps",
        "rxe:long_messages",
        "rxe:children_have_everything",
        "rxe:forks_names_the_registration",
        "fork_calls:children_live:v12",
    ];
    list("ffi", &[&["--timeout", "400", "--"], &cases[..]].concat());
}

/// softrnic and rxe are asked the same; what differs is what its list says, no less and no more.
#[test]
fn softrnic_differs_from_the_kernel_as_it_says() {
    list("differ", &[]);
}

/// Both ends of the bench; every byte of its checked pass.
#[test]
fn the_bench_runs_through_the_kernel() {
    list("bench", &[]);
}

/// Each kind of first pin on pages that must stay movable, in a CMA reserve and in ZONE_MOVABLE.
#[test]
fn the_first_pin_decides_whether_a_page_registers() {
    list("matrix", &["--tries", "3", "cma", "zone"]);
}

/// Buffers like those: the reason is named and the data are copied. And the plugin's own memory, where each new page is
/// of that kind.
#[test]
fn the_plugin_goes_on_where_a_page_does_not_register() {
    list("bounce", &["cma", "zone"]);
}

#[test]
fn rdma_core_withholds_pages_from_children() {
    list("fork", &[]);
}

// ---- the whole list -------------------------------------------------------------------------------------------------

#[test]
#[ignore = "of the whole list: make lab"]
fn the_devices_work_on_the_newer_kernel_in_namespaces() {
    list("check", &["--kernel", "cma", "--netns"]);
}

#[test]
#[ignore = "of the whole list: make lab"]
fn softrnic_differs_from_the_newer_kernel_as_it_says() {
    list("differ", &["--kernel", "cma"]);
}

/// Messages, groups of receives and flushes, over one queue pair and several: through every table.
#[test]
#[ignore = "of the whole list: make lab"]
fn every_table_moves_data_through_the_kernel() {
    list(
        "ffi",
        &["--timeout", "3000", "--", "transfer:sizes_*", "transfer:sent_*", "group", "flush"],
    );
}

/// All else that a kernel's device can serve, in the newest table.
#[test]
#[ignore = "of the whole list: make lab"]
fn every_case_that_a_kernel_serves_passes() {
    let programs =
        ["connect", "closing", "killed", "register", "inflight", "errors", "unload", "limits"];
    let cases = programs.map(|program| format!("{program}:*:v12"));
    let cases: Vec<&str> = cases.iter().map(String::as_str).chain(["rxe"]).collect();
    list(
        "ffi",
        &[&["--mem", "7G", "--timeout", "3000", "--env", "LAB_CASE_LIMIT=300", "--"], &cases[..]]
            .concat(),
    );
}

#[test]
#[ignore = "of the whole list: make lab"]
fn the_plugin_moves_data_between_namespaces() {
    let cases = ["rxe:two_namespaces", "rxe:two_namespaces_4_qps"];
    list("ffi", &[&["--kernel", "cma", "--netns", "--"], &cases[..]].concat());
}

/// The bench with four queue pairs, with receives of eight members, and with two plugin files (here the same twice).
#[test]
#[ignore = "of the whole list: make lab"]
fn the_bench_compares_plugin_files() {
    let plugin = concat!(env!("CARGO_MANIFEST_DIR"), "/dist/libnccl-net-pinrail.so");
    let small = ["--begin", "8", "--end", "64K", "--factor", "8", "--window", "8", "--iters", "20"];
    for more in [["--qps", "4"], ["--recvs", "8"]] {
        list("bench", &[&["--", "--plugin", plugin], &more[..], &small[..]].concat());
    }
    let output = lab("ab", &[plugin, plugin]).output().expect("lab/ab starts");
    let said = text(&output.stdout);
    println!("{said}");
    assert!(output.status.success(), "{}", text(&output.stderr));
    // A row of B for each of five sizes, with a ratio.
    let rows: Vec<&str> = said.lines().filter(|line| line.trim_start().starts_with("B ")).collect();
    assert_eq!(rows.len(), 5, "{said}");
    for row in rows {
        let ratio = row.split_whitespace().last().and_then(|last| last.parse::<f64>().ok());
        assert!(ratio.is_some_and(|ratio| ratio > 0.0), "no ratio in {row:?}");
    }
}

/// Twenty tries of each case, in the reserve for huge pages too.
#[test]
#[ignore = "of the whole list: make lab"]
fn the_first_pin_decides_every_time() {
    list("matrix", &["cma", "hugetlb", "zone"]);
}

/// What the kernel does in a registration that works and in one that does not.
#[test]
#[ignore = "of the whole list: make lab"]
fn the_trace_tells_why_a_page_does_not_register() {
    for setting in ["cma", "zone"] {
        let output = lab("matrix", &["--trace", setting]).output().expect("lab/matrix starts");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let story = text(&output.stdout);
        println!("{story}");
        let case = |letter: char| {
            let from = story.find(&format!("case {letter}: ")).unwrap_or_else(|| panic!("{story}"));
            story[from..].split("\n\n").next().expect("some text")
        };
        let (good, bad) = (case('A'), case('B'));
        for step in [
            "pin_user_pages_fast address=",
            "(FOLL_LONGTERM)",
            "nr_succeeded=4 nr_failed=0",
            " 4 moved",
            "<- rxe_reg_user_mr = ok",
        ] {
            assert!(good.contains(step), "no {step:?} in {good}");
        }
        for step in [
            "nr_succeeded=0 nr_failed=4",
            " 0 moved, 4 held by somebody else",
            "<- pin_user_pages_fast = -ENOMEM",
            "<- rxe_reg_user_mr = -ENOMEM",
        ] {
            assert!(bad.contains(step), "no {step:?} in {bad}");
        }
    }
}

/// Every table, where a page does not register.
#[test]
#[ignore = "of the whole list: make lab"]
fn every_table_goes_on_where_a_page_does_not_register() {
    list("bounce", &["cma", "--", "stuck:two_processes"]);
}

#[test]
#[ignore = "of the whole list: make lab"]
fn rdma_core_withholds_pages_from_children_on_the_newer_kernel() {
    list("fork", &["--kernel", "cma"]);
    let cases = ["rxe:children_have_everything", "rxe:forks_names_the_registration"];
    list("ffi", &[&["--kernel", "cma", "--"], &cases[..]].concat());
}
