//! The stepped engine as a machine of its own: the seed decides everything, time is virtual, and what happened can be
//! read. The seed is the whole process's, so the tests take turns.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::verbs::*;
use softrnic::abi::*;
use softrnic::capi::control::softrnic_port;
use softrnic::capi::faults::*;

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // The machine's own time would show as a run that takes minutes, and as differing traces.
    setup(&[("SOFTRNIC_ENGINE", "stepped"), ("SOFTRNIC_RETRY_MS", "60000")]);
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn plan(text: &str) {
    let text = std::ffi::CString::new(text).expect("no NUL");
    // SAFETY: a NUL-terminated string.
    assert_eq!(unsafe { softrnic_faults(text.as_ptr()) }, 0);
}

fn trace() -> String {
    // SAFETY: no buffer is allowed.
    let len = unsafe { softrnic_trace(std::ptr::null_mut(), 0) };
    let mut text = vec![0_u8; len + 1];
    // SAFETY: a buffer of that size.
    assert_eq!(unsafe { softrnic_trace(text.as_mut_ptr().cast(), text.len()) }, len);
    assert_eq!(text.pop(), Some(0));
    String::from_utf8(text).expect("ASCII")
}

/// Connected pairs under a seed. Prints seed and trace if the test fails, so that it can be run again.
struct Run {
    seed: u64,
    pairs: Vec<Pair>,
}

impl Run {
    fn new(seed: u64, pairs: usize, faults: &str) -> Self {
        assert_eq!(softrnic_seed(seed), 0);
        let run = Self { seed, pairs: (0..pairs).map(|_| Pair::new()).collect() };
        plan(faults);
        run
    }

    fn write(&self, pair: usize, id: u64, len: u32) {
        let p = &self.pairs[pair];
        // Behind a failed sender receives would only pile up.
        if p.a.query().qp_state == QPS_RTS {
            assert_eq!(p.b.recv(id, &mut []), 0);
        }
        let mut sge = [p.local.sge(0, len)];
        let (remote, key) = (p.remote.addr, p.remote.key);
        let mut wr = rdma(WR_RDMA_WRITE_WITH_IMM, id, SEND_SIGNALED, &mut sge, remote, key);
        assert_eq!(p.a.send(&mut wr), 0);
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}; the last events:\n{}", self.seed, softrnic::trace::text(100));
        }
        plan("");
        for p in &self.pairs {
            p.a.destroy();
            p.b.destroy();
        }
    }
}

const FAULTS: &str = "op=write-imm every=7 p=0.5 -> delay=3ms\n\
                      every=5 -> behind=4 for=2ms\n\
                      bytes=2K.. p=0.3 -> shuffle=300\n\
                      qp=#3 nth=9 -> port-down for=5ms\n\
                      qp=#5 nth=20 -> status=retry-exc at=half\n";

/// Traffic over three queue pairs with faults; the completions in the order in which they came, and the trace.
fn traffic(seed: u64) -> (Vec<(usize, u64, u32)>, String, u64) {
    let run = Run::new(seed, 3, FAULTS);
    let bytes: Vec<u8> = (0..=250).cycle().take(4096).collect();
    let (mut seen, mut posted, mut length) = (Vec::new(), 0_u64, 40_u32);
    for p in &run.pairs {
        p.from.put(0, &bytes);
    }
    let steps = Instant::now() + Duration::from_secs(60);
    while seen.len() < 150 {
        // Eight at a time, so that queues differ in length.
        if posted < 150 && posted - seen.len() as u64 <= 8 {
            length = (length * 13 + 7) % 4096;
            run.write(usize::try_from(posted % 3).expect("small"), posted, length);
            posted += 1;
        }
        for (index, p) in run.pairs.iter().enumerate() {
            if let Some(wc) = poll(p.cq_b) {
                assert!(matches!(wc.status, WC_SUCCESS | WC_WR_FLUSH_ERR), "{}", wc.status);
                if wc.status == WC_SUCCESS {
                    let len = usize::try_from(wc.byte_len).expect("small");
                    assert_eq!(p.to.get(0, len), bytes[..len], "payload before its completion");
                }
            }
            if let Some(wc) = poll(p.cq_a) {
                seen.push((index, wc.wr_id, wc.status));
            }
        }
        assert!(Instant::now() < steps, "{} of {posted} completions", seen.len());
    }
    let failed: Vec<_> = seen.iter().filter(|(_, _, status)| *status != WC_SUCCESS).collect();
    assert_eq!(failed.first().map(|f| (f.0, f.2)), Some((2, WC_RETRY_EXC_ERR)));
    assert!(failed[1..].iter().all(|f| (f.0, f.2) == (2, WC_WR_FLUSH_ERR)));
    (seen, trace(), softrnic_trace_hash())
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let _turn = turn();
    let first = traffic(11);
    for _ in 0..3 {
        assert_eq!(traffic(11), first);
    }
    for seed in 12..20 {
        let other = traffic(seed);
        assert_ne!(other.0, first.0, "seed {seed}: another order of completions");
        assert_ne!(other.2, first.2, "seed {seed}");
        assert_eq!(traffic(seed), other);
    }
}

