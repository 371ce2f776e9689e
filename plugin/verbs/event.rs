//! Asynchronous events of a device.

use super::Context;
use super::sys::{AsyncElement, ibv_async_event};
use std::os::fd::BorrowedFd;

/// What an event concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The whole device.
    Device,
    /// One port, from 1.
    Port(u8),
    /// One queue pair or completion queue, by its identity. It may be gone by now, and is not looked into.
    Object(usize),
}

/// One asynchronous event, already acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// `IBV_EVENT_*`.
    pub code: i32,
    /// What it concerns.
    pub scope: Scope,
}

impl AsyncEvent {
    /// The name in verbs.h without its prefix.
    pub fn name(self) -> &'static str {
        event_name(self.code)
    }

    /// Whether work on the device or object cannot go on.
    pub fn is_fatal(self) -> bool {
        matches!(
            self.name(),
            "CQ_ERR" | "QP_FATAL" | "QP_REQ_ERR" | "QP_ACCESS_ERR" | "DEVICE_FATAL"
        )
    }
}

/// The name of `IBV_EVENT_*` in verbs.h without its prefix.
pub fn event_name(code: i32) -> &'static str {
    const NAMES: [&str; 20] = [
        "CQ_ERR",
        "QP_FATAL",
        "QP_REQ_ERR",
        "QP_ACCESS_ERR",
        "COMM_EST",
        "SQ_DRAINED",
        "PATH_MIG",
        "PATH_MIG_ERR",
        "DEVICE_FATAL",
        "PORT_ACTIVE",
        "PORT_ERR",
        "LID_CHANGE",
        "PKEY_CHANGE",
        "SM_CHANGE",
        "SRQ_ERR",
        "SRQ_LIMIT_REACHED",
        "QP_LAST_WQE_REACHED",
        "CLIENT_REREGISTER",
        "GID_CHANGE",
        "WQ_FATAL",
    ];
    usize::try_from(code).ok().and_then(|i| NAMES.get(i)).copied().unwrap_or("unknown event")
}

impl Context {
    /// The descriptor that becomes readable when an event waits.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context owns the descriptor and outlives the borrow.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    /// Takes and acknowledges one event. `None` when there is none and the descriptor is non-blocking.
    pub fn take_async_event(&self) -> Option<AsyncEvent> {
        let mut raw = ibv_async_event { element: AsyncElement { port_num: 0 }, event_type: -1 };
        // SAFETY: the context is open and the out-pointer valid.
        if unsafe { (self.verbs().get_async_event)(self.raw(), &mut raw) } != 0 {
            return None;
        }
        let code = raw.event_type;
        let scope = match code {
            0 => {
                // SAFETY: this event carries a completion queue.
                Scope::Object(unsafe { raw.element.cq }.addr())
            }
            1..=7 | 16 => {
                // SAFETY: these events carry a queue pair.
                Scope::Object(unsafe { raw.element.qp }.addr())
            }
            // Of kinds that are not used here.
            14 | 15 | 19 => Scope::Object(0),
            9..=13 | 17 | 18 => {
                // SAFETY: port events carry a port number.
                Scope::Port(u8::try_from(unsafe { raw.element.port_num }).unwrap_or(0))
            }
            _ => Scope::Device,
        };
        // SAFETY: the event was just taken and is acknowledged once.
        unsafe { (self.verbs().ack_async_event)(&mut raw) };
        Some(AsyncEvent { code, scope })
    }
}
