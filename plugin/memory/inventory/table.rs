//! The file that one process keeps, from its first registration to its last.

use super::layout::{self, FIRST, HEADER, Kind, LARGEST, RECORD, header, record};
use super::shared::Shared;
use super::stale;
use crate::host::process::ProcessId;
use crate::host::procfs::Proc;
use crate::sync::{Ordering, PUBLISH, fence};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, fallocate, fstat, open, statat, unlink,
};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

const WORD: usize = size_of::<u64>();

/// What is written into a record.
#[derive(Clone, Debug)]
pub struct Content {
    /// What was registered.
    pub kind: Kind,
    /// The addresses that are registered.
    pub range: Range<u64>,
    /// What was asked for.
    pub asked: Range<u64>,
    /// How often.
    pub requests: u64,
    /// The number of the registration.
    pub number: u64,
    /// The device.
    pub device: [u64; 8],
    /// Who asked.
    pub site: [u64; 16],
}

/// The file of this process. The descriptor is closed: a child that is forked has nothing of it but the mapping.
#[derive(Debug)]
pub struct Table {
    path: PathBuf,
    /// Device and inode: whether what the path names is still this file.
    file: (u64, u64),
    /// Parts of the file in its order: the first, and then each as large as all before it.
    parts: Vec<Shared>,
    /// Records that were ever used; those behind them are free.
    used: usize,
    free: Vec<usize>,
    live: u64,
    unlisted: u64,
    /// The file cannot grow any more.
    full: bool,
}

/// Removes a file that was not finished.
struct Unfinished<'a>(&'a Path);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        let _ = unlink(self.0);
    }
}

