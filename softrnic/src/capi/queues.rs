//! Completion queues, shared receive queues, queue pairs.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::{code, pointer};
use crate::abi::*;
use crate::channel::Channel;
use crate::context::Context;
use crate::cq::Cq;
use crate::env::settings;
use crate::pd::Pd;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::sync::lock;

/// `ibv_create_comp_channel`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut IbvContext) -> *mut IbvCompChannel {
    pointer(|| Ok(Channel::create(&Context::find(context).ok_or(libc::EINVAL)?)?.ptr()))
}

/// `ibv_destroy_comp_channel`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut IbvCompChannel) -> c_int {
    code(|| Channel::find(channel).ok_or(libc::EINVAL)?.destroy())
}

/// `ibv_create_cq`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut IbvContext,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut IbvCompChannel,
    vector: c_int,
) -> *mut IbvCq {
    pointer(|| {
        let context = Context::find(context).ok_or(libc::EINVAL)?;
        let channel = match channel.is_null() {
            true => None,
            false => Some(Channel::find(channel).ok_or(libc::EINVAL)?),
        };
        Ok(Cq::create(&context, cqe, cq_context, channel, vector)?.ptr())
    })
}

/// `ibv_resize_cq`: not supported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resize_cq(_cq: *mut IbvCq, _cqe: c_int) -> c_int {
    code(|| Err(libc::EOPNOTSUPP))
}

/// `ibv_destroy_cq`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut IbvCq) -> c_int {
    code(|| Cq::find(cq).ok_or(libc::EINVAL)?.destroy(true))
}

/// `ibv_create_srq`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_srq(pd: *mut IbvPd, attr: *mut SrqInitAttr) -> *mut IbvSrq {
    pointer(|| {
        let pd = Pd::find(pd).ok_or(libc::EINVAL)?;
        if attr.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null structure of the caller.
        let (context, wanted) = unsafe { ((*attr).srq_context, (*attr).attr) };
        let srq = Srq::create(&pd, context, &wanted)?;
        // SAFETY: as above; the granted values are returned in place.
        unsafe { (*attr).attr = srq.query() };
        Ok(srq.ptr())
    })
}

/// `create_srq_ex` of the extended context: basic queues only.
pub unsafe extern "C" fn create_srq_ex(
    _context: *mut IbvContext,
    attr: *mut SrqInitAttrEx,
) -> *mut IbvSrq {
    if attr.is_null() {
        super::set_errno(libc::EINVAL);
        return std::ptr::null_mut();
    }
    // SAFETY: a non-null structure of the caller.
    let (mask, kind, pd) = unsafe { ((*attr).comp_mask, (*attr).srq_type, (*attr).pd) };
    if mask & !3 != 0 || mask & 2 == 0 || mask & 1 != 0 && kind != 0 {
        super::set_errno(libc::EOPNOTSUPP);
        return std::ptr::null_mut();
    }
    // SAFETY: the extended structure starts with the plain one.
    unsafe { ibv_create_srq(pd, attr.cast()) }
}

/// `get_srq_num` of the extended context.
pub unsafe extern "C" fn get_srq_num(srq: *mut IbvSrq, number: *mut u32) -> c_int {
    code(|| {
        let srq = Srq::find(srq).ok_or(libc::EINVAL)?;
        if number.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null out-pointer of the caller.
        unsafe { number.write(srq.index) };
        Ok(())
    })
}

/// `ibv_modify_srq`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_srq(
    srq: *mut IbvSrq,
    attr: *mut SrqAttr,
    mask: c_int,
) -> c_int {
    code(|| {
        let srq = Srq::find(srq).ok_or(libc::EINVAL)?;
        if attr.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null structure of the caller.
        srq.modify(&unsafe { attr.read() }, mask.cast_unsigned())
    })
}

/// `ibv_query_srq`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_srq(srq: *mut IbvSrq, attr: *mut SrqAttr) -> c_int {
    code(|| {
        let srq = Srq::find(srq).ok_or(libc::EINVAL)?;
        if attr.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null structure of the caller.
        unsafe { attr.write(srq.query()) };
        Ok(())
    })
}

/// `ibv_destroy_srq`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut IbvSrq) -> c_int {
    code(|| Srq::find(srq).ok_or(libc::EINVAL)?.destroy(true))
}

/// `ibv_create_qp`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut IbvPd, attr: *mut QpInitAttr) -> *mut IbvQp {
    pointer(|| {
        let pd = Pd::find(pd).ok_or(libc::EINVAL)?;
        if attr.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null structure of the caller; it is read as a whole, which every caller allocates.
        let wanted = unsafe { attr.read() };
        let send = Cq::find(wanted.send_cq).ok_or(libc::EINVAL)?;
        let recv = Cq::find(wanted.recv_cq).ok_or(libc::EINVAL)?;
        let srq = match wanted.srq.is_null() {
            true => None,
            false => Some(Srq::find(wanted.srq).ok_or(libc::EINVAL)?),
        };
        let all = wanted.sq_sig_all != 0;
        let qp =
            Qp::create(&pd, wanted.qp_context, [send, recv], srq, wanted.cap, wanted.qp_type, all)?;
        // SAFETY: as above; the granted capacities are returned in place.
        unsafe { (*attr).cap = qp.cap };
        Ok(qp.ptr())
    })
}

