//! How often each page is withheld from forked children.
//!
//! Runs of addresses with an equal count, by first address; together they are the whole address space, and neighbours
//! differ. The kernel is only told where a count leaves or reaches zero.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

/// Who is told. Ranges are given by their first and last byte.
pub trait Kernel {
    /// Children do not get the range from now on. A part may be marked when this fails.
    fn withhold(&mut self, first: usize, last: usize) -> Result<(), i32>;
    /// Children get as much of it as is still there.
    fn give_back(&mut self, first: usize, last: usize);
}

/// Counts of the whole address space.
#[derive(Debug)]
pub struct Ranges {
    runs: BTreeMap<usize, i64>,
}

impl Default for Ranges {
    fn default() -> Self {
        Self { runs: BTreeMap::from([(0, 0)]) }
    }
}

impl Ranges {
    /// Counts a range up.
    ///
    /// If the kernel refuses a run, what was counted so far is taken back, and with it, as in rdma-core, the refused run
    /// itself; at the end of the range this is the whole run that lies there, however far it reaches. These addresses
    /// stay one below the truth: their next registration is not marked. The kernel may have marked parts of the refused
    /// run, and nobody takes that back.
    pub fn withhold(
        &mut self,
        first: usize,
        last: usize,
        kernel: &mut impl Kernel,
    ) -> Result<(), i32> {
        let Err((run, errno)) = self.walk(first, last, 1, |from, to| kernel.withhold(from, to))
        else {
            return Ok(());
        };
        self.join(last.wrapping_add(1));
        let reach = self.last_of(run);
        self.give_back(first, reach, kernel);
        // The run before it, just counted up and down again, may be equal.
        self.join(run);
        Err(errno)
    }

    /// Counts a range down. Counts go below zero where nothing was withheld.
    pub fn give_back(&mut self, first: usize, last: usize, kernel: &mut impl Kernel) {
        let done = self.walk(first, last, -1, |from, to| {
            kernel.give_back(from, to);
            Ok(())
        });
        debug_assert!(done.is_ok(), "giving back is never refused");
    }

    /// Changes the counts of a range by one, run by run, and tells about those that leave or reach zero. Stops at the run
    /// for which that fails, and names it.
    fn walk(
        &mut self,
        first: usize,
        last: usize,
        step: i64,
        mut tell: impl FnMut(usize, usize) -> Result<(), i32>,
    ) -> Result<(), (usize, i32)> {
        let edge = i64::from(step < 0);
        self.cut(first);
        let mut at = first;
        loop {
            if self.last_of(at) > last {
                self.cut(last + 1);
            }
            let end = self.last_of(at);
            // `at` begins a run: it was cut there or follows the end of another.
            let count = self.runs.entry(at).or_default();
            if *count == edge {
                tell(at, end).map_err(|errno| (at, errno))?;
            }
            *count += step;
            if end >= last {
                break;
            }
            at = end + 1;
        }
        self.join(first);
        self.join(last.wrapping_add(1));
        Ok(())
    }

    /// Lets a run begin at an address.
    fn cut(&mut self, at: usize) {
        let count = self.runs.range(..=at).next_back().map_or(0, |(_, count)| *count);
        self.runs.entry(at).or_insert(count);
    }

    /// Merges the run that begins at an address with the one before, if they are equal.
    fn join(&mut self, at: usize) {
        let before = self.runs.range(..at).next_back().map(|(_, count)| *count);
        if before.is_some() && before == self.runs.get(&at).copied() {
            self.runs.remove(&at);
        }
    }

    /// The last address of the run that begins at `at`.
    fn last_of(&self, at: usize) -> usize {
        self.runs.range((Excluded(at), Unbounded)).next().map_or(usize::MAX, |(next, _)| next - 1)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
