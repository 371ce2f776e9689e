//! The latency pass: one message at a time, back and forth over the two connections.

use super::endpoint::Endpoint;
use crate::failure::Result;
use crate::link::Reply;
use crate::net::abi::TEST_SIZES;
use crate::net::{Net, Request};
use std::time::Instant;

const TAG: i32 = 7;

/// Plays `count` rounds after a tenth as many unmeasured ones. Rank 0 starts and holds the watch.
pub fn play(net: &Net, endpoint: &Endpoint, first: bool, size: usize, count: u64) -> Result<Reply> {
    let warmup = (count / 10).clamp(2, 1000);
    let mut times = Vec::with_capacity(count as usize);
    for round in 0..warmup + count {
        let incoming = start_receive(net, endpoint, size)?;
        if first {
            let start = Instant::now();
            let outgoing = start_send(net, endpoint, size)?;
            finish(net, endpoint, outgoing)?;
            finish(net, endpoint, incoming)?;
            if round >= warmup {
                times.push(start.elapsed().as_nanos() as f64 / 2.0);
            }
        } else {
            finish(net, endpoint, incoming)?;
            let outgoing = start_send(net, endpoint, size)?;
            finish(net, endpoint, outgoing)?;
        }
    }
    if !first {
        return Ok(Reply::Done);
    }
    times.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    Ok(Reply::Latency { p50: at(0.5), p99: at(0.99), min: at(0.0) })
}

fn start_receive(net: &Net, endpoint: &Endpoint, size: usize) -> Result<Request> {
    let member = [endpoint.incoming_member(0, size, TAG)];
    let mut patience = endpoint.patience();
    loop {
        // SAFETY: the buffer is registered, and nobody reads it during the pass.
        if let Some(request) = unsafe { net.irecv(endpoint.recv(), &member)? } {
            return Ok(request);
        }
        patience.idle("irecv", || "irecv keeps saying that it would block".into())?;
    }
}

fn start_send(net: &Net, endpoint: &Endpoint, size: usize) -> Result<Request> {
    let member = endpoint.outgoing_member(0, size, TAG);
    let mut patience = endpoint.patience();
    loop {
        // SAFETY: the buffer is registered, and nobody writes to it during the pass.
        if let Some(request) = unsafe { net.isend(endpoint.send(), member)? } {
            return Ok(request);
        }
        patience.idle("isend", || "the peer's receive never became visible".into())?;
    }
}

fn finish(net: &Net, endpoint: &Endpoint, request: Request) -> Result<()> {
    let mut sizes = [0; TEST_SIZES];
    let mut patience = endpoint.patience();
    while !net.test(request, &mut sizes)? {
        patience.idle("test", || "the request never completed".into())?;
    }
    Ok(())
}
