//! One word per communicator that says whether the data path may go on.
//!
//! isend, irecv and test read it and nothing else: no lock, no system call. The event thread writes it when something
//! happened outside the data path. The words live in pages that a forked child sees as zero, so that the same load
//! also tells a child that it must not touch the parent's queues.

use super::ledger::Purpose;
use super::page::{PageOwned, Word, page_size};
use crate::error::Result;
use crate::sync::{OBSERVE, Ordering, PUBLISH};
use std::sync::{Arc, Mutex, PoisonError};

/// What a communicator's word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateState {
    /// Go on.
    Open,
    /// This process is a forked child.
    Forked,
    /// The side channel says that the peer closed its end.
    PeerClosed,
    /// The side channel broke: the peer process is gone.
    PeerGone,
    /// The device reported an error that ends its connections.
    DeviceFailed,
    /// The device reported this event, `IBV_EVENT_*`, for a queue of the communicator.
    QueueFailed(u8),
    /// The communicator itself failed before; its error is latched.
    Failed,
    /// Some of several rails failed; the others go on.
    Rerouted,
    /// The other end failed and said so.
    PeerFailed,
    /// A sending end asked for its first receive for too long.
    NoCredit,
}

const OPEN: u32 = 1;
/// The first of the words for events of queues.
const QUEUE_FAILED: u32 = 16;
/// What a child finds: no word has this value before.
const FORKED: u32 = 0;

impl GateState {
    /// The state that a word says.
    pub(super) fn from_word(word: u32) -> Self {
        match word {
            OPEN => Self::Open,
            2 => Self::PeerClosed,
            3 => Self::PeerGone,
            4 => Self::DeviceFailed,
            5 => Self::Failed,
            6 => Self::Rerouted,
            7 => Self::PeerFailed,
            8 => Self::NoCredit,
            QUEUE_FAILED.. => Self::QueueFailed((word - QUEUE_FAILED) as u8),
            _ => Self::Forked,
        }
    }

    /// Its name in the output of commands.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Forked => "of-parent",
            Self::PeerClosed => "peer-closed",
            Self::PeerGone => "peer-gone",
            Self::DeviceFailed => "device-failed",
            Self::QueueFailed(_) => "queue-failed",
            Self::Failed => "failed",
            Self::Rerouted => "rerouting",
            Self::PeerFailed => "peer-failed",
            Self::NoCredit => "no-credit",
        }
    }

    /// Its word.
    pub(crate) fn word(self) -> u32 {
        match self {
            Self::Forked => FORKED,
            Self::Open => OPEN,
            Self::PeerClosed => 2,
            Self::PeerGone => 3,
            Self::DeviceFailed => 4,
            Self::Failed => 5,
            Self::Rerouted => 6,
            Self::PeerFailed => 7,
            Self::NoCredit => 8,
            Self::QueueFailed(event) => QUEUE_FAILED + u32::from(event),
        }
    }
}

/// The word of one communicator. Clones are the same word.
#[derive(Clone, Debug)]
pub struct Gate {
    word: Word,
    _slot: Arc<Slot>,
}

#[derive(Debug)]
struct Slot(usize);

impl Drop for Slot {
    fn drop(&mut self) {
        slab().free.push(self.0);
    }
}

/// Pages of words, grown on demand. Words are given back, pages stay while any gate uses one.
#[derive(Debug, Default)]
struct Slab {
    pages: Vec<Arc<PageOwned>>,
    free: Vec<usize>,
}

static SLAB: Mutex<Slab> = Mutex::new(Slab { pages: Vec::new(), free: Vec::new() });

fn slab() -> std::sync::MutexGuard<'static, Slab> {
    SLAB.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    /// A new word, open.
    ///
    /// # Errors
    /// No memory for another page of words.
    pub fn new() -> Result<Self> {
        let per_page = page_size() / size_of::<u32>();
        let mut slab = slab();
        let index = match slab.free.pop() {
            Some(index) => index,
            None => {
                let page = PageOwned::new(page_size(), Purpose::Gates)?;
                if let Err(e) = page.wipe_on_fork() {
                    tracing::warn!("{e}; use after fork() will not be noticed");
                }
                let first = slab.pages.len() * per_page;
                slab.pages.push(Arc::new(page));
                slab.free.extend((first + 1..first + per_page).rev());
                first
            }
        };
        let page = Arc::clone(&slab.pages[index / per_page]);
        let word = Word::new(page, index % per_page * size_of::<u32>());
        word.store(OPEN, PUBLISH);
        Ok(Self { word, _slot: Arc::new(Slot(index)) })
    }

    /// Whether the data path may go on.
    #[inline(always)]
    pub fn is_open(&self) -> bool {
        self.word.load(Ordering::Relaxed) == OPEN
    }

    /// What the word says.
    pub fn state(&self) -> GateState {
        GateState::from_word(self.word.load(OBSERVE))
    }

    /// Records that something happened; the first report stays, except that the communicator's own failure is final, and
    /// that rails may fail before anything else. A forked child's gate stays as it is.
    pub fn report(&self, state: GateState) {
        self.word.update(|word| {
            let replace = match GateState::from_word(word) {
                GateState::Open => true,
                GateState::Rerouted => !matches!(state, GateState::Rerouted | GateState::NoCredit),
                GateState::NoCredit => state != GateState::NoCredit,
                // What this end finds itself is nearer to the cause.
                GateState::PeerFailed => {
                    use GateState::{DeviceFailed, Failed, QueueFailed};
                    matches!(state, Failed | DeviceFailed | QueueFailed(_))
                }
                GateState::Forked => false,
                _ => state == GateState::Failed,
            };
            replace.then(|| state.word())
        });
    }

    /// Opens it again when it told of nothing but failed rails, or of a credit that is there now.
    pub fn reopen(&self) {
        let passing = [GateState::Rerouted.word(), GateState::NoCredit.word()];
        self.word.update(|word| passing.contains(&word).then_some(OPEN));
    }
}

