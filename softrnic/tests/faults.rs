//! Fault plans: each action and each matcher, through the control calls. They act on the whole process, so the tests
//! take turns.

mod common;

use std::ffi::CString;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::verbs::*;
use softrnic::abi::*;
use softrnic::capi::control::{softrnic_port, softrnic_set_gid};
use softrnic::capi::devices::{ibv_query_gid, ibv_query_port};
use softrnic::capi::faults::*;

/// The plan ends with the turn, so that no test meets the rules of another.
struct Turn(#[allow(dead_code)] MutexGuard<'static, ()>);

impl Drop for Turn {
    fn drop(&mut self) {
        plan("");
    }
}

fn turn() -> Turn {
    static TURN: Mutex<()> = Mutex::new(());
    setup(&[("SOFTRNIC_RETRY_MS", "1")]);
    Turn(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

fn try_plan(text: &str) -> i32 {
    let text = CString::new(text).expect("no NUL");
    // SAFETY: a NUL-terminated string.
    unsafe { softrnic_faults(text.as_ptr()) }
}

fn plan(text: &str) {
    assert_eq!(try_plan(text), 0, "{text}");
}

/// Posts a signalled request of `len` bytes and returns nothing: its completion is polled for later.
fn post(p: &Pair, opcode: u32, id: u64, len: u32) {
    let mut sge = [p.local.sge(0, len)];
    let mut wr = rdma(opcode, id, SEND_SIGNALED, &mut sge, p.remote.addr, p.remote.key);
    if opcode == WR_ATOMIC_FETCH_AND_ADD {
        wr.rkey_or_compare = 1;
        wr.atomic_rkey = p.remote.key;
    }
    assert_eq!(p.a.send(&mut wr), 0);
}

fn status(p: &Pair, opcode: u32, len: u32) -> u32 {
    post(p, opcode, 1, len);
    wait(p.cq_a).status
}

fn fill(p: &Pair) -> Vec<u8> {
    let bytes: Vec<u8> =
        (0..p.from.len()).map(|i| u8::try_from(i % 251 + 1).expect("small")).collect();
    p.from.put(0, &bytes);
    bytes
}

#[test]
fn every_status_can_be_asked_for_with_its_vendor_code() {
    let _turn = turn();
    for (code, name) in softrnic::faults::parse::STATUSES.iter().enumerate().skip(1) {
        for word in [(*name).to_owned(), code.to_string()] {
            let p = Pair::new();
            plan(&format!("op=write -> status={word} vendor=0x1234"));
            post(&p, WR_RDMA_WRITE, 1, 8);
            let wc = wait(p.cq_a);
            assert_eq!((wc.status as usize, wc.vendor_err), (code, 0x1234), "{word}");
            assert_eq!(p.a.query().qp_state, QPS_ERR);
            assert_eq!(softrnic_fault_fired(0), 1);
        }
    }
    let p = Pair::new();
    plan("-> status=rem-op");
    post(&p, WR_RDMA_WRITE, 1, 8);
    assert_eq!(wait(p.cq_a).vendor_err, 0x100 | WC_REM_OP_ERR, "as without a plan");
}

#[test]
fn the_stage_says_how_far_the_request_got() {
    let _turn = turn();
    for (at, moved, received) in
        [("start", 0, false), ("half", 500, false), ("payload", 1000, false), ("end", 1000, true)]
    {
        let p = Pair::new();
        let bytes = fill(&p);
        assert_eq!(p.b.recv(7, &mut []), 0);
        plan(&format!("op=write-imm -> status=retry-exc at={at}"));
        assert_eq!(status(&p, WR_RDMA_WRITE_WITH_IMM, 1000), WC_RETRY_EXC_ERR);
        let there = p.to.get(0, 1001);
        assert_eq!(there[..moved], bytes[..moved], "{at}");
        assert!(there[moved..].iter().all(|b| *b == 0), "{at}");
        let wc = poll(p.cq_b);
        assert_eq!(wc.map(|wc| (wc.wr_id, wc.status)), received.then_some((7, WC_SUCCESS)), "{at}");
    }
}

#[test]
fn a_lost_request_is_retried_until_the_limit() {
    let _turn = turn();
    for (at, moved) in [("start", false), ("end", true)] {
        let p = Pair::new();
        fill(&p);
        plan(&format!("op=write -> drop at={at}"));
        assert_eq!(status(&p, WR_RDMA_WRITE, 8), WC_RETRY_EXC_ERR);
        assert_eq!(p.to.word(0) != 0, moved, "{at}");
        assert_eq!(p.a.query().qp_state, QPS_ERR);
        assert_eq!(
            (softrnic_fault_matched(0), softrnic_fault_fired(0)),
            (1, 1),
            "asked once, not per retry"
        );
    }
}

#[test]
fn a_delayed_request_holds_up_its_queue_pair_only() {
    let _turn = turn();
    let (p, q) = (Pair::new(), Pair::new());
    plan(&format!("qp={} nth=1 -> delay=100ms", p.a.num()));
    fill(&p);
    for id in [1, 2] {
        post(&p, WR_RDMA_WRITE, id, 8);
    }
    post(&q, WR_RDMA_WRITE, 9, 8);
    assert_eq!(wait(q.cq_a).wr_id, 9);
    for id in [1, 2] {
        let wc = wait(p.cq_a);
        assert_eq!((wc.wr_id, wc.status), (id, WC_SUCCESS));
    }
    assert_ne!(p.to.word(0), 0);
}

#[test]
fn a_request_is_overtaken_by_other_queue_pairs() {
    let _turn = turn();
    let (p, q) = (Pair::new(), Pair::new());
    plan(&format!("qp={} nth=1 -> behind=3 for=60s", p.a.num()));
    post(&p, WR_RDMA_WRITE, 1, 8);
    for id in 0..3 {
        assert!(poll(p.cq_a).is_none(), "after {id} others");
        post(&q, WR_RDMA_WRITE, id, 8);
        assert_eq!(wait(q.cq_a).wr_id, id);
    }
    assert_eq!(wait(p.cq_a).status, WC_SUCCESS);
    // Without others the time limit ends it.
    plan("nth=1 -> behind=1000 for=1ms");
    assert_eq!(p.write(8), WC_SUCCESS);
}

#[test]
fn shuffled_pieces_arrive_whole_and_before_their_completion() {
    let _turn = turn();
    for (word, len) in
        [("shuffle", 8192), ("shuffle=7", 1000), ("shuffle=1", 64), ("shuffle=4096", 8)]
    {
        let p = Pair::new();
        let bytes = fill(&p);
        assert_eq!(p.b.recv(1, &mut []), 0);
        plan(&format!("op=write-imm -> {word}"));
        post(&p, WR_RDMA_WRITE_WITH_IMM, 1, len);
        assert_eq!(wait(p.cq_b).byte_len, len);
        let len = usize::try_from(len).expect("small");
        assert_eq!(p.to.get(0, len), bytes[..len]);
        assert_eq!(wait(p.cq_a).status, WC_SUCCESS);
        assert_eq!(softrnic_fault_fired(0), 1);
    }
}

#[test]
fn corruption_changes_so_many_bytes_of_the_copy_only() {
    let _turn = turn();
    for (opcode, n) in
        [(WR_RDMA_WRITE, 1), (WR_SEND, 5), (WR_RDMA_READ, 3), (WR_RDMA_WRITE_WITH_IMM, 2)]
    {
        let p = Pair::new();
        let bytes = fill(&p);
        let read = opcode == WR_RDMA_READ;
        if read {
            p.to.put(0, &bytes);
            p.from.put(0, &vec![0; bytes.len()]);
        }
        assert_eq!(p.b.recv(1, &mut [p.remote.sge(0, 4096)]), 0);
        plan(&format!("nth=1 -> corrupt={n}"));
        assert_eq!(status(&p, opcode, 512), WC_SUCCESS);
        let (source, copy) = if read { (&p.to, &p.from) } else { (&p.from, &p.to) };
        assert_eq!(source.get(0, 512), bytes[..512], "opcode {opcode}");
        let wrong = copy.get(0, 512).iter().zip(&bytes).filter(|(a, b)| a != b).count();
        assert_eq!(wrong, n, "opcode {opcode}");
        if opcode == WR_RDMA_WRITE {
            assert_eq!(status(&p, opcode, 512), WC_SUCCESS);
            assert_eq!(p.to.get(0, 512), bytes[..512], "only the first");
        }
    }
}

#[test]
fn a_killed_queue_pair_flushes_and_tells() {
    let _turn = turn();
    let p = Pair::new();
    plan("op=write nth=2 -> kill-qp");
    assert_eq!(p.write(8), WC_SUCCESS);
    assert_eq!(p.write(8), WC_WR_FLUSH_ERR);
    assert_eq!(p.device.event(), (EVENT_QP_FATAL, p.a.qp.expose_provenance() as u64));
    assert_eq!((p.a.query().qp_state, p.b.query().qp_state), (QPS_ERR, QPS_RTS));

    let p = Pair::new();
    assert_eq!(p.b.recv(5, &mut []), 0);
    plan(&format!("side=remote qp={} -> kill-qp", p.b.num()));
    assert_eq!(p.write(8), WC_RETRY_EXC_ERR, "the receiver does not answer any more");
    assert_eq!(p.device.event(), (EVENT_QP_FATAL, p.b.qp.expose_provenance() as u64));
    let wc = wait(p.cq_b);
    assert_eq!((wc.wr_id, wc.status), (5, WC_WR_FLUSH_ERR));
}

#[test]
fn the_receivers_side_can_break_over_a_message() {
    let _turn = turn();
    let p = Pair::new();
    assert_eq!(p.b.recv(5, &mut [p.remote.sge(0, 64)]), 0);
    plan("side=remote op=send -> status=loc-prot vendor=9");
    assert_eq!(status(&p, WR_SEND, 8), WC_REM_OP_ERR);
    let wc = wait(p.cq_b);
    assert_eq!((wc.wr_id, wc.status, wc.vendor_err), (5, WC_LOC_PROT_ERR, 9));
    assert_eq!(p.b.query().qp_state, QPS_ERR);
}

#[test]
fn an_overrun_queue_reports_and_takes_nothing_any_more() {
    let _turn = turn();
    let p = Pair::new();
    fill(&p);
    plan("op=write nth=1 -> cq-overrun");
    post(&p, WR_RDMA_WRITE, 1, 8);
    assert_ne!(p.to.word(0), 0, "the request itself happened");
    assert_eq!(p.device.event(), (EVENT_CQ_ERR, p.cq_a.expose_provenance() as u64));
    assert_eq!(p.device.event(), (EVENT_QP_FATAL, p.a.qp.expose_provenance() as u64));
    assert!(poll(p.cq_a).is_none());

    let p = Pair::new();
    assert_eq!(p.b.recv(1, &mut []), 0);
    plan("side=remote op=write-imm -> cq-overrun");
    assert_eq!(status(&p, WR_RDMA_WRITE_WITH_IMM, 8), WC_REM_OP_ERR);
    assert_eq!(p.device.event(), (EVENT_CQ_ERR, p.cq_b.expose_provenance() as u64));
    assert_eq!(p.device.event(), (EVENT_QP_FATAL, p.b.qp.expose_provenance() as u64));
    assert!(poll(p.cq_b).is_none());
}

#[test]
fn a_port_goes_down_and_comes_up_again() {
    let _turn = turn();
    let p = Pair::new();
    plan("nth=1 -> port-down for=1ms");
    post(&p, WR_RDMA_WRITE, 1, 8);
    // One end or the other of the race against the retry limit of one millisecond.
    let ended = wait(p.cq_a).status;
    assert!(matches!(ended, WC_SUCCESS | WC_RETRY_EXC_ERR), "{ended}");
    assert_eq!(p.device.event(), (EVENT_PORT_ERR, 1));
    assert_eq!(p.device.event(), (EVENT_PORT_ACTIVE, 1), "without anybody's doing");

    let p = Pair::new();
    plan("nth=1 -> port-down at=end");
    assert_eq!(p.write(8), WC_SUCCESS, "the port went down behind the request");
    assert_eq!(p.write(8), WC_RETRY_EXC_ERR);
    // SAFETY: a NUL-terminated string.
    assert_eq!(unsafe { softrnic_port(c"softrnic0".as_ptr(), 1, 1) }, 0);
}

#[test]
fn a_gid_changes_for_queries_and_new_connections() {
    let _turn = turn();
    let p = Pair::new();
    let gid = |p: &Pair| {
        let mut gid = Gid::default();
        // SAFETY: a live handle and our own structure.
        assert_eq!(unsafe { ibv_query_gid(p.device.context, 1, 0, &raw mut gid) }, 0);
        gid
    };
    let old = gid(&p);
    plan("nth=1 -> gid=0/10.9.8.7");
    let stale = p.a.attr(p.b.num());
    assert_eq!(p.write(8), WC_SUCCESS);
    assert_eq!(p.device.event(), (EVENT_GID_CHANGE, 1));
    assert_eq!(gid(&p).raw[12..], [10, 9, 8, 7]);
    let q = Pair::unconnected(cap());
    q.a.connect(&QpAttr { dest_qp_num: q.b.num(), ..stale });
    q.b.connect_to(q.a.num());
    assert_eq!(q.write(8), WC_RETRY_EXC_ERR, "the old address leads nowhere");
    assert_eq!(Pair::new().write(8), WC_SUCCESS);
    let set_gid = |index| {
        // SAFETY: NUL-terminated strings.
        unsafe { softrnic_set_gid(c"softrnic0".as_ptr(), 1, index, c"192.168.77.1".as_ptr()) }
    };
    assert_eq!(set_gid(0), 0);
    assert_eq!(gid(&p), old);
    assert_eq!(set_gid(15), libc::EINVAL, "no such entry");
}

#[test]
fn a_dead_device_takes_everything_with_it() {
    let _turn = turn();
    // Its death ends with the last context: nobody else may be left behind.
    let close = || {
        for context in softrnic::objects::CONTEXTS.all() {
            context.close();
        }
        softrnic::objects::CONTEXTS.purge();
    };
    close();
    let (p, q) = (Pair::new(), Pair::new());
    assert_eq!(q.b.recv(3, &mut []), 0);
    plan("nth=1 -> device-fatal");
    assert_eq!(p.write(8), WC_WR_FLUSH_ERR);
    for pair in [&p, &q] {
        assert_eq!(pair.device.event(), (EVENT_DEVICE_FATAL, 0));
        assert_eq!((pair.a.query().qp_state, pair.b.query().qp_state), (QPS_ERR, QPS_ERR));
    }
    assert_eq!(wait(q.cq_b).status, WC_WR_FLUSH_ERR);
    assert_eq!(q.write(8), WC_WR_FLUSH_ERR);
    let mut port = PortAttr::default();
    // SAFETY: a live handle and our own structure.
    assert_eq!(unsafe { ibv_query_port(p.device.context, 1, &raw mut port) }, 0);
    assert_eq!(port.state, PORT_DOWN);
    assert_eq!(p.device.try_reg(p.device.pd, p.from.addr(), 8, ALL), Err(libc::EIO));
    let fresh = QpAttr { qp_state: QPS_INIT, ..p.a.attr(1) };
    assert_eq!(p.a.to(&fresh, QPS_RESET), 0);
    assert_eq!(p.a.to(&fresh, QPS_INIT), libc::EIO);
    close();
    plan("");
    assert_eq!(Pair::new().write(8), WC_SUCCESS, "a process that opens it anew finds it well");
}

#[test]
fn registrations_fail_by_number_size_and_errno() {
    let _turn = turn();
    let d = Device::open();
    let buf = Buf::new(8192);
    let tries =
        |len| (0..3).map(|_| d.try_reg(d.pd, buf.addr(), len, ALL).err()).collect::<Vec<_>>();
    for (rule, len, wanted) in [
        ("op=reg-mr nth=2 -> fail=ENOMEM", 4096, [None, Some(libc::ENOMEM), None]),
        ("op=reg-mr skip=1 -> fail=EFAULT", 4096, [None, Some(libc::EFAULT), Some(libc::EFAULT)]),
        ("op=reg-mr bytes=4097.. -> fail=5", 4096, [None; 3]),
        ("op=reg-mr bytes=4097.. -> fail=5", 8192, [Some(libc::EIO); 3]),
        ("device=softrnic0 op=reg-mr every=2 -> fail=EPERM", 8, [Some(1), None, Some(1)]),
    ] {
        plan(rule);
        assert_eq!(tries(len), wanted, "{rule}, {len} bytes");
    }
    plan("op=reg-mr nth=1 -> fail=ENOMEM\n-> drop");
    assert_eq!(d.try_reg(d.pd, buf.addr(), 8, ALL).err(), Some(libc::ENOMEM));
    assert_eq!(softrnic_fault_matched(1), 0, "a registration is no request");
}

#[test]
fn calls_fail_by_number_depth_and_errno() {
    let _turn = turn();
    let d = Device::open();
    let cq = d.cq(100);
    let qp = |depth| {
        let cap = QpCap { max_send_wr: depth, max_recv_wr: 1, ..QpCap::default() };
        d.try_qp(cq, cq, std::ptr::null_mut(), cap).err()
    };
    plan(
        "op=create-qp bytes=65.. -> fail=EINVAL\nop=alloc-pd nth=2 -> fail=ENOMEM\nop=create-cq -> fail=ENOSPC",
    );
    assert_eq!([64, 65, 64].map(qp), [None, Some(libc::EINVAL), None]);
    let pds: Vec<_> = (0..3).map(|_| if d.pd().is_null() { errno() } else { 0 }).collect();
    assert_eq!(pds, [0, libc::ENOMEM, 0]);
    // SAFETY: a live handle.
    let none = unsafe {
        softrnic::capi::queues::ibv_create_cq(
            d.context,
            5,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            0,
        )
    };
    assert!(none.is_null() && errno() == libc::ENOSPC);
    plan("");
    assert_eq!(qp(65), None);
}

#[test]
fn matchers_pick_requests() {
    let _turn = turn();
    // The numbers of the requests that fire: opcode and size by turns WRITE 8, WRITE 4096, READ 8, SEND 64.
    for (matcher, fired) in [
        ("", vec![1, 2, 3, 4, 5, 6, 7, 8]),
        ("op=write", vec![1, 2, 5, 6]),
        ("op=read,send", vec![3, 4, 7, 8]),
        ("bytes=8", vec![1, 3, 5, 7]),
        ("bytes=9..4K", vec![2, 4, 6, 8]),
        ("bytes=..63", vec![1, 3, 5, 7]),
        ("op=write bytes=4K..", vec![2, 6]),
        ("nth=3", vec![3]),
        ("op=send nth=2", vec![8]),
        ("every=3", vec![1, 4, 7]),
        ("skip=5", vec![6, 7, 8]),
        ("skip=1 every=2 times=2", vec![2, 4]),
        ("device=softrnic0 port=1", vec![1, 2, 3, 4, 5, 6, 7, 8]),
        ("port=2", vec![]),
        ("after=1000s", vec![]),
        ("qp=1", vec![]),
    ] {
        let p = Pair::new();
        plan(&format!("{matcher} -> delay=0ns"));
        let mut seen = Vec::new();
        for id in 1..=8_u64 {
            assert_eq!(p.b.recv(id, &mut [p.remote.sge(0, 64)]), 0);
            let (opcode, len) =
                [(WR_SEND, 64), (WR_RDMA_WRITE, 8), (WR_RDMA_WRITE, 4096), (WR_RDMA_READ, 8)]
                    [usize::try_from(id % 4).expect("small")];
            let before = softrnic_fault_fired(0);
            post(&p, opcode, id, len);
            assert_eq!(wait(p.cq_a).status, WC_SUCCESS);
            if softrnic_fault_fired(0) > before {
                seen.push(id);
            }
        }
        assert_eq!(seen, fired, "{matcher}");
    }
}

#[test]
fn queue_pairs_are_matched_by_number_and_order_of_creation_on_both_sides() {
    let _turn = turn();
    let (p, q) = (Pair::new(), Pair::new());
    let ordinal = softrnic::qp::Qp::by_number(p.a.num()).expect("live").ordinal;
    for (matcher, by_p, by_q) in [
        (format!("qp={:#x}", p.a.num()), 1, 0),
        (format!("qp=#{ordinal}"), 1, 0),
        (format!("qp=#{}", ordinal + 2), 0, 1),
        (format!("side=remote qp=#{}", ordinal + 1), 1, 0),
        (format!("side=remote qp={}", q.b.num()), 0, 1),
        (format!("side=remote qp={}", q.a.num()), 0, 0),
    ] {
        plan(&format!("{matcher} -> delay=0ns"));
        assert_eq!(p.write(8), WC_SUCCESS);
        assert_eq!(softrnic_fault_fired(0), by_p, "{matcher}");
        assert_eq!(q.write(8), WC_SUCCESS);
        assert_eq!(softrnic_fault_fired(0), by_p + by_q, "{matcher}");
    }
}

#[test]
fn probability_follows_the_seed() {
    let _turn = turn();
    let run = |seed: u64| {
        let p = Pair::new();
        plan(&format!("seed={seed}\np=0.3 -> delay=0ns"));
        let fired = |_| {
            let before = softrnic_fault_fired(0);
            assert_eq!(p.write(8), WC_SUCCESS);
            softrnic_fault_fired(0) > before
        };
        (0..200).map(fired).collect::<Vec<bool>>()
    };
    let (one, again, two) = (run(1), run(1), run(2));
    assert_eq!(one, again);
    assert_ne!(one, two);
    // The draws are fixed by the seeds, so this cannot vary: 60 are expected of 200.
    for list in [one, two] {
        let count = list.iter().filter(|f| **f).count();
        assert!((40..=80).contains(&count), "{count}");
    }
}

#[test]
fn all_rules_count_and_the_first_that_picks_fires() {
    let _turn = turn();
    let p = Pair::new();
    plan("nth=2 -> delay=0ns\nskip=1 -> delay=0ns");
    // SAFETY: a NUL-terminated string.
    assert_eq!(unsafe { softrnic_fault_add(c"op=send -> drop".as_ptr()) }, 0);
    for _ in 0..3 {
        assert_eq!(p.write(8), WC_SUCCESS);
    }
    let counts = [0, 1, 2].map(|r| (softrnic_fault_matched(r), softrnic_fault_fired(r)));
    assert_eq!(counts, [(3, 1), (3, 1), (0, 0)]);
    assert_eq!(softrnic_fault_fired(3), u64::MAX);
    assert_eq!(try_plan("op=wirte -> drop"), libc::EINVAL);
    assert_eq!(softrnic_fault_matched(0), 3, "a bad plan leaves the old one alone");
    plan("");
    assert_eq!(softrnic_fault_fired(0), u64::MAX);
}

#[test]
fn requests_that_wait_keep_their_fate_when_the_plan_ends() {
    let _turn = turn();
    let p = Pair::new();
    plan("-> drop");
    post(&p, WR_RDMA_WRITE, 1, 8);
    plan("");
    assert_eq!(wait(p.cq_a).status, WC_RETRY_EXC_ERR);
}

#[test]
fn a_plan_that_cannot_be_read_hides_the_devices() {
    let _turn = turn();
    let path = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("plan-{}", std::process::id()));
    let devinfo = |text: Option<&str>| {
        match text {
            Some(text) => std::fs::write(&path, text).expect("write the plan"),
            None => std::fs::remove_file(&path).expect("remove the plan"),
        }
        let mut command = common::client("ibv_devinfo", &common::fabric("plan"));
        command.env("SOFTRNIC_FAULTS", &path);
        let child = common::Guarded(command.spawn().expect("ibv_devinfo starts"));
        common::finish(child, std::time::Instant::now() + std::time::Duration::from_secs(60))
    };
    let (ok, text) = devinfo(Some("# nothing yet\n\nop=write -> drop # lost\n"));
    assert!(ok && text.contains("softrnic0"), "{text}");
    for (plan, complaint) in [
        (
            Some("op=write -> drop\nop=wirte -> drop\n"),
            "line 2: op=wirte is unknown; use one of write,",
        ),
        (Some("device=mlx5_0 -> drop"), "line 1: device=mlx5_0 is unknown; use one of softrnic0"),
        (None, "name a readable file with a fault plan, or unset it"),
    ] {
        let (ok, text) = devinfo(plan);
        assert!(!ok && !text.contains("hca_id"), "{text}");
        assert!(
            text.contains("softrnic: ERROR SOFTRNIC_FAULTS=") && text.contains(complaint),
            "{text}"
        );
    }
}
