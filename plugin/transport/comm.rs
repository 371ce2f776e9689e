//! What both ends of a connection share: who the peer is, what an error completion means, and when to give up on a
//! peer that the side channel reports as gone.

use crate::error::Error;
use crate::memory::GateState;
use crate::verbs::cq::{Completion, status_name};
use std::fmt;
use std::time::{Duration, Instant};

/// The other end of a connection, for messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// Local device and port, `mlx5_0:1`; several joined by `+`.
    pub local: String,
    /// The peer's host name, as it gave it.
    pub host: String,
    /// The peer's process.
    pub pid: u32,
    /// The peer's device and port.
    pub device: String,
    /// The peer's address on the side channel.
    pub addr: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} to {} pid {} ({}) {}",
            self.local, self.host, self.pid, self.addr, self.device
        )
    }
}

/// Whether polling found anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// No completion.
    Nothing,
    /// At least one.
    Some,
}

/// How long completions may still arrive after the side channel said that the peer is gone. Data may be behind that
/// message by the time a device takes to deliver; a device that has not delivered for this long has nothing.
const GRACE: Duration = Duration::from_millis(200);

/// Decides when outstanding work of a vanished peer is given up.
#[derive(Debug, Default)]
pub(super) struct Watchdog {
    since: Option<Instant>,
}

impl Watchdog {
    /// What the gate's state means for a call that found nothing to complete. `starting`: the call begins new work,
    /// which a peer that is gone can never finish.
    pub(super) fn judge(&mut self, state: GateState, starting: bool, peer: &Peer) -> Option<Error> {
        let gone = match state {
            GateState::Open => return None,
            GateState::Forked => {
                return Some(Error::usage(
                    "called in a forked child: connections belong to the process that made them",
                ));
            }
            GateState::DeviceFailed => {
                return Some(Error::system(format!("{peer}: the device reported a fatal error")));
            }
            GateState::Failed => return Some(Error::system(format!("{peer}: failed before"))),
            GateState::PeerClosed => "the peer closed the connection",
            GateState::PeerGone => "the peer process is gone",
        };
        if !starting && self.since.get_or_insert_with(Instant::now).elapsed() < GRACE {
            return None;
        }
        Some(Error::remote(format!("{peer}: {gone}")))
    }
}

/// An error for a failed completion. Only the fields that are defined on failure are used.
pub(super) fn completion_error(wc: Completion<'_>, peer: &Peer, what: &str) -> Error {
    let name = status_name(wc.status());
    let hint = match name {
        "RETRY_EXC_ERR" => "; the peer or the path to it does not answer",
        "RNR_RETRY_EXC_ERR" => "; the peer has no receive posted",
        "REM_ACCESS_ERR" => "; the peer's memory registration does not allow this access",
        "REM_INV_REQ_ERR" => "; the peer's device refused the request",
        "LOC_PROT_ERR" => {
            "; the local range is not registered, or a bridge (ACS, IOMMU) denies the access"
        }
        "WR_FLUSH_ERR" => "; the queue pair had failed before",
        _ => "",
    };
    let text = format!(
        "{peer}: {what} completed with IBV_WC_{name} (status {}, vendor code {:#x}){hint}",
        wc.status(),
        wc.vendor_err()
    );
    match name {
        "RETRY_EXC_ERR" | "RNR_RETRY_EXC_ERR" | "REM_ACCESS_ERR" | "REM_INV_REQ_ERR"
        | "REM_OP_ERR" | "REM_ABORT_ERR" => Error::remote(text),
        _ => Error::system(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Blame;

    #[test]
    fn a_gone_peer_ends_new_work_at_once_and_old_work_after_a_while() {
        let mut dog = Watchdog::default();
        let peer = Peer::default();
        assert_eq!(dog.judge(GateState::Open, true, &peer), None);
        assert_eq!(dog.judge(GateState::PeerGone, false, &peer), None);
        let error = dog.judge(GateState::PeerGone, true, &peer).unwrap();
        assert_eq!(error.blame(), Blame::Remote);
        dog.since = Instant::now().checked_sub(GRACE);
        assert_eq!(dog.judge(GateState::PeerGone, false, &peer).unwrap().blame(), Blame::Remote);
    }

    #[test]
    fn a_forked_child_is_told_so() {
        let error = Watchdog::default().judge(GateState::Forked, false, &Peer::default()).unwrap();
        assert!(error.to_string().contains("forked child"));
    }
}
