//! Semantics between processes: the target is another program, sometimes stopped, sometimes killed.

mod common;

use std::ptr::null_mut;

use common::peer::{Target, field};
use common::verbs::*;
use softrnic::abi::*;

/// A QP of this process, connected to a target process.
struct Far {
    cq: *mut IbvCq,
    qp: Qp,
    buf: Buf,
    local: Region,
    target: Target,
}

const SIZE: usize = 4 << 20;

impl Far {
    fn new(args: &[&str]) -> Self {
        let fabric = setup(&[]);
        Self::with(Target::start(fabric, args))
    }

    fn with(mut target: Target) -> Self {
        let device = Device::open();
        let cq = device.cq(64);
        let qp = device.qp(cq, cq, null_mut(), cap());
        let buf = Buf::new(SIZE);
        let local = device.reg(&buf, ALL);
        qp.connect_to(target.qpn);
        target.ask(&format!("connect {}", qp.num()));
        Self { cq, qp, buf, local, target }
    }

    fn post(&self, opcode: u32, len: u32, at: u64) {
        let mut sge = [self.local.sge(0, len)];
        let (remote, key) = (self.target.addr + at, self.target.rkey);
        let mut wr = rdma(opcode, 1, SEND_SIGNALED, &mut sge, remote, key);
        wr.atomic_rkey = key;
        if len == 0 {
            wr.num_sge = 0;
        }
        assert_eq!(self.qp.send(&mut wr), 0);
    }

    fn run(&self, opcode: u32, len: u32, at: u64) -> u32 {
        self.post(opcode, len, at);
        wait(self.cq).status
    }
}

#[test]
fn operations_reach_the_other_process() {
    for args in [&[][..], &["dmabuf"]] {
        let mut far = Far::new(args);
        far.buf.put(0, &77_u64.to_ne_bytes());
        assert_eq!(far.run(WR_RDMA_WRITE, 8, 4096), WC_SUCCESS);
        assert_eq!(far.target.ask("word 4096"), "word 77");
        far.target.ask("set 8 123");
        assert_eq!(far.run(WR_RDMA_READ, 16, 0), WC_SUCCESS);
        assert_eq!(far.buf.word(8), 123);
        let mut sge = [far.local.sge(0, 8)];
        let mut add = wr(WR_ATOMIC_FETCH_AND_ADD, 1, SEND_SIGNALED, &mut sge);
        (add.remote_addr, add.rkey_or_compare, add.atomic_rkey) =
            (far.target.addr + 8, 2, far.target.rkey);
        assert_eq!(far.qp.send(&mut add), 0);
        assert_eq!((wait(far.cq).status, far.buf.word(0)), (WC_SUCCESS, 123));
        assert_eq!(far.target.ask("word 8"), "word 125");
        far.target.ask("recv 1 0");
        assert_eq!(far.run(WR_RDMA_WRITE_WITH_IMM, 5000, 0), WC_SUCCESS);
        let wc = far.target.ask("poll");
        assert_eq!((field(&wc, "status"), field(&wc, "opcode"), field(&wc, "len")), (0, 129, 5000));
        assert_eq!((field(&wc, "flags"), field(&wc, "qpn")), (2, u64::from(far.target.qpn)));
    }
}

#[test]
fn a_stopped_target_is_still_written() {
    let mut far = Far::new(&[]);
    far.target.ask("recv 2 0");
    far.target.signal(libc::SIGSTOP);
    far.target.await_state('T');
    far.buf.put(0, &5_u64.to_ne_bytes());
    for at in [0, 1 << 20] {
        assert_eq!(far.run(WR_RDMA_WRITE, 4096, at), WC_SUCCESS);
    }
    assert_eq!(far.run(WR_RDMA_WRITE_WITH_IMM, 8, 64), WC_SUCCESS);
    assert_eq!(far.target.state(), 'T');
    far.target.signal(libc::SIGCONT);
    assert_eq!(far.target.ask("word 1048576"), "word 5");
    assert_eq!(field(&far.target.ask("poll"), "len"), 8);
}

