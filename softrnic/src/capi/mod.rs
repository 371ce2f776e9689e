//! The C boundary: every exported function.
//!
//! Rules for all of them: handles are looked up before anything is read through them, out-pointers are written
//! only on success unless the verbs contract says otherwise, a panic ends at [`guard`]. Functions that return a
//! pointer set errno; functions that return a code return an errno value.
//!
//! # Safety
//! The functions are called by C. Pointers to attribute structures, arrays and strings must be valid as the verbs
//! manual pages demand; object handles may have any value.
#![allow(clippy::missing_safety_doc)] // Stated once, above.

pub mod command;
pub mod control;
pub mod data;
pub mod devices;
pub mod events;
pub mod faults;
pub mod ledger;
pub mod legacy;
pub mod memory;
pub mod queues;
pub mod strings;

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::*;

/// Runs a body and turns a panic into `fallback`; the panic hook has printed it.
pub fn guard<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    // Objects that a panic leaves behind are guarded by locks that ignore poison; see `sync::lock`.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(fallback)
}

/// Sets errno.
pub fn set_errno(errno: i32) {
    // SAFETY: the location is the calling thread's own.
    unsafe { *libc::__errno_location() = errno };
}

/// A code-returning call: 0 or errno, which is stored as well.
pub fn code(body: impl FnOnce() -> Result<(), i32>) -> c_int {
    match guard(Err(libc::EFAULT), body) {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            errno
        }
    }
}

/// A pointer-returning call: NULL sets errno.
pub fn pointer<T>(body: impl FnOnce() -> Result<*mut T, i32>) -> *mut T {
    guard(Err(libc::EFAULT), body).unwrap_or_else(|errno| {
        set_errno(errno);
        std::ptr::null_mut()
    })
}

/// Fills the tables of a context that the C header's inline functions call through.
pub fn fill_ops(verbs: &mut VerbsContext) {
    let ops = &mut verbs.context.ops;
    ops[OP_POLL_CQ] = data::poll_cq as Slot;
    ops[OP_REQ_NOTIFY_CQ] = data::req_notify_cq as Slot;
    ops[OP_POST_SRQ_RECV] = data::post_srq_recv as Slot;
    ops[OP_POST_SEND] = data::post_send as Slot;
    ops[OP_POST_RECV] = data::post_recv as Slot;
    verbs.ext[EXT_QUERY_PORT] = devices::query_port_sized as Slot;
    verbs.ext[EXT_QUERY_DEVICE_EX] = devices::query_device_ex as Slot;
    verbs.ext[EXT_CREATE_QP_EX] = queues::create_qp_ex as Slot;
    verbs.ext[EXT_GET_SRQ_NUM] = queues::get_srq_num as Slot;
    verbs.ext[EXT_CREATE_SRQ_EX] = queues::create_srq_ex as Slot;
}
