//! What this process has registered, where another process can read it: `pinrail forks` tells by it which registration
//! keeps a page from forked children.
//!
//! The file is there from the first registration to the last and leaves with it; nothing else of the plugin depends on
//! it. A forked child, whose registrations are its parent's, neither writes nor removes it.

#[deny(unsafe_code)]
pub mod layout;
#[deny(unsafe_code)]
pub mod reader;
mod shared;
#[deny(unsafe_code)]
pub mod stale;
#[deny(unsafe_code)]
mod table;

pub use layout::{Kind, Record};
pub use reader::Inventory;

use crate::config::Folder;
use layout::record;
use std::fmt::{self, Display, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use table::{Content, Table};

/// Where the files are unless the settings say otherwise.
pub const FOLDER: &str = "/dev/shm";

/// Where this process's file goes.
#[derive(Debug)]
enum Place {
    Usual,
    Other(PathBuf),
    Off,
}

#[derive(Debug)]
struct State {
    place: Place,
    table: Option<Table>,
    /// Registrations so far.
    number: u64,
    /// It was tried and told; it is not tried again.
    failed: bool,
}

static STATE: Mutex<State> =
    Mutex::new(State { place: Place::Usual, table: None, number: 0, failed: false });

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

/// Takes over the settings. A file that is there stays where it is.
pub fn configure(folder: &Folder) {
    let Some(mut state) = state() else { return };
    state.place = match folder.path() {
        None => Place::Off,
        Some(path) if path == Path::new(FOLDER) => Place::Usual,
        Some(path) => Place::Other(path.to_owned()),
    };
    state.failed = false;
}

/// A registration in the inventory. Struck out when dropped, after the registration has ended.
#[derive(Debug, Default)]
pub struct Entry(Option<Listed>);

#[derive(Debug)]
struct Listed {
    /// The record; `None`: there was no room.
    record: Option<usize>,
}

/// Text of bounded length that never allocates more than once.
struct Site(String);

impl Site {
    const ROOM: usize = 16 * size_of::<u64>();

    fn words(site: impl Display) -> [u64; 16] {
        let mut text = Self(String::with_capacity(Self::ROOM));
        // Full is an error to `write!` and no matter here.
        let _ = write!(text, "{site}");
        layout::text(&text.0)
    }
}

impl Write for Site {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = Self::ROOM - self.0.len();
        let fits =
            text.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= room);
        let fits = fits.last().unwrap_or(0);
        self.0.push_str(&text[..fits]);
        if fits < text.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

fn wide(range: &Range<usize>) -> Range<u64> {
    range.start as u64..range.end as u64
}

impl Entry {
    /// Enters a registration of `range` with a device, for which somebody asked for `asked`. A failure to make the file
    /// is one line in the log and nothing else.
    pub fn new(
        device: &str,
        kind: Kind,
        range: Range<usize>,
        asked: Range<usize>,
        site: impl Display,
    ) -> Self {
        let Some(mut state) = state() else { return Self::default() };
        let (entry, failure) = state.enter(|number| Content {
            kind,
            range: wide(&range),
            asked: wide(&asked),
            // Given memory is asked for by whoever signs the entry.
            requests: u64::from(kind == Kind::Own),
            number,
            device: layout::text(device),
            site: Site::words(site),
        });
        drop(state);
        if let Some(reason) = failure {
            tracing::info!(
                "`pinrail forks` will not know the registrations of this process: {reason} (PINRAIL_INVENTORY)"
            );
        }
        entry
    }

    /// Notes that somebody asked for a range that this registration serves. The first says what it is and who asked.
    pub fn asked_by(&self, kind: Kind, asked: &Range<usize>, site: impl Display) {
        let Self(Some(Listed { record: Some(index) })) = self else { return };
        let Some(state) = state() else { return };
        let Some(table) = &state.table else { return };
        let (start, end, requests) = table.asked(*index);
        if requests == 0 {
            let mut words = vec![
                (record::KIND, kind.word()),
                (record::ASKED, asked.start as u64),
                (record::ASKED_END, asked.end as u64),
                (record::REQUESTS, 1),
            ];
            words.extend(record::SITE.zip(Site::words(site)));
            table.change(*index, &words);
        } else {
            table.change(
                *index,
                &[
                    (record::ASKED, start.min(asked.start as u64)),
                    (record::ASKED_END, end.max(asked.end as u64)),
                    (record::REQUESTS, requests.saturating_add(1)),
                ],
            );
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let Some(Listed { record }) = self.0.take() else { return };
        let Some(mut state) = state() else { return };
        let Some(table) = &mut state.table else { return };
        table.strike(record);
        if table.is_empty() {
            // While the lock is held: the next one makes the file again.
            state.table = None;
        }
    }
}

impl State {
    /// The entry, and why there is none if that is to be told.
    fn enter(&mut self, content: impl FnOnce(u64) -> Content) -> (Entry, Option<String>) {
        let folder = match &self.place {
            Place::Off => return (Entry::default(), None),
            Place::Usual => Path::new(FOLDER),
            Place::Other(path) => path,
        };
        let table = match &mut self.table {
            Some(table) => table,
            None if self.failed => return (Entry::default(), None),
            none => match Table::create(folder) {
                Ok(table) => none.insert(table),
                Err(reason) => {
                    self.failed = true;
                    return (Entry::default(), Some(reason));
                }
            },
        };
        self.number += 1;
        (Entry(Some(Listed { record: table.enter(&content(self.number)) })), None)
    }
}

#[cfg(test)]
mod tests;
