//! RC semantics between two QPs of one process, through the exported calls, in the engine that the test program names.

use std::ptr::null_mut;

use crate::common::verbs::*;
use softrnic::abi::*;
use softrnic::capi::{memory, queues};

fn pair() -> Pair {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    Pair::new()
}

#[test]
fn a_write_lands_and_completes() {
    let p = pair();
    p.from.put(0, b"0123456789");
    assert_eq!(p.write(10), WC_SUCCESS);
    assert_eq!(p.to.get(0, 11), b"0123456789\0");
}

#[test]
fn a_request_of_80_bytes_may_end_at_a_guard_page() {
    let p = pair();
    let page = Buf::new(80);
    p.to.put(512, &7_u64.to_ne_bytes());
    for opcode in
        [WR_RDMA_WRITE, WR_RDMA_READ, WR_ATOMIC_FETCH_AND_ADD, WR_RDMA_WRITE_WITH_IMM, WR_SEND]
    {
        assert_eq!(p.b.recv(0, &mut [p.remote.sge(1024, 64)]), 0);
        let mut sge = [p.local.sge(0, 8)];
        let mut wr = rdma(opcode, 1, SEND_SIGNALED, &mut sge, p.remote.addr + 512, p.remote.key);
        if opcode == WR_ATOMIC_FETCH_AND_ADD {
            wr.rkey_or_compare = 1;
            wr.atomic_rkey = p.remote.key;
        }
        let at: *mut SendWr =
            std::ptr::with_exposed_provenance_mut(usize::try_from(page.addr()).expect("address"));
        // SAFETY: the guarded buffer has room for exactly one request, which is used before `page` is dropped.
        let errno = unsafe {
            at.write(wr);
            p.a.send(&mut *at)
        };
        assert_eq!(errno, 0, "opcode {opcode}");
        assert_eq!(wait(p.cq_a).status, WC_SUCCESS, "opcode {opcode}");
    }
}

#[test]
fn immediates_consume_receives_and_report_the_whole_length() {
    let p = pair();
    // With and without scatter entries; the payload goes to the remote address either way.
    assert_eq!(p.b.recv(5, &mut []), 0);
    assert_eq!(p.b.recv(6, &mut [p.remote.sge(4096, 16)]), 0);
    p.from.put(0, &[9; 100]);
    for (id, len) in [(5, 100_u32), (6, 0)] {
        let mut sge = [p.local.sge(0, len)];
        let mut wr = rdma(
            WR_RDMA_WRITE_WITH_IMM,
            50 + id,
            SEND_SIGNALED,
            &mut sge,
            p.remote.addr,
            p.remote.key,
        );
        wr.imm_data = 0xabcd_0000 | u32::try_from(id).expect("small");
        if len == 0 {
            // Neither key nor address matter without payload.
            (wr.num_sge, wr.rkey_or_compare, wr.remote_addr) = (0, 0, 0);
        }
        assert_eq!(p.a.send(&mut wr), 0);
        let (sent, got) = (wait(p.cq_a), wait(p.cq_b));
        assert_eq!((sent.wr_id, sent.status, sent.opcode), (50 + id, WC_SUCCESS, WC_RDMA_WRITE));
        assert_eq!((got.wr_id, got.status, got.opcode), (id, WC_SUCCESS, WC_RECV_RDMA_WITH_IMM));
        assert_eq!((got.byte_len, got.imm_data), (len, wr.imm_data));
        assert_eq!((got.qp_num, got.wc_flags), (p.b.num(), WC_FLAG_WITH_IMM));
    }
    assert_eq!(p.to.get(0, 101), [&[9; 100][..], &[0]].concat());
    assert_eq!(p.to.get(4096, 16), [0; 16], "scatter entries of an immediate are not written");
}

#[test]
fn a_chain_is_executed_in_order_and_only_the_signalled_request_completes() {
    let p = pair();
    assert_eq!(p.b.recv(1, &mut []), 0);
    p.from.put(0, b"first---second--");
    let (mut s1, mut s2) = ([p.local.sge(0, 8)], [p.local.sge(8, 8)]);
    let mut imm =
        rdma(WR_RDMA_WRITE_WITH_IMM, 2, SEND_SIGNALED, &mut s2, p.remote.addr + 4, p.remote.key);
    let mut write = rdma(WR_RDMA_WRITE, 1, 0, &mut s1, p.remote.addr, p.remote.key);
    write.next = &raw mut imm;
    assert_eq!(p.a.send(&mut write), 0);
    assert_eq!(wait(p.cq_b).wr_id, 1);
    assert_eq!(p.to.get(0, 12), b"firssecond--");
    assert_eq!(wait(p.cq_a).wr_id, 2);
    assert!(poll(p.cq_a).is_none());
}

#[test]
fn receiver_not_ready_parks_without_blocking_and_resumes_in_order() {
    let p = pair();
    for id in 0..3 {
        let mut wr = rdma(WR_RDMA_WRITE_WITH_IMM, id, SEND_SIGNALED, &mut [], 0, 0);
        assert_eq!(p.a.send(&mut wr), 0);
    }
    for _ in 0..100 {
        assert!(poll(p.cq_a).is_none() && poll(p.cq_b).is_none());
    }
    for id in 0..3 {
        assert_eq!(p.b.recv(10 + id, &mut []), 0);
        // Nobody polls the sender: the assisting thread delivers.
        assert_eq!(wait(p.cq_b).wr_id, 10 + id);
    }
    for id in 0..3 {
        let wc = wait(p.cq_a);
        assert_eq!((wc.wr_id, wc.status), (id, WC_SUCCESS));
    }
}

