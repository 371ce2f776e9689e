//! Held mode and injected faults, through the control calls. They act on the whole process, so the tests take turns.

mod common;

use std::ffi::CStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::verbs::*;
use softrnic::abi::*;
use softrnic::capi::control::*;

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    setup(&[("SOFTRNIC_MAX_MSG_SZ", "4096"), ("SOFTRNIC_MTU", "1024")]);
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connected() -> Pair {
    let p = Pair::unconnected(cap());
    p.a.connect(&QpAttr { path_mtu: 3, ..p.a.attr(p.b.num()) });
    p.b.connect(&QpAttr { path_mtu: 3, ..p.b.attr(p.a.num()) });
    p
}

fn counter(name: &CStr) -> u64 {
    // SAFETY: a NUL-terminated string.
    unsafe { softrnic_counter(name.as_ptr()) }
}

fn port(up: bool) {
    // SAFETY: a NUL-terminated string.
    assert_eq!(unsafe { softrnic_port(c"softrnic0".as_ptr(), 1, i32::from(up)) }, 0);
}

fn post(p: &Pair, id: u64, at: u64) {
    let mut sge = [p.local.sge(0, 8)];
    let mut wr = rdma(WR_RDMA_WRITE, id, SEND_SIGNALED, &mut sge, p.remote.addr + at, p.remote.key);
    assert_eq!(p.a.send(&mut wr), 0);
}

#[test]
fn held_requests_run_in_posting_order_and_by_count() {
    let _turn = turn();
    let (p, q) = (connected(), connected());
    assert_eq!(softrnic_hold(1), 0);
    p.from.put(0, b"held....");
    q.from.put(0, b"held....");
    for (pair, id) in [(&p, 1), (&q, 2), (&p, 3)] {
        post(pair, id, 8 * id);
    }
    assert!(poll(p.cq_a).is_none() && poll(q.cq_a).is_none());
    assert_eq!(p.to.get(8, 8), [0; 8]);
    assert_eq!(softrnic_release(2), 2);
    assert_eq!((wait(p.cq_a).wr_id, wait(q.cq_a).wr_id), (1, 2));
    assert!(poll(p.cq_a).is_none());
    assert_eq!((p.to.get(8, 8), p.to.get(24, 8)), (b"held....".to_vec(), vec![0; 8]));
    assert_eq!(softrnic_hold(0), 0);
    assert_eq!(wait(p.cq_a).wr_id, 3);
    assert_eq!(softrnic_release(1), 0, "nothing is held any more");
}

#[test]
fn held_requests_flush_when_their_qp_breaks() {
    let _turn = turn();
    let p = connected();
    assert_eq!(softrnic_hold(1), 0);
    post(&p, 1, 0);
    assert_eq!(softrnic_kill_qp(p.a.num()), 0);
    assert_eq!(wait(p.cq_a).status, WC_WR_FLUSH_ERR);
    assert_eq!(p.device.event(), (EVENT_QP_FATAL, p.a.qp.expose_provenance() as u64));
    assert_eq!(softrnic_hold(0), 0);
}

#[test]
fn a_port_that_is_down_delays_and_then_fails_requests() {
    let _turn = turn();
    let p = connected();
    let q = Pair::unconnected(cap());
    q.a.connect(&QpAttr { path_mtu: 3, timeout: 1, retry_cnt: 0, ..q.a.attr(q.b.num()) });
    q.b.connect(&QpAttr { path_mtu: 3, ..q.b.attr(q.a.num()) });
    port(false);
    assert_eq!(p.device.event(), (EVENT_PORT_ERR, 1));
    let mut attr = PortAttr::default();
    // SAFETY: a live handle and our own structure.
    let done =
        unsafe { softrnic::capi::devices::ibv_query_port(p.device.context, 1, &raw mut attr) };
    assert_eq!((done, attr.state), (0, PORT_DOWN));
    post(&p, 1, 0);
    post(&q, 2, 0);
    assert_eq!(wait(q.cq_a).status, WC_RETRY_EXC_ERR, "8 microseconds are over");
    assert!(poll(p.cq_a).is_none(), "half a second is not");
    port(true);
    assert_eq!(p.device.event(), (EVENT_PORT_ACTIVE, 1));
    assert_eq!(wait(p.cq_a).status, WC_SUCCESS);
}

