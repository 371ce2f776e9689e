//! The listening side: one listener yields one receiving end.
//!
//! Anybody can connect to the port. Whoever does not speak the protocol or does not know the listener's nonce is
//! dropped without harm, and the true peer still gets in.

use super::Transport;
use super::channel::Channel;
use super::connection::{Policy, Setup, random};
use super::copies::Spare;
use super::device::Rail;
use super::failover::Failover;
use super::fifo;
use super::flush::{FlushQp, Flushes};
use super::idle::Idle;
use super::lane::Lane;
use super::profile::Origin;
use super::receives;
use super::recovery::Recovery;
use super::recv::{self, RecvComm};
use super::subnet::Subnet;
use super::wire::{End, HANDLE_BYTES, Handle, Message};
use super::{Comm, CommShared, Whose, next_owner};
use crate::config::FlushPolicy;
use crate::error::{Error, Result};
use crate::host::descriptors::{self, Held};
use crate::host::netif;
use crate::memory::Gate;
use crate::memory::diagnosis::Direction;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

/// Connections that may be waiting to say who they are. More are dropped, oldest first.
const MAX_STRANGERS: usize = 64;
/// A listening socket with the connections that came in.
#[derive(Debug)]
pub struct Listener {
    transport: Arc<Transport>,
    socket: TcpListener,
    nonce: u64,
    origin: Origin,
    rails: Vec<Rail>,
    strangers: Vec<(Channel, Instant)>,
    /// The true peer, with its description, until its connection is begun.
    known: Option<(Channel, End)>,
    accepting: Option<Accepting>,
    deadline: Option<Instant>,
    /// What is told of the descriptors that are missing.
    shortage: Option<String>,
    gate: Gate,
    _descriptor: Held,
}

/// The true peer while its connection is made.
#[derive(Debug)]
struct Accepting {
    channel: Channel,
    setup: Setup,
    hello: End,
    stage: Stage,
    flush: Vec<FlushQp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    BringUp,
    AwaitReady,
    Finish,
}

impl Listener {
    /// Listens for one peer over `rails`, and writes the handle that leads it here.
    ///
    /// # Errors
    /// No interface or port can be had.
    pub fn new(
        transport: &Arc<Transport>,
        rails: Vec<Rail>,
        origin: Origin,
        handle: &mut [u8; HANDLE_BYTES],
    ) -> Result<Self> {
        let settings = &transport.settings;
        let interfaces =
            netif::interfaces().map_err(|e| Error::io("listing network interfaces", &e))?;
        let chosen = netif::choose(&interfaces, &netif::Wanted::from_settings(settings))
            .map_err(|e| Error::usage(e.to_string()))?;
        let fail =
            |e| Error::io(format_args!("listening on {} ({})", chosen.address, chosen.name), &e);
        let socket = TcpListener::bind(chosen.address).map_err(fail)?;
        socket.set_nonblocking(true).map_err(fail)?;
        let mut addr = socket.local_addr().map_err(fail)?;
        tracing::debug!("the side channel listens on {addr} ({}): {}", chosen.name, chosen.reason);
        // The scope of an IPv6 link-local address counts on this host only; the peer uses its own.
        if let std::net::SocketAddr::V6(v6) = &mut addr {
            v6.set_flowinfo(0);
        }
        let nonce = random();
        let links = rails.iter().map(|rail| rail.address.links).max().unwrap_or(1);
        let subnets = transport.advertised_subnets(&rails);
        Handle { addr, nonce, rails: rails.len() as u8, links, subnets }.write(handle);
        Ok(Self {
            transport: Arc::clone(transport),
            socket,
            nonce,
            origin,
            rails,
            strangers: Vec::new(),
            known: None,
            accepting: None,
            deadline: None,
            shortage: None,
            gate: Gate::new()?,
            _descriptor: Held::new(1),
        })
    }