#[test]
fn inline_payload_of_a_parked_request_is_the_one_at_post_time() {
    let p = pair();
    p.from.put(0, b"original");
    // An address that no key covers would do too: inline payload needs none.
    let mut sge = [Sge { addr: p.from.addr(), length: 8, lkey: 0xdead }];
    let mut wr = wr(WR_SEND, 1, SEND_SIGNALED | SEND_INLINE, &mut sge);
    assert_eq!(p.a.send(&mut wr), 0);
    p.from.put(0, b"modified");
    assert_eq!(p.b.recv(0, &mut [p.remote.sge(0, 8)]), 0);
    assert_eq!(wait(p.cq_b).byte_len, 8);
    assert_eq!(p.to.get(0, 8), b"original");
}

#[test]
fn rnr_retries_end_with_an_error() {
    for rnr_retry in [0, 1] {
        setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
        let p = Pair::unconnected(cap());
        p.a.connect(&QpAttr { rnr_retry, ..p.a.attr(p.b.num()) });
        p.b.connect(&QpAttr { min_rnr_timer: 1, ..p.b.attr(p.a.num()) });
        let mut wr = rdma(WR_RDMA_WRITE_WITH_IMM, 1, 0, &mut [], 0, 0);
        assert_eq!(p.a.send(&mut wr), 0);
        assert_eq!(wait(p.cq_a).status, WC_RNR_RETRY_EXC_ERR);
        assert_eq!(p.a.query().qp_state, QPS_ERR);
        assert_eq!(p.b.query().qp_state, QPS_RTS, "the responder is not to blame");
    }
}

#[test]
fn send_queue_slots_come_back_only_when_a_signalled_completion_is_polled() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let p = Pair::unconnected(QpCap { max_send_wr: 4, ..cap() });
    p.a.connect_to(p.b.num());
    p.b.connect_to(p.a.num());
    let post = |id, flags| {
        let mut wr = rdma(WR_RDMA_WRITE, id, flags, &mut [], 0, 0);
        p.a.send(&mut wr)
    };
    for id in 0..3 {
        assert_eq!(post(id, 0), 0);
    }
    assert_eq!(post(3, SEND_SIGNALED), 0);
    assert_eq!(post(4, 0), libc::ENOMEM, "done, but its completion is not polled");
    assert_eq!(wait(p.cq_a).wr_id, 3);
    for id in 0..4 {
        assert_eq!(post(id, 0), 0);
    }
    // Four unsignalled requests: nothing can give their slots back any more.
    assert_eq!(post(9, SEND_SIGNALED), libc::ENOMEM);
    assert!(poll(p.cq_a).is_none());
}

#[test]
fn receive_queue_slots_come_back_when_completions_are_polled() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let p = Pair::unconnected(QpCap { max_recv_wr: 2, ..cap() });
    p.a.connect_to(p.b.num());
    p.b.connect_to(p.a.num());
    assert_eq!(p.b.recv(0, &mut []), 0);
    assert_eq!(p.b.recv(1, &mut []), 0);
    assert_eq!(p.b.recv(2, &mut []), libc::ENOMEM);
    let mut wr = rdma(WR_RDMA_WRITE_WITH_IMM, 0, SEND_SIGNALED, &mut [], 0, 0);
    assert_eq!(p.a.send(&mut wr), 0);
    assert_eq!(p.b.recv(2, &mut []), libc::ENOMEM);
    assert_eq!(wait(p.cq_b).wr_id, 0);
    assert_eq!(p.b.recv(2, &mut []), 0);
}

#[test]
fn an_overrun_cq_is_reported_and_breaks_its_qp() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let device = Device::open();
    let (small, other) = (device.cq(2), device.cq(16));
    let a = device.qp(small, small, null_mut(), cap());
    let b = device.qp(other, other, null_mut(), cap());
    a.connect_to(b.num());
    b.connect_to(a.num());
    for id in 0..3 {
        let mut wr = rdma(WR_RDMA_WRITE, id, SEND_SIGNALED, &mut [], 0, 0);
        assert_eq!(a.send(&mut wr), 0);
    }
    assert_eq!(device.event(), (EVENT_CQ_ERR, small.expose_provenance() as u64));
    assert_eq!(device.event(), (EVENT_QP_FATAL, a.qp.expose_provenance() as u64));
    assert_eq!(a.query().qp_state, QPS_ERR);
    assert_eq!([wait(small).wr_id, wait(small).wr_id], [0, 1]);
    assert!(poll(small).is_none());
}

