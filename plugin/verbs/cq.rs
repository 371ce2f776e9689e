//! A completion queue and the completions polled from it.

use super::sys::{WC_SUCCESS, WC_WR_FLUSH_ERR, ibv_cq, ibv_wc, imm_data_invalidated_rkey_union_t};
use super::{Context, errno, log_destroy};
use crate::error::{Error, Result};
use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;

/// Completions taken per poll: a message's usual two with room for a burst, in six cache lines of which a poll touches those
/// that it fills. With 16 messages in flight eight take 20 instructions per message less than four.
pub const BATCH: usize = 8;

/// A completion queue.
pub struct CompletionQueue {
    raw: NonNull<ibv_cq>,
    poll: PollCq,
    context: Arc<Context>,
}

// SAFETY: providers lock a completion queue while it is polled or destroyed.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Makes a queue of at least `entries` entries.
    ///
    /// # Errors
    /// The verb fails; ENOMEM here is often the memory lock limit, so the size asked for is named.
    pub fn new(context: &Arc<Context>, entries: u32) -> Result<Arc<Self>> {
        let object = || format!("{} with {entries} entries", context.name());
        let cqe = c_int::try_from(entries)
            .map_err(|_| Error::verb("ibv_create_cq", object(), libc::EINVAL))?;
        // SAFETY: the context is open; no completion channel, no user context, first completion vector.
        let raw = unsafe {
            (context.verbs().create_cq)(
                context.raw(),
                cqe,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                0,
            )
        };
        let raw =
            NonNull::new(raw).ok_or_else(|| Error::verb("ibv_create_cq", object(), errno()))?;
        // SAFETY: a queue the library just made points at its open context, whose operations table is filled.
        let poll = unsafe { (*(*raw.as_ptr()).context).ops.poll_cq };
        let Some(poll) = poll else {
            // SAFETY: the queue was just made and is used by nothing.
            unsafe { (context.verbs().destroy_cq)(raw.as_ptr()) };
            return Err(Error::system(format!("{} has no poll_cq operation", context.name())));
        };
        super::context::add(&context.objects().cqs);
        Ok(Arc::new(Self { raw, poll, context: Arc::clone(context) }))
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    /// What events of the device call it.
    pub fn identity(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Takes up to [`BATCH`] completions; returns how many, or a negative number if the queue is broken.
    #[inline(always)]
    pub fn poll(&self, into: &mut Completions) -> i32 {
        // SAFETY: the queue is alive, the provider's own function is called, and the array has BATCH entries.
        unsafe { (self.poll)(self.raw(), BATCH as c_int, into.0.as_mut_ptr()) }
    }
}

/// The poll function of one completion queue with its argument, side by side for the data path.
pub struct Poller {
    raw: NonNull<ibv_cq>,
    poll: PollCq,
    _cq: Arc<CompletionQueue>,
}

// SAFETY: as for the queue, which `_cq` keeps alive.
unsafe impl Send for Poller {}
// SAFETY: as above.
unsafe impl Sync for Poller {}

impl Poller {
    /// A poller of `cq`.
    pub fn new(cq: Arc<CompletionQueue>) -> Self {
        Self { raw: cq.raw, poll: cq.poll, _cq: cq }
    }

    /// As [`CompletionQueue::poll`].
    #[inline(always)]
    pub fn poll(&self, into: &mut Completions) -> i32 {
        // SAFETY: the queue is kept alive, the provider's own function is called, and the array has BATCH entries.
        unsafe { (self.poll)(self.raw.as_ptr(), BATCH as c_int, into.0.as_mut_ptr()) }
    }
}

impl fmt::Debug for Poller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller").finish_non_exhaustive()
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("device", &self.context.name())
            .finish_non_exhaustive()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        super::context::sub(&self.context.objects().cqs);
        // SAFETY: queue pairs hold an Arc of their completion queues, so none is left.
        let rc = unsafe { (self.context.verbs().destroy_cq)(self.raw()) };
        log_destroy("ibv_destroy_cq", &self.context.name(), rc);
    }
}

