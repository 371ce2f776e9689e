//! What lies where in a process's region.
//!
//! The region is a sealed memfd of fixed tables followed by a heap for rings. Only its owner allocates in it;
//! peers map it and touch exactly the words their role allows: the requester of a connection writes the
//! responder half of the QP slot it is connected to, pushes completions under the CQ's lock, and nothing else.

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::lock::RobustLock;
use super::mapping::Shared;
use crate::env::{MAX_DEVICES, MAX_GIDS, MAX_PORTS};
use crate::faults::table::FaultTable;

/// First word of a region.
pub const REGION_MAGIC: u64 = 0x736f_6674_726e_6963;
/// Layout version; both ends must agree.
pub const REGION_VERSION: u32 = 2;

/// Contexts per process.
pub const CONTEXTS: usize = 256;
/// Completion channels per process.
pub const CHANNELS: usize = 4096;
/// QPs per process; also the width of the index inside a QP number.
pub const QPS: usize = 1 << 16;
/// CQs per process.
pub const CQS: usize = 1 << 16;
/// SRQs per process.
pub const SRQS: usize = 1 << 14;
/// MRs per process; also the width of the index inside a key.
pub const MRS: usize = 1 << 16;

/// Mark of a dead device: no number that a stray store is likely to leave.
pub const DEAD: u32 = 0x6465_6164;

/// 64-bit words of a device name.
pub const NAME_WORDS: usize = 6;

/// One port of one device, as peers see it.
#[repr(C)]
#[derive(Debug)]
pub struct PortSlot {
    /// Port state code.
    pub state: AtomicU32,
    /// LID.
    pub lid: AtomicU32,
    /// Link layer code.
    pub link: AtomicU32,
    /// Number of GIDs.
    pub gids: AtomicU32,
    /// GIDs, as two native words of the raw bytes.
    pub gid: [[AtomicU64; 2]; MAX_GIDS],
}

/// The start of a region.
#[repr(C)]
#[derive(Debug)]
pub struct Header {
    /// [`REGION_MAGIC`], stored last.
    pub magic: AtomicU64,
    /// [`REGION_VERSION`].
    pub version: AtomicU32,
    /// Owner's process id.
    pub pid: AtomicU32,
    /// Random number, repeated in the directory.
    pub nonce: AtomicU64,
    /// Address of a word in the owner's memory that holds the nonce: the target of the access probe.
    pub probe: AtomicU64,
    /// Futex word: peers bump it when parked requests of the owner may proceed.
    pub kick: AtomicU32,
    /// Non-zero while requests have to be shown to the fault plan, or are taken apart: bits in [`crate::faults::table`].
    pub gate: AtomicU32,
    /// Address of the owner's counters, and how many there are.
    pub stats: AtomicU64,
    /// See `stats`.
    pub stats_len: AtomicU32,
    /// QP slots that were ever used lie below this index.
    pub qp_top: AtomicU32,
    /// Device names, NUL-padded.
    pub names: [[AtomicU64; NAME_WORDS]; MAX_DEVICES],
    /// [`DEAD`] for a device that died.
    pub dead: [AtomicU32; MAX_DEVICES],
    /// Ports, device-major.
    pub ports: [[PortSlot; MAX_PORTS]; MAX_DEVICES],
}

/// A pipe whose read end the owner (or its application) watches.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct PipeSlot {
    /// File descriptor of the write end in the owner; 0 = none.
    pub fd: AtomicU32,
    /// Ordinal of the context's RDMA device.
    pub device: AtomicU32,
    /// Device number of the pipe's inode, to recognise a reused descriptor.
    pub dev: AtomicU64,
    /// Inode number.
    pub ino: AtomicU64,
}

/// A queue pair.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct QpSlot {
    // Written by the owner.
    /// Owner's view of the state; the requester may only move it to ERR.
    pub state: AtomicU32,
    /// Full QP number, 0 = unused slot.
    pub qpn: AtomicU32,
    /// The only requester that is served.
    pub dest_qpn: AtomicU32,
    /// Protection domain.
    pub pd: AtomicU32,
    /// Device index and port number: device << 8 | port.
    pub port: AtomicU32,
    /// QP access flags.
    pub access: AtomicU32,
    /// Index of the receive CQ.
    pub recv_cq: AtomicU32,
    /// SRQ index + 1, 0 = own receive queue.
    pub srq: AtomicU32,
    /// Heap offset of the receive ring.
    pub rq_off: AtomicU64,
    /// Entries of the receive ring, a power of two.
    pub rq_cap: AtomicU32,
    /// Most scatter entries of a receive.
    pub rq_sge: AtomicU32,
    /// Path MTU code.
    pub mtu: AtomicU32,
    /// min_rnr_timer code.
    pub rnr_timer: AtomicU32,
    /// Responder depth for READ and atomics.
    pub max_dest_rd: AtomicU32,
    /// Context index.
    pub ctx: AtomicU32,
    // Written by the connected requester, under `lock`; a line of its own.
    _requester: [Line<()>; 0],
    /// Responder lock.
    pub lock: RobustLock,
    /// Next expected packet number.
    pub epsn: AtomicU32,
    /// Next receive to consume.
    pub rq_head: AtomicU32,
    /// Identity of a requester that waits for a receive, 0 = none.
    pub waiter: AtomicU32,
    /// Set once the "communication established" event was raised.
    pub comm_est: AtomicU32,
    /// Order of creation among the owner's queue pairs, from 1; written by the owner.
    pub ordinal: AtomicU32,
    // Written by the owner while posting receives; a line of its own.
    /// Next free receive entry.
    pub rq_tail: Line<AtomicU32>,
}

