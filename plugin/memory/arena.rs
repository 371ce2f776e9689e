//! Memory that was long-term pinned before anybody needed it, lent out in pieces.
//!
//! A registration that fails for where its memory lies fails for every size, and may go on failing for everything that
//! is registered from then on. So on machines that show the risk one large piece is pinned when the plugin starts, and
//! everything that a connection needs can come from it. Elsewhere nothing is set aside and pieces are made as needed.
//!
//! A piece serves any bulk or control purpose, so it is registered for all of them and never with relaxed ordering.

use super::ledger::Purpose;
use super::page::{PageOwned, round_up};
use super::registry::{Registered, Registry, register_owned};
use crate::error::{Error, Result};
use crate::verbs::mr::Access;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a segment that is made as needed, unless one piece needs more or less is left.
const SEGMENT: usize = 8 << 20;

/// The segments of a process.
pub struct Arena {
    limit: usize,
    /// Bytes that the process could still have, where somebody knows.
    left: Box<dyn Fn() -> Option<u64> + Send + Sync>,
    segments: Mutex<Segments>,
}

#[derive(Debug, Default)]
struct Segments {
    list: Vec<Arc<Segment>>,
    /// Bytes of all segments, those included that are being made.
    bytes: usize,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// One mapping, registered with some devices.
#[derive(Debug)]
struct Segment {
    // Dropped first: no device may reach memory that is unmapped. The registry keeps its device open.
    registered: Vec<(Arc<Registered>, Arc<Registry>)>,
    pages: Arc<PageOwned>,
    free: Mutex<FreeList>,
    /// Set aside: stays when nothing of it is lent.
    kept: bool,
}

impl Segment {
    fn new(len: usize, registries: &[Arc<Registry>], kept: bool) -> Result<Self> {
        let pages = Arc::new(PageOwned::new(len, Purpose::BounceArena)?);
        let registered = register_owned(&pages, registries, Access::BULK)?;
        let registered = registered.into_iter().zip(registries.iter().map(Arc::clone)).collect();
        // After the verbs, which may have a list of their own about forks. A child has no business here, and the kernel
        // would copy all of it for each.
        if let Err(e) = pages.keep_from_children() {
            tracing::info!("{e}; a fork copies {len} bytes");
        }
        let free = Mutex::new(FreeList::new(pages.len()));
        Ok(Self { registered, pages, free, kept })
    }

    /// Its registrations with these devices, in their order; `None` if it lacks one.
    fn with(&self, registries: &[Arc<Registry>]) -> Option<Vec<Arc<Registered>>> {
        registries
            .iter()
            .map(|wanted| {
                let found = self.registered.iter().find(|(_, have)| Arc::ptr_eq(have, wanted));
                found.map(|(registered, _)| Arc::clone(registered))
            })
            .collect()
    }

    fn free(&self) -> MutexGuard<'_, FreeList> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Free ranges by offset, never adjacent to each other.
#[derive(Debug)]
struct FreeList {
    ranges: BTreeMap<usize, usize>,
    whole: usize,
}

impl FreeList {
    fn new(len: usize) -> Self {
        Self { ranges: BTreeMap::from([(0, len)]), whole: len }
    }

    fn take(&mut self, len: usize) -> Option<usize> {
        let (offset, have) = self.ranges.iter().map(|(o, l)| (*o, *l)).find(|(_, l)| *l >= len)?;
        self.ranges.remove(&offset);
        if have > len {
            self.ranges.insert(offset + len, have - len);
        }
        Some(offset)
    }

    fn give(&mut self, mut offset: usize, mut len: usize) {
        if let Some(behind) = self.ranges.remove(&(offset + len)) {
            len += behind;
        }
        if let Some((before, size)) = self.ranges.range(..offset).next_back().map(|(o, l)| (*o, *l))
            && before + size == offset
        {
            self.ranges.remove(&before);
            offset = before;
            len += size;
        }
        self.ranges.insert(offset, len);
    }

    fn is_whole(&self) -> bool {
        self.ranges.get(&0) == Some(&self.whole)
    }
}

impl Arena {
    /// An arena of at most `limit` bytes; empty. `left`: bytes that the process could still have, where that is known.
    pub fn new(limit: usize, left: impl Fn() -> Option<u64> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { limit, left: Box::new(left), segments: Mutex::default() })
    }

    fn segments(&self) -> MutexGuard<'_, Segments> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that it has.
    pub fn bytes(&self) -> usize {
        self.segments().bytes
    }

