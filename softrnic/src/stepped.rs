//! The stepped engine: nothing happens to a request until somebody steps, and one step does one thing.
//!
//! A step picks one of the queue pairs that have something to do, by a seeded generator, and lets it do a part of the
//! request at its head: a piece of a payload, or the rest with its completions. Time is virtual: a step takes a
//! microsecond, and while nothing can happen time runs faster and faster, so that limits are reached without waiting. The
//! same seed and the same calls from one thread give the same trace.

use std::sync::Mutex;

use crate::clock;
use crate::env::{Engine, settings};
use crate::faults::timers;
use crate::objects::QPS;
use crate::rng::Rng;
use crate::sync::lock;
use crate::trace;

/// What a step that did something takes, and the first one that did not.
const STEP_NS: u64 = 1000;
/// Longest idle step.
const IDLE_NS: u64 = 1_000_000;

#[derive(Debug)]
struct Scheduler {
    rng: Rng,
    idle: u64,
}

static SCHEDULER: Mutex<Option<Scheduler>> = Mutex::new(None);
/// Held over a whole step: two threads that step take turns.
static TURN: Mutex<()> = Mutex::new(());

fn with<T>(f: impl FnOnce(&mut Scheduler) -> T) -> T {
    let mut scheduler = lock(&SCHEDULER);
    let fresh = || Scheduler { rng: Rng::new(settings().seed()), idle: STEP_NS };
    f(scheduler.get_or_insert_with(fresh))
}

/// A generator for one decision, drawn from the seeded one.
pub fn draw() -> Rng {
    with(|s| Rng::new(s.rng.draw()))
}

/// One step; whether anything happened.
pub fn step() -> bool {
    let _turn = lock(&TURN);
    let mut happened = timers::run_due();
    let mut ready: Vec<_> = if happened { Vec::new() } else { QPS.all() };
    ready.retain(|qp| qp.pending.load(std::sync::atomic::Ordering::SeqCst));
    ready.sort_by_key(|qp| (qp.ordinal, qp.qpn()));
    while !happened && !ready.is_empty() {
        let pick = with(|s| s.rng.below(ready.len() as u64));
        let qp = ready.swap_remove(usize::try_from(pick).unwrap_or(0));
        let mut sq = lock(&qp.sq);
        happened = qp.advance(&mut sq);
        qp.settle_pending(&sq);
    }
    let time = with(|s| {
        let time = if happened { STEP_NS } else { s.idle };
        s.idle = if happened { STEP_NS } else { (s.idle * 2).min(IDLE_NS) };
        time
    });
    clock::advance(time);
    happened
}

/// Begins anew with a seed: generator, clock, trace and the count of queue pairs. Refused while there are any.
pub fn restart(seed: u64) -> Result<(), i32> {
    if settings().engine != Engine::Stepped {
        return Err(libc::EOPNOTSUPP);
    }
    if QPS.count() != 0 {
        return Err(libc::EBUSY);
    }
    let _turn = lock(&TURN);
    *lock(&SCHEDULER) = Some(Scheduler { rng: Rng::new(seed), idle: STEP_NS });
    clock::restart();
    trace::restart();
    crate::qp::restart_ordinals();
    Ok(())
}
