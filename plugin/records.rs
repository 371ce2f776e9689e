//! Files for events that somebody will want to read when the process is gone: one JSON document each, in a folder of
//! the user's choice.

use crate::host::limits;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use serde_json::Value;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Where records of one kind go.
#[derive(Debug, Default)]
pub struct Records {
    folder: Option<PathBuf>,
    complained: AtomicBool,
}

impl Records {
    /// Into this folder; `None`: nowhere.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, complained: AtomicBool::new(false) }
    }

    /// Whether any are written.
    pub fn are_wanted(&self) -> bool {
        self.folder.is_some()
    }

    /// Writes a record as `pinrail-<kind>-<host>-<pid>-<number>.json`, with the next free number from `number` on, and
    /// returns its path; `None`: none is wanted, or it cannot be written. The first that cannot is a warning, and nothing
    /// else comes of it.
    pub fn write(&self, kind: &str, number: u32, record: &Value) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?;
        let mut text = format!("{record:#}");
        text.push('\n');
        let pid = std::process::id();
        let name = |n: u32| format!("pinrail-{kind}-{}-{pid}-{n}.json", hostname());
        match write_new(folder, name, number, text.as_bytes()) {
            Ok(name) => Some(folder.join(name)),
            Err(error) => {
                if !self.complained.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "no {kind} record can be written in {} (PINRAIL_REPORT_DIR): {error}",
                        folder.display()
                    );
                }
                None
            }
        }
    }
}

/// The name of the host as part of a file name.
pub fn hostname() -> String {
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = name.chars().take(64).map(plain).collect();
    if name.is_empty() { "unknown".into() } else { name }
}

/// Writes a new file that nobody sees before it is whole, under the first free of the names from `number` on. Follows
/// no link and replaces nothing.
fn write_new(
    folder: &Path,
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