impl Table {
    /// A new file `pinrail.<pid>` in a folder, after those of dead processes were removed there.
    ///
    /// # Errors
    /// In words: it cannot be made, or there is one that belongs to somebody else.
    pub fn create(folder: &Path) -> Result<Self, String> {
        let me = ProcessId::own(&Proc::default()).ok_or("/proc does not show this process")?;
        stale::sweep(folder, &me);
        let path = folder.join(stale::name(me.pid));
        let say = |what: &str, errno: Errno| format!("{what} {}: {errno}", path.display());
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| say("creating", e))?;
        let unfinished = Unfinished(&path);
        let stat = fstat(&file).map_err(|e| say("fstat of", e))?;
        let first = grow(&file, 0..FIRST).map_err(|e| say("setting memory aside for", e))?;
        std::mem::forget(unfinished);
        let table = Self {
            file: (stat.st_dev, stat.st_ino),
            path,
            parts: vec![first],
            used: 0,
            free: Vec::new(),
            live: 0,
            unlisted: 0,
            full: false,
        };
        table.write_header(&me);
        Ok(table)
    }

    fn write_header(&self, me: &ProcessId) {
        let page = super::super::page::page_size() as u64;
        for (index, value) in [
            (header::VERSION, layout::VERSION),
            (header::PID, me.pid.into()),
            (header::START, me.start),
            (header::NAMESPACE, me.namespace),
            (header::BOOT, me.boot[0]),
            (header::BOOT + 1, me.boot[1]),
            (header::PAGE, page),
            (header::RECORD, RECORD as u64),
        ] {
            self.head(index, value);
        }
        self.count();
        self.parts[0].word(header::MAGIC).store(layout::MAGIC, PUBLISH);
    }

    fn head(&self, index: usize, value: u64) {
        self.parts[0].word(index).store(value, Ordering::Relaxed);
    }

    fn count(&self) {
        self.head(header::CAPACITY, self.capacity() as u64);
        self.head(header::LIVE, self.live);
        self.head(header::UNLISTED, self.unlisted);
    }

    /// Bytes of the file.
    fn len(&self) -> usize {
        FIRST << (self.parts.len() - 1)
    }

    fn capacity(&self) -> usize {
        (self.len() - HEADER) / RECORD
    }

    /// Whether no registration is live.
    pub fn is_empty(&self) -> bool {
        self.live + self.unlisted == 0
    }

    /// The part of the file with a record, and the number of its first word there.
    fn place(&self, index: usize) -> (&Shared, usize) {
        let at = HEADER + index * RECORD;
        let part = (at / FIRST).checked_ilog2().map_or(0, |log| log as usize + 1);
        let start = if part == 0 { 0 } else { FIRST << (part - 1) };
        (&self.parts[part], (at - start) / WORD)
    }

    /// Enters a registration. `None`: there is no room, which is counted.
    pub fn enter(&mut self, content: &Content) -> Option<usize> {
        let index = self.free.pop().or_else(|| {
            let more = self.used < self.capacity() || self.extend();
            more.then(|| {
                self.used += 1;
                self.used - 1
            })
        });
        match index {
            Some(index) => {
                self.write(index, Some(content));
                self.live += 1;
            }
            None => self.unlisted += 1,
        }
        self.count();
        index
    }

    /// Strikes a registration out.
    pub fn strike(&mut self, index: Option<usize>) {
        match index {
            Some(index) => {
                self.write(index, None);
                self.free.push(index);
                self.live -= 1;
            }
            None => self.unlisted -= 1,
        }
        self.count();
    }

    /// What the record says about requests: the first address, the first behind, and how many.
    pub fn asked(&self, index: usize) -> (u64, u64, u64) {
        let (part, first) = self.place(index);
        let field = |index: usize| part.word(first + index).load(Ordering::Relaxed);
        (field(record::ASKED), field(record::ASKED_END), field(record::REQUESTS))
    }

    /// Changes some words of a record.
    pub fn change(&self, index: usize, words: &[(usize, u64)]) {
        let (part, first) = self.place(index);
        let sequence = part.word(first + record::SEQUENCE);
        // Whoever sees a word of the new content sees the odd number, too.
        let number = sequence.load(Ordering::Relaxed).wrapping_add(1) | 1;
        sequence.store(number, Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, value) in words {
            part.word(first + word).store(*value, Ordering::Relaxed);
        }
        sequence.store(number.wrapping_add(1), PUBLISH);
    }

    fn write(&self, index: usize, content: Option<&Content>) {
        let Some(content) = content else { return self.change(index, &[(record::KIND, 0)]) };
        let mut words = vec![
            (record::KIND, content.kind.word()),
            (record::START, content.range.start),
            (record::END, content.range.end),
            (record::ASKED, content.asked.start),
            (record::ASKED_END, content.asked.end),
            (record::REQUESTS, content.requests),
            (record::NUMBER, content.number),
        ];
        words.extend(record::DEVICE.zip(content.device));
        words.extend(record::SITE.zip(content.site));
        self.change(index, &words);
    }

    /// Doubles the file. False: it stays as it is.
    fn extend(&mut self) -> bool {
        let len = self.len();
        if self.full || len >= LARGEST {
            return false;
        }
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let more = open(&self.path, flags, Mode::empty()).and_then(|file| {
            let stat = fstat(&file)?;
            if (stat.st_dev, stat.st_ino) != self.file {
                return Err(Errno::STALE);
            }
            grow(&file, len..2 * len)
        });
        match more {
            Ok(part) => self.parts.push(part),
            Err(errno) => {
                self.full = true;
                tracing::debug!("{} cannot grow: {errno}", self.path.display());
            }
        }
        !self.full
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let same = statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.file);
        if same && let Err(errno) = unlink(&self.path) {
            tracing::info!("{} cannot be removed: {errno}", self.path.display());
        }
    }
}

/// Memory for a range of the file, mapped.
fn grow(file: &OwnedFd, range: Range<usize>) -> rustix::io::Result<Shared> {
    // Beyond this limit the kernel would not only refuse but send a signal that ends the process.
    if getrlimit(Resource::Fsize).current.is_some_and(|most| most < range.end as u64) {
        return Err(Errno::FBIG);
    }
    // A full file system is an error here; without this it would be a bus error at the first access.
    loop {
        match fallocate(file, FallocateFlags::empty(), range.start as u64, range.len() as u64) {
            Err(Errno::INTR) => {}
            done => break done?,
        }
    }
    Shared::map(file.as_fd(), range.start, range.len())
}
