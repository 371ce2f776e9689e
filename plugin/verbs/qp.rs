//! A reliable connected queue pair.

use super::sys::{
    QPT_RC, ibv_ah_attr, ibv_ece, ibv_gid, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr,
    ibv_recv_wr, ibv_send_wr, mask, qp_state,
};
use super::wr::{Prepared, RecvChain, SendChain};
use super::{CompletionQueue, ProtectionDomain, errno, log_destroy};
use crate::error::{Error, Result};
use std::ffi::c_int;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
type PostRecv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// Queue sizes to ask for.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in ibv_create_qp(3)")]
pub struct Caps {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_inline_data: u32,
}

/// Vendor options negotiated while connecting; all zero is "none".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named as in ibv_query_ece(3)")]
pub struct Ece {
    pub vendor_id: u32,
    pub options: u32,
    pub comp_mask: u32,
}

/// The other end of a connection and the way there.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// `IBV_MTU_*`.
    pub mtu: u32,
    /// The peer's queue pair.
    pub dest_qp: u32,
    /// The peer's first packet sequence number.
    pub rq_psn: u32,
    /// The local port, from 1.
    pub port: u8,
    /// The peer's LID; 0 on RoCE.
    pub dlid: u16,
    /// The peer's GID and how to route to it, where a global header is needed.
    pub global: Option<GlobalRoute>,
    /// Service level.
    pub sl: u8,
}

/// The global part of an address.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in ibv_modify_qp(3)")]
pub struct GlobalRoute {
    pub dgid: [u8; 16],
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// A reliable connected queue pair.
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    post_send: PostSend,
    post_recv: PostRecv,
    number: u32,
    max_inline: u32,
    fuse: Option<Fuse>,
    pd: Arc<ProtectionDomain>,
    _cq: Arc<CompletionQueue>,
}

/// Moves a queue pair to error from any thread, for as long as it exists.
#[derive(Clone, Debug)]
pub struct Fuse(Arc<Mutex<Option<Wire>>>);

/// What a fuse is in.
#[derive(Debug)]
struct Wire {
    raw: NonNull<ibv_qp>,
    number: u32,
    pd: Arc<ProtectionDomain>,
}

// SAFETY: as for the queue pair, whose state the library changes under locks of its own.
unsafe impl Send for Wire {}

impl Fuse {
    fn wire(&self) -> MutexGuard<'_, Option<Wire>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves it to error, unless it is gone: what was posted is flushed, and nothing more comes in.
    ///
    /// # Errors
    /// The verb fails.
    pub fn blow(&self) -> Result<()> {
        let wire = self.wire();
        let Some(Wire { raw, number, pd }) = &*wire else { return Ok(()) };
        let mut attr = zeroed_attr();
        attr.qp_state = qp_state::ERR;
        // SAFETY: the queue pair takes the wire out, under this lock, before it is destroyed.
        unsafe { modify(*raw, *number, pd, &mut attr, mask::STATE, "ERR") }
    }
}

impl Fuse {
    /// Whether it is in the error state, whoever moved it there. A library that cannot tell says no.
    pub fn is_blown(&self) -> bool {
        let wire = self.wire();
        let Some(Wire { raw, pd, .. }) = &*wire else { return false };
        let Some(query) = pd.context().verbs().query_qp else { return false };
        let mut attr = zeroed_attr();
        // SAFETY: integers and raw pointers only: all-zero is a value.
        let mut init = unsafe { std::mem::zeroed::<ibv_qp_init_attr>() };
        // SAFETY: the queue pair takes the wire out, under this lock, before it is destroyed; the out-pointers are valid.
        let rc = unsafe { query(raw.as_ptr(), &mut attr, mask::STATE, &mut init) };
        rc == 0 && attr.qp_state == qp_state::ERR
    }
}

