//! Memory of callers that shares its pages with other data.
//!
//! A registration holds whole pages, and where it marks them a forked child loses whole pages: those that were asked for,
//! and what else lies on them. Here such memory is recognised and kept account of; `transport/` decides whether it is
//! registered or copied.

use super::page::page_size;
use crate::host::procfs::Proc;
use crate::host::smaps::Smaps;
use crate::host::status::Status;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of other data on the first and on the last page of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    front: usize,
    back: usize,
}

impl Sharing {
    /// Of `len` bytes at `addr`, whose first page has one size and whose last page has another; `None`: they own their
    /// pages, or wrap around.
    fn with_pages(addr: usize, len: usize, first: usize, last: usize) -> Option<Self> {
        let end = addr.checked_add(len.max(1))?;
        let sharing = Self { front: addr % first, back: end.checked_next_multiple_of(last)? - end };
        (sharing.bytes() > 0).then_some(sharing)
    }

    /// Of `len` bytes at `addr` in pages of the machine's size; `None`: they own their pages.
    pub fn of(addr: usize, len: usize) -> Option<Self> {
        Self::with_pages(addr, len, page_size(), page_size())
    }

    /// As [`Self::of`], in the pages that the memory really is in, which may be huge.
    pub fn of_mapped(addr: usize, len: usize) -> Option<Self> {
        // The kernel is asked about single mappings only where the process has huge pages at all.
        if Status::read(&Proc::default()).hugetlb.unwrap_or(0) == 0 {
            return Self::of(addr, len);
        }
        let size = |addr: usize| {
            let mapping = Smaps::find_in_self(addr as u64).ok().flatten();
            let size = mapping.and_then(|m| m.kernel_page_size);
            size.and_then(|size| usize::try_from(size).ok())
                .map_or(page_size(), |s| s.max(page_size()))
        };
        Self::with_pages(addr, len, size(addr), size(addr.saturating_add(len.max(1) - 1)))
    }

    /// Bytes that were not asked for.
    pub fn bytes(&self) -> usize {
        self.front + self.back
    }

    /// The whole pages of `len` bytes at `addr`.
    pub fn pages(&self, addr: usize, len: usize) -> Range<usize> {
        addr - self.front..addr + len.max(1) + self.back
    }
}

/// What kind of memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The process's heap.
    Heap,
    /// The first thread's stack; those of others cannot be told from other memory.
    Stack,
    /// Anything else.
    Other,
}

/// The mapping that memory lies in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbourhood {
    /// What kind of memory it is.
    pub kind: Kind,
    /// What the kernel calls it.
    name: String,
}

impl Neighbourhood {
    /// Where an address lies, by the kernel's names.
    pub fn of(addr: usize) -> Self {
        let maps = Smaps::names_of_self().unwrap_or_default();
        Self::named(maps.at(addr as u64).map_or("", |mapping| mapping.path.as_str()))
    }

    fn named(name: &str) -> Self {
        let kind = match name {
            "[heap]" => Kind::Heap,
            stack if stack.starts_with("[stack") => Kind::Stack,
            _ => Kind::Other,
        };
        let name = if name.is_empty() { "anonymous memory" } else { name };
        Self { kind, name: name.to_owned() }
    }
}

impl fmt::Display for Neighbourhood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// How such memory is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    /// Registered where no page is marked: children have everything.
    Harmless,
    /// Registered: children lose the pages.
    Registered,
    /// Through copies: no device holds the pages.
    Copied,
}

/// One range that is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// First address.
    pub addr: usize,
    /// Bytes that were asked for.
    pub len: usize,
    /// The whole pages.
    pub pages: Range<usize>,
    /// How it is reached.
    pub how: How,
}

/// Sums over ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Ranges.
    pub ranges: u64,
    /// Bytes that were asked for.
    pub asked: u64,
    /// Bytes of whole pages that children lose.
    pub withheld: u64,
    /// Those of them that were not asked for.
    pub foreign: u64,
}

impl Sums {
    fn add(&mut self, range: &Shared) {
        self.ranges += 1;
        self.asked += range.len as u64;
        if range.how == How::Registered {
            self.withheld += range.pages.len() as u64;
            self.foreign += range.pages.len().saturating_sub(range.len) as u64;
        }
    }
}

#[derive(Debug, Default)]
struct Account {
    next: u64,
    live: BTreeMap<u64, Shared>,
    ever: Sums,
    /// What was told already.
    told: Vec<(Kind, How)>,
}

/// The account of a process.
#[derive(Debug, Default)]
pub struct Collateral(Mutex<Account>);

