//! Locking helpers and a handle registry.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Locks a mutex. A panic inside a critical section is caught at the C boundary; the state it leaves is one that
/// every section tolerates, so poison is ignored.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Destroyed objects that stay allocated, so that a late use of their handle finds a dead object, not foreign memory.
const GRAVES: usize = 256;

/// Live objects of one kind, by the address that C holds.
#[derive(Debug)]
pub struct Registry<T> {
    inner: Mutex<Inner<T>>,
}

#[derive(Debug)]
struct Inner<T> {
    live: BTreeMap<usize, Arc<T>>,
    graves: VecDeque<Arc<T>>,
}

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Registry<T> {
    /// An empty registry.
    pub const fn new() -> Self {
        Self { inner: Mutex::new(Inner { live: BTreeMap::new(), graves: VecDeque::new() }) }
    }

    /// Adds an object and returns the address that becomes its handle.
    pub fn insert(&self, object: Arc<T>) -> usize {
        let key = Arc::as_ptr(&object) as usize;
        lock(&self.inner).live.insert(key, object);
        key
    }

    /// Finds a live object. Any value may be asked for; nothing is dereferenced.
    pub fn get(&self, handle: usize) -> Option<Arc<T>> {
        lock(&self.inner).live.get(&handle).cloned()
    }

    /// Removes an object and buries it.
    pub fn remove(&self, handle: usize) -> Option<Arc<T>> {
        let mut inner = lock(&self.inner);
        let object = inner.live.remove(&handle)?;
        inner.graves.push_back(Arc::clone(&object));
        let evicted = if inner.graves.len() > GRAVES { inner.graves.pop_front() } else { None };
        drop(inner);
        drop(evicted);
        Some(object)
    }

    /// All live objects.
    pub fn all(&self) -> Vec<Arc<T>> {
        lock(&self.inner).live.values().cloned().collect()
    }

    /// Number of live objects.
    pub fn count(&self) -> usize {
        lock(&self.inner).live.len()
    }

    /// Frees the destroyed objects.
    pub fn purge(&self) {
        let graves = std::mem::take(&mut lock(&self.inner).graves);
        drop(graves);
    }
}
