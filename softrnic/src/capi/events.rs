//! Async and completion events.

use std::ffi::{c_int, c_void};

use super::{guard, set_errno};
use crate::abi::*;
use crate::channel::Channel;
use crate::context::Context;
use crate::cq::Cq;
use crate::qp::Qp;
use crate::srq::Srq;

enum Element {
    Cq(std::sync::Arc<Cq>),
    Qp(std::sync::Arc<Qp>),
    Srq(std::sync::Arc<Srq>),
    Port(u32),
}

fn element(kind: u32, index: u32, generation: u32) -> Option<Element> {
    match kind {
        EVENT_CQ_ERR => Cq::of_event(index, generation).map(Element::Cq),
        EVENT_SRQ_ERR | EVENT_SRQ_LIMIT_REACHED => {
            Srq::of_event(index, generation).map(Element::Srq)
        }
        EVENT_QP_FATAL..=EVENT_PATH_MIG_ERR | EVENT_QP_LAST_WQE_REACHED => {
            Qp::by_number(index).map(Element::Qp)
        }
        // Device-wide events carry a port number.
        EVENT_DEVICE_FATAL..=EVENT_WQ_FATAL => Some(Element::Port(index)),
        _ => None,
    }
}

/// `ibv_get_async_event`: 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut IbvContext,
    event: *mut AsyncEvent,
) -> c_int {
    let result = guard(Err(libc::EFAULT), || {
        let context = Context::find(context).filter(|_| !event.is_null()).ok_or(libc::EINVAL)?;
        loop {
            let next = context.events.next().map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
            // An event of an object that is gone meanwhile, or a scribbled record: nobody could use it.
            let Some(element) = element(next.0, next.1, next.2) else { continue };
            let word = match &element {
                Element::Cq(cq) => {
                    cq.async_acks.delivered();
                    cq.ptr().expose_provenance() as u64
                }
                Element::Qp(qp) => {
                    qp.acks.delivered();
                    qp.ptr().expose_provenance() as u64
                }
                Element::Srq(srq) => {
                    srq.acks.delivered();
                    srq.ptr().expose_provenance() as u64
                }
                Element::Port(port) => u64::from(*port),
            };
            // SAFETY: a non-null structure of the caller.
            unsafe { event.write(AsyncEvent { element: word, event_type: next.0 }) };
            return Ok(());
        }
    });
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// `ibv_ack_async_event`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut AsyncEvent) {
    guard((), || {
        if event.is_null() {
            return;
        }
        // SAFETY: a non-null structure of the caller.
        let event = unsafe { event.read() };
        let handle = usize::try_from(event.element).unwrap_or(0);
        match event.event_type {
            EVENT_CQ_ERR => {
                if let Some(cq) = Cq::find(std::ptr::with_exposed_provenance_mut(handle)) {
                    cq.async_acks.acked(1);
                }
            }
            EVENT_SRQ_ERR | EVENT_SRQ_LIMIT_REACHED => {
                if let Some(srq) = Srq::find(std::ptr::with_exposed_provenance_mut(handle)) {
                    srq.acks.acked(1);
                }
            }
            EVENT_QP_FATAL..=EVENT_PATH_MIG_ERR | EVENT_QP_LAST_WQE_REACHED => {
                if let Some(qp) = Qp::find(std::ptr::with_exposed_provenance_mut(handle)) {
                    qp.acks.acked(1);
                }
            }
            _ => {}
        }
    });
}

/// `ibv_get_cq_event`: 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut IbvCompChannel,
    cq: *mut *mut IbvCq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let result = guard(Err(libc::EFAULT), || {
        let channel = Channel::find(channel).filter(|_| !cq.is_null()).ok_or(libc::EINVAL)?;
        loop {
            let next = channel.pipe.next().map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
            let Some(found) = Cq::of_event(next.1, next.2) else { continue };
            found.comp_acks.delivered();
            // SAFETY: a live CQ's public part is readable; the out-pointers are the caller's.
            unsafe {
                cq.write(found.ptr());
                if !cq_context.is_null() {
                    cq_context.write((&raw const (*found.ptr()).cq_context).read());
                }
            }
            return Ok(());
        }
    });
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// `ibv_ack_cq_events`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut IbvCq, n: u32) {
    guard((), || {
        if let Some(cq) = Cq::find(cq) {
            cq.comp_acks.acked(n);
        }
    });
}
