//! The page ledger: where pages lie, who pins them, and which registrations a kernel would refuse for that.
//!
//! The map acts on the whole process, so the tests take turns. Each has memory of its own and forgets it first, because
//! an address may have been somebody else's.

mod common;

use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};

use common::verbs::*;
use softrnic::capi::control::*;
use softrnic::capi::ledger::*;
use softrnic::capi::memory;
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

#[test]
fn registrations_are_not_remembered_while_nobody_looks() {
    let _turn = turn(c"off");
    forget_everything();
    let (d, m) = (Device::open(), Memory::new(4));
    assert_eq!(m.reg(d).expect("an ordinary registration").dereg(), 0);
    assert_eq!(cma(c"all"), 0);
    assert_eq!(m.kinds(), [CMA; 4], "the map still decides: nobody had noted the pages");
}

#[test]
fn one_bad_page_in_the_middle_refuses_all() {
    let _turn = turn(c"all");
    let (d, m) = (Device::open(), Memory::new(40));
    assert_eq!(m.pin_pages(17, 1, SHORT), 0);
    let bad = m.page(17);
    assert_eq!(m.reg(d).err(), Some(libc::ENOMEM));
    assert_eq!(m.page(17), bad);
    let others = (0..40).filter(|page| *page != 17).map(|page| m.page(page));
    assert!(
        others.into_iter().all(|p| (p.kind, p.long) == (UNMOVABLE, 0)),
        "what could be migrated stays migrated, and nothing holds it"
    );
    assert_eq!(m.pin(LONG), libc::ENOMEM, "another driver's long-term pin fares the same");
    assert_eq!((m.page(0).long, m.page(39).long), (0, 0));
    assert_eq!(m.unpin_pages(17, 1), 0);
    assert_eq!(m.reg(d).expect("nothing is in the way any more").dereg(), 0);
    assert_eq!(m.kinds(), [UNMOVABLE; 40]);
}

#[test]
fn a_refusal_leaves_later_batches_alone() {
    let _turn = turn(c"all");
    let (d, m) = (Device::open(), Memory::new(1200));
    assert_eq!(m.pin_pages(600, 1, SHORT), 0);
    assert_eq!(m.reg(d).err(), Some(libc::ENOMEM));
    let kinds = m.kinds();
    assert!(kinds[..600].iter().all(|kind| *kind == UNMOVABLE));
    assert_eq!(kinds[600], CMA);
    assert!(kinds[601..1024].iter().all(|kind| *kind == UNMOVABLE), "the rest of its batch");
    assert!(kinds[1024..].iter().all(|kind| *kind == CMA), "pages that nobody came to");
    assert_eq!(m.unpin_pages(600, 1), 0);
}

#[test]
fn every_nth_page_is_counted_by_page_number() {
    let _turn = turn(c"every=3");
    let m = Memory::new(10);
    let wanted: Vec<i32> =
        (m.number()..).take(10).map(|n| if n % 3 == 0 { CMA } else { MOVABLE }).collect();
    assert_eq!(m.kinds(), wanted);
}

#[test]
fn ranges_name_addresses_and_a_new_map_spares_pages_already_seen() {
    let _turn = turn(c"off");
    let m = Memory::new(6);
    let span = |first, end| format!("{:#x}-{:x}", m.at(first).addr(), m.at(end).addr());
    let map = CString::new(format!("{}, {}", span(1, 3), span(4, 5))).expect("text");
    assert_eq!(m.page(1).kind, MOVABLE);
    assert_eq!(cma(&map), 0);
    assert_eq!(m.kinds(), [MOVABLE, MOVABLE, CMA, MOVABLE, CMA, MOVABLE]);
    assert_eq!(cma(c"off"), 0);
    assert_eq!(m.kinds(), [MOVABLE, MOVABLE, CMA, MOVABLE, CMA, MOVABLE]);
    assert_eq!(m.forget(), 0);
    assert_eq!(m.kinds(), [MOVABLE; 6]);
}

