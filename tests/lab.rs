//! The kernel lab (docs/kernel-lab.md): a real kernel's RDMA stack in an emulated guest.
//!
//! Needs a Debian host and minutes, so Cargo.toml keeps it out of a plain `cargo test` and `make lab` runs it. It never
//! skips itself: a guest that cannot be built or does not boot is a failure.

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

/// The shipped plugin with the distribution's libibverbs: every table, and each way in which a message travels once.
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
        "fork_calls:children_live:v12",
    ];
    list("ffi", &[&["--timeout", "400", "--"], &cases[..]].concat());
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
