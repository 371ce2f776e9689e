//! The differential probe: a few registrations of other memory, and of parts of the range that failed.
//!
//! A fresh range of the same size that registers where this one does not rules out quotas and limits of the device: it
//! is *this memory*. Then halving finds the pages. Registering a range works exactly if it works for each of its pages;
//! where that does not hold the probe says so and names none.
//!
//! Bounded by a number of registrations and by time, looked at between two registrations: one that the kernel takes long
//! over is waited for. The few on which the verdict rests are made however late it is: on a machine with much to do the
//! process may get no time for long, and that must not decide about a job. Each registration ends before the next one
//! begins.

use crate::memory::PageOwned;
use crate::memory::ledger::Purpose;
use crate::memory::page::page_size;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What a probe wants registered.
#[derive(Clone, Copy, Debug)]
pub enum Candidate<'a> {
    /// So many first bytes of fresh memory.
    Fresh(&'a PageOwned, usize),
    /// So many bytes from an address on, of the range that failed.
    Part(usize, usize),
}

impl Candidate<'_> {
    /// First address and bytes.
    pub fn range(&self) -> (usize, usize) {
        match self {
            Self::Fresh(pages, len) => (pages.addr(), *len),
            Self::Part(addr, len) => (*addr, *len),
        }
    }
}

/// How much a probe may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Registrations.
    pub registrations: u32,
    /// Time after which none is begun to find pages.
    pub time: Duration,
    /// Bytes of fresh memory.
    pub bytes: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { registrations: 64, time: Duration::from_millis(500), bytes: 64 << 20 }
    }
}

/// One registration that was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Bytes.
    pub length: u64,
    /// Its errno; `None`: it worked.
    pub errno: Option<i32>,
}

impl Trial {
    /// Whether it worked.
    pub fn worked(&self) -> bool {
        self.errno.is_none()
    }
}

/// Pages that fail by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadPages {
    /// Address of the first.
    pub first: u64,
    /// Address of the last; `None`: the bounds were reached before it was found.
    pub last: Option<u64>,
    /// How many.
    pub count: u64,
    /// Whether that is all of them; else there are at least so many.
    pub exact: bool,
}

/// What a probe found; `None`: not tried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// One page of fresh memory.
    pub page: Option<Trial>,
    /// Fresh memory of the same size, or as much of it as the bounds allow.
    pub fresh: Option<Trial>,
    /// The range that failed, once more.
    pub again: Option<Trial>,
    /// The smallest part of it that is known to fail, as (first address, one past the last).
    pub narrowed: Option<(u64, u64)>,
    /// Its pages that fail.
    pub bad: Option<BadPages>,
    /// The range fails, and each part of it registers.
    pub only_whole: bool,
    /// The process got no fresh memory.
    pub no_memory: bool,
    /// Registrations that were tried.
    pub registrations: u32,
    /// How long it took.
    pub elapsed: Duration,
    /// The bound that ended it early.
    pub cut_short: Option<&'static str>,
}

