//! A process we reach: its region, its liveness and its event pipes.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::fabric::{Fabric, process_runs};
use super::layout::{PipeSlot, REGION_MAGIC, REGION_VERSION};
use super::mapping::Mapping;
use super::region::Region;
use crate::sync::lock;

/// Why a peer cannot be reached.
#[derive(Debug)]
pub enum Unreachable {
    /// No such process, or it is gone.
    Gone,
    /// The kernel refuses access to its memory.
    Refused(io::Error),
}

/// A connected process; ourselves included.
#[derive(Debug)]
pub struct Peer {
    /// Identity in the fabric.
    pub id: u32,
    /// Process id.
    pub pid: i32,
    /// Whether it is our own process.
    pub local: bool,
    /// Its region.
    pub region: Arc<Region>,
    start: u64,
    pidfd: Option<OwnedFd>,
    dead: AtomicBool,
    pipes: Mutex<HashMap<u64, OwnedFd>>,
    /// Mappings of the peer's dma-bufs by MR key and offset.
    windows: Mutex<HashMap<u32, Arc<Mapping>>>,
}

fn pidfd_open(pid: i32) -> Option<OwnedFd> {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the descriptor was just created and nobody else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Peer {
    /// Our own process as a peer, for loopback.
    pub fn own(id: u32, region: Arc<Region>) -> Self {
        let pid = std::process::id().cast_signed();
        Self::with(id, pid, 0, true, region, None)
    }

    fn with(
        id: u32,
        pid: i32,
        start: u64,
        local: bool,
        region: Arc<Region>,
        pidfd: Option<OwnedFd>,
    ) -> Self {
        Self {
            id,
            pid,
            local,
            region,
            start,
            pidfd,
            dead: AtomicBool::new(false),
            pipes: Mutex::new(HashMap::new()),
            windows: Mutex::new(HashMap::new()),
        }
    }

    /// Attaches to the process in a directory slot and proves that its memory can be read.
    pub fn attach(fabric: &Fabric, slot: u32) -> Result<Self, Unreachable> {
        let record = fabric.record(slot as usize).ok_or(Unreachable::Gone)?;
        if !record.same_pidns {
            let why = "the peer runs in another pid namespace (another container)";
            return Err(Unreachable::Refused(io::Error::other(why)));
        }
        let pidfd = pidfd_open(record.pid);
        // Checked after the pidfd exists: from here on the pidfd stands for this very process.
        if !process_runs(record.pid, record.start) {
            return Err(Unreachable::Gone);
        }
        let refused = |error: io::Error| {
            if process_runs(record.pid, record.start) {
                Unreachable::Refused(error)
            } else {
                Unreachable::Gone
            }
        };
        let path = format!("/proc/{}/fd/{}", record.pid, record.fd);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(path)
            .map_err(refused)?;
        let region = Region::attach(&file).map_err(refused)?;
        let header = region.header();
        let valid = header.magic.load(Ordering::Acquire) == REGION_MAGIC
            && header.version.load(Ordering::Relaxed) == REGION_VERSION
            && header.nonce.load(Ordering::Relaxed) == record.nonce;
        if !valid {
            // The directory slot and the descriptor belong to different lives of the process.
            return Err(Unreachable::Gone);
        }
        let probe = header.probe.load(Ordering::Relaxed);
        let mut word = [0_u8; 8];
        crate::mover::probe(record.pid, probe, &mut word).map_err(refused)?;
        if u64::from_ne_bytes(word) != record.nonce {
            return Err(Unreachable::Refused(io::Error::other(
                "the probe word of the peer differs",
            )));
        }
        Ok(Self::with(record.id, record.pid, record.start, false, Arc::new(region), pidfd))
    }

    /// Marks the peer dead after a system call said so.
    pub fn mark_dead(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    /// Whether the peer is known to be dead; costs a load.
    pub fn known_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Asks the kernel whether the peer still runs.
    pub fn runs(&self) -> bool {
        if self.local {
            return true;
        }
        if self.known_dead() {
            return false;
        }
        let runs = match &self.pidfd {
            Some(fd) => {
                let mut poll =
                    libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one valid pollfd; a zero timeout never blocks.
                unsafe { libc::poll(&raw mut poll, 1, 0) <= 0 }
            }
            None => process_runs(self.pid, self.start),
        };
        if !runs {
            self.mark_dead();
        }
        runs
    }

    /// Writes one record into a pipe of the peer; never blocks. A full pipe is already readable, so nothing is lost
    /// that its reader would still need to be woken for.
    pub fn signal(&self, slot: &PipeSlot, record: &[u8]) {
        let (fd, dev, ino) = (
            slot.fd.load(Ordering::Acquire),
            slot.dev.load(Ordering::Relaxed),
            slot.ino.load(Ordering::Relaxed),
        );
        if fd == 0 {
            return;
        }
        let mut pipes = lock(&self.pipes);
        let raw = if let Some(pipe) = pipes.get(&ino) {
            pipe.as_raw_fd()
        } else {
            // A descriptor number may have been reused in the peer: only a pipe with the published inode is used.
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
                .open(format!("/proc/{}/fd/{fd}", self.pid));
            let Ok(file) = file else { return };
            let Ok(meta) = file.metadata() else { return };
            if !meta.file_type().is_fifo() || meta.dev() != dev || meta.ino() != ino {
                return;
            }
            if pipes.len() >= 1024 {
                pipes.clear();
            }
            let pipe = OwnedFd::from(file);
            let raw = pipe.as_raw_fd();
            pipes.insert(ino, pipe);
            raw
        };
        // SAFETY: the record is a live slice and the descriptor stays in the locked map. We hold a read end too, so
        // the write cannot raise SIGPIPE.
        unsafe { libc::write(raw, record.as_ptr().cast(), record.len()) };
    }

    /// Maps a dma-buf of the peer that process_vm cannot reach: `fd` is its number in the peer.
    pub fn window(
        &self,
        key: u32,
        fd: u32,
        offset: u64,
        len: usize,
        write: bool,
    ) -> io::Result<Arc<Mapping>> {
        let mut windows = lock(&self.windows);
        if let Some(map) = windows.get(&key) {
            return Ok(Arc::clone(map));
        }
        let pidfd =
            self.pidfd.as_ref().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSYS))?;
        // SAFETY: a plain system call on a descriptor that `self` keeps open.
        let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0) };
        let copy = RawFd::try_from(copy)
            .ok()
            .filter(|fd| *fd >= 0)
            .ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the descriptor was just created and nobody else owns it.
        let copy = unsafe { OwnedFd::from_raw_fd(copy) };
        let map = Arc::new(Mapping::window(std::os::fd::AsFd::as_fd(&copy), offset, len, write)?);
        if windows.len() >= 256 {
            windows.clear();
        }
        windows.insert(key, Arc::clone(&map));
        Ok(map)
    }
}