    /// Whether something is set aside.
    pub fn is_set_aside(&self) -> bool {
        self.segments().list.iter().any(|s| s.kept)
    }

    /// Sets `len` bytes aside, or what the limit leaves of them, with all of these devices; once.
    ///
    /// # Errors
    /// It cannot be mapped or registered.
    pub fn set_aside(&self, len: usize, registries: &[Arc<Registry>]) -> Result<()> {
        let len = {
            let mut segments = self.segments();
            let len = len.min(self.limit.saturating_sub(segments.bytes));
            if segments.list.iter().any(|s| s.kept) || len == 0 {
                return Ok(());
            }
            segments.bytes += len;
            len
        };
        self.add(len, registries, true, 0).map(drop)
    }

    /// Gives back what was set aside and is not lent.
    pub fn let_go(&self) {
        let gone = {
            let mut segments = self.segments();
            let (gone, list): (Vec<_>, Vec<_>) =
                std::mem::take(&mut segments.list).into_iter().partition(|s| s.free().is_whole());
            segments.list = list;
            segments.bytes -= gone.iter().map(|s| s.pages.len()).sum::<usize>();
            gone
        };
        // Verbs run here, after the lock was released.
        drop(gone);
    }

    /// Makes a segment of `len` bytes, which are counted already, and lends its first `lent` before anybody else can see
    /// it: a segment that nobody has borrowed from may go at any time.
    fn add(
        &self,
        len: usize,
        registries: &[Arc<Registry>],
        kept: bool,
        lent: usize,
    ) -> Result<Arc<Segment>> {
        match Segment::new(len, registries, kept) {
            Ok(segment) => {
                if lent > 0 {
                    segment.free().take(lent);
                }
                let segment = Arc::new(segment);
                let mut segments = self.segments();
                // What was counted may have been rounded up to pages.
                segments.bytes += segment.pages.len() - len;
                segments.list.push(Arc::clone(&segment));
                Ok(segment)
            }
            Err(e) => {
                self.segments().bytes -= len;
                Err(e)
            }
        }
    }

    /// Lends `len` bytes, in whole pages, that these devices can reach.
    ///
    /// # Errors
    /// The limit is reached, or memory cannot be mapped or registered.
    pub fn lend(self: &Arc<Self>, len: usize, registries: &[Arc<Registry>]) -> Result<Lease> {
        let len = round_up(len);
        let size = {
            let mut segments = self.segments();
            for segment in &segments.list {
                if let Some(registered) = segment.with(registries)
                    && let Some(offset) = segment.free().take(len)
                {
                    return Ok(self.lease(segment, registered, offset, len));
                }
            }
            let left = self.limit.saturating_sub(segments.bytes);
            if len > left {
                return Err(Error::system(format!(
                    "{len} bytes for copies are not to be had: {} of {} (PINRAIL_BOUNCE_BYTES) are taken; raise it",
                    segments.bytes, self.limit
                ))
                .with_errno(libc::ENOMEM));
            }
            let size = len.max(SEGMENT.min(left));
            segments.bytes += size;
            size
        };
        // The kernel would not refuse but end a process.
        if let Some(left) = (self.left)().filter(|left| size as u64 > *left) {
            self.segments().bytes -= size;
            return Err(Error::system(format!(
                "{size} bytes for copies are not to be had: the process can have {left} more"
            ))
            .with_errno(libc::ENOMEM));
        }
        let segment = match self.add(size, registries, false, len) {
            Ok(segment) => segment,
            // More than is needed now may be more than the process may lock.
            Err(_) if size > len => {
                self.segments().bytes += len;
                self.add(len, registries, false, len)?
            }
            Err(e) => return Err(e),
        };
        let registered = segment.registered.iter().map(|(r, _)| Arc::clone(r)).collect();
        Ok(self.lease(&segment, registered, 0, len))
    }

    fn lease(
        self: &Arc<Self>,
        segment: &Arc<Segment>,
        registered: Vec<Arc<Registered>>,
        offset: usize,
        len: usize,
    ) -> Lease {
        Lease { registered, offset, len, segment: Arc::clone(segment), arena: Arc::clone(self) }
    }
}

/// A part of the arena, given back when dropped. Whoever lets a peer write here drops it only when no receive that was
/// advertised with it is in flight, or after the queue pairs that the peer writes through are gone.
#[derive(Debug)]
pub struct Lease {
    registered: Vec<Arc<Registered>>,
    offset: usize,
    len: usize,
    segment: Arc<Segment>,
    arena: Arc<Arena>,
}

impl Lease {
    /// The mapping that it is in.
    pub fn pages(&self) -> &Arc<PageOwned> {
        &self.segment.pages
    }

