//! Queue pairs of a connection, from creation to ready-to-send, for either end.

use super::Transport;
use super::address::place;
use super::comm::Peer;
use super::device::Rail;
use super::exhaustion::{explain, is_scarcity};
use super::failure::Failures;
use super::fifo::{CreditFifo, SizeRecords, grid_and_records, grid_and_records_bytes};
use super::lane::Lane;
use super::recovery::Means;
use super::stripe::MAX_PARTS;
use super::wire::{End, Identity, WireLane, WireRail};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::memory::ledger::Purpose;
use crate::memory::piece::Piece;
use crate::memory::registry::Registered;
use crate::memory::status::Board;
use crate::verbs::mr::Access;
use crate::verbs::qp::{Caps, Ece};
use crate::verbs::sys::access::REMOTE_WRITE;
use crate::verbs::{CompletionQueue, QueuePair};
use std::hash::{BuildHasher, RandomState};
use std::net::Ipv6Addr;
use std::sync::Arc;
use std::time::Instant;

/// Receiver-not-ready back-off, `IBV_QP_MIN_RNR_TIMER`: 0.64 ms. Never used in order: receives are always posted.
pub const MIN_RNR_TIMER: u8 = 12;

/// The least inline room that serves anything: one size record.
const LEAST_INLINE: u32 = 4;

/// Queue sizes of one end, in which everything fits that is ever in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Send queue slots per lane.
    pub send: u32,
    /// Those of them that the lane counts.
    pub counted: u32,
    /// Receive queue slots per lane.
    pub recv: u32,
    /// How many of them are posted at a time; the slots are a multiple of it.
    pub batch: u32,
    /// Completions per rail beside those of the lanes.
    pub extra: u32,
    /// Inline bytes to ask for.
    pub inline: u32,
}

/// One end while connecting. Fields drop in order: queue pairs first, memory last.
#[derive(Debug)]
pub struct Setup {
    qps: Vec<QueuePair>,
    /// Completion queues in rail order.
    pub cqs: Vec<Arc<CompletionQueue>>,
    /// The grid's registration in rail order.
    pub registered: Vec<Arc<Registered>>,
    /// The grid: FIFO of a sender, copy of a receiver.
    pub fifo: CreditFifo,
    /// Size records: copy of a sender, target of a receiver.
    pub records: SizeRecords,
    memory: u64,
    records_addr: u64,
    /// Rails of this end.
    pub rails: Vec<Rail>,
    psns: Vec<u32>,
    sizes: Sizes,
    progress: Progress,
    retry: Retry,
}

/// How far the queue pairs are on their way to ready-to-send. Each move is made once: one that failed is made again, and
/// those before it are not.
#[derive(Debug, Default)]
struct Progress {
    /// The state that they go to next.
    to: State,
    /// The lane whose turn it is.
    lane: usize,
}

/// A move that failed and will be made again.
#[derive(Debug, Default)]
struct Retry {
    /// Failed attempts at it.
    failures: u32,
    /// When the next one is due.
    not_before: Option<Instant>,
}

/// The states on the way, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// The port and the rights of the peer are set.
    #[default]
    Init,
    /// The peer's address is resolved.
    ReadyToReceive,
    /// The timeouts are set.
    ReadyToSend,
    /// There is nothing more to do.
    Ready,
}

impl State {
    fn next(self) -> Self {
        match self {
            Self::Init => Self::ReadyToReceive,
            Self::ReadyToReceive => Self::ReadyToSend,
            Self::ReadyToSend | Self::Ready => Self::Ready,
        }
    }
}

/// How the settings want an end to be set up.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a> {
    /// The settings.
    pub settings: &'a Settings,
    /// Traffic class of packets that this end sends.
    pub traffic_class: u8,
    /// Service level.
    pub sl: u8,
}

/// A number that a stranger cannot guess by counting.
pub fn random() -> u64 {
    RandomState::new().hash_one(Instant::now())
}

