//! The connecting side: a state machine that NCCL polls with the same handle until it yields a sending end.
//!
//! The handle buffer belongs to one attempt and NCCL offers nothing else to keep state in, so it holds the name of the
//! attempt; the attempt itself is in a table here. An attempt that nobody polls any more is dropped when its deadline
//! has passed and another call comes by, or with the transport.

use super::Transport;
use super::channel::{Channel, Dial};
use super::comm::FirstCredit;
use super::connection::{Policy, Setup};
use super::copies::Spare;
use super::failover::Failover;
use super::fifo::{self, SLOTS};
use super::profile::Origin;
use super::recovery::Recovery;
use super::send::{self, SendComm};
use super::stripe::Stripes;
use super::wire::{End, Handle, Hello, Message};
use super::{Comm, CommShared, Whose, next_owner};
use crate::config::Settings;
use crate::error::{Blame, Error, Result};
use crate::host::{descriptors, netif};
use crate::memory::Gate;
use crate::memory::diagnosis::Direction;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

/// One attempt to connect.
#[derive(Debug)]
pub struct Connecting {
    transport: Arc<Transport>,
    /// NCCL's number of the device.
    device: i32,
    handle: Handle,
    setup: Option<Setup>,
    traffic_class: Option<u8>,
    origin: Origin,
    stage: Stage,
    /// When the attempt is given up.
    pub deadline: Instant,
    /// When it was last polled.
    pub polled: Instant,
    dials: u32,
    /// What is told of the descriptors that are missing.
    shortage: Option<String>,
    gate: Gate,
}

#[derive(Debug)]
enum Stage {
    /// Opening the devices and making the queue pairs, from this time on.
    Open(Instant),
    /// Moving queue pairs to the state in which their vendor options can be asked.
    Prepare,
    /// Connecting to the listener.
    Dial(Dial),
    /// Waiting before connecting again.
    Pause(Instant),
    /// Hello is sent.
    AwaitReply(Channel),
    /// Moving queue pairs on.
    BringUp(Channel, Box<End>),
    /// Ready is being sent.
    Finish(Channel, Box<End>),
}

impl Stage {
    fn name(&self) -> &'static str {
        match self {
            Self::Open(_) => "opening the device",
            Self::Prepare => "moving queue pairs to their first state",
            Self::Dial(_) | Self::Pause(_) => "connecting to the listener",
            Self::AwaitReply(_) => "waiting for the listener's answer",
            Self::BringUp(..) => "moving queue pairs to ready-to-send",
            Self::Finish(..) => "confirming",
        }
    }
}

impl Connecting {
    /// Starts an attempt over a device.
    ///
    /// # Errors
    /// There is no such device, or no memory.
    pub fn start(
        transport: &Arc<Transport>,
        device: i32,
        handle: Handle,
        traffic_class: Option<u8>,
        origin: Origin,
    ) -> Result<Self> {
        transport.devices().get(device)?;
        let now = Instant::now();
        Ok(Self {
            transport: Arc::clone(transport),
            device,
            setup: None,
            traffic_class,
            origin,
            stage: Stage::Open(now),
            polled: now,
            deadline: now + transport.settings.connect_timeout,
            dials: 0,
            shortage: None,
            gate: Gate::new()?,
            handle,
        })
    }

    /// Opens the devices and makes what is this end's own.
    fn open(&mut self) -> Result<Setup> {
        let Self { transport, handle, .. } = self;
        let settings = &transport.settings;
        handle.addr = reachable(handle.addr, settings)?;
        let rails = transport.rails_in_reach(transport.rails(self.device)?, &handle.subnets);
        let links = rails.iter().map(|rail| rail.address.links).fold(handle.links, u8::max);
        let lanes = settings.qps_per_rail(links) * rails.len().max(handle.rails.into());
        let stride = fifo::stride(handle.rails.into());
        Setup::new(rails, lanes, stride, &send::sizes(), transport)
    }

    /// When to look again for descriptors that are missing: others may close some while there is time.
    fn out_of_descriptors(&mut self, e: &Error) -> Instant {
        if self.shortage.is_none() {
            let left = self.deadline.saturating_duration_since(Instant::now()).as_secs();
            tracing::warn!("{e}; connecting goes on for {left} s (PINRAIL_CONNECT_TIMEOUT)");
        }
        self.shortage = Some(format!("; {e}"));
        Instant::now() + self.transport.settings.socket_retry_sleep
    }

