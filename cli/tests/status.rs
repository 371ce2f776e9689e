//! `pinrail status` on processes that are really there. The program with connections is `mover.py`; the plugin and the
//! software RNIC are those in dist/.

use nccl_net_pinrail::memory::status::layout::{BLOCK, MAGIC, NAME, VERSION, header};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const PINRAIL: &str = env!("CARGO_BIN_EXE_pinrail");
/// Long enough for a busy machine; nothing waits so long that works.
const PATIENCE: Duration = Duration::from_secs(60);

fn artefact(path: &str) -> PathBuf {
    let full = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    assert!(full.exists(), "{} is missing: run `make` first", full.display());
    full.canonicalize().expect("a path")
}

fn number() -> u32 {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// A folder that goes away with the value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let name = format!("pinrail-status-{}-{}", std::process::id(), number());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    /// The JSON files whose names begin so.
    fn records(&self, kind: &str) -> Vec<Value> {
        let entries = std::fs::read_dir(&self.0).expect("a folder").flatten();
        let names = entries.map(|entry| entry.file_name().into_string().expect("text"));
        names
            .filter(|name| name.starts_with(&format!("pinrail-{kind}-")))
            .map(|name| std::fs::read_to_string(self.0.join(name)).expect("text"))
            .map(|text| serde_json::from_str(&text).expect("JSON"))
            .collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left is no failure.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `mover.py`, which is killed with the value.
struct Mover {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    fabric: String,
}

impl Mover {
    fn start(environment: &[(&str, &str)]) -> Self {
        let fabric = format!("status-{}-{}", std::process::id(), number());
        let mut command = Command::new("python3");
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["NCCL_", "PINRAIL_", "SOFTRNIC_", "IBV_", "RDMAV_"]
                .iter()
                .any(|p| text.starts_with(p))
            {
                command.env_remove(&name);
            }
        }
        let mut child = command
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mover.py"))
            .env("NCCL_IBVERBS_LIB", artefact("dist/softrnic/libibverbs.so.1"))
            .env("PLUGIN", artefact("dist/libnccl-net-pinrail.so"))
            .env("SOFTRNIC_FABRIC", &fabric)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("python3 does not start ({e}): apt-get install python3"));
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output, fabric }
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    fn begin(&mut self, what: &str) {
        let input = self.input.as_mut().expect("it is open");
        writeln!(input, "{what}").expect("it reads");
    }

    fn end(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("text");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"))
    }

    /// Lets it do something; what it answers.
    fn does(&mut self, what: &str) -> Value {
        self.begin(what);
        let answer = self.end();
        assert_eq!(answer["did"], *what.split(' ').next().expect("a word"));
        answer
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        // It may have ended already. Its child ends with it.
        self.input = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A fabric that nobody is attached to, if this was the last one to be killed.
        let own = format!(".{}", self.fabric);
        for entry in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|n| n.starts_with("softrnic.") && n.ends_with(&own)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

fn pinrail(arguments: &[&str]) -> Output {
    Command::new(PINRAIL).arg("status").args(arguments).output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// Text and exit code.
fn told(arguments: &[&str], code: i32) -> String {
    let out = pinrail(arguments);
    let shown = text(&out.stdout);
    assert_eq!(out.status.code(), Some(code), "{shown}{}", text(&out.stderr));
    assert!(!shown.contains('\u{1b}'), "colour where nobody looks: {shown:?}");
    shown
}

/// What is wrong, where nothing could be told.
fn refused(pid: &str) -> String {
    let out = pinrail(&[pid]);
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stdout));
    let document = json(&[pid], 2);
    assert_eq!(document["verdict"], "unknown");
    text(&out.stderr)
}

fn json(arguments: &[&str], code: i32) -> Value {
    let shown = told(&[arguments, &["--json"]].concat(), code);
    let value: Value = serde_json::from_str(&shown).unwrap_or_else(|e| panic!("{e}: {shown}"));
    assert_eq!(value["exit_code"], code);
    value
}

/// The sending and the receiving end of the last connection.
fn ends(document: &Value) -> [Value; 2] {
    let ends = document["processes"][0]["status"]["ends"].as_array().expect("ends");
    ["send", "receive"].map(|direction| {
        let of = ends.iter().filter(|end| end["direction"] == direction);
        of.max_by_key(|end| end["number"].as_u64()).expect("an end").clone()
    })
}

/// Asks until it is so.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "{what} is not so after {PATIENCE:?}");
        std::thread::yield_now();
    }
}

