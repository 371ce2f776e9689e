//! Who holds which memory, under which contract, and in which order it may be asked for.
//!
//! A page must pass the strongest contract that it will ever need before anything weaker makes it immovable: a weak pin
//! on a page that may not stay where it lies is what makes the strong one fail later. For memory that the plugin owns
//! the ledger enforces this, before any system call. Memory that somebody else gave may have been pinned by anybody
//! before; of that the ledger records what is known, and says where it is not.

use super::contract::{Claim, PinContract};
use crate::error::{Blame, Error};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What memory of the plugin's own is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Credits and size records of a connection.
    Credits,
    /// The word that a flush reads into.
    FlushScratch,
    /// Words that say whether a communicator may go on. No device sees them.
    Gates,
    /// Requests of a communicator. No device sees them.
    Requests,
    /// Copies of buffers that cannot be pinned where they lie.
    BounceArena,
    /// A comparison with a registration that failed.
    Probe,
    /// Memory that an application asked for.
    Application,
    /// What other processes can read of connections. No device sees it.
    Status,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Credits => "credits and size records",
            Self::FlushScratch => "flush scratch",
            Self::Gates => "gates",
            Self::Requests => "requests",
            Self::BounceArena => "bounce arena",
            Self::Probe => "probe",
            Self::Application => "application memory",
            Self::Status => "status",
        })
    }
}

/// Who holds a page, and so whose translation of its address depends on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Pinner {
    /// An RDMA device, by name.
    Device(Arc<str>),
    /// The CUDA driver, for the GPU's mapping.
    Cuda,
}

impl fmt::Display for Pinner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(name) => f.write_str(name),
            Self::Cuda => f.write_str("CUDA"),
        }
    }
}

/// Who ends a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ender {
    /// The plugin, when the registration's last user is gone.
    Plugin,
    /// Whoever made it, outside the plugin.
    Maker,
}

/// One pin of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Who holds it.
    pub by: Pinner,
    /// Through which function it was asked for; empty where that is not known.
    pub api: &'static str,
    /// What was promised.
    pub contract: Claim,
    /// Who ends it.
    pub ends: Ender,
    /// Whether the kernel counts it towards the process's memory lock limit.
    pub counts: bool,
}

impl Pin {
    /// What a registration of memory with a device asks for: of host memory always a long-term pin that counts.
    /// `of_gpu`: memory that a peer-memory module finds, which the kernel neither pins nor counts.
    pub fn registration(device: &Arc<str>, api: &'static str, of_gpu: bool) -> Self {
        Self {
            by: Pinner::Device(Arc::clone(device)),
            api,
            contract: if of_gpu {
                Claim::Unknown
            } else {
                Claim::Known(PinContract::LongTermPinned)
            },
            ends: Ender::Plugin,
            counts: !of_gpu,
        }
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.contract, self.by)?;
        if !self.api.is_empty() {
            write!(f, " ({})", self.api)?;
        }
        match self.ends {
            Ender::Plugin => Ok(()),
            Ender::Maker => f.write_str(", ended by who made it"),
        }
    }
}

/// The order of pins would be wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// A weaker contract was asked for before the strongest.
    #[error(
        "{purpose} at {start:#x} would be {contract} by {by} before it is long-term pinned for {missing}: a page passes \
         its strongest contract first"
    )]
    WeakerFirst {
        /// What the memory is for.
        purpose: Purpose,
        /// Its first address.
        start: usize,
        /// What was asked for.
        contract: Claim,
        /// By whom.
        by: Pinner,
        /// The rails that do not hold it yet.
        missing: String,
    },
    /// The range reaches into memory of the plugin's own without being inside it.
    #[error("{len} bytes at {start:#x} are partly memory of the plugin")]
    Straddles {
        /// The first address.
        start: usize,
        /// Bytes.
        len: usize,
    },
}

impl From<OrderError> for Error {
    fn from(e: OrderError) -> Self {
        let blame = match e {
            OrderError::WeakerFirst { .. } => Blame::Internal,
            OrderError::Straddles { .. } => Blame::Argument,
        };
        Self::new(blame, e.to_string())
    }
}

/// Pins that lie inside one range, each with a number that ends it.
type Pins = Vec<Entry>;

/// A pin in the books.
#[derive(Debug)]
struct Entry {
    number: u64,
    range: Range<usize>,
    pin: Pin,
}