#[test]
fn pins_nest_and_short_ones_end_first() {
    let _turn = turn(c"all");
    let (d, m) = (Device::open(), Memory::new(3));
    assert_eq!(m.pin(LONG), 0);
    assert_eq!((m.pin(SHORT), m.pin_pages(1, 1, SHORT), m.pin_pages(1, 2, SHORT)), (0, 0, 0));
    let counts = |m: &Memory| [0, 1, 2].map(|page| (m.page(page).short, m.page(page).long));
    assert_eq!(counts(&m), [(1, 1), (3, 1), (2, 1)]);
    assert_eq!(m.forget(), libc::EBUSY);
    assert_eq!((m.unpin(), m.unpin()), (0, 0));
    assert_eq!(counts(&m), [(0, 0), (1, 1), (0, 1)]);
    assert_eq!(m.unpin(), libc::EINVAL, "the first page has no pin");
    assert_eq!(counts(&m), [(0, 0), (1, 1), (0, 1)], "nothing has ended");
    assert_eq!((m.unpin_pages(1, 2), m.unpin_pages(1, 1)), (0, 0));
    assert_eq!(counts(&m), [(0, 0); 3]);
    let mr = m.reg(d).expect("free pages");
    assert_eq!(m.unpin(), libc::EINVAL, "the pin of a region is not ours to end");
    assert_eq!(m.forget(), libc::EBUSY);
    assert_eq!((mr.dereg(), m.forget()), (0, 0));
    assert_eq!(m.kinds(), [CMA; 3], "placed anew");
}

#[test]
fn nonsense_is_refused() {
    let _turn = turn(c"every=2");
    let m = Memory::new(2);
    let (here, size) = (m.at(0), page_size());
    let last = std::ptr::with_exposed_provenance_mut(usize::MAX - 10);
    // Nothing is ever mapped there: the first pages of the address space.
    let nowhere: *mut c_void = std::ptr::with_exposed_provenance_mut(size);
    let none = null_mut();
    // SAFETY: any range may be named; the out-pointers are NULL.
    unsafe {
        assert_eq!(softrnic_cma(null()), libc::EINVAL);
        for (at, len, wanted) in [
            (null_mut(), size, libc::EINVAL),
            (here, 0, libc::EINVAL),
            (last, size, libc::EINVAL),
            (here, usize::MAX, libc::EINVAL),
        ] {
            assert_eq!(softrnic_pin(at, len, SHORT), wanted, "pin {at:?} {len}");
            assert_eq!(softrnic_unpin(at, len), wanted, "unpin {at:?} {len}");
            assert_eq!(softrnic_forget(at, len), wanted, "forget {at:?} {len}");
        }
        assert_eq!(softrnic_pin(nowhere, size, SHORT), libc::EFAULT);
        assert_eq!(softrnic_pin(here, 3 * size, SHORT), libc::EFAULT, "the guard page");
        assert_eq!(softrnic_unpin(here, size), libc::EINVAL, "was never pinned");
        assert_eq!(softrnic_page(null(), none, null_mut(), null_mut(), null_mut()), libc::EINVAL);
        let page = |at| softrnic_page(at, null_mut(), null_mut(), null_mut(), null_mut());
        assert_eq!(page(nowhere), libc::EFAULT);
        assert_eq!(page(last), libc::EFAULT);
        assert_eq!(page(here), 0, "every out-pointer may be NULL");
    }
    for bad in [c"", c"ALL", c"every=0", c"every=x", c"5000-4000", c"zz-yy", c"1000-2000,", c"\xff"]
    {
        assert_eq!(cma(bad), libc::EINVAL, "{bad:?}");
    }
    let kinds: Vec<i32> =
        (m.number()..).take(2).map(|n| if n % 2 == 0 { CMA } else { MOVABLE }).collect();
    assert_eq!((m.forget(), m.kinds()), (0, kinds), "the map is the last good one");
}

#[test]
fn registrations_fail_from_a_number_on_with_a_chosen_errno() {
    let _turn = turn(c"off");
    let (d, m) = (Device::open(), Memory::new(1));
    let try_it = || m.reg(d).map(|mr| assert_eq!(mr.dereg(), 0)).err();
    assert_eq!(softrnic_fail_reg_from(3), 0);
    let tries: Vec<_> = (0..5).map(|_| try_it()).collect();
    let no = Some(libc::ENOMEM);
    assert_eq!(tries, [None, None, no, no, no]);
    assert_eq!(softrnic_reg_errno(libc::EOPNOTSUPP), 0);
    assert_eq!(try_it(), Some(libc::EOPNOTSUPP));
    assert_eq!((softrnic_reg_errno(-1), softrnic_reg_errno(4096)), (libc::EINVAL, libc::EINVAL));
    assert_eq!(try_it(), Some(libc::EOPNOTSUPP), "nonsense changes nothing");
    assert_eq!(softrnic_fail_reg_from(0), 0);
    assert_eq!(try_it(), None);
    assert_eq!(softrnic_reg_errno(libc::EINVAL), 0);
    assert_eq!(softrnic_fail_reg_mr(1), 0);
    assert_eq!([try_it(), try_it()], [Some(libc::EINVAL), None]);
    assert_eq!(softrnic_reg_errno(0), 0);
    assert_eq!(softrnic_fail_reg_mr(1), 0);
    assert_eq!([try_it(), try_it()], [no, None]);
}

