//! Telling a diagnosis: one line in the log, one file for each event.

use super::report::Report;
use super::verdict::Cause;
use crate::config::Settings;
use crate::host::limits;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Files that one process writes; a job that fails for ever must not fill a disk.
const MOST_FILES: u32 = 64;
/// Files for one cause and kind of outcome: what is harmless must not use up the room of what ends a job.
const MOST_ALIKE: u32 = 16;
/// Pairs of cause and device that are remembered. Beyond them nothing is told at WARN.
const MOST_TOLD: usize = 256;

/// What comes of a failed registration: one clause without a full stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The caller gets what it asked for in another way.
    GoesOn(String),
    /// The caller gets an error.
    Fails(String),
}

impl Outcome {
    /// Whether something fails, and the clause.
    fn parts(&self) -> (bool, &str) {
        match self {
            Self::GoesOn(what) => (false, what),
            Self::Fails(what) => (true, what),
        }
    }
}

/// Tells diagnoses. One for the whole process.
#[derive(Debug, Default)]
pub struct Reporter {
    folder: Option<PathBuf>,
    files: Mutex<Files>,
    complained: AtomicBool,
    told: Mutex<HashSet<(Cause, bool, String)>>,
}

/// How many files were written, or tried.
#[derive(Debug, Default)]
struct Files {
    all: u32,
    alike: HashMap<(Cause, bool), u32>,
}

impl Files {
    /// The number of the next file; `None`: there are enough.
    fn next(&mut self, cause: Cause, fails: bool) -> Option<u32> {
        let alike = self.alike.entry((cause, fails)).or_default();
        if self.all >= MOST_FILES || *alike >= MOST_ALIKE {
            return None;
        }
        *alike += 1;
        self.all += 1;
        Some(self.all - 1)
    }
}

impl Reporter {
    /// One that writes where the settings say.
    pub fn from_settings(settings: &Settings) -> Self {
        Self { folder: settings.report_dir.clone(), ..Self::default() }
    }

    /// Writes the record and one line in the log, with what the plugin does about it. The first line about a cause on a
    /// device is a warning, and so is the first after which something fails; later ones are for debugging. Returns
    /// whether it was told as a warning. A record that cannot be written is one warning and nothing else.
    pub fn tell(&self, report: &Report, outcome: &Outcome) -> bool {
        let verdict = report.verdict();
        let (cause, confidence) = (verdict.cause.word(), verdict.confidence.word());
        let errno = report.failure().errno;
        let (fails, meanwhile) = outcome.parts();
        let record = self.write(report, outcome);
        let record = record.as_ref().map_or_else(|| "none".into(), |path| path.to_string_lossy());
        let text =
            format!("{}. Meanwhile: {meanwhile}. Asked for: {}", report.line(), report.asked());
        let first = self.is_first(verdict.cause, fails, &report.failure().device);
        if first {
            tracing::warn!(cause, confidence, errno, %record, "{text}");
        } else {
            tracing::debug!(cause, confidence, errno, %record, "{text}");
        }
        first
    }

    /// Whether it was told of this device that memory lies where it cannot be pinned. What else there is to say about
    /// another buffer of that kind is not worth long searches: there may be hundreds.
    pub fn knows(&self, device: &str) -> bool {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.iter().any(|(cause, _, known)| *cause == Cause::Placement && known == device)
    }

    /// Whether nothing was told yet about this cause and kind of outcome on this device.
    fn is_first(&self, cause: Cause, fails: bool, device: &str) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.len() < MOST_TOLD && told.insert((cause, fails, device.to_owned()))
    }

    /// Writes the record; `None`: none is wanted, enough were written, or it cannot be.
    fn write(&self, report: &Report, outcome: &Outcome) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?;
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let (fails, what) = outcome.parts();
        let number = files.next(report.verdict().cause, fails)?;
        drop(files);
        let mut record = report.json();
        record["outcome"] = json!({ "fails": fails, "what": what });
        let mut text = format!("{record:#}");
        text.push('\n');
        let pid = std::process::id();
        let name = |n: u32| format!("pinrail-registration-{}-{pid}-{n}.json", hostname());
        match write_new(folder, name, number, text.as_bytes()) {
            Ok(name) => Some(folder.join(name)),
            Err(error) => {
                if !self.complained.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "no record of failed registrations in {} (PINRAIL_REPORT_DIR): {error}",
                        folder.display()
                    );
                }
                None
            }
        }
    }
}

/// The name of the host as part of a file name.
pub(super) fn hostname() -> String {
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = name.chars().take(64).map(plain).collect();
    if name.is_empty() { "unknown".into() } else { name }
}

/// Writes a new file that nobody sees before it is whole, under the first free of the names from `number` on. Follows
/// no link and replaces nothing.
fn write_new(
    folder: &PathBuf,
    name: impl Fn(u32) -> String,
    number: u32,
    bytes: &[u8],
) -> io::Result<String> {
    // Numbers of an earlier load of the library in this process, or of a process that had this pid before.
    const ATTEMPTS: u32 = 1024;
    // A longer file would end the process by a signal.
    if !limits::file_size().allows(bytes.len() as u64) {
        return Err(Errno::FBIG.into());
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(CWD, folder, flags, Mode::empty())?;
    let folder = folder.as_fd();
    let mut numbers = number..number.saturating_add(ATTEMPTS);
    let temporary = numbers.find_map(|number| {
        match Temporary::new(folder, format!(".{}.tmp", name(number)), bytes) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
            result => Some(result.map(|temporary| (number, temporary))),
        }
    });
    let (number, temporary) = temporary.unwrap_or_else(|| Err(Errno::EXIST.into()))?;
    for number in number..number.saturating_add(ATTEMPTS) {
        let name = name(number);
        match temporary.publish(&name) {
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
            Ok(()) => return Ok(name),
        }
    }
    Err(Errno::EXIST.into())
}

/// A file under a name that nobody looks for; removed with the value if it is still there.
struct Temporary<'a> {
    folder: BorrowedFd<'a>,
    name: String,
}

impl<'a> Temporary<'a> {
    fn new(folder: BorrowedFd<'a>, name: String, bytes: &[u8]) -> io::Result<Self> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(folder, &*name, flags, Mode::RUSR | Mode::WUSR)?;
        let temporary = Self { folder, name };
        File::from(file).write_all(bytes)?;
        Ok(temporary)
    }

    /// Gives the file its name, unless that is taken.
    fn publish(&self, name: &str) -> Result<(), Errno> {
        let (folder, old) = (self.folder, &*self.name);
        match rustix::fs::renameat_with(folder, old, folder, name, RenameFlags::NOREPLACE) {
            // Network file systems know links only.
            Err(Errno::INVAL | Errno::NOSYS) => {
                rustix::fs::linkat(folder, old, folder, name, AtFlags::empty())
            }
            result => result,
        }
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // After a rename it is gone, which is right.
        let _ = rustix::fs::unlinkat(self.folder, &*self.name, AtFlags::empty());
    }
}
