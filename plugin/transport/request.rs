//! Requests and the pools they come from.
//!
//! A request is what isend, irecv and iflush hand to NCCL and what test gets back. Pools are fixed arrays with a free
//! list, so that taking and returning one is constant and never allocates. A request's address is stable as long as
//! its communicator lives, and a stale one is recognised by its state.

use super::fifo::MEMBERS;
use std::cell::Cell;

/// Marks memory as a request of this plugin.
const MAGIC: u32 = 0x5052_5131;

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In the free list.
    Free,
    /// Given out and not complete.
    Pending,
    /// Complete and not yet tested.
    Done,
}

/// What test() found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Not complete.
    Pending,
    /// Complete, with the sizes of this many members; 0 for a flush.
    Done(usize),
}

/// One request. Fields are cells because the pointer that NCCL holds is shared with the pool.
#[derive(Debug)]
pub struct Request {
    owner: Cell<usize>,
    magic: u32,
    index: u16,
    next_free: Cell<u16>,
    state: Cell<State>,
    members: Cell<u8>,
    /// What must still happen: parts of a flush.
    pending: Cell<u8>,
    sizes: [Cell<i32>; MEMBERS],
}

impl Request {
    /// Whether this memory looks like a request.
    #[inline]
    pub fn is_valid(&self) -> bool {
        self.magic == MAGIC
    }

    /// The owner's address, as given to the pool; opaque here.
    #[inline]
    pub fn owner(&self) -> usize {
        self.owner.get()
    }

    /// Position in its pool.
    #[inline]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Where it is.
    #[inline]
    pub fn state(&self) -> State {
        self.state.get()
    }

    /// Number of members.
    #[inline]
    pub fn members(&self) -> usize {
        usize::from(self.members.get())
    }

    /// Bytes of member `index`.
    #[inline]
    pub fn size(&self, index: usize) -> i32 {
        self.sizes[index].get()
    }

    /// Sets the bytes of member `index`.
    #[inline]
    pub fn set_size(&self, index: usize, size: u32) {
        self.sizes[index].set(size.cast_signed());
    }

    /// Complete.
    #[inline]
    pub fn complete(&self) {
        self.state.set(State::Done);
    }

    /// One part of several is complete; true when it was the last.
    pub fn complete_part(&self) -> bool {
        let left = self.pending.get().saturating_sub(1);
        self.pending.set(left);
        if left == 0 {
            self.complete();
        }
        left == 0
    }

    /// Sets how many parts must complete.
    pub fn set_parts(&self, parts: u8) {
        self.pending.set(parts);
    }
}

const END: u16 = u16::MAX;

/// A fixed number of requests of one communicator.
#[derive(Debug)]
pub struct RequestPool {
    requests: Box<[Request]>,
    free: u16,
    in_use: u16,
}

impl RequestPool {
    /// `capacity` free requests, fewer than 65,535.
    pub fn new(capacity: u16) -> Self {
        assert!(capacity < END);
        let requests = (0..capacity)
            .map(|index| Request {
                owner: Cell::new(0),
                magic: MAGIC,
                index,
                next_free: Cell::new(if index + 1 < capacity { index + 1 } else { END }),
                state: Cell::new(State::Free),
                members: Cell::new(0),
                pending: Cell::new(0),
                sizes: Default::default(),
            })
            .collect();
        Self { requests, free: if capacity == 0 { END } else { 0 }, in_use: 0 }
    }

    /// Tells every request whom it belongs to: the address that test() starts from.
    pub fn set_owner(&mut self, owner: usize) {
        for request in &self.requests {
            request.owner.set(owner);
        }
    }

    /// Whether one can be taken.
    #[inline]
    pub fn has_free(&self) -> bool {
        self.free != END
    }

    /// Requests given out.
    pub fn in_use(&self) -> u16 {
        self.in_use
    }

    /// Takes a request with `members` members, in state pending.
    #[inline]
    pub fn take(&mut self, members: u8) -> Option<&Request> {
        let request = self.requests.get(usize::from(self.free))?;
        self.free = request.next_free.get();
        self.in_use += 1;
        request.state.set(State::Pending);
        request.members.set(members);
        Some(request)
    }

    /// Request number `index`.
    ///
    /// # Panics
    /// There is no such request.
    #[inline]
    pub fn get(&self, index: u16) -> &Request {
        &self.requests[usize::from(index)]
    }

    /// Returns request number `index` to the free list. Its sizes stay readable until it is taken again.
    #[inline]
    pub fn put(&mut self, index: u16) {
        let request = &self.requests[usize::from(index)];
        debug_assert_ne!(request.state.get(), State::Free);
        request.state.set(State::Free);
        request.next_free.set(self.free);
        self.free = index;
        self.in_use -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        /// Against a set: no request is given out twice, none is lost, addresses stay.
        #[test]
        fn behaves_as_a_set(capacity in 0..40_u16, actions in prop::collection::vec(any::<(bool, u16)>(), 0..200)) {
            let mut pool = RequestPool::new(capacity);
            let mut out: Vec<u16> = Vec::new();
            for (take, pick) in actions {
                if take {
                    match pool.take(1) {
                        Some(request) => {
                            prop_assert_eq!(request.state(), State::Pending);
                            let index = request.index();
                            prop_assert!(!out.contains(&index));
                            out.push(index);
                        }
                        None => prop_assert_eq!(out.len(), usize::from(capacity)),
                    }
                } else if !out.is_empty() {
                    let index = out.swap_remove(usize::from(pick) % out.len());
                    let before: *const Request = pool.get(index);
                    pool.put(index);
                    prop_assert_eq!(before, std::ptr::from_ref(pool.get(index)));
                    prop_assert_eq!(pool.get(index).state(), State::Free);
                }
                prop_assert_eq!(usize::from(pool.in_use()), out.len());
            }
            let distinct: HashSet<_> = out.iter().collect();
            prop_assert_eq!(distinct.len(), out.len());
        }
    }

    #[test]
    fn parts_complete_a_request_once() {
        let mut pool = RequestPool::new(1);
        let request = pool.take(0).unwrap();
        request.set_parts(2);
        assert!(!request.complete_part());
        assert_eq!(request.state(), State::Pending);
        assert!(request.complete_part());
        assert_eq!(request.state(), State::Done);
    }
}
