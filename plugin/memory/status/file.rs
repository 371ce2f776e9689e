//! The file that one process keeps from its first connection to its last: a memory file without a name in any folder, which
//! goes with its process however that ends.

use super::board::write;
use super::layout::{self, BLOCK, BLOCKS, LARGEST, board, header, text};
use super::pages::{Pages, Words};
use crate::clock;
use crate::host::limits;
use crate::host::process::ProcessId;
use crate::host::procfs::Proc;
use crate::records::hostname;
use crate::sync::{Ordering, PUBLISH};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, SealFlags, fallocate, fchmod, fcntl_add_seals, ftruncate,
    memfd_create,
};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often the event thread looks.
pub const EVERY: Duration = Duration::from_secs(1);

/// The file.
#[derive(Debug)]
pub struct StatusFile {
    pages: Pages,
    file: OwnedFd,
    seats: Mutex<Seats>,
}

/// Blocks behind the header that are in use.
#[derive(Debug)]
struct Seats {
    /// Those that ever were, and the header.
    used: usize,
    free: Vec<usize>,
}

impl StatusFile {
    /// A new one.
    ///
    /// # Errors
    /// In words: it cannot be made.
    pub(super) fn create() -> Result<Self, String> {
        let me = ProcessId::own(&Proc::default()).ok_or("/proc does not show this process")?;
        let say = |what: &'static str| move |errno: Errno| format!("{what}: {errno}");
        // Beyond this limit the kernel would not only refuse but send a signal that ends the process.
        if !limits::file_size().allows(LARGEST as u64) {
            return Err(format!("files may not have {LARGEST} bytes (ulimit -f)"));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = match memfd_create(layout::NAME, flags | MemfdFlags::NOEXEC_SEAL) {
            // Before Linux 6.3.
            Err(Errno::INVAL) => memfd_create(layout::NAME, flags),
            made => made,
        }
        .map_err(say("memfd_create"))?;
        ftruncate(&file, LARGEST as u64).map_err(say("the size of the file"))?;
        // Nobody opens it to write it, and nobody makes it shorter under those who look at it.
        fchmod(&file, Mode::RUSR).map_err(say("the rights of the file"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW;
        fcntl_add_seals(&file, seals).map_err(say("sealing the file"))?;
        allocate(&file, 0).map_err(say("setting memory aside"))?;
        let pages = Pages::own(file.as_fd()).map_err(say("mapping the file"))?;
        // From here on others cannot map it to write it, even if they change its rights. Linux 5.1.
        let _ = fcntl_add_seals(&file, SealFlags::FUTURE_WRITE);
        let _ = fcntl_add_seals(&file, SealFlags::SEAL);
        let seats = Mutex::new(Seats { used: 1, free: Vec::new() });
        let made = Self { pages, file, seats };
        made.write_header(&me);
        Ok(made)
    }

    fn write_header(&self, me: &ProcessId) {
        let words = [
            (header::VERSION, layout::VERSION),
            (header::PID, me.pid.into()),
            (header::START, me.start),
            (header::NAMESPACE, me.namespace),
            (header::BOOT, me.boot[0]),
            (header::BOOT + 1, me.boot[1]),
            (header::BLOCK, BLOCK as u64),
            (header::USED, 1),
            (header::EVERY, EVERY.as_nanos() as u64),
            (header::STEADY, clock::is_steady().into()),
            (header::FIRST_TICKS, clock::ticks()),
            (header::FIRST_NANOS, clock::nanos()),
            (header::LOOKED, clock::nanos()),
        ];
        let plugin = text(env!("CARGO_PKG_VERSION"), header::PLUGIN.len());
        let host = text(&hostname(), header::HOST.len());
        let texts = header::PLUGIN.zip(plugin).chain(header::HOST.zip(host));
        for (word, value) in words.into_iter().chain(texts) {
            self.header()[word].store(value, Ordering::Relaxed);
        }
        self.header()[header::MAGIC].store(layout::MAGIC, PUBLISH);
    }

    fn header(&self) -> &Words {
        self.pages.block(0)
    }

    fn add(&self, word: usize, amount: u64) {
        self.header()[word].fetch_add(amount, Ordering::Relaxed);
    }

    fn seats(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor, through which it is read.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// A blank board. `None`: there is no room, which is counted.
    pub(super) fn sit(self: &Arc<Self>) -> Option<Seat> {
        self.add(header::OPENED, 1);
        let mut seats = self.seats();
        let index = match seats.free.pop() {
            Some(index) => Some(index),
            None if seats.used < BLOCKS && allocate(&self.file, seats.used).is_ok() => {
                seats.used += 1;
                self.header()[header::USED].store(seats.used as u64, PUBLISH);
                Some(seats.used - 1)
            }
            None => None,
        };
        drop(seats);
        if index.is_none() {
            self.add(header::LEFT_OUT, 1);
        }
        index.map(|index| Seat { file: Arc::clone(self), index })
    }

    /// The event thread looks: at both clocks, and at how much is set aside for copies.
    pub(super) fn look(&self, now: u64, aside: u64) {
        let words = [(header::LAST_TICKS, clock::ticks()), (header::LAST_NANOS, clock::nanos())];
        write(self.header(), header::LAST, words);
        self.header()[header::ASIDE].store(aside, Ordering::Relaxed);
        self.header()[header::LOOKED].store(now, Ordering::Relaxed);
    }
}

/// Sees to it that a block has memory: without any, the first access would end the process.
fn allocate(file: &OwnedFd, block: usize) -> rustix::io::Result<()> {
    loop {
        let place = (block * BLOCK) as u64;
        match fallocate(file, FallocateFlags::empty(), place, BLOCK as u64) {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

/// A board in the file.
#[derive(Debug)]
pub(super) struct Seat {
    file: Arc<StatusFile>,
    index: usize,
}

impl Seat {
    /// Its words.
    pub(super) fn words(&self) -> &Words {
        self.file.pages.block(self.index)
    }

    /// Counts a connection that failed.
    pub(super) fn failed(&self) {
        self.file.add(header::FAILED, 1);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let words = self.words();
        let get = |word: usize| words[word].load(Ordering::Relaxed);
        let bytes = board::BYTES.map(get).fold(0, u64::wrapping_add);
        let messages = get(board::POSTED).wrapping_add(get(board::MORE));
        let first = if get(board::KIND) == 1 { 0 } else { 2 };
        self.file.add(header::CLOSED.start + first, messages);
        self.file.add(header::CLOSED.start + first + 1, bytes);
        let blank = (0..layout::WORDS).filter(|word| *word != board::SEQUENCE);
        write(words, board::SEQUENCE, blank.map(|word| (word, 0)));
        self.file.seats().free.push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::status::{About, Board, Direction, Status};

    fn read(file: &StatusFile) -> Status {
        Status::read(&file.file.try_clone().unwrap().into()).unwrap()
    }

    fn about(number: u64) -> About<'static> {
        About {
            direction: Direction::Send,
            number,
            comm: Some(0x5a),
            peer: ("node7", 4711, "mlx5_0:1+mlx5_1:1", "10.0.0.7:5"),
            rails: vec![("mlx5_0:1", 400_000), ("mlx5_1:1", 200_000)],
            lanes: 4,
        }
    }

    fn end(file: &Arc<StatusFile>, number: u64) -> Board {
        let board = Board::from(file.sit().unwrap());
        board.introduce(&about(number));
        board
    }

    #[test]
    fn what_is_written_is_read() {
        let file = Arc::new(StatusFile::create().unwrap());
        let (later, first) = (end(&file, 9), end(&file, 8));
        for _ in 0..70 {
            first.add(board::POSTED, 1);
            first.add(board::BYTES.start + 1, 100);
        }
        first.add(board::COMPLETED, 69);
        // One of them in three work requests, on the rail of slot 1.
        first.add(board::GENERAL.start + 1, 1);
        first.add(board::POSTS.start + 1, 3);
        first.look(1, 0b10, 5);
        let status = read(&file);
        assert_eq!((status.opened, status.ends.len(), status.unsteady), (2, 2, 0));
        let shown = &status.ends[0];
        assert_eq!((shown.number, shown.comm, shown.peer_pid), (8, Some(0x5a), 4711));
        assert_eq!((&*shown.peer_host, &*shown.peer_device), ("node7", "mlx5_0:1+mlx5_1:1"));
        assert_eq!((shown.messages, shown.bytes, shown.completed), (70, 7000, 69));
        assert_eq!((shown.wait, shown.since), (crate::memory::status::Wait::Completion, Some(5)));
        // Slots take turns on the lanes, and lanes on the rails.
        let rails: Vec<_> = shown.rails.iter().map(|r| (&*r.name, r.posts, r.stopped)).collect();
        assert_eq!(rails, [("mlx5_0:1", 35, 0), ("mlx5_1:1", 37, 1)]);
        drop((first, later));
        let status = read(&file);
        assert_eq!((status.ends.len(), status.closed), (0, [70, 7000, 0, 0]));
    }

    #[test]
    fn who_finds_no_room_is_counted_and_room_comes_back() {
        let file = Arc::new(StatusFile::create().unwrap());
        let mut seats: Vec<_> = std::iter::from_fn(|| file.sit()).collect();
        assert_eq!((seats.len(), read(&file).left_out), (BLOCKS - 1, 1));
        seats.truncate(BLOCKS - 2);
        assert!(file.sit().is_some() && file.sit().is_some());
        assert_eq!(read(&file).left_out, 1);
    }

    #[test]
    fn a_board_that_is_being_written_is_left_out() {
        let file = Arc::new(StatusFile::create().unwrap());
        let board = end(&file, 1);
        board.add(board::SEQUENCE, 1);
        let status = read(&file);
        assert_eq!((status.ends.len(), status.unsteady), (0, 1));
    }

    #[test]
    fn nonsense_is_no_end() {
        let file = Arc::new(StatusFile::create().unwrap());
        let board = end(&file, 1);
        for (word, value) in [
            (board::KIND, 3),
            (board::RAILS, 0),
            (board::RAILS, 9),
            (board::LANES, 0),
            (board::LANES, u64::MAX),
        ] {
            let before = board.get(word);
            board.set(word, value);
            assert_eq!(read(&file).unsteady, 1, "word {word} is {value}");
            board.set(word, before);
        }
        // Whatever else stands there is shown.
        for word in (0..layout::WORDS).filter(|word| {
            ![board::SEQUENCE, board::KIND, board::RAILS, board::LANES, board::ERROR].contains(word)
        }) {
            board.set(word, u64::MAX);
        }
        let status = read(&file);
        assert_eq!(status.ends.len(), 1);
        let text = crate::memory::status::json(&status).to_string();
        assert!(text.contains("18446744073709551615"));
    }
}
