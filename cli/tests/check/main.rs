//! `pinrail check` on plugins that are right, wrong, damaged or not there.

#[path = "../../../client/fixture/mod.rs"]
mod plugins;

mod conformance;
mod load;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What a run said.
struct Report {
    code: i32,
    document: Value,
}

impl Report {
    /// Findings of a level: check, what, evidence, remedy.
    fn findings(&self, level: &str) -> Vec<[String; 4]> {
        let text =
            |finding: &Value, key: &str| finding[key].as_str().unwrap_or_default().to_owned();
        self.document["findings"]
            .as_array()
            .expect("findings")
            .iter()
            .filter(|finding| finding["level"] == level)
            .map(|finding| ["check", "what", "evidence", "remedy"].map(|key| text(finding, key)))
            .collect()
    }

    /// The one problem, which decides.
    fn problem(&self) -> [String; 4] {
        let mut problems = self.findings("problem");
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(self.code, 1, "{problems:?}");
        problems.remove(0)
    }
}

/// The command, in an environment that says nothing of NCCL.
fn pinrail() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinrail"));
    for name in
        ["NCCL_NET_PLUGIN", "NCCL_NET", "NCCL_IBVERBS_LIB", "FIXTURE_FAULT", "LD_LIBRARY_PATH"]
    {
        command.env_remove(name);
    }
    // No configuration file of whoever runs the tests.
    command.env("HOME", "/nonexistent").arg("check");
    command
}

fn report(mut command: Command) -> Report {
    let output: Output = command.arg("--json").output().expect("the command starts");
    let document = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let report = Report { code: output.status.code().expect("a status"), document };
    assert_eq!(report.document["exit_code"], report.code);
    report
}

/// A file of dist/, which `make` builds. Missing is a failure, not a skipped test.
fn dist(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist").join(name);
    path.canonicalize()
        .unwrap_or_else(|_| panic!("dist/{name} is missing: run make before cargo test"))
}
