//! `pinrail forks` on processes that are really there. The parent with its workers is `parent.py`; the plugin and the
//! software RNIC are those in dist/.

use nccl_net_pinrail::host::process::ProcessId;
use nccl_net_pinrail::host::procfs::Proc;
use nccl_net_pinrail::memory::inventory::layout::{self, HEADER, header};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

const PINRAIL: &str = env!("CARGO_BIN_EXE_pinrail");

fn artefact(path: &str) -> PathBuf {
    let full = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    assert!(full.exists(), "{} is missing: run `make` first", full.display());
    full.canonicalize().expect("a path")
}

/// A folder that goes away with the value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("pinrail-forks-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left is no failure.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `parent.py`, which is killed with the value.
struct Parent {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    fabric: String,
}

impl Parent {
    fn start(how: &str, place: &str, environment: &[(&str, &str)]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let fabric =
            format!("forks-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parent.py");
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
        let verbs = artefact("dist/softrnic/libibverbs.so.1");
        let mut child = command
            .arg(script)
            .args([how, place])
            .env("VERBS", &verbs)
            .env("NCCL_IBVERBS_LIB", &verbs)
            .env("PLUGIN", artefact("dist/libnccl-net-pinrail.so"))
            .env("SOFTRNIC_FORK", "old-kernel")
            .env("SOFTRNIC_FABRIC", &fabric)
            // By default the plugin keeps memory that shares its pages off the device, and there is nothing to find.
            .env("PINRAIL_FORK_COLLATERAL", "register")
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("python3 does not start ({e}): apt-get install python3"));
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output, fabric }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next thing it has to say.
    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("text");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"))
    }

    fn go_on(&mut self) {
        writeln!(self.input).expect("it reads");
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A fabric that nobody is attached to, if this was the last one to be killed.
        let own = format!(".{}", self.fabric);
        for entry in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            if entry
                .file_name()
                .to_str()
                .is_some_and(|name| name.starts_with("softrnic.") && name.ends_with(&own))
            {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

fn pinrail(arguments: &[&str]) -> Output {
    Command::new(PINRAIL).arg("forks").args(arguments).output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// Text and exit code about a process.
fn told(arguments: &[&str], code: i32) -> String {
    let out = pinrail(arguments);
    let shown = text(&out.stdout);
    assert_eq!(out.status.code(), Some(code), "{shown}{}", text(&out.stderr));
    assert!(!shown.contains('\u{1b}'), "colour where nobody looks: {shown:?}");
    shown
}

fn json(arguments: &[&str], code: i32) -> Value {
    let shown = told(&[arguments, &["--json"]].concat(), code);
    let value: Value = serde_json::from_str(&shown).unwrap_or_else(|e| panic!("{e}: {shown}"));
    assert_eq!(value["exit_code"], code);
    value
}

#[test]
fn four_bytes_that_the_plugin_registered_are_named() {
    let folder = Folder::new();
    let inventory = folder.0.to_str().expect("text");
    let mut parent = Parent::start("plugin", "heap", &[("PINRAIL_INVENTORY", inventory)]);
    let said = parent.line();
    // The crash, and that nothing else was its cause.
    assert_eq!((&said["before"], &said["during"]), (&0.into(), &(-libc::SIGSEGV).into()), "{said}");
    let pid = parent.pid().to_string();
    let address = said["address"].as_str().expect("text");
    let file = folder.0.join(format!("pinrail.{pid}"));
    assert!(file.exists());

    let shown = told(&[&pid], 1);
    assert!(shown.contains("registered by pinrail for its caller"), "{shown}");
    assert!(
        shown.contains("flush scratch, softrnic0") || shown.contains("credits and size records"),
        "{shown}"
    );
    let all = json(&[&pid], 1);
    assert_eq!((&all["verdict"], &all["inventory"]["state"]), (&"withheld".into(), &"read".into()));
    assert_eq!(all["inventory"]["path"], file.to_str().expect("text"));
    assert_eq!(all["totals"]["asked_bytes"], 4);
    assert_eq!(all["totals"]["collateral_bytes"], 4092);
    // What the plugin registered for itself harms nobody.
    assert_eq!(all["totals"]["unexplained_bytes"], 0);
    let owners: Vec<_> =
        all["withheld"].as_array().expect("a list").iter().map(|one| &one["owner"]).collect();
    assert_eq!(owners.iter().filter(|owner| **owner == "given").count(), 1, "{owners:?}");
    assert!(
        owners.len() >= 3 && owners.iter().all(|owner| *owner == "given" || *owner == "pinrail")
    );

    let shown = told(&[&pid, "--core-address", address], 1);
    let line = format!("4 bytes asked for at {address} by regMr: receives from ");
    assert!(shown.contains(&line), "{shown}");
    assert!(
        shown.contains("4 bytes asked for, 4096 bytes withheld: 4092 bytes of collateral"),
        "{shown}"
    );
    let one = json(&[&pid, "--core-address", address], 1);
    let by = &one["address"]["registrations"][0];
    assert_eq!(
        (&by["kind"], &by["device"], &by["asked"]["bytes"]),
        (&"host".into(), &"softrnic0".into(), &4.into())
    );
    assert!(by["site"].as_str().expect("text").contains(&format!("pid {pid}")), "{by}");

    parent.go_on();
    assert_eq!(parent.line()["after"], 0);
    assert!(!file.exists(), "the file outlives the last registration");
    let all = json(&[&pid], 0);
    assert_eq!(
        (&all["verdict"], &all["inventory"]["state"]),
        (&"nothing-withheld".into(), &"absent".into())
    );
    assert_eq!(json(&[&pid, "--core-address", address], 0)["verdict"], "inherited");
}

/// What the plugin does unless it is told otherwise.
#[test]
fn memory_that_shares_its_pages_is_kept_off_the_device() {
    let mut parent = Parent::start("plugin", "heap", &[("PINRAIL_FORK_COLLATERAL", "bounce")]);
    let said = parent.line();
    assert_eq!((&said["before"], &said["during"]), (&0.into(), &0.into()), "{said}");
    let all = json(&[&parent.pid().to_string()], 0);
    assert_eq!(all["verdict"], "harmless");
    let withheld = all["withheld"].as_array().expect("a list");
    assert!(withheld.len() >= 3 && withheld.iter().all(|one| one["owner"] == "pinrail"), "{all}");
    parent.go_on();
    assert_eq!(parent.line()["after"], 0);
}

#[test]
fn a_page_of_its_own_is_the_cure() {
    let mut parent = Parent::start("plugin", "own", &[]);
    let said = parent.line();
    assert_eq!((&said["before"], &said["during"]), (&0.into(), &0.into()), "{said}");
    let pid = parent.pid().to_string();
    let one = json(&[&pid, "--core-address", said["address"].as_str().expect("text")], 1);
    assert_eq!(one["address"]["registrations"][0]["asked"]["bytes"], 4);
    assert_eq!(one["address"]["mapping"]["owner"], "given");
    parent.go_on();
    assert_eq!(parent.line()["after"], 0);
    assert!(!Path::new(&format!("/dev/shm/pinrail.{pid}")).exists());
}

/// Where nothing is published there is still the mapping, its flags, and what it was cut out of.
#[test]
fn a_process_without_the_plugin_is_understood_as_far_as_can_be() {
    for how in ["madvise", "verbs"] {
        let mut parent = Parent::start(how, "heap", &[]);
        let said = parent.line();
        assert_eq!(
            (&said["before"], &said["during"]),
            (&0.into(), &(-libc::SIGSEGV).into()),
            "{how}: {said}"
        );
        let pid = parent.pid().to_string();
        let address = said["address"].as_str().expect("text");
        let shown = told(&[&pid], 1);
        assert!(
            shown.contains("inventory unknown") && shown.contains("cut out of anonymous memory"),
            "{shown}"
        );
        let one = json(&[&pid, "--core-address", address], 1);
        assert_eq!(
            (&one["verdict"], &one["inventory"]["state"]),
            (&"withheld".into(), &"absent".into())
        );
        assert_eq!(one["address"]["mapping"]["owner"], "unknown");
        assert_eq!(one["address"]["mapping"]["bytes"], 4096);
        assert_eq!(one["totals"]["unexplained_bytes"], 4096);
        parent.go_on();
        assert_eq!(parent.line()["after"], 0);
        assert_eq!(json(&[&pid], 0)["verdict"], "nothing-withheld");
    }
}

#[test]
fn the_inventory_can_be_turned_off() {
    let mut parent = Parent::start("plugin", "heap", &[("PINRAIL_INVENTORY", "off")]);
    assert_eq!(parent.line()["during"], -libc::SIGSEGV);
    let pid = parent.pid().to_string();
    assert!(!Path::new(&format!("/dev/shm/pinrail.{pid}")).exists());
    assert_eq!(json(&[&pid], 1)["inventory"]["state"], "absent");
}

#[test]
fn a_folder_that_cannot_be_written_is_no_failure() {
    let mut parent = Parent::start("plugin", "heap", &[("PINRAIL_INVENTORY", "/no/such/folder")]);
    assert_eq!(parent.line()["during"], -libc::SIGSEGV);
    parent.go_on();
    assert_eq!(parent.line()["after"], 0);
}

#[test]
fn what_cannot_be_told_is_said() {
    for (arguments, says) in [
        (&["4000000000"][..], "there is no process 4000000000"),
        (&["0"], "0 is not in 1.."),
        (&["x"], "invalid"),
        (&["1", "--core-address", "xyz"], "hexadecimal"),
        (&[], "PID"),
    ] {
        let out = pinrail(arguments);
        assert_eq!(out.status.code(), Some(2), "{arguments:?}");
        assert!(text(&out.stderr).contains(says), "{arguments:?}: {}", text(&out.stderr));
        assert_eq!(text(&out.stdout), "");
    }
    let unknown = json(&["4000000000"], 2);
    assert_eq!(unknown["verdict"], "unknown");
    assert!(unknown["error"].as_str().expect("text").contains("no process"));
}

#[test]
fn a_zombie_has_no_memory() {
    let mut child = Command::new("true").spawn().expect("it starts");
    // SAFETY: all-zero is a value of this plain struct, and the pointer is valid; the child is left to be waited for.
    let ended = unsafe {
        let mut info = std::mem::zeroed::<libc::siginfo_t>();
        libc::waitid(libc::P_PID, child.id(), &mut info, libc::WEXITED | libc::WNOWAIT)
    };
    assert_eq!(ended, 0);
    let out = pinrail(&[&child.id().to_string()]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("has no memory"), "{}", text(&out.stderr));
    child.wait().expect("a child of ours");
}

#[test]
fn a_process_that_may_not_be_looked_at_is_named() {
    let folder = Folder::new();
    let script = "import ctypes, sys; ctypes.CDLL(None).prctl(4, 0); print('ready', flush=True); sys.stdin.readline()";
    let mut child = Command::new("python3")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 starts");
    let mut ready = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut ready).expect("text");
    // Root may look at everything and asks as nobody, from where nobody can start it.
    let copy = folder.0.join("pinrail");
    std::fs::copy(PINRAIL, &copy).expect("a copy");
    let mut command = Command::new(&copy);
    if rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    let out = command.args(["forks", &child.id().to_string()]).output().expect("it starts");
    drop(child.stdin.take());
    child.wait().expect("a child of ours");
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("run this as its user or as root"), "{}", text(&out.stderr));
}

#[test]
fn processes_that_end_meanwhile_are_no_crash() {
    for _ in 0..40 {
        let mut dying = Command::new("true").spawn().expect("it starts");
        let out = pinrail(&[&dying.id().to_string()]);
        dying.wait().expect("a child of ours");
        assert_eq!(out.status.signal(), None);
        assert!(matches!(out.status.code(), Some(0..=2)), "{:?} {}", out.status, text(&out.stderr));
    }
}

#[test]
fn a_reader_that_goes_away_is_no_crash() {
    let mut child = Command::new(PINRAIL)
        .args(["forks", &std::process::id().to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    drop(child.stdout.take());
    let out = child.wait_with_output().expect("a child of ours");
    assert!(matches!(out.status.code(), Some(0..=1)), "{:?} {}", out.status, text(&out.stderr));
    assert_eq!(text(&out.stderr), "");
}

#[test]
fn files_of_dead_processes_are_removed() {
    let me = ProcessId::own(&Proc::default()).expect("this process");
    let image = |id: ProcessId| {
        let mut words = vec![0_u64; HEADER / 8];
        words[header::MAGIC] = layout::MAGIC;
        words[header::VERSION] = layout::VERSION;
        words[header::PID] = id.pid.into();
        words[header::START] = id.start;
        words[header::NAMESPACE] = id.namespace;
        words[header::BOOT..header::BOOT + 2].copy_from_slice(&id.boot);
        words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>()
    };
    let folder = Folder::new();
    let put =
        |name: &str, bytes: &[u8]| std::fs::write(folder.0.join(name), bytes).expect("a file");
    // One that is alive; a number with another start; one that is gone; the same under another name; one of another
    // namespace.
    put(&format!("pinrail.{}", me.pid), &image(me));
    put("pinrail.1", &image(ProcessId { pid: 1, start: u64::MAX, ..me }));
    put("pinrail.4000000000", &image(ProcessId { pid: 4_000_000_000, ..me }));
    put("pinrail.12", &image(ProcessId { pid: 4_000_000_000, ..me }));
    put("pinrail.4000000001", &image(ProcessId { pid: 4_000_000_001, namespace: 1, ..me }));
    put("pinrail.14", b"not an inventory");
    let out = Command::new(PINRAIL)
        .args(["forks", "--json", &me.pid.to_string()])
        .env("PINRAIL_INVENTORY", &folder.0)
        .output()
        .expect("it starts");
    let value: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let removed = value["removed_stale"].to_string();
    for (name, gone) in [
        (format!("pinrail.{}", me.pid), false),
        ("pinrail.1".into(), true),
        ("pinrail.4000000000".into(), true),
        ("pinrail.12".into(), false),
        ("pinrail.4000000001".into(), false),
        ("pinrail.14".into(), false),
    ] {
        let path = folder.0.join(&name);
        assert_eq!(!path.exists(), gone, "{name}");
        assert_eq!(removed.contains(path.to_str().expect("text")), gone, "{name}: {removed}");
    }
}

/// A process may map anything under the name of an inventory.
#[test]
fn an_inventory_that_lies_is_no_crash() {
    let script = "import mmap, os, sys\n\
                  path = os.path.join(sys.argv[1], f'pinrail.{os.getpid()}')\n\
                  open(path, 'wb').write(bytes.fromhex(sys.argv[2]) * 512)\n\
                  file = open(path, 'r+b')\n\
                  shared = mmap.mmap(file.fileno(), 0)\n\
                  print('ready', flush=True)\n\
                  sys.stdin.readline()\n";
    let magic: String = layout::MAGIC.to_ne_bytes().iter().map(|b| format!("{b:02x}")).collect();
    for (pattern, says) in [
        ("ff".repeat(16), "no inventory"),
        (magic.clone() + "0100000000000000", "damaged"),
        (magic + "0900000000000000", "damaged"),
        ("00".repeat(16), "empty"),
    ] {
        let folder = Folder::new();
        let mut child = Command::new("python3")
            .args(["-c", script, folder.0.to_str().expect("text"), &pattern])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut ready = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut ready).expect("text");
        let value = json(&[&child.id().to_string()], 0);
        assert_eq!(value["inventory"]["state"], "unreadable");
        let reason = value["inventory"]["reason"].as_str().expect("text");
        assert!(reason.contains(says), "{pattern}: {reason}");
        drop(child.stdin.take());
        child.wait().expect("a child of ours");
    }
}