fn samples(end: &Value, stage: &str) -> u64 {
    let all = end["latency"].as_array().expect("latencies");
    all.iter().find(|one| one["of"] == stage).expect(stage)["samples"].as_u64().expect("a count")
}

#[test]
fn messages_and_bytes_are_those_that_the_program_counted() {
    let mut mover = Mover::start(&[]);
    let pid = mover.pid();
    mover.does("open");
    let (mut messages, mut bytes) = (0, 0);
    let mut check = |mover: &mut Mover, what: &str, count: u64, size: u64| {
        mover.does(what);
        messages += count;
        bytes += count * size;
        for end in ends(&json(&[&pid], 0)) {
            assert_eq!(
                (&end["messages"], &end["bytes"]),
                (&messages.into(), &bytes.into()),
                "{end}"
            );
            assert_eq!(end["receives_posted"], end["receives_completed"]);
            assert_eq!((&end["state"], &end["waits"]), (&"open".into(), &Value::Null), "{end}");
            assert_eq!(end["rails"][0]["bytes"], bytes);
        }
    };
    check(&mut mover, "move 1 1", 1, 1);
    check(&mut mover, "move 1000 4097", 1000, 4097);
    check(&mut mover, "move 3 0", 3, 0);
    check(&mut mover, "group 8 1000", 8, 1000);
    check(&mut mover, "move 700 1048576", 700, 1 << 20);
    let [sender, receiver] = ends(&json(&[&pid], 0));
    // Each 64th, of receives that are advertised: a group is one.
    assert_eq!(samples(&sender, "transfer"), 1705_u64.div_ceil(64));
    assert_eq!(samples(&receiver, "transfer"), 1705_u64.div_ceil(64));
    assert_eq!(samples(&sender, "credit"), samples(&sender, "transfer"));
    assert_eq!(receiver["receives_posted"], 1705);
    // A credit each, and receives in batches of 32 to replace those that were used.
    assert_eq!(receiver["posts"], 1705 + 1705 / 32 * 32);
    // A write each, a notice behind those that are empty, and for the group the data, and the notice with the sizes.
    assert_eq!(sender["posts"], 1704 + 9);
    assert_eq!(sender["peer"]["pid"].to_string(), pid);
    assert_eq!(
        (&sender["memory"]["handles"], &sender["memory"]["bytes"]),
        (&1.into(), &(1 << 20).into())
    );

    mover.does("flush 100");
    let [_, receiver] = ends(&json(&[&pid], 0));
    let flushes = &receiver["flushes"];
    let all = flushes["begun"].as_u64().expect("a count")
        + flushes["nothing_to_do"].as_u64().expect("a count");
    assert_eq!((all, &flushes["begun"]), (100, &flushes["completed"]));

    let shown = told(&[&pid], 0);
    assert!(shown.contains("1712 messages, ") && shown.contains("nothing is wrong"), "{shown}");
    // Latencies are in seconds as soon as the process looked at both clocks.
    let known = |end: &Value| end["latency"][1]["p50_nanoseconds"].as_f64();
    let p50 = until("the pace of the ticks", || known(&ends(&json(&[&pid], 0))[0]));
    assert!(p50 > 0.0);
    mover.does("close");
    let document = json(&[&pid], 0);
    assert_eq!(document["processes"][0]["state"], "no-connection");
}

