//! Hands out small indices, oldest freed first, so that a number is not reused while somebody may still send to it.

use std::collections::VecDeque;
use std::sync::Mutex;

use crate::sync::lock;

/// Free indices are kept back until this many are free.
const QUARANTINE: usize = 64;

/// Allocator of the indices `1..limit`.
#[derive(Debug)]
pub struct IndexPool {
    inner: Mutex<(u32, VecDeque<u32>)>,
    limit: u32,
}

impl IndexPool {
    /// A pool of `1..limit`.
    pub fn new(limit: usize) -> Self {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        Self { inner: Mutex::new((1, VecDeque::new())), limit }
    }

    /// Takes an index.
    pub fn take(&self) -> Option<u32> {
        let mut inner = lock(&self.inner);
        if inner.0 < self.limit && inner.1.len() < QUARANTINE {
            inner.0 += 1;
            return Some(inner.0 - 1);
        }
        inner.1.pop_front()
    }

    /// Returns an index.
    pub fn give(&self, index: u32) {
        lock(&self.inner).1.push_back(index);
    }
}
