//! Address ranges with the access they were registered for, and who keeps each alive.
//!
//! An augmented interval tree: lookups stay logarithmic, and order is kept under any sequence of additions and
//! removals. It holds weak references only. A range ends when its last user is gone, not when the tree says so.

use crate::verbs::mr::Access;
use iset::IntervalMap;
use std::sync::{Arc, Weak};

/// Live values by the range they cover.
#[derive(Debug)]
pub struct Ranges<T> {
    tree: IntervalMap<usize, Vec<(Access, Weak<T>)>>,
}

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Self { tree: IntervalMap::new() }
    }
}

impl<T> Ranges<T> {
    /// A live value whose range holds all of `start..end` and whose access is exactly `access`.
    pub fn covering(&self, start: usize, end: usize, access: Access) -> Option<Arc<T>> {
        let none_is_refused = &mut Vec::new();
        self.covering_if(start, end, access, |_| true, none_is_refused)
    }

    /// The same, of those that `fits`. The others that were looked at go into `refused`: somebody else may have let go of
    /// one meanwhile, whose end is then the caller's to choose, as it takes the lock that the caller holds.
    pub fn covering_if(
        &self,
        start: usize,
        end: usize,
        access: Access,
        fits: impl Fn(&T) -> bool,
        refused: &mut Vec<Arc<T>>,
    ) -> Option<Arc<T>> {
        let alive = self
            .tree
            .iter(start..=start)
            .filter(|(range, _)| range.start <= start && end <= range.end)
            .flat_map(|(_, entries)| entries)
            .filter(|(have, _)| *have == access)
            .filter_map(|(_, weak)| weak.upgrade());
        for value in alive {
            if fits(&value) {
                return Some(value);
            }
            refused.push(value);
        }
        None
    }

    /// Adds a value for `start..end`, which is not empty.
    pub fn add(&mut self, start: usize, end: usize, access: Access, value: &Arc<T>) {
        // Before older ones: memory that is there now, should an old one be of what was there before.
        self.tree.entry(start..end).or_default().insert(0, (access, Arc::downgrade(value)));
    }

    /// Removes what is no longer alive of exactly `start..end`. Called by a value that is being dropped, which no
    /// longer upgrades; another value for the same range still does.
    pub fn forget(&mut self, start: usize, end: usize) {
        if let Some(entries) = self.tree.get_mut(start..end) {
            entries.retain(|(_, weak)| weak.strong_count() != 0);
            if entries.is_empty() {
                self.tree.remove(start..end);
            }
        }
    }

    /// Values that are alive.
    pub fn live(&self) -> usize {
        self.tree
            .values(..)
            .map(|entries| entries.iter().filter(|(_, weak)| weak.strong_count() != 0).count())
            .sum()
    }

    /// Whether nothing is remembered, neither alive nor gone.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.tree.is_empty()
    }

    /// The remembered ranges in order of their start.
    #[cfg(test)]
    pub fn ordered(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.tree.intervals(..).map(|range| (range.start, range.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn nothing_ends_while_it_is_looked_for() {
        let mut ranges = Ranges::default();
        let access = Access::REMOTE_WRITE;
        let value = Arc::new(());
        let seen = Arc::downgrade(&value);
        ranges.add(0, 4096, access, &value);
        // Its owner lets go of it at the worst moment.
        let owner = RefCell::new(Some(value));
        let mut refused = Vec::new();
        let fits = |_: &()| {
            owner.take();
            false
        };
        assert!(ranges.covering_if(0, 4096, access, fits, &mut refused).is_none());
        assert_eq!(seen.strong_count(), 1);
        drop(refused);
        assert_eq!(seen.strong_count(), 0);
    }
}