#[test]
fn what_an_end_waits_for_and_since_when() {
    let mut mover = Mover::start(&[]);
    let pid = mover.pid();
    mover.does("open");
    mover.does("move 5 10");
    assert_eq!(mover.does("vain")["taken"], false);
    let [sender, receiver] = ends(&json(&[&pid], 0));
    assert_eq!((&sender["waits"]["for"], &receiver["waits"]), (&"credit".into(), &Value::Null));
    mover.does("post");
    let [sender, receiver] = ends(&json(&[&pid], 0));
    assert_eq!(receiver["waits"]["for"], "completion");
    assert_eq!((&receiver["waits"]["receives"], &sender["messages"]), (&1.into(), &5.into()));
    let waited = until("the event thread saw the wait", || {
        ends(&json(&[&pid], 0))[1]["waits"]["seconds"].as_f64()
    });
    assert!(waited >= 0.0);
    until("the wait is long enough to be a problem", || {
        let out = pinrail(&[&pid, "--stalled", "0.05"]);
        (out.status.code() == Some(1)).then(|| {
            let shown = text(&out.stdout);
            assert!(
                shown.contains("waits for completion of 1 receive: the peer's data for"),
                "{shown}"
            );
        })
    });
    // What nobody is waited for has no time.
    mover.does("move 0 0");
    assert_eq!(json(&[&pid], 0)["verdict"], "fine");
}

#[test]
fn numbers_for_prometheus() {
    let mut mover = Mover::start(&[]);
    let pid = mover.pid();
    mover.does("open");
    mover.does("move 200 100");
    let page = until("the pace of the ticks", || {
        let page = told(&[&pid, "--prometheus"], 0);
        page.contains("pinrail_latency_seconds_bucket").then_some(page)
    });
    let mut typed = std::collections::HashMap::new();
    let mut seen = std::collections::HashSet::new();
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert!(typed.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
        } else if !line.starts_with('#') {
            let (sample, value) = line.rsplit_once(' ').expect("a sample");
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert!(seen.insert(sample.to_owned()), "{sample} twice");
            let name = sample.split('{').next().expect("a name");
            let family =
                ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let known = typed.contains_key(name)
                || family.is_some_and(|f| typed.get(f).is_some_and(|kind| kind == "histogram"));
            assert!(known, "{name} has no type");
        }
    }
    let sent = page.lines().find(|line| {
        line.starts_with("pinrail_bytes_total{") && line.contains("direction=\"send\"")
    });
    assert!(sent.expect("bytes").ends_with(" 20000"), "{sent:?}");
}

#[test]
fn all_processes_of_this_user_are_found() {
    let mut movers: Vec<_> = (0..2).map(|_| Mover::start(&[])).collect();
    for mover in &mut movers {
        mover.does("open");
    }
    // Others may run beside this test, with whatever verdict.
    let out = pinrail(&["--json"]);
    let document: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let found = document["processes"].as_array().expect("a list");
    for mover in &movers {
        let pid = Value::from(mover.child.id());
        let one = found.iter().find(|one| one["pid"] == pid).expect("found");
        assert_eq!(one["state"], "read");
    }
}

#[test]
fn who_has_nothing_to_show() {
    // Without the plugin, without a process, ended and not reaped.
    let mut sleeper = Command::new("sleep").arg("1000").spawn().expect("sleep");
    let pid = sleeper.id().to_string();
    assert!(refused(&pid).contains("has no pinrail loaded"));
    sleeper.kill().expect("it runs");
    until("it has ended", || refused(&pid).contains("has ended").then_some(()));
    sleeper.wait().expect("it ended");
    assert!(refused(&pid).contains("there is no process"));

    // Turned off: neither a file nor a thread that looks.
    let mut mover = Mover::start(&[("PINRAIL_STATUS", "0")]);
    let pid = mover.pid();
    mover.does("open");
    mover.does("move 100 100");
    let document = json(&[&pid], 0);
    assert_eq!(document["processes"][0]["state"], "no-connection");
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a folder").flatten();
    let named =
        |path: PathBuf| std::fs::read_link(path).is_ok_and(|l| l.to_string_lossy().contains(NAME));
    assert!(!links.map(|entry| entry.path()).any(named));
    mover.does("close");
}

