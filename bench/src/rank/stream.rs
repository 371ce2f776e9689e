//! The timed bandwidth pass: one buffer used again and again and a fixed number of receives in flight, as perftest's
//! ib_write_bw does with its buffer and its send queue depth.

use super::endpoint::Endpoint;
use crate::failure::Result;
use crate::link::{Reply, StreamPlan};
use crate::net::abi::TEST_SIZES;
use crate::net::{Member, Net, Request};
use std::collections::VecDeque;
use std::time::Instant;

/// Counts finished operations and times those after the warm-up.
struct Clock {
    warmup: u64,
    total: u64,
    done: u64,
    started: Option<Instant>,
}

impl Clock {
    fn new(warmup: u64, count: u64) -> Self {
        let started = (warmup == 0).then(Instant::now);
        Self { warmup, total: warmup + count, done: 0, started }
    }

    fn one_done(&mut self) {
        self.done += 1;
        if self.done == self.warmup {
            self.started = Some(Instant::now());
        }
    }

    fn reply(&self) -> Reply {
        let seconds = self.started.map_or(0.0, |start| start.elapsed().as_secs_f64());
        Reply::Timed { seconds }
    }
}

/// Rank 0: keeps the window full of sends.
pub fn send(net: &Net, endpoint: &Endpoint, plan: &StreamPlan) -> Result<Reply> {
    let members = plan.members as u64;
    let limit = plan.window * plan.members;
    let tags: Vec<Member> =
        (0..plan.members).map(|tag| endpoint.outgoing_member(0, plan.size, tag as i32)).collect();
    let mut clock = Clock::new(plan.warmup * members, plan.count * members);
    let mut in_flight: VecDeque<Request> = VecDeque::with_capacity(limit);
    let mut posted = 0u64;
    let mut sizes = [0; TEST_SIZES];
    let mut patience = endpoint.patience();
    while clock.done < clock.total {
        let mut moved = false;
        while posted < clock.total && in_flight.len() < limit {
            let member = tags[(posted % members) as usize];
            // SAFETY: the buffer is registered, and nobody writes to it during the pass.
            let Some(request) = (unsafe { net.isend(endpoint.send(), member)? }) else { break };
            in_flight.push_back(request);
            posted += 1;
            moved = true;
        }
        while let Some(&oldest) = in_flight.front() {
            if !net.test(oldest, &mut sizes)? {
                break;
            }
            in_flight.pop_front();
            clock.one_done();
            moved = true;
        }
        if moved {
            patience.progress();
        } else {
            patience.idle("isend", || format!("{} of {} sends done", clock.done, clock.total))?;
        }
    }
    Ok(clock.reply())
}

/// Rank 1: keeps the window full of receives.
pub fn receive(net: &Net, endpoint: &Endpoint, plan: &StreamPlan) -> Result<Reply> {
    let group: Vec<Member> =
        (0..plan.members).map(|tag| endpoint.incoming_member(0, plan.size, tag as i32)).collect();
    let mut clock = Clock::new(plan.warmup, plan.count);
    let mut in_flight: VecDeque<Request> = VecDeque::with_capacity(plan.window);
    let mut posted = 0u64;
    let mut sizes = [0; TEST_SIZES];
    let mut patience = endpoint.patience();
    while clock.done < clock.total {
        let mut moved = false;
        while posted < clock.total && in_flight.len() < plan.window {
            // SAFETY: the buffer is registered, and nobody reads it during the pass.
            let Some(request) = (unsafe { net.irecv(endpoint.recv(), &group)? }) else { break };
            in_flight.push_back(request);
            posted += 1;
            moved = true;
        }
        while let Some(&oldest) = in_flight.front() {
            if !net.test(oldest, &mut sizes)? {
                break;
            }
            in_flight.pop_front();
            clock.one_done();
            moved = true;
        }
        if moved {
            patience.progress();
        } else {
            patience
                .idle("irecv", || format!("{} of {} receives done", clock.done, clock.total))?;
        }
    }
    Ok(clock.reply())
}
