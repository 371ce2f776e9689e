//! The program whose instructions are counted: both ends of one connection in one process, on the null provider.
//!
//! It runs a list of phases. callgrind starts counting from zero when [`pinrail_bench_phase`] is entered and writes its
//! counts when it is left, so connecting, warming up and closing never count. In a second run it counts only inside
//! [`pinrail_bench_probe`], which tells the sending half of a message from the receiving half.

use super::provider::{Counters, Provider};
use crate::cli::CpuLoop;
use crate::failure::{Failure, Result};
use crate::net::abi::TEST_SIZES;
use crate::net::{Net, Request, log};
use crate::rank::endpoint::{Endpoint, pair};
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::time::Duration;

/// Messages before the first phase: more than any ring in a plugin has slots, so that the phases see steady state.
const WARMUP: u64 = 600;
const TAG: i32 = 1;
const BUFFER: usize = 64 << 10;
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a phase repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Kind {
    /// irecv, isend, one successful test on each side.
    Message,
    /// The same, with isend and its test in the probe.
    SendHalf,
    /// The same, with irecv and its test in the probe.
    ReceiveHalf,
    /// The same as `Message`, 16 in flight.
    Window,
    /// A test of a send that cannot complete.
    IdleSend,
    /// A test of a receive that nobody sends to.
    IdleReceive,
    /// iflush and one successful test.
    Flush,
}

/// One phase as it was run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Phase {
    /// What was repeated.
    pub kind: Kind,
    /// Message size.
    pub size: usize,
    /// Repetitions; 0: the plugin has nothing to do here (a flush of host memory).
    pub count: u64,
    /// Work requests per repetition.
    pub work_requests: f64,
    /// Post calls, which is doorbells, per repetition.
    pub doorbells: f64,
    /// `ibv_poll_cq` calls per repetition.
    pub polls: f64,
    /// Test calls per repetition beyond the successful ones.
    pub vain_tests: f64,
}

/// All phases in the order in which they run.
pub const PHASES: [(Kind, usize); 12] = [
    (Kind::Message, 8),
    (Kind::SendHalf, 8),
    (Kind::ReceiveHalf, 8),
    (Kind::Window, 8),
    (Kind::Message, 8192),
    (Kind::SendHalf, 8192),
    (Kind::ReceiveHalf, 8192),
    (Kind::Window, 8192),
    (Kind::IdleSend, 8),
    (Kind::IdleReceive, 8),
    (Kind::Flush, 8),
    (Kind::Flush, 8192),
];

type Body<'a> = &'a mut dyn FnMut() -> Result<()>;

/// callgrind's marker: a phase. The name is an option of the valgrind command.
#[unsafe(no_mangle)]
#[inline(never)]
fn pinrail_bench_phase(body: Body<'_>) -> Result<()> {
    // Not a tail call: callgrind recognises the end of a function by its return.
    black_box(body())
}

/// callgrind's marker: the part of a phase that a half's figure is about.
#[unsafe(no_mangle)]
#[inline(never)]
fn pinrail_bench_probe(body: Body<'_>) -> Result<()> {
    let outcome = body();
    black_box(&outcome);
    outcome
}

/// Runs everything and prints the phases as JSON.
pub fn run(options: &CpuLoop) -> Result<()> {
    log::configure("", options.verbose);
    let provider = Provider::open(&options.provider)?;
    let net = Net::open(&options.plugin, options.abi)?;
    let device = net.devices()?.first().map_or(0, |device| device.index);
    let (listener, handle) = net.listen(device)?;
    let (send, recv) = pair(&net, device, listener, handle, TIMEOUT)?;
    let endpoint = Endpoint::new(&net, send, recv, BUFFER, None, TIMEOUT)?;
    let mut driver = Driver { net: &net, endpoint: &endpoint, provider: &provider, vain: 0 };
    for _ in 0..WARMUP {
        driver.message(8)?;
    }
    let mut phases = Vec::new();
    for (kind, size) in PHASES {
        phases.push(driver.phase(kind, size, options.count)?);
    }
    let faults = provider.counters().faults;
    if faults != 0 {
        return Err(Failure::new("null provider", format!("{faults} things a plugin must not do")));
    }
    let summary = Summary { name: net.name().to_owned(), abi: net.version(), phases };
    endpoint.close(&net)?;
    net.close()?;
    let text =
        serde_json::to_string(&summary).map_err(|error| Failure::new("cpu", error.to_string()))?;
    println!("{text}");
    Ok(())
}

/// What the counted program prints.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summary {
    /// The plugin's name.
    pub name: String,
    /// The table version in use.
    pub abi: u8,
    /// All phases, in order.
    pub phases: Vec<Phase>,
}

struct Driver<'a> {
    net: &'a Net,
    endpoint: &'a Endpoint,
    provider: &'a Provider,
    vain: u64,
}

