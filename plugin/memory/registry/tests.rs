//! The registry's rules against a model that is a plain list. No device: a registration is a value that leaves the
//! tree when it is dropped, exactly as `Registered` does.

use crate::memory::extent::page_range;
use crate::memory::page::page_size;
use crate::memory::ranges::Ranges;
use crate::verbs::mr::Access;
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::{Arc, Mutex, Weak};

type Shared = Arc<Mutex<Ranges<Value>>>;

#[derive(Debug)]
struct Value {
    start: usize,
    end: usize,
    access: Access,
    home: Weak<Mutex<Ranges<Self>>>,
}

impl Drop for Value {
    fn drop(&mut self) {
        let home = self.home.upgrade().expect("the tree outlives its values here");
        home.lock().expect("no other thread").forget(self.start, self.end);
    }
}

/// What `Registry::register` does, with a value in place of a memory region.
fn register(ranges: &Shared, addr: usize, len: usize, access: Access) -> Arc<Value> {
    let (start, end) = page_range(addr, len).expect("the test's ranges do not wrap");
    let mut locked = ranges.lock().expect("no other thread");
    locked.covering(start, end, access).unwrap_or_else(|| {
        let new = Arc::new(Value { start, end, access, home: Arc::downgrade(ranges) });
        locked.add(start, end, access, &new);
        new
    })
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![
        4 => Just(Access::BULK),
        2 => Just(Access::BULK.relaxed()),
        1 => Just(Access::REMOTE_WRITE),
        1 => Just(Access::LOCAL),
    ]
}

#[derive(Clone, Debug)]
enum Step {
    Register {
        page: usize,
        offset: usize,
        len: usize,
        access: Access,
    },
    /// Drops one of the handles that are held, by position.
    Drop(prop::sample::Index),
}

/// Few pages, so that ranges overlap, contain and equal each other all the time.
fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..12_usize, 0..page_size(), 0..6 * page_size(), access())
            .prop_map(|(page, offset, len, access)| Step::Register { page, offset, len, access }),
        2 => any::<prop::sample::Index>().prop_map(Step::Drop),
    ]
}

/// One registration in the model: range, access, users.
type Row = (usize, usize, Access, usize);

const BASE: usize = 1 << 30;

proptest! {
    #[test]
    fn one_registration_per_distinct_range_that_nothing_covers(steps in vec(step(), 0..120)) {
        let ranges = Shared::default();
        let mut held: Vec<Arc<Value>> = Vec::new();
        let mut model: Vec<Row> = Vec::new();
        for step in steps {
            match step {
                Step::Register { page, offset, len, access } => {
                    let addr = BASE + page * page_size() + offset;
                    let got = register(&ranges, addr, len, access);
                    prop_assert!(got.start <= addr && addr + len.max(1) <= got.end);
                    prop_assert_eq!(got.access, access);
                    let (start, end) = page_range(addr, len).unwrap();
                    let covers = |row: &&mut Row| row.0 <= start && end <= row.1 && row.2 == access;
                    match model.iter_mut().find(|row| covers(row)) {
                        // Several may cover it: the user counts for the one that was handed out.
                        Some(_) => {
                            let row = model.iter_mut()
                                .find(|row| (row.0, row.1, row.2) == (got.start, got.end, access));
                            row.expect("what is handed out is alive").3 += 1;
                        }
                        None => {
                            prop_assert_eq!((got.start, got.end), (start, end));
                            model.push((start, end, access, 1));
                        }
                    }
                    held.push(got);
                }
                Step::Drop(index) if !held.is_empty() => {
                    let gone = held.swap_remove(index.index(held.len()));
                    let row = model.iter_mut()
                        .find(|row| (row.0, row.1, row.2) == (gone.start, gone.end, gone.access));
                    row.expect("what is held is alive").3 -= 1;
                    model.retain(|row| row.3 != 0);
                }
                Step::Drop(_) => {}
            }
            let locked = ranges.lock().unwrap();
            prop_assert_eq!(locked.live(), model.len());
            // Each page of each live range is still found, with its own access only.
            for (start, end, access, _) in &model {
                for page in (*start..*end).step_by(page_size()) {
                    prop_assert!(locked.covering(page, page + page_size(), *access).is_some());
                }
            }
            // Order is kept whatever was removed: lookups depend on it.
            let mut distinct: Vec<_> = model.iter().map(|row| (row.0, row.1)).collect();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(locked.ordered().collect::<Vec<_>>(), distinct);
        }
        drop(held);
        prop_assert!(ranges.lock().unwrap().is_empty());
    }

    #[test]
    fn a_range_is_whole_pages_around_what_was_asked(addr: usize, len: usize) {
        let page = page_size();
        match page_range(addr, len) {
            Ok((start, end)) => {
                prop_assert!(start.is_multiple_of(page) && end.is_multiple_of(page));
                prop_assert!(start <= addr && addr - start < page);
                prop_assert!(addr + len.max(1) <= end && end - (addr + len.max(1)) < page);
            }
            Err(_) => {
                let end = addr.checked_add(len.max(1));
                prop_assert!(end.is_none_or(|end| end > usize::MAX - page));
            }
        }
    }
}

#[test]
fn two_buffers_in_one_page_share_a_registration() {
    let ranges = Shared::default();
    let first = register(&ranges, BASE + 16, 100, Access::BULK);
    let second = register(&ranges, BASE + 512, 1000, Access::BULK);
    assert!(Arc::ptr_eq(&first, &second));
    // The second keeps the page when the first is gone.
    drop(first);
    assert_eq!(ranges.lock().unwrap().live(), 1);
    drop(second);
    assert!(ranges.lock().unwrap().is_empty());
}

#[test]
fn access_is_part_of_the_identity() {
    let ranges = Shared::default();
    let kinds = [Access::LOCAL, Access::REMOTE_WRITE, Access::BULK, Access::BULK.relaxed()];
    let all: Vec<_> = kinds.iter().map(|k| register(&ranges, BASE, 64, *k)).collect();
    assert_eq!(ranges.lock().unwrap().live(), kinds.len());
    for (value, kind) in all.iter().zip(kinds) {
        assert!(Arc::ptr_eq(value, &register(&ranges, BASE, 64, kind)));
    }
}

#[test]
fn dropping_from_the_middle_keeps_the_others_findable() {
    let ranges = Shared::default();
    let page = page_size();
    let mut all: Vec<_> =
        (0..64).map(|i| register(&ranges, BASE + 2 * i * page, page, Access::BULK)).collect();
    for gone in [40, 17, 3, 30] {
        drop(all.remove(gone));
        for value in &all {
            let again = register(&ranges, value.start, page, Access::BULK);
            assert!(Arc::ptr_eq(value, &again));
        }
    }
    assert_eq!(ranges.lock().unwrap().live(), all.len());
}

/// A lookup that walks all ranges needs minutes for this.
#[test]
fn a_hundred_thousand_ranges_are_no_burden() {
    let ranges = Shared::default();
    let page = page_size();
    let count = 100_000;
    // Not in address order: 7919 is coprime to the count.
    let at = |i: usize| BASE + 2 * page * (i * 7919 % count);
    let all: Vec<_> = (0..count).map(|i| register(&ranges, at(i), page, Access::BULK)).collect();
    assert_eq!(ranges.lock().unwrap().live(), count);
    for (i, value) in all.iter().enumerate() {
        assert!(Arc::ptr_eq(value, &register(&ranges, at(i), page, Access::BULK)));
    }
    drop(all);
    assert!(ranges.lock().unwrap().is_empty());
}