impl Setup {
    /// Creates the objects of one end, with the first of these sizes that its devices grant.
    ///
    /// # Errors
    /// A verb fails; what was made is released.
    pub fn new(
        rails: Vec<Rail>,
        lanes: usize,
        stride: usize,
        sizes: &[Sizes],
        transport: &Transport,
    ) -> Result<Self> {
        let settings = &transport.settings;
        if lanes == 0 || lanes > MAX_PARTS {
            return Err(Error::usage(format!(
                "{lanes} queue pairs per connection; the limit is {MAX_PARTS}. Lower NCCL_IB_QPS_PER_CONNECTION"
            )));
        }
        let registries: Vec<_> = rails.iter().map(|r| Arc::clone(&r.open.registry)).collect();
        let bytes = grid_and_records_bytes(stride);
        let (access, fallback) = (Access::REMOTE_WRITE, transport.fallback());
        let (piece, registered) =
            Piece::registered(bytes, Purpose::Credits, access, &registries, fallback).map_err(
                |e| {
                    let devices = rails.iter().map(|r| (&*r.device, &r.open.registry));
                    transport.explain_own(e, devices, bytes, "the connection cannot be made")
                },
            )?;
        let (fifo, records) = grid_and_records(&piece, stride);
        let inline = settings.use_inline;
        let Queues { qps, cqs, sizes } =
            granted(&label(&rails), sizes, |sizes| Queues::new(&rails, lanes, sizes, inline))
                .map_err(|(Refused { rail, asked, error }, attempts)| {
                    let open = &rails[rail].open;
                    let name = &rails[rail].device.port.device;
                    let error =
                        explain(error, name, Some(&open.context), asked, transport.machine());
                    if attempts == 1 {
                        return error;
                    }
                    error.context(format_args!("with the smallest of {attempts} sizes of queues"))
                })?;
        Ok(Self {
            psns: qps.iter().map(|_| random() as u32 & 0xff_ffff).collect(),
            qps,
            cqs,
            registered,
            memory: piece.addr() as u64,
            records_addr: records.addr(0),
            fifo,
            records,
            rails,
            sizes,
            progress: Progress::default(),
            retry: Retry::default(),
        })
    }

    /// Bytes that may be posted inline on every lane.
    pub fn max_inline(&self) -> u32 {
        self.qps.iter().map(QueuePair::max_inline).min().unwrap_or(0)
    }

    /// The sizes that its queues have.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// The queue pair of a lane.
    pub fn qp(&self, lane: usize) -> &QueuePair {
        &self.qps[lane]
    }

    /// Number of lanes.
    pub fn lanes(&self) -> usize {
        self.qps.len()
    }

    /// This end for the peer. `records`: the peer writes the size records (else the FIFO).
    pub fn describe(&self, records: bool, policy: Policy<'_>) -> End {
        let ece = |qp: &QueuePair| {
            let ece =
                if policy.settings.ece_enable { qp.query_ece() } else { None }.unwrap_or_default();
            [ece.vendor_id, ece.options, ece.comp_mask]
        };
        End {
            identity: Identity {
                pid: std::process::id(),
                host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
                device: self.label(),
            },
            memory: if records { self.records_addr } else { self.memory },
            stride: self.fifo.stride() as u8,
            traffic_class: policy.traffic_class,
            sl: policy.sl,
            failover: policy.settings.port_failover,
            recovery: policy.settings.port_failover && policy.settings.port_recovery,
            rails: self
                .rails
                .iter()
                .zip(&self.registered)
                .map(|(r, m)| WireRail {
                    port: r.device.index,
                    speed: r.device.speed,
                    ..r.address.wire(m.rkey())
                })
                .collect(),
            lanes: self
                .qps
                .iter()
                .zip(&self.psns)
                .map(|(qp, psn)| WireLane { qpn: qp.number(), psn: *psn, ece: ece(qp) })
                .collect(),
        }
    }