// SAFETY: providers lock the work queues; state changes go through the library, which locks too.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Makes a queue pair that completes sends and receives on `cq`.
    ///
    /// # Errors
    /// The verb fails; the sizes asked for are named.
    pub fn new(pd: &Arc<ProtectionDomain>, cq: &Arc<CompletionQueue>, caps: Caps) -> Result<Self> {
        let context = pd.context();
        // SAFETY: integers and raw pointers only: all-zero is a value.
        let mut init = unsafe { std::mem::zeroed::<ibv_qp_init_attr>() };
        init.send_cq = cq.raw();
        init.recv_cq = cq.raw();
        init.qp_type = QPT_RC;
        init.cap = ibv_qp_cap {
            max_send_wr: caps.max_send_wr,
            max_recv_wr: caps.max_recv_wr,
            max_send_sge: 1,
            max_recv_sge: u32::from(caps.max_recv_wr != 0),
            max_inline_data: caps.max_inline_data,
        };
        // SAFETY: domain and completion queue are alive and of the same device; the attributes are valid for the call.
        let raw = unsafe { (context.verbs().create_qp)(pd.raw(), &mut init) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            Error::verb("ibv_create_qp", format!("{} ({caps:?})", context.name()), errno())
        })?;
        // SAFETY: a queue pair the library just made points at its open context, whose operations table is filled.
        let (ops, number) = unsafe { ((*(*raw.as_ptr()).context).ops, (*raw.as_ptr()).qp_num) };
        let (Some(post_send), Some(post_recv)) = (ops.post_send, ops.post_recv) else {
            // SAFETY: the queue pair was just made and is used by nothing.
            unsafe { (context.verbs().destroy_qp)(raw.as_ptr()) };
            return Err(Error::system(format!("{} has no post operations", context.name())));
        };
        super::context::add(&context.objects().qps);
        Ok(Self {
            raw,
            post_send,
            post_recv,
            number,
            max_inline: init.cap.max_inline_data,
            fuse: None,
            pd: Arc::clone(pd),
            _cq: Arc::clone(cq),
        })
    }

    /// The queue pair number, 24 bits.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// What ends it from another thread.
    pub fn fuse(&mut self) -> Fuse {
        let wire = || Wire { raw: self.raw, number: self.number, pd: Arc::clone(&self.pd) };
        self.fuse.get_or_insert_with(|| Fuse(Arc::new(Mutex::new(Some(wire()))))).clone()
    }

    /// What events of the device call it.
    pub fn identity(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    /// Bytes that may be posted inline, as granted.
    pub fn max_inline(&self) -> u32 {
        self.max_inline
    }

    /// Reset → Init, with what peers may do through this queue pair.
    ///
    /// # Errors
    /// The verb fails.
    pub fn to_init(&self, port: u8, pkey_index: u16, remote_access: c_int) -> Result<()> {
        let mut attr = zeroed_attr();
        attr.qp_state = qp_state::INIT;
        attr.port_num = port;
        attr.pkey_index = pkey_index;
        attr.qp_access_flags = remote_access.cast_unsigned();
        self.modify(
            &mut attr,
            mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS,
            "INIT",
        )
    }

    /// Init → Ready to receive from the peer of `path`.
    ///
    /// # Errors
    /// The verb fails: an address that does not resolve, a GID index that is not usable, …
    pub fn to_rtr(&self, path: &Path, min_rnr_timer: u8) -> Result<()> {
        let mut attr = zeroed_attr();
        attr.qp_state = qp_state::RTR;
        attr.path_mtu = path.mtu;
        attr.dest_qp_num = path.dest_qp;
        attr.rq_psn = path.rq_psn;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = min_rnr_timer;
        let mut ah: ibv_ah_attr = attr.ah_attr;
        ah.dlid = path.dlid;
        ah.sl = path.sl;
        ah.port_num = path.port;
        if let Some(global) = path.global {
            ah.is_global = 1;
            ah.grh.dgid = ibv_gid { raw: global.dgid };
            ah.grh.sgid_index = global.sgid_index;
            ah.grh.hop_limit = global.hop_limit;
            ah.grh.traffic_class = global.traffic_class;
        }
        attr.ah_attr = ah;
        self.modify(
            &mut attr,
            mask::STATE
                | mask::AV
                | mask::PATH_MTU
                | mask::DEST_QPN
                | mask::RQ_PSN
                | mask::MAX_DEST_RD_ATOMIC
                | mask::MIN_RNR_TIMER,
            "RTR",
        )
    }

    /// Ready to receive → ready to send. `timeout` is the exponent of 4.096 µs × 2^timeout, 0 for ever.
    ///
    /// # Errors
    /// The verb fails.
    pub fn to_rts(&self, sq_psn: u32, timeout: u8, retry_cnt: u8) -> Result<()> {
        let mut attr = zeroed_attr();
        attr.qp_state = qp_state::RTS;
        attr.timeout = timeout;
        attr.retry_cnt = retry_cnt;
        attr.rnr_retry = 7;
        attr.sq_psn = sq_psn;
        attr.max_rd_atomic = 1;
        self.modify(
            &mut attr,
            mask::STATE
                | mask::TIMEOUT
                | mask::RETRY_CNT
                | mask::RNR_RETRY
                | mask::SQ_PSN
                | mask::MAX_QP_RD_ATOMIC,
            "RTS",
        )
    }

    /// Any state → error: the device stops using the memory of this queue pair's work requests.
    ///
    /// # Errors
    /// The verb fails.
    pub fn to_error(&self) -> Result<()> {
        let mut attr = zeroed_attr();
        attr.qp_state = qp_state::ERR;
        self.modify(&mut attr, mask::STATE, "ERR")
    }

    fn modify(&self, attr: &mut ibv_qp_attr, attr_mask: c_int, to: &'static str) -> Result<()> {
        // SAFETY: the queue pair is alive.
        unsafe { modify(self.raw, self.number, &self.pd, attr, attr_mask, to) }
    }

    /// The vendor options this side offers, `None` where library or device has none.
    pub fn query_ece(&self) -> Option<Ece> {
        let query = self.pd.context().verbs().query_ece?;
        let mut ece = ibv_ece { vendor_id: 0, options: 0, comp_mask: 0 };
        // SAFETY: the queue pair is alive and the out-pointer valid.
        let rc = unsafe { query(self.raw.as_ptr(), &mut ece) };
        (rc == 0).then_some(Ece {
            vendor_id: ece.vendor_id,
            options: ece.options,
            comp_mask: ece.comp_mask,
        })
    }

    /// Sets vendor options before the move to ready-to-receive. A device without them is not an error.
    ///
    /// # Errors
    /// The verb fails for another reason.
    pub fn set_ece(&self, ece: Ece) -> Result<()> {
        let context = self.pd.context();
        let Some(set) = context.verbs().set_ece else { return Ok(()) };
        let mut raw =
            ibv_ece { vendor_id: ece.vendor_id, options: ece.options, comp_mask: ece.comp_mask };
        // SAFETY: the queue pair is alive and the argument valid for the call.
        match unsafe { set(self.raw.as_ptr(), &mut raw) } {
            0 | libc::EOPNOTSUPP => Ok(()),
            rc => Err(Error::verb(
                "ibv_set_ece",
                format_args!("{} QP {}", context.name(), self.number),
                rc.abs(),
            )),
        }
    }

    /// Posts the first `count` entries of `chain`, at least one, with one doorbell.
    ///
    /// # Errors
    /// The errno; nothing of the caller's accounting may be assumed afterwards, the connection is broken.
    #[inline]
    pub fn post_send(&self, chain: &mut SendChain, count: usize) -> std::result::Result<(), i32> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive, the list is NULL-terminated and lives through the call; the provider copies
        // it. Whether the device may touch the addresses is decided by their keys.
        let rc = chain.with_list(count, |list| unsafe {
            (self.post_send)(self.raw.as_ptr(), list, &mut bad)
        });
        if rc == 0 { Ok(()) } else { Err(rc) }
    }

    /// Posts entry `index` of `table`.
    ///
    /// # Errors
    /// As [`Self::post_send`].
    #[inline(always)]
    pub fn post_prepared<const N: usize>(
        &self,
        table: &mut Prepared<N>,
        index: usize,
    ) -> std::result::Result<(), i32> {
        let mut bad = MaybeUninit::uninit();
        // SAFETY: as above; the list is the one work request, and the out-pointer is only written.
        let rc =
            unsafe { (self.post_send)(self.raw.as_ptr(), table.list(index), bad.as_mut_ptr()) };
        if rc == 0 { Ok(()) } else { Err(rc) }
    }

    /// Posts a list of receives.
    ///
    /// # Errors
    /// The errno.
    pub fn post_recv(&self, chain: &mut RecvChain) -> std::result::Result<(), i32> {
        let mut bad = ptr::null_mut();
        // SAFETY: as for sends.
        let rc = unsafe { (self.post_recv)(self.raw.as_ptr(), chain.first(), &mut bad) };
        if rc == 0 { Ok(()) } else { Err(rc) }
    }
}