#[test]
fn counters_name_what_was_posted() {
    let _turn = turn();
    let p = connected();
    let names = [c"post_write", c"signaled", c"bytes_written", c"doorbells", c"send_completions"];
    let before = names.map(counter);
    post(&p, 1, 0);
    assert_eq!(wait(p.cq_a).status, WC_SUCCESS);
    let grown: Vec<u64> = names.iter().zip(before).map(|(n, b)| counter(n) - b).collect();
    assert_eq!(grown, [1, 1, 8, 1, 1]);
    assert_eq!(counter(c"no_such_counter"), u64::MAX);
}

#[test]
fn leaks_are_counted() {
    let _turn = turn();
    let before = softrnic_leaks();
    let bytes = counter(c"registered_bytes");
    let p = connected();
    // Context, PD, two CQs, two QPs, two MRs.
    assert_eq!(softrnic_leaks() - before, 8);
    assert_eq!(counter(c"registered_bytes") - bytes, 2 * 8192);
    // SAFETY: a live handle; closing destroys what is left in it.
    assert_eq!(unsafe { softrnic::capi::devices::ibv_close_device(p.device.context) }, 0);
    assert_eq!(softrnic_leaks(), before);
    assert_eq!(counter(c"registered_bytes"), bytes);
}

#[test]
fn the_chosen_registration_fails() {
    let _turn = turn();
    let d = Device::open();
    let buf = Buf::new(4096);
    assert_eq!(softrnic_fail_reg_mr(2), 0);
    let mut tries = (0..3).map(|_| d.try_reg(d.pd, buf.addr(), 4096, ALL).err());
    assert_eq!(
        [tries.next(), tries.next(), tries.next()],
        [Some(None), Some(Some(libc::ENOMEM)), Some(None)]
    );
}

#[test]
fn attributes_of_each_state_change_are_kept() {
    let _turn = turn();
    let p = connected();
    let (mut attr, mut mask) = (QpAttr::default(), 0);
    // SAFETY: our own out-pointers.
    let mut trace =
        |state| unsafe { softrnic_qp_trace(p.a.num(), state, &raw mut attr, &raw mut mask) };
    assert_eq!(trace(2), 0);
    assert_eq!(trace(4), libc::ENOENT, "never was in SQD");
    assert_eq!(trace(9), libc::EINVAL);
    assert_eq!((mask.cast_unsigned(), attr.path_mtu, attr.dest_qp_num), (RTR, 3, p.b.num()));
}

#[test]
fn injected_events_arrive_with_their_element() {
    let _turn = turn();
    let p = connected();
    // SAFETY: live handles.
    unsafe {
        let cq = (*p.cq_a).handle;
        assert_eq!(softrnic_inject_event(p.device.context, EVENT_CQ_ERR.cast_signed(), cq), 0);
        assert_eq!(
            softrnic_inject_event(p.device.context, EVENT_QP_REQ_ERR.cast_signed(), p.a.num()),
            0
        );
        assert_eq!(softrnic_inject_event(p.device.context, EVENT_GID_CHANGE.cast_signed(), 1), 0);
        assert_eq!(softrnic_inject_event(p.device.context, 99, 1), libc::EINVAL);
    }
    assert_eq!(p.device.event(), (EVENT_CQ_ERR, p.cq_a.expose_provenance() as u64));
    assert_eq!(p.device.event(), (EVENT_QP_REQ_ERR, p.a.qp.expose_provenance() as u64));
    assert_eq!(p.device.event(), (EVENT_GID_CHANGE, 1));
}

#[test]
fn a_message_above_the_limit_is_a_local_length_error() {
    let _turn = turn();
    let p = connected();
    assert_eq!(p.write(4096), WC_SUCCESS);
    assert_eq!(p.write(4097), WC_LOC_LEN_ERR);
}