#[test]
fn a_killed_target_ends_in_retry_exceeded() {
    // With payload the copy notices, without payload the liveness check.
    for len in [8, 0] {
        let mut far = Far::new(&[]);
        assert_eq!(far.run(WR_RDMA_WRITE, len, 0), WC_SUCCESS);
        far.target.kill();
        assert_eq!(
            far.run(WR_RDMA_WRITE, len, 0),
            WC_RETRY_EXC_ERR,
            "length {len}, target unreaped"
        );
        far.post(WR_RDMA_WRITE, 8, 0);
        assert_eq!(wait(far.cq).status, WC_WR_FLUSH_ERR);
    }
}

#[test]
fn a_request_that_waits_for_a_receive_ends_when_the_target_is_killed() {
    let mut far = Far::new(&[]);
    far.post(WR_RDMA_WRITE_WITH_IMM, 0, 0);
    assert!(poll(far.cq).is_none());
    far.target.kill();
    assert_eq!(wait(far.cq).status, WC_RETRY_EXC_ERR);
}

#[test]
fn a_request_that_waits_is_resumed_by_the_other_process() {
    let mut far = Far::new(&[]);
    far.post(WR_RDMA_WRITE_WITH_IMM, 0, 0);
    assert!(poll(far.cq).is_none());
    // Only the target looks for the completion: the assisting thread of this process delivers.
    far.target.ask("recv 1 0");
    assert_eq!(field(&far.target.ask("poll"), "status"), 0);
    assert_eq!(wait(far.cq).status, WC_SUCCESS);
}

#[test]
fn a_destroyed_qp_does_not_answer() {
    let mut far = Far::new(&[]);
    far.target.ask("destroy");
    assert_eq!(far.run(WR_RDMA_WRITE, 8, 0), WC_RETRY_EXC_ERR);
}

#[test]
fn an_access_error_breaks_the_target_and_tells_it() {
    let mut far = Far::new(&[]);
    far.target.ask("recv 1 0");
    assert_eq!(far.run(WR_RDMA_WRITE, 8, SIZE as u64 - 7), WC_REM_ACCESS_ERR);
    assert_eq!(far.target.ask("event"), format!("event {EVENT_QP_ACCESS_ERR}"));
    assert_eq!(field(&far.target.ask("poll"), "status"), u64::from(WC_WR_FLUSH_ERR));
}

/// A target with a fault plan of its own, in the file that its environment names.
fn with_plan(plan: &str) -> Far {
    let fabric = setup(&[]);
    let path = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("{}.plan", common::fabric("target")));
    std::fs::write(&path, plan).expect("write the plan");
    let program = common::compile("target");
    let mut command = common::client(program.to_str().expect("UTF-8 path"), fabric);
    command.env("SOFTRNIC_FAULTS", &path).stdin(std::process::Stdio::piped());
    let far = Far::with(Target::run(command));
    std::fs::remove_file(path).expect("remove the plan");
    far
}

