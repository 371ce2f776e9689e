//! The listening side: one listener yields one receiving end.
//!
//! Anybody can connect to the port. Whoever does not speak the protocol or does not know the listener's nonce is
//! dropped without harm, and the true peer still gets in.

use super::Transport;
use super::channel::Channel;
use super::connection::{Policy, Setup, Sizes, random};
use super::copies::Spare;
use super::credits::CREDIT_DEPTH;
use super::device::Rail;
use super::fifo;
use super::flush::{FLUSH_DEPTH, FlushQp};
use super::receives::{RECV_BATCH, RECV_DEPTH, receives};
use super::recv::{self, RecvComm};
use super::wire::{End, HANDLE_BYTES, Handle, Message};
use super::{Comm, CommShared, Whose, next_owner};
use crate::config::FlushPolicy;
use crate::error::{Error, Result};
use crate::host::netif;
use crate::memory::Gate;
use crate::memory::diagnosis::Direction;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

/// Connections that may be waiting to say who they are. More are dropped, oldest first.
const MAX_STRANGERS: usize = 64;
/// Bytes of inline payload a receiver can use: credits of one receive with up to two members.
const INLINE: u32 = 64;

/// A listening socket with the connections that came in.
#[derive(Debug)]
pub struct Listener {
    transport: Arc<Transport>,
    socket: TcpListener,
    nonce: u64,
    /// NCCL's identifier of the communicator, where the table version tells it.
    comm_id: Option<u64>,
    rails: Vec<Rail>,
    strangers: Vec<(Channel, Instant)>,
    accepting: Option<Accepting>,
    deadline: Option<Instant>,
    gate: Gate,
}

/// The true peer while its connection is made.
#[derive(Debug)]
struct Accepting {
    channel: Channel,
    setup: Setup,
    hello: End,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    BringUp,
    AwaitReady,
}

