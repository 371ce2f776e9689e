//! The fabric directory: which processes share this fabric.
//!
//! A small file in shared memory, named by user and fabric. A process claims a slot under a file lock that the
//! kernel drops with the process. A slot names its owner by pid *and* start time, so a reused pid is not mistaken
//! for the old process, and an unreaped dead process counts as dead. Whoever joins sweeps dead slots, which is all
//! the recovery that a `kill -9` needs: the regions themselves are memfds and vanish with their owner.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::lock::RobustLock;
use super::mapping::{Mapping, Shared};

const MAGIC: u64 = 0x736f_6674_6661_6272;
const VERSION: u32 = 1;
const SLOTS: usize = 256;
/// Atomic locks, one per device ordinal.
const LOCKS: usize = 64;

#[repr(C)]
#[derive(Debug)]
struct Head {
    magic: AtomicU64,
    version: AtomicU32,
    _pad: AtomicU32,
    atomics: [super::layout::Line<RobustLock>; LOCKS],
}

/// One process.
#[repr(C, align(64))]
#[derive(Debug)]
struct ProcSlot {
    pid: AtomicU32,
    generation: AtomicU32,
    start: AtomicU64,
    nonce: AtomicU64,
    pidns: AtomicU64,
    fd: AtomicU32,
    _pad: AtomicU32,
}

// SAFETY: atomics only.
unsafe impl Shared for Head {}
// SAFETY: atomics only.
unsafe impl Shared for ProcSlot {}

const SLOT_OFF: usize = size_of::<Head>().next_multiple_of(4096);
const LEN: usize = SLOT_OFF + SLOTS * size_of::<ProcSlot>();

/// What a slot says about its process; a plain copy.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Process id.
    pub pid: i32,
    /// Start time in clock ticks after boot.
    pub start: u64,
    /// Random number of the region.
    pub nonce: u64,
    /// Descriptor of the region in that process.
    pub fd: u32,
    /// Identity: generation << 8 | slot.
    pub id: u32,
    /// Whether the process lives in our pid namespace.
    pub same_pidns: bool,
}

/// Membership in a fabric.
#[derive(Debug)]
pub struct Fabric {
    map: Mapping,
    path: PathBuf,
    ino: u64,
    pidns: u64,
    /// Own identity: generation << 8 | slot.
    pub id: u32,
}

/// State letter and start time from `/proc/<pid>/stat`.
fn proc_stat(pid: i32) -> Option<(u8, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name may contain anything; the fields start after its last parenthesis.
    let rest = text.get(text.rfind(')')? + 2..)?;
    let mut fields = rest.split(' ');
    let state = *fields.next()?.as_bytes().first()?;
    let start = fields.nth(18)?.parse().ok()?;
    Some((state, start))
}

/// Whether the process that started at `start` still runs under this pid.
pub fn process_runs(pid: i32, start: u64) -> bool {
    proc_stat(pid).is_some_and(|(state, s)| s == start && state != b'Z' && state != b'X')
}

fn directory() -> PathBuf {
    let shm = PathBuf::from("/dev/shm");
    if shm.is_dir() { shm } else { std::env::temp_dir() }
}

fn flock(file: &File, op: i32) -> io::Result<()> {
    loop {
        // SAFETY: a plain system call on a descriptor that `file` keeps open.
        if unsafe { libc::flock(file.as_raw_fd(), op) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// The directory file, locked. Unlocks explicitly: a child forked meanwhile shares the open file and would otherwise
/// keep the lock.
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing releases the lock as well, unless a fork shares it; there is nothing to do about a failure.
        let _ = flock(&self.0, libc::LOCK_UN);
    }
}

/// Opens and locks the directory file; retries if somebody unlinked it in between.
fn open_locked(path: &PathBuf, create: bool) -> io::Result<Locked> {
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(create)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(path)?;
        flock(&file, libc::LOCK_EX)?;
        let file = Locked(file);
        let ours = file.0.metadata()?;
        // SAFETY: no arguments, no failure.
        let uid = unsafe { libc::geteuid() };
        if ours.uid() != uid || ours.mode() & 0o077 != 0 || !ours.is_file() {
            return Err(io::Error::other(
                "the fabric file belongs to somebody else or is not private",
            ));
        }
        match std::fs::symlink_metadata(path) {
            Ok(there) if there.ino() == ours.ino() && there.dev() == ours.dev() => return Ok(file),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound && create => {}
            Err(error) => return Err(error),
        }
    }
}

