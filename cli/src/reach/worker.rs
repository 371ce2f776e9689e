//! The process of a responder that uses the plugin's own transport, linked into this program: what it does may crash or
//! never return, and the responder lives on.

use super::protocol::{Answer, Host, Messages, Question, Rail};
use nccl_net_pinrail::abi::v12;
use nccl_net_pinrail::config::Settings;
use nccl_net_pinrail::memory::diagnosis::Machine;
use nccl_net_pinrail::records::hostname;
use nccl_net_pinrail::transport::device::{Device, discover};
use nccl_net_pinrail::transport::wire;
use nccl_net_pinrail::verbs::Verbs;
use pinrail_client::buffer::{Buffer, GUARD, POISON, fill, first_wrong, key};
use pinrail_client::failure::{Failure, Result};
use pinrail_client::net::abi::{HANDLE_BYTES, TEST_SIZES};
use pinrail_client::net::{Member, Net, Request, log};
use pinrail_client::worker::Service;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Idle rounds between two looks at the clock and at the one who asks.
const LOOK_EVERY: u32 = 256;

/// Answers until there are no more questions.
pub fn serve(verbose: bool) -> Result<()> {
    let mut service = Service::begin("reach")?;
    if verbose {
        log::configure("", true);
    } else {
        log::keep_quiet();
    }
    log::keep_lines(true);
    // SAFETY: the table is the v12 table of the plugin that this program is linked with, and a static.
    let mut net = unsafe { Net::linked((&raw const v12::TABLE).cast(), 12)? };
    let mut host = Host {
        name: hostname(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        wire: wire::VERSION,
        ..Host::default()
    };
    match net.init().and_then(|()| rails()) {
        Ok(rails) => host.rails = rails,
        Err(error) => {
            let line = log::take_line().filter(|line| !error.text().contains(line.as_str()));
            let more = line.map_or_else(String::new, |line| format!("; {line}"));
            host.error = Some(format!("{error}{more}"));
        }
    }
    // Twice, because the devices were looked for twice.
    for line in log::take_lines().into_iter().filter(|line| line.contains(" is left out")) {
        if !host.left_out.contains(&line) {
            host.left_out.push(line);
        }
    }
    log::keep_lines(false);
    service.answer(&Answer::Welcome(host))?;
    while let Some(question) = service.command::<Question>()? {
        let outcome = match question {
            Question::Receive { rail, messages, seconds } => {
                receive(&net, &mut service, rail, &messages, seconds)
            }
            Question::Send { rail, handle, messages, seconds } => {
                send(&net, &mut service, rail, handle, &messages, seconds)
            }
            // What it was about is over.
            Question::Abandon => continue,
            Question::Hello { .. } | Question::Bye => break,
        };
        let answer = match outcome {
            Ok(micros) => Answer::Done { micros },
            Err(error) => Answer::Failed { text: error.to_string() },
        };
        if !service.answer(&answer)? {
            break;
        }
    }
    net.close()
}

/// The ports, in the order of the table's devices, with the addresses that connections would have now.
fn rails() -> Result<Vec<Rail>> {
    let failed = |error: nccl_net_pinrail::error::Error| Failure::new("devices", error.to_string());
    let (settings, _) = Settings::from_process();
    let verbs = Verbs::load(settings.verbs_lib.as_deref()).map_err(failed)?;
    let machine = Machine::from_settings(&settings);
    let rail = |device: &Arc<Device>| {
        let address =
            device.open(&verbs, &machine).and_then(|open| device.use_over(open, &settings));
        Rail {
            label: device.port.label.clone(),
            address: match address {
                Ok(rail) => rail.address.to_string(),
                Err(error) => error.to_string(),
            },
            mbps: device.speed,
        }
    };
    Ok(discover(&verbs, &settings).map_err(failed)?.iter().map(rail).collect())
}

/// Waiting by polling, until a deadline or until the one who asks says that it is over.
struct Patience<'a> {
    service: &'a mut Service,
    deadline: Instant,
    seconds: u64,
    rounds: u32,
}

impl<'a> Patience<'a> {
    fn new(service: &'a mut Service, seconds: u64) -> Self {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        Self { service, deadline, seconds, rounds: 0 }
    }

    fn idle(&mut self, stage: &str) -> Result<()> {
        std::thread::yield_now();
        self.rounds += 1;
        if self.rounds.is_multiple_of(LOOK_EVERY) {
            if Instant::now() >= self.deadline {
                return Err(Failure::new(stage, format!("no end within {} s", self.seconds)));
            }
            if self.service.is_called() {
                return Err(Failure::new(stage, "given up, because the other end failed"));
            }
        }
        Ok(())
    }