/// Room for one poll's completions.
#[repr(transparent)]
#[expect(missing_debug_implementations, reason = "entries hold old values between polls")]
pub struct Completions([ibv_wc; BATCH]);

// SAFETY: completions are plain integers.
unsafe impl Send for Completions {}

impl Completions {
    /// An empty one.
    pub fn new() -> Self {
        const EMPTY: ibv_wc = ibv_wc {
            wr_id: 0,
            status: 0,
            opcode: 0,
            vendor_err: 0,
            byte_len: 0,
            imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t { imm_data: 0 },
            qp_num: 0,
            src_qp: 0,
            wc_flags: 0,
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        };
        Self([EMPTY; BATCH])
    }

    /// Completion `index` of the last poll, below [`BATCH`].
    #[inline(always)]
    pub fn get(&self, index: usize) -> Completion<'_> {
        Completion(&self.0[index % BATCH])
    }

    /// The completion at a place.
    #[inline(always)]
    pub fn at(&self, place: At) -> Completion<'_> {
        // SAFETY: places are those of elements, as the type says.
        Completion(unsafe { &*self.0.as_ptr().byte_add(place.0) })
    }
}

/// Where in [`Completions`] one is: its distance from the first, so that a loop need not compute it anew from an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At(usize);

impl At {
    /// The first.
    pub const FIRST: Self = Self(0);

    /// The places of the first `count`, of as many as there are.
    #[inline(always)]
    pub fn first(count: usize) -> impl Iterator<Item = Self> {
        (0..count.min(BATCH)).map(|index| Self(index * size_of::<ibv_wc>()))
    }
}

impl Default for Completions {
    fn default() -> Self {
        Self::new()
    }
}

/// One completion. Only the identifier, the status and the vendor code are defined when it failed.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "which fields are defined depends on the status")]
pub struct Completion<'a>(&'a ibv_wc);

impl Completion<'_> {
    /// The work request's identifier.
    #[inline(always)]
    pub fn id(self) -> u64 {
        self.0.wr_id
    }

    /// Whether the work request succeeded.
    #[inline(always)]
    pub fn is_success(self) -> bool {
        self.0.status == WC_SUCCESS
    }

    /// Whether the work request was only flushed because its queue pair had failed before.
    pub fn is_flush(self) -> bool {
        self.0.status == WC_WR_FLUSH_ERR
    }

    /// `IBV_WC_*`.
    pub fn status(self) -> u32 {
        self.0.status
    }

    /// The vendor's code for a failure.
    pub fn vendor_err(self) -> u32 {
        self.0.vendor_err
    }

    /// Bytes written, for a receive completed by a write with immediate.
    #[inline(always)]
    pub fn byte_len(self) -> u32 {
        self.0.byte_len
    }

    /// The immediate, which peers of this plugin send little-endian.
    #[inline(always)]
    pub fn imm(self) -> u32 {
        // SAFETY: both members of the union are the same four bytes.
        u32::from_le(unsafe { self.0.imm_data_invalidated_rkey_union.imm_data })
    }
}

/// The symbolic name of a completion status, as verbs.h spells it.
pub fn status_name(status: u32) -> &'static str {
    const NAMES: [&str; 23] = [
        "SUCCESS",
        "LOC_LEN_ERR",
        "LOC_QP_OP_ERR",
        "LOC_EEC_OP_ERR",
        "LOC_PROT_ERR",
        "WR_FLUSH_ERR",
        "MW_BIND_ERR",
        "BAD_RESP_ERR",
        "LOC_ACCESS_ERR",
        "REM_INV_REQ_ERR",
        "REM_ACCESS_ERR",
        "REM_OP_ERR",
        "RETRY_EXC_ERR",
        "RNR_RETRY_EXC_ERR",
        "LOC_RDD_VIOL_ERR",
        "REM_INV_RD_REQ_ERR",
        "REM_ABORT_ERR",
        "INV_EECN_ERR",
        "INV_EEC_STATE_ERR",
        "FATAL_ERR",
        "RESP_TIMEOUT_ERR",
        "GENERAL_ERR",
        "TM_ERR",
    ];
    usize::try_from(status).ok().and_then(|i| NAMES.get(i)).copied().unwrap_or("unknown status")
}