impl Entry {
    /// Whether it holds all of a range for the long term.
    fn holds(&self, range: &Range<usize>) -> bool {
        let covers = self.range.start <= range.start && range.end <= self.range.end;
        covers && self.pin.contract.is_long_term()
    }
}

#[derive(Debug, Default)]
struct Books {
    next: u64,
    /// Mappings of the plugin by first address: end, purpose, pins.
    owned: BTreeMap<usize, (usize, Purpose, Pins)>,
    /// Ranges that others gave, by both ends: present while something holds them.
    given: BTreeMap<(usize, usize), Pins>,
    /// Numbers of the pins that were taken, not only asked for.
    taken: BTreeSet<u64>,
}

impl Books {
    /// Empty books keep no memory: they outlive the library.
    fn tidy(&mut self) {
        if self.owned.is_empty() {
            self.owned = BTreeMap::new();
        }
        if self.given.is_empty() {
            self.given = BTreeMap::new();
        }
        if self.taken.is_empty() {
            self.taken = BTreeSet::new();
        }
    }

    /// The mapping of the plugin that holds a range.
    fn owner(&mut self, range: &Range<usize>) -> Result<Option<usize>, OrderError> {
        let nearest = self.owned.range(..range.end).next_back();
        match nearest {
            Some((start, (end, ..))) if *start <= range.start && range.end <= *end => {
                Ok(Some(*start))
            }
            Some((_, (end, ..))) if *end > range.start => {
                Err(OrderError::Straddles { start: range.start, len: range.len() })
            }
            _ => Ok(None),
        }
    }
}

/// The ledger of a process. Locked for a moment by calls that allocate or register; never on the data path.
#[derive(Debug, Default)]
pub struct PinLedger {
    books: Mutex<Books>,
}

static PROCESS: PinLedger = PinLedger {
    books: Mutex::new(Books {
        next: 0,
        owned: BTreeMap::new(),
        given: BTreeMap::new(),
        taken: BTreeSet::new(),
    }),
};

/// One recorded pin. Dropping it strikes the pin out, after whoever held it has let go.
#[derive(Debug)]
pub struct PinRecord {
    ledger: &'static PinLedger,
    range: Range<usize>,
    number: u64,
}

impl PinLedger {
    /// The ledger of this process.
    pub fn process() -> &'static Self {
        &PROCESS
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a mapping of the plugin, which is resident and no more.
    pub(super) fn own(&self, range: Range<usize>, purpose: Purpose) {
        self.books().owned.insert(range.start, (range.end, purpose, Vec::new()));
    }

    /// A mapping of the plugin is about to end.
    pub(super) fn disown(&self, start: usize) {
        let gone = {
            let mut books = self.books();
            let gone = books.owned.remove(&start);
            books.tidy();
            gone
        };
        if let Some((_, purpose, pins)) = gone
            && let Some(Entry { pin, .. }) = pins.first()
        {
            tracing::error!("{purpose} at {start:#x} is unmapped while still {pin}");
        }
    }

    /// Records a pin that is about to be asked for. `rails`: the devices that must hold memory of the plugin for the
    /// long term before anybody may hold it for less; of no meaning for memory that others gave.
    ///
    /// # Errors
    /// The range is the plugin's own and the order would be wrong. Nothing was asked of the kernel then.
    pub fn pin(
        &'static self,
        range: Range<usize>,
        pin: Pin,
        rails: &[Arc<str>],
    ) -> Result<PinRecord, OrderError> {
        let mut books = self.books();
        let owner = books.owner(&range)?;
        books.next += 1;
        let number = books.next;
        let pins = match owner.and_then(|start| books.owned.get_mut(&start)) {
            Some((_, purpose, pins)) => {
                let holds = |rail: &&Arc<str>| {
                    let by = Pinner::Device(Arc::clone(rail));
                    pins.iter().any(|held| held.holds(&range) && held.pin.by == by)
                };
                let missing: Vec<_> =
                    rails.iter().filter(|rail| !holds(rail)).map(|rail| &**rail).collect();
                let held = pins.iter().any(|held| held.holds(&range));
                let first = !held || !missing.is_empty();
                if !pin.contract.is_long_term() && first {
                    return Err(OrderError::WeakerFirst {
                        purpose: *purpose,
                        start: range.start,
                        contract: pin.contract,
                        by: pin.by,
                        missing: if missing.is_empty() {
                            "any device".into()
                        } else {
                            missing.join(", ")
                        },
                    });
                }
                pins
            }
            None => books.given.entry((range.start, range.end)).or_default(),
        };
        pins.push(Entry { number, range: range.clone(), pin });
        Ok(PinRecord { ledger: self, range, number })
    }