#[test]
fn waits_take_virtual_time() {
    let _turn = turn();
    let run = Run::new(1, 1, "nth=1 -> delay=1000s\nnth=2 -> drop\n");
    let begin = softrnic_now();
    let wait = |id| {
        run.write(0, id, 8);
        let wc = wait(run.pairs[0].cq_a);
        assert_eq!(wc.wr_id, id);
        (wc.status, (softrnic_now() - begin) / 1_000_000_000)
    };
    assert_eq!(wait(1), (WC_SUCCESS, 1000));
    // The retry time of SOFTRNIC_RETRY_MS.
    assert_eq!(wait(2), (WC_RETRY_EXC_ERR, 1060));
    let before = softrnic_now();
    assert_eq!(softrnic_advance(5), 0);
    assert_eq!(softrnic_now(), before + 5);
}

#[test]
fn nothing_happens_between_steps() {
    let _turn = turn();
    let run = Run::new(1, 1, "");
    let p = &run.pairs[0];
    p.from.put(0, &[7; 8192]);
    run.write(0, 1, 8192);
    let there = || p.to.get(0, 8192).iter().filter(|b| **b == 7).count();
    assert_eq!(there(), 0, "the post did nothing");
    assert_eq!(softrnic_step(1), 1);
    assert_eq!(there(), 4096, "one packet of two");
    assert_eq!(softrnic_step(1), 1);
    assert_eq!(there(), 8192);
    assert_eq!(
        softrnic_step(100),
        1,
        "the completions are a step of their own, and then nothing is left"
    );
    let text = trace();
    let events: Vec<&str> =
        text.lines().map(|l| l.split(" ns ").nth(1).expect("an event")).collect();
    assert_eq!(events.len(), 4, "{text}");
    assert_eq!(events[0], "qp#1:1 post write-imm of 8192 B");
    assert!(events[1].starts_with("qp#1:1 copied 4096 B at "), "{text}");
    assert_eq!(events[3], "qp#1:1 ended, status 0");
    assert_eq!(softrnic_seed(2), libc::EBUSY, "there are queue pairs");
}

#[test]
fn faults_and_ports_are_in_the_trace() {
    let _turn = turn();
    let run = Run::new(1, 1, "nth=2 -> port-down for=3ms");
    for id in 0..3 {
        run.write(0, id, 8);
        assert_eq!(wait(run.pairs[0].cq_a).status, WC_SUCCESS);
    }
    let text = trace();
    let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what} in\n{text}"));
    assert!(at("rule 0 fires, time 1") < at("device 0 port 1 down"), "{text}");
    assert!(at("device 0 port 1 down") < at("qp#1:2 waits"), "{text}");
    assert!(at("qp#1:2 waits") < at("device 0 port 1 up"), "{text}");
    assert!(at("device 0 port 1 up") < at("qp#1:2 ended, status 0"), "{text}");
    // Taken down by hand, it stays so until the retries are used up.
    // SAFETY: a NUL-terminated string.
    assert_eq!(unsafe { softrnic_port(c"softrnic0".as_ptr(), 1, 0) }, 0);
    run.write(0, 3, 8);
    assert_eq!(wait(run.pairs[0].cq_a).status, WC_RETRY_EXC_ERR);
    // SAFETY: as above.
    assert_eq!(unsafe { softrnic_port(c"softrnic0".as_ptr(), 1, 1) }, 0);
}
