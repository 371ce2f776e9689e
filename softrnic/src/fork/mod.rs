//! What a registration does to forked children, by rdma-core's rules.
//!
//! A device writes into pages without asking the processor. On a kernel that shares pinned pages with a forked child until
//! somebody writes, that write would change the child's memory, or land in a page that the parent has left behind. The
//! library's answer, once armed, is to withhold every registered page from children, in whole pages, whatever else lies
//! on them. A kernel that copies pinned pages while forking makes this unnecessary, but an rdma-core before 51 does it
//! even there. [`Pair`] says which of these is presented; the marks themselves are real.
//!
//! Nothing here runs because of a fork. In a child of the process that armed the marks, every call is a no-op: the child
//! has holes where the ranges were, and the list may have been in the middle of a change.

mod kernel;
pub mod ranges;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, OnceLock};

use crate::env::settings;
use crate::ledger::pages::page_size;
use crate::sync::lock;
use kernel::Process;
use ranges::Ranges;

/// `IBV_FORK_DISABLED`: needed and not armed.
pub const DISABLED: i32 = 0;
/// `IBV_FORK_ENABLED`: armed.
pub const ENABLED: i32 = 1;
/// `IBV_FORK_UNNEEDED`: the kernel copies pinned pages while forking.
pub const UNNEEDED: i32 = 2;

/// The kernel and the library that are presented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pair {
    /// A kernel that copies pinned pages, and a library (rdma-core 51 or later) that leaves it to that: arming does
    /// nothing.
    CopyOnFork,
    /// A kernel that does not, with any library: what is registered while armed is withheld.
    OldKernel,
    /// A kernel that copies, and a library before 51: arming is said not to be needed and works all the same.
    OldLibrary,
}

/// Made once, when marks are armed.
#[derive(Debug)]
struct Armed {
    process: u32,
    ranges: Mutex<Ranges>,
}

static ARMED: OnceLock<Armed> = OnceLock::new();
/// A range came before the marks were armed; its pages can no longer be accounted for.
static TOO_LATE: AtomicBool = AtomicBool::new(false);
/// Ranges are widened to the pages of their mapping instead of base pages.
static HUGE_PAGES: AtomicBool = AtomicBool::new(false);

/// `ibv_fork_init`. EINVAL if a range came before; ENOSYS if the kernel does not know the advice.
pub fn init() -> Result<(), i32> {
    // As in rdma-core, any value counts, "0" too, and each call looks again.
    if std::env::var_os("RDMAV_HUGEPAGES_SAFE").is_some() {
        HUGE_PAGES.store(true, Ordering::Relaxed);
    }
    if ARMED.get().is_some() || settings().fork == Pair::CopyOnFork {
        return Ok(());
    }
    if TOO_LATE.load(Ordering::Relaxed) {
        return Err(libc::EINVAL);
    }
    kernel::try_advice()?;
    ARMED.get_or_init(|| Armed {
        process: std::process::id(),
        ranges: Mutex::new(Ranges::default()),
    });
    Ok(())
}

/// What the library does when it is first asked for devices: arms the marks if the environment says so.
pub fn init_from_environment() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let asked = ["RDMAV_FORK_SAFE", "IBV_FORK_SAFE"]
            .into_iter()
            .find(|name| std::env::var_os(name).is_some());
        if let Some(name) = asked
            && let Err(errno) = init()
        {
            eprintln!(
                "softrnic: WARN {name} is set, but ibv_fork_init failed ({}): registered memory is shared with children",
                std::io::Error::from_raw_os_error(errno)
            );
        }
    });
}

/// `ibv_is_fork_initialized`.
pub fn status() -> i32 {
    match (settings().fork, ARMED.get()) {
        (Pair::CopyOnFork | Pair::OldLibrary, _) => UNNEEDED,
        (Pair::OldKernel, Some(_)) => ENABLED,
        (Pair::OldKernel, None) => DISABLED,
    }
}

/// Withholds a range from children, once more if it is already. Not armed: only notes that it is too late for that now.
pub fn withhold(base: usize, len: usize) -> Result<(), i32> {
    let Some((ranges, pages)) = prepare(base, len) else { return Ok(()) };
    let mut kernel = Process { page: pages.page };
    lock(ranges).withhold(pages.first, pages.last, &mut kernel)
}

/// Takes one [`withhold`] back.
pub fn give_back(base: usize, len: usize) {
    let Some((ranges, pages)) = prepare(base, len) else { return };
    let mut kernel = Process { page: pages.page };
    lock(ranges).give_back(pages.first, pages.last, &mut kernel);
}

/// Whole pages: first and last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Widened {
    first: usize,
    last: usize,
    page: usize,
}

/// The list and the pages of a range; `None` if there is nothing to do.
fn prepare(base: usize, len: usize) -> Option<(&'static Mutex<Ranges>, Widened)> {
    let Some(armed) = ARMED.get() else {
        TOO_LATE.store(true, Ordering::Relaxed);
        return None;
    };
    if base == 0 || len == 0 || armed.process != std::process::id() {
        return None;
    }
    let page = if HUGE_PAGES.load(Ordering::Relaxed) {
        kernel::page_size_at(base).unwrap_or_else(page_size)
    } else {
        page_size()
    };
    Some((&armed.ranges, widen(base, len, page)?))
}

/// The pages that a range touches; `None` if it wraps, which is left to the registration to refuse.
fn widen(base: usize, len: usize, page: usize) -> Option<Widened> {
    let last = base.checked_add(len - 1)? | (page - 1);
    Some(Widened { first: base & !(page - 1), last, page })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_widened_to_the_pages_of_their_kind() {
        let wide = |base, len, page| widen(base, len, page).map(|w| (w.first, w.last));
        assert_eq!(wide(0x5004, 4, 0x1000), Some((0x5000, 0x5fff)), "four bytes take a page");
        assert_eq!(wide(0x5000, 0x1000, 0x1000), Some((0x5000, 0x5fff)));
        assert_eq!(wide(0x5fff, 2, 0x1000), Some((0x5000, 0x6fff)));
        assert_eq!(wide(0x5000, 0x1001, 0x1000), Some((0x5000, 0x6fff)));
        let huge = 2 << 20;
        assert_eq!(wide(huge + 0x5004, 4, huge), Some((huge, 2 * huge - 1)), "or 2 MiB");
        assert_eq!(wide(2 * huge - 1, 2, huge), Some((huge, 3 * huge - 1)));
        assert_eq!(wide(usize::MAX, 1, 0x1000), Some((usize::MAX - 0xfff, usize::MAX)));
        assert_eq!(wide(usize::MAX, 2, 0x1000), None, "wraps");
    }
}
