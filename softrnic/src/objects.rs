//! Registries of all live objects, and the tables that data-path calls validate handles with.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::abi::{IbvCq, IbvQp, IbvSrq};
use crate::channel::Channel;
use crate::context::Context;
use crate::cq::Cq;
use crate::mr::Mr;
use crate::pd::Pd;
use crate::qp::Qp;
use crate::shm::layout::{CQS as MAX_CQS, QPS as MAX_QPS, SRQS as MAX_SRQS};
use crate::srq::Srq;
use crate::sync::Registry;

/// Number of objects that depend on this one.
#[derive(Debug)]
pub struct Users(pub AtomicU32);

/// Contexts.
pub static CONTEXTS: Registry<Context> = Registry::new();
/// Protection domains.
pub static PDS: Registry<Pd> = Registry::new();
/// Memory regions.
pub static MRS: Registry<Mr> = Registry::new();
/// Channels.
pub static CHANNELS: Registry<Channel> = Registry::new();
/// Completion queues.
pub static CQS: Registry<Cq> = Registry::new();
/// Shared receive queues.
pub static SRQS: Registry<Srq> = Registry::new();
/// Queue pairs.
pub static QPS: Registry<Qp> = Registry::new();

/// QPs by handle: validates data-path handles with one comparison.
pub static QP_AT: [AtomicPtr<Qp>; MAX_QPS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_QPS];
/// CQs by handle.
pub static CQ_AT: [AtomicPtr<Cq>; MAX_CQS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_CQS];
/// SRQs by handle.
pub static SRQ_AT: [AtomicPtr<Srq>; MAX_SRQS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_SRQS];

/// Send-queue slots given back so far, by QP index. Polling a CQ advances it without touching the QP object, which
/// another thread may be destroying.
pub static SQ_DONE: [AtomicU32; MAX_QPS] = [const { AtomicU32::new(0) }; MAX_QPS];

/// Receive-queue slots given back so far, by QP index: a slot is free once its completion was polled.
pub static RQ_DONE: [AtomicU32; MAX_QPS] = [const { AtomicU32::new(0) }; MAX_QPS];

macro_rules! data_path_lookup {
    ($name:ident, $public:ty, $object:ty, $table:ident, $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// `handle` is NULL or points at readable memory of the public structure (the inline callers in the C header
        /// have read it already), and the object is not destroyed during the borrow.
        pub unsafe fn $name<'a>(handle: *mut $public) -> Option<&'a $object> {
            if handle.is_null() || !handle.is_aligned() {
                return None;
            }
            // SAFETY: promised by the caller.
            let index = unsafe { (&raw const (*handle).handle).read() };
            let object = $table.get(index as usize)?.load(Ordering::Acquire);
            if object.cast::<$public>() != handle || object.is_null() {
                return None;
            }
            // SAFETY: the table only holds live objects; a destroyed one leaves the table first and stays allocated for a
            // while longer.
            Some(unsafe { &*object })
        }
    };
}

data_path_lookup!(qp_at, IbvQp, Qp, QP_AT, "The QP behind a data-path handle.");
data_path_lookup!(cq_at, IbvCq, Cq, CQ_AT, "The CQ behind a data-path handle.");
data_path_lookup!(srq_at, IbvSrq, Srq, SRQ_AT, "The SRQ behind a data-path handle.");

/// Frees everything that was destroyed; the last context has been closed.
pub fn purge() {
    QPS.purge();
    SRQS.purge();
    MRS.purge();
    CQS.purge();
    CHANNELS.purge();
    PDS.purge();
    CONTEXTS.purge();
}

/// Forgets everything: this is a forked child, and the objects it inherited are its parent's.
pub fn abandon() {
    QPS.abandon();
    SRQS.abandon();
    MRS.abandon();
    CQS.abandon();
    CHANNELS.abandon();
    PDS.abandon();
    CONTEXTS.abandon();
    crate::ledger::abandon();
}

/// Destroys what the application left behind in a context.
pub fn destroy_all_of(context: &Arc<Context>) {
    // Errors cannot occur in this order: dependents go first.
    for qp in QPS.all().into_iter().filter(|q| Arc::ptr_eq(&q.pd.context, context)) {
        let _ = qp.destroy(false);
    }
    for srq in SRQS.all().into_iter().filter(|s| Arc::ptr_eq(&s.pd.context, context)) {
        let _ = srq.destroy(false);
    }
    for cq in CQS.all().into_iter().filter(|c| Arc::ptr_eq(&c.context, context)) {
        let _ = cq.destroy(false);
    }
    for mr in MRS.all().into_iter().filter(|m| Arc::ptr_eq(&m.pd.context, context)) {
        let _ = mr.deregister();
    }
    for channel in CHANNELS.all().into_iter().filter(|c| Arc::ptr_eq(&c.context, context)) {
        let _ = channel.destroy();
    }
    for pd in PDS.all().into_iter().filter(|p| Arc::ptr_eq(&p.context, context)) {
        let _ = pd.dealloc();
    }
}