#[test]
fn no_thread_and_no_descriptor_survive_the_last_close() {
    let _turn = turn();
    let census = || {
        let count = |dir| std::fs::read_dir(dir).expect("proc").count();
        let threads = std::fs::read_dir("/proc/self/task").expect("proc").filter(|task| {
            let path = task.as_ref().expect("entry").path().join("comm");
            std::fs::read_to_string(path).is_ok_and(|name| name.starts_with("softrnic"))
        });
        (threads.count(), count("/proc/self/fd"))
    };
    for context in softrnic::objects::CONTEXTS.all() {
        context.close();
    }
    softrnic::objects::CONTEXTS.purge();
    let before = census();
    assert_eq!(before.0, 0);
    let p = connected();
    assert_eq!(p.a.send(&mut rdma(WR_RDMA_WRITE_WITH_IMM, 1, 0, &mut [], 0, 0)), 0);
    // The assisting thread looks after the parked request; it gives itself its name once it runs.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while census().0 != 1 {
        assert!(std::time::Instant::now() < deadline, "no assisting thread");
        std::thread::yield_now();
    }
    // SAFETY: a live handle.
    assert_eq!(unsafe { softrnic::capi::devices::ibv_close_device(p.device.context) }, 0);
    softrnic::objects::CONTEXTS.purge();
    assert_eq!(census(), before);
}

fn set_gid(index: i32, entry: &CStr) -> i32 {
    // SAFETY: NUL-terminated strings.
    unsafe { softrnic_set_gid(c"softrnic0".as_ptr(), 1, index, entry.as_ptr()) }
}

#[test]
fn a_gid_can_be_replaced_and_emptied() {
    let _turn = turn();
    let p = Pair::unconnected(cap());
    assert_eq!(set_gid(0, c"10.9.8.7"), 0);
    assert_eq!(p.device.event(), (EVENT_GID_CHANGE, 1));
    let mut gid = Gid::default();
    let context = p.device.context;
    // SAFETY: an open context and a valid out-pointer.
    let code = unsafe { softrnic::capi::devices::ibv_query_gid(context, 1, 0, &raw mut gid) };
    assert_eq!(code, 0);
    assert_eq!(gid.raw[10..], [0xff, 0xff, 10, 9, 8, 7]);
    // An empty slot is no source.
    let attr = QpAttr { path_mtu: 3, ..p.a.attr(p.b.num()) };
    assert_eq!(set_gid(0, c"-"), 0);
    assert_eq!(p.device.event().0, EVENT_GID_CHANGE);
    assert_eq!(p.a.to(&attr, QPS_INIT), 0);
    assert_eq!(p.a.to(&attr, QPS_RTR), libc::EINVAL);
    assert_eq!(set_gid(0, c"192.168.77.1"), 0);
    assert_eq!(p.device.event().0, EVENT_GID_CHANGE);
    assert_eq!([set_gid(99, c"-"), set_gid(0, c"rubbish")], [libc::EINVAL; 2]);
}

#[test]
fn changes_of_state_fail_as_often_as_asked() {
    let _turn = turn();
    let p = Pair::unconnected(cap());
    let attr = QpAttr { path_mtu: 3, ..p.a.attr(p.b.num()) };
    assert_eq!(softrnic_fail_modify_qp(QPS_RTR.cast_signed(), 2, libc::ETIMEDOUT), 0);
    assert_eq!(p.a.to(&attr, QPS_INIT), 0);
    for wanted in [libc::ETIMEDOUT, libc::ETIMEDOUT, 0] {
        assert_eq!(p.a.to(&attr, QPS_RTR), wanted);
    }
    assert_eq!(softrnic_fail_modify_qp(2, 1, 0), libc::EINVAL);
}

#[test]
fn live_queue_pairs_are_listed() {
    let _turn = turn();
    // SAFETY: no array, no entries.
    let before = unsafe { softrnic_qps(std::ptr::null_mut(), 0) };
    let p = Pair::unconnected(cap());
    let mut numbers = [0; 256];
    // SAFETY: an array of 256.
    assert_eq!(unsafe { softrnic_qps(numbers.as_mut_ptr(), 256) }, before + 2);
    let live = &numbers[..usize::try_from(before).unwrap() + 2];
    assert!(live.is_sorted() && live.contains(&p.a.num()) && live.contains(&p.b.num()));
}
