//! The same semantics when another thread completes what is posted.

mod common;
mod semantics;

use std::time::{Duration, Instant};

use common::verbs::*;
use softrnic::abi::*;

/// The engine that every test of `semantics` runs in.
const ENGINE: &str = "thread";

#[test]
fn posts_return_before_the_payload_is_there_and_nobody_has_to_poll() {
    setup(&[("SOFTRNIC_ENGINE", ENGINE)]);
    let p = Pair::new();
    let last = p.from.len() - 8;
    let len = u32::try_from(p.from.len()).expect("small");
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut ahead = false;
    // The thread may be as fast as the post once, but not always.
    for round in 1_u64.. {
        p.from.put(last, &round.to_ne_bytes());
        let mut sge = [p.local.sge(0, len)];
        let mut wr =
            rdma(WR_RDMA_WRITE, round, SEND_SIGNALED, &mut sge, p.remote.addr, p.remote.key);
        assert_eq!(p.a.send(&mut wr), 0);
        ahead |= p.to.word(last) != round;
        while p.to.word(last) != round {
            assert!(Instant::now() < deadline, "round {round} never arrived");
            std::thread::yield_now();
        }
        let wc = wait(p.cq_a);
        assert_eq!((wc.wr_id, wc.status), (round, WC_SUCCESS));
        if ahead {
            break;
        }
        assert!(Instant::now() < deadline, "every post waited for its payload");
    }
}