impl Driver<'_> {
    fn phase(&mut self, kind: Kind, size: usize, count: u64) -> Result<Phase> {
        // What a phase needs before it and undoes after it stays outside the counted function.
        let mut count = count;
        let mut pending = None;
        match kind {
            Kind::IdleSend => {
                let incoming = self.irecv(size)?;
                self.provider.hold(true);
                pending = Some((incoming, Some(self.isend(size)?)));
            }
            Kind::IdleReceive => pending = Some((self.irecv(size)?, None)),
            Kind::Flush if self.flush(size)?.is_none() => count = 0,
            _ => {}
        }
        self.vain = 0;
        let before = self.provider.counters();
        pinrail_bench_phase(&mut || self.repeat(kind, size, count, pending))?;
        let after = self.provider.counters();
        let vain = self.vain;
        self.provider.hold(false);
        if let Some((incoming, outgoing)) = pending {
            let outgoing = outgoing.map_or_else(|| self.isend(size), Ok)?;
            self.finish(outgoing)?;
            self.finish(incoming)?;
        }
        Ok(Phase::new(kind, size, count, vain, &before, &after))
    }

    fn repeat(
        &mut self,
        kind: Kind,
        size: usize,
        count: u64,
        pending: Option<(Request, Option<Request>)>,
    ) -> Result<()> {
        match (kind, pending) {
            (Kind::Message, _) => (0..count).try_for_each(|_| self.message(size)),
            (Kind::SendHalf, _) => (0..count).try_for_each(|_| self.send_half(size)),
            (Kind::ReceiveHalf, _) => (0..count).try_for_each(|_| self.receive_half(size)),
            (Kind::Window, _) => self.window(size, count),
            (Kind::IdleSend, Some((_, Some(request))))
            | (Kind::IdleReceive, Some((request, _))) => {
                let mut sizes = [0; TEST_SIZES];
                for _ in 0..count {
                    if self.net.test(request, &mut sizes)? {
                        return Err(Failure::new("cpu", "a request completed out of nothing"));
                    }
                }
                Ok(())
            }
            (Kind::Flush, _) => (0..count).try_for_each(|_| self.flush(size).map(|_| ())),
            (Kind::IdleSend | Kind::IdleReceive, _) => {
                Err(Failure::new("cpu", "nothing is pending"))
            }
        }
    }

    fn message(&mut self, size: usize) -> Result<()> {
        let incoming = self.irecv(size)?;
        let outgoing = self.isend(size)?;
        self.finish(outgoing)?;
        self.finish(incoming)
    }

    fn send_half(&mut self, size: usize) -> Result<()> {
        let incoming = self.irecv(size)?;
        pinrail_bench_probe(&mut || {
            let outgoing = self.isend(size)?;
            self.finish(outgoing)
        })?;
        self.finish(incoming)
    }

    fn receive_half(&mut self, size: usize) -> Result<()> {
        let mut incoming = None;
        pinrail_bench_probe(&mut || {
            incoming = Some(self.irecv(size)?);
            Ok(())
        })?;
        let outgoing = self.isend(size)?;
        self.finish(outgoing)?;
        pinrail_bench_probe(&mut || {
            incoming.take().map_or(Ok(()), |incoming| self.finish(incoming))
        })
    }

    fn window(&mut self, size: usize, count: u64) -> Result<()> {
        const WINDOW: usize = 16;
        for _ in 0..count / WINDOW as u64 {
            let mut incoming = [None; WINDOW];
            let mut outgoing = [None; WINDOW];
            for slot in &mut incoming {
                *slot = Some(self.irecv(size)?);
            }
            for slot in &mut outgoing {
                *slot = Some(self.isend(size)?);
            }
            for request in outgoing.into_iter().chain(incoming).flatten() {
                self.finish(request)?;
            }
        }
        Ok(())
    }

    /// Flushes and waits. `None`: the plugin says there is nothing to wait for.
    fn flush(&mut self, size: usize) -> Result<Option<()>> {
        let member = self.endpoint.incoming_member(0, size, TAG);
        // SAFETY: the buffer is registered and lives until the endpoint is closed.
        match unsafe { self.net.iflush(self.endpoint.recv(), &[member])? } {
            Some(request) => self.finish(request).map(Some),
            None => Ok(None),
        }
    }

    fn irecv(&mut self, size: usize) -> Result<Request> {
        let member = [self.endpoint.incoming_member(0, size, TAG)];
        // SAFETY: the buffer is registered and lives until the endpoint is closed.
        self.patiently("irecv", |driver| unsafe {
            driver.net.irecv(driver.endpoint.recv(), &member)
        })
    }

    fn isend(&mut self, size: usize) -> Result<Request> {
        let member = self.endpoint.outgoing_member(0, size, TAG);
        // SAFETY: the buffer is registered and lives until the endpoint is closed.
        self.patiently("isend", |driver| unsafe {
            driver.net.isend(driver.endpoint.send(), member)
        })
    }

    fn finish(&mut self, request: Request) -> Result<()> {
        let mut sizes = [0; TEST_SIZES];
        self.patiently("test", |driver| Ok(driver.net.test(request, &mut sizes)?.then_some(())))
    }

    /// Tries again until there is a result, which on this provider is at once.
    fn patiently<T>(
        &mut self,
        stage: &str,
        mut attempt: impl FnMut(&mut Self) -> Result<Option<T>>,
    ) -> Result<T> {
        let mut patience = None;
        loop {
            if let Some(value) = attempt(self)? {
                return Ok(value);
            }
            self.vain += 1;
            patience
                .get_or_insert_with(|| self.endpoint.patience())
                .idle(stage, || "nothing completes on the null provider".into())?;
        }
    }
}

impl Phase {
    fn new(
        kind: Kind,
        size: usize,
        count: u64,
        vain: u64,
        before: &Counters,
        after: &Counters,
    ) -> Self {
        let each = |value: u64| value as f64 / count.max(1) as f64;
        let posts = |c: &Counters| (c.send_wrs + c.recv_wrs, c.post_send_calls + c.post_recv_calls);
        let ((wrs_after, calls_after), (wrs_before, calls_before)) = (posts(after), posts(before));
        Self {
            kind,
            size,
            count,
            work_requests: each(wrs_after - wrs_before),
            doorbells: each(calls_after - calls_before),
            polls: each(after.poll_cq_calls - before.poll_cq_calls),
            vain_tests: each(vain),
        }
    }
}