#[test]
fn the_other_process_breaks_by_its_own_plan() {
    // A plan of the target, and a rule about its own requests that ours do not count for.
    let mut far = with_plan(
        "-> drop\nside=remote op=write bytes=8 nth=2 -> corrupt=8\nside=remote op=write-imm -> status=loc-prot\n",
    );
    far.buf.put(0, &77_u64.to_ne_bytes());
    for (bytes, changed) in [(8, false), (4096, false), (8, true), (8, false)] {
        assert_eq!(far.run(WR_RDMA_WRITE, bytes, 0), WC_SUCCESS);
        assert_eq!(far.target.ask("word 0") != "word 77", changed, "{bytes} bytes");
    }
    far.target.ask("recv 1 0");
    assert_eq!(far.run(WR_RDMA_WRITE_WITH_IMM, 8, 0), WC_REM_OP_ERR);
    assert_eq!(field(&far.target.ask("poll"), "status"), u64::from(WC_LOC_PROT_ERR));
    assert_eq!(far.target.ask("event"), format!("event {EVENT_QP_FATAL}"));

    let mut far = with_plan("side=remote nth=3 -> port-down for=20ms\n");
    for _ in 0..2 {
        assert_eq!(far.run(WR_RDMA_WRITE, 8, 0), WC_SUCCESS);
    }
    // Its retries last longer than the port is down; who took it down takes it up again.
    assert_eq!(far.run(WR_RDMA_WRITE, 8, 0), WC_SUCCESS);
    assert_eq!(far.target.ask("event"), format!("event {EVENT_PORT_ERR}"));
    assert_eq!(far.target.ask("event"), format!("event {EVENT_PORT_ACTIVE}"));

    let mut far = with_plan("side=remote nth=1 -> device-fatal at=end\n");
    far.target.ask("recv 1 0");
    assert_eq!(far.run(WR_RDMA_WRITE, 8, 0), WC_SUCCESS);
    assert_eq!(far.target.ask("event"), format!("event {EVENT_DEVICE_FATAL}"));
    assert_eq!(field(&far.target.ask("poll"), "status"), u64::from(WC_WR_FLUSH_ERR));
    assert_eq!(far.run(WR_RDMA_WRITE, 8, 0), WC_RETRY_EXC_ERR);
}

#[test]
fn other_fabrics_are_out_of_reach() {
    setup(&[]);
    let elsewhere = common::fabric("elsewhere");
    let far = Far::with(Target::start(&elsewhere, &[]));
    assert_eq!(far.run(WR_RDMA_WRITE, 0, 0), WC_RETRY_EXC_ERR);
    drop(far);
    // SAFETY: no arguments.
    let uid = unsafe { libc::geteuid() };
    std::fs::remove_file(format!("/dev/shm/softrnic.{uid}.{elsewhere}"))
        .expect("left by a killed process");
}

#[test]
fn the_directory_survives_killed_processes() {
    let fabric = common::fabric("stale");
    let mut dead: Vec<Target> = (0..3).map(|_| Target::start(&fabric, &[])).collect();
    dead.iter_mut().for_each(Target::kill);
    let numbers: Vec<u32> = dead.iter().map(|t| t.qpn >> 16).collect();
    // SAFETY: no arguments.
    let uid = unsafe { libc::geteuid() };
    let path = format!("/dev/shm/softrnic.{uid}.{fabric}");
    assert!(std::path::Path::new(&path).exists(), "nobody cleaned up");
    // Newcomers take over the slots of the dead, although those are not even reaped.
    let mut live: Vec<Target> = (0..3).map(|_| Target::start(&fabric, &[])).collect();
    let mut taken: Vec<u32> = live.iter().map(|t| t.qpn >> 16).collect();
    taken.sort_unstable();
    assert_eq!(taken, numbers);
    let (first, rest) = live.split_at_mut(1);
    first[0].ask(&format!("connect {}", rest[0].qpn));
    rest[0].ask(&format!("connect {}", first[0].qpn));
    std::fs::remove_file(&path).expect("removed after the test");
}

#[test]
fn many_processes_have_distinct_numbers() {
    let fabric = common::fabric("many");
    let targets: Vec<Target> = (0..64).map(|_| Target::start(&fabric, &[])).collect();
    let numbers: std::collections::BTreeSet<u32> = targets.iter().map(|t| t.qpn).collect();
    assert_eq!(numbers.len(), 64);
    // SAFETY: no arguments.
    let uid = unsafe { libc::geteuid() };
    drop(targets);
    std::fs::remove_file(format!("/dev/shm/softrnic.{uid}.{fabric}"))
        .expect("left by killed processes");
}

