//! What happened lately: the events of the stepped engine, and every fault that fired.
//!
//! An event names queue pairs by the order of their creation and requests by their position in their queue, never by an
//! address or a number that differs from run to run. So the same seed and the same calls give the same text.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Mutex;

use crate::sync::lock;

/// Events that are kept.
const KEPT: usize = 4096;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A request was posted: opcode and bytes.
    Post,
    /// A part of a payload was copied: offset and bytes.
    Piece,
    /// A request ended with this status.
    End,
    /// A request at the head of its queue began to wait.
    Wait,
    /// A rule fired: its number, and which time.
    Fault,
    /// A port went down or up: device << 8 | port, and whether it is up.
    Port,
}

/// One event.
#[derive(Clone, Copy, Debug)]
struct Event {
    number: u64,
    time: u64,
    what: What,
    qp: u32,
    request: u32,
    a: u64,
    b: u64,
}

#[derive(Debug)]
struct Trace {
    events: VecDeque<Event>,
    count: u64,
    hash: u64,
}

static TRACE: Mutex<Trace> =
    Mutex::new(Trace { events: VecDeque::new(), count: 0, hash: 0xcbf2_9ce4_8422_2325 });

/// Adds an event of a queue pair (its ordinal) and one of its requests.
pub fn add(what: What, qp: u32, request: u32, a: u64, b: u64) {
    let time = crate::clock::now();
    let mut trace = lock(&TRACE);
    trace.count += 1;
    let number = trace.count;
    for word in [time, what as u64, u64::from(qp), u64::from(request), a, b] {
        // FNV-1a over words.
        trace.hash = (trace.hash ^ word).wrapping_mul(0x100_0000_01b3);
        trace.hash ^= trace.hash >> 32;
    }
    if trace.events.len() >= KEPT {
        trace.events.pop_front();
    }
    trace.events.push_back(Event { number, time, what, qp, request, a, b });
}

/// Begins a new trace.
pub fn restart() {
    *lock(&TRACE) = Trace { events: VecDeque::new(), count: 0, hash: 0xcbf2_9ce4_8422_2325 };
}

/// A number that two equal traces share, events that are no longer kept included.
pub fn hash() -> u64 {
    lock(&TRACE).hash
}

/// The last `n` events as text, one a line, oldest first.
pub fn text(n: usize) -> String {
    let events: Vec<Event> = {
        let trace = lock(&TRACE);
        trace.events.iter().skip(trace.events.len().saturating_sub(n)).copied().collect()
    };
    let mut text = String::new();
    for e in events {
        let Event { number, time, qp, request, a, b, .. } = e;
        let (a, b) = (a, b);
        // Writing into a string cannot fail.
        let _ = write!(text, "{number:6} {time:>12} ns ");
        let _ = match e.what {
            What::Post => writeln!(text, "qp#{qp}:{request} post {} of {b} B", opcode(a)),
            What::Piece => writeln!(text, "qp#{qp}:{request} copied {b} B at {a}"),
            What::End => writeln!(text, "qp#{qp}:{request} ended, status {a}"),
            What::Wait => writeln!(text, "qp#{qp}:{request} waits"),
            What::Fault => writeln!(text, "qp#{qp}:{request} rule {a} fires, time {b}"),
            What::Port => {
                let state = if b == 1 { "up" } else { "down" };
                writeln!(text, "device {} port {} {state}", a >> 8, a & 0xff)
            }
        };
    }
    text
}

fn opcode(code: u64) -> &'static str {
    let index = usize::try_from(code).unwrap_or(usize::MAX);
    crate::faults::rule::OPS.get(index).copied().unwrap_or("request")
}