    fn strike(&self, range: &Range<usize>, number: u64) {
        let mut books = self.books();
        books.taken.remove(&number);
        let key = (range.start, range.end);
        if let Some(pins) = books.given.get_mut(&key) {
            pins.retain(|held| held.number != number);
            if pins.is_empty() {
                books.given.remove(&key);
            }
        }
        if let Ok(Some(start)) = books.owner(range)
            && let Some((_, _, pins)) = books.owned.get_mut(&start)
        {
            pins.retain(|held| held.number != number);
        }
        books.tidy();
    }

    /// What the mapping of the plugin that holds a range is for; `None`: there is none.
    pub fn purpose(&self, range: Range<usize>) -> Option<Purpose> {
        let mut books = self.books();
        let start = books.owner(&range).ok()??;
        books.owned.get(&start).map(|(_, purpose, _)| *purpose)
    }

    /// What is recorded about any part of a range, a line each.
    pub fn describe(&self, range: Range<usize>) -> Vec<String> {
        let books = self.books();
        let line = |start: usize, end: usize, what: &dyn fmt::Display, pins: &Pins| {
            let pins: Vec<_> = pins.iter().map(|held| held.pin.to_string()).collect();
            format!("{} bytes at {start:#x} ({what}): {}", end - start, pins.join("; "))
        };
        let owned = books
            .owned
            .range(..range.end)
            .filter(|(_, (end, ..))| *end > range.start)
            .map(|(start, (end, purpose, pins))| line(*start, *end, purpose, pins));
        let given = books
            .given
            .range(..(range.end, 0))
            .filter(|((_, end), _)| *end > range.start)
            .map(|((start, end), pins)| line(*start, *end, &"given", pins));
        owned.chain(given).collect()
    }

    /// Every mapping of the plugin, by ascending address.
    pub fn owned(&self) -> Vec<(Range<usize>, Purpose)> {
        let books = self.books();
        books.owned.iter().map(|(start, (end, purpose, _))| (*start..*end, *purpose)).collect()
    }

    /// Every range of somebody else's memory that devices hold, by ascending address; ranges may overlap.
    pub fn given(&self) -> Vec<Range<usize>> {
        let books = self.books();
        let held = |pins: &Pins| pins.iter().any(|held| matches!(held.pin.by, Pinner::Device(_)));
        let ranges = books.given.iter().filter(|(_, pins)| held(pins));
        ranges.map(|((start, end), _)| *start..*end).collect()
    }

    /// Mappings of the plugin that a device holds by now and whose treatment by a fork nobody but the verbs library
    /// decides, each with the number of a pin.
    pub fn registered_own(&self) -> Vec<(Range<usize>, u64)> {
        let books = self.books();
        let first = |pins: &Pins| {
            pins.iter().map(|held| held.number).find(|number| books.taken.contains(number))
        };
        let mappings = books.owned.iter();
        mappings
            .filter(|(_, (_, purpose, _))| {
                !matches!(purpose, Purpose::Application | Purpose::BounceArena)
            })
            .filter_map(|(start, (end, _, pins))| Some((*start..*end, first(pins)?)))
            .collect()
    }

    /// Bytes in whole pages that registrations of this process hold, counted as the kernel counts them for the quota:
    /// each registration by itself, host memory only.
    pub fn pinned_bytes(&self) -> u64 {
        let books = self.books();
        let owned = books.owned.values().flat_map(|(_, _, pins)| pins);
        let given = books.given.values().flatten();
        let counted = owned.chain(given).filter(|held| held.pin.counts);
        counted.map(|held| held.range.len() as u64).sum()
    }
}

impl PinRecord {
    /// What was asked for was given: from here on whoever looks finds the memory held.
    pub fn taken(&self) {
        self.ledger.books().taken.insert(self.number);
    }
}

impl Drop for PinRecord {
    fn drop(&mut self) {
        self.ledger.strike(&self.range, self.number);
    }
}

#[cfg(test)]
mod tests;