impl Listener {
    /// Listens for one peer over `rails`, and writes the handle that leads it here.
    ///
    /// # Errors
    /// No interface or port can be had.
    pub fn new(
        transport: &Arc<Transport>,
        rails: Vec<Rail>,
        comm_id: Option<u64>,
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
        // The scope of an IPv6 link-local address counts on this host only; the peer uses its own.
        if let std::net::SocketAddr::V6(v6) = &mut addr {
            v6.set_flowinfo(0);
        }
        let nonce = random();
        Handle { addr, nonce, rails: rails.len() as u8 }.write(handle);
        Ok(Self {
            transport: Arc::clone(transport),
            socket,
            nonce,
            comm_id,
            rails,
            strangers: Vec::new(),
            accepting: None,
            deadline: None,
            gate: Gate::new()?,
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
            self.take_connections()?;
            self.hear_strangers()?;
        }
        let mut stage = "waiting for the peer to connect";
        if let Some(accepting) = self.accepting.take() {
            stage = match accepting.stage {
                Stage::BringUp => "moving queue pairs to ready-to-send",
                Stage::AwaitReady => "waiting for the peer's confirmation",
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
                "accept: no success in {timeout:?} (PINRAIL_CONNECT_TIMEOUT) while {stage}"
            )));
        }
        Ok(None)
    }

    fn take_connections(&mut self) -> Result<()> {
        loop {
            match self.socket.accept() {
                Ok((stream, addr)) => {
                    if self.strangers.len() == MAX_STRANGERS {
                        // Who has said something is heard first; only the silent are dropped.
                        self.hear_strangers()?;
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
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
                    ) =>
                {
                    return Ok(());
                }
                Err(e) => return Err(Error::io("accepting a connection", &e)),
            }
        }
    }

    /// Listens to everybody who has not said hello; the one with the nonce becomes the peer.
    ///
    /// # Errors
    /// The peer came, and its connection cannot be set up here. It is told so.
    fn hear_strangers(&mut self) -> Result<()> {
        for (mut channel, since) in std::mem::take(&mut self.strangers) {
            match channel.receive() {
                Ok(None) if since.elapsed() < self.transport.settings.connect_timeout => {
                    self.strangers.push((channel, since));
                }
                Ok(Some(Message::Hello(hello)))
                    if hello.nonce == self.nonce && self.accepting.is_none() =>
                {
                    match self.begin(&mut channel, &hello.end) {
                        Ok(setup) => {
                            let hello = hello.end;
                            self.accepting =
                                Some(Accepting { channel, setup, hello, stage: Stage::BringUp });
                        }
                        Err(e) => {
                            refuse(&mut channel, &e);
                            return Err(e);
                        }
                    }
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
        Ok(())
    }

    fn begin(&self, channel: &mut Channel, hello: &End) -> Result<Setup> {
        let rails = self.rails.clone();
        let stride = fifo::stride(rails.len());
        if usize::from(hello.stride) != stride {
            return Err(Error::remote(format!(
                "credit entries of {} bytes; {stride} are right",
                hello.stride
            )));
        }
        let sizes = Sizes {
            send: CREDIT_DEPTH,
            counted: 0,
            recv: RECV_DEPTH,
            extra: FLUSH_DEPTH,
            inline: INLINE,
        };
        Setup::new(rails, hello.lanes.len(), stride, sizes, &self.transport)
            .map_err(|e| e.context(channel.peer()))
    }

    fn go_on(&mut self, mut accepting: Accepting) -> Result<Option<Box<Comm<RecvComm>>>> {
        let settings = &self.transport.settings;
        let policy = Policy {
            settings,
            traffic_class: settings.fifo_tc.unwrap_or(accepting.hello.traffic_class),
            sl: accepting.hello.sl & 0xf,
        };
        if accepting.stage == Stage::BringUp {
            match accepting.setup.bring_up(&accepting.hello, policy) {
                Ok(false) => {}
                Ok(true) => {
                    for lane in 0..accepting.setup.lanes() {
                        let mut batch = receives(lane);
                        for _ in 0..RECV_DEPTH / RECV_BATCH {
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
            match accepting.channel.receive()? {
                None => {}
                Some(Message::Ready) => return self.finish(accepting).map(Some),
                Some(other) => return Err(Error::remote(format!("unexpected message {other:?}"))),
            }
        }
        self.accepting = Some(accepting);
        Ok(None)
    }

    fn finish(&self, accepting: Accepting) -> Result<Box<Comm<RecvComm>>> {
        let Accepting { channel, setup, hello, .. } = accepting;
        let settings = &self.transport.settings;
        let peer = setup.peer(&hello, channel.peer(), &self.transport.failures);
        let max_inline = setup.max_inline();
        let parts = setup.into_parts(hello.rails.len());
        let mut queues = parts.queues();
        let mut flush: Vec<FlushQp> = Vec::new();
        for (index, rail) in parts.rails.iter().enumerate() {
            let wanted = match settings.flush {
                _ if settings.gdr_flush_disable => false,
                FlushPolicy::Always => true,
                FlushPolicy::Never => false,
                FlushPolicy::Auto => rail.device.peer_memory || rail.device.dmabuf,
            };
            if wanted {
                flush.push(FlushQp::new(rail, index, &parts.cqs[index], &self.transport)?);
            }
        }
        queues.extend(flush.iter().map(|flush| flush.lane.qp().identity()));
        let route = recv::Route {
            lanes: parts.lanes,
            flush,
            local: parts.registered,
            fifo_addr: hello.memory,
            fifo_rkeys: hello.rails.iter().map(|r| r.rkey).collect(),
            max_inline,
            spare: Spare::default(),
            owner: next_owner(),
        };
        let whose = Whose {
            direction: Direction::Receive,
            peer: peer.clone(),
            comm_id: self.comm_id,
            spare: route.spare.clone(),
            owner: route.owner,
        };
        let comm =
            RecvComm::new(self.gate.clone(), parts.cqs, parts.fifo, parts.records, route, peer)?;
        tracing::info!("receiving end ready: {}", comm.peer());
        let shared =
            CommShared::new(&self.transport, parts.rails, channel, &self.gate, whose, queues)?;
        Ok(Comm::new(shared, comm))
    }
}

/// Tells the peer why; it may be gone already.
fn refuse(channel: &mut Channel, e: &Error) {
    tracing::warn!("{}: refused: {e}", channel.peer());
    let _ = channel.send(&Message::Refusal(e.to_string()));
}
