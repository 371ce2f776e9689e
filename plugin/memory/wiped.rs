//! Values in pages that a forked child sees as zeroes.
//!
//! What tells a child from its parent must not cost the data path anything. A value here tells by itself: no value in use
//! is all zeroes.

use super::ledger::Purpose;
use super::page::{PageOwned, round_up};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A type of which all zeroes are a value, and which needs no drop.
///
/// # Safety
/// Memory that is all zeroes is a value of the type.
pub unsafe trait Blank {}

/// A fixed number of values, at least `HEAD`, at stable addresses.
#[derive(Debug)]
pub struct Wiped<T, const HEAD: usize> {
    first: NonNull<T>,
    count: usize,
    // Given to the spare ones at the end.
    pages: ManuallyDrop<PageOwned>,
}

/// Pages that are in no use, all zeroes, by their size: the last few. They stay mapped, so that what somebody still reads
/// through the pointer to one that just ended is no value in use instead of a crash.
static SPARE: Mutex<BTreeMap<usize, Vec<PageOwned>>> = Mutex::new(BTreeMap::new());

/// Spare ones of each size.
const SPARES: usize = 8;

fn spare() -> MutexGuard<'static, BTreeMap<usize, Vec<PageOwned>>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives back the pages that are in no use. Called when the last user of the plugin is gone.
pub fn release_pages() {
    std::mem::take(&mut *spare());
}

fn pages(bytes: usize) -> Result<PageOwned> {
    let old = spare().get_mut(&round_up(bytes)).and_then(Vec::pop);
    old.map_or_else(|| new_pages(bytes), Ok)
}

fn new_pages(bytes: usize) -> Result<PageOwned> {
    let pages = PageOwned::new(bytes, Purpose::Requests)?;
    if let Err(e) = pages.wipe_on_fork() {
        tracing::debug!("{e}; a test in a forked child may find its parent's request complete");
    }
    Ok(pages)
}

// SAFETY: the values belong to this one, which gives out shared references only, as a boxed slice would.
unsafe impl<T: Send, const HEAD: usize> Send for Wiped<T, HEAD> {}
// SAFETY: as above.
unsafe impl<T: Sync, const HEAD: usize> Sync for Wiped<T, HEAD> {}

impl<T: Blank, const HEAD: usize> Wiped<T, HEAD> {
    /// `HEAD` values and `more`, made from their positions.
    ///
    /// # Errors
    /// No memory.
    pub fn new(more: usize, make: impl Fn(usize) -> T) -> Result<Self> {
        const { assert!(!std::mem::needs_drop::<T>() && align_of::<T>() <= 4096) };
        let count = HEAD + more;
        let bytes = size_of::<T>().checked_mul(count);
        let bytes = bytes.ok_or_else(|| Error::argument(format!("{count} are too many")))?;
        let pages = pages(bytes)?;
        let first = pages.base().cast::<T>();
        for index in 0..count {
            // SAFETY: inside the mapping, which has room for `count` of them; a page's start fits every alignment up to its
            // size, and nothing refers to it yet.
            unsafe { first.add(index).write(make(index)) };
        }
        Ok(Self { first, count, pages: ManuallyDrop::new(pages) })
    }

    /// The first ones.
    #[inline(always)]
    pub fn head(&self) -> &[T; HEAD] {
        // SAFETY: `new` wrote that many and more; in a child they are zeroes, which are values too.
        unsafe { self.first.cast().as_ref() }
    }
}

impl<T, const HEAD: usize> Drop for Wiped<T, HEAD> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used afterwards.
        let pages = unsafe { ManuallyDrop::take(&mut self.pages) };
        pages.clear(0, pages.len());
        let oldest = {
            let mut spare = spare();
            let spares = spare.entry(pages.len()).or_default();
            spares.insert(0, pages);
            if spares.len() > SPARES { spares.pop() } else { None }
        };
        drop(oldest);
    }
}

impl<T: Blank, const HEAD: usize> Deref for Wiped<T, HEAD> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `new` wrote `count` of them; in a child they are zeroes, which are values too.
        unsafe { NonNull::slice_from_raw_parts(self.first, self.count).as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    struct Number(Cell<u32>);
    // SAFETY: a number may be zero.
    unsafe impl Blank for Number {}

    #[test]
    fn old_pages_are_used_again_and_blank_until_then() {
        // Of a size that no other test has.
        let numbers = Wiped::<_, 1>::new(20_000, |_| Number(Cell::new(5))).unwrap();
        let at = (numbers.first, numbers.pages.len());
        drop(numbers);
        // SAFETY: spare pages stay mapped.
        assert_eq!(unsafe { at.0.as_ref() }.0.get(), 0);
        let again = Wiped::<_, 2>::new(19_999, |_| Number(Cell::new(6))).unwrap();
        assert_eq!((again.first, again.pages.len()), at);
    }

    #[test]
    fn a_child_finds_zeroes_and_the_parent_what_it_had() {
        let numbers =
            Wiped::<_, 3>::new(2000, |index| Number(Cell::new(index as u32 + 1))).unwrap();
        numbers[2002].0.set(7);
        let sum = |numbers: &[Number]| numbers.iter().map(|n| u64::from(n.0.get())).sum::<u64>();
        let before = sum(&numbers);
        assert_eq!((numbers.len(), numbers.head()[2].0.get()), (2003, 3));
        // SAFETY: the child only reads and leaves through _exit.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            let code = i32::from(sum(&numbers) != 0);
            // SAFETY: no destructor of the parent's state may run in the child.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: our own child and a valid out-pointer.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0, "the child saw values");
        assert_eq!(sum(&numbers), before);
    }
}
