//! The board of one end of a connection: its counters, where other processes can read them.
//!
//! Each word has one writer at a time, so that counting is a plain load and store, and no other process writes any. Where no
//! file is kept the board is memory of this process alone: to count costs less than to ask whether to.

use super::file::Seat;
use super::layout::{BUCKETS, SAMPLING, Stage, WORDS, Wait, board, bucket, text};
use super::pages::Words;
use crate::clock;
use crate::sync::{AtomicU64, Ordering, PUBLISH, fence};
use std::ptr::NonNull;
use std::sync::Arc;

/// A board. Clones are the same board, which is blank again when the last is dropped.
#[derive(Clone, Debug)]
pub struct Board {
    words: NonNull<Words>,
    place: Arc<Place>,
}

/// Where a board is.
#[derive(Debug)]
enum Place {
    /// In the file.
    Shared(Seat),
    /// In memory that nobody else sees.
    Own(Box<Words>),
}

// SAFETY: atomics in memory that `place` keeps.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

impl Default for Board {
    fn default() -> Self {
        let words: Box<Words> = Box::new([const { AtomicU64::new(0) }; WORDS]);
        Self::new(Place::Own(words))
    }
}

impl From<Seat> for Board {
    fn from(seat: Seat) -> Self {
        Self::new(Place::Shared(seat))
    }
}

impl Board {
    fn new(place: Place) -> Self {
        let place = Arc::new(place);
        let words = NonNull::from(match &*place {
            Place::Shared(seat) => seat.words(),
            Place::Own(words) => words,
        });
        Self { words, place }
    }

    #[inline(always)]
    fn words(&self) -> &Words {
        // SAFETY: what `place` has, which never moves and lives as long as it.
        unsafe { self.words.as_ref() }
    }

    /// Its counters, for several steps: where they are is looked up once.
    #[inline(always)]
    pub fn counters(&self) -> Counters<'_> {
        Counters(self.words())
    }

    /// Whether other processes see it.
    pub fn is_shared(&self) -> bool {
        matches!(*self.place, Place::Shared(_))
    }

    /// Reads a word.
    #[inline(always)]
    pub fn get(&self, word: usize) -> u64 {
        self.counters().get(word)
    }

    /// Writes a word.
    #[inline(always)]
    pub fn set(&self, word: usize, value: u64) {
        self.counters().set(word, value);
    }

    /// Adds to a word whose only writer this thread is.
    #[inline(always)]
    pub fn add(&self, word: usize, amount: u64) {
        self.counters().add(word, amount);
    }

    /// Adds to a word that several threads add to. Not for the data path.
    pub fn share(&self, word: usize, amount: u64) {
        self.words()[word % WORDS].fetch_add(amount, Ordering::Relaxed);
    }

    /// Writes words that belong together, under the number in word `sequence`.
    pub(super) fn write(&self, sequence: usize, words: impl IntoIterator<Item = (usize, u64)>) {
        write(self.words(), sequence, words);
    }

    /// The event thread looks: what the end waits for, and since when. `state`: of its gate.
    pub fn look(&self, state: u64, stopped: u64, now: u64) {
        self.set(board::STATE, state);
        self.set(board::STOPPED, stopped);
        let counts =
            [board::POSTED, board::COMPLETED, board::FLUSHES, board::FLUSHED, board::COPIED_BYTES];
        let own = |rail| self.get(board::POSTS.start + rail);
        let posts = (0..board::POSTS.len()).map(own);
        let all = counts.into_iter().map(|word| self.get(word)).chain(posts);
        let progress = all.fold(0_u64, u64::wrapping_add);
        let wait = Wait::of(|word| self.get(word)).word();
        if progress != self.get(board::PROGRESS) || wait != self.get(board::WAIT) {
            self.set(board::PROGRESS, progress);
            // Who sees the kind sees its time, or an earlier one.
            self.set(board::WAIT_SINCE, now);
            self.words()[board::WAIT].store(wait, PUBLISH);
        }
    }

    /// What ended the connection. The first stays.
    pub fn fail(&self, message: &str, of_peer: bool, errno: Option<i32>, state: u64) {
        self.set(board::STATE, state);
        if self.get(board::ERROR_AT) != 0 {
            return;
        }
        if let Place::Shared(seat) = &*self.place {
            seat.failed();
        }
        let fixed = [
            (board::ERROR_AT, clock::nanos()),
            (board::ERROR_BLAME, of_peer.into()),
            (board::ERROR_NUMBER, errno.unwrap_or(0).unsigned_abs().into()),
        ];
        let text = board::ERROR_TEXT.zip(text(message, board::ERROR_TEXT.len()));
        self.write(board::ERROR, fixed.into_iter().chain(text));
    }
}

/// Whether the time of the receive with this number is taken. It is one of slot 0.
#[inline(always)]
pub fn is_sampled(number: u32) -> bool {
    number.is_multiple_of(SAMPLING)
}

/// The counters of a board. One thread at a time counts.
#[derive(Clone, Copy, Debug)]
pub struct Counters<'a>(&'a Words);

