//! What the connections of this process do, where another process can read it while they do it: `pinrail status` shows it.
//!
//! The file is there from the first connection to the last; nothing else of the plugin depends on it. It lies in no folder
//! but in `/proc/<pid>/fd`: so it goes with its process, whatever ends that, and the rights to look at it are those to look at
//! the process. A forked child has the descriptor but not the memory, and its number is not the one in the header.

mod board;
#[deny(unsafe_code)]
mod file;
#[deny(unsafe_code)]
mod json;
#[deny(unsafe_code)]
pub mod layout;
mod pages;
#[deny(unsafe_code)]
pub mod reader;

pub use board::{Board, Counters, is_sampled};
pub use file::{EVERY, StatusFile};
pub use json::json;
pub use layout::{Stage, Wait};
pub use reader::{End, Status};

use crate::clock;
use crate::memory::diagnosis::Direction;
use layout::{board as word, text};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What is known of an end when its connection is ready.
#[derive(Clone, Debug)]
pub struct About<'a> {
    /// Which end it is.
    pub direction: Direction,
    /// Its number in this process.
    pub number: u64,
    /// NCCL's identifier of the communicator.
    pub comm: Option<u64>,
    /// The peer: its host, process, devices, and address on the side channel.
    pub peer: (&'a str, u32, &'a str, &'a str),
    /// The name of each rail's port, and its speed in Mb/s.
    pub rails: Vec<(&'a str, u32)>,
    /// Queue pairs.
    pub lanes: usize,
}

#[derive(Debug)]
struct State {
    on: bool,
    /// It was tried and told; it is not tried again.
    failed: bool,
    file: Weak<StatusFile>,
}

static STATE: Mutex<State> = Mutex::new(State { on: true, failed: false, file: Weak::new() });

/// The first process that used this. A child that was forked later has its number here and not its own.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The state, unless this is a forked child: there another thread of the parent may hold the lock for ever.
fn state() -> Option<MutexGuard<'static, State>> {
    let pid = std::process::id();
    match OWNER.compare_exchange(0, pid, Ordering::Relaxed, Ordering::Relaxed) {
        Err(owner) if owner != pid => None,
        _ => Some(STATE.lock().unwrap_or_else(PoisonError::into_inner)),
    }
}

/// Takes over the setting. Boards that are there stay where they are.
pub fn configure(on: bool) {
    let Some(mut state) = state() else { return };
    state.on = on;
    state.failed = false;
}

/// The file, if there is one now.
pub fn file() -> Option<Arc<StatusFile>> {
    state()?.file.upgrade()
}

/// Gives back what a file that is gone leaves on the heap. Called when the last user of the plugin is gone.
pub fn release() {
    if let Some(mut state) = state()
        && state.file.strong_count() == 0
    {
        state.file = Weak::new();
    }
}

/// The event thread looks.
pub fn look(now: u64, aside: u64) {
    if let Some(file) = file() {
        file.look(now, aside);
    }
}

impl State {
    /// The file, and why there is none if that is to be told.
    fn open(&mut self) -> (Option<Arc<StatusFile>>, Option<String>) {
        if !self.on || self.failed {
            return (None, None);
        }
        if let Some(file) = self.file.upgrade() {
            return (Some(file), None);
        }
        match StatusFile::create() {
            Ok(file) => {
                let file = Arc::new(file);
                self.file = Arc::downgrade(&file);
                (Some(file), None)
            }
            Err(reason) => {
                self.failed = true;
                (None, Some(reason))
            }
        }
    }
}

impl Board {
    /// A board for an end whose connection is ready. A failure to make the file is one line in the log and nothing else.
    pub fn of(about: &About<'_>) -> Self {
        let Some(mut state) = state() else { return Self::default() };
        let (file, failure) = state.open();
        drop(state);
        if let Some(reason) = failure {
            tracing::info!(
                "`pinrail status` will not see the connections of this process: {reason} (PINRAIL_STATUS)"
            );
        }
        let Some(seat) = file.and_then(|file| file.sit()) else { return Self::default() };
        let board = Self::from(seat);
        board.introduce(about);
        board
    }

    fn introduce(&self, about: &About<'_>) {
        let (host, pid, device, addr) = about.peer;
        let kind = match about.direction {
            Direction::Send => 1,
            Direction::Receive => 2,
        };
        let rails = about.rails.len().min(layout::RAILS);
        let fixed = [
            (word::KIND, kind),
            (word::NUMBER, about.number),
            (word::COMM, about.comm.unwrap_or(0)),
            (word::COMM_KNOWN, about.comm.is_some().into()),
            (word::READY, clock::nanos()),
            (word::PEER_PID, pid.into()),
            (word::RAILS, rails as u64),
            (word::LANES, about.lanes as u64),
            (word::STATE, 1),
        ];
        let put = |room: std::ops::Range<usize>, line: &str| {
            let words = text(line, room.len());
            room.zip(words)
        };
        let texts = [(word::PEER_HOST, host), (word::PEER_DEVICE, device), (word::PEER_ADDR, addr)];
        let texts = texts.into_iter().flat_map(|(room, line)| put(room, line));
        let names = about.rails.iter().take(rails).enumerate().flat_map(|(rail, (name, speed))| {
            let start = word::NAMES.start + rail * word::RAIL_NAME;
            let speed = (word::SPEEDS.start + rail, u64::from(*speed));
            put(start..start + word::RAIL_NAME, name).chain([speed])
        });
        self.write(word::SEQUENCE, fixed.into_iter().chain(texts).chain(names));
    }
}