#[test]
fn both_queues_flush_in_order() {
    let p = pair();
    for id in 0..3 {
        assert_eq!(p.a.recv(20 + id, &mut []), 0);
        let mut wr = rdma(WR_RDMA_WRITE_WITH_IMM, id, 0, &mut [], 0, 0);
        assert_eq!(p.a.send(&mut wr), 0, "parked: b has no receive");
    }
    assert_eq!(p.a.to(&QpAttr::default(), QPS_ERR), 0);
    let mut seen = [Vec::new(), Vec::new()];
    for _ in 0..6 {
        let wc = wait(p.cq_a);
        assert_eq!(wc.status, WC_WR_FLUSH_ERR);
        seen[usize::from(wc.wr_id >= 20)].push(wc.wr_id);
    }
    assert_eq!(seen, [vec![0, 1, 2], vec![20, 21, 22]]);
    // Later posts flush at once.
    assert_eq!(p.a.recv(30, &mut []), 0);
    assert_eq!(
        (wait(p.cq_a).wr_id, p.a.send(&mut rdma(WR_RDMA_WRITE, 31, 0, &mut [], 0, 0))),
        (30, 0)
    );
    let wc = wait(p.cq_a);
    assert_eq!((wc.wr_id, wc.status), (31, WC_WR_FLUSH_ERR));
}

/// What goes wrong, and the status that the requester must see.
type Case = (&'static str, u64, u32, i64, u32);

#[test]
fn remote_keys_bounds_and_rights_are_checked_to_the_byte() {
    let p = pair();
    let size = p.to.len() as u64;
    drop(p);
    let cases: [Case; 7] = [
        ("exact", 0, 8192, 0, WC_SUCCESS),
        ("last byte", size - 1, 1, 0, WC_SUCCESS),
        ("one byte before", u64::MAX, 1, 0, WC_REM_ACCESS_ERR),
        ("one byte too long", 1, 8192, 0, WC_REM_ACCESS_ERR),
        ("one byte behind", size, 1, 0, WC_REM_ACCESS_ERR),
        ("next key", 0, 1, 1, WC_REM_ACCESS_ERR),
        ("previous key", 0, 1, -1, WC_REM_ACCESS_ERR),
    ];
    for (what, offset, len, key, status) in cases {
        for opcode in [WR_RDMA_WRITE, WR_RDMA_READ] {
            let p = pair();
            assert_eq!(p.b.recv(77, &mut []), 0);
            let mut sge = [p.local.sge(0, len)];
            let rkey = p.remote.key.wrapping_add_signed(i32::try_from(key).expect("small"));
            let remote = p.remote.addr.wrapping_add(offset);
            let mut wr = rdma(opcode, 1, SEND_SIGNALED, &mut sge, remote, rkey);
            assert_eq!(p.a.send(&mut wr), 0);
            assert_eq!(wait(p.cq_a).status, status, "{what}, opcode {opcode}");
            if status != WC_SUCCESS {
                assert_eq!(
                    p.device.event(),
                    (EVENT_QP_ACCESS_ERR, p.b.qp.expose_provenance() as u64)
                );
                assert_eq!(
                    (p.a.query().qp_state, p.b.query().qp_state),
                    (QPS_ERR, QPS_ERR),
                    "{what}"
                );
                let wc = wait(p.cq_b);
                assert_eq!((wc.wr_id, wc.status), (77, WC_WR_FLUSH_ERR), "{what}");
            }
        }
    }
}

#[test]
fn a_zero_length_write_needs_no_key() {
    let p = pair();
    let mut wr = rdma(WR_RDMA_WRITE, 1, SEND_SIGNALED, &mut [], 12, 0xffff_ffff);
    assert_eq!(p.a.send(&mut wr), 0);
    assert_eq!(wait(p.cq_a).status, WC_SUCCESS);
}

#[test]
fn missing_rights_of_region_qp_or_domain_are_refused() {
    let operations = [
        (WR_RDMA_WRITE, ACCESS_REMOTE_WRITE),
        (WR_RDMA_READ, ACCESS_REMOTE_READ),
        (WR_ATOMIC_FETCH_AND_ADD, ACCESS_REMOTE_ATOMIC),
    ];
    for (opcode, right) in operations {
        for (what, region, qp, foreign) in [
            ("all given", ALL, ALL, false),
            ("region lacks it", ALL & !right, ALL, false),
            ("QP lacks it", ALL, ALL & !right, false),
            ("other domain", ALL, ALL, true),
        ] {
            setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
            let p = Pair::unconnected(cap());
            let pd = if foreign { p.device.pd() } else { p.device.pd };
            let mr = p.device.try_reg(pd, p.to.addr(), 4096, region).expect("registers");
            let remote = Region::of(mr);
            p.a.connect_to(p.b.num());
            p.b.connect(&QpAttr { qp_access_flags: qp, ..p.b.attr(p.a.num()) });
            let mut sge = [p.local.sge(0, 8)];
            let mut wr = rdma(opcode, 1, SEND_SIGNALED, &mut sge, remote.addr, remote.key);
            wr.atomic_rkey = remote.key;
            assert_eq!(p.a.send(&mut wr), 0);
            let expected = match what {
                "all given" => WC_SUCCESS,
                "QP lacks it" => WC_REM_INV_REQ_ERR,
                _ => WC_REM_ACCESS_ERR,
            };
            assert_eq!(wait(p.cq_a).status, expected, "{what}, opcode {opcode}");
        }
    }
}

#[test]
fn local_keys_are_checked_too() {
    for (what, opcode, sge) in [
        ("wrong key", WR_RDMA_WRITE, (0, 8, 0x100_u32)),
        ("too long", WR_RDMA_WRITE, (1, 8192, 0)),
        ("read into read-only region", WR_RDMA_READ, (0, 8, 0)),
    ] {
        let p = pair();
        let access = if opcode == WR_RDMA_READ { ACCESS_REMOTE_READ } else { ALL };
        let local = p.device.reg(&p.from, access);
        let (at, len, delta) = sge;
        let mut sge = [local.sge(at, len)];
        sge[0].lkey ^= delta;
        let mut wr = rdma(opcode, 1, 0, &mut sge, p.remote.addr, p.remote.key);
        assert_eq!(p.a.send(&mut wr), 0);
        assert_eq!(wait(p.cq_a).status, WC_LOC_PROT_ERR, "{what}");
        assert_eq!(p.b.query().qp_state, QPS_RTS, "{what}: nothing reached the responder");
    }
}

#[test]
fn a_deregistered_region_is_out_of_reach() {
    let p = pair();
    assert_eq!(p.write(8), WC_SUCCESS);
    assert_eq!(p.remote.dereg(), 0);
    assert_eq!(p.remote.dereg(), libc::EINVAL);
    assert_eq!(p.write(8), WC_REM_ACCESS_ERR);
}

#[test]
fn read_gathers_into_a_list() {
    let p = pair();
    p.to.put(100, b"abcdefgh");
    let mut sge = [p.local.sge(0, 3), p.local.sge(50, 5)];
    let mut wr = rdma(WR_RDMA_READ, 1, SEND_SIGNALED, &mut sge, p.remote.addr + 100, p.remote.key);
    assert_eq!(p.a.send(&mut wr), 0);
    let wc = wait(p.cq_a);
    assert_eq!((wc.status, wc.opcode, wc.byte_len), (WC_SUCCESS, WC_RDMA_READ, 8));
    assert_eq!((p.from.get(0, 3), p.from.get(50, 5)), (b"abc".to_vec(), b"defgh".to_vec()));
}

#[test]
fn atomics_return_the_old_value() {
    let p = pair();
    p.to.put(8, &40_u64.to_ne_bytes());
    let steps = [
        (WR_ATOMIC_FETCH_AND_ADD, 2, 0, 40, 42),
        (WR_ATOMIC_CMP_AND_SWP, 41, 1, 42, 42),
        (WR_ATOMIC_CMP_AND_SWP, 42, 7, 42, 7),
        (WR_ATOMIC_FETCH_AND_ADD, u64::MAX, 0, 7, 6),
    ];
    for (opcode, compare, swap, old, new) in steps {
        let mut sge = [p.local.sge(0, 8)];
        let mut wr = wr(opcode, 1, SEND_SIGNALED, &mut sge);
        (wr.remote_addr, wr.rkey_or_compare, wr.swap) = (p.remote.addr + 8, compare, swap);
        wr.atomic_rkey = p.remote.key;
        assert_eq!(p.a.send(&mut wr), 0);
        assert_eq!(wait(p.cq_a).status, WC_SUCCESS);
        assert_eq!((p.from.word(0), p.to.word(8)), (old, new));
    }
}

#[test]
fn a_misaligned_atomic_is_an_invalid_request() {
    let p = pair();
    let mut sge = [p.local.sge(0, 8)];
    let mut wr = wr(WR_ATOMIC_FETCH_AND_ADD, 1, 0, &mut sge);
    (wr.remote_addr, wr.atomic_rkey) = (p.remote.addr + 4, p.remote.key);
    assert_eq!(p.a.send(&mut wr), 0);
    assert_eq!(wait(p.cq_a).status, WC_REM_INV_REQ_ERR);
}

#[test]
fn a_qp_connected_to_itself_reads_and_counts_one_responder() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let device = Device::open();
    let cq = device.cq(16);
    let qp = device.qp(cq, cq, null_mut(), cap());
    qp.connect_to(qp.num());
    let buf = Buf::new(64);
    let mr = device.reg(&buf, ALL);
    buf.put(0, &[5]);
    let mut sge = [mr.sge(32, 1)];
    let mut wr = rdma(WR_RDMA_READ, 1, SEND_SIGNALED, &mut sge, mr.addr, mr.key);
    assert_eq!(qp.send(&mut wr), 0);
    assert_eq!((wait(cq).status, buf.get(32, 1)), (WC_SUCCESS, vec![5]));
    // And an error of it must not deadlock on its own locks.
    let mut wr = rdma(WR_RDMA_READ, 2, 0, &mut sge, mr.addr, mr.key ^ 0x80);
    assert_eq!(qp.send(&mut wr), 0);
    assert_eq!(wait(cq).status, WC_REM_ACCESS_ERR);
    assert_eq!(qp.destroy(), 0);
}

