//! What the bench's tests share: running the program, the fixture plugins, the built files.
#![allow(dead_code, unused_imports)]

#[path = "../../../client/fixture/mod.rs"]
mod plugins;

pub use plugins::{fixture, not_a_plugin, scratch};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Longest time a run may take before it counts as hung. Nothing is measured with it.
pub const HANG_S: u64 = 120;

/// The program under test.
pub fn bench() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinrail-bench"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env_remove("FIXTURE_FAULT").env_remove("NCCL_IBVERBS_LIB");
    command
}

/// Runs to the end and returns exit status, standard output and standard error.
pub fn finish(mut command: Command) -> (i32, String, String) {
    let output = command.output().expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let Output { status, stdout, stderr } = output;
    (status.code().unwrap_or(-1), text(&stdout), text(&stderr))
}

/// The bench on a fixture. The fixture needs no verbs library; any file does for one.
pub fn on_fixture(version: u8) -> Command {
    let plugin = fixture(version);
    let mut command = bench();
    command.arg("--plugin").arg(&plugin).arg("--verbs-lib").arg(&plugin);
    command
}

/// A file of dist/, which `make` builds. Missing is a failure, not a skipped test.
pub fn dist(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist").join(name);
    assert!(path.exists(), "dist/{name} is missing: run make before cargo test");
    path
}

/// The bench on the built plugin and softrnic.
pub fn on_softrnic() -> Command {
    let mut command = bench();
    command.arg("--plugin").arg(dist("libnccl-net-pinrail.so"));
    command.arg("--verbs-lib").arg(dist("softrnic/libibverbs.so.1"));
    command
}

/// Processes whose parent is `parent`.
pub fn children(parent: u32) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut found: Vec<i32> = entries
        .flatten()
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // "pid (name) state parent …", and the name may contain anything.
            let parent_field = stat.rsplit(')').next()?.split_whitespace().nth(1)?;
            (parent_field.parse() == Ok(parent)).then_some(pid)
        })
        .collect();
    found.sort_unstable();
    found
}

/// Whether a process exists and is no zombie.
pub fn alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()) != Some("Z")
    })
}

/// Polls until a condition holds.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed().as_secs() < HANG_S, "waited too long until {what}");
        std::thread::yield_now();
    }
}

/// Kills one process that a test started.
pub fn kill(pid: i32) {
    let status = Command::new("kill").arg("-9").arg(pid.to_string()).status();
    assert!(status.is_ok_and(|status| status.success()), "killed {pid}");
}

/// A JSON file.
pub fn json(path: &Path) -> serde_json::Value {
    let text = std::fs::read_to_string(path).expect("the JSON file is there");
    serde_json::from_str(&text).expect("it is JSON")
}
