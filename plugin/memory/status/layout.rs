//! The file: a header and then boards, one for each end of a connection, all of it words of eight bytes in the machine's
//! order.
//!
//! Whoever reads it may be another version and trusts nothing in it. Each word has one writer at a time and is written whole.
//! What must be read together, who the peer is, stands under a number that is odd while it is written.

use std::ops::Range;

/// The name of the file, as `/proc/<pid>/fd` shows it.
pub const NAME: &str = "pinrail-status";
/// The first word.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"pinrail:");
/// The version of everything behind the fields that all versions share.
pub const VERSION: u64 = 1;
/// Words of the header, and of a board.
pub const WORDS: usize = 512;
/// Bytes of them.
pub const BLOCK: usize = WORDS * WORD;
/// Blocks of the file: the header and the boards. Those that are not in use take no memory.
pub const BLOCKS: usize = 1 << 14;
/// Bytes of the file.
pub const LARGEST: usize = BLOCKS * BLOCK;
/// Rails of a board.
pub const RAILS: usize = 8;
/// Latencies of one in so many messages are taken.
pub const SAMPLING: u32 = 64;

/// Bytes of a word.
pub const WORD: usize = size_of::<u64>();

/// Words of the header. Those up to the boot are the same in every version.
pub mod header {
    use std::ops::Range;

    /// [`super::MAGIC`], written last.
    pub const MAGIC: usize = 0;
    /// [`super::VERSION`].
    pub const VERSION: usize = 1;
    /// The process: its number, start, PID namespace and boot (two words).
    pub const PID: usize = 2;
    /// When it was started.
    pub const START: usize = 3;
    /// Its PID namespace.
    pub const NAMESPACE: usize = 4;
    /// The boot, two words.
    pub const BOOT: usize = 5;
    /// Bytes of a block.
    pub const BLOCK: usize = 7;
    /// Boards that were ever in use; those behind them are blank.
    pub const USED: usize = 8;
    /// Ends that found no room.
    pub const LEFT_OUT: usize = 9;
    /// When the event thread looked last, by CLOCK_MONOTONIC.
    pub const LOOKED: usize = 10;
    /// How often it looks, in nanoseconds.
    pub const EVERY: usize = 11;
    /// Whether the processor's counter keeps its pace.
    pub const STEADY: usize = 12;
    /// Ticks and nanoseconds when the file was made.
    pub const FIRST_TICKS: usize = 13;
    /// See there.
    pub const FIRST_NANOS: usize = 14;
    /// Ticks and nanoseconds when the event thread looked last. Under an odd number while they are written.
    pub const LAST: usize = 15;
    /// See there.
    pub const LAST_TICKS: usize = 16;
    /// See there.
    pub const LAST_NANOS: usize = 17;
    /// Ends of connections since the file was made, and those that failed.
    pub const OPENED: usize = 18;
    /// See there.
    pub const FAILED: usize = 19;
    /// What ends moved that were closed since: messages and bytes sent, messages and bytes received.
    pub const CLOSED: Range<usize> = 20..24;
    /// Bytes that are set aside for copies, of all connections.
    pub const ASIDE: usize = 24;
    /// The plugin's version.
    pub const PLUGIN: Range<usize> = 32..40;
    /// The host.
    pub const HOST: Range<usize> = 40..48;
}

/// Words of a board.
pub mod board {
    use std::ops::Range;

    /// Odd while the words up to [`SPEEDS`] are written.
    pub const SEQUENCE: usize = 0;
    /// 0: not in use, 1: a sending end, 2: a receiving end.
    pub const KIND: usize = 1;
    /// The number of the end in its process.
    pub const NUMBER: usize = 2;
    /// NCCL's identifier of the communicator, and whether it is known.
    pub const COMM: usize = 3;
    /// See there.
    pub const COMM_KNOWN: usize = 4;
    /// When the connection was ready, by CLOCK_MONOTONIC as all times here.
    pub const READY: usize = 5;
    /// The peer's process.
    pub const PEER_PID: usize = 6;
    /// Rails of this end.
    pub const RAILS: usize = 7;
    /// Queue pairs.
    pub const LANES: usize = 8;
    /// The peer's host, its devices, and its address on the side channel.
    pub const PEER_HOST: Range<usize> = 24..32;
    /// See there.
    pub const PEER_DEVICE: Range<usize> = 32..48;
    /// See there.
    pub const PEER_ADDR: Range<usize> = 48..56;
    /// The names of the rails' ports, [`RAIL_NAME`] words each.
    pub const NAMES: Range<usize> = 96..128;
    /// Words of a name.
    pub const RAIL_NAME: usize = 4;
    /// The speeds of the rails' ports, in Mb/s.
    pub const SPEEDS: Range<usize> = 128..136;

