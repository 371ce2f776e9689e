//! The file: a header, then records of a fixed size, all of it words of eight bytes in the machine's order.
//!
//! Whoever reads it may be another version and trusts nothing in it: no length, no count, no text. A record that is
//! being written has an odd first word, and a word that counts up tells a reader who looked twice that it changed.

use crate::host::process::ProcessId;
use std::ops::Range;

/// The first word.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"pinrail\n");
/// The version of everything behind the fields that all versions share.
pub const VERSION: u64 = 1;
/// Bytes before the first record.
pub const HEADER: usize = 4096;
/// Bytes of a record.
pub const RECORD: usize = WORDS * WORD;
/// Bytes that a file begins with; it grows by doubling, so that every part begins at a whole page of any size.
pub const FIRST: usize = 64 << 10;
/// Bytes that no file is larger than: some 65 thousand records.
pub const LARGEST: usize = 16 << 20;

const WORD: usize = size_of::<u64>();
const WORDS: usize = 32;

/// Words of the header. Up to the page size they are the same in every version.
pub mod header {
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
    /// The machine's page size.
    pub const PAGE: usize = 7;
    /// Bytes of a record.
    pub const RECORD: usize = 8;
    /// Records that the file has room for.
    pub const CAPACITY: usize = 9;
    /// Records in use.
    pub const LIVE: usize = 10;
    /// Registrations that are live and have no record, for lack of room.
    pub const UNLISTED: usize = 11;
}

/// Words of a record.
pub mod record {
    use std::ops::Range;

    /// Odd while the record is written.
    pub const SEQUENCE: usize = 0;
    /// What was registered, see [`super::Kind`]; 0: not in use.
    pub const KIND: usize = 1;
    /// The first address that is registered.
    pub const START: usize = 2;
    /// The first address behind it.
    pub const END: usize = 3;
    /// The first address that was asked for.
    pub const ASKED: usize = 4;
    /// The first address behind what was asked for.
    pub const ASKED_END: usize = 5;
    /// How often it was asked for.
    pub const REQUESTS: usize = 6;
    /// The number of the registration, from 1 on.
    pub const NUMBER: usize = 7;
    /// Name of the device.
    pub const DEVICE: Range<usize> = 8..16;
    /// Who asked for it.
    pub const SITE: Range<usize> = 16..super::WORDS;
}

/// What was registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Memory of the plugin, which owns its pages.
    Own,
    /// Host memory that NCCL gave.
    Host,
    /// Device memory that NCCL gave by address.
    Cuda,
    /// A DMA-BUF that NCCL gave. The addresses are offsets into it: no page of the process is concerned.
    DmaBuf,
    /// Something that a later version knows.
    Other,
}

impl Kind {
    /// Its word in a record.
    pub fn word(self) -> u64 {
        match self {
            Self::Own => 1,
            Self::Host => 2,
            Self::Cuda => 3,
            Self::DmaBuf => 4,
            Self::Other => u64::MAX,
        }
    }

    /// `None`: the record is not in use.
    fn from_word(word: u64) -> Option<Self> {
        match word {
            0 => None,
            1 => Some(Self::Own),
            2 => Some(Self::Host),
            3 => Some(Self::Cuda),
            4 => Some(Self::DmaBuf),
            _ => Some(Self::Other),
        }
    }

    /// Its name in the output of commands.
    pub fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Host => "host",
            Self::Cuda => "cuda",
            Self::DmaBuf => "dmabuf",
            Self::Other => "other",
        }
    }
}

fn word(bytes: &[u8], index: usize) -> Option<u64> {
    let bytes = bytes.get(index * WORD..)?.first_chunk::<WORD>()?;
    Some(u64::from_ne_bytes(*bytes))
}

/// Text of a fixed room as words, cut where it does not fit; the rest is zeroes.
pub fn text<const N: usize>(text: &str) -> [u64; N] {
    let mut words = [0; N];
    let mut end = text.len().min(N * WORD);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    for (word, bytes) in words.iter_mut().zip(text.as_bytes()[..end].chunks(WORD)) {
        let mut whole = [0; WORD];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(whole);
    }
    words
}