#[test]
fn a_message_longer_than_its_receive_fails_on_both_sides() {
    let p = pair();
    assert_eq!(p.b.recv(3, &mut [p.remote.sge(0, 4), p.remote.sge(8, 3)]), 0);
    let mut sge = [p.local.sge(0, 8)];
    assert_eq!(p.a.send(&mut wr(WR_SEND, 1, 0, &mut sge)), 0);
    assert_eq!(wait(p.cq_a).status, WC_REM_INV_REQ_ERR);
    let wc = wait(p.cq_b);
    assert_eq!((wc.wr_id, wc.status), (3, WC_LOC_LEN_ERR));
    assert_eq!(p.b.query().qp_state, QPS_ERR);
}

#[test]
fn send_scatters_and_carries_its_immediate() {
    let p = pair();
    assert_eq!(p.b.recv(3, &mut [p.remote.sge(0, 4), p.remote.sge(8, 100)]), 0);
    p.from.put(0, b"abcdefgh");
    let mut sge = [p.local.sge(0, 8)];
    let mut wr = wr(WR_SEND_WITH_IMM, 1, SEND_SIGNALED, &mut sge);
    wr.imm_data = 77;
    assert_eq!(p.a.send(&mut wr), 0);
    let wc = wait(p.cq_b);
    assert_eq!((wc.opcode, wc.byte_len, wc.imm_data, wc.src_qp), (WC_RECV, 8, 77, p.a.num()));
    assert_eq!((p.to.get(0, 8), p.to.get(8, 4)), (b"abcd\0\0\0\0".to_vec(), b"efgh".to_vec()));
}

