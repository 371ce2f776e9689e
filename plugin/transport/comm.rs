//! What both ends of a connection share: who the peer is, what an error completion means, when to give up on a peer
//! that the side channel reports as gone, and how an end tests and fails.

use super::profile::Profile;
use super::pump::Pump;
use super::request::{Outcome, Request, RequestPool};
use crate::error::{Error, Fault};
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

/// What a sending and a receiving end both have.
#[derive(Debug)]
pub struct Shared<'a> {
    /// Completion queues and the gate.
    pub(super) pump: &'a mut Pump,
    /// Requests of the communicator.
    pub(super) pool: &'a RequestPool,
    /// Decides when a vanished peer is given up.
    pub(super) watchdog: &'a mut Watchdog,
    /// The other end.
    pub(super) peer: &'a Peer,
    /// What ended the connection: the first failure.
    pub(super) failure: &'a mut Option<Fault>,
    /// What a profiler is told.
    pub(super) profile: &'a mut Option<Box<Profile>>,
}

/// What a sending and a receiving end do alike: tests, and failing for good. Called by one thread at a time.
pub trait Ending {
    /// The state that this works on.
    fn shared(&mut self) -> Shared<'_>;

    /// Takes note of the `found` completions of the last poll, from number `first`.
    ///
    /// # Errors
    /// One of them failed, and with it the connection.
    fn completions(&mut self, first: usize, found: i32) -> Result<(), Fault>;

    /// Whether request `index` is complete; a complete one goes back to the pool.
    ///
    /// # Errors
    /// The connection failed, or the request is not in flight.
    fn test(&mut self, index: u16) -> Result<(Outcome, Option<&Request>), Fault> {
        let Shared { pump, pool, .. } = self.shared();
        if pool.get(index).is_some_and(Request::is_pending) {
            if !pump.gate().is_open() {
                self.attention(false)?;
            }
            self.poll()?;
        } else if pump.gate().is_forked() {
            self.attention(false)?;
        }
        let pool = self.shared().pool;
        let outcome = pool.finish(index);
        let outcome = outcome
            .ok_or_else(|| Box::new(Error::usage("test of a request that is not in flight")))?;
        Ok((outcome, pool.get(index)))
    }

    /// Takes note of what every rail has completed. `true`: there was something.
    ///
    /// # Errors
    /// A completion failed, and with it the connection.
    fn poll(&mut self) -> Result<bool, Fault> {
        let mut progress = false;
        for rail in 0..self.shared().pump.rails() {
            let found = self.shared().pump.poll(rail);
            if found != 0 {
                self.completions(0, found)?;
                progress = true;
            }
        }
        Ok(progress | self.go_on()?)
    }

    /// Does what is left to do after polling; whether that was something.
    ///
    /// # Errors
    /// The connection failed.
    fn go_on(&mut self) -> Result<bool, Fault> {
        Ok(false)
    }

    /// The gate is not open: repeats a failure, or decides what an event outside the data path means here.
    /// `starting`: the call begins new work.
    ///
    /// # Errors
    /// The connection failed, before or now.
    #[cold]
    #[inline(never)]
    fn attention(&mut self, starting: bool) -> Result<(), Fault> {
        let Shared { pump, failure, .. } = self.shared();
        if let Some(failure) = failure {
            return Err(Box::new(failure.repeated()));
        }
        let state = pump.gate().state();
        if state != GateState::Forked && !starting && self.poll()? {
            return Ok(());
        }
        let Shared { watchdog, peer, .. } = self.shared();
        match watchdog.judge(state, starting, peer) {
            Some(error) => Err(self.fail(error)),
            None => Ok(()),
        }
    }

    /// Ends the connection for `error`. Later calls repeat the first failure.
    #[cold]
    fn fail(&mut self, error: Error) -> Fault {
        let Shared { pump, failure, profile, .. } = self.shared();
        let error = Box::new(error);
        if let Some(profile) = profile {
            profile.stop_all();
        }
        if failure.is_none() {
            *failure = Some(error.clone());
        }
        pump.gate().report(GateState::Failed);
        error
    }
}

/// How long completions may still arrive after the side channel said that the peer is gone. Data may be behind that
/// message by the time a device takes to deliver; a device that has not delivered for this long has nothing.
const GRACE: Duration = Duration::from_millis(200);

/// Decides when outstanding work of a vanished peer is given up.
#[derive(Debug, Default)]
pub struct Watchdog {
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

/// An error for the handle of a copied buffer that was registered with another communicator.
#[cold]
pub(super) fn foreign_handle(call: &'static str) -> Fault {
    Box::new(Error::argument(format!(
        "{call} with a memory handle of another communicator: a buffer that is reached through copies serves the one it \
         was registered with"
    )))
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
