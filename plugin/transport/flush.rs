//! Visibility of received data to a GPU: a 1-byte RDMA read through a queue pair connected to itself.
//!
//! The read's source is the received buffer and its destination a scratch word that owns its page. The read cannot
//! complete before writes that the device had posted to that buffer; that is a property of the platforms this is used
//! on, not a theorem about RDMA reads. `done` of a flush means GpuVisible in that sense.
//!
//! Where that is asked for the CUDA driver's own flush comes first. It needs no device, but NCCL's thread waits in the
//! driver, which other threads may hold up; so it is nobody's default.

use super::Transport;
use super::comm::Peer;
use super::device::Rail;
use super::exhaustion::{explain, is_scarcity};
use super::fifo::SLOTS;
use super::lane::{Kind, Lane, WrId};
use crate::config::{FlushMethod, Settings};
use crate::cuda::flush::{GpuFlush, Refusal};
use crate::error::Result;
use crate::memory::ledger::Purpose;
use crate::memory::piece::Piece;
use crate::memory::registry::Registered;
use crate::memory::status::Board;
use crate::memory::status::layout::board as word;
use crate::verbs::mr::Access;
use crate::verbs::qp::Caps;
use crate::verbs::wr::{Flags, Local, Operation, Prepared, Remote};
use crate::verbs::{CompletionQueue, QueuePair};
use std::sync::Arc;

/// Slots of the flush queue pair: one for the usual flush of each receive in flight, which needs no counting, and as
/// many for other flushes.
pub const FLUSH_DEPTH: u32 = 2 * LEAST_FLUSH_DEPTH;
/// The least: then every flush is counted.
pub const LEAST_FLUSH_DEPTH: u32 = SLOTS as u32;

/// The loopback queue pair of one rail. Fields drop in order: the queue pair before the memory it writes.
#[derive(Debug)]
pub struct FlushQp {
    /// The queue pair with its accounting.
    pub lane: Lane,
    has_usual: bool,
    usual: Reads,
    registered: Vec<Arc<Registered>>,
    scratch: Arc<Piece>,
}

/// A work request for each usual flush.
struct Reads(Prepared<SLOTS>);

impl std::fmt::Debug for Reads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reads").finish_non_exhaustive()
    }
}

impl FlushQp {
    /// Makes and connects one that completes on `cq`, with up to `depth` slots.
    ///
    /// # Errors
    /// A verb fails.
    pub fn new(
        rail: &Rail,
        index: usize,
        (cq, depth): (&Arc<CompletionQueue>, u32),
        transport: &Transport,
    ) -> Result<Self> {
        let settings = &transport.settings;
        let registry = &rail.open.registry;
        let bytes = size_of::<u32>();
        let (access, fallback) = (Access::LOCAL, transport.fallback());
        let (scratch, registered) = Piece::registered(
            bytes,
            Purpose::FlushScratch,
            access,
            std::slice::from_ref(registry),
            fallback,
        )
        .map_err(|e| {
            let device = [(&*rail.device, registry)];
            transport.explain_own(e, device, bytes, "the connection cannot be made")
        })?;
        let make = |depth| queue_pair(rail, cq, settings, depth);
        let mut depth = depth;
        let mut made = make(depth);
        if depth > LEAST_FLUSH_DEPTH && made.as_ref().is_err_and(is_scarcity) {
            depth = LEAST_FLUSH_DEPTH;
            made = make(depth);
        }
        let context = Some(&*rail.open.context);
        let qp = made.map_err(|e| {
            explain(e, &rail.device.port.device, context, depth, transport.machine())
        })?;
        let usual = Prepared::new(Operation::Read, |slot| {
            (WrId::new(Kind::UsualFlush, index, slot, 0).0, Flags::SIGNALED)
        });
        let lane = Lane::new(qp, index, index, LEAST_FLUSH_DEPTH);
        let has_usual = depth == FLUSH_DEPTH;
        let mut flush = Self { lane, has_usual, usual: Reads(usual), registered, scratch };
        for slot in 0..SLOTS {
            let nowhere = Remote { addr: 0, rkey: 0 };
            flush.usual.0.prepare(slot, flush.scratch(), nowhere, Flags::SIGNALED);
        }
        Ok(flush)
    }