/// Tries fresh memory of `length` bytes and then, if that works, the pages of `range` (first address, one past the
/// last), which failed. `register` returns a guard whose drop ends the registration, or an errno.
pub fn probe<G>(
    length: u64,
    range: Option<(u64, u64)>,
    bounds: Bounds,
    register: impl FnMut(Candidate<'_>) -> Result<G, i32>,
) -> Probe {
    let started = Instant::now();
    run(length, range, bounds, register, || started.elapsed())
}

/// The same with any clock.
fn run<G>(
    length: u64,
    range: Option<(u64, u64)>,
    bounds: Bounds,
    register: impl FnMut(Candidate<'_>) -> Result<G, i32>,
    elapsed: impl FnMut() -> Duration,
) -> Probe {
    let mut prober = Prober { found: Probe::default(), bounds, register, elapsed };
    // Running out of a bound is not an error: what was found so far is the answer.
    let _ = prober.all(length, range);
    prober.found.elapsed = (prober.elapsed)();
    prober.found
}

/// A bound is reached.
struct Spent;

struct Prober<R, C> {
    found: Probe,
    bounds: Bounds,
    register: R,
    elapsed: C,
}

impl<G, R: FnMut(Candidate<'_>) -> Result<G, i32>, C: FnMut() -> Duration> Prober<R, C> {
    fn try_range(&mut self, start: u64, end: u64) -> Result<Trial, Spent> {
        if (self.elapsed)() >= self.bounds.time {
            self.found.cut_short = Some("time");
            return Err(Spent);
        }
        self.try_late(start, end)
    }

    /// As [`Self::try_range`], whatever time it is.
    fn try_late(&mut self, start: u64, end: u64) -> Result<Trial, Spent> {
        let length = end - start;
        match (usize::try_from(start), usize::try_from(length)) {
            (Ok(start), Ok(length)) => self.attempt(Candidate::Part(start, length)),
            _ => Ok(Trial { length, errno: Some(libc::EFAULT) }),
        }
    }

    fn attempt(&mut self, candidate: Candidate<'_>) -> Result<Trial, Spent> {
        if self.found.registrations >= self.bounds.registrations {
            self.found.cut_short = Some("number of registrations");
            return Err(Spent);
        }
        self.found.registrations += 1;
        let length = candidate.range().1 as u64;
        Ok(Trial { length, errno: (self.register)(candidate).err() })
    }

    fn all(&mut self, length: u64, range: Option<(u64, u64)>) -> Result<(), Spent> {
        let bytes = usize::try_from(length).unwrap_or(usize::MAX).min(self.bounds.bytes);
        let Ok(pages) = PageOwned::new(bytes, Purpose::Probe) else {
            self.found.no_memory = true;
            return Ok(());
        };
        let one = self.attempt(Candidate::Fresh(&pages, page_size()))?;
        self.found.page = Some(one);
        if !one.worked() {
            return Ok(());
        }
        let fresh = self.attempt(Candidate::Fresh(&pages, pages.len()))?;
        self.found.fresh = Some(fresh);
        // What follows shall not find less free memory than there was.
        drop(pages);
        let Some((start, end)) = range.filter(|_| fresh.worked()) else { return Ok(()) };
        let again = self.try_late(start, end)?;
        self.found.again = Some(again);
        if again.worked() {
            return Ok(());
        }
        self.found.narrowed = Some((start, end));
        self.pages(start, end)
    }

    /// Finds the pages of a failing range.
    fn pages(&mut self, start: u64, end: u64) -> Result<(), Spent> {
        let page = page_size() as u64;
        let at = |index: u64| start + index * page;
        let total = (end - start) / page;
        // The pages before `low` register and some page before `high` does not.
        let (mut low, mut high) = (0, total);
        // Whether the range of `low` to `high` was tried and failed, not only concluded to.
        let mut tried = true;
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.try_range(at(low), at(middle))?.worked() {
                (low, tried) = (middle, false);
            } else {
                (high, tried) = (middle, true);
            }
            self.found.narrowed = Some((at(low), at(high)));
        }
        if !tried && self.try_range(at(low), at(high))?.worked() {
            self.found.only_whole = true;
            self.found.narrowed = Some((start, end));
            return Ok(());
        }
        let first = low;
        let bad = BadPages { first: at(first), last: None, count: 1, exact: false };
        self.found.bad = Some(bad);
        // Some page from `low` on fails and none from `high` on.
        let (mut low, mut high) = (first, total);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.try_range(at(middle), at(high))?.worked() {
                high = middle;
            } else {
                low = middle;
            }
        }
        let last = low;
        let ends = 1 + u64::from(last != first);
        self.found.bad = Some(BadPages { last: Some(at(last)), count: ends, ..bad });
        self.count(start, first + 1, last, ends)
    }

    /// Counts the failing pages from `low` up to `high` (indices) beside those `known`.
    fn count(&mut self, start: u64, low: u64, high: u64, known: u64) -> Result<(), Spent> {
        let page = page_size() as u64;
        let at = |index: u64| start + index * page;
        let mut single = known;
        // Ranges to look at, and whether they are known to fail. Disjoint, so that each of those is one page at least.
        let mut queue: VecDeque<(u64, u64, bool)> = VecDeque::new();
        if low < high {
            queue.push_back((low, high, false));
        }
        loop {
            let more = queue.iter().filter(|(_, _, fails)| *fails).count() as u64;
            if let Some(bad) = &mut self.found.bad {
                bad.count = single + more;
                bad.exact = queue.is_empty();
            }
            let Some(&(low, high, fails)) = queue.front() else { return Ok(()) };
            if !fails {
                let works = self.try_range(at(low), at(high))?.worked();
                if works {
                    queue.pop_front();
                } else if let Some(front) = queue.front_mut() {
                    front.2 = true;
                }
            } else if high - low == 1 {
                queue.pop_front();
                single += 1;
            } else {
                let middle = low + (high - low) / 2;
                let left_works = self.try_range(at(low), at(middle))?.worked();
                queue.pop_front();
                if left_works {
                    queue.push_back((middle, high, true));
                } else {
                    queue.push_back((low, middle, true));
                    queue.push_back((middle, high, false));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::collections::BTreeSet;
    use std::rc::Rc;

    const START: u64 = 1 << 40;

    /// Memory some pages of which cannot be registered. Fresh memory is anywhere else.
    struct Simulated {
        bad: BTreeSet<u64>,
        live: Rc<Cell<i32>>,
        calls: u32,
    }

    struct Guard(Rc<Cell<i32>>);

    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    impl Simulated {
        fn new(bad: impl IntoIterator<Item = u64>) -> Self {
            Self { bad: bad.into_iter().collect(), live: Rc::default(), calls: 0 }
        }

        fn register(&mut self, addr: usize, len: usize) -> Result<Guard, i32> {
            self.calls += 1;
            assert_eq!(self.live.get(), 0, "an earlier registration still lives");
            assert!(addr.is_multiple_of(page_size()) && len.is_multiple_of(page_size()) && len > 0);
            let page = page_size() as u64;
            let index = (addr as u64).wrapping_sub(START) / page;
            if self.bad.range(index..index.saturating_add(len as u64 / page)).next().is_some() {
                return Err(libc::ENOMEM);
            }
            self.live.set(1);
            Ok(Guard(Rc::clone(&self.live)))
        }

        fn probe(&mut self, pages: u64, bounds: Bounds, step: Duration) -> Probe {
            let mut now = Duration::ZERO;
            let end = START + pages * page_size() as u64;
            let found = run(
                64,
                Some((START, end)),
                bounds,
                |candidate| {
                    let (addr, len) = candidate.range();
                    self.register(addr, len)
                },
                || {
                    now += step;
                    now
                },
            );
            assert_eq!((self.live.get(), self.calls), (0, found.registrations));
            found
        }
    }

    fn index(address: u64) -> u64 {
        (address - START) / page_size() as u64
    }

    proptest! {
        #[test]
        fn first_and_last_are_found_and_the_count_is_never_too_high(
            pages in 1u64..100_000,
            picks in prop::collection::vec(any::<prop::sample::Index>(), 1..12),
            run in 0u64..20,
        ) {
            let mut bad: BTreeSet<u64> =
                picks.iter().map(|pick| pick.index(usize::try_from(pages).unwrap()) as u64).collect();
            let from = *bad.first().unwrap();
            bad.extend((from..from + run).filter(|page| *page < pages));
            let mut memory = Simulated::new(bad.iter().copied());
            let found = memory.probe(pages, Bounds::default(), Duration::ZERO);
            let pages = found.bad.unwrap();
            prop_assert_eq!(index(pages.first), *bad.first().unwrap());
            prop_assert_eq!(index(pages.last.unwrap()), *bad.last().unwrap());
            prop_assert!(pages.count <= bad.len() as u64 && pages.count > 0);
            prop_assert!(!pages.exact || pages.count == bad.len() as u64);
            prop_assert_eq!(pages.exact, found.cut_short.is_none());
            prop_assert!(found.registrations <= 64);
            prop_assert!(found.fresh.unwrap().worked() && found.page.unwrap().worked());
        }

        #[test]
        fn few_pages_are_counted_exactly(pages in 1u64..8, mask in 1u64..128) {
            let bad: Vec<u64> = (0..pages).filter(|page| mask >> page & 1 == 1).collect();
            prop_assume!(!bad.is_empty());
            let count = bad.len() as u64;
            let found = Simulated::new(bad).probe(pages, Bounds::default(), Duration::ZERO);
            prop_assert_eq!(found.bad.map(|bad| (bad.count, bad.exact)), Some((count, true)));
        }

        #[test]
        fn no_bound_is_passed(registrations in 0u32..70, time in 0u64..70, pages in 1u64..5000) {
            let time = Duration::from_millis(time);
            let bounds = Bounds { registrations, time, ..Bounds::default() };
            let found = Simulated::new(0..pages).probe(pages, bounds, Duration::from_millis(1));
            prop_assert!(found.registrations <= registrations);
            // The clock moves by a millisecond each time it is read, and a registration reads it once.
            prop_assert!(u128::from(found.registrations) <= time.as_millis() + 3);
            if found.cut_short.is_none() {
                prop_assert!(found.bad.unwrap().exact);
            }
        }
    }

    #[test]
    fn a_cut_says_how_far_it_came() {
        let bounds = Bounds { registrations: 6, ..Bounds::default() };
        let found = Simulated::new([5]).probe(1024, bounds, Duration::ZERO);
        assert_eq!(found.cut_short, Some("number of registrations"));
        assert_eq!(
            (found.bad, found.narrowed.map(|(a, b)| (index(a), index(b)))),
            (None, Some((0, 128)))
        );
        let bounds = Bounds { time: Duration::from_millis(2), ..Bounds::default() };
        let found = Simulated::new([5]).probe(1024, bounds, Duration::from_millis(1));
        assert_eq!((found.cut_short, found.registrations), (Some("time"), 4));
    }

    #[test]
    fn what_the_verdict_rests_on_is_tried_however_late_it_is() {
        let found = Simulated::new([5]).probe(1024, Bounds::default(), Duration::from_secs(9));
        assert_eq!((found.cut_short, found.registrations), (Some("time"), 3));
        assert!(found.page.unwrap().worked() && found.fresh.unwrap().worked());
        assert_eq!(found.again.unwrap().errno, Some(libc::ENOMEM));
    }

    #[test]
    fn a_range_that_works_the_second_time_is_left_alone() {
        let found = Simulated::new([]).probe(16, Bounds::default(), Duration::ZERO);
        assert!(found.again.unwrap().worked());
        assert_eq!((found.registrations, found.bad, found.narrowed), (3, None, None));
    }

    #[test]
    fn a_range_that_fails_only_as_a_whole_names_no_page() {
        let most = 8 * page_size();
        let register =
            |c: Candidate<'_>| if c.range().1 > most { Err(libc::ENOMEM) } else { Ok(()) };
        let end = START + 64 * page_size() as u64;
        let found = probe(page_size() as u64, Some((START, end)), Bounds::default(), register);
        assert!(found.only_whole && found.bad.is_none(), "{found:?}");
        assert_eq!(found.narrowed, Some((START, end)));
    }

    #[test]
    fn nothing_is_searched_where_fresh_memory_fails_too() {
        let found = probe(1 << 20, Some((START, 2 * START)), Bounds::default(), |_| {
            Err::<(), _>(libc::ENOMEM)
        });
        assert_eq!((found.registrations, found.fresh, found.again), (1, None, None));
        assert_eq!(found.page.unwrap().errno, Some(libc::ENOMEM));
        let small = |c: Candidate<'_>| {
            if c.range().1 > page_size() { Err(libc::ENOMEM) } else { Ok(()) }
        };
        let found = probe(1 << 20, Some((START, 2 * START)), Bounds::default(), small);
        assert!(found.page.unwrap().worked() && !found.fresh.unwrap().worked());
        assert_eq!(found.registrations, 2);
    }

    #[test]
    fn fresh_memory_is_capped() {
        let bounds = Bounds { bytes: 1 << 20, ..Bounds::default() };
        let found = probe(1 << 30, None, bounds, |_| Ok(()));
        assert_eq!(found.fresh, Some(Trial { length: 1 << 20, errno: None }));
        let bounds = Bounds { bytes: usize::MAX, ..Bounds::default() };
        let found = probe(u64::MAX - (1 << 20), None, bounds, |_| Ok(()));
        assert!(found.no_memory && found.registrations == 0);
    }
}