#[test]
fn wrong_sequence_number_or_wrong_partner_gets_no_answer() {
    for what in ["psn", "partner", "address", "gone"] {
        setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
        let p = Pair::unconnected(cap());
        let third = p.device.qp(p.cq_b, p.cq_b, null_mut(), cap());
        let mut attr = p.a.attr(p.b.num());
        match what {
            "psn" => attr.sq_psn = 1,
            "address" => attr.ah_attr.grh.dgid.raw[15] ^= 1,
            _ => {}
        }
        p.a.connect(&attr);
        p.b.connect_to(if what == "partner" { third.num() } else { p.a.num() });
        if what == "gone" {
            assert_eq!(p.b.destroy(), 0);
        }
        assert_eq!(p.write(8), WC_RETRY_EXC_ERR, "{what}");
    }
}

#[test]
fn a_responder_that_is_not_ready_yet_is_waited_for() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let p = Pair::unconnected(cap());
    p.a.connect_to(p.b.num());
    let mut sge = [p.local.sge(0, 8)];
    let mut wr = rdma(WR_RDMA_WRITE, 1, SEND_SIGNALED, &mut sge, p.remote.addr, p.remote.key);
    assert_eq!(p.a.send(&mut wr), 0);
    assert!(poll(p.cq_a).is_none());
    p.b.connect_to(p.a.num());
    assert_eq!(wait(p.cq_a).status, WC_SUCCESS);
    // A short timeout runs out.
    let q = Pair::unconnected(cap());
    q.a.connect(&QpAttr { timeout: 1, retry_cnt: 0, ..q.a.attr(q.b.num()) });
    assert_eq!(q.write(8), WC_RETRY_EXC_ERR);
}

#[test]
fn every_state_accepts_only_its_transitions() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let reach = |state: u32| {
        let p = Pair::unconnected(cap());
        let attr = p.a.attr(p.b.num());
        let path: &[u32] = match state {
            QPS_RESET => &[],
            QPS_INIT => &[QPS_INIT],
            QPS_RTR => &[QPS_INIT, QPS_RTR],
            QPS_RTS => &[QPS_INIT, QPS_RTR, QPS_RTS],
            QPS_SQD => &[QPS_INIT, QPS_RTR, QPS_RTS, QPS_SQD],
            _ => &[QPS_ERR],
        };
        for to in path {
            assert_eq!(p.a.to(&attr, *to), 0, "on the way to {state}");
        }
        (p, attr)
    };
    let allowed = [
        (QPS_RESET, vec![QPS_RESET, QPS_INIT, QPS_ERR]),
        (QPS_INIT, vec![QPS_RESET, QPS_INIT, QPS_RTR, QPS_ERR]),
        (QPS_RTR, vec![QPS_RESET, QPS_RTS, QPS_ERR]),
        (QPS_RTS, vec![QPS_RESET, QPS_SQD, QPS_ERR]),
        (QPS_SQD, vec![QPS_RESET, QPS_SQD, QPS_ERR]),
        (QPS_ERR, vec![QPS_RESET, QPS_ERR]),
    ];
    for (from, targets) in allowed {
        for to in QPS_RESET..=QPS_ERR {
            let (p, attr) = reach(from);
            let expected = if targets.contains(&to) { 0 } else { libc::EINVAL };
            assert_eq!(p.a.to(&attr, to), expected, "{from} -> {to}");
            assert_eq!(p.a.query().qp_state, if expected == 0 { to } else { from });
        }
    }
    // RTS and SQD to RTS carry no required attributes.
    for from in [QPS_RTS, QPS_SQD] {
        let (p, attr) = reach(from);
        assert_eq!(p.a.modify(&QpAttr { qp_state: QPS_RTS, ..attr }, QP_STATE), 0);
    }
}

