//! One device as the event thread sees it: its events, and the connections that they concern.

use super::Policy;
use crate::memory::{Gate, GateState};
use crate::transport::device::OpenDevice;
use crate::transport::failover::Failover;
use crate::verbs::event::Scope;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct DeviceWatch {
    pub(super) open: Arc<OpenDevice>,
    pub(super) users: Vec<User>,
}

/// A connection that uses a device.
#[derive(Debug)]
pub(super) struct User {
    pub(super) key: u64,
    pub(super) gate: Gate,
    /// Its queues, see [`super::Links`].
    pub(super) queues: Arc<[usize]>,
    pub(super) failover: Option<Arc<Failover>>,
}

impl User {
    /// Whether a queue is one of the connection's.
    fn has(&self, queue: usize) -> bool {
        self.queues.contains(&queue)
            || self.failover.as_ref().is_some_and(|failover| failover.is_queue(queue))
    }

    /// A queue failed: the other rails go on, or nothing does.
    fn queue_failed(&self, queue: usize, code: u8, name: &str) {
        let others = (name == "QP_FATAL").then_some(self.failover.as_ref()).flatten();
        if !others.is_some_and(|failover| failover.stop_queue(queue, name)) {
            self.gate.report(GateState::QueueFailed(code));
        }
    }
}

impl DeviceWatch {
    /// The device was removed or reset under us.
    pub(super) fn lost(&self, policy: &Policy) {
        tracing::warn!("{}: the device is gone", self.open.context.name());
        self.open.registry.set_broken();
        if policy.return_fatal {
            self.fail_all();
        }
    }

    fn fail_all(&self) {
        self.users.iter().for_each(|user| user.gate.report(GateState::DeviceFailed));
    }

    pub(super) fn look(&self, policy: &Policy) {
        while let Some(event) = self.open.context.take_async_event() {
            let name = self.open.context.name();
            match event.scope {
                Scope::Port(port) if event.name() == "GID_CHANGE" => {
                    let news = self.open.known.news(&self.open.context, port);
                    tracing::warn!("{name}:{port}: IBV_EVENT_GID_CHANGE; {news}");
                }
                Scope::Port(port) if event.name() == "PORT_ERR" => tracing::warn!(
                    "{name}:{port}: IBV_EVENT_PORT_ERR: the port is down. Its connections go on if it comes back, and \
                     {} when nothing was acknowledged in {}",
                    if policy.failover { "over other rails or fail" } else { "fail" },
                    policy.patience
                ),
                Scope::Port(port) if event.name() == "PORT_ACTIVE" => {
                    tracing::warn!("{name}:{port}: IBV_EVENT_PORT_ACTIVE");
                    let ends = self.users.iter().filter_map(|user| user.failover.as_ref());
                    let recoveries = ends.filter_map(|end| end.recovery.as_ref());
                    recoveries.for_each(|recovery| recovery.hear_port(&self.open, port));
                }
                Scope::Port(port) => tracing::warn!("{name}:{port}: IBV_EVENT_{}", event.name()),
                Scope::Device if event.is_fatal() => {
                    tracing::warn!("{name}: IBV_EVENT_{}", event.name());
                    self.open.registry.set_broken();
                    if policy.return_fatal {
                        self.fail_all();
                    }
                }
                // The connection tells it, with its peer: most also complete work requests in error.
                Scope::Object(queue) if event.is_fatal() => {
                    let code = u8::try_from(event.code).unwrap_or(u8::MAX);
                    let users = self.users.iter().filter(|user| user.has(queue));
                    users.for_each(|user| user.queue_failed(queue, code, event.name()));
                    tracing::info!("{name}: IBV_EVENT_{}", event.name());
                }
                _ => tracing::debug!("{name}: IBV_EVENT_{}", event.name()),
            }
        }
    }
}