    /// The state of the connection: a word of [`crate::memory::Gate`].
    pub const STATE: usize = 9;
    /// What it waits for, as the event thread saw it last: see [`super::Wait`].
    pub const WAIT: usize = 10;
    /// When the event thread first saw that wait without any progress since.
    pub const WAIT_SINCE: usize = 11;
    /// The sum of what counts as progress, as the event thread saw it last.
    pub const PROGRESS: usize = 12;
    /// A bit for each lane that was given up.
    pub const STOPPED: usize = 13;
    /// Memory handles and their bytes, of what devices reach directly.
    pub const REGISTERED: usize = 14;
    /// See there.
    pub const REGISTERED_BYTES: usize = 15;
    /// The same of what is reached through copies.
    pub const BOUNCED: usize = 16;
    /// See there.
    pub const BOUNCED_BYTES: usize = 17;
    /// What ended the connection: when, whose fault, errno or 0; the text stands under an odd number while it is written.
    pub const ERROR: usize = 18;
    /// See there.
    pub const ERROR_AT: usize = 19;
    /// 0 this side's, 1 the peer's.
    pub const ERROR_BLAME: usize = 20;
    /// See there.
    pub const ERROR_NUMBER: usize = 21;
    /// See there.
    pub const ERROR_TEXT: Range<usize> = 56..96;

    /// Receives that this end answered or advertised, and those that are complete.
    pub const POSTED: usize = 136;
    /// See there.
    pub const COMPLETED: usize = 137;
    /// The receive, from 1, that the last send found not advertised.
    pub const BLOCKED: usize = 138;
    /// Ticks when a sampled transfer was first asked for, was posted, and was complete; 0: was not.
    pub const SEEN: usize = 139;
    /// See there.
    pub const STARTED: usize = 140;
    /// See there.
    pub const ARRIVED: usize = 141;
    /// Members beyond the first of each receive.
    pub const MORE: usize = 142;
    /// Bytes of messages, by rail.
    pub const BYTES: Range<usize> = 144..152;
    /// Receives whose work requests are counted one by one, by the rail that the usual one would have used.
    pub const GENERAL: Range<usize> = 152..160;
    /// The work requests of these, by rail; and those that post receives.
    pub const POSTS: Range<usize> = 160..168;
    /// Flushes by reads that began, and those that are complete.
    pub const FLUSHES: usize = 168;
    /// See there.
    pub const FLUSHED: usize = 169;
    /// Flushes by the CUDA driver, and calls that had nothing to wait for.
    pub const DRIVER_FLUSHES: usize = 170;
    /// See there.
    pub const SKIPPED_FLUSHES: usize = 171;
    /// Parts that were sent again over another rail, or credits.
    pub const AGAIN: usize = 172;
    /// Bytes that went through copies.
    pub const COPIED_BYTES: usize = 173;
    /// Chunks of the copies that a device reads now.
    pub const CHUNKS: usize = 174;
    /// Sends that were longer than the receive.
    pub const SHORTENED: usize = 175;

    /// The latencies, [`super::STAGE`] words each.
    pub const STAGES: usize = 192;
}

/// Words of a latency: its buckets, the sum, and the largest.
pub const STAGE: usize = BUCKETS + 2;
/// Buckets of a latency: four to each doubling of the ticks, from 16 on; the last has no end.
pub const BUCKETS: usize = 104;
/// The exponent of the first.
pub const FIRST_EXPONENT: u32 = 4;

const _: () = assert!(board::STAGES + Stage::ALL.len() * STAGE <= WORDS);

/// What a latency is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A send: from the first call that asked for it to the one that found a credit.
    Credit,
    /// From the post to the completion. Of a receiving end: from the credit to the data.
    Transfer,
    /// From the completion to the test that told it.
    Test,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Credit, Self::Transfer, Self::Test];

    /// Its name in the output of commands.
    pub fn name(self) -> &'static str {
        match self {
            Self::Credit => "credit",
            Self::Transfer => "transfer",
            Self::Test => "test",
        }
    }

    /// The first of its words.
    #[inline(always)]
    pub const fn words(self) -> usize {
        board::STAGES + self as usize * STAGE
    }
}

/// The bucket of a latency.
#[inline(always)]
pub fn bucket(ticks: u64) -> usize {
    let ticks = ticks.max(1 << FIRST_EXPONENT);
    let exponent = ticks.ilog2();
    let quarter = (ticks >> (exponent - 2)) & 3;
    let index = ((exponent - FIRST_EXPONENT) as usize) << 2 | quarter as usize;
    if index < BUCKETS { index } else { BUCKETS - 1 }
}

