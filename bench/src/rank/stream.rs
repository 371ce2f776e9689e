//! The timed bandwidth pass: one buffer used again and again and a fixed number of receives in flight, as perftest's
//! ib_write_bw does with its buffer and its send queue depth. The warm-up has ended when the clock starts: nothing that is
//! counted was in flight before.

use super::endpoint::Endpoint;
use crate::failure::Result;
use crate::link::{Reply, StreamPlan};
use crate::net::abi::TEST_SIZES;
use crate::net::{Member, Net, Request};
use std::collections::VecDeque;
use std::time::Instant;

/// Rank 0: keeps the window full of sends, first unmeasured, then from the first post to the last completion.
pub fn send(net: &Net, endpoint: &Endpoint, plan: &StreamPlan) -> Result<Reply> {
    send_all(net, endpoint, plan, plan.warmup)?;
    let start = Instant::now();
    send_all(net, endpoint, plan, plan.count)?;
    Ok(Reply::Timed { seconds: start.elapsed().as_secs_f64() })
}

/// Rank 1: the same with receives.
pub fn receive(net: &Net, endpoint: &Endpoint, plan: &StreamPlan) -> Result<Reply> {
    receive_all(net, endpoint, plan, plan.warmup)?;
    let start = Instant::now();
    receive_all(net, endpoint, plan, plan.count)?;
    Ok(Reply::Timed { seconds: start.elapsed().as_secs_f64() })
}

fn send_all(net: &Net, endpoint: &Endpoint, plan: &StreamPlan, receives: u64) -> Result<()> {
    let members = plan.members as u64;
    let total = receives * members;
    let limit = plan.window * plan.members;
    let tags: Vec<Member> =
        (0..plan.members).map(|tag| endpoint.outgoing_member(0, plan.size, tag as i32)).collect();
    let mut in_flight: VecDeque<Request> = VecDeque::with_capacity(limit);
    let (mut posted, mut done) = (0u64, 0u64);
    let mut sizes = [0; TEST_SIZES];
    let mut patience = endpoint.patience();
    while done < total {
        let mut moved = false;
        while posted < total && in_flight.len() < limit {
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
            done += 1;
            moved = true;
        }
        if moved {
            patience.progress();
        } else {
            patience.idle("isend", || format!("{done} of {total} sends done"))?;
        }
    }
    Ok(())
}

fn receive_all(net: &Net, endpoint: &Endpoint, plan: &StreamPlan, total: u64) -> Result<()> {
    let group: Vec<Member> =
        (0..plan.members).map(|tag| endpoint.incoming_member(0, plan.size, tag as i32)).collect();
    let mut in_flight: VecDeque<Request> = VecDeque::with_capacity(plan.window);
    let (mut posted, mut done) = (0u64, 0u64);
    let mut sizes = [0; TEST_SIZES];
    let mut patience = endpoint.patience();
    while done < total {
        let mut moved = false;
        while posted < total && in_flight.len() < plan.window {
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
            done += 1;
            moved = true;
        }
        if moved {
            patience.progress();
        } else {
            patience.idle("irecv", || format!("{done} of {total} receives done"))?;
        }
    }
    Ok(())
}
