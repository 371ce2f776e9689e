//! The page ledger: where pages lie, who pins them, and which registrations a kernel would refuse for that.
//!
//! The map acts on the whole process, so the tests take turns. Each has memory of its own and forgets it first, because
//! an address may have been somebody else's.

mod common;

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::verbs::*;
use softrnic::abi::*;
use softrnic::capi::control::*;
use softrnic::capi::ledger::*;
use softrnic::ledger::pages::page_size;
use softrnic::ledger::{CMA, MOVABLE, UNMOVABLE};

const SHORT: i32 = 0;
const LONG: i32 = 1;

/// The turn of one test; ends with the map off.
struct Turn(#[allow(dead_code)] MutexGuard<'static, ()>);

fn turn(map: &CStr) -> Turn {
    static TURN: Mutex<()> = Mutex::new(());
    setup(&[]);
    let turn = Turn(TURN.lock().unwrap_or_else(PoisonError::into_inner));
    assert_eq!(cma(map), 0);
    turn
}

impl Drop for Turn {
    fn drop(&mut self) {
        cma(c"off");
    }
}

fn cma(map: &CStr) -> i32 {
    // SAFETY: a NUL-terminated string.
    unsafe { softrnic_cma(map.as_ptr()) }
}

fn counter(name: &CStr) -> u64 {
    // SAFETY: a NUL-terminated string.
    unsafe { softrnic_counter(name.as_ptr()) }
}

/// With the map off, registrations pass the ledger by from here on.
fn forget_everything() {
    let first = std::ptr::with_exposed_provenance_mut(page_size());
    // SAFETY: any range may be named.
    assert_eq!(unsafe { softrnic_forget(first, usize::MAX / 2) }, 0, "nothing is pinned");
}

/// What the ledger says about a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    pfn: u64,
    kind: i32,
    short: u32,
    long: u32,
}

/// Whole pages that nobody has asked about.
struct Memory(Buf);

impl Memory {
    fn new(pages: usize) -> Self {
        let memory = Self(Buf::new(pages * page_size()));
        assert_eq!(memory.forget(), 0);
        memory
    }

    fn at(&self, page: usize) -> *mut c_void {
        let at = usize::try_from(self.0.addr()).expect("address") + page * page_size();
        std::ptr::with_exposed_provenance_mut(at)
    }

    /// Number of its first page.
    fn number(&self) -> usize {
        self.at(0).addr() / page_size()
    }

    fn pages(&self) -> usize {
        self.0.len() / page_size()
    }

    fn forget(&self) -> i32 {
        // SAFETY: any range may be named.
        unsafe { softrnic_forget(self.at(0), self.0.len()) }
    }

    fn pin_pages(&self, first: usize, count: usize, long: i32) -> i32 {
        // SAFETY: any range may be named.
        unsafe { softrnic_pin(self.at(first), count * page_size(), long) }
    }

    fn unpin_pages(&self, first: usize, count: usize) -> i32 {
        // SAFETY: any range may be named.
        unsafe { softrnic_unpin(self.at(first), count * page_size()) }
    }

    fn pin(&self, long: i32) -> i32 {
        self.pin_pages(0, self.pages(), long)
    }

    fn unpin(&self) -> i32 {
        self.unpin_pages(0, self.pages())
    }

    fn page(&self, page: usize) -> Place {
        let mut place = Place { pfn: 0, kind: -1, short: 0, long: 0 };
        let Place { pfn, kind, short, long } = &mut place;
        // SAFETY: our own out-pointers.
        let done = unsafe { softrnic_page(self.at(page), pfn, kind, short, long) };
        assert_eq!(done, 0);
        place
    }

    fn kinds(&self) -> Vec<i32> {
        (0..self.pages()).map(|page| self.page(page).kind).collect()
    }

    fn reg(&self, device: Device) -> Result<Region, i32> {
        device.try_reg(device.pd, self.0.addr(), self.0.len(), ALL).map(Region::of)
    }
}