    /// Goes on accepting; the receiving end once connected.
    ///
    /// # Errors
    /// The true peer's connection failed, or nobody came in time.
    pub fn accept(&mut self) -> Result<Option<Box<Comm<RecvComm>>>> {
        let timeout = self.transport.settings.connect_timeout;
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + timeout);
        if self.accepting.is_none() {
            if self.known.is_none() {
                self.take_connections()?;
                self.hear_strangers();
            }
            self.begin_known()?;
        }
        let mut stage = "waiting for the peer to connect";
        if let Some(accepting) = self.accepting.take() {
            stage = match accepting.stage {
                Stage::BringUp => "moving queue pairs to ready-to-send",
                Stage::AwaitReady => "waiting for the peer's confirmation",
                Stage::Finish => "starting the event thread",
            };
            let peer = accepting.channel.peer().to_owned();
            if let Some(comm) = self
                .go_on(accepting)
                .map_err(|e| e.context(format_args!("accept from {peer}, {stage}")))?
            {
                return Ok(Some(comm));
            }
        }
        if Instant::now() > deadline {
            return Err(Error::remote(format!(
                "accept: no success in {timeout:?} (PINRAIL_CONNECT_TIMEOUT) while {stage}{}",
                self.shortage.as_deref().unwrap_or_default()
            )));
        }
        Ok(None)
    }

    fn take_connections(&mut self) -> Result<()> {
        loop {
            match self.socket.accept() {
                Ok((stream, addr)) => {
                    self.shortage = None;
                    if self.strangers.len() == MAX_STRANGERS {
                        // Who has said something is heard first; only the silent are dropped.
                        self.hear_strangers();
                        if self.strangers.len() == MAX_STRANGERS {
                            self.strangers.remove(0);
                        }
                    }
                    match Channel::new(stream, addr) {
                        Ok(channel) => self.strangers.push((channel, Instant::now())),
                        Err(e) => tracing::info!("{e}"),
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                // A connection that died in the queue, or a passing shortage of descriptors: the listener lives on.
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::ECONNABORTED | libc::EINTR | libc::EPROTO)
                    ) => {}
                Err(e)
                    if descriptors::is_shortage(e.raw_os_error())
                        || matches!(e.raw_os_error(), Some(libc::ENOBUFS | libc::ENOMEM)) =>
                {
                    self.is_short(&Error::io("accepting a connection", &e));
                    return Ok(());
                }
                Err(e) => return Err(Error::io("accepting a connection", &e)),
            }
        }
    }

    /// Takes note of a shortage that passes when others close something, and tells it once.
    fn is_short(&mut self, e: &Error) {
        if self.shortage.is_none() {
            tracing::warn!("{e}; accept waits until there are some (PINRAIL_CONNECT_TIMEOUT)");
        }
        self.shortage = Some(format!("; {e}"));
    }

    /// Begins the connection of the true peer, once there are descriptors for what it needs to read.
    ///
    /// # Errors
    /// It cannot be set up here. The peer is told so.
    fn begin_known(&mut self) -> Result<()> {
        let Some((mut channel, hello)) = self.known.take() else { return Ok(()) };
        if let Err(e) = descriptors::spare(descriptors::FOR_A_CONNECTION) {
            self.is_short(&Error::io("accepting a connection", &e));
            self.known = Some((channel, hello));
            return Ok(());
        }
        match self.begin(&channel, &hello) {
            Ok(setup) => {
                self.shortage = None;
                let (stage, flush) = (Stage::BringUp, Vec::new());
                self.accepting = Some(Accepting { channel, setup, hello, stage, flush });
                Ok(())
            }
            Err(e) => {
                refuse(&mut channel, &e);
                Err(e)
            }
        }
    }

    /// Listens to everybody who has not said hello; the one with the nonce becomes the peer.
    fn hear_strangers(&mut self) {
        for (mut channel, since) in std::mem::take(&mut self.strangers) {
            match channel.receive() {
                Ok(None) if since.elapsed() < self.transport.settings.connect_timeout => {
                    self.strangers.push((channel, since));
                }
                Ok(Some(Message::Hello(hello)))
                    if hello.nonce == self.nonce && self.known.is_none() =>
                {
                    self.known = Some((channel, hello.end));
                }
                Ok(_) => {
                    tracing::info!("{}: not the peer of this listener; dropped", channel.peer());
                }
                // A peer of another version deserves an answer; it is not worth more than a line here.
                Err(e) => {
                    tracing::info!("{e}; dropped");
                    let _ = channel.send(&Message::Refusal(e.to_string()));
                }
            }
        }
    }

    fn begin(&self, channel: &Channel, hello: &End) -> Result<Setup> {
        // A port may have got another address since listen.
        let rails = self
            .rails
            .iter()
            .map(|rail| rail.device.use_over(Arc::clone(&rail.open), &self.transport.settings))
            .collect::<Result<Vec<_>>>()?;
        // The connector chose the entries by the handle. Whatever device is used instead has one port.
        let stride = fifo::stride(rails.len());
        if usize::from(hello.stride) != stride {
            return Err(Error::remote(format!(
                "credit entries of {} bytes; {stride} are right",
                hello.stride
            )));
        }
        let subnets = hello.rails.iter().map(Subnet::of_wire).collect::<Option<Vec<_>>>();
        let rails = self.transport.rails_in_reach(rails, &subnets.unwrap_or_default());
        let failover = self.transport.settings.port_failover && hello.failover;
        let sizes = receives::sizes(hello.lanes.len(), failover);
        Setup::new(rails, hello.lanes.len(), stride, &sizes, &self.transport)
            .map_err(|e| e.context(channel.peer()))
    }

    fn policy(&self, hello: &End) -> Policy<'_> {
        let settings = &self.transport.settings;
        Policy {
            settings,
            traffic_class: settings.fifo_tc.unwrap_or(hello.traffic_class),
            sl: hello.sl & 0xf,
        }
    }

    fn go_on(&mut self, mut accepting: Accepting) -> Result<Option<Box<Comm<RecvComm>>>> {
        let policy = self.policy(&accepting.hello);
        if accepting.stage == Stage::BringUp {
            match accepting.setup.bring_up(&accepting.hello, policy) {
                Ok(false) => {}
                Ok(true) => {
                    let sizes = accepting.setup.sizes();
                    for lane in 0..accepting.setup.lanes() {
                        let mut batch = receives::receives(lane, sizes.batch);
                        for _ in 0..sizes.recv / sizes.batch {
                            accepting.setup.qp(lane).post_recv(&mut batch).map_err(|errno| {
                                Error::verb("ibv_post_recv", accepting.setup.label(), errno)
                            })?;
                        }
                    }
                    let reply = accepting.setup.describe(true, policy);
                    accepting.channel.send(&Message::Reply(reply))?;
                    accepting.stage = Stage::AwaitReady;
                }
                Err(e) => {
                    refuse(&mut accepting.channel, &e);
                    return Err(e);
                }
            }
        }
        if accepting.stage == Stage::AwaitReady {
            accepting.channel.flush()?;
            if self.prepare_flush(&mut accepting)? {
                match accepting.channel.receive()? {
                    None => {}
                    Some(Message::Ready) => accepting.stage = Stage::Finish,
                    Some(other) => {
                        return Err(Error::remote(format!("unexpected message {other:?}")));
                    }
                }
            }
        }
        if accepting.stage == Stage::Finish {
            match self.transport.events.can_watch() {
                Ok(()) => return self.finish(accepting).map(Some),
                Err(e) => self.is_short(&e),
            }
        }
        self.accepting = Some(accepting);
        Ok(None)
    }

    /// Makes the queue pairs for flushes where they are wanted; whether all are there.
    fn prepare_flush(&self, accepting: &mut Accepting) -> Result<bool> {
        let settings = &self.transport.settings;
        let Accepting { setup, flush, .. } = accepting;
        let wanted = |rail: &Rail| match settings.flush {
            _ if settings.gdr_flush_disable => false,
            FlushPolicy::Always => true,
            FlushPolicy::Never => false,
            FlushPolicy::Auto => rail.device.peer_memory || rail.device.dmabuf,
        };
        let rails: Vec<_> =
            (0..setup.rails.len()).filter(|index| wanted(&setup.rails[*index])).collect();
        while let Some(&index) = rails.get(flush.len()) {
            let made = setup.attempt(settings, |setup| {
                let queue = (&setup.cqs[index], setup.sizes().extra);
                FlushQp::new(&setup.rails[index], index, queue, &self.transport)
            })?;
            let Some(made) = made else { return Ok(false) };
            flush.push(made);
        }
        Ok(true)
    }

    fn finish(&self, accepting: Accepting) -> Result<Box<Comm<RecvComm>>> {
        let Accepting { channel, setup, hello, flush, .. } = accepting;
        let mut peer = setup.peer(&hello, channel.peer(), &self.transport.failures);
        let (max_inline, sizes) = (setup.max_inline(), setup.sizes());
        let settings = &self.transport.settings;
        let recovery =
            (settings.port_failover && settings.port_recovery && hello.recovery).then(|| {
                let means = setup.means(self.policy(&hello), &self.transport);
                Recovery::of_receiver(means, hello.rails.len(), setup.lanes())
            });
        let mut parts = setup.into_parts(hello.rails.len());
        let mut queues = parts.queues();
        let owner = next_owner();
        let lanes = parts.lanes.len();
        peer.board = self.origin.board(Direction::Receive, owner, &peer, &parts.rails, lanes);
        queues.extend(flush.iter().map(|flush| flush.lane.qp().identity()));
        let failover = (settings.port_failover && hello.failover)
            .then(|| {
                let flushes = flush.iter().map(|f| (f.lane.qp().identity(), f.lane.rail));
                let flushes: Vec<_> = flushes.collect();
                Failover::new(&mut parts.lanes, &flushes, &self.gate, &peer, recovery)
            })
            .flatten();
        // With several rails every credit is asked for.
        peer.idle = settings
            .failure_time()
            .filter(|_| failover.is_none())
            .map(|patience| Idle::new(parts.lanes.iter_mut().map(Lane::fuse), patience));
        let route = recv::Route {
            sizes,
            failover: failover.clone(),
            lanes: parts.lanes,
            flushes: if flush.is_empty() {
                Flushes::default()
            } else {
                Flushes::new(self.transport.settings.flush_method)
            },
            flush,
            local: parts.registered,
            fifo_addr: hello.memory,
            fifo_rkeys: hello.rails.iter().map(|r| r.rkey).collect(),
            max_inline,
            spare: Spare::default(),
            owner,
            profile: self.transport.profile(self.origin, &parts.rails),
        };
        let whose = Whose {
            direction: Direction::Receive,
            peer: peer.clone(),
            comm_id: self.origin.id,
            spare: route.spare.clone(),
            owner: route.owner,
        };
        let comm =
            RecvComm::new(self.gate.clone(), parts.cqs, parts.fifo, parts.records, route, peer)?;
        tracing::info!("receiving end ready: {}", comm.peer());
        let shared = CommShared::new(
            &self.transport,
            parts.rails,
            channel,
            &self.gate,
            whose,
            queues,
            failover,
        )?;
        Ok(Comm::new(shared, comm))
    }
}

/// Tells the peer why; it may be gone already. Who called accept gets the error, which is a line of its own.
fn refuse(channel: &mut Channel, e: &Error) {
    tracing::debug!("{}: refused", channel.peer());
    let _ = channel.send(&Message::Refusal(e.to_string()));
}