/// # Safety
/// The queue pair is alive.
unsafe fn modify(
    raw: NonNull<ibv_qp>,
    number: u32,
    pd: &ProtectionDomain,
    attr: &mut ibv_qp_attr,
    attr_mask: c_int,
    to: &'static str,
) -> Result<()> {
    let context = pd.context();
    // SAFETY: the queue pair is alive, and the attributes are valid for the call.
    let rc = unsafe { (context.verbs().modify_qp)(raw.as_ptr(), attr, attr_mask) };
    if rc == 0 {
        return Ok(());
    }
    let errno = if rc > 0 { rc } else { errno() };
    let what = format_args!("{} QP {number} to {to}", context.name());
    Err(Error::verb("ibv_modify_qp", what, errno))
}

fn zeroed_attr() -> ibv_qp_attr {
    // SAFETY: integers and unions of integers only: all-zero is a value.
    unsafe { std::mem::zeroed() }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("device", &self.pd.context().name())
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        super::context::sub(&self.pd.context().objects().qps);
        if let Some(fuse) = &self.fuse {
            fuse.wire().take();
        }
        // SAFETY: made by this library and destroyed once; domain and completion queue are kept alive by their Arcs.
        let rc = unsafe { (self.pd.context().verbs().destroy_qp)(self.raw.as_ptr()) };
        log_destroy("ibv_destroy_qp", &self.pd.context().name(), rc);
    }
}
