//! Requests and the pools they come from.
//!
//! A request is what isend, irecv and iflush hand to NCCL and what test gets back. Pools are fixed arrays with a free
//! list, so that taking and returning one is constant and never allocates. A request's address is stable as long as
//! its communicator lives, and a stale one is recognised by its state.

use super::fifo::MEMBERS;
use std::cell::Cell;

/// Where a request is, as the word it begins with. The upper bits mark memory as a request of this plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State(u32);

impl State {
    /// In the free list.
    pub const FREE: Self = Self(0x5052_5100);
    /// Given out and not complete; polling one completion queue is all that test has to do.
    pub const PENDING: Self = Self(0x5052_5101);
    /// Given out and not complete, on several rails.
    pub const PENDING_RAILS: Self = Self(0x5052_5102);
    /// Complete and not yet tested.
    pub const DONE: Self = Self(0x5052_5103);
}

/// What test() found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Not complete.
    Pending,
    /// Complete, with the sizes of this many members; 0 for a flush.
    Done(usize),
}

/// How a call that starts work went without help from the general case.
#[derive(Debug)]
pub enum Start<'a> {
    /// Started.
    Started(&'a Request),
    /// Posting failed; the communicator remembers why.
    Failed,
    /// Nothing can start now.
    WouldBlock,
    /// The general case has to decide.
    General,
}

/// One request, a cache line of its own. Fields are cells because the pointer that NCCL holds is shared with the pool.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Request {
    state: Cell<State>,
    next_free: Cell<u16>,
    index: u8,
    members: Cell<u8>,
    owner: Cell<usize>,
    /// Where the test in progress wants its answer: kept here instead of in registers across the poll.
    answer: Cell<(usize, usize)>,
    /// Bytes of each member; a flush counts its parts in the first.
    sizes: [Cell<i32>; MEMBERS],
}
const _: () = assert!(size_of::<Request>() == 64);

impl Request {
    /// Whether this memory looks like a request.
    #[inline(always)]
    pub fn is_valid(&self) -> bool {
        (State::FREE.0..=State::DONE.0).contains(&self.state.get().0)
    }

    /// Whether polling one completion queue is all that test has to do.
    #[inline(always)]
    pub fn is_simply_pending(&self) -> bool {
        self.state.get() == State::PENDING
    }

    /// Whether it was given out and is not complete.
    #[inline]
    pub fn is_pending(&self) -> bool {
        matches!(self.state.get(), State::PENDING | State::PENDING_RAILS)
    }

    /// The owner's address, as given to the pool; opaque here.
    #[inline(always)]
    pub fn owner(&self) -> usize {
        self.owner.get()
    }

    /// Remembers where test's caller wants the answer: addresses, opaque here.
    #[inline(always)]
    pub fn set_answer(&self, done: usize, sizes: usize) {
        self.answer.set((done, sizes));
    }

    /// See [`Self::set_answer`].
    #[inline(always)]
    pub fn answer(&self) -> (usize, usize) {
        self.answer.get()
    }

    /// Position in its pool.
    #[inline]
    pub fn index(&self) -> u16 {
        self.index.into()
    }

    /// Where it is.
    #[inline(always)]
    pub fn state(&self) -> State {
        self.state.get()
    }

    /// Number of members.
    #[inline(always)]
    pub fn members(&self) -> usize {
        usize::from(self.members.get())
    }

    /// Bytes of member `index`; 0 where there is no such member.
    #[inline(always)]
    pub fn size(&self, index: usize) -> i32 {
        self.sizes[index % MEMBERS].get()
    }

    /// Sets the bytes of member `index`.
    #[inline(always)]
    pub fn set_size(&self, index: usize, size: u32) {
        self.sizes[index % MEMBERS].set(size.cast_signed());
    }

    /// Complete.
    #[inline(always)]
    pub fn complete(&self) {
        self.state.set(State::DONE);
    }

    /// One part of several is complete; the last completes the request.
    pub fn complete_part(&self) {
        let left = self.sizes[0].get() - 1;
        self.sizes[0].set(left);
        if left <= 0 {
            self.complete();
        }
    }

    /// Sets how many parts must complete.
    pub fn set_parts(&self, parts: u8) {
        self.sizes[0].set(parts.into());
    }
}

/// A fixed number of requests of one communicator.
#[derive(Debug)]
pub struct RequestPool {
    requests: Box<[Request]>,
    free: Cell<u16>,
    pending: State,
}