    /// Whether slots are set aside for usual flushes.
    pub fn has_usual(&self) -> bool {
        self.has_usual
    }

    /// Posts the usual flush number `flush`: a read from `remote`.
    ///
    /// # Errors
    /// The errno of ibv_post_send.
    #[inline(always)]
    pub fn post_usual(&mut self, flush: usize, remote: Remote) -> std::result::Result<(), i32> {
        self.usual.0.set_remote(flush, remote);
        self.lane.qp().post_prepared(&mut self.usual.0, flush)
    }

    /// Where the usual flush number `flush` reads from.
    pub fn source(&self, flush: usize) -> Remote {
        self.usual.0.entry(flush).1
    }

    /// The destination of the read.
    pub fn scratch(&self) -> Local {
        Local { addr: self.scratch.addr() as u64, len: 1, lkey: self.registered[0].lkey() }
    }
}

/// A queue pair with up to `depth` slots that is connected to itself.
///
/// # Errors
/// A verb fails.
pub(super) fn queue_pair(
    rail: &Rail,
    cq: &Arc<CompletionQueue>,
    settings: &Settings,
    depth: u32,
) -> Result<QueuePair> {
    let port = &rail.address;
    let caps = Caps { max_send_wr: depth, max_recv_wr: 0, max_inline_data: 0 };
    let qp = QueuePair::new(rail.open.registry.pd(), cq, caps)?;
    qp.to_init(port.port, port.pkey_index, crate::verbs::sys::access::REMOTE_READ)?;
    qp.to_rtr(&port.loopback(qp.number())?, super::connection::MIN_RNR_TIMER)?;
    qp.to_rts(0, settings.timeout, settings.retry_cnt)?;
    Ok(qp)
}

/// How data become visible to a GPU, and how often that was done.
#[derive(Debug, Default)]
pub struct Flushes {
    /// The CUDA driver's own flush, where it was asked for and the driver has it.
    driver: Option<GpuFlush>,
    /// Why the driver did not flush, the last time it did not.
    refusal: Option<Refusal>,
    /// Reads beyond one for each flush by reads: one for every rail that carried data.
    more_reads: u64,
}

impl Flushes {
    /// As the settings have it.
    pub fn new(method: FlushMethod) -> Self {
        let driver = (method == FlushMethod::Cuda).then(GpuFlush::loaded);
        if let Some(None) = driver {
            tracing::info!(
                "PINRAIL_FLUSH_METHOD=cuda, but no CUDA driver with cuFlushGPUDirectRDMAWrites is loaded; flushes are \
                 reads"
            );
        }
        Self { driver: driver.flatten(), ..Self::default() }
    }

    /// Whether the driver is asked first.
    pub(super) fn asks_driver(&self) -> bool {
        self.driver.is_some()
    }

    /// Lets the driver flush what arrived at `addr`, if it was asked for. Where it does not, reads must.
    pub(super) fn by_driver(&mut self, addr: u64, peer: &Peer) -> bool {
        let Some(driver) = &self.driver else { return false };
        match driver.flush(addr) {
            Ok(()) => true,
            Err(refusal) => {
                if self.refusal.replace(refusal) != Some(refusal) {
                    tracing::info!("{peer}: flushes by reads, because {refusal}");
                }
                false
            }
        }
    }

    /// Counts the reads of one.
    pub(super) fn read(&mut self, reads: usize) {
        self.more_reads += (reads as u64).saturating_sub(1);
    }

    /// How often it was done, from an end's counters; `None`: nobody ever asked.
    pub(super) fn summary(&self, board: &Board) -> Option<String> {
        let count = |word| board.get(word);
        let (by_reads, by_driver) = (count(word::FLUSHES), count(word::DRIVER_FLUSHES));
        let skipped = count(word::SKIPPED_FLUSHES);
        let reads = by_reads + self.more_reads;
        (by_reads + by_driver + skipped > 0).then(|| {
            format!(
                "{by_reads} flushes by {reads} reads, {by_driver} by the CUDA driver, {skipped} had nothing to wait for"
            )
        })
    }
}
