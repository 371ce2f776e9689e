//! What the kernel does with pages when memory is registered, simulated: where each page lies, who holds it in place,
//! and whether a long-term pin can move it out of the contiguous memory area (CMA) first.
//!
//! A page is remembered from the moment somebody asks about it. Content never moves; a migration only gives the page
//! another simulated frame. While no map is set and no page is remembered, registrations pass by with one load.
//! Long-term pins of memory regions are not counted here: the registry of live regions says who holds a page.

pub mod pages;
pub mod placement;
pub mod quota;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::env::settings;
use crate::mr::Mr;
use crate::stats::{self, Counter};
use crate::sync::lock;
use pages::{Pages, areas, page_size};
use placement::Placement;

/// Migratetypes, with the kernel's numbers.
pub const UNMOVABLE: i32 = 0;
/// What an ordinary page of a process is.
pub const MOVABLE: i32 = 1;
/// Lent from the contiguous memory area: nobody may hold it for long.
pub const CMA: i32 = 4;

/// Frames of CMA and of all other memory are counted up from here.
const FIRST_CMA: u64 = 0x80_0000;
const FIRST_OTHER: u64 = 1 << 32;

/// The kernel pins this many pages at a time; a failure leaves later ones alone.
const BATCH: usize = 512;

/// Remembered pages at which those that are gone are looked for.
const SWEEP: usize = 1 << 16;

/// What is known about one page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// Simulated frame number.
    pub pfn: u64,
    /// Migratetype.
    pub migratetype: i32,
    /// Pins that only last for a moment, as their owner promised.
    pub short: u64,
    /// Pins that say that they last, without those of memory regions.
    pub long: u64,
}

#[derive(Debug)]
struct State {
    map: Placement,
    pages: BTreeMap<u64, Page>,
    frames: Frames,
    sweep_at: usize,
}

/// The next frame numbers. None is used twice: a test sees every migration.
#[derive(Debug)]
struct Frames {
    cma: u64,
    other: u64,
}

impl Frames {
    fn take(&mut self, migratetype: i32) -> u64 {
        let next = if migratetype == CMA { &mut self.cma } else { &mut self.other };
        *next += 1;
        *next - 1
    }
}

#[derive(Debug)]
struct Ledger {
    /// Whether a registration has to ask.
    active: AtomicBool,
    state: Mutex<State>,
}

fn ledger() -> &'static Ledger {
    static LEDGER: OnceLock<Ledger> = OnceLock::new();
    LEDGER.get_or_init(|| {
        let map = settings().cma.clone();
        Ledger {
            active: AtomicBool::new(map != Placement::Off),
            state: Mutex::new(State {
                map,
                pages: BTreeMap::new(),
                frames: Frames { cma: FIRST_CMA, other: FIRST_OTHER },
                sweep_at: SWEEP,
            }),
        }
    })
}

impl Ledger {
    /// Runs a change and notes what it means for later registrations.
    fn change<T>(&self, body: impl FnOnce(&mut State) -> T) -> T {
        let mut state: MutexGuard<'_, State> = lock(&self.state);
        let result = body(&mut state);
        if state.pages.len() > state.sweep_at {
            state.sweep();
        }
        let active = state.map != Placement::Off || !state.pages.is_empty();
        self.active.store(active, Ordering::Release);
        result
    }
}

impl State {
    /// The page, which gets its place now if it has none yet. `settled` says whether a region held it before that: then
    /// it cannot be in CMA.
    fn see(&mut self, number: u64, settled: impl FnOnce(u64) -> bool) -> &mut Page {
        let (map, frames) = (&self.map, &mut self.frames);
        self.pages.entry(number).or_insert_with(|| {
            let migratetype = match map.covers(number) {
                false => MOVABLE,
                true if settled(number) => UNMOVABLE,
                true => CMA,
            };
            Page { pfn: frames.take(migratetype), migratetype, short: 0, long: 0 }
        })
    }

    /// Moves what a long-term pin may not hold; ENOMEM if a short pin holds such a page. As in the kernel, what could be
    /// moved before the refusal stays moved.
    fn settle(&mut self, pages: Pages) -> Result<(), i32> {
        for batch in pages.numbers().step_by(BATCH) {
            let mut stuck = false;
            for number in batch..pages.numbers().end.min(batch + BATCH as u64) {
                let page = *self.see(number, |_| false);
                if page.migratetype != CMA {
                    continue;
                }
                if page.short > 0 {
                    stuck = true;
                    continue;
                }
                let pfn = self.frames.take(UNMOVABLE);
                self.pages.insert(number, Page { pfn, migratetype: UNMOVABLE, ..page });
                stats::add(Counter::MigratedPages, 1);
            }
            if stuck {
                return Err(libc::ENOMEM);
            }
        }
        Ok(())
    }