impl Fabric {
    /// Joins the fabric: claims a slot and publishes the region's descriptor and nonce in it.
    pub fn join(name: &str, fd: u32, nonce: u64) -> io::Result<Self> {
        // SAFETY: no arguments, no failure.
        let uid = unsafe { libc::geteuid() };
        let path = directory().join(format!("softrnic.{uid}.{name}"));
        let pid = std::process::id();
        let start = proc_stat(pid.cast_signed()).map_or(0, |(_, start)| start);
        let pidns = std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino());
        loop {
            let file = open_locked(&path, true)?;
            let meta = file.0.metadata()?;
            if meta.len() == 0 {
                file.0.set_len(LEN as u64)?;
            }
            let usable = meta.len() == 0 || meta.len() == LEN as u64;
            if usable {
                let map = Mapping::shared(file.0.as_fd(), LEN)?;
                let mut fabric = Self { map, path: path.clone(), ino: meta.ino(), pidns, id: 0 };
                if fabric.prepare(meta.len() == 0) {
                    let record = Record {
                        pid: pid.cast_signed(),
                        start,
                        nonce,
                        fd,
                        id: 0,
                        same_pidns: true,
                    };
                    fabric.id = fabric.claim(record)?;
                    return Ok(fabric);
                }
            }
            // Left by another version or damaged. Whoever still uses it keeps its own mapping.
            eprintln!(
                "softrnic: WARN {} is not a fabric of this version; starting afresh",
                path.display()
            );
            std::fs::remove_file(&path)?;
        }
    }

    fn head(&self) -> Option<&Head> {
        self.map.view(0)
    }

    fn slot(&self, slot: usize) -> Option<&ProcSlot> {
        if slot >= SLOTS {
            return None;
        }
        self.map.view(SLOT_OFF + slot * size_of::<ProcSlot>())
    }

    fn prepare(&self, fresh: bool) -> bool {
        let Some(head) = self.head() else { return false };
        // A creator that died before this point left an all-zero file of full length: that is a fresh one too.
        if fresh || head.magic.load(Ordering::Acquire) == 0 {
            head.version.store(VERSION, Ordering::Relaxed);
            head.magic.store(MAGIC, Ordering::Release);
        }
        head.magic.load(Ordering::Acquire) == MAGIC
            && head.version.load(Ordering::Relaxed) == VERSION
    }

    fn claim(&self, mine: Record) -> io::Result<u32> {
        let mut free = None;
        for index in (1..SLOTS).rev() {
            let Some(record) = self.record(index) else {
                free = Some(index);
                continue;
            };
            let own_past =
                record.pid == mine.pid && record.start == mine.start && record.fd == mine.fd;
            if own_past || (record.same_pidns && !process_runs(record.pid, record.start)) {
                if let Some(slot) = self.slot(index) {
                    slot.pid.store(0, Ordering::Release);
                }
                free = Some(index);
            }
        }
        let full = || io::Error::other("all 255 process slots of this fabric are in use");
        let index = free.ok_or_else(full)?;
        let slot = self.slot(index).ok_or_else(full)?;
        let generation = (slot.generation.load(Ordering::Relaxed) + 1) & 0x00ff_ffff;
        let generation = generation.max(1);
        slot.generation.store(generation, Ordering::Relaxed);
        slot.start.store(mine.start, Ordering::Relaxed);
        slot.nonce.store(mine.nonce, Ordering::Relaxed);
        slot.pidns.store(self.pidns, Ordering::Relaxed);
        slot.fd.store(mine.fd, Ordering::Relaxed);
        // Publishes the slot; readers load the pid with Acquire.
        slot.pid.store(mine.pid.cast_unsigned(), Ordering::Release);
        Ok(generation << 8 | u32::try_from(index).unwrap_or(0))
    }

    /// The process in a slot; `None` if the slot is empty.
    pub fn record(&self, slot: usize) -> Option<Record> {
        let index = u32::try_from(slot).ok()?;
        let slot = self.slot(slot)?;
        let pid = slot.pid.load(Ordering::Acquire).cast_signed();
        if pid <= 0 {
            return None;
        }
        Some(Record {
            pid,
            start: slot.start.load(Ordering::Relaxed),
            nonce: slot.nonce.load(Ordering::Relaxed),
            fd: slot.fd.load(Ordering::Relaxed),
            id: (slot.generation.load(Ordering::Relaxed) & 0x00ff_ffff) << 8 | index,
            same_pidns: slot.pidns.load(Ordering::Relaxed) == self.pidns,
        })
    }

    /// Whether the process with this identity is still the slot's owner and runs.
    pub fn alive(&self, id: u32) -> bool {
        self.record((id & 0xff) as usize)
            .is_some_and(|r| r.id == id && (!r.same_pidns || process_runs(r.pid, r.start)))
    }

    /// The lock under which atomics on a device are performed.
    pub fn atomic_lock(&self, device: usize) -> Option<&RobustLock> {
        self.head().and_then(|h| h.atomics.get(device % LOCKS)).map(|line| &**line)
    }

    /// Leaves the fabric; the last one removes the file.
    pub fn leave(&self) {
        let Ok(file) = open_locked(&self.path, false) else { return };
        if file.0.metadata().map(|m| m.ino()).ok() != Some(self.ino) {
            return;
        }
        if let Some(slot) = self.slot((self.id & 0xff) as usize) {
            slot.pid.store(0, Ordering::Release);
        }
        let used = (1..SLOTS)
            .filter_map(|i| self.record(i))
            .any(|r| !r.same_pidns || process_runs(r.pid, r.start));
        if !used {
            // Failure only leaves an empty directory behind, which the next process sweeps.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_process_runs_and_a_wrong_start_time_does_not() {
        let pid = std::process::id().cast_signed();
        let (_, start) = proc_stat(pid).expect("own stat");
        assert!(process_runs(pid, start));
        assert!(!process_runs(pid, start + 1));
    }

    #[test]
    fn slots_are_distinct_and_the_last_leaver_removes_the_file() {
        let name = format!("unit-{}", std::process::id());
        let a = Fabric::join(&name, 100, 1).expect("join");
        let b = Fabric::join(&name, 101, 2).expect("join");
        assert_ne!(a.id & 0xff, b.id & 0xff);
        assert!(a.alive(b.id));
        b.leave();
        assert!(!a.alive(b.id));
        assert!(a.path.exists(), "one member is left");
        a.leave();
        assert!(!a.path.exists());
    }

    #[test]
    fn damaged_file_is_replaced() {
        let name = format!("unit-damaged-{}", std::process::id());
        // SAFETY: no arguments.
        let uid = unsafe { libc::geteuid() };
        let path = directory().join(format!("softrnic.{uid}.{name}"));
        OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&path)
            .expect("create");
        std::fs::write(&path, vec![0xee_u8; LEN]).expect("write");
        let fabric = Fabric::join(&name, 1, 1).expect("join over a damaged file");
        fabric.leave();
        assert!(!path.exists());
    }
}