impl Counters<'_> {
    /// Reads a word.
    #[inline(always)]
    pub fn get(self, word: usize) -> u64 {
        self.0[word % WORDS].load(Ordering::Relaxed)
    }

    /// Writes a word.
    #[inline(always)]
    pub fn set(self, word: usize, value: u64) {
        self.0[word % WORDS].store(value, Ordering::Relaxed);
    }

    /// Adds to a word.
    #[inline(always)]
    pub fn add(self, word: usize, amount: u64) {
        self.set(word, self.get(word).wrapping_add(amount));
    }

    /// A sampled send is asked for.
    #[inline(always)]
    pub fn begin(self) {
        let now = clock::ticks();
        if self.get(board::SEEN) == 0 {
            self.set(board::SEEN, now);
        }
        self.set(board::STARTED, now);
    }

    /// A sampled receive is asked for, whose credit is its own.
    #[inline(always)]
    pub fn begin_receive(self) {
        self.set(board::STARTED, clock::ticks());
    }

    /// Whether the time of the transfer of slot 0 is being taken.
    #[inline(always)]
    pub fn is_timed(self) -> bool {
        self.get(board::STARTED) != 0
    }

    /// The transfer of slot 0 is complete. `picked`: its test is told of later or at once, and says so.
    ///
    /// Apart, so that who calls it once in 64 times keeps nothing for it.
    #[inline(never)]
    pub fn arrive(self, picked: bool) {
        let started = self.get(board::STARTED);
        if started == 0 {
            return;
        }
        if self.get(board::ARRIVED) != 0 {
            // Nobody said that the last one was told of later.
            self.add(Stage::Test.words(), 1);
        }
        let now = clock::ticks();
        let seen = self.get(board::SEEN);
        if seen == started {
            self.add(Stage::Credit.words(), 1);
        } else if seen != 0 {
            self.record(Stage::Credit, started.wrapping_sub(seen));
        }
        self.record(Stage::Transfer, now.wrapping_sub(started));
        self.set(board::SEEN, 0);
        self.set(board::STARTED, 0);
        self.set(board::ARRIVED, if picked { now } else { 0 });
    }

    /// A test tells that the transfer of slot 0 is complete, which an earlier one found.
    #[inline(never)]
    pub fn pick_up(self) {
        let arrived = self.get(board::ARRIVED);
        if arrived != 0 {
            self.record(Stage::Test, clock::ticks().wrapping_sub(arrived));
            self.set(board::ARRIVED, 0);
        }
    }

    #[inline(always)]
    fn record(self, stage: Stage, ticks: u64) {
        let words = stage.words();
        self.add(words + bucket(ticks), 1);
        self.add(words + BUCKETS, ticks);
        if ticks > self.get(words + BUCKETS + 1) {
            self.set(words + BUCKETS + 1, ticks);
        }
    }
}

/// Writes words of a block that belong together, under the number in word `sequence`.
pub(super) fn write(block: &Words, sequence: usize, words: impl IntoIterator<Item = (usize, u64)>) {
    let sequence = &block[sequence];
    // Whoever sees a new word sees the odd number, too.
    let number = sequence.load(Ordering::Relaxed).wrapping_add(1) | 1;
    sequence.store(number, Ordering::Relaxed);
    fence(Ordering::Release);
    for (word, value) in words {
        block[word].store(value, Ordering::Relaxed);
    }
    sequence.store(number.wrapping_add(1), PUBLISH);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The counts of a latency's buckets, all together.
    fn taken(board: &Board, stage: Stage) -> u64 {
        (0..BUCKETS).map(|bucket| board.get(stage.words() + bucket)).sum()
    }

    #[test]
    fn one_in_so_many_is_sampled() {
        let board = Board::default();
        for number in (0..640).step_by(32) {
            if is_sampled(number) {
                board.counters().begin();
            }
            board.counters().arrive(true);
        }
        assert_eq!(taken(&board, Stage::Transfer), 10);
        // The last may yet be told of.
        assert_eq!(taken(&board, Stage::Test), 9);
        board.counters().pick_up();
        board.counters().pick_up();
        assert_eq!(taken(&board, Stage::Test), 10);
    }

    #[test]
    fn a_send_waits_for_its_credit_from_the_first_call_on() {
        let board = Board::default();
        board.counters().begin();
        let first = board.get(board::STARTED);
        while clock::ticks() - first < 10_000 {}
        board.counters().begin();
        assert_eq!(board.get(board::SEEN), first);
        board.counters().arrive(false);
        assert!(board.get(Stage::Credit.words() + BUCKETS) >= 10_000);
        assert_eq!(board.get(board::ARRIVED), 0);
    }

    #[test]
    fn a_wait_begins_anew_with_each_progress() {
        let board = Board::default();
        let since = |now| {
            board.look(1, 0, now);
            (board.get(board::WAIT), board.get(board::WAIT_SINCE))
        };
        let idle = since(5);
        assert_eq!((idle, since(9)), (idle, idle));
        board.add(board::POSTED, 1);
        assert_eq!(since(10), (Wait::Completion.word(), 10));
        assert_eq!(since(11), (Wait::Completion.word(), 10));
        board.add(board::POSTED, 1);
        assert_eq!(since(12), (Wait::Completion.word(), 12));
        board.add(board::COMPLETED, 2);
        assert_eq!(since(13).0, Wait::Nothing.word());
        board.set(board::BLOCKED, 3);
        assert_eq!(since(14), (Wait::Credit.word(), 14));
    }

    #[test]
    fn the_first_error_stays() {
        let board = Board::default();
        board.fail("first", true, Some(5), 5);
        board.fail("second", false, None, 5);
        let text: Vec<u64> = board::ERROR_TEXT.map(|word| board.get(word)).collect();
        assert_eq!(super::super::layout::line(&text, 0..text.len()), "first");
        assert_eq!((board.get(board::ERROR), board.get(board::ERROR_NUMBER)), (2, 5));
    }
}