/// A range in the account. Dropping it strikes it out.
#[derive(Debug)]
pub struct Entry {
    home: Arc<Collateral>,
    number: u64,
}

impl Collateral {
    fn account(&self) -> MutexGuard<'_, Account> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a range.
    pub fn enter(self: &Arc<Self>, range: Shared) -> Entry {
        let mut account = self.account();
        account.ever.add(&range);
        let number = account.next;
        account.next += 1;
        account.live.insert(number, range);
        Entry { home: Arc::clone(self), number }
    }

    /// Whether this is the first time that memory of this kind is treated so.
    pub fn is_news(&self, kind: Kind, how: How) -> bool {
        let mut account = self.account();
        let news = !account.told.contains(&(kind, how));
        if news {
            account.told.push((kind, how));
        }
        news
    }

    /// What is in use, and what ever was.
    pub fn sums(&self) -> (Sums, Sums) {
        let account = self.account();
        let mut live = Sums::default();
        account.live.values().for_each(|range| live.add(range));
        (live, account.ever)
    }

    /// The ranges whose pages children lose.
    pub fn withheld(&self) -> Vec<Shared> {
        let account = self.account();
        account.live.values().filter(|range| range.how == How::Registered).cloned().collect()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.home.account().live.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_pages_are_what_was_asked_for_and_the_rest(
            addr in 1_usize..1 << 40, len in 0_usize..1 << 30, first in 12_u32..22, last in 12_u32..22,
        ) {
            let (first, last) = (1 << first, 1 << last);
            match Sharing::with_pages(addr, len, first, last) {
                Some(sharing) => {
                    let pages = sharing.pages(addr, len);
                    prop_assert!(pages.start.is_multiple_of(first) && pages.end.is_multiple_of(last));
                    prop_assert!(pages.start <= addr && addr + len.max(1) <= pages.end);
                    prop_assert!(addr - pages.start < first && pages.end - addr - len.max(1) < last);
                    prop_assert_eq!(pages.len(), sharing.bytes() + len.max(1));
                }
                None => {
                    prop_assert!(addr.is_multiple_of(first) && (addr + len.max(1)).is_multiple_of(last));
                }
            }
        }
    }

    #[test]
    fn whole_pages_are_nobody_elses() {
        let page = page_size();
        assert_eq!(Sharing::of(page, 3 * page), None);
        assert_eq!(Sharing::of(page, page - 1).unwrap().bytes(), 1);
        assert_eq!(Sharing::of(page + 8, page).unwrap().bytes(), page);
        assert_eq!(Sharing::of(usize::MAX - 5, 100), None, "wraps around: refused elsewhere");
        assert_eq!(Sharing::with_pages(page, page, page, 512 * page).unwrap().bytes(), 510 * page);
    }

    #[test]
    fn the_kernel_names_the_neighbours() {
        let on_heap = Box::new(5_u64);
        let on_stack = 5_u64;
        let at = |address: *const u64| Neighbourhood::of(address.addr());
        // Threads of the test runner have stacks without a name.
        assert_eq!(at(&raw const on_stack).kind, Kind::Other);
        assert!(!at(&raw const *on_heap).to_string().is_empty());
        assert_eq!(Neighbourhood::named("[heap]").kind, Kind::Heap);
        assert_eq!(Neighbourhood::named("[stack]").kind, Kind::Stack);
        let none = Neighbourhood::named("");
        assert_eq!((none.kind, none.to_string().as_str()), (Kind::Other, "anonymous memory"));
    }

    #[test]
    fn the_account_is_kept() {
        let collateral = Arc::new(Collateral::default());
        let range = |how| Shared { addr: 0x1008, len: 16, pages: 0x1000..0x2000, how };
        let one = collateral.enter(range(How::Registered));
        let two = collateral.enter(range(How::Copied));
        let all = Sums { ranges: 2, asked: 32, withheld: 4096, foreign: 4080 };
        assert_eq!(collateral.sums(), (all, all));
        assert_eq!(collateral.withheld(), [range(How::Registered)]);
        drop(one);
        let left = Sums { ranges: 1, asked: 16, ..Sums::default() };
        assert_eq!(collateral.sums(), (left, all));
        drop(two);
        assert_eq!(collateral.sums(), (Sums::default(), all));
        assert!(collateral.is_news(Kind::Heap, How::Copied));
        assert!(!collateral.is_news(Kind::Heap, How::Copied));
        assert!(collateral.is_news(Kind::Heap, How::Registered));
    }
}
