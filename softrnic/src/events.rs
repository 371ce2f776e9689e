//! Event pipes and acknowledgement counts.
//!
//! An event is a record in a pipe whose read end the application may poll. Records are small enough to be written
//! atomically; a reader treats what it reads as untrusted numbers and looks them up in its own tables.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::shm::layout::PipeSlot;
use crate::sync::lock;

/// Bytes of a record.
pub const RECORD: usize = 16;

/// Builds a record: what happened, to which index, of which generation.
pub fn record(kind: u32, index: u32, generation: u32) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    bytes[..4].copy_from_slice(&kind.to_ne_bytes());
    bytes[4..8].copy_from_slice(&index.to_ne_bytes());
    bytes[8..12].copy_from_slice(&generation.to_ne_bytes());
    bytes
}

/// A pipe, published in a slot of our region.
///
/// Closed with the object it belongs to, not when the object's memory is freed: a destroyed object stays allocated for
/// a while, its descriptors must not.
#[derive(Debug)]
pub struct EventPipe {
    read: AtomicI32,
    write: AtomicI32,
}

impl Drop for EventPipe {
    fn drop(&mut self) {
        self.close();
    }
}

impl EventPipe {
    /// Creates the pipe. The read end blocks until the application makes it non-blocking; the write end never does.
    pub fn new() -> io::Result<Self> {
        let mut fds: [RawFd; 2] = [-1; 2];
        // SAFETY: the array has room for both descriptors.
        if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a plain system call on the descriptor just created.
        unsafe { libc::fcntl(fds[1], libc::F_SETFL, libc::O_NONBLOCK) };
        Ok(Self { read: AtomicI32::new(fds[0]), write: AtomicI32::new(fds[1]) })
    }

    /// Closes both ends.
    pub fn close(&self) {
        for end in [&self.read, &self.write] {
            let fd = end.swap(-1, Ordering::AcqRel);
            if fd >= 0 {
                // SAFETY: this object owned the descriptor, and the swap gave it to this call alone.
                unsafe { libc::close(fd) };
            }
        }
    }

    /// The descriptor for the application.
    pub fn read_fd(&self) -> RawFd {
        self.read.load(Ordering::Acquire)
    }

    /// Lets peers find the pipe.
    pub fn publish(&self, slot: &PipeSlot) -> io::Result<()> {
        let fd = self.write.load(Ordering::Acquire);
        // SAFETY: the descriptor is open as long as this object is not closed, and it is only borrowed here.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let meta = std::fs::File::from(borrowed.try_clone_to_owned()?).metadata()?;
        slot.dev.store(meta.dev(), Ordering::Relaxed);
        slot.ino.store(meta.ino(), Ordering::Relaxed);
        slot.fd.store(fd.cast_unsigned(), Ordering::Release);
        Ok(())
    }

    /// Reads one record; blocks if the application left the descriptor blocking.
    pub fn next(&self) -> io::Result<(u32, u32, u32)> {
        let mut bytes = [0_u8; RECORD];
        // SAFETY: the buffer is RECORD bytes long.
        let n = unsafe {
            libc::read(self.read.load(Ordering::Acquire), bytes.as_mut_ptr().cast(), RECORD)
        };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        if n.cast_unsigned() != RECORD {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let word = |o: usize| u32::from_ne_bytes(std::array::from_fn(|i| bytes[o + i]));
        Ok((word(0), word(4), word(8)))
    }
}

/// Events handed out and acknowledged: destroying an object waits until both are equal.
#[derive(Debug, Default)]
pub struct Acks {
    counts: Mutex<(u64, u64)>,
    changed: Condvar,
}

impl Acks {
    /// An event was handed to the application.
    pub fn delivered(&self) {
        lock(&self.counts).0 += 1;
    }

    /// The application acknowledged `n` events.
    pub fn acked(&self, n: u32) {
        let mut counts = lock(&self.counts);
        counts.1 = (counts.1 + u64::from(n)).min(counts.0);
        self.changed.notify_all();
    }

    /// Blocks until everything handed out is acknowledged, as the verbs contract demands.
    pub fn drain(&self) {
        let mut counts = lock(&self.counts);
        while counts.0 > counts.1 {
            counts = self.changed.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