    fn finish(&mut self, net: &Net, request: Request) -> Result<[i32; TEST_SIZES]> {
        let mut sizes = [-1; TEST_SIZES];
        while !net.test(request, &mut sizes)? {
            self.idle("test")?;
        }
        Ok(sizes)
    }
}

/// Room for one message with its guards.
fn room(messages: &Messages) -> Result<Buffer> {
    let most = messages.sizes.iter().copied().max().unwrap_or(0);
    Buffer::new(most + 2 * GUARD)
}

fn receive(
    net: &Net,
    service: &mut Service,
    rail: i32,
    messages: &Messages,
    seconds: u64,
) -> Result<u64> {
    let begin = Instant::now();
    let (listener, handle) = net.listen(rail)?;
    service.answer(&Answer::Listening { handle: handle.to_vec() })?;
    let mut patience = Patience::new(service, seconds);
    let comm = loop {
        match net.accept(listener) {
            Ok(None) => {}
            Ok(Some(comm)) => break Ok(comm),
            Err(error) => break Err(error),
        }
        if let Err(error) = patience.idle("accept") {
            break Err(error);
        }
    };
    let closed = net.close_listener(listener);
    let comm = comm?;
    closed?;
    let mut buffer = room(messages)?;
    let mut work = || -> Result<()> {
        // SAFETY: the buffer outlives the registration, which ends below or with the comm.
        let registration = unsafe { net.register_recv(comm, buffer.base(), buffer.size())? };
        for (number, size) in messages.sizes.iter().copied().enumerate() {
            let all = size + 2 * GUARD;
            // SAFETY: nothing is in flight.
            unsafe { buffer.bytes(0, all) }.fill(POISON);
            let member = Member { data: buffer.at(GUARD, size), size, tag: 0, registration };
            let request = loop {
                // SAFETY: the range is registered and stays until the comm is closed.
                if let Some(request) = unsafe { net.irecv(comm, &[member])? } {
                    break request;
                }
                patience.idle("irecv")?;
            };
            let sizes = patience.finish(net, request)?;
            if usize::try_from(sizes[0]) != Ok(size) {
                let text = format!("{} bytes came instead of {size}", sizes[0]);
                return Err(Failure::new("data", text));
            }
            // SAFETY: the request is done.
            let bytes = unsafe { buffer.bytes(0, all) };
            let content = key(size, messages.key.wrapping_add(number as u64));
            if let Some(at) = first_wrong(content, &bytes[GUARD..GUARD + size]) {
                let text =
                    format!("byte {at} of {size} arrived wrong: data were damaged on the way");
                return Err(Failure::new("data", text));
            }
            if bytes[..GUARD].iter().chain(&bytes[GUARD + size..]).any(|byte| *byte != POISON) {
                let text = format!("bytes beside a message of {size} were written");
                return Err(Failure::new("data", text));
            }
        }
        net.deregister_recv(comm, registration)
    };
    let worked = work();
    let closed = net.close_recv(comm);
    worked.and(closed)?;
    Ok(micros(begin))
}

fn send(
    net: &Net,
    service: &mut Service,
    rail: i32,
    mut handle: Vec<u8>,
    messages: &Messages,
    seconds: u64,
) -> Result<u64> {
    let begin = Instant::now();
    if handle.len() != HANDLE_BYTES {
        return Err(Failure::new("connect", format!("a handle of {} bytes", handle.len())));
    }
    let mut patience = Patience::new(service, seconds);
    let comm = loop {
        if let Some(comm) = net.connect(rail, &mut handle)? {
            break comm;
        }
        patience.idle("connect")?;
    };
    let mut buffer = room(messages)?;
    let mut work = || -> Result<()> {
        // SAFETY: the buffer outlives the registration, which ends below or with the comm.
        let registration = unsafe { net.register_send(comm, buffer.base(), buffer.size())? };
        for (number, size) in messages.sizes.iter().copied().enumerate() {
            // SAFETY: nothing is in flight.
            let bytes = unsafe { buffer.bytes(GUARD, size) };
            fill(key(size, messages.key.wrapping_add(number as u64)), bytes);
            let member = Member { data: buffer.at(GUARD, size), size, tag: 0, registration };
            let request = loop {
                // SAFETY: the range is registered and stays until the comm is closed.
                if let Some(request) = unsafe { net.isend(comm, member)? } {
                    break request;
                }
                patience.idle("isend")?;
            };
            patience.finish(net, request)?;
        }
        net.deregister_send(comm, registration)
    };
    let worked = work();
    let closed = net.close_send(comm);
    worked.and(closed)?;
    Ok(micros(begin))
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