#[test]
fn a_forked_child_shows_nothing_of_its_parent() {
    let mut mover = Mover::start(&[]);
    mover.does("open");
    mover.does("move 10 10");
    let child = mover.does("fork")["pid"].to_string();
    let document = json(&[&child], 0);
    assert_eq!(document["processes"][0]["state"], "no-connection");
    // The child has the descriptor, and the parent goes on.
    mover.does("move 10 10");
    assert_eq!(ends(&json(&[&mover.pid()], 0))[0]["messages"], 20);
}

#[test]
fn nobody_can_harm_the_process_through_the_file() {
    let mut mover = Mover::start(&[]);
    let pid = mover.pid();
    mover.does("open");
    let file = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("a folder")
        .flatten()
        .map(|entry| entry.path())
        .find(|path| std::fs::read_link(path).is_ok_and(|l| l.to_string_lossy().contains(NAME)))
        .expect("the file");
    // Only root can open it for writing; nobody can write it or make it shorter.
    if let Ok(open) = File::options().read(true).write(true).open(&file) {
        assert!(open.set_len(0).is_err());
        assert!(open.write_at(b"x", 0).is_err());
        // SAFETY: a new mapping, which is refused.
        let mapped = unsafe {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&open);
            libc::mmap(std::ptr::null_mut(), BLOCK, libc::PROT_WRITE, libc::MAP_SHARED, fd, 0)
        };
        assert_eq!(mapped, libc::MAP_FAILED);
    }
    mover.does("move 100 100");
    assert_eq!(ends(&json(&[&pid], 0))[0]["messages"], 100);
}

/// A file of this process under the plugin's name.
fn planted(content: &[u8], seal: bool) -> OwnedFd {
    let file = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file");
    ftruncate(&file, content.len() as u64).expect("a size");
    let file = File::from(file);
    file.write_all_at(content, 0).expect("room");
    if seal {
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("a seal");
    }
    file.into()
}

/// One test, because all of it is about this process.
#[test]
fn a_file_that_is_no_status_says_why() {
    let pid = std::process::id().to_string();
    let header_with = |words: &[(usize, u64)]| {
        let mut content = vec![0_u8; 2 * BLOCK];
        for (word, value) in words {
            content[word * 8..word * 8 + 8].copy_from_slice(&value.to_ne_bytes());
        }
        content
    };
    let of = |version| {
        [(header::MAGIC, MAGIC), (header::VERSION, version), (header::BLOCK, BLOCK as u64)]
    };
    for (content, seal, reason) in [
        (vec![], true, "it is empty"),
        (vec![0; BLOCK], true, "it is empty"),
        (vec![7; 100], true, "it is empty"),
        (vec![7; 3 * BLOCK], true, "no status of pinrail"),
        (header_with(&of(VERSION)), false, "not sealed"),
        (header_with(&of(VERSION + 1)), true, "version 2 of the format"),
        (header_with(&of(VERSION)[..2]), true, "damaged"),
        (
            header_with(&[of(VERSION).as_slice(), &[(header::PID, u64::MAX)]].concat()),
            true,
            "damaged",
        ),
    ] {
        let file = planted(&content, seal);
        let said = refused(&pid);
        assert!(said.contains(reason), "{reason}: {said}");
        drop(file);
    }
    // Of another process: as if it were not there.
    let file = planted(&header_with(&of(VERSION)), true);
    assert!(refused(&pid).contains("has no pinrail loaded"));
    drop(file);
}

