//! File descriptors: whether the process can have more, and how many of them are the plugin's.
//!
//! A shortage shows in the strangest places, as a device that is not there or a library that cannot be read. So what
//! needs several looks first whether they are to be had.

use super::limits;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Descriptors that opening a device takes at a time, with what the library reads to find it.
pub const FOR_A_DEVICE: usize = 8;
/// Descriptors that accepting a connection takes at a time: files about the port, and the event thread's two.
pub const FOR_A_CONNECTION: usize = 4;

/// Of this plugin.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// Says that the plugin holds some descriptors, as long as it lives.
#[derive(Debug)]
pub struct Held(usize);

impl Held {
    /// So many.
    pub fn new(count: usize) -> Self {
        HELD.fetch_add(count, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        HELD.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Whether the process can have `count` more at this moment.
///
/// # Errors
/// EMFILE or ENFILE: it cannot.
pub fn spare(count: usize) -> io::Result<()> {
    let made: rustix::io::Result<Vec<_>> =
        (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect();
    Ok(made.map(drop)?)
}

/// Whether this errno says that there are no descriptors left, which passes when somebody closes some.
pub fn is_shortage(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::EMFILE | libc::ENFILE))
}

/// What an errno that says so means, and what helps. `None`: it says something else.
pub fn shortage(errno: i32) -> Option<String> {
    let held = HELD.load(Ordering::Relaxed);
    match errno {
        libc::EMFILE => Some(format!(
            "the process has as many descriptors as it may (RLIMIT_NOFILE: {}), {held} of them pinrail's; raise the limit \
             (ulimit -n, LimitNOFILE=) or close others",
            limits::nofile()
        )),
        libc::ENFILE => Some(format!(
            "the machine has no descriptors left, {held} are pinrail's in this process; raise fs.file-max"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_counted() {
        let held = Held::new(5);
        assert!(HELD.load(Ordering::Relaxed) >= 5);
        let text = shortage(libc::EMFILE).unwrap();
        assert!(text.contains("RLIMIT_NOFILE: soft") && text.contains("ulimit -n"), "{text}");
        drop(held);
        assert!(shortage(libc::ENFILE).unwrap().contains("fs.file-max"));
        assert_eq!(shortage(libc::ENOMEM), None);
    }

    #[test]
    fn a_few_can_be_had_here_and_more_than_there_are_cannot() {
        spare(FOR_A_DEVICE).unwrap();
        if let Some(limit) = limits::nofile().soft.filter(|limit| *limit < 1 << 16) {
            let refused = spare(usize::try_from(limit).unwrap() + 1).unwrap_err();
            assert!(is_shortage(refused.raw_os_error()), "{refused}");
        }
        assert!(!is_shortage(None) && is_shortage(Some(libc::ENFILE)));
    }
}