/// One printable line out of a room for text.
fn line(bytes: &[u8], words: Range<usize>) -> String {
    let room = bytes.get(words.start * WORD..words.end * WORD).unwrap_or_default();
    let end = room.iter().position(|byte| *byte == 0).unwrap_or(room.len());
    let text = String::from_utf8_lossy(&room[..end]);
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Why a file is not an inventory that this version reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It was just made, and its process is not done with the header.
    #[error("it is empty")]
    Empty,
    /// It is something else.
    #[error("it is no inventory of pinrail")]
    Foreign,
    /// It is from another version.
    #[error(
        "it has version {0} of the format, this program reads {VERSION}; use the `pinrail` of the plugin"
    )]
    Version(u64),
    /// The header contradicts itself.
    #[error("its header is damaged")]
    Damaged,
}

/// Whose file it is: what all versions agree on.
///
/// # Errors
/// It is no such file.
pub fn owner(bytes: &[u8]) -> Result<ProcessId, Refused> {
    let field = |index| word(bytes, index).ok_or(Refused::Empty);
    match field(header::MAGIC)? {
        MAGIC => {}
        0 => return Err(Refused::Empty),
        _ => return Err(Refused::Foreign),
    }
    Ok(ProcessId {
        pid: u32::try_from(field(header::PID)?).map_err(|_| Refused::Damaged)?,
        start: field(header::START)?,
        namespace: field(header::NAMESPACE)?,
        boot: [field(header::BOOT)?, field(header::BOOT + 1)?],
    })
}

/// Whose file it is, and how many registrations have no record.
///
/// # Errors
/// It is no such file, or of another version.
pub fn head(bytes: &[u8]) -> Result<(ProcessId, u64), Refused> {
    let owner = owner(bytes)?;
    match word(bytes, header::VERSION) {
        Some(VERSION) => {}
        other => return Err(other.map_or(Refused::Damaged, Refused::Version)),
    }
    if word(bytes, header::RECORD) != Some(RECORD as u64) {
        return Err(Refused::Damaged);
    }
    Ok((owner, word(bytes, header::UNLISTED).unwrap_or(0)))
}

/// One registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its number, in the order in which the process made them.
    pub number: u64,
    /// What was registered.
    pub kind: Kind,
    /// The addresses that are registered, whole pages.
    pub range: Range<u64>,
    /// What was asked for, from the first byte that anybody asked for to the last.
    pub asked: Range<u64>,
    /// How often it was asked for.
    pub requests: u64,
    /// The device.
    pub device: String,
    /// Who asked first.
    pub site: String,
}

/// What a place for a record holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Nothing.
    Free,
    /// A registration.
    Live(Record),
    /// Something that was being written, or makes no sense.
    Unsteady,
}