/// `create_qp_ex` of the extended context: only what the plain call can do.
pub unsafe extern "C" fn create_qp_ex(
    _context: *mut IbvContext,
    attr: *mut QpInitAttrEx,
) -> *mut IbvQp {
    if attr.is_null() {
        super::set_errno(libc::EINVAL);
        return std::ptr::null_mut();
    }
    // SAFETY: a non-null structure of the caller.
    let (mask, pd) = unsafe { ((*attr).comp_mask, (*attr).pd) };
    // PD, and creation flags if they are zero. The builder interface and the rest are not offered.
    // SAFETY: the flags are inside the structure when the mask names them.
    let flags = if mask & 4 != 0 { unsafe { (*attr).create_flags } } else { 0 };
    if mask & !5 != 0 || mask & 1 == 0 || flags != 0 {
        super::set_errno(libc::EOPNOTSUPP);
        return std::ptr::null_mut();
    }
    // SAFETY: the extended structure starts with the plain one.
    unsafe { ibv_create_qp(pd, attr.cast()) }
}

/// `ibv_qp_to_qp_ex`: no builder interface.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(_qp: *mut IbvQp) -> *mut c_void {
    std::ptr::null_mut()
}

/// `ibv_modify_qp`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut IbvQp, attr: *mut QpAttr, mask: c_int) -> c_int {
    code(|| {
        let qp = Qp::find(qp).ok_or(libc::EINVAL)?;
        if attr.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null structure of the caller; our type is the shortest that callers allocate.
        qp.modify(&unsafe { attr.read() }, mask.cast_unsigned())
    })
}

/// `ibv_query_qp`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut IbvQp,
    attr: *mut QpAttr,
    _mask: c_int,
    init: *mut QpInitAttr,
) -> c_int {
    code(|| {
        let qp = Qp::find(qp).ok_or(libc::EINVAL)?;
        if attr.is_null() || init.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: our handle is live, so its public part is readable.
        let context = unsafe { (&raw const (*qp.ptr()).qp_context).read() };
        // SAFETY: non-null structures of the caller; ours are the shortest that callers allocate.
        unsafe {
            attr.write(qp.query());
            init.write(QpInitAttr {
                qp_context: context,
                send_cq: qp.send_cq.ptr(),
                recv_cq: qp.recv_cq.ptr(),
                srq: qp.srq.as_ref().map_or(std::ptr::null_mut(), |s: &Arc<Srq>| s.ptr()),
                cap: qp.cap,
                qp_type: QPT_RC,
                sq_sig_all: c_int::from(qp.sig_all),
            });
        }
        Ok(())
    })
}

/// `ibv_destroy_qp`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut IbvQp) -> c_int {
    code(|| Qp::find(qp).ok_or(libc::EINVAL)?.destroy(true))
}

/// `ibv_query_qp_data_in_order`: only the last aligned word is ordered, so no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut IbvQp,
    _op: u32,
    _flags: u32,
) -> c_int {
    0
}

/// Vendor word of the extensions.
const ECE_VENDOR: u32 = 0x005a_f700;

/// `ibv_query_ece`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_ece(qp: *mut IbvQp, ece: *mut Ece) -> c_int {
    code(|| {
        let qp = Qp::find(qp).ok_or(libc::EINVAL)?;
        if ece.is_null() {
            return Err(libc::EINVAL);
        }
        let set = lock(&qp.sq).ece;
        let options =
            if set.vendor_id == ECE_VENDOR { set.options } else { settings().ece_options() };
        // SAFETY: a non-null structure of the caller.
        unsafe { ece.write(Ece { vendor_id: ECE_VENDOR, options, comp_mask: 0 }) };
        Ok(())
    })
}

/// `ibv_set_ece`: allowed before RTR.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_set_ece(qp: *mut IbvQp, ece: *mut Ece) -> c_int {
    code(|| {
        let qp = Qp::find(qp).ok_or(libc::EINVAL)?;
        if ece.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null structure of the caller.
        let wanted = unsafe { ece.read() };
        if wanted.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        let mut sq = lock(&qp.sq);
        if qp.state(&sq) >= QPS_RTR {
            return Err(libc::EINVAL);
        }
        // A foreign vendor's extensions are dropped, ours reduced to what both know.
        let known = wanted.vendor_id == ECE_VENDOR;
        let options = if known { wanted.options & settings().ece_options() } else { 0 };
        sq.ece = Ece { vendor_id: ECE_VENDOR, options, comp_mask: 0 };
        Ok(())
    })
}

/// `ibv_create_ah`: datagram addressing is not offered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(_pd: *mut IbvPd, _attr: *mut AhAttr) -> *mut IbvAh {
    pointer(|| Err(libc::EOPNOTSUPP))
}

/// `ibv_destroy_ah`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(_ah: *mut IbvAh) -> c_int {
    code(|| Err(libc::EOPNOTSUPP))
}
