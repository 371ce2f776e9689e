//! Reads the file of another process, which may be of any version, may end at any time, and may lie.

use super::layout::{
    BLOCK, BLOCKS, BUCKETS, MAGIC, NAME, RAILS, Stage, VERSION, WORDS, Wait, board, bound, header,
    line,
};
use super::pages::{Pages, Words};
use crate::clock;
use crate::host::plain;
use crate::host::process::{ProcessId, Stat, inner_pid};
use crate::host::procfs::Proc;
use crate::memory::GateState;
use crate::memory::diagnosis::Direction;
use crate::sync::{OBSERVE, Ordering, fence};
use rustix::fs::{SealFlags, fcntl_get_seals};
use std::fs::File;
use std::os::fd::AsFd;

/// How often a board that is being written is looked at again.
const LOOKS: usize = 8;

/// A latency: how often it was taken, and how it is spread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latency {
    /// What it is of.
    pub stage: Stage,
    /// Counts of the buckets.
    pub buckets: Vec<u64>,
    /// All latencies together, in ticks.
    pub sum: u64,
    /// The largest, in ticks.
    pub most: u64,
}

impl Latency {
    /// How often it was taken.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Ticks that so many of a thousand do not exceed: the end of their bucket, and no more than the largest.
    pub fn quantile(&self, thousandths: u64) -> Option<u64> {
        let count = self.count();
        let rank = u128::from(count) * u128::from(thousandths);
        let rank = u64::try_from(rank.div_ceil(1000)).unwrap_or(u64::MAX).max(1);
        let mut below = 0_u64;
        let at = self.buckets.iter().position(|bucket| {
            below = below.saturating_add(*bucket);
            below >= rank
        })?;
        Some(if at + 1 < BUCKETS { bound(at).min(self.most) } else { self.most })
    }
}

/// One rail of an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    /// The device and port.
    pub name: String,
    /// Its speed in Mb/s.
    pub speed: u64,
    /// Queue pairs, and those of them that were given up.
    pub lanes: usize,
    /// See there.
    pub stopped: usize,
    /// Bytes of messages. `None`: a receiving end with several rails, where only the sender knows.
    pub bytes: Option<u64>,
    /// Work requests that were posted; not those of flushes.
    pub posts: u64,
}

/// What ended a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// When, by CLOCK_MONOTONIC.
    pub at: u64,
    /// The line that was logged, as far as there is room.
    pub message: String,
    /// Whose fault it is.
    pub of_peer: bool,
    /// The errno.
    pub errno: Option<u64>,
}

/// One end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named for what they count; see the words in `layout`")]
pub struct End {
    pub number: u64,
    pub direction: Direction,
    pub comm: Option<u64>,
    pub peer_host: String,
    pub peer_pid: u64,
    pub peer_device: String,
    pub peer_addr: String,
    /// When it was ready, by CLOCK_MONOTONIC.
    pub ready: u64,
    pub state: GateState,
    pub wait: Wait,
    /// When the event thread first saw that wait without progress since. `None`: it has not seen it.
    pub since: Option<u64>,
    pub messages: u64,
    pub bytes: u64,
    pub receives: u64,
    pub completed: u64,
    pub again: u64,
    pub shortened: u64,
    pub flushes: u64,
    pub flushed: u64,
    pub driver_flushes: u64,
    pub skipped_flushes: u64,
    pub copied_bytes: u64,
    pub chunks: u64,
    pub registered: u64,
    pub registered_bytes: u64,
    pub bounced: u64,
    pub bounced_bytes: u64,
    pub rails: Vec<Rail>,
    pub latencies: Vec<Latency>,
    pub error: Option<Failure>,
}

impl End {
    /// Work requests that were posted on all rails.
    pub fn posts(&self) -> u64 {
        self.rails.iter().fold(0, |sum, rail| sum.wrapping_add(rail.posts))
    }

    /// Whether the connection has ended, or will not do anything any more.
    pub fn is_over(&self) -> bool {
        !matches!(self.state, GateState::Open | GateState::Rerouted)
    }

    /// Whether it ended in order: the peer closed its end.
    pub fn is_closed(&self) -> bool {
        self.state == GateState::PeerClosed && self.error.is_none()
    }
}

