//! A forked child that looks which of its parent's memory it has.
//!
//! The child of a process with threads may do very little: a lock that another thread held stays held. So it is made by the
//! system call itself, which runs nobody's fork handlers; it makes system calls only, allocates nothing and returns nowhere.
//! Memory is read by the kernel on its behalf, which answers with an error where the child has none: it takes no signal,
//! and needs no handler. It sends no signal to its parent when it ends, and only who knows its number can reap it, so that
//! handlers and waits of the program never meet it.

use super::page::page_size;
use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{PipeReader, Read};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Addresses to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// The first.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// From one look to the next, a multiple of the page size.
    pub step: usize,
    /// Read a word there; else only ask whether anything is mapped.
    pub read: bool,
}

/// What a child saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// For each look that met one, its index and the first address where the child has nothing.
    pub holes: Vec<(usize, usize)>,
    /// Pages it looked at.
    pub pages: u64,
    /// Whether it came to the end in time.
    pub finished: bool,
}

/// One message of the child.
const RECORD: usize = 2 * size_of::<u64>();
/// In place of an index: the end was reached, or the time.
const FINISHED: u64 = u64::MAX;
const OUT_OF_TIME: u64 = u64::MAX - 1;
/// Looks between two looks at the clock.
const SPELL: u64 = 1024;

/// Forks a child that looks everywhere, for so long at most.
///
/// # Errors
/// No pipe or no process.
pub fn look(looks: &[Look], time: Duration) -> Result<Seen> {
    let fail = |what, e: std::io::Error| Error::io(what, &e);
    let (from, to) = std::io::pipe().map_err(|e| fail("pipe", e))?;
    let (clock, nanos) = (Instant::now(), u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    // SAFETY: a new process with a copy of everything; neither memory nor signal is shared, and no stack is given.
    let pid = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
    if pid == 0 {
        // SAFETY: this is the child.
        unsafe { child(looks, nanos, to.as_raw_fd()) };
    }
    if pid < 0 {
        return Err(fail("fork", std::io::Error::last_os_error()));
    }
    drop(to);
    let mut seen = hear(from, clock, time + Duration::from_secs(1));
    if !seen.finished {
        // SAFETY: our own child, not reaped yet, so that the number is still its own. It may have ended already.
        unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
    }
    loop {
        // SAFETY: our own child; no status is asked for.
        let waited =
            unsafe { libc::waitpid(pid as libc::pid_t, std::ptr::null_mut(), libc::__WALL) };
        let error = std::io::Error::last_os_error().raw_os_error();
        if waited >= 0 || error != Some(libc::EINTR) {
            break;
        }
    }
    seen.holes.sort_unstable();
    Ok(seen)
}

/// Reads what the child tells until it ends or the time is over.
fn hear(mut pipe: PipeReader, clock: Instant, time: Duration) -> Seen {
    let (mut seen, mut bytes) = (Seen::default(), [0; RECORD]);
    let mut filled = 0;
    loop {
        let Some(left) = time.checked_sub(clock.elapsed()) else { return seen };
        let Ok(left) = Timespec::try_from(left) else { return seen };
        match poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&left)) {
            Ok(0) => return seen,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return seen,
        }
        match pipe.read(&mut bytes[filled..]) {
            Ok(0) => return seen,
            Ok(count) => filled += count,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return seen,
        }
        if filled == RECORD {
            filled = 0;
            let word = |at: usize| {
                let mut word = [0; 8];
                word.copy_from_slice(&bytes[at..at + 8]);
                u64::from_ne_bytes(word)
            };
            match word(0) {
                end @ (FINISHED | OUT_OF_TIME) => {
                    (seen.finished, seen.pages) = (end == FINISHED, word(8));
                    return seen;
                }
                index => seen.holes.push((index as usize, word(8) as usize)),
            }
        }
    }
}

