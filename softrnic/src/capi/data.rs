//! The data path: reached through the context's table, not through exported names.

use std::ffi::c_int;

use super::{guard, set_errno};
use crate::abi::*;
use crate::objects::{cq_at, qp_at, srq_at};

fn answer(errno: i32) -> c_int {
    if errno != 0 {
        set_errno(errno);
    }
    errno
}

/// `ibv_post_send`.
pub unsafe extern "C" fn post_send(
    qp: *mut IbvQp,
    wr: *mut SendWr,
    bad: *mut *mut SendWr,
) -> c_int {
    guard(libc::EFAULT, || {
        // SAFETY: the inline caller has read the handle's context already.
        let Some(qp) = (unsafe { qp_at(qp) }) else { return answer(libc::EINVAL) };
        // SAFETY: the caller's chain, as the verbs contract has it.
        answer(unsafe { qp.post_send(wr, bad) })
    })
}

/// `ibv_post_recv`.
pub unsafe extern "C" fn post_recv(
    qp: *mut IbvQp,
    wr: *mut RecvWr,
    bad: *mut *mut RecvWr,
) -> c_int {
    guard(libc::EFAULT, || {
        // SAFETY: the inline caller has read the handle's context already.
        let Some(qp) = (unsafe { qp_at(qp) }) else { return answer(libc::EINVAL) };
        // SAFETY: the caller's chain, as the verbs contract has it.
        answer(unsafe { qp.post_recv(wr, bad) })
    })
}

/// `ibv_post_srq_recv`.
pub unsafe extern "C" fn post_srq_recv(
    srq: *mut IbvSrq,
    wr: *mut RecvWr,
    bad: *mut *mut RecvWr,
) -> c_int {
    guard(libc::EFAULT, || {
        // SAFETY: the inline caller has read the handle's context already.
        let Some(srq) = (unsafe { srq_at(srq) }) else { return answer(libc::EINVAL) };
        let max_sge = srq.query().max_sge;
        let mut at = wr;
        while !at.is_null() {
            // SAFETY: the caller's chain is readable.
            let posted = unsafe { crate::post::read_receive(at, max_sge) }
                .and_then(|r| srq.post(r.wr_id, r.sges().iter().copied()));
            if let Err(errno) = posted {
                if !bad.is_null() {
                    // SAFETY: a non-null out-pointer of the caller.
                    unsafe { bad.write(at) };
                }
                return answer(errno);
            }
            // SAFETY: the caller's chain is readable.
            at = unsafe { (&raw const (*at).next).read() };
        }
        0
    })
}

/// `ibv_poll_cq`.
pub unsafe extern "C" fn poll_cq(cq: *mut IbvCq, n: c_int, wc: *mut Wc) -> c_int {
    guard(-1, || {
        // SAFETY: the inline caller has read the handle's context already.
        let Some(cq) = (unsafe { cq_at(cq) }) else {
            set_errno(libc::EINVAL);
            return -1;
        };
        let Ok(room) = usize::try_from(n) else {
            set_errno(libc::EINVAL);
            return -1;
        };
        if room > 0 && wc.is_null() {
            set_errno(libc::EINVAL);
            return -1;
        }
        // SAFETY: the caller's array has `n` entries and `poll` stays below that.
        let taken = cq.poll(room, |i, from| unsafe { wc.add(i).write(*from) });
        c_int::try_from(taken).unwrap_or(c_int::MAX)
    })
}

/// `ibv_req_notify_cq`.
pub unsafe extern "C" fn req_notify_cq(cq: *mut IbvCq, solicited_only: c_int) -> c_int {
    guard(libc::EFAULT, || {
        // SAFETY: the inline caller has read the handle's context already.
        let Some(cq) = (unsafe { cq_at(cq) }) else { return answer(libc::EINVAL) };
        cq.arm(solicited_only != 0);
        0
    })
}