#[test]
fn attribute_values_are_checked() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let p = Pair::unconnected(cap());
    let attr = p.a.attr(p.b.num());
    for bad in [
        QpAttr { port_num: 0, ..attr },
        QpAttr { port_num: 2, ..attr },
        QpAttr { pkey_index: 1, ..attr },
        QpAttr { qp_access_flags: 1 << 12, ..attr },
    ] {
        assert_eq!(p.a.to(&bad, QPS_INIT), libc::EINVAL);
    }
    assert_eq!(p.a.to(&attr, QPS_INIT), 0);
    let mut no_route = attr;
    no_route.ah_attr.is_global = 0;
    let mut no_gid = attr;
    no_gid.ah_attr.grh.sgid_index = 1;
    let mut no_port = attr;
    no_port.ah_attr.port_num = 9;
    for bad in [
        no_route,
        no_port,
        QpAttr { path_mtu: 0, ..attr },
        QpAttr { path_mtu: 6, ..attr },
        QpAttr { dest_qp_num: 1 << 24, ..attr },
        QpAttr { max_dest_rd_atomic: 17, ..attr },
        QpAttr { min_rnr_timer: 32, ..attr },
    ] {
        assert_eq!(p.a.to(&bad, QPS_RTR), libc::EINVAL);
    }
    assert_eq!(p.a.to(&no_gid, QPS_RTR), libc::ENODATA);
    assert_eq!(p.a.to(&attr, QPS_RTR), 0);
    for bad in [
        QpAttr { timeout: 32, ..attr },
        QpAttr { retry_cnt: 8, ..attr },
        QpAttr { rnr_retry: 8, ..attr },
        QpAttr { max_rd_atomic: 17, ..attr },
    ] {
        assert_eq!(p.a.to(&bad, QPS_RTS), libc::EINVAL);
    }
    assert_eq!(p.a.to(&QpAttr { sq_psn: 0x12_3456, ..attr }, QPS_RTS), 0);
    let now = p.a.query();
    assert_eq!((now.sq_psn, now.dest_qp_num, now.path_mtu), (0x12_3456, p.b.num(), 5));
    assert_eq!((now.timeout, now.cap.max_send_wr), (14, 16));
}

#[test]
fn posting_needs_the_right_state() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let p = Pair::unconnected(cap());
    let attr = p.a.attr(p.b.num());
    let send = || p.a.send(&mut rdma(WR_RDMA_WRITE, 1, 0, &mut [], 0, 0));
    assert_eq!((send(), p.a.recv(0, &mut [])), (libc::EINVAL, libc::EINVAL), "RESET");
    for (state, errno) in [(QPS_INIT, libc::EINVAL), (QPS_RTR, libc::EINVAL), (QPS_RTS, 0)] {
        assert_eq!(p.a.to(&attr, state), 0);
        assert_eq!((send(), p.a.recv(0, &mut [])), (errno, 0), "state {state}");
    }
}

#[test]
fn bad_requests_are_refused_at_post_time() {
    let p = pair();
    let mut many = [p.local.sge(0, 1); 5];
    assert_eq!(p.a.send(&mut wr(WR_SEND, 1, 0, &mut many)), libc::ENOMEM, "too many entries");
    assert_eq!(p.b.recv(1, &mut many), libc::EINVAL, "too many entries");
    let mut sge = [p.local.sge(0, 65)];
    assert_eq!(
        p.a.send(&mut wr(WR_SEND, 1, SEND_INLINE, &mut sge)),
        libc::ENOMEM,
        "inline too long"
    );
    assert_eq!(p.a.send(&mut wr(9, 1, 0, &mut [])), libc::EINVAL, "unknown opcode");
    assert_eq!(p.a.send(&mut wr(WR_SEND, 1, 1 << 9, &mut [])), libc::EINVAL, "unknown flag");
    let mut negative = wr(WR_SEND, 1, 0, &mut []);
    negative.num_sge = -1;
    assert_eq!(p.a.send(&mut negative), libc::EINVAL);
    assert_eq!(p.write(8), WC_SUCCESS, "the QP is unharmed");
}

#[test]
fn registration_refuses_what_cannot_be_pinned() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let d = Device::open();
    let buf = Buf::new(4096);
    let reg = |addr, len, access| d.try_reg(d.pd, addr, len, access).err();
    assert_eq!(reg(buf.addr(), 0, ALL), Some(libc::EINVAL), "empty");
    assert_eq!(
        reg(buf.addr(), 4096, ACCESS_REMOTE_WRITE),
        Some(libc::EINVAL),
        "remote without local write"
    );
    assert_eq!(reg(buf.addr(), 4096, 1 << 15), Some(libc::EINVAL), "unknown flag");
    assert_eq!(reg(buf.addr(), 4097, ALL), Some(libc::EFAULT), "runs into the guard page");
    assert_eq!(reg(4096, 4096, ALL), Some(libc::EFAULT), "nothing there");
    assert_eq!(reg(u64::MAX - 10, 100, ALL), Some(libc::EINVAL), "wraps");
    buf.protect();
    assert_eq!(reg(buf.addr(), 4096, ALL), Some(libc::EFAULT), "read-only");
    assert_eq!(reg(buf.addr(), 4096, ACCESS_REMOTE_READ), None, "readable is enough for reading");
    assert_eq!(
        reg(buf.addr(), 4096, ACCESS_REMOTE_READ | 1 << 20),
        None,
        "relaxed ordering may be ignored"
    );
}

#[test]
fn iova_shifts_the_keys_view() {
    let p = pair();
    let iova = 0x7700_0000_0000;
    let addr =
        std::ptr::with_exposed_provenance_mut(usize::try_from(p.to.addr()).expect("address"));
    // SAFETY: a live PD and our own buffer.
    let mr = unsafe {
        assert!(memory::ibv_reg_mr_iova2(p.device.pd, addr, 4096, iova + 8, ALL).is_null());
        assert_eq!(errno(), libc::EINVAL, "both lie equally far into a page");
        memory::ibv_reg_mr_iova2(p.device.pd, addr, 4096, iova, ALL)
    };
    assert!(!mr.is_null());
    let mr = Region::of(mr);
    p.from.put(0, b"shifted!");
    let mut sge = [p.local.sge(0, 8)];
    let mut wr = rdma(WR_RDMA_WRITE, 1, SEND_SIGNALED, &mut sge, iova + 8, mr.key);
    assert_eq!(p.a.send(&mut wr), 0);
    assert_eq!((wait(p.cq_a).status, p.to.get(8, 8)), (WC_SUCCESS, b"shifted!".to_vec()));
}