/// The first ticks that are beyond a bucket.
pub fn bound(bucket: usize) -> u64 {
    let (exponent, quarter) = (FIRST_EXPONENT + (bucket as u32 >> 2), bucket as u64 & 3);
    (4 + quarter + 1) << (exponent - 2)
}

/// What an end waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Nothing.
    Nothing,
    /// A send: a receive of the peer.
    Credit,
    /// A send: that the peer's device acknowledges. A receive: the peer's data.
    Completion,
    /// A flush that does not complete.
    Flush,
}

impl Wait {
    /// Its word.
    pub fn word(self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Credit => 1,
            Self::Completion => 2,
            Self::Flush => 3,
        }
    }

    /// Its name in the output of commands.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Credit => "credit",
            Self::Completion => "completion",
            Self::Flush => "flush",
        }
    }

    /// What an end with these counts waits for.
    pub fn of(word: impl Fn(usize) -> u64) -> Self {
        // What is complete is read first, so that it is never more than what was begun.
        let (completed, flushed) = (word(board::COMPLETED), word(board::FLUSHED));
        let (posted, flushes) = (word(board::POSTED), word(board::FLUSHES));
        if flushes > flushed {
            Self::Flush
        } else if posted > completed {
            Self::Completion
        } else if word(board::BLOCKED) == posted.wrapping_add(1) {
            Self::Credit
        } else {
            Self::Nothing
        }
    }
}

/// Text of a fixed room as words, cut where it does not fit; the rest is zeroes.
pub fn text(text: &str, room: usize) -> Vec<u64> {
    let mut end = text.len().min(room * WORD);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut words = vec![0; room];
    for (word, bytes) in words.iter_mut().zip(text.as_bytes()[..end].chunks(WORD)) {
        let mut whole = [0; WORD];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(whole);
    }
    words
}

/// One printable line out of a room for text.
pub fn line(words: &[u64], room: Range<usize>) -> String {
    let words = words.get(room).unwrap_or_default();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let text = String::from_utf8_lossy(&bytes[..end]);
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every latency is in the bucket whose bounds hold it, and buckets are narrow.
        #[test]
        fn buckets_hold_what_they_say(exponent in 0..64_u32, more in any::<u64>()) {
            let ticks = 1_u64 << exponent | more & ((1 << exponent) - 1);
            let at = bucket(ticks);
            prop_assert!(at < BUCKETS);
            if at < BUCKETS - 1 {
                prop_assert!(ticks < bound(at));
            }
            if at > 0 {
                let below = bound(at - 1);
                prop_assert!(ticks >= below);
                prop_assert!(at == BUCKETS - 1 || bound(at) - below <= below / 4);
            }
        }

        #[test]
        fn any_words_are_a_line(words in prop::collection::vec(any::<u64>(), 0..20)) {
            prop_assert!(!line(&words, 2..9).contains(char::is_control));
        }
    }

    #[test]
    fn bounds_rise_without_a_gap() {
        for at in 1..BUCKETS {
            assert_eq!(bucket(bound(at - 1)), at);
            assert_eq!(bucket(bound(at) - 1), at);
        }
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, BUCKETS - 1));
    }

    #[test]
    fn text_survives_and_is_cut_at_a_character() {
        assert_eq!(line(&text("mlx5_0:1", 4), 0..4), "mlx5_0:1");
        assert_eq!(line(&text(&"ü".repeat(100), 4), 0..4), "ü".repeat(16));
        assert_eq!(line(&text("a\u{1b}b", 1), 0..1), "a?b");
    }

    #[test]
    fn what_is_waited_for() {
        let of = |posted, completed, blocked, flushes, flushed| {
            Wait::of(|word| match word {
                board::POSTED => posted,
                board::COMPLETED => completed,
                board::BLOCKED => blocked,
                board::FLUSHES => flushes,
                board::FLUSHED => flushed,
                _ => 0,
            })
        };
        assert_eq!(of(0, 0, 0, 0, 0), Wait::Nothing);
        assert_eq!(of(0, 0, 1, 0, 0), Wait::Credit);
        // It found one since.
        assert_eq!(of(7, 7, 7, 0, 0), Wait::Nothing);
        assert_eq!(of(7, 7, 8, 0, 0), Wait::Credit);
        assert_eq!(of(7, 6, 8, 0, 0), Wait::Completion);
        assert_eq!(of(7, 6, 0, 5, 4), Wait::Flush);
    }
}
