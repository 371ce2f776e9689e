//! Queue pairs of a connection, from creation to ready-to-send, for either end.

use super::Transport;
use super::address::place;
use super::comm::Peer;
use super::device::Rail;
use super::failure::Failures;
use super::fifo::{CreditFifo, SizeRecords, grid_and_records, grid_and_records_bytes};
use super::lane::Lane;
use super::stripe::MAX_PARTS;
use super::wire::{End, Identity, WireLane};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::memory::ledger::Purpose;
use crate::memory::piece::Piece;
use crate::memory::registry::Registered;
use crate::verbs::mr::Access;
use crate::verbs::qp::{Caps, Ece};
use crate::verbs::sys::access::REMOTE_WRITE;
use crate::verbs::{CompletionQueue, QueuePair};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Instant;

/// Receiver-not-ready back-off, `IBV_QP_MIN_RNR_TIMER`: 0.64 ms. Never used in order: receives are always posted.
pub const MIN_RNR_TIMER: u8 = 12;

/// Queue sizes of one end.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Send queue slots per lane.
    pub send: u32,
    /// Those of them that the lane counts.
    pub counted: u32,
    /// Receive queue slots per lane.
    pub recv: u32,
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
    counted: u32,
    /// Lanes that are ready to send.
    ready: usize,
    retry: Retry,
}

/// State of retrying a move to ready-to-receive, which resolves the peer's address and may time out.
#[derive(Debug, Default)]
struct Retry {
    attempts: u32,
    not_before: Option<Instant>,
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
    /// Creates the objects of one end and moves its queue pairs to Init.
    ///
    /// # Errors
    /// A verb fails; what was made is released.
    pub fn new(
        rails: Vec<Rail>,
        lanes: usize,
        stride: usize,
        sizes: Sizes,
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
        let mut cqs = Vec::new();
        for (index, rail) in rails.iter().enumerate() {
            let on_rail = (index..lanes).step_by(rails.len()).count() as u32;
            // Every slot of every queue can complete once, and nothing else completes here, so the queue cannot overrun.
            let entries = on_rail * (sizes.send + sizes.recv) + sizes.extra;
            let limit = rail.device.max_cqe;
            if entries > limit {
                return Err(Error::usage(format!(
                    "{}: {on_rail} queue pairs need a completion queue of {entries} entries, the device has {limit}; \
                     lower NCCL_IB_QPS_PER_CONNECTION",
                    rail.device.port.label
                )));
            }
            cqs.push(CompletionQueue::new(&rail.open.context, entries)?);
        }
        let mut qps = Vec::with_capacity(lanes);
        for lane in 0..lanes {
            let (rail, cq) = (&rails[lane % rails.len()], &cqs[lane % rails.len()]);
            let wanted = if settings.use_inline { sizes.inline } else { 0 };
            let make = |max_inline_data| {
                let caps =
                    Caps { max_send_wr: sizes.send, max_recv_wr: sizes.recv, max_inline_data };
                QueuePair::new(&rail.open.pd, cq, caps)
            };
            // A device that grants less refuses instead of stepping down.
            let qp = make(wanted).or_else(|e| if wanted == 0 { Err(e) } else { make(0) })?;
            qp.to_init(rail.address.port, rail.address.pkey_index, REMOTE_WRITE)?;
            qps.push(qp);
        }
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
            counted: sizes.counted,
            ready: 0,
            retry: Retry::default(),
        })
    }

    /// Bytes that may be posted inline on every lane.
    pub fn max_inline(&self) -> u32 {
        self.qps.iter().map(QueuePair::max_inline).min().unwrap_or(0)
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
            rails: self
                .rails
                .iter()
                .zip(&self.registered)
                .map(|(r, m)| r.address.wire(m.rkey()))
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
        self.rails.iter().map(|r| r.device.port.label.as_str()).collect::<Vec<_>>().join("+")
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
            local: self.label(),
            host: end.identity.host.clone(),
            pid: end.identity.pid,
            device: end.identity.device.clone(),
            addr: addr.to_owned(),
        }
    }

    /// Moves queue pairs on to ready-to-send; whether all are. Never sleeps: a retry waits for a later call.
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
        if self.retry.not_before.is_some_and(|t| Instant::now() < t) {
            return Ok(false);
        }
        while self.ready < self.qps.len() {
            let lane = self.ready;
            match self.bring_up_lane(lane, peer, policy) {
                Ok(()) => self.ready += 1,
                Err(e) => {
                    let settings = policy.settings;
                    let transient = e.errno() == Some(libc::ETIMEDOUT)
                        || (settings.mqp_retry_all && e.errno().is_some());
                    if !transient || self.retry.attempts >= settings.mqp_retry_cnt {
                        return Err(e);
                    }
                    self.retry.attempts += 1;
                    self.retry.not_before =
                        Some(Instant::now() + settings.mqp_retry_sleep * self.retry.attempts);
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn bring_up_lane(&self, lane: usize, peer: &End, policy: Policy<'_>) -> Result<()> {
        let (settings, qp) = (policy.settings, &self.qps[lane]);
        let rail = &self.rails[lane % self.rails.len()];
        let (remote, port) = (&peer.lanes[lane], &peer.rails[lane % peer.rails.len()]);
        let [vendor_id, options, comp_mask] = remote.ece;
        let ece = Ece { vendor_id, options, comp_mask };
        if settings.ece_enable && ece != Ece::default() {
            qp.set_ece(ece)?;
        }
        let path =
            rail.address.path(port, remote.qpn, remote.psn, policy.traffic_class, policy.sl)?;
        qp.to_rtr(&path, MIN_RNR_TIMER).map_err(|e| {
            e.context(format_args!("{} to {}", rail.device.port.label, peer.identity.device))
        })?;
        qp.to_rts(self.psns[lane], settings.timeout, settings.retry_cnt)
    }

    /// The queue pairs as lanes, and what must live as long as they.
    pub fn into_parts(self, remote_rails: usize) -> Parts {
        let rails = self.rails.len();
        let depth = self.counted;
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