    /// Forgets pages that nobody holds and that are not mapped any more, so that memory which comes and goes does not
    /// make the ledger grow without end.
    fn sweep(&mut self) {
        if let Some(areas) = areas() {
            let size = page_size();
            self.pages.retain(|number, page| {
                let at = usize::try_from(*number).unwrap_or(usize::MAX).saturating_mul(size);
                let next = areas.partition_point(|a| a.end <= at);
                let mapped = areas.get(next).is_some_and(|a| a.start <= at);
                mapped || page.short + page.long > 0
            });
        }
        self.sweep_at = SWEEP.max(2 * self.pages.len());
    }
}

/// Looks a region up that holds a page; the list of regions is made when it is first needed.
fn held_by_region() -> impl Fn(u64) -> u64 {
    let regions: OnceCell<Vec<Pages>> = OnceCell::new();
    move |number| {
        let regions = regions.get_or_init(Mr::pinned);
        regions.iter().filter(|r| r.contains(number)).count() as u64
    }
}

/// Replaces the map. Pages that were seen stay where they are.
pub fn set_map(map: Placement) {
    ledger().change(|state| state.map = map);
}

/// The long-term pin of a new region.
pub fn register(pages: Pages) -> Result<(), i32> {
    let ledger = ledger();
    if !ledger.active.load(Ordering::Acquire) {
        return Ok(());
    }
    ledger.change(|state| state.settle(pages))
}

/// Takes a pin, as another driver would.
pub fn pin(pages: Pages, long: bool) -> Result<(), i32> {
    pages.fault_in(false)?;
    let held = held_by_region();
    ledger().change(|state| {
        if long {
            state.settle(pages)?;
        }
        for number in pages.numbers() {
            let page = state.see(number, |number| held(number) > 0);
            if long {
                page.long += 1;
            } else {
                page.short += 1;
            }
        }
        Ok(())
    })
}

/// Ends one pin of every page, short ones first; EINVAL and no change if one of the pages has none.
pub fn unpin(pages: Pages) -> Result<(), i32> {
    ledger().change(|state| {
        let pinned = state.pages.range(pages.numbers()).filter(|(_, p)| p.short + p.long > 0);
        if pinned.count() as u64 != pages.count {
            return Err(libc::EINVAL);
        }
        for (_, page) in state.pages.range_mut(pages.numbers()) {
            if page.short > 0 {
                page.short -= 1;
            } else {
                page.long -= 1;
            }
        }
        Ok(())
    })
}

/// What is known about a page; its long-term pins include those of regions. EFAULT if nothing is mapped there.
pub fn look(number: u64) -> Result<Page, i32> {
    if !pages::mapped(number) {
        return Err(libc::EFAULT);
    }
    let held = held_by_region();
    ledger().change(|state| {
        let mut page = *state.see(number, |number| held(number) > 0);
        page.long += held(number);
        Ok(page)
    })
}

/// Forgets pages; EBUSY and no change if one of them is pinned.
pub fn forget(pages: Pages) -> Result<(), i32> {
    ledger().change(|state| {
        let mut seen = state.pages.range(pages.numbers());
        if seen.any(|(_, page)| page.short + page.long > 0)
            || Mr::pinned().iter().any(|region| region.meets(&pages))
        {
            return Err(libc::EBUSY);
        }
        state.pages.retain(|number, _| !pages.contains(*number));
        Ok(())
    })
}

/// Forgets everything but the map: a forked child has pages and regions of its own.
pub fn abandon() {
    ledger().change(|state| state.pages.clear());
    stats::clear(Counter::PinnedBytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(map: Placement) -> State {
        let frames = Frames { cma: FIRST_CMA, other: FIRST_OTHER };
        State { map, pages: BTreeMap::new(), frames, sweep_at: SWEEP }
    }

    #[test]
    fn a_sweep_drops_what_is_neither_mapped_nor_pinned() {
        let mut state = state(Placement::All);
        let mapped = (&raw const state).addr() as u64 / page_size() as u64;
        // The lowest pages are never mapped.
        for number in [1, 2, 3, mapped] {
            state.see(number, |_| false);
        }
        state.see(1, |_| false).short = 1;
        state.see(2, |_| false).long = 1;
        state.sweep();
        assert_eq!(state.pages.keys().copied().collect::<Vec<_>>(), [1, 2, mapped]);
    }

    #[test]
    fn memory_that_comes_and_goes_does_not_pile_up() {
        let ledger =
            Ledger { active: AtomicBool::new(true), state: Mutex::new(state(Placement::All)) };
        // Where no process can have memory: as if each range had been unmapped after its registration.
        let nowhere = 1 << 51;
        for first in (nowhere..nowhere + 6 * SWEEP as u64).step_by(1024) {
            ledger.change(|state| state.settle(Pages { first, count: 1024 })).expect("nobody pins");
            assert!(lock(&ledger.state).pages.len() <= 2 * SWEEP);
        }
        ledger.change(|state| {
            state.map = Placement::Off;
            state.pages.clear();
        });
        assert!(!ledger.active.load(Ordering::Relaxed), "nothing to ask about any more");
    }
}