    fn policy(&self) -> Policy<'_> {
        let settings = &self.transport.settings;
        Policy {
            settings,
            traffic_class: settings.tc.or(self.traffic_class).unwrap_or(0),
            // The communicator's class is a service level on InfiniBand; there are sixteen.
            sl: settings.sl.or(self.traffic_class.filter(|c| *c < 16)).unwrap_or(0),
        }
    }

    /// Goes on; the sending end once connected.
    ///
    /// # Errors
    /// The attempt failed for good or ran out of time.
    pub fn step(
        mut self: Box<Self>,
    ) -> Result<std::result::Result<Box<Comm<SendComm>>, Box<Self>>> {
        self.polled = Instant::now();
        loop {
            let name = self.stage.name();
            let before = std::mem::discriminant(&self.stage);
            let addr = self.handle.addr;
            let advanced =
                self.advance().map_err(|e| e.context(format_args!("connect to {addr}, {name}")))?;
            if let Some(comm) = advanced {
                return Ok(Ok(comm));
            }
            if std::mem::discriminant(&self.stage) == before {
                break;
            }
        }
        if Instant::now() > self.deadline {
            return Err(Error::remote(format!(
                "connect to {}: no success in {:?} (PINRAIL_CONNECT_TIMEOUT) while {}{}",
                self.handle.addr,
                self.transport.settings.connect_timeout,
                self.stage.name(),
                self.shortage.unwrap_or_default()
            )));
        }
        Ok(Err(self))
    }

    fn advance(&mut self) -> Result<Option<Box<Comm<SendComm>>>> {
        // Replaced on every path that goes on; on an error the attempt is over.
        let stage = std::mem::replace(&mut self.stage, Stage::Pause(self.deadline));
        self.stage = match stage {
            Stage::Open(when) if Instant::now() < when => Stage::Open(when),
            Stage::Open(_) => match self.open() {
                Ok(setup) => {
                    self.setup = Some(setup);
                    self.shortage = None;
                    Stage::Prepare
                }
                Err(e) if descriptors::is_shortage(e.errno()) => {
                    Stage::Open(self.out_of_descriptors(&e))
                }
                Err(e) => return Err(e),
            },
            Stage::Prepare => {
                let settings = &self.transport.settings;
                if self.setup.as_mut().ok_or_else(lost)?.initialise(settings)? {
                    Stage::Pause(Instant::now())
                } else {
                    Stage::Prepare
                }
            }
            Stage::Dial(dial) => match dial.step() {
                Ok(Dial::Connected(mut channel)) => {
                    let setup = self.setup.as_ref().ok_or_else(lost)?;
                    let hello = Hello {
                        nonce: self.handle.nonce,
                        end: setup.describe(false, self.policy()),
                    };
                    channel.send(&Message::Hello(hello))?;
                    Stage::AwaitReply(channel)
                }
                Ok(pending) => Stage::Dial(pending),
                Err(e) => self.dial_again(e)?,
            },
            Stage::Pause(until) if Instant::now() >= until => match Dial::start(self.handle.addr) {
                Ok(dial) => Stage::Dial(dial),
                Err(e) => self.dial_again(e)?,
            },
            Stage::Pause(until) => Stage::Pause(until),
            Stage::AwaitReply(mut channel) => {
                channel.flush()?;
                match channel.receive()? {
                    None => Stage::AwaitReply(channel),
                    Some(Message::Reply(end))
                        if end.rails.len() > usize::from(self.handle.rails) =>
                    {
                        return Err(Error::remote(format!(
                            "the listener answers with {} rails, its handle said at most {}",
                            end.rails.len(),
                            self.handle.rails
                        )));
                    }
                    Some(Message::Reply(end)) => Stage::BringUp(channel, Box::new(end)),
                    Some(Message::Refusal(text)) => {
                        return Err(Error::remote(format!("the peer refuses: {text}")));
                    }
                    Some(other) => {
                        return Err(Error::remote(format!("unexpected answer {other:?}")));
                    }
                }
            }
            Stage::BringUp(mut channel, end) => {
                let mut setup = self.setup.take().ok_or_else(lost)?;
                let up = setup.bring_up(&end, self.policy());
                self.setup = Some(setup);
                if up? {
                    channel.send(&Message::Ready)?;
                    Stage::Finish(channel, end)
                } else {
                    Stage::BringUp(channel, end)
                }
            }
            Stage::Finish(mut channel, end) => {
                if let Err(e) = self.transport.events.can_watch() {
                    self.out_of_descriptors(&e);
                } else if channel.flush()? {
                    // A listener that was closed meanwhile shows here, not with the first message.
                    match channel.receive()? {
                        None => {}
                        Some(Message::Refusal(text)) => {
                            return Err(Error::remote(format!("the peer refuses: {text}")));
                        }
                        Some(other) => {
                            return Err(Error::remote(format!("unexpected message {other:?}")));
                        }
                    }
                    return self.finish(channel, &end).map(Some);
                }
                Stage::Finish(channel, end)
            }
        };
        Ok(None)
    }

    /// What to do after a connection attempt that failed.
    fn dial_again(&mut self, e: Error) -> Result<Stage> {
        if descriptors::is_shortage(e.errno()) {
            return Ok(Stage::Pause(self.out_of_descriptors(&e)));
        }
        let settings = &self.transport.settings;
        let limit = settings.socket_retry_cnt;
        if !is_transient(&e) {
            return Err(e.blamed(Blame::Remote));
        }
        if self.dials >= limit {
            let attempts = self.dials + 1;
            return Err(e
                .context(format_args!("after {attempts} attempts (NCCL_SOCKET_RETRY_CNT={limit})"))
                .blamed(Blame::Remote));
        }
        self.dials += 1;
        let pause = settings.socket_retry_sleep * self.dials;
        let left = self.deadline.saturating_duration_since(Instant::now());
        tracing::info!(
            "{e}; trying again in {pause:?}, {} of {limit} times and for {} s at most \
             (PINRAIL_CONNECT_TIMEOUT)",
            self.dials,
            left.as_secs()
        );
        Ok(Stage::Pause(Instant::now() + pause))
    }

    fn finish(&mut self, channel: Channel, end: &End) -> Result<Box<Comm<SendComm>>> {
        let setup = self.setup.take().ok_or_else(lost)?;
        let settings = &self.transport.settings;
        let mut peer = setup.peer(end, channel.peer(), &self.transport.failures);
        peer.first_credit = FirstCredit::bounded_by(settings.first_credit_timeout);
        if settings.warn_rail_local {
            let (ours, theirs) = (setup.numbers(), end.numbers());
            if ours != theirs {
                tracing::warn!("{peer}: devices {ours:?} here, {theirs:?} at the peer");
            }
        }
        let (max_inline, sizes) = (setup.max_inline(), setup.sizes());
        let policy = self.policy();
        let agreed = setup.vendor_options(end, settings);
        let recovery =
            (settings.port_failover && settings.port_recovery && end.recovery).then(|| {
                Recovery::of_sender(
                    setup.means(policy, &self.transport),
                    end.rails.len(),
                    setup.lanes(),
                )
            });
        let mut parts = setup.into_parts(end.rails.len());
        let queues = parts.queues();
        let owner = next_owner();
        let lanes = parts.lanes.len();
        peer.board = self.origin.board(Direction::Send, owner, &peer, &parts.rails, lanes);
        let width = if settings.split_data_on_qps {
            parts.lanes.len()
        } else {
            parts.rails.len().max(end.rails.len())
        };
        let speeds: Vec<_> = parts.rails.iter().map(|rail| rail.device.speed).collect();
        let stripes = Stripes::new(width, parts.lanes.len(), &speeds, &end.speeds());
        if stripes.is_weighted() {
            tracing::info!("{peer}: {stripes}, because the ports differ in speed");
        }
        let ethernet = parts.rails.iter().any(|r| r.device.ethernet);
        let adaptive = settings.adaptive_routing.unwrap_or(!ethernet);
        let notice = if adaptive {
            format!("notice apart from data above {} bytes", settings.ar_threshold)
        } else {
            "notice with the data".to_owned()
        };
        let terms = format!(
            "service level {}, traffic class {}, {agreed}, {notice}",
            policy.sl, policy.traffic_class
        );
        let max_message = parts.rails.iter().map(|r| r.device.max_message).min().unwrap_or(0);
        let failover = (settings.port_failover && end.failover)
            .then(|| Failover::new(&mut parts.lanes, &[], &self.gate, &peer, recovery))
            .flatten();
        let route = send::Route {
            failover: failover.clone(),
            lanes: parts.lanes,
            local: parts.registered,
            record_addr: end.memory,
            record_rkeys: end.rails.iter().map(|r| r.rkey).collect(),
            stripes,
            // Pieces stay a multiple of the chunk, so that no LL128 line is cut.
            max_message: if max_message > super::stripe::CHUNK {
                max_message - max_message % super::stripe::CHUNK
            } else {
                max_message.max(1)
            },
            max_inline,
            set_aside: (sizes.send - sizes.counted) / SLOTS as u32,
            owner,
            profile: self.transport.profile(self.origin, &parts.rails),
            adaptive_threshold: adaptive
                .then(|| u32::try_from(settings.ar_threshold).unwrap_or(u32::MAX)),
        };
        let whose = Whose {
            direction: Direction::Send,
            peer: peer.clone(),
            comm_id: self.origin.id,
            spare: Spare::default(),
            owner: route.owner,
        };
        let comm =
            SendComm::new(self.gate.clone(), parts.cqs, parts.fifo, parts.records, route, peer)?;
        tracing::info!("sending end ready: {}; {terms}", comm.peer());
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

/// The listener's address as this host reaches it: one that is only valid on its link needs the number that the link has
/// here, and the handle says the listener's.
fn reachable(addr: SocketAddr, settings: &Settings) -> Result<SocketAddr> {
    if !netif::needs_scope(addr) {
        return Ok(addr);
    }
    let interfaces =
        netif::interfaces().map_err(|e| Error::io("listing network interfaces", &e))?;
    netif::with_scope(addr, &interfaces, &netif::Wanted::from_settings(settings))
        .map_err(|e| Error::usage(format!("connecting to {addr}: {e}")))
}

fn lost() -> Error {
    Error::new(Blame::Internal, "the connection's setup is gone")
}

/// Reasons that a network which is still coming up gives.
fn is_transient(e: &Error) -> bool {
    matches!(
        e.errno(),
        Some(
            libc::ECONNREFUSED
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::ETIMEDOUT
                | libc::ECONNRESET
                | libc::EADDRNOTAVAIL
        )
    )
}