/// Starts a new cache line.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Line<T>(pub T);

impl<T> std::ops::Deref for Line<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// A completion queue.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CqSlot {
    /// Heap offset of the ring.
    pub off: AtomicU64,
    /// Entries, a power of two; 0 = unused slot.
    pub cap: AtomicU32,
    /// Channel index + 1, 0 = none.
    pub channel: AtomicU32,
    /// Context index, for the overrun event.
    pub ctx: AtomicU32,
    /// Generation of the slot, repeated in events.
    pub generation: AtomicU32,
    // Written by producers.
    _producers: [Line<()>; 0],
    /// Producer lock.
    pub lock: RobustLock,
    /// Next free entry; stored last.
    pub tail: AtomicU32,
    /// Wanted notification: 0 none, 1 solicited only, 2 any.
    pub armed: AtomicU32,
    /// Non-zero once an entry had to be dropped.
    pub overrun: AtomicU32,
    // Written by the consumer.
    /// Next entry to poll.
    pub head: Line<AtomicU32>,
}

/// A shared receive queue.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SrqSlot {
    /// Heap offset of the ring.
    pub off: AtomicU64,
    /// Entries, a power of two; 0 = unused slot.
    pub cap: AtomicU32,
    /// Most scatter entries.
    pub sge: AtomicU32,
    /// Protection domain.
    pub pd: AtomicU32,
    /// Context index.
    pub ctx: AtomicU32,
    /// Event threshold; 0 = disarmed.
    pub limit: AtomicU32,
    /// Generation of the slot, repeated in events.
    pub generation: AtomicU32,
    _consumers: [Line<()>; 0],
    /// Consumer lock.
    pub lock: RobustLock,
    /// Next receive to consume.
    pub head: AtomicU32,
    /// Identity of one requester that waits for a receive.
    pub waiter: AtomicU32,
    /// Next free entry.
    pub tail: Line<AtomicU32>,
}

/// A memory region.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct MrSlot {
    /// The key (lkey = rkey), 0 = invalid.
    pub key: AtomicU32,
    /// Protection domain.
    pub pd: AtomicU32,
    /// Access flags.
    pub access: AtomicU32,
    /// Descriptor of a dma-buf that only its own mapping reaches, 0 = ordinary memory.
    pub fd: AtomicU32,
    /// First address as keys see it.
    pub iova: AtomicU64,
    /// Length in bytes.
    pub len: AtomicU64,
    /// First address in the owner's address space.
    pub va: AtomicU64,
    /// Offset inside `fd`.
    pub fd_off: AtomicU64,
}

/// 64-bit words of one CQ entry.
pub const CQE_WORDS: usize = 8;

/// 64-bit words of one receive entry with `sge` scatter entries.
pub const fn rqe_words(sge: u32) -> usize {
    2 + 2 * sge as usize
}

const fn up(offset: usize) -> usize {
    (offset + 4095) & !4095
}

/// Offset of the fault rules.
pub const FAULT_OFF: usize = up(size_of::<Header>());
/// Offset of the context table.
pub const CTX_OFF: usize = up(FAULT_OFF + size_of::<FaultTable>());
/// Offset of the channel table.
pub const CHAN_OFF: usize = up(CTX_OFF + CONTEXTS * size_of::<PipeSlot>());
/// Offset of the QP table.
pub const QP_OFF: usize = up(CHAN_OFF + CHANNELS * size_of::<PipeSlot>());
/// Offset of the CQ table.
pub const CQ_OFF: usize = up(QP_OFF + QPS * size_of::<QpSlot>());
/// Offset of the SRQ table.
pub const SRQ_OFF: usize = up(CQ_OFF + CQS * size_of::<CqSlot>());
/// Offset of the MR table.
pub const MR_OFF: usize = up(SRQ_OFF + SRQS * size_of::<SrqSlot>());
/// Offset of the heap.
pub const HEAP_OFF: usize = up(MR_OFF + MRS * size_of::<MrSlot>());

const _: () =
    assert!(size_of::<QpSlot>() == 192 && size_of::<CqSlot>() == 192 && size_of::<MrSlot>() == 64);
const _: () = assert!(std::mem::offset_of!(QpSlot, lock) == 64);

// SAFETY: atomics only.
unsafe impl Shared for Header {}
// SAFETY: atomics only.
unsafe impl Shared for PipeSlot {}
// SAFETY: atomics only.
unsafe impl Shared for QpSlot {}
// SAFETY: atomics only.
unsafe impl Shared for CqSlot {}
// SAFETY: atomics only.
unsafe impl Shared for SrqSlot {}
// SAFETY: atomics only.
unsafe impl Shared for MrSlot {}