/// Gives the pages of words back. Called when the last user of the plugin is gone; a page still in use stays with its
/// gates.
pub fn release_pages() {
    let mut slab = slab();
    if slab.free.len() == slab.pages.len() * (page_size() / size_of::<u32>()) {
        *slab = Slab::default();
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "a test forks")]
mod tests {
    use super::*;

    #[test]
    fn the_first_report_stays() {
        let gate = Gate::new().unwrap();
        assert!(gate.is_open());
        gate.report(GateState::PeerGone);
        gate.report(GateState::DeviceFailed);
        assert_eq!(gate.state(), GateState::PeerGone);
    }

    #[test]
    fn every_state_has_a_word_of_its_own() {
        let queues = (0..=u8::MAX).map(GateState::QueueFailed);
        let others = [
            GateState::Open,
            GateState::Forked,
            GateState::PeerClosed,
            GateState::PeerGone,
            GateState::DeviceFailed,
            GateState::Failed,
            GateState::Rerouted,
            GateState::PeerFailed,
            GateState::NoCredit,
        ];
        for state in queues.chain(others) {
            assert_eq!(GateState::from_word(state.word()), state);
        }
    }

    #[test]
    fn only_failed_rails_are_got_over() {
        let gate = Gate::new().unwrap();
        gate.report(GateState::Rerouted);
        gate.reopen();
        assert!(gate.is_open());
        gate.report(GateState::Rerouted);
        gate.report(GateState::PeerClosed);
        gate.report(GateState::Rerouted);
        gate.reopen();
        assert_eq!(gate.state(), GateState::PeerClosed);
        gate.report(GateState::Failed);
        assert_eq!(gate.state(), GateState::Failed);
    }

    #[test]
    fn a_credit_that_came_late_opens_it_again() {
        let gate = Gate::new().unwrap();
        gate.report(GateState::NoCredit);
        assert_eq!(gate.state(), GateState::NoCredit);
        gate.reopen();
        assert!(gate.is_open());
        gate.report(GateState::Rerouted);
        gate.report(GateState::NoCredit);
        assert_eq!(gate.state(), GateState::Rerouted);
        gate.reopen();
        gate.report(GateState::NoCredit);
        gate.report(GateState::PeerGone);
        gate.reopen();
        assert_eq!(gate.state(), GateState::PeerGone);
    }

    #[test]
    fn what_this_end_finds_comes_before_what_the_other_tells() {
        let gate = Gate::new().unwrap();
        gate.report(GateState::PeerFailed);
        gate.report(GateState::PeerClosed);
        assert_eq!(gate.state(), GateState::PeerFailed);
        gate.report(GateState::QueueFailed(3));
        gate.report(GateState::PeerFailed);
        assert_eq!(gate.state(), GateState::QueueFailed(3));
    }

    #[test]
    fn words_are_distinct_and_reused() {
        let gates: Vec<_> = (0..3000).map(|_| Gate::new().unwrap()).collect();
        gates[1500].report(GateState::PeerClosed);
        assert_eq!(gates.iter().filter(|g| !g.is_open()).count(), 1);
        drop(gates);
        assert!(Gate::new().unwrap().is_open());
    }

    #[test]
    fn a_forked_child_sees_a_closed_gate() {
        let gate = Gate::new().unwrap();
        // SAFETY: the child only reads one word and leaves through _exit.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            let code = i32::from(gate.state() != GateState::Forked);
            // SAFETY: no destructor of the parent's state may run in the child.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: our own child and a valid out-pointer.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0, "the child saw an open gate");
        assert!(gate.is_open());
    }
}