#[test]
fn the_last_word_of_a_payload_becomes_visible_last() {
    for (bytes, rounds) in [(64_u32, 3000_u64), (4096, 1000), (65536, 100)] {
        let mut far = Far::new(&[]);
        far.target.tell(&format!("watch {bytes} {rounds}"));
        for round in 1..=rounds {
            let block = round.to_ne_bytes().repeat(bytes as usize / 8);
            far.buf.put(0, &block);
            assert_eq!(far.run(WR_RDMA_WRITE, bytes, 0), WC_SUCCESS);
        }
        assert_eq!(far.target.answer(), "ok", "{bytes} bytes");
    }
}

#[test]
fn killing_targets_in_mid_transfer_leaves_errors_not_crashes() {
    for round in 0..8_u64 {
        let mut far = Far::new(&[]);
        far.target.ask("recv 400 0");
        let qp = far.qp;
        let victim = far.target.pid;
        // The killer strikes after a different number of transfers each time.
        let mut sent = 0;
        let status = loop {
            far.post(
                if sent % 2 == 0 { WR_RDMA_WRITE } else { WR_RDMA_WRITE_WITH_IMM },
                SIZE as u32,
                0,
            );
            if sent == round {
                // SAFETY: a plain system call on our own child, which is not reaped before `far` is dropped.
                assert_eq!(unsafe { libc::kill(victim, libc::SIGKILL) }, 0);
            }
            sent += 1;
            let status = wait(far.cq).status;
            if status != WC_SUCCESS {
                break status;
            }
        };
        assert_eq!(status, WC_RETRY_EXC_ERR);
        assert_eq!(qp.query().qp_state, QPS_ERR);
        assert_eq!((qp.destroy(), far.local.dereg()), (0, 0));
    }
}

#[test]
fn a_requester_killed_in_mid_transfer_leaves_no_lock_behind() {
    for _ in 0..8 {
        let fabric = setup(&[]);
        let mut requester = Target::start(fabric, &[]);
        let mut responder = Target::start(fabric, &[]);
        requester.ask(&format!("connect {}", responder.qpn));
        responder.ask(&format!("connect {}", requester.qpn));
        requester.ask("set 0 7");
        requester.tell(&format!("blast {} {}", responder.addr, responder.rkey));
        while responder.ask("word 0") != "word 7" {}
        requester.kill();
        // Destroying takes every lock that the requester may have died with.
        assert_eq!(responder.ask("destroy"), "ok");
    }
}

#[test]
fn refused_memory_access_fails_the_connection_and_says_what_helps() {
    use std::os::unix::process::CommandExt;
    // SAFETY: no arguments.
    let root = unsafe { libc::geteuid() } == 0;
    // Root may access anything, so both processes give their privileges up. Then they need copies they may read.
    let fabric = common::fabric("refused");
    let copy = std::env::temp_dir().join(&fabric);
    std::fs::create_dir(&copy).expect("fresh directory");
    std::fs::copy(common::lib_dir().join("libibverbs.so.1"), copy.join("libibverbs.so.1"))
        .expect("copy");
    let program = copy.join("target");
    std::fs::copy(common::compile("target"), &program).expect("copy");
    let start = |args: &[&str]| {
        let mut command = std::process::Command::new(&program);
        command.args(args).env("LD_LIBRARY_PATH", &copy).env("SOFTRNIC_FABRIC", &fabric);
        command.current_dir("/").stdin(std::process::Stdio::piped());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        if root {
            command.uid(65534).gid(65534);
        }
        Target::run(command)
    };
    let hidden = start(&["undumpable"]);
    let open = start(&[]);
    let mut other = start(&[]);
    other.tell(&format!("connect {}", open.qpn));
    assert_eq!(other.any_answer(), "ok", "without the flag the same processes connect");
    let mut refused = start(&[]);
    refused.tell(&format!("connect {}", hidden.qpn));
    assert_eq!(refused.any_answer(), format!("error rtr errno={}", libc::EACCES));
    let text = refused.stderr();
    assert!(text.contains("cannot access the memory") && text.contains("ptrace_scope"), "{text}");
    drop((hidden, open, other));
    std::fs::remove_dir_all(&copy).expect("removed");
}