#[test]
fn any_mappable_descriptor_is_a_dmabuf() {
    let p = pair();
    // SAFETY: plain system calls on a descriptor of our own; the registration keeps its own copy.
    let mr = unsafe {
        let fd = libc::memfd_create(c"dmabuf".as_ptr(), 0);
        assert_eq!(libc::ftruncate(fd, 8192), 0);
        assert!(
            memory::ibv_reg_dmabuf_mr(p.device.pd, 0, 8193, 0, fd, ALL.cast_signed()).is_null()
        );
        assert!(
            memory::ibv_reg_dmabuf_mr(p.device.pd, 64, 4096, 0x1000, fd, ALL.cast_signed())
                .is_null()
        );
        assert_eq!(errno(), libc::EINVAL, "they lie unequally far into their pages");
        let mr = memory::ibv_reg_dmabuf_mr(p.device.pd, 4096, 4096, 0x1000, fd, ALL.cast_signed());
        libc::close(fd);
        assert!(!mr.is_null(), "errno {}", errno());
        mr
    };
    let key = Region::of(mr).key;
    p.from.put(0, b"into fd.");
    let mut sge = [p.local.sge(0, 8)];
    for (opcode, at) in [(WR_RDMA_WRITE, 0), (WR_RDMA_READ, 16)] {
        sge[0].addr = p.from.addr() + at;
        let mut wr = rdma(opcode, 1, SEND_SIGNALED, &mut sge, 0x1000 + 4088, key);
        assert_eq!(p.a.send(&mut wr), 0);
        assert_eq!(wait(p.cq_a).status, WC_SUCCESS);
    }
    assert_eq!(p.from.get(16, 8), b"into fd.");
    // SAFETY: a live PD; a descriptor of -1 is how callers ask whether this is supported at all.
    let none = unsafe { memory::ibv_reg_dmabuf_mr(p.device.pd, 0, 4096, 0, -1, ALL.cast_signed()) };
    assert_eq!((none.is_null(), errno()), (true, libc::EBADF));
}

#[test]
fn a_shared_receive_queue_serves_two_qps_and_reports_its_limit() {
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let d = Device::open();
    let (cq_a, cq_b) = (d.cq(16), d.cq(16));
    let mut init = SrqInitAttr {
        srq_context: null_mut(),
        attr: SrqAttr { max_wr: 4, max_sge: 1, srq_limit: 0 },
    };
    // SAFETY: a live PD and our own structure.
    let srq = unsafe { queues::ibv_create_srq(d.pd, &raw mut init) };
    assert!(!srq.is_null());
    let post = |id| {
        let mut wr = RecvWr { wr_id: id, next: null_mut(), sg_list: null_mut(), num_sge: 0 };
        let mut bad = null_mut();
        // SAFETY: a live handle and our own request.
        unsafe { softrnic::capi::data::post_srq_recv(srq, &raw mut wr, &raw mut bad) }
    };
    for id in 0..4 {
        assert_eq!(post(id), 0);
    }
    assert_eq!(post(4), libc::ENOMEM);
    let mut limit = SrqAttr { srq_limit: 3, ..SrqAttr::default() };
    // SAFETY: a live handle and our own structure.
    assert_eq!(unsafe { queues::ibv_modify_srq(srq, &raw mut limit, 2) }, 0);
    let mut ids = Vec::new();
    for _ in 0..2 {
        let a = d.qp(cq_a, cq_a, null_mut(), cap());
        let b = d.qp(cq_b, cq_b, srq, cap());
        a.connect_to(b.num());
        b.connect_to(a.num());
        assert_eq!(b.recv(0, &mut []), libc::EINVAL, "its receives come from the shared queue");
        assert_eq!(a.send(&mut rdma(WR_RDMA_WRITE_WITH_IMM, 1, 0, &mut [], 0, 0)), 0);
        let wc = wait(cq_b);
        assert_eq!(wc.qp_num, b.num());
        ids.push(wc.wr_id);
    }
    assert_eq!(ids, [0, 1]);
    assert_eq!(d.event(), (EVENT_SRQ_LIMIT_REACHED, srq.expose_provenance() as u64));
    // SAFETY: any handle value may be passed.
    assert_eq!(unsafe { queues::ibv_destroy_srq(srq) }, libc::EBUSY);
}

