//! One connection as the event thread sees it: its side channel, and what takes too long.

use super::Links;
use crate::error::Error;
use crate::memory::status::layout::board::{LANES, POSTED};
use crate::memory::{Gate, GateState};
use crate::transport::channel::Channel;
use crate::transport::failover::Failover;
use crate::transport::wire::{Message, Step};
use std::sync::Arc;
use std::time::Instant;

/// `IBV_EVENT_QP_FATAL`.
const QP_FATAL: u8 = 1;

#[derive(Debug)]
pub(super) struct PeerWatch {
    pub(super) channel: Channel,
    pub(super) gate: Gate,
    pub(super) links: Links,
    /// Since when it is known that the other end's first receive is waited for.
    pub(super) asked: Option<Instant>,
}

/// What a side channel says.
pub(super) enum Look {
    /// Nothing.
    Well,
    /// The peer ended the connection.
    Over(GateState),
    /// The channel itself broke.
    Lost(Error),
    /// Something about bringing a rail back; there may be more.
    Recovery(Arc<Failover>, (u8, u8), u32, Step),
}

impl PeerWatch {
    /// Shows other processes how the connection is.
    pub(super) fn show(&self, now: u64) {
        let Links { board, failover, .. } = &self.links;
        if !board.is_shared() {
            return;
        }
        let stopped = failover.as_ref().map_or(0, |failover| {
            let lanes = board.get(LANES).min(u64::BITS.into()) as usize;
            let stopped = (0..lanes).filter(|lane| failover.is_stopped(failover.number(*lane)));
            stopped.fold(0, |all, lane| all | 1 << lane)
        });
        board.look(self.gate.state().word().into(), stopped, now);
    }

    /// Sends what is to be told.
    pub(super) fn tell(&mut self) {
        for message in self.links.mail.take() {
            if let Err(e) = self.channel.send(&message) {
                // Who waits for an answer has a deadline, and a broken channel is told by `look`.
                tracing::debug!("{e}");
            }
        }
    }

    /// Takes note of the time, and of what took too long.
    pub(super) fn tick(&mut self, now: Instant) {
        // Requests are numbered modulo 2^32.
        let posted = self.links.board.get(POSTED) as u32;
        self.links.pace.look(posted, now);
        if let Some(idle) = self.links.idle.as_mut().filter(|_| self.gate.is_open())
            && idle.has_failed(posted, now)
        {
            // Whoever asks next finds the reason in the completions. The other end may wait for what was lost.
            self.gate.report(GateState::QueueFailed(QP_FATAL));
            self.links.mail.post(Message::Failed(
                "a queue pair failed while nobody asked, and a credit may be lost with it"
                    .to_owned(),
            ));
        }
        let Some(first) = self.links.first_credit.as_ref().filter(|first| first.is_asked()) else {
            return;
        };
        if posted != 0 {
            self.links.first_credit = None;
        } else if now.duration_since(*self.asked.get_or_insert(now)) >= first.timeout {
            // Whether it has come by now the sending end finds out itself.
            self.gate.report(GateState::NoCredit);
        }
    }

    /// What the side channel says now.
    pub(super) fn look(&mut self) -> Look {
        loop {
            match (self.channel.receive(), &self.links.failover) {
                (Ok(None), _) => return Look::Well,
                (Ok(Some(Message::Bye(lanes))), failover) => {
                    if let Some(failover) = failover {
                        failover.hear_last(&lanes);
                    }
                    return Look::Over(GateState::PeerClosed);
                }
                (Ok(Some(Message::Stopped(lanes))), Some(failover)) => {
                    failover.hear(&lanes);
                    self.tell();
                }
                (Ok(Some(Message::Recovery { rails, attempt, step })), Some(failover))
                    if failover.recovery.is_some() =>
                {
                    return Look::Recovery(Arc::clone(failover), rails, attempt, step);
                }
                (Ok(Some(Message::Failed(reason))), _) => {
                    self.links.mail.set_reason(reason);
                    self.gate.report(GateState::PeerFailed);
                }
                (Ok(Some(other)), _) => {
                    tracing::warn!(
                        "{}: unexpected message {other:?} after connecting",
                        self.channel.peer()
                    );
                    return Look::Over(GateState::PeerGone);
                }
                // The network between, not the peer: nothing is known about the process.
                (Err(e), _)
                    if matches!(
                        e.errno(),
                        Some(
                            libc::ETIMEDOUT
                                | libc::EHOSTUNREACH
                                | libc::ENETUNREACH
                                | libc::ENETDOWN
                        )
                    ) =>
                {
                    return Look::Lost(e);
                }
                (Err(e), _) => {
                    tracing::info!("{e}");
                    return Look::Over(GateState::PeerGone);
                }
            }
        }
    }
}
