//! Visibility of received data to a GPU: a 1-byte RDMA read through a queue pair connected to itself.
//!
//! The read's source is the received buffer and its destination a scratch word that owns its page. The read cannot
//! complete before writes that the device had posted to that buffer; that is a property of the platforms this is used
//! on, not a theorem about RDMA reads. `done` of a flush means GpuVisible in that sense.

use super::Transport;
use super::device::Rail;
use super::fifo::SLOTS;
use super::lane::{Kind, Lane, WrId};
use crate::error::Result;
use crate::memory::ledger::Purpose;
use crate::memory::piece::Piece;
use crate::memory::registry::Registered;
use crate::verbs::mr::Access;
use crate::verbs::qp::Caps;
use crate::verbs::wr::{Flags, Local, Operation, Prepared, Remote};
use crate::verbs::{CompletionQueue, QueuePair};
use std::sync::Arc;

/// Slots of the flush queue pair: one for the usual flush of each receive in flight, which needs no counting, and as
/// many for other flushes.
pub const FLUSH_DEPTH: u32 = 2 * COUNTED;
const COUNTED: u32 = SLOTS as u32;

/// The loopback queue pair of one rail. Fields drop in order: the queue pair before the memory it writes.
#[derive(Debug)]
pub struct FlushQp {
    /// The queue pair with its accounting.
    pub lane: Lane,
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
    /// Makes and connects one that completes on `cq`.
    ///
    /// # Errors
    /// A verb fails.
    pub fn new(
        rail: &Rail,
        index: usize,
        cq: &Arc<CompletionQueue>,
        transport: &Transport,
    ) -> Result<Self> {
        let settings = &transport.settings;
        let registry = &rail.open.registry;
        let port = &rail.address;
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
        let caps = Caps { max_send_wr: FLUSH_DEPTH, max_recv_wr: 0, max_inline_data: 0 };
        let qp = QueuePair::new(registry.pd(), cq, caps)?;
        qp.to_init(port.port, port.pkey_index, crate::verbs::sys::access::REMOTE_READ)?;
        qp.to_rtr(&port.loopback(qp.number())?, super::connection::MIN_RNR_TIMER)?;
        qp.to_rts(0, settings.timeout, settings.retry_cnt)?;
        let usual = Prepared::new(Operation::Read, |slot| {
            (WrId::new(Kind::UsualFlush, index, slot, 0).0, Flags::SIGNALED)
        });
        let lane = Lane::new(qp, index, index, COUNTED);
        let mut flush = Self { lane, usual: Reads(usual), registered, scratch };
        for slot in 0..SLOTS {
            let nowhere = Remote { addr: 0, rkey: 0 };
            flush.usual.0.prepare(slot, flush.scratch(), nowhere, Flags::SIGNALED);
        }
        Ok(flush)
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
