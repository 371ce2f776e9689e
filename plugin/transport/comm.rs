//! What both ends of a connection share: who the peer is, when to give up on a peer that the side channel reports as
//! gone, and how an end tests and fails.

use super::failure::{Broken, Failures, Given, Work, queue_failed};
use super::idle::Idle;
use super::lane::WrId;
use super::mail::Mail;
use super::pace::Pace;
use super::profile::Profile;
use super::pump::Pump;
use super::request::{Outcome, Request, RequestPool};
use super::wire::Message;
use crate::error::{Blame, Error, Fault};
use crate::memory::GateState;
use crate::memory::status::Board;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The other end of a connection, for messages.
#[derive(Clone, Debug, Default)]
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
    /// For each lane its queue pairs and their addresses.
    pub ways: Arc<[String]>,
    /// What a failure is told with.
    pub failures: Arc<Failures>,
    /// What is told to it and what it tells.
    pub mail: Arc<Mail>,
    /// Where other processes see what this end does.
    pub board: Board,
    /// When this end's requests were posted.
    pub pace: Arc<Pace>,
    /// What bounds the wait of a sending end for its first receive.
    pub first_credit: Option<Arc<FirstCredit>>,
    /// Looks after this end while it posts nothing.
    pub idle: Option<Idle>,
}

/// The wait of a sending end for the first receive of the other: whether it has begun. The event thread knows for how long.
#[derive(Debug)]
pub struct FirstCredit {
    asked: AtomicBool,
    /// How long it may take.
    pub timeout: Duration,
}

impl FirstCredit {
    /// Bounds the wait; a timeout of zero does not.
    pub(super) fn bounded_by(timeout: Duration) -> Option<Arc<Self>> {
        (!timeout.is_zero()).then(|| Arc::new(Self { asked: AtomicBool::new(false), timeout }))
    }

    /// A send was to begin and there was no receive.
    pub(super) fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// Whether one was.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Peer {
    /// The queue pairs of a lane and their addresses.
    pub(super) fn way(&self, lane: usize) -> String {
        self.ways.get(lane).cloned().unwrap_or_default()
    }
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

    /// Whether the first receive of the other end is there.
    fn has_credit(&self) -> bool {
        true
    }

    /// What a work request was, from its identifier: for messages.
    fn work(&self, id: WrId) -> Work;

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

    /// Rails may have failed: there is more to do after polling.
    fn rerouted(&mut self) {}

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
        self.rerouted();
        if state == GateState::Rerouted {
            self.shared().pump.gate().reopen();
            self.poll()?;
            return Ok(());
        }
        if state == GateState::NoCredit && self.has_credit() {
            self.shared().pump.gate().reopen();
            return Ok(());
        }
        // What a queue failed of is in its completions, if it is anywhere.
        let look = !starting || matches!(state, GateState::QueueFailed(_));
        if state != GateState::Forked && look && self.poll()? && !starting {
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
        self.fail_with(error, None)
    }

    /// Ends the connection because one of the completions of the last poll, from number `first` of `found`, is in error.
    /// What else its queue pair gives back is looked through for the reason.
    #[cold]
    fn failed(&mut self, first: usize, found: usize) -> Fault {
        let pump = self.shared().pump;
        let mut given = Given::default();
        (first..found).for_each(|index| given.add(pump.wc.get(index)));
        for rail in 0..pump.rails() {
            // A queue holds no more than was posted, and nothing is posted any more.
            while let Some(found) = usize::try_from(pump.poll(rail)).ok().filter(|found| *found > 0)
            {
                (0..found).for_each(|index| given.add(pump.wc.get(index)));
            }
        }
        let Some(reason) = given.reason() else {
            return self.fail(Error::new(Blame::Internal, "a failure without a failed completion"));
        };
        let work = self.work(WrId(reason.id));
        let Shared { pool, peer, pump, .. } = self.shared();
        let event = match pump.gate().state() {
            GateState::QueueFailed(event) => Some(event),
            _ => None,
        };
        let (flushes, pending) = (given.flushes(), pool.pending());
        let age = work.number.map(|number| peer.pace.age(number, Instant::now()));
        let broken = Broken { reason, work, age, event, flushes, pending };
        let error = broken.error(peer);
        self.fail_with(error, Some(&broken))
    }

    /// See [`Self::fail`].
    #[cold]
    fn fail_with(&mut self, error: Error, broken: Option<&Broken>) -> Fault {
        let Shared { pump, failure, peer, profile, .. } = self.shared();
        let error = Box::new(error);
        // A forked child fails for itself only, and that is told by the call; events are its parent's.
        if pump.gate().state() != GateState::Forked {
            if failure.is_none() {
                let of_peer = error.blame() == Blame::Remote;
                let state = GateState::Failed.word().into();
                peer.board.fail(&error.to_string(), of_peer, error.errno(), state);
                peer.failures.record(&error, peer, broken);
                peer.failures.record_status_once();
                // Who only heard of it has nothing to tell.
                if pump.gate().state() != GateState::PeerFailed {
                    peer.mail.post(Message::Failed(error.to_string()));
                }
            }
            if let Some(profile) = profile {
                profile.stop_all();
            }
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
        let (gone, blame) = match state {
            GateState::Open | GateState::Rerouted => return None,
            GateState::Forked => {
                return Some(Error::usage(
                    "called in a forked child: connections belong to the process that made them",
                ));
            }
            GateState::DeviceFailed => {
                return Some(Error::system(format!("{peer}: the device reported a fatal error")));
            }
            GateState::Failed => return Some(Error::system(format!("{peer}: failed before"))),
            GateState::PeerClosed => ("the peer closed the connection".to_owned(), Blame::Remote),
            GateState::PeerFailed => {
                (format!("the other end failed: {}", peer.mail.reason()), Blame::Remote)
            }
            GateState::PeerGone => ("the peer process is gone".to_owned(), Blame::Remote),
            GateState::NoCredit => {
                let timeout = peer.first_credit.as_ref().map_or(Duration::ZERO, |f| f.timeout);
                let text = format!(
                    "waiting for the peer's first receive: none came in {timeout:?} (PINRAIL_FIRST_CREDIT_TIMEOUT), while \
                     its process lives: look where the other rank is"
                );
                (text, Blame::Remote)
            }
            GateState::QueueFailed(event) => queue_failed(event),
        };
        if !starting && self.since.get_or_insert_with(Instant::now).elapsed() < GRACE {
            return None;
        }
        Some(Error::new(blame, format!("{peer}: {gone}")))
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

#[cfg(test)]
mod tests {
    use super::*;

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