    /// Names of this end's ports.
    pub fn label(&self) -> String {
        label(&self.rails)
    }

    /// Numbers of this end's ports, sorted.
    pub fn numbers(&self) -> Vec<u8> {
        let mut numbers: Vec<_> = self.rails.iter().map(|rail| rail.device.index).collect();
        numbers.sort_unstable();
        numbers
    }

    /// The peer, for messages.
    pub fn peer(&self, end: &End, addr: &str, failures: &Arc<Failures>) -> Peer {
        let way = |(lane, (qp, remote)): (usize, (&QueuePair, &WireLane))| {
            let rail = &self.rails[lane % self.rails.len()];
            let here = place(&rail.address.wire(0), qp.number());
            let there = place(&end.rails[lane % end.rails.len()], remote.qpn);
            format!("{} {here} to {there}", rail.device.port.label)
        };
        Peer {
            ways: self.qps.iter().zip(&end.lanes).enumerate().map(way).collect(),
            failures: Arc::clone(failures),
            mail: Arc::default(),
            board: Board::default(),
            pace: Arc::default(),
            first_credit: None,
            idle: None,
            local: self.label(),
            host: end.identity.host.clone(),
            pid: end.identity.pid,
            device: end.identity.device.clone(),
            addr: addr.to_owned(),
        }
    }

    /// Moves queue pairs to their first state; whether all are there. Never sleeps: a retry waits for a later call.
    ///
    /// # Errors
    /// A verb fails for good.
    pub fn initialise(&mut self, settings: &Settings) -> Result<bool> {
        self.move_on(State::ReadyToReceive, settings, |setup, _, lane| {
            let address = &setup.rails[lane % setup.rails.len()].address;
            setup.qps[lane].to_init(address.port, address.pkey_index, REMOTE_WRITE)
        })
    }

    /// Moves queue pairs on to ready-to-send; whether all are. Never sleeps, as [`Self::initialise`].
    ///
    /// # Errors
    /// A verb fails for good.
    pub fn bring_up(&mut self, peer: &End, policy: Policy<'_>) -> Result<bool> {
        if peer.lanes.len() != self.qps.len() {
            return Err(Error::remote(format!(
                "the peer answers with {} queue pairs for {}",
                peer.lanes.len(),
                self.qps.len()
            )));
        }
        let settings = policy.settings;
        Ok(self.initialise(settings)?
            && self.move_on(State::Ready, settings, |setup, to, lane| match to {
                State::ReadyToReceive => setup.to_rtr(lane, peer, policy),
                _ => setup.qps[lane].to_rts(setup.psns[lane], settings.timeout, settings.retry_cnt),
            })?)
    }

    /// Makes the moves before `end`; whether all are made.
    fn move_on(
        &mut self,
        end: State,
        settings: &Settings,
        make: impl Fn(&Self, State, usize) -> Result<()>,
    ) -> Result<bool> {
        while (self.progress.to as u8) < end as u8 {
            let Progress { to, lane } = self.progress;
            self.progress = if lane == self.qps.len() {
                Progress { to: to.next(), lane: 0 }
            } else if self.attempt(settings, |setup| make(setup, to, lane))?.is_some() {
                Progress { to, lane: lane + 1 }
            } else {
                return Ok(false);
            };
        }
        Ok(true)
    }

