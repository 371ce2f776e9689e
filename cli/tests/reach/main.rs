//! `pinrail reach` between responders that are really there: several "hosts" of softrnic on the loopback interface, and
//! two network namespaces.

mod namespaces;
mod strangers;

use rustix::net::{AddressFamily, SocketType};
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A file of dist/, which `make` builds. Missing is a failure, not a skipped test.
fn dist(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist").join(name);
    path.canonicalize()
        .unwrap_or_else(|_| panic!("dist/{name} is missing: run make before cargo test"))
}

/// A file with a text, such as a fault plan.
fn plan(name: &str, text: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// A fabric of this test's own.
fn fabric() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("reach-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The command on softrnic.
fn pinrail(fabric: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinrail"));
    command
        .arg("reach")
        .env("NCCL_IBVERBS_LIB", dist("softrnic/libibverbs.so.1"))
        .env("SOFTRNIC_FABRIC", fabric)
        .env("SOFTRNIC_DEVICES", "2")
        // A lost request is noticed at once.
        .env("SOFTRNIC_RETRY_MS", "50")
        .env("HOME", "/nonexistent")
        .env_remove("SOFTRNIC_FAULTS")
        .stdin(Stdio::null());
    command
}

/// A responder, killed where it would outlive its test.
struct Responder {
    child: Child,
    address: String,
    _output: BufReader<ChildStdout>,
}

impl Responder {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the responder starts");
        let mut output = BufReader::new(child.stdout.take().expect("its output"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("serving on ").expect("an address").to_owned();
        Self { child, address, _output: output }
    }

    /// With device names that begin with `name`.
    fn of(fabric: &str, name: &str, more: &[(&str, &str)], options: &[&str]) -> Self {
        let mut command = pinrail(fabric);
        command.args(["--serve", "--bind", "127.0.0.1", "--port", "0"]).args(options);
        command.env("SOFTRNIC_NAME", name).envs(more.iter().copied());
        Self::start(command)
    }

    /// Its exit status, once it has ended by itself.
    fn end(mut self) -> Option<i32> {
        self.child.wait().expect("an end").code()
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What one who asks was told.
struct Report {
    code: i32,
    document: Value,
}

impl Report {
    fn ask(fabric: &str, hosts: &[&str], options: &[&str]) -> Self {
        let output =
            pinrail(fabric).args(hosts).args(options).arg("--json").output().expect("runs");
        let document = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        Self { code: output.status.code().expect("a status"), document }
    }

    /// Transfers with an outcome: from and to, as `host rail`.
    fn transfers(&self, outcome: &str) -> Vec<(String, String)> {
        let end = |end: &Value| format!("{} {}", text(&end["host"]), text(&end["rail"]));
        let all = self.document["transfers"].as_array().expect("transfers").iter();
        all.filter(|one| one["outcome"] == outcome)
            .map(|one| (end(&one["from"]), end(&one["to"])))
            .collect()
    }

    fn findings(&self, level: &str) -> Vec<String> {
        let all = self.document["findings"].as_array().expect("findings").iter();
        all.filter(|finding| finding["level"] == level)
            .map(|finding| {
                format!(
                    "{}: {} | {}",
                    text(&finding["check"]),
                    text(&finding["what"]),
                    text(&finding["evidence"])
                )
            })
            .collect()
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[test]
fn every_rail_reaches_every_rail_of_the_others() {
    let fabric = fabric();
    let hosts = ["a", "b", "c"].map(|name| Responder::of(&fabric, name, &[], &[]));
    let addresses = [0, 1, 2].map(|at| hosts[at].address.as_str());
    let report = Report::ask(&fabric, &addresses, &[]);
    assert_eq!(report.code, 0, "{:?}", report.findings("problem"));
    let reached = report.transfers("reached");
    assert_eq!((reached.len(), report.document["transfers"].as_array().unwrap().len()), (24, 24));
    let pair = |from: (usize, &str), to: (usize, &str)| {
        (format!("{} {}", addresses[from.0], from.1), format!("{} {}", addresses[to.0], to.1))
    };
    assert!(reached.contains(&pair((0, "a0:1"), (2, "c1:1"))), "{reached:?}");
    assert!(reached.contains(&pair((2, "c1:1"), (0, "a0:1"))), "{reached:?}");
    // Both ends are named with the address that connections have.
    let first = &report.document["transfers"][0];
    assert!(text(&first["from"]["gid"]).contains('.'), "{first}");
    assert!(first["micros"].as_u64().is_some_and(|micros| micros > 0));
    // Who was asked has done his work.
    assert_eq!(hosts.map(Responder::end), [Some(0); 3]);
}

#[test]
fn rails_of_equal_number_alone_where_that_is_asked() {
    let fabric = fabric();
    let hosts = ["a", "b"].map(|name| Responder::of(&fabric, name, &[], &[]));
    let report = Report::ask(&fabric, &[&hosts[0].address, &hosts[1].address], &["--same-rail"]);
    assert_eq!((report.code, report.transfers("reached").len()), (0, 4));
}

/// The port goes down with the first request: whoever meets it fails, and says so in the plugin's own words.
#[test]
fn a_rail_that_is_down_is_named_once_with_the_plugins_words() {
    let fabric = fabric();
    let down = plan(
        "reach-down.plan",
        "device=b1 nth=1 -> port-down\ndevice=b1 side=remote nth=1 -> port-down\n",
    );
    let good = Responder::of(&fabric, "a", &[], &[]);
    let bad = Responder::of(&fabric, "b", &[("SOFTRNIC_FAULTS", down.to_str().unwrap())], &[]);
    let third = Responder::of(&fabric, "c", &[], &[]);
    let report = Report::ask(&fabric, &[&good.address, &bad.address, &third.address], &[]);
    assert_eq!(report.code, 1);
    let rail = format!("{} b1:1", bad.address);
    let failed = report.transfers("failed");
    assert_eq!(failed.len(), 8, "{failed:?}");
    assert!(failed.iter().all(|(from, to)| *from == rail || *to == rail), "{failed:?}");
    assert_eq!(report.transfers("reached").len(), 16);
    let problems = report.findings("problem");
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].starts_with(&format!("rail: {rail} (GID ")), "{problems:?}");
    assert!(problems[0].contains("8 transfers failed"), "{problems:?}");
    assert!(problems[0].contains("NET/pinrail"), "{problems:?}");
}

/// Damaged data are found, though every completion says success.
#[test]
fn damaged_data_are_found() {
    let fabric = fabric();
    let bad = plan("reach-corrupt.plan", "device=a0 op=write,write-imm bytes=1M.. -> corrupt\n");
    let hosts = [
        Responder::of(&fabric, "a", &[("SOFTRNIC_FAULTS", bad.to_str().unwrap())], &[]),
        Responder::of(&fabric, "b", &[], &[]),
    ];
    let report = Report::ask(&fabric, &[&hosts[0].address, &hosts[1].address], &[]);
    assert_eq!(report.code, 1);
    let failed = report.transfers("failed");
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert!(failed.iter().all(|(from, _)| from.ends_with(" a0:1")), "{failed:?}");
    let problems = report.findings("problem");
    assert!(
        problems.iter().all(|problem| problem.contains("of 1048576 arrived wrong")),
        "{problems:?}"
    );
}

#[test]
fn a_host_that_does_not_answer_costs_the_others_nothing() {
    let fabric = fabric();
    let hosts = ["a", "b"].map(|name| Responder::of(&fabric, name, &[], &[]));
    // The port is somebody's, so that no other test gets it, and nobody listens there.
    let held = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&held, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let free = SocketAddr::try_from(rustix::net::getsockname(&held).unwrap()).unwrap().to_string();
    let addresses = [&hosts[0].address, free.as_str(), &hosts[1].address];
    let report = Report::ask(&fabric, &addresses, &["--wait", "2"]);
    assert_eq!(report.code, 2);
    assert_eq!(report.transfers("reached").len(), 8);
    let unknown = report.findings("unknown");
    assert_eq!(unknown.len(), 1, "{unknown:?}");
    assert!(unknown[0].starts_with(&format!("host: {free} does not answer")), "{unknown:?}");
    assert!(unknown[0].contains("refused"), "{unknown:?}");
    drop(held);
}

/// A host without rails, and one that leaves a port out, say why.
#[test]
fn hosts_say_why_they_have_no_rails() {
    let fabric = fabric();
    let good = Responder::of(&fabric, "a", &[], &[]);
    let empty = Responder::of(&fabric, "b", &[("NCCL_IB_HCA", "mlx5")], &[]);
    let report = Report::ask(&fabric, &[&good.address, &empty.address], &[]);
    assert_eq!(report.code, 1);
    let problems = report.findings("problem");
    assert!(
        problems[0].starts_with(&format!("host: {} has no rails", empty.address)),
        "{problems:?}"
    );
    let words = "b0:1 is left out: NCCL_IB_HCA does not list it";
    assert_eq!(problems[0].matches(words).count(), 1, "{problems:?}");

    let good = Responder::of(&fabric, "a", &[], &[]);
    let half = Responder::of(&fabric, "b", &[("NCCL_IB_HCA", "=b1")], &[]);
    let report = Report::ask(&fabric, &[&good.address, &half.address], &[]);
    assert_eq!((report.code, report.transfers("reached").len()), (0, 4));
    let notes = report.findings("advice");
    assert!(notes[0].contains("b0:1 is left out"), "{notes:?}");
}

#[test]
fn text_is_for_people_and_has_no_colour_in_a_pipe() {
    let fabric = fabric();
    let hosts = ["a", "b"].map(|name| Responder::of(&fabric, name, &[], &[]));
    let output =
        pinrail(&fabric).args([&hosts[0].address, &hosts[1].address]).output().expect("runs");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(!text.contains('\x1b') && output.stderr.is_empty(), "{text}");
    for part in [
        "  0  a0:1: 100000 Mb/s, GID ",
        "from \\ to   0   1   2   3",
        "  -   -  ok  ok",
        "8 of 8 transfers",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}