/// What a process says.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "named for what they count; see the words in `layout`")]
pub struct Status {
    pub owner: ProcessId,
    pub plugin: String,
    pub host: String,
    /// When it was read, by CLOCK_MONOTONIC as the process has it.
    pub now: u64,
    /// When the event thread looked last, and how often it does.
    pub looked: u64,
    pub every: u64,
    /// Ticks of latencies in one second. `None`: not known yet.
    pub ticks_per_second: Option<f64>,
    /// The ticks keep their pace.
    pub steady: bool,
    pub opened: u64,
    pub failed: u64,
    /// Ends that found no room in the file.
    pub left_out: u64,
    /// Boards that were being written or make no sense.
    pub unsteady: usize,
    /// Bytes set aside for copies.
    pub aside: u64,
    /// Messages and bytes that closed ends sent, and received.
    pub closed: [u64; 4],
    /// Ends of connections, by their number.
    pub ends: Vec<End>,
}

/// The words of a block, each read whole.
fn copy(block: &Words) -> Vec<u64> {
    block.iter().map(|word| word.load(OBSERVE)).collect()
}

fn at(words: &[u64], index: usize) -> u64 {
    words.get(index).copied().unwrap_or(0)
}

/// Whose file a header is of: what all versions agree on.
///
/// # Errors
/// In words: it is no such header.
fn owner(words: &[u64]) -> Result<ProcessId, String> {
    match at(words, header::MAGIC) {
        MAGIC => {}
        0 => return Err("it is empty: the process is just making it".into()),
        _ => return Err("it is no status of pinrail".into()),
    }
    let owner = ProcessId {
        pid: u32::try_from(at(words, header::PID)).map_err(|_| "its header is damaged")?,
        start: at(words, header::START),
        namespace: at(words, header::NAMESPACE),
        boot: [at(words, header::BOOT), at(words, header::BOOT + 1)],
    };
    match at(words, header::VERSION) {
        VERSION => {}
        other => {
            return Err(format!(
                "it has version {other} of the format, this program reads {VERSION}; use the `pinrail` of the plugin"
            ));
        }
    }
    if at(words, header::BLOCK) != BLOCK as u64 {
        return Err("its header is damaged".into());
    }
    Ok(owner)
}

/// Ticks per second, from two looks at both clocks.
fn pace(words: &[u64]) -> Option<f64> {
    let ticks = at(words, header::LAST_TICKS).checked_sub(at(words, header::FIRST_TICKS))?;
    let nanos = at(words, header::LAST_NANOS).checked_sub(at(words, header::FIRST_NANOS))?;
    // A shorter time would say too little.
    (nanos > 100_000_000 && ticks > 0).then(|| ticks as f64 * 1e9 / nanos as f64)
}

