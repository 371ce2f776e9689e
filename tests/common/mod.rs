//! What the integration tests share: where the artefacts are, and how a C test program is built and run.
#![allow(dead_code)] // Each test program uses a part.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The repository's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The shipped plugin; a missing one is a failure that says what to do.
pub fn plugin() -> PathBuf {
    artefact("dist/libnccl-net-pinrail.so")
}

/// The software RNIC's verbs library.
pub fn softrnic() -> PathBuf {
    artefact("dist/softrnic/libibverbs.so.1")
}

fn artefact(path: &str) -> PathBuf {
    let full = root().join(path);
    assert!(full.exists(), "{} is missing: run `make` first", full.display());
    full
}

/// Where the C programs and their output go.
pub fn programs() -> PathBuf {
    root().join("target/ffi-tests")
}

/// Builds the C programs, once for all tests of this binary.
pub fn build_programs() {
    static BUILT: OnceLock<Result<(), String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let make = Command::new("make")
            .args(["-s", "-f", "ffi-tests/ffi.mk"])
            .current_dir(root())
            .output();
        match make {
            Ok(done) if done.status.success() => Ok(()),
            Ok(done) => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
            Err(error) => Err(format!("make does not start ({error}): apt-get install make gcc")),
        }
    });
    if let Err(text) = built {
        panic!("the C test programs do not build:\n{text}");
    }
}

/// Runs a tool and returns what it prints; names the Debian package when there is no such tool.
pub fn tool(name: &str, package: &str, arguments: &[&str]) -> String {
    let done =
        Command::new(name).args(arguments).current_dir(root()).output().unwrap_or_else(|error| {
            panic!("{name} does not start ({error}): apt-get install {package}")
        });
    assert!(
        done.status.success(),
        "{name} {arguments:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    String::from_utf8(done.stdout).expect("the tool prints text")
}

/// One run of one case of a C program.
#[derive(Debug)]
pub struct Run<'a> {
    /// The program in `target/ffi-tests`.
    pub program: &'a str,
    /// The case, as `--list` prints it.
    pub case: &'a str,
    /// The version of the table, for a case that has one.
    pub version: Option<u32>,
    /// A command in front of the program, such as valgrind.
    pub wrapper: &'a [&'a str],
    /// Extra environment.
    pub environment: &'a [(&'a str, &'a str)],
    /// When the run counts as hung. The program has a shorter deadline of its own and knows where it stands.
    pub deadline: Duration,
}

impl Run<'_> {
    fn label(&self) -> String {
        let version = self.version.map(|v| format!("-v{v}")).unwrap_or_default();
        let wrapper = self.wrapper.first().map(|w| format!("-{w}")).unwrap_or_default();
        format!("{}-{}{version}{wrapper}", self.program, self.case)
    }

    fn command(&self) -> Command {
        let program = programs().join(self.program);
        let mut command = match self.wrapper.split_first() {
            Some((tool, arguments)) => {
                let mut command = Command::new(tool);
                command.args(arguments).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.arg(self.case);
        if let Some(version) = self.version {
            command.arg(format!("v{version}"));
        }
        // The environment of whoever runs the tests must not decide them.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["NCCL_", "PINRAIL_", "SOFTRNIC_", "FFI_", "IBV_", "RDMAV_"]
                .iter()
                .any(|p| text.starts_with(p))
            {
                command.env_remove(&name);
            }
        }
        command
            .current_dir(root())
            .env(
                "SOFTRNIC_FABRIC",
                format!("ffi-{}-{}", std::process::id(), self.label()).replace('_', "-"),
            )
            .env("FFI_PLUGIN", plugin())
            .env("FFI_SOFTRNIC", softrnic())
            .envs(self.environment.iter().copied());
        command
    }

    /// Runs the case and fails with its output unless it ends with status 0 within the deadline.
    pub fn expect_success(&self) {
        build_programs();
        let folder = programs().join("log");
        std::fs::create_dir_all(&folder).expect("the folder for output can be made");
        let path = folder.join(self.label() + ".txt");
        let output = File::create(&path).expect("the file for output can be made");
        let mut command = self.command();
        command
            .stdin(Stdio::null())
            .stderr(output.try_clone().expect("a descriptor can be copied"))
            .stdout(output);
        let mut child =
            command.spawn().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
        let ended = ends_within(&child, self.deadline);
        if !ended {
            // The program's own processes die with it.
            child.kill().expect("a child of ours can be killed");
        }
        let status = child.wait().expect("a child of ours can be waited for");
        if !ended || !status.success() {
            let text = std::fs::read(&path).unwrap_or_default();
            let hung = if ended { "" } else { " (killed at the deadline)" };
            panic!(
                "{}: {status}{hung}\n{}",
                self.label(),
                shortened(&String::from_utf8_lossy(&text))
            );
        }
    }
}

/// Beginning and end of a long output; the end holds the failure.
fn shortened(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() <= 120 {
        return text.to_owned();
    }
    let omitted = lines.len() - 100;
    format!(
        "{}\n[{omitted} lines]\n{}",
        lines[..20].join("\n"),
        lines[lines.len() - 80..].join("\n")
    )
}

fn ends_within(child: &std::process::Child, deadline: Duration) -> bool {
    let pid =
        i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process has a number");
    let handle = pidfd_open(pid, PidfdFlags::empty()).expect("a handle of a child can be opened");
    let limit =
        Timespec { tv_sec: i64::try_from(deadline.as_secs()).expect("a short time"), tv_nsec: 0 };
    let mut waiting = [PollFd::new(&handle, PollFlags::IN)];
    loop {
        match poll(&mut waiting, Some(&limit)) {
            Ok(ready) => return ready > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }
}