    /// Makes one move of a queue pair of this end. `None`: it failed for a reason that may pass, or did so a while ago,
    /// and is to be made again at a later call.
    ///
    /// # Errors
    /// The move fails for good, or has failed too often.
    pub fn attempt<T>(
        &mut self,
        settings: &Settings,
        make: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<Option<T>> {
        if self.retry.not_before.is_some_and(|t| Instant::now() < t) {
            return Ok(None);
        }
        let e = match make(self) {
            Ok(made) => {
                self.retry = Retry::default();
                return Ok(Some(made));
            }
            Err(e) => e,
        };
        let transient = e.errno() == Some(libc::ETIMEDOUT)
            || (settings.mqp_retry_all && e.failed_verb() == Some("ibv_modify_qp"));
        if !transient {
            return Err(e);
        }
        let (failures, limit) = (self.retry.failures + 1, settings.mqp_retry_cnt);
        if failures > limit {
            return Err(e.context(format_args!(
                "after {failures} attempts (NCCL_IB_MQP_RETRY_CNT={limit})"
            )));
        }
        let pause = settings.mqp_retry_sleep * failures;
        tracing::info!("{e}; trying again in {pause:?}, {failures} of {limit} times");
        self.retry = Retry { failures, not_before: Some(Instant::now() + pause) };
        Ok(None)
    }

    fn to_rtr(&self, lane: usize, peer: &End, policy: Policy<'_>) -> Result<()> {
        let qp = &self.qps[lane];
        let rail = &self.rails[lane % self.rails.len()];
        let (remote, port) = (&peer.lanes[lane], &peer.rails[lane % peer.rails.len()]);
        let [vendor_id, options, comp_mask] = remote.ece;
        let ece = Ece { vendor_id, options, comp_mask };
        if policy.settings.ece_enable && ece != Ece::default() {
            qp.set_ece(ece)?;
        }
        let path =
            rail.address.path(port, remote.qpn, remote.psn, policy.traffic_class, policy.sl)?;
        qp.to_rtr(&path, MIN_RNR_TIMER).map_err(|e| {
            e.context(format_args!(
                "{} ({}) to {} ({})",
                rail.device.port.label,
                Ipv6Addr::from(rail.address.gid),
                peer.identity.device,
                Ipv6Addr::from(port.gid)
            ))
        })
    }

    /// What this end needs to make queue pairs again, should rails fail and come back.
    pub fn means(&self, policy: Policy<'_>, transport: &Arc<Transport>) -> Means {
        Means {
            transport: Arc::clone(transport),
            rails: self.rails.clone(),
            cqs: self.cqs.clone(),
            sizes: Sizes { inline: self.max_inline(), ..self.sizes },
            traffic_class: policy.traffic_class,
            sl: policy.sl,
        }
    }

    /// The vendor options of the connection, in words.
    pub fn vendor_options(&self, peer: &End, settings: &Settings) -> String {
        let theirs = peer.lanes.first().map_or([0; 3], |lane| lane.ece);
        match self.qps.first().and_then(QueuePair::query_ece) {
            Some(ece) if settings.ece_enable && theirs != [0; 3] => {
                format!("vendor options {:#x}", ece.options)
            }
            _ => "no vendor options".to_owned(),
        }
    }

    /// The queue pairs as lanes, and what must live as long as they.
    pub fn into_parts(self, remote_rails: usize) -> Parts {
        let rails = self.rails.len();
        let depth = self.sizes.counted;
        let lanes = self
            .qps
            .into_iter()
            .enumerate()
            .map(|(lane, qp)| Lane::new(qp, lane % rails, lane % remote_rails, depth))
            .collect();
        Parts {
            lanes,
            cqs: self.cqs,
            registered: self.registered,
            fifo: self.fifo,
            records: self.records,
            rails: self.rails,
        }
    }
}

/// Names of the ports of rails.
fn label(rails: &[Rail]) -> String {
    rails.iter().map(|r| r.device.port.label.as_str()).collect::<Vec<_>>().join("+")
}

/// The queues of one end.
struct Queues {
    qps: Vec<QueuePair>,
    cqs: Vec<Arc<CompletionQueue>>,
    sizes: Sizes,
}

/// What kept queues of a size from being made: on which rail, and the slots of the deepest that was asked for.
struct Refused {
    rail: usize,
    asked: u32,
    error: Error,
}

/// The first of these sizes that is granted; else the last refusal and how many were tried.
fn granted<T>(
    label: &str,
    sizes: &[Sizes],
    make: impl Fn(Sizes) -> std::result::Result<T, Refused>,
) -> std::result::Result<T, (Refused, usize)> {
    let mut tried = 0;
    loop {
        let made = make(sizes[tried]);
        tried += 1;
        match made {
            // A smaller one may be granted.
            Err(refused) if is_scarcity(&refused.error) && tried < sizes.len() => {
                tracing::debug!("{}", refused.error);
            }
            Err(refused) => return Err((refused, tried)),
            Ok(made) => {
                if tried > 1 {
                    let (first, now) = (sizes[0], sizes[tried - 1]);
                    tracing::info!(
                        "{label}: queues of {} sends and {} receives, {} and {} are not granted",
                        now.send,
                        now.recv,
                        first.send,
                        first.recv
                    );
                }
                return Ok(made);
            }
        }
    }
}

impl Queues {
    fn new(
        rails: &[Rail],
        lanes: usize,
        sizes: Sizes,
        use_inline: bool,
    ) -> std::result::Result<Self, Refused> {
        let mut cqs = Vec::new();
        for (index, rail) in rails.iter().enumerate() {
            let on_rail = (index..lanes).step_by(rails.len()).count() as u32;
            // Every slot of every queue can complete once, and nothing else completes here, so the queue cannot overrun.
            let entries = on_rail * (sizes.send + sizes.recv) + sizes.extra;
            let made = if entries > rail.device.max_cqe {
                let what = format_args!("{} with {entries} entries", rail.device.port.label);
                Err(Error::verb("ibv_create_cq", what, libc::EINVAL))
            } else {
                CompletionQueue::new(&rail.open.context, entries)
            };
            cqs.push(made.map_err(|error| Refused { rail: index, asked: entries, error })?);
        }
        let mut inline = vec![if use_inline { sizes.inline } else { 0 }; rails.len()];
        let mut qps = Vec::with_capacity(lanes);
        for lane in 0..lanes {
            let index = lane % rails.len();
            let made = queue_pair(&rails[index], &cqs[index], sizes, &mut inline[index]);
            let asked = sizes.send.max(sizes.recv);
            qps.push(made.map_err(|error| Refused { rail: index, asked, error })?);
        }
        Ok(Self { qps, cqs, sizes })
    }
}

/// Makes a queue pair with as much inline room as the device grants, up to `inline`, which becomes what it granted: a
/// device that has less refuses instead of stepping down by itself.
fn queue_pair(
    rail: &Rail,
    cq: &Arc<CompletionQueue>,
    sizes: Sizes,
    inline: &mut u32,
) -> Result<QueuePair> {
    let wanted = *inline;
    loop {
        let caps =
            Caps { max_send_wr: sizes.send, max_recv_wr: sizes.recv, max_inline_data: *inline };
        match QueuePair::new(&rail.open.pd, cq, caps) {
            Err(_) if *inline != 0 => {
                *inline = if *inline > LEAST_INLINE { *inline / 2 } else { 0 };
            }
            Err(e) => return Err(e),
            Ok(qp) => {
                if *inline != wanted {
                    let label = &rail.device.port.label;
                    tracing::info!("{label}: {inline} bytes inline, {wanted} are not granted");
                }
                return Ok(qp);
            }
        }
    }
}

/// A [`Setup`] taken apart.
#[derive(Debug)]
#[expect(missing_docs, reason = "see Setup")]
pub struct Parts {
    pub lanes: Vec<Lane>,
    pub cqs: Vec<Arc<CompletionQueue>>,
    pub registered: Vec<Arc<Registered>>,
    pub fifo: CreditFifo,
    pub records: SizeRecords,
    pub rails: Vec<Rail>,
}

impl Parts {
    /// The queues, as events of their devices call them.
    pub fn queues(&self) -> Vec<usize> {
        let pairs = self.lanes.iter().map(|lane| lane.qp().identity());
        pairs.chain(self.cqs.iter().map(|cq| cq.identity())).collect()
    }
}