impl Status {
    /// That of a process. `None`: it has none.
    ///
    /// # Errors
    /// In words: there is one, but it cannot be read; or the process cannot be looked at.
    pub fn of(proc: &Proc, pid: u32) -> Result<Option<Self>, String> {
        let folder = proc.path(&format!("{pid}/fd"));
        let entries = std::fs::read_dir(&folder).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => format!("there is no process {pid}"),
            std::io::ErrorKind::PermissionDenied => format!(
                "process {pid} belongs to somebody else, or forbids being looked at; run this as its user or as root"
            ),
            _ => format!("{}: {e}", folder.display()),
        })?;
        let name = format!("/memfd:{NAME} (deleted)");
        let mut wrong = None;
        for entry in entries.flatten() {
            let path = entry.path();
            if std::fs::read_link(&path).is_ok_and(|link| link.as_os_str() == name.as_str()) {
                let read = plain::open(&path)
                    .map_err(|e| e.to_string())
                    .and_then(|file| Self::read(&file))
                    .and_then(|status| status.is_of(proc, pid).map(|own| own.then_some(status)));
                match read {
                    Ok(Some(status)) => return Ok(Some(status)),
                    // The parent's, of which a forked child has the descriptor.
                    Ok(None) => {}
                    Err(reason) => wrong = Some(format!("{}: {reason}", path.display())),
                }
            }
        }
        wrong.map_or(Ok(None), Err)
    }

    /// Whether it is that of the process with this number, and not its parent's.
    fn is_of(&self, proc: &Proc, pid: u32) -> Result<bool, String> {
        let stat = Stat::read(proc, pid).ok_or_else(|| format!("process {pid} has ended"))?;
        let inner = inner_pid(proc, pid).unwrap_or(pid);
        Ok(inner == self.owner.pid && stat.start == self.owner.start)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// In words: it cannot be read, or is no status.
    pub fn read(file: &File) -> Result<Self, String> {
        // Only what nobody can make shorter is mapped: behind its end, a look would end this process.
        let seals = fcntl_get_seals(file).map_err(|_| "it is no memory file")?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("it is not sealed, so pinrail did not make it".into());
        }
        let len = file.metadata().map_err(|e| e.to_string())?.len();
        let blocks = usize::try_from(len / BLOCK as u64).unwrap_or(usize::MAX).min(BLOCKS);
        if blocks == 0 {
            return Err("it is empty: the process is just making it".into());
        }
        let pages = Pages::view(file.as_fd(), blocks).map_err(|e| e.to_string())?;
        let first = copy(pages.block(0));
        let owner = owner(&first)?;
        let mut status = Self {
            owner,
            plugin: line(&first, header::PLUGIN),
            host: line(&first, header::HOST),
            now: clock::nanos(),
            looked: at(&first, header::LOOKED),
            every: at(&first, header::EVERY),
            ticks_per_second: pace(&steady(pages.block(0), header::LAST).unwrap_or_default()),
            steady: at(&first, header::STEADY) != 0,
            opened: at(&first, header::OPENED),
            failed: at(&first, header::FAILED),
            left_out: at(&first, header::LEFT_OUT),
            unsteady: 0,
            aside: at(&first, header::ASIDE),
            closed: std::array::from_fn(|index| at(&first, header::CLOSED.start + index)),
            ends: Vec::new(),
        };
        // Where the clock of the process's container is another one, that of its last look is near enough.
        if status.looked > status.now || status.now - status.looked > 1 << 50 {
            status.now = status.looked;
        }
        let used = usize::try_from(at(&first, header::USED)).unwrap_or(usize::MAX);
        for index in 1..used.min(blocks) {
            match steady(pages.block(index), board::SEQUENCE) {
                Some(words) => match End::decode(&words, pages.block(index)) {
                    Decoded::Free => {}
                    Decoded::End(end) => status.ends.push(*end),
                    Decoded::Nonsense => status.unsteady += 1,
                },
                None => status.unsteady += 1,
            }
        }
        status.ends.sort_by_key(|end| end.number);
        Ok(status)
    }

    /// Nanoseconds of so many ticks.
    pub fn nanos(&self, ticks: u64) -> Option<f64> {
        self.ticks_per_second.map(|pace| ticks as f64 * 1e9 / pace)
    }

    /// For how long an end has waited without any progress, in nanoseconds; true by as much as the event thread looks.
    /// `None`: it has not seen that yet, so for less than that.
    pub fn waited(&self, end: &End) -> Option<u64> {
        end.since.map(|since| self.now.saturating_sub(since))
    }

    /// Nanoseconds since the event thread looked, beyond how often it should; `None`: it does as it should.
    pub fn overdue(&self) -> Option<u64> {
        let ago = self.now.saturating_sub(self.looked);
        (ago > self.every.saturating_mul(3)).then_some(ago)
    }
}

/// The words of a block that were not written meanwhile, as far as the number in word `sequence` tells.
fn steady(block: &Words, sequence: usize) -> Option<Vec<u64>> {
    for _ in 0..LOOKS {
        let before = block[sequence].load(OBSERVE);
        let words = copy(block);
        fence(Ordering::Acquire);
        if before.is_multiple_of(2) && block[sequence].load(Ordering::Relaxed) == before {
            return Some(words);
        }
        std::thread::yield_now();
    }
    None
}

/// What a board holds.
enum Decoded {
    Free,
    End(Box<End>),
    Nonsense,
}