#[test]
fn a_dma_buf_is_its_exporters_business() {
    let _turn = turn(c"all");
    let d = Device::open();
    let size = 4 * page_size();
    // SAFETY: a NUL-terminated name; the descriptor is ours.
    let fd = unsafe { libc::memfd_create(c"dmabuf".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: a descriptor of our own.
    assert_eq!(unsafe { libc::ftruncate(fd, size.try_into().expect("small")) }, 0);
    let before = [c"pinned_bytes", c"migrated_pages"].map(counter);
    // SAFETY: live handles.
    let mr = unsafe { memory::ibv_reg_dmabuf_mr(d.pd, 0, size, 0, fd, ALL.cast_signed()) };
    assert!(!mr.is_null(), "errno {}", errno());
    assert_eq!([c"pinned_bytes", c"migrated_pages"].map(counter), before);
    assert_eq!(Region::of(mr).dereg(), 0);
    assert_eq!([c"pinned_bytes", c"migrated_pages"].map(counter), before);
    // SAFETY: ours and not used any more.
    assert_eq!(unsafe { libc::close(fd) }, 0);
}

#[test]
fn threads_never_see_a_region_that_holds_cma() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 100;
    let _turn = turn(c"every=2");
    let (d, pinned) = (Device::open(), counter(c"pinned_bytes"));
    let pd = d.pd.expose_provenance();
    let m = Memory::new(16);
    let (base, len) = (m.0.addr(), m.0.len());
    let barrier = Barrier::new(THREADS);
    let outcomes = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let at = |page: usize| {
        let base = usize::try_from(base).expect("address");
        std::ptr::with_exposed_provenance_mut::<c_void>(base + page * page_size())
    };
    let register = || {
        let device = Device { context: null_mut(), pd: std::ptr::with_exposed_provenance_mut(pd) };
        let mr = device.try_reg(device.pd, base, len, ALL);
        outcomes[usize::from(mr.is_ok())].fetch_add(1, Ordering::Relaxed);
        let Ok(mr) = mr else {
            assert_eq!(mr.err(), Some(libc::ENOMEM));
            return;
        };
        for page in 0..16 {
            let (mut kind, mut long) = (-1, 0);
            // SAFETY: our own out-pointers.
            let done = unsafe {
                softrnic_page(at(page), null_mut(), &raw mut kind, null_mut(), &raw mut long)
            };
            assert_eq!(done, 0);
            assert!(kind != CMA && long > 0, "page {page}: {kind}, {long}");
        }
        assert_eq!(Region::of(mr).dereg(), 0);
    };
    let work = |id: usize| {
        for round in 0..ROUNDS {
            // Every other round in step: then there are pins of CMA pages before the first registration, and none before
            // the second. The rounds between go as they like.
            let step = || {
                if round % 2 == 0 {
                    barrier.wait();
                }
            };
            // Nobody holds anything now: the pages are placed anew.
            if barrier.wait().is_leader() {
                // SAFETY: any range may be named.
                assert_eq!(unsafe { softrnic_forget(at(0), len) }, 0);
            }
            barrier.wait();
            let page = (5 * id + round) % 16;
            // SAFETY: any range may be named.
            assert_eq!(unsafe { softrnic_pin(at(page), page_size(), SHORT) }, 0);
            step();
            register();
            // SAFETY: any range may be named.
            assert_eq!(unsafe { softrnic_unpin(at(page), page_size()) }, 0);
            step();
            register();
        }
    };
    std::thread::scope(|scope| {
        for id in 0..THREADS {
            let work = &work;
            scope.spawn(move || work(id));
        }
    });
    let [refused, granted] = outcomes.map(AtomicUsize::into_inner);
    assert_eq!(refused + granted, 2 * THREADS * ROUNDS);
    // In the rounds in step: two threads held a page in CMA at their first try, nobody at the second.
    assert!(refused >= ROUNDS && granted >= THREADS * ROUNDS / 2, "{refused}, {granted}");
    assert!((0..16).all(|page| (m.page(page).short, m.page(page).long) == (0, 0)));
    assert_eq!(counter(c"pinned_bytes"), pinned);
}