#[test]
fn a_page_that_nobody_holds_is_migrated_and_keeps_its_content() {
    let _turn = turn(c"all");
    let (d, m) = (Device::open(), Memory::new(1));
    m.0.put(0, b"stays as it is");
    let before = m.page(0);
    assert_eq!((before.kind, before.short, before.long), (CMA, 0, 0));
    let migrated = counter(c"migrated_pages");
    let mr = m.reg(d).expect("case A");
    let after = m.page(0);
    assert_eq!((after.kind, after.short, after.long), (UNMOVABLE, 0, 1));
    assert_ne!(after.pfn, before.pfn);
    assert_eq!(counter(c"migrated_pages") - migrated, 1);
    assert_eq!(m.0.get(0, 14), b"stays as it is");
    assert_eq!(mr.dereg(), 0);
    assert_eq!(m.page(0), Place { long: 0, ..after }, "it stays where it went");
    let again = m.reg(d).expect("nothing to migrate");
    assert_eq!(m.page(0), after);
    assert_eq!(again.dereg(), 0);
}

#[test]
fn a_short_pin_on_a_cma_page_refuses_the_registration() {
    let _turn = turn(c"all");
    let (d, m) = (Device::open(), Memory::new(1));
    let bytes = counter(c"registered_bytes");
    assert_eq!(m.pin(SHORT), 0);
    let held = m.page(0);
    assert_eq!((held.kind, held.short, held.long), (CMA, 1, 0));
    assert_eq!(m.reg(d).err(), Some(libc::ENOMEM), "case B");
    assert_eq!(m.page(0), held, "nothing has moved");
    assert_eq!(counter(c"registered_bytes"), bytes);
    assert_eq!(m.unpin(), 0);
    let mr = m.reg(d).expect("nothing is in the way any more");
    assert_eq!(m.page(0).kind, UNMOVABLE);
    assert_ne!(m.page(0).pfn, held.pfn);
    assert_eq!(mr.dereg(), 0);
}

#[test]
fn a_long_term_pin_before_the_registration_is_fine() {
    let _turn = turn(c"all");
    let (d, m) = (Device::open(), Memory::new(1));
    let before = m.page(0);
    assert_eq!(m.pin(LONG), 0);
    let pinned = m.page(0);
    assert_eq!((pinned.kind, pinned.short, pinned.long), (UNMOVABLE, 0, 1));
    assert_ne!(pinned.pfn, before.pfn);
    let mr = m.reg(d).expect("case C");
    assert_eq!(m.page(0), Place { long: 2, ..pinned });
    assert_eq!((mr.dereg(), m.unpin()), (0, 0));
    assert_eq!(m.page(0), Place { long: 0, ..pinned });
}

#[test]
fn an_ordinary_page_with_a_short_pin_registers_where_it_lies() {
    let _turn = turn(c"off");
    let (d, m) = (Device::open(), Memory::new(1));
    assert_eq!(m.pin(SHORT), 0);
    let before = m.page(0);
    assert_eq!((before.kind, before.short, before.long), (MOVABLE, 1, 0));
    let mr = m.reg(d).expect("case D");
    assert_eq!(m.page(0), Place { long: 1, ..before });
    assert_eq!((mr.dereg(), m.unpin()), (0, 0));
}

#[test]
fn a_short_pin_after_the_registration_does_not_hurt_the_next_one() {
    let _turn = turn(c"all");
    let (d, m) = (Device::open(), Memory::new(2));
    let first = m.reg(d).expect("nobody holds it");
    assert_eq!(m.pin(SHORT), 0);
    let second = m.reg(d).expect("case E: the pages are where a long-term pin may hold them");
    let place = m.page(1);
    assert_eq!((place.kind, place.short, place.long), (UNMOVABLE, 1, 2));
    assert_eq!((first.dereg(), second.dereg(), m.unpin()), (0, 0, 0));
}

#[test]
fn what_was_registered_while_nobody_looked_counts_too() {
    let _turn = turn(c"off");
    forget_everything();
    let (d, m) = (Device::open(), Memory::new(1));
    let mr = m.reg(d).expect("an ordinary registration");
    assert_eq!(cma(c"all"), 0);
    // The page has not been seen, but a region has held it since before the map was set.
    assert_eq!(m.pin(SHORT), 0);
    let place = m.page(0);
    assert_eq!((place.kind, place.short, place.long), (UNMOVABLE, 1, 1));
    let second = m.reg(d).expect("as in case E");
    assert_eq!((mr.dereg(), second.dereg(), m.unpin()), (0, 0, 0));
}