impl End {
    fn decode(words: &[u64], block: &Words) -> Decoded {
        let direction = match at(words, board::KIND) {
            0 => return Decoded::Free,
            1 => Direction::Send,
            2 => Direction::Receive,
            _ => return Decoded::Nonsense,
        };
        let (rails, lanes) = (at(words, board::RAILS), at(words, board::LANES));
        let (Ok(rails), Ok(lanes)) = (usize::try_from(rails), usize::try_from(lanes)) else {
            return Decoded::Nonsense;
        };
        if !(1..=RAILS).contains(&rails) || !(1..=256).contains(&lanes) {
            return Decoded::Nonsense;
        }
        let get = |word| at(words, word);
        // Read in the order in which they are written: what was complete is no more than what was begun. The copy above
        // was in no order.
        let live = |word: usize| block.get(word).map_or(0, |word| word.load(OBSERVE));
        let completed = live(board::COMPLETED);
        let flushed = live(board::FLUSHED);
        let (receives, flushes) = (live(board::POSTED), live(board::FLUSHES));
        let wait = Wait::of(|word| match word {
            board::COMPLETED => completed,
            board::FLUSHED => flushed,
            board::POSTED => receives,
            board::FLUSHES => flushes,
            _ => get(word),
        });
        let since = get(board::WAIT_SINCE);
        let seen = wait != Wait::Nothing && get(board::WAIT) == wait.word() && since != 0;
        let bytes: Vec<u64> = board::BYTES.map(get).collect();
        // The event thread may have written down the state that was before the failure.
        let error = Failure::decode(block);
        let state = match &error {
            Some(_) => GateState::Failed,
            None => GateState::from_word(u32::try_from(get(board::STATE)).unwrap_or(0)),
        };
        Decoded::End(Box::new(Self {
            number: get(board::NUMBER),
            direction,
            comm: (get(board::COMM_KNOWN) != 0).then(|| get(board::COMM)),
            peer_host: line(words, board::PEER_HOST),
            peer_pid: get(board::PEER_PID),
            peer_device: line(words, board::PEER_DEVICE),
            peer_addr: line(words, board::PEER_ADDR),
            ready: get(board::READY),
            state,
            wait,
            since: seen.then_some(since),
            messages: receives.wrapping_add(get(board::MORE)),
            bytes: bytes.iter().fold(0, |sum, bytes| sum.wrapping_add(*bytes)),
            receives,
            completed,
            again: get(board::AGAIN),
            shortened: get(board::SHORTENED),
            flushes,
            flushed,
            driver_flushes: get(board::DRIVER_FLUSHES),
            skipped_flushes: get(board::SKIPPED_FLUSHES),
            copied_bytes: get(board::COPIED_BYTES),
            chunks: get(board::CHUNKS),
            registered: get(board::REGISTERED),
            registered_bytes: get(board::REGISTERED_BYTES),
            bounced: get(board::BOUNCED),
            bounced_bytes: get(board::BOUNCED_BYTES),
            rails: Rail::all(words, direction, (rails, lanes), receives),
            latencies: Stage::ALL.map(|stage| Latency::decode(words, stage)).to_vec(),
            error,
        }))
    }
}

impl Rail {
    fn all(
        words: &[u64],
        direction: Direction,
        (rails, lanes): (usize, usize),
        receives: u64,
    ) -> Vec<Self> {
        const SLOTS: usize = 32;
        let of = |rail: usize| move |lane: &usize| lane % rails == rail;
        let rail = |rail: usize| {
            // The usual receive has one work request, on a lane that its slot says.
            let usual = (0..SLOTS)
                .filter(|slot| of(rail)(&(slot % lanes)))
                .map(|slot| receives.saturating_add((SLOTS - 1 - slot) as u64) / SLOTS as u64)
                .sum::<u64>();
            let name = board::NAMES.start + rail * board::RAIL_NAME;
            let stopped = at(words, board::STOPPED);
            let known = direction == Direction::Send || rails == 1;
            Self {
                name: line(words, name..name + board::RAIL_NAME),
                speed: at(words, board::SPEEDS.start + rail),
                lanes: (0..lanes).filter(of(rail)).count(),
                stopped: (0..lanes.min(64))
                    .filter(of(rail))
                    .filter(|lane| stopped >> lane & 1 != 0)
                    .count(),
                bytes: known.then(|| at(words, board::BYTES.start + rail)),
                posts: usual
                    .saturating_sub(at(words, board::GENERAL.start + rail))
                    .saturating_add(at(words, board::POSTS.start + rail)),
            }
        };
        (0..rails).map(rail).collect()
    }
}

impl Latency {
    fn decode(words: &[u64], stage: Stage) -> Self {
        let start = stage.words();
        Self {
            stage,
            buckets: (0..BUCKETS).map(|bucket| at(words, start + bucket)).collect(),
            sum: at(words, start + BUCKETS),
            most: at(words, start + BUCKETS + 1),
        }
    }
}

impl Failure {
    fn decode(block: &Words) -> Option<Self> {
        let words = steady(block, board::ERROR)?;
        let errno = at(&words, board::ERROR_NUMBER);
        (at(&words, board::ERROR_AT) != 0).then(|| Self {
            at: at(&words, board::ERROR_AT),
            message: line(&words, board::ERROR_TEXT),
            of_peer: at(&words, board::ERROR_BLAME) != 0,
            errno: (errno != 0).then_some(errno),
        })
    }
}

const _: () = assert!(WORDS * size_of::<u64>() == BLOCK);
