//! Visibility of received data to a GPU: a 1-byte RDMA read through a queue pair connected to itself.
//!
//! The read's source is the received buffer and its destination a scratch word that owns its page. The read cannot
//! complete before writes that the device had posted to that buffer; that is a property of the platforms this is used
//! on, not a theorem about RDMA reads. `done` of a flush means GpuVisible in that sense.

use super::device::Rail;
use super::lane::Lane;
use crate::config::Settings;
use crate::error::Result;
use crate::memory::PageOwned;
use crate::memory::registry::Registered;
use crate::verbs::mr::Access;
use crate::verbs::qp::Caps;
use crate::verbs::wr::Local;
use crate::verbs::{CompletionQueue, QueuePair};
use std::sync::Arc;

/// Slots of the flush queue pair: one per receive that can be in flight.
pub const FLUSH_DEPTH: u32 = super::fifo::SLOTS as u32;

/// The loopback queue pair of one rail. Fields drop in order: the queue pair before the memory it writes.
#[derive(Debug)]
pub struct FlushQp {
    /// The queue pair with its accounting.
    pub lane: Lane,
    registered: Arc<Registered>,
    scratch: PageOwned,
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
        settings: &Settings,
    ) -> Result<Self> {
        let registry = &rail.open.registry;
        let port = &rail.address;
        let scratch = PageOwned::new(size_of::<u32>())?;
        let registered = registry.register(scratch.addr(), scratch.len(), Access::LOCAL)?;
        let caps = Caps { max_send_wr: FLUSH_DEPTH, max_recv_wr: 0, max_inline_data: 0 };
        let qp = QueuePair::new(registry.pd(), cq, caps)?;
        qp.to_init(port.port, port.pkey_index, crate::verbs::sys::access::REMOTE_READ)?;
        qp.to_rtr(&port.loopback(qp.number())?, super::connection::MIN_RNR_TIMER)?;
        qp.to_rts(0, settings.timeout, settings.retry_cnt)?;
        Ok(Self { lane: Lane::new(qp, index, index, FLUSH_DEPTH), registered, scratch })
    }

    /// The destination of the read.
    pub fn scratch(&self) -> Local {
        Local { addr: self.scratch.addr() as u64, len: 1, lkey: self.registered.lkey() }
    }
}
