//! The `softrnic` command: what it shows of a process and does to it, from outside. The process it acts on is this one.

mod common;

use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::verbs::*;
use softrnic::abi::*;
use softrnic::capi::devices::{ibv_query_gid, ibv_query_port};
use softrnic::capi::faults::softrnic_faults;

/// The tests act on the whole process, so they take turns. The plan ends with the turn.
struct Turn(#[allow(dead_code)] MutexGuard<'static, ()>);

impl Drop for Turn {
    fn drop(&mut self) {
        // SAFETY: NULL is allowed.
        unsafe { softrnic_faults(std::ptr::null()) };
    }
}

fn turn() -> Turn {
    static TURN: Mutex<()> = Mutex::new(());
    setup(&[("SOFTRNIC_RETRY_MS", "1"), ("SOFTRNIC_DEVICES", "2"), ("SOFTRNIC_PORTS", "2")]);
    Turn(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Runs the command; exit status and output.
fn softrnic(words: &[&str], input: &str) -> (Option<i32>, String) {
    use std::io::Write as _;
    let program = common::lib_dir().join("softrnic");
    let mut command = common::client(program.to_str().expect("UTF-8 path"), setup(&[]));
    // It has devices of its own, which must not be taken for those of the process.
    command.env_remove("SOFTRNIC_DEVICES").env_remove("SOFTRNIC_PORTS").stdin(Stdio::piped());
    let mut child = command.args(words).spawn().expect("softrnic starts");
    // A command that does not read its input may be gone already.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    let out = child.wait_with_output().expect("softrnic ends");
    let text = [out.stdout, out.stderr].concat();
    (out.status.code(), String::from_utf8(text).expect("UTF-8"))
}

fn me() -> String {
    std::process::id().to_string()
}

/// A command on this process that has to succeed.
fn on_me(name: &str, words: &[&str], input: &str) -> String {
    let me = me();
    let words = [&[name, me.as_str()], words].concat();
    let (status, text) = softrnic(&words, input);
    assert_eq!(status, Some(0), "{words:?}: {text}");
    text
}

fn port_state(p: &Pair) -> u32 {
    let mut port = PortAttr::default();
    // SAFETY: a live handle and our own structure.
    assert_eq!(unsafe { ibv_query_port(p.device.context, 1, &raw mut port) }, 0);
    port.state
}

#[test]
fn rules_are_set_added_counted_and_ended() {
    let _turn = turn();
    let p = Pair::new();
    assert_eq!(on_me("faults", &[], ""), "no rules\n");
    on_me("faults", &["set", "-"], "seed=3\ndevice=softrnic1 -> drop\nnth=2 -> status=rem-op\n");
    on_me("faults", &["add", "-"], "op=send -> drop # later\n");
    assert_eq!(p.write(8), WC_SUCCESS);
    assert_eq!(p.write(8), WC_REM_OP_ERR);
    assert_eq!(
        on_me("faults", &[], ""),
        "rule 0: matched 0, fired 0: device=softrnic1 -> drop\n\
         rule 1: matched 2, fired 1: nth=2 -> status=rem-op\n\
         rule 2: matched 0, fired 0: op=send -> drop\n"
    );
    let full = "-> drop\n".repeat(62);
    let (status, text) = softrnic(&["faults", &me(), "add", "-"], &full);
    assert!(status == Some(1) && text.contains("more than 64 rules; leave some out"), "{text}");
    on_me("faults", &["clear"], "");
    assert_eq!(on_me("faults", &[], ""), "no rules\n");
    assert_eq!(Pair::new().write(8), WC_SUCCESS);
}

#[test]
fn a_plan_is_checked_against_the_devices_of_the_process() {
    let _turn = turn();
    let _p = Pair::new();
    let plan = "# two devices\ndevice=softrnic1 op=write -> drop\n";
    let (status, text) = softrnic(&["check", "-", "softrnic0,softrnic1"], plan);
    assert_eq!((status, text.as_str()), (Some(0), "device=softrnic1 op=write -> drop\n"));
    let (status, text) = softrnic(&["check", "-"], plan);
    assert_eq!(status, Some(1));
    assert!(
        text.contains("-, line 2: device=softrnic1 is unknown; use one of softrnic0"),
        "{text}"
    );
    on_me("faults", &["set", "-"], plan);
    let (status, text) = softrnic(&["faults", &me(), "set", "-"], "device=mlx5_0 -> drop");
    assert_eq!(status, Some(1));
    assert!(text.contains("use one of softrnic0, softrnic1"), "{text}");
    assert!(on_me("faults", &[], "").contains("device=softrnic1"), "the old plan is left alone");
    let (status, text) = softrnic(&["check", "/nonexistent/plan"], "");
    assert!(status == Some(1) && text.contains("/nonexistent/plan: No such file"), "{text}");
}

#[test]
fn processes_queue_pairs_and_counters_are_shown() {
    let _turn = turn();
    let p = Pair::new();
    assert_eq!(p.write(8), WC_SUCCESS);
    let (status, text) = softrnic(&["ps"], "");
    assert_eq!(status, Some(0), "{text}");
    let mine: Vec<&str> = text.lines().filter(|l| l.starts_with(&format!("{}/", me()))).collect();
    assert_eq!(mine.len(), 4, "two devices of two ports each: {text}");
    assert!(mine[0].contains("softrnic0") && mine[3].contains("softrnic1"), "{text}");
    assert_eq!(text.lines().count(), 5, "the command does not show itself: {text}");

    let text = on_me("qps", &[], "");
    let ordinal = softrnic::qp::Qp::by_number(p.a.num()).expect("live").ordinal;
    let line = text.lines().find(|l| l.starts_with(&format!("{:#x} ", p.a.num()))).expect("a line");
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let to = format!("{:#x}", p.b.num());
    assert_eq!(words[1..], [&ordinal.to_string(), "RTS", "softrnic0", "1", &to].map(str::to_owned));

    let read = |text: &str| -> u64 {
        let line = text.lines().find_map(|l| l.strip_prefix("post_write ")).expect("a line");
        line.trim().parse().expect("a number")
    };
    let before = read(&on_me("counters", &[], ""));
    assert_eq!(p.write(8), WC_SUCCESS);
    assert_eq!(read(&on_me("counters", &[], "")), before + 1);
}

#[test]
fn ports_gids_and_queue_pairs_are_broken_from_outside() {
    let _turn = turn();
    let p = Pair::new();
    on_me("port", &["softrnic0", "1", "down"], "");
    assert_eq!(p.device.event(), (EVENT_PORT_ERR, 1));
    assert_eq!(port_state(&p), PORT_DOWN);
    assert_eq!(p.write(8), WC_RETRY_EXC_ERR);
    on_me("port", &["softrnic0", "1", "up"], "");
    assert_eq!(p.device.event(), (EVENT_PORT_ACTIVE, 1));
    assert_eq!(port_state(&p), PORT_ACTIVE);

    let p = Pair::new();
    let gid = || {
        let mut gid = Gid::default();
        // SAFETY: a live handle and our own structure.
        assert_eq!(unsafe { ibv_query_gid(p.device.context, 1, 0, &raw mut gid) }, 0);
        std::net::Ipv6Addr::from(gid.raw).to_string()
    };
    let old = gid();
    on_me("gid", &["softrnic0", "1", "0", "fe80::77"], "");
    assert_eq!(p.device.event(), (EVENT_GID_CHANGE, 1));
    assert_eq!(gid(), "fe80::77");
    on_me("gid", &["softrnic0", "1", "0", &old], "");
    assert_eq!(gid(), old);

    // One that waits for a receive, and nobody polls while it is broken.
    let p = Pair::new();
    let mut wr = rdma(WR_RDMA_WRITE_WITH_IMM, 4, SEND_SIGNALED, &mut [], 0, 0);
    assert_eq!(p.a.send(&mut wr), 0);
    on_me("kill-qp", &[&format!("{:#x}", p.a.num())], "");
    assert_eq!(p.device.event(), (EVENT_QP_FATAL, p.a.qp.expose_provenance() as u64));
    let wc = wait(p.cq_a);
    assert_eq!((wc.wr_id, wc.status), (4, WC_WR_FLUSH_ERR));
    assert_eq!((p.a.query().qp_state, p.b.query().qp_state), (QPS_ERR, QPS_RTS));
}

#[test]
fn a_device_dies_from_outside() {
    let _turn = turn();
    let close = || {
        for context in softrnic::objects::CONTEXTS.all() {
            context.close();
        }
        softrnic::objects::CONTEXTS.purge();
    };
    close();
    let p = Pair::new();
    on_me("device-fatal", &["softrnic0"], "");
    assert_eq!(p.device.event(), (EVENT_DEVICE_FATAL, 0));
    assert_eq!(p.write(8), WC_WR_FLUSH_ERR);
    let (_, text) = softrnic(&["ps"], "");
    assert_eq!(text.lines().filter(|l| l.contains("softrnic0") && l.contains("dead")).count(), 2);
    assert_eq!(text.lines().filter(|l| l.contains("softrnic1") && l.contains("active")).count(), 2);
    close();
    assert_eq!(Pair::new().write(8), WC_SUCCESS);
}

#[test]
fn what_cannot_be_done_is_said_with_what_helps() {
    let _turn = turn();
    let _p = Pair::new();
    let me = me();
    for (words, status, complaint) in [
        (vec![], 2, "no command"),
        (vec!["pss"], 2, "there is no command pss"),
        (vec!["port", "1"], 2, "port is not used like that"),
        (vec!["qps", "self"], 2, "self is no process; give a PID"),
        (vec!["qps", "1"], 1, "process 1 has no device open in fabric rust-"),
        (vec!["qps", &me, "x"], 2, "qps is not used like that"),
        (vec!["port", &me, "mlx5_0", "1", "down"], 1, "the process has softrnic0, softrnic1"),
        (vec!["port", &me, "softrnic0", "3", "down"], 1, "softrnic0 has no port 3; softrnic ps"),
        (vec!["port", &me, "softrnic0", "x", "down"], 2, "port x is no number"),
        (vec!["port", &me, "softrnic0", "1", "sideways"], 2, "port is not used like that"),
        (vec!["gid", &me, "softrnic0", "1", "0", "home"], 2, "write 10.0.0.9 or fe80::1"),
        (vec!["gid", &me, "softrnic0", "1", "9", "::1"], 1, "has no GID 9; softrnic ps"),
        (vec!["kill-qp", &me, "0x123456"], 1, "no queue pair 0x123456; softrnic qps"),
        (vec!["device-fatal", &me, "eth0"], 1, "no device eth0"),
    ] {
        let (got, text) = softrnic(&words, "");
        assert_eq!(got, Some(status), "{words:?}: {text}");
        assert!(text.starts_with("softrnic: ERROR ") && text.contains(complaint), "{text}");
        assert_eq!(text.contains("softrnic ps      "), status == 2, "usage when it helps: {text}");
    }
    let (status, text) = softrnic(&["help"], "");
    assert_eq!(status, Some(0));
    let readme = include_str!("../README.md");
    for line in text.lines().filter(|l| l.starts_with("  softrnic ")) {
        assert!(readme.contains(line.trim()), "README.md lacks {line}");
    }
}

/// What is no plain file is neither waited for nor read to its end, wherever a plan is named.
#[test]
fn a_plan_is_a_plain_file_of_some_length() {
    let _turn = turn();
    let _p = Pair::new();
    let folder = std::env::temp_dir().join(format!("softrnic-plans-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let fifo = folder.join("fifo");
    let name = std::ffi::CString::new(fifo.to_str().expect("UTF-8")).expect("no NUL");
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let long = folder.join("long");
    std::fs::write(&long, "#".repeat((1 << 20) + 1)).expect("written");
    let me = me();
    for (file, complaint) in [
        (fifo.to_str().expect("UTF-8"), "it is no plain file"),
        ("/dev/zero", "it is no plain file"),
        (folder.to_str().expect("UTF-8"), "it is no plain file"),
        (long.to_str().expect("UTF-8"), "it is longer than 1048576 bytes"),
        ("/no/such/plan", "No such file"),
    ] {
        for words in [vec!["check", file], vec!["faults", &me, "set", file]] {
            let (status, text) = softrnic(&words, "");
            assert_eq!(status, Some(1), "{words:?}: {text}");
            assert!(text.contains(complaint), "{words:?}: {text}");
        }
        let mut devices = common::client("ibv_devices", setup(&[]));
        let output = devices.env("SOFTRNIC_FAULTS", file).output().expect("ibv_devices starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("SOFTRNIC_FAULTS=") && text.contains(complaint), "{file}: {text}");
    }
    let (status, text) = softrnic(&["check", "-"], &"#".repeat((1 << 20) + 1));
    assert!(status == Some(1) && text.contains("longer than"), "{text}");
    std::fs::remove_dir_all(&folder).expect("removed");
}

#[test]
fn an_answer_that_cannot_be_written_is_a_failure() {
    let program = common::lib_dir().join("softrnic");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let mut command = common::client(program.to_str().expect("UTF-8 path"), setup(&[]));
    let output = command.arg("help").stdout(full).output().expect("softrnic starts");
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("cannot be written: No space left"), "{text}");
}

#[test]
fn a_stopped_process_and_one_without_a_fabric_are_no_obstacle() {
    let _turn = turn();
    let fabric = setup(&[]);
    let target = common::peer::Target::start(fabric, &[]);
    // SAFETY: a plain system call on a child of ours.
    assert_eq!(unsafe { libc::kill(target.pid, libc::SIGSTOP) }, 0);
    let pid = target.pid.to_string();
    let deadline = Instant::now() + Duration::from_secs(60);
    let (status, text) = softrnic(&["qps", &pid], "");
    assert!(status == Some(0) && text.contains(&format!("{:#x}", target.qpn)), "{text}");
    assert_eq!(softrnic(&["kill-qp", &pid, &target.qpn.to_string()], "").0, Some(0));
    let (_, text) = softrnic(&["qps", &pid], "");
    assert!(text.contains("ERR"), "{text}");
    assert!(Instant::now() < deadline);
    drop(target);
    let other = common::fabric("command-empty");
    let program = common::lib_dir().join("softrnic");
    let mut command = common::client(program.to_str().expect("UTF-8 path"), &other);
    let child = common::Guarded(command.arg("ps").spawn().expect("starts"));
    let (ok, text) = common::finish(child, Instant::now() + Duration::from_secs(60));
    assert!(ok && text.lines().count() == 1, "{text}");
    // Its fabric is gone with it.
    // SAFETY: no arguments.
    let path = format!("/dev/shm/softrnic.{}.{other}", unsafe { libc::geteuid() });
    assert!(!std::path::Path::new(&path).exists());
}