impl RequestPool {
    /// `capacity` free requests, at most 256, of a communicator with `rails` rails.
    pub fn new(capacity: u16, rails: usize) -> Self {
        let requests: Box<[_]> = (0..=u8::MAX)
            .take(capacity.into())
            .map(|index| Request {
                state: Cell::new(State::FREE),
                next_free: Cell::new(u16::from(index) + 1),
                index,
                members: Cell::new(0),
                owner: Cell::new(0),
                answer: Cell::new((0, 0)),
                sizes: Default::default(),
            })
            .collect();
        // The last one's successor is past the end, which `next` recognises like any other index.
        let pending = if rails == 1 { State::PENDING } else { State::PENDING_RAILS };
        Self { requests, free: Cell::new(0), pending }
    }

    /// Tells every request whom it belongs to: the address that test() starts from.
    pub fn set_owner(&mut self, owner: usize) {
        for request in &self.requests {
            request.owner.set(owner);
        }
    }

    /// Whether one can be taken.
    #[inline(always)]
    pub fn has_free(&self) -> bool {
        self.next().is_some()
    }

    /// The request that would be taken next; nothing is taken yet.
    #[inline(always)]
    pub fn next(&self) -> Option<&Request> {
        self.requests.get(usize::from(self.free.get()))
    }

    /// Takes what [`Self::next`] returned, in state pending, with `members` members.
    #[inline(always)]
    pub fn commit(&self, next: &Request, members: u8) {
        self.free.set(next.next_free.get());
        next.state.set(self.pending);
        next.members.set(members);
    }

    /// Takes a request with `members` members, in state pending.
    pub fn take(&self, members: u8) -> Option<&Request> {
        let request = self.next()?;
        self.commit(request, members);
        Some(request)
    }

    /// Request number `index`, if there is one.
    #[inline(always)]
    pub fn get(&self, index: usize) -> Option<&Request> {
        self.requests.get(index)
    }

    /// Takes request number `index` back if it is complete; `None` if it is not in flight.
    #[inline]
    pub fn finish(&self, index: u16) -> Option<Outcome> {
        let request = self.requests.get(usize::from(index))?;
        match request.state() {
            State::DONE => {
                request.state.set(State::FREE);
                request.next_free.set(self.free.get());
                self.free.set(index);
                Some(Outcome::Done(request.members()))
            }
            State::FREE => None,
            _ => Some(Outcome::Pending),
        }
    }

    /// Takes back a complete request of this pool. Its sizes stay readable until it is taken again.
    #[inline(always)]
    pub fn put(&self, request: &Request) {
        request.state.set(State::FREE);
        request.next_free.set(self.free.get());
        self.free.set(request.index.into());
    }

    /// Requests given out.
    pub fn in_use(&self) -> usize {
        self.requests.iter().filter(|r| r.state() != State::FREE).count()
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
            let pool = RequestPool::new(capacity, 1);
            let mut out: Vec<u16> = Vec::new();
            for (take, pick) in actions {
                if take {
                    match pool.take(1) {
                        Some(request) => {
                            prop_assert!(request.is_pending() && request.is_valid());
                            let index = request.index();
                            prop_assert!(!out.contains(&index));
                            out.push(index);
                        }
                        None => prop_assert_eq!(out.len(), usize::from(capacity)),
                    }
                } else if !out.is_empty() {
                    let index = out.swap_remove(usize::from(pick) % out.len());
                    let before: *const Request = pool.get(index.into()).unwrap();
                    prop_assert_eq!(pool.finish(index), Some(Outcome::Pending));
                    pool.get(index.into()).unwrap().complete();
                    prop_assert_eq!(pool.finish(index), Some(Outcome::Done(1)));
                    prop_assert_eq!(pool.finish(index), None);
                    prop_assert_eq!(before, std::ptr::from_ref(pool.get(index.into()).unwrap()));
                }
                prop_assert_eq!(pool.in_use(), out.len());
                prop_assert_eq!(pool.has_free(), out.len() < usize::from(capacity));
            }
            let distinct: HashSet<_> = out.iter().collect();
            prop_assert_eq!(distinct.len(), out.len());
        }
    }

    #[test]
    fn parts_complete_a_request_once() {
        let pool = RequestPool::new(1, 2);
        let request = pool.take(0).unwrap();
        request.set_parts(2);
        assert!(!request.is_simply_pending() && request.is_pending());
        request.complete_part();
        assert!(request.is_pending());
        request.complete_part();
        assert_eq!(request.state(), State::DONE);
    }
}