    /// Where in the mapping it begins.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none; never.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its address.
    pub fn addr(&self) -> usize {
        self.pages().addr() + self.offset
    }

    /// Registrations in the order of the devices it was asked for.
    pub fn registered(&self) -> &[Arc<Registered>] {
        &self.registered
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let gone = {
            let mut segments = self.arena.segments();
            let mut free = self.segment.free();
            free.give(self.offset, self.len);
            if free.is_whole() && !self.segment.kept {
                drop(free);
                segments.bytes -= self.segment.pages.len();
                let at = segments.list.iter().position(|s| Arc::ptr_eq(s, &self.segment));
                at.map(|at| segments.list.swap_remove(at))
            } else {
                None
            }
        };
        // Verbs run here, or with the last field, after the lock was released.
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Ordering;
    use proptest::prelude::*;

    proptest! {
        /// Against a list of what is lent: pieces do not overlap, and everything comes back in one piece.
        #[test]
        fn pieces_do_not_overlap_and_come_back(steps in prop::collection::vec((1..40_usize, any::<(bool, prop::sample::Index)>()), 0..100)) {
            let mut free = FreeList::new(100);
            let mut lent: Vec<(usize, usize)> = Vec::new();
            for (len, (take, pick)) in steps {
                if take {
                    if let Some(offset) = free.take(len) {
                        prop_assert!(offset + len <= 100);
                        prop_assert!(lent.iter().all(|(o, l)| offset + len <= *o || o + l <= offset));
                        lent.push((offset, len));
                    }
                } else if !lent.is_empty() {
                    let (offset, len) = lent.swap_remove(pick.index(lent.len()));
                    free.give(offset, len);
                }
                let used: usize = lent.iter().map(|(_, l)| l).sum();
                prop_assert_eq!(free.ranges.values().sum::<usize>(), 100 - used);
                prop_assert_eq!(free.is_whole(), lent.is_empty());
            }
        }
    }

    #[test]
    fn the_limit_is_told_with_its_name() {
        let arena = Arena::new(1 << 20, || None);
        let refused = arena.lend(2 << 20, &[]).unwrap_err();
        assert!(refused.to_string().contains("PINRAIL_BOUNCE_BYTES"), "{refused}");
        assert_eq!(refused.errno(), Some(libc::ENOMEM));
        assert_eq!(arena.bytes(), 0);
    }

    #[test]
    fn more_than_the_process_can_have_is_not_asked_for() {
        let arena = Arena::new(64 << 20, || Some(10 << 20));
        let refused = arena.lend(11 << 20, &[]).unwrap_err();
        assert!(refused.to_string().contains("10485760 more"), "{refused}");
        assert_eq!(arena.bytes(), 0);
        assert!(arena.lend(9 << 20, &[]).is_ok());
    }

    #[test]
    fn threads_share_it() {
        let arena = Arena::new(64 << 20, || None);
        std::thread::scope(|scope| {
            for thread in 1..5 {
                let arena = &arena;
                scope.spawn(move || {
                    for round in 0..200 {
                        let lease = arena.lend(thread * 4096 * (1 + round % 7), &[]).unwrap();
                        lease
                            .pages()
                            .u64_at(lease.offset())
                            .store(thread as u64, Ordering::Relaxed);
                        std::thread::yield_now();
                        let seen = lease.pages().u64_at(lease.offset()).load(Ordering::Relaxed);
                        assert_eq!(seen, thread as u64, "lent twice");
                    }
                });
            }
        });
        assert_eq!(arena.bytes(), 0);
    }

    #[test]
    fn a_segment_goes_with_its_last_piece_unless_it_was_set_aside() {
        let arena = Arena::new(4 << 20, || None);
        let (first, second) = (arena.lend(5, &[]).unwrap(), arena.lend(5, &[]).unwrap());
        assert_eq!(first.pages().addr(), second.pages().addr());
        assert_ne!(first.addr(), second.addr());
        assert_eq!(arena.bytes(), 4 << 20);
        drop((first, second));
        assert_eq!(arena.bytes(), 0);
        arena.set_aside(usize::MAX, &[]).unwrap();
        drop(arena.lend(5, &[]).unwrap());
        assert_eq!(arena.bytes(), 4 << 20);
        let lent = arena.lend(5, &[]).unwrap();
        arena.let_go();
        assert_eq!(arena.bytes(), 4 << 20, "a piece is lent");
        drop(lent);
        arena.let_go();
        assert_eq!(arena.bytes(), 0);
    }
}