#[test]
fn channels_fire_once_per_request_and_honour_solicited() {
    use softrnic::capi::events::{ibv_ack_cq_events, ibv_get_cq_event};
    setup(&[("SOFTRNIC_ENGINE", crate::ENGINE)]);
    let d = Device::open();
    // SAFETY: a live context.
    let channel = unsafe { queues::ibv_create_comp_channel(d.context) };
    assert!(!channel.is_null());
    // SAFETY: a live channel.
    let fd = unsafe { (*channel).fd };
    // SAFETY: a plain system call on the channel's descriptor.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
    let (cq_a, cq_b) = (d.cq(16), d.cq_on(16, channel));
    let a = d.qp(cq_a, cq_a, null_mut(), cap());
    let b = d.qp(cq_b, cq_b, null_mut(), cap());
    a.connect_to(b.num());
    b.connect_to(a.num());
    let fired = || {
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: a live channel and our own out-pointers.
        let got = unsafe { ibv_get_cq_event(channel, &raw mut cq, &raw mut context) } == 0;
        assert!(got && cq == cq_b || !got && errno() == libc::EAGAIN);
        // SAFETY: a live handle.
        unsafe { ibv_ack_cq_events(cq, 1) };
        got
    };
    let send = |flags| {
        assert_eq!(b.recv(0, &mut []), 0);
        assert_eq!(a.send(&mut wr(WR_SEND, 1, flags, &mut [])), 0);
        wait(cq_b);
    };
    // SAFETY: a live handle.
    let arm =
        |solicited| assert_eq!(unsafe { softrnic::capi::data::req_notify_cq(cq_b, solicited) }, 0);
    send(0);
    assert!(!fired(), "not armed");
    arm(0);
    assert!(!fired(), "nothing new");
    send(0);
    send(0);
    assert_eq!((fired(), fired()), (true, false), "once per request");
    arm(1);
    send(0);
    assert!(!fired(), "not solicited");
    send(SEND_SOLICITED);
    assert!(fired());
    // SAFETY: any handle value may be passed.
    assert_eq!(unsafe { queues::ibv_destroy_comp_channel(channel) }, libc::EBUSY);
}

#[test]
fn parents_outlive_their_children() {
    let p = pair();
    // SAFETY: any handle value may be passed.
    unsafe {
        assert_eq!(memory::ibv_dealloc_pd(p.device.pd), libc::EBUSY);
        assert_eq!(queues::ibv_destroy_cq(p.cq_a), libc::EBUSY);
        assert_eq!((p.a.destroy(), p.b.destroy()), (0, 0));
        assert_eq!((queues::ibv_destroy_cq(p.cq_a), queues::ibv_destroy_cq(p.cq_b)), (0, 0));
        assert_eq!(memory::ibv_dealloc_pd(p.device.pd), libc::EBUSY, "regions are left");
        assert_eq!((p.local.dereg(), p.remote.dereg()), (0, 0));
        assert_eq!(memory::ibv_dealloc_pd(p.device.pd), 0);
    }
}

#[test]
fn stale_and_foreign_handles_are_refused() {
    let p = pair();
    let mut sge = [p.local.sge(0, 8)];
    assert_eq!(p.a.destroy(), 0);
    assert_eq!(p.a.destroy(), libc::EINVAL);
    let mut wr = rdma(WR_RDMA_WRITE, 1, 0, &mut sge, p.remote.addr, p.remote.key);
    // SAFETY: a destroyed QP stays allocated for a while, which is what this tests; our own request.
    let errno = unsafe { softrnic::capi::data::post_send(p.a.qp, &raw mut wr, null_mut()) };
    assert_eq!(errno, libc::EINVAL);
    for value in [0_usize, 1, 0x1000, usize::MAX, 0x7fff_dead_beef] {
        let p: *mut libc::c_void = std::ptr::without_provenance_mut(value);
        // SAFETY: control calls look handles up before they read through them.
        unsafe {
            assert_eq!(queues::ibv_destroy_qp(p.cast()), libc::EINVAL);
            assert_eq!(queues::ibv_destroy_cq(p.cast()), libc::EINVAL);
            assert_eq!(queues::ibv_destroy_srq(p.cast()), libc::EINVAL);
            assert_eq!(memory::ibv_dereg_mr(p.cast()), libc::EINVAL);
            assert_eq!(memory::ibv_dealloc_pd(p.cast()), libc::EINVAL);
            assert_eq!(queues::ibv_destroy_comp_channel(p.cast()), libc::EINVAL);
            assert_eq!(softrnic::capi::devices::ibv_close_device(p.cast()), libc::EINVAL);
            assert!(memory::ibv_alloc_pd(p.cast()).is_null());
            assert!(softrnic::capi::devices::ibv_open_device(p.cast()).is_null());
        }
    }
}

#[test]
fn completions_of_a_destroyed_qp_disappear() {
    let p = pair();
    let mut wr = rdma(WR_RDMA_WRITE, 1, SEND_SIGNALED, &mut [], 0, 0);
    assert_eq!(p.a.send(&mut wr), 0);
    assert_eq!(p.a.destroy(), 0);
    assert!(poll(p.cq_a).is_none());
}

#[test]
fn a_qp_works_again_after_reset() {
    let p = pair();
    let mut bad = rdma(WR_RDMA_WRITE, 1, 0, &mut [p.local.sge(0, 8)], p.remote.addr, 1);
    assert_eq!(p.a.send(&mut bad), 0);
    assert_eq!(wait(p.cq_a).status, WC_REM_ACCESS_ERR);
    for qp in [p.a, p.b] {
        assert_eq!(qp.to(&QpAttr::default(), QPS_RESET), 0);
    }
    p.a.connect_to(p.b.num());
    p.b.connect_to(p.a.num());
    assert_eq!(p.write(64), WC_SUCCESS);
}