#[test]
fn connections_may_come_and_go_meanwhile() {
    let mut mover = Mover::start(&[]);
    let pid = mover.pid();
    mover.does("open");
    mover.begin("churn 60");
    let (mut looks, mut most) = (0, 0);
    let done = std::thread::scope(|scope| {
        let done = scope.spawn(|| mover.end());
        while !done.is_finished() {
            let out = pinrail(&[&pid, "--json"]);
            let document: Value = serde_json::from_slice(&out.stdout).expect("JSON");
            // The one that stays is always there; a board that was just being written is a doubt.
            let code = out.status.code().expect("no signal");
            assert!(code == 0 || code == 2, "{document}");
            let ends = document["processes"][0]["status"]["ends"].as_array().expect("ends").len();
            (looks, most) = (looks + 1, most.max(ends));
        }
        done.join().expect("an answer")
    });
    assert_eq!(done["did"], "churn");
    assert!(looks > 0 && most >= 2, "{looks} looks, {most} ends at most");
    let status = &json(&[&pid], 0)["processes"][0]["status"];
    assert_eq!(
        (&status["ends_opened"], status["ends"].as_array().expect("ends").len()),
        (&122.into(), 2)
    );
}

#[test]
fn a_failure_is_shown_and_written_down() {
    let folder = Folder::new();
    let place = folder.0.to_str().expect("text");
    let mut mover = Mover::start(&[("PINRAIL_REPORT_DIR", place)]);
    let pid = mover.pid();
    mover.does("open");
    mover.does("move 7 9");
    assert_ne!(mover.does("fail")["result"], 0);
    let document = json(&[&pid], 1);
    let end = &document["processes"][0]["status"]["ends"][0];
    assert_eq!(
        (&end["direction"], &end["state"], &end["error"]["blame"]),
        (&"send".into(), &"failed".into(), &"peer".into())
    );
    assert!(
        end["error"]["message"].as_str().expect("text").contains("the peer closed the connection"),
        "{end}"
    );
    assert!(told(&[&pid], 1).contains("failed: "));
    let [record] = &folder.records("status")[..] else { panic!("not one record") };
    assert_eq!((&record["ends_failed"], &record["ends"][0]["messages"]), (&1.into(), &7.into()));
    assert_eq!(folder.records("connection").len(), 1);
}

#[test]
fn a_signal_writes_the_status_down_where_that_was_asked_for() {
    let folder = Folder::new();
    let place = folder.0.to_str().expect("text");
    let mut mover = Mover::start(&[("PINRAIL_REPORT_DIR", place), ("PINRAIL_STATUS_SIGNAL", "1")]);
    mover.does("open");
    mover.does("move 3 3");
    let pid = libc::pid_t::try_from(mover.child.id()).expect("a number");
    // SAFETY: our own child, which has a handler.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGUSR2) }, 0);
    let record = until("the record is there", || folder.records("status").pop());
    assert_eq!(record["ends"][0]["messages"], 3);
    mover.does("move 3 3");
    mover.does("close");
    // The handler went with the last connection: now the signal has its default again.
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGUSR2) }, 0);
    let status = mover.child.wait().expect("our own child");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGUSR2));
}

#[test]
fn watching_ends_with_the_process() {
    let mut mover = Mover::start(&[]);
    mover.does("open");
    mover.does("move 4 4");
    let mut watch = Command::new(PINRAIL)
        .args(["status", &mover.pid(), "--watch=0.05", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the command starts");
    let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
    for _ in 0..3 {
        let document: Value =
            serde_json::from_str(&lines.next().expect("a line").expect("text")).expect("JSON");
        assert_eq!(ends(&document)[0]["messages"], 4);
    }
    drop(mover);
    let last = lines.map_while(Result::ok).last().expect("a last line");
    assert!(last.contains("\"exit_code\":2"), "{last}");
    assert_eq!(watch.wait().expect("our own child").code(), Some(2));
}