impl Slot {
    /// What is in a place that was copied twice, one copy after the other.
    pub fn decode(first: &[u8], second: &[u8]) -> Self {
        let Some(sequence) = word(first, record::SEQUENCE).filter(|_| first == second) else {
            return Self::Unsteady;
        };
        if !sequence.is_multiple_of(2) || first.len() < RECORD {
            return Self::Unsteady;
        }
        let field = |index| word(first, index).unwrap_or(0);
        let Some(kind) = Kind::from_word(field(record::KIND)) else { return Self::Free };
        let range = field(record::START)..field(record::END);
        let asked = field(record::ASKED)..field(record::ASKED_END);
        let inside =
            asked.start <= asked.end && range.start <= asked.start && asked.end <= range.end;
        if range.is_empty() || !inside {
            return Self::Unsteady;
        }
        Self::Live(Record {
            number: field(record::NUMBER),
            kind,
            range,
            asked,
            requests: field(record::REQUESTS),
            device: line(first, record::DEVICE),
            site: line(first, record::SITE),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The bytes of a record as the writer leaves them.
    pub(crate) fn bytes(record: &Record, sequence: u64) -> Vec<u8> {
        let mut words = [0_u64; WORDS];
        words[record::SEQUENCE] = sequence;
        words[record::KIND] = record.kind.word();
        words[record::START] = record.range.start;
        words[record::END] = record.range.end;
        words[record::ASKED] = record.asked.start;
        words[record::ASKED_END] = record.asked.end;
        words[record::REQUESTS] = record.requests;
        words[record::NUMBER] = record.number;
        words[record::DEVICE].copy_from_slice(&text::<8>(&record.device));
        words[record::SITE].copy_from_slice(&text::<16>(&record.site));
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn any_record() -> Record {
        Record {
            number: 7,
            kind: Kind::Host,
            range: 0x1000..0x2000,
            asked: 0x1010..0x1014,
            requests: 2,
            device: "mlx5_0".into(),
            site: "regMr".into(),
        }
    }

    #[test]
    fn a_record_reads_back() {
        let record = any_record();
        let first = bytes(&record, 4);
        assert_eq!(first.len(), RECORD);
        assert_eq!(Slot::decode(&first, &first), Slot::Live(record));
        let free = vec![0; RECORD];
        assert_eq!(Slot::decode(&free, &free), Slot::Free);
    }

    #[test]
    fn a_record_that_changes_is_recognised() {
        let record = any_record();
        let (even, odd, later) = (bytes(&record, 4), bytes(&record, 5), bytes(&record, 6));
        assert_eq!(Slot::decode(&odd, &odd), Slot::Unsteady);
        assert_eq!(Slot::decode(&even, &later), Slot::Unsteady);
        for cut in [0, 7, 8, RECORD - 1] {
            assert_eq!(Slot::decode(&even[..cut], &even[..cut]), Slot::Unsteady, "{cut}");
        }
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "some of what makes no sense")]
    fn what_makes_no_sense_is_no_record() {
        for (range, asked) in [
            (0x2000..0x1000, 0x1000..0x1001),
            (0x1000..0x1000, 0x1000..0x1000),
            (0x1000..0x2000, 0xfff..0x1001),
            (0x1000..0x2000, 0x1000..0x2001),
            (0x1000..0x2000, 0x1002..0x1001),
        ] {
            let wrong = bytes(&Record { range, asked, ..any_record() }, 0);
            assert_eq!(Slot::decode(&wrong, &wrong), Slot::Unsteady);
        }
    }

    #[test]
    fn text_is_cut_at_a_character_and_shown_without_control() {
        let long = "ü".repeat(100);
        let mut record = Record { device: long, site: "a\u{1b}[31mb\n".into(), ..any_record() };
        let first = bytes(&record, 0);
        record.device = "ü".repeat(32);
        record.site = "a?[31mb?".into();
        assert_eq!(Slot::decode(&first, &first), Slot::Live(record));
    }

    #[test]
    fn only_this_version_is_read_and_every_version_has_an_owner() {
        let mut words = [0_u64; 16];
        let all =
            |words: &[u64]| -> Vec<u8> { words.iter().flat_map(|w| w.to_ne_bytes()).collect() };
        assert_eq!(head(&all(&words)), Err(Refused::Empty));
        words[header::MAGIC] = 5;
        assert_eq!(owner(&all(&words)), Err(Refused::Foreign));
        words[header::MAGIC] = MAGIC;
        words[header::PID..header::BOOT + 2].copy_from_slice(&[1, 2, 3, 4, 5]);
        words[header::VERSION] = VERSION + 1;
        let id = ProcessId { pid: 1, start: 2, namespace: 3, boot: [4, 5] };
        assert_eq!(owner(&all(&words)), Ok(id));
        assert_eq!(head(&all(&words)), Err(Refused::Version(VERSION + 1)));
        words[header::VERSION] = VERSION;
        assert_eq!(head(&all(&words)), Err(Refused::Damaged));
        words[header::RECORD] = RECORD as u64;
        words[header::UNLISTED] = 9;
        assert_eq!(head(&all(&words)), Ok((id, 9)));
        words[header::PID] = u64::MAX;
        assert_eq!(owner(&all(&words)), Err(Refused::Damaged));
        assert_eq!(owner(&[]), Err(Refused::Empty));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(first in prop::collection::vec(any::<u8>(), 0..600), second in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = (head(&first), owner(&first), Slot::decode(&first, &second));
            if let Slot::Live(record) = Slot::decode(&first, &first) {
                prop_assert!(record.range.start < record.range.end);
                prop_assert!(record.range.start <= record.asked.start && record.asked.end <= record.range.end);
                prop_assert!(!record.site.contains(char::is_control));
            }
        }

        /// As above, with what passes the first checks.
        #[test]
        fn any_words_are_read(mut words in prop::collection::vec(prop_oneof![0..9_u64, any::<u64>()], WORDS)) {
            words[record::SEQUENCE] &= !1;
            let first: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let _ = Slot::decode(&first, &first);
        }
    }
}