/// The life of the child.
///
/// # Safety
/// Called in the child only, which has a copy of what the arguments lead to.
unsafe fn child(looks: &[Look], nanos: u64, pipe: libc::c_int) -> ! {
    let (page, start, mut pages) = (page_size(), now(), 0_u64);
    let tell = |index: u64, value: u64| {
        let record = [index, value];
        // SAFETY: a local array of this size. A parent that does not listen is no matter any more.
        unsafe { libc::syscall(libc::SYS_write, pipe, record.as_ptr(), RECORD) };
    };
    let mut end = FINISHED;
    'all: for (index, look) in looks.iter().enumerate() {
        let mut at = look.start;
        while at < look.end {
            if !has(at, page, look.read) {
                tell(index as u64, at as u64);
                break;
            }
            pages = pages.wrapping_add(1);
            if pages.is_multiple_of(SPELL) && now().wrapping_sub(start) > nanos {
                end = OUT_OF_TIME;
                break 'all;
            }
            at = at.wrapping_add(look.step);
        }
    }
    tell(end, pages);
    loop {
        // SAFETY: ends this process at once.
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    }
}

/// Nanoseconds of a clock that only goes forward.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid out-pointer.
    unsafe { libc::syscall(libc::SYS_clock_gettime, libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// Whether this process has a page at an address.
fn has(at: usize, page: usize, read: bool) -> bool {
    let errno = || std::io::Error::last_os_error().raw_os_error();
    if read {
        // The kernel reads a set of signals there before it looks at the first argument, which means nothing.
        // SAFETY: no memory is written; an address that cannot be read is an error, not a signal.
        let done = unsafe {
            libc::syscall(libc::SYS_rt_sigprocmask, -1, at, std::ptr::null_mut::<u8>(), 8)
        };
        return done == 0 || errno() != Some(libc::EFAULT);
    }
    let mut resident = 0_u8;
    // SAFETY: an out-pointer for the one page asked about.
    let done = unsafe { libc::syscall(libc::SYS_mincore, at, page, &raw mut resident) };
    done == 0 || errno() != Some(libc::ENOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PageOwned;
    use crate::memory::ledger::Purpose;

    const TIME: Duration = Duration::from_secs(20);

    fn all_of(pages: &PageOwned, read: bool) -> Look {
        Look { start: pages.addr(), end: pages.addr() + pages.len(), step: page_size(), read }
    }

    #[test]
    fn the_child_has_what_is_not_kept_from_it() {
        let kept = PageOwned::new(3 * page_size(), Purpose::Probe).unwrap();
        let free = PageOwned::new(5 * page_size(), Purpose::Probe).unwrap();
        let heap = Box::new([7_u8; 100_000]);
        kept.keep_from_children().unwrap();
        let start = heap.as_ptr().addr().next_multiple_of(page_size());
        let heap = Look { start, end: start + page_size(), step: page_size(), read: true };
        for read in [true, false] {
            let looks = [heap, all_of(&kept, read), all_of(&free, read)];
            let seen = look(&looks, TIME).unwrap();
            let expected = Seen { holes: vec![(1, kept.addr())], pages: 6, finished: true };
            assert_eq!(seen, expected, "read: {read}");
        }
    }

    #[test]
    fn steps_are_kept() {
        let pages = PageOwned::new(7 * page_size(), Purpose::Probe).unwrap();
        let look_ = Look { step: 3 * page_size(), ..all_of(&pages, true) };
        assert_eq!(look(&[look_], TIME).unwrap().pages, 3);
        assert_eq!(look(&[], TIME).unwrap(), Seen { finished: true, ..Seen::default() });
    }

    #[test]
    fn the_time_is_kept() {
        let pages = PageOwned::new(1, Purpose::Probe).unwrap();
        let looks = vec![all_of(&pages, true); 1 << 20];
        let seen = look(&looks, Duration::ZERO).unwrap();
        assert_eq!((seen.finished, seen.pages, seen.holes.len()), (false, SPELL, 0));
    }

    /// Who waits for any child does not meet this one, and nothing of it is left.
    #[test]
    fn nobody_else_reaps_it() {
        look(&[], TIME).unwrap();
        let mut status = 0;
        // SAFETY: a valid out-pointer.
        let any = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WCLONE) };
        assert!(any <= 0, "a child was left: {any}");
    }
}
