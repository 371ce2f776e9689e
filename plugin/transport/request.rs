//! Requests and the pools they come from.
//!
//! A request is what isend, irecv and iflush hand to NCCL and what test gets back. Pools are fixed arrays with a free
//! list, so that taking and returning one is constant and never allocates. A request's address is stable as long as
//! its communicator lives, and a stale one is recognised by its state. They lie in pages that a forked child sees as
//! zeroes, so that there no request is valid, not even one that was complete at the fork.

use super::fifo::{MEMBERS, SLOTS};
use crate::error::Result;
use crate::memory::{Blank, Wiped};
use std::cell::Cell;

/// Where a request is, as the word it begins with. The upper bits mark memory as a request of this plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State(u32);

impl State {
    /// Set in both pending states.
    const PENDING_BIT: u32 = 0x10;
    /// In the free list.
    pub const FREE: Self = Self(0x5052_5100);
    /// Given out and not complete; polling one completion queue is all that test has to do.
    pub const PENDING: Self = Self(0x5052_5111);
    /// Given out and not complete, on several rails or with data to copy.
    pub const PENDING_RAILS: Self = Self(0x5052_5112);
    /// Complete and not yet tested.
    pub const DONE: Self = Self(0x5052_5101);
    /// The same, and the time until its test is taken.
    pub const TIMED: Self = Self(0x5052_5102);
    /// Not in use and not to be used.
    pub const WITHHELD: Self = Self(0x5052_50e0);
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Started; the request was handed out.
    Started,
    /// Posting failed, after the request was handed out; the communicator remembers why and is broken.
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
    index: u16,
    /// Members while in use; the next in the free list while not.
    link: Cell<u16>,
    owner: Cell<usize>,
    /// Where the test in progress wants its answer: kept here instead of in registers across the poll.
    answer: Cell<(usize, usize)>,
    /// Bytes of each member; a flush counts its parts in the first.
    sizes: [Cell<i32>; MEMBERS],
}
const _: () = assert!(size_of::<Request>() == 64);
// SAFETY: integers in cells, all of which may be zero.
unsafe impl Blank for Request {}

impl Request {
    /// Whether this memory looks like a request.
    #[inline(always)]
    pub fn is_valid(&self) -> bool {
        self.state.get().0 & !0x1f == State::FREE.0
    }

    /// Whether polling one completion queue is all that test has to do.
    #[inline(always)]
    pub fn is_simply_pending(&self) -> bool {
        self.state.get() == State::PENDING
    }

    /// Whether it was given out and is not complete.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.state.get().0 & State::PENDING_BIT != 0
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

    /// Whether it belongs to a receive: it has one member.
    #[inline(always)]
    pub fn is_of_receive(&self) -> bool {
        usize::from(self.index) < SLOTS
    }

    /// Whether it belongs to something.
    #[inline(always)]
    pub fn is_own(&self) -> bool {
        usize::from(self.index) < OWN
    }

    /// Takes back a complete request that belongs to something: it goes nowhere.
    #[inline(always)]
    pub fn put_own(&self) {
        self.state.set(State::FREE);
    }

    /// Position in its pool.
    #[inline]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Where it is.
    #[inline(always)]
    pub fn state(&self) -> State {
        self.state.get()
    }

    /// Number of members.
    #[inline(always)]
    pub fn members(&self) -> usize {
        usize::from(self.link.get())
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

    /// The same, and its time is being taken.
    #[inline]
    pub fn complete_timed(&self) {
        self.state.set(State::TIMED);
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

impl Request {
    fn new(index: u16) -> Self {
        Self {
            state: Cell::new(State::FREE),
            index,
            link: Cell::new(1),
            owner: Cell::new(0),
            answer: Cell::new((0, 0)),
            sizes: Default::default(),
        }
    }
}

/// Requests that belong to something: one to each receive in flight, for the usual one-member transfer, then as many
/// for the usual flush.
const OWN: usize = 2 * SLOTS;

/// A fixed number of requests of one communicator: those that belong to something, and others in a free list for
/// everything else.
#[derive(Debug)]
pub struct RequestPool {
    all: Wiped<Request, OWN>,
    free: Cell<u16>,
    pending: State,
}

impl RequestPool {
    /// The requests that belong to something and `others` more, of a communicator with `rails` rails.
    ///
    /// # Errors
    /// No memory.
    pub fn new(others: u16, rails: usize) -> Result<Self> {
        let all = Wiped::new(others.into(), |index| {
            let request = Request::new(index as u16);
            request.link.set(match index.checked_sub(OWN) {
                // The last one's successor is past the end, which `get` recognises like any other index.
                Some(_) => index as u16 + 1,
                None => u16::from(index < SLOTS),
            });
            request
        })?;
        let pending = if rails == 1 { State::PENDING } else { State::PENDING_RAILS };
        Ok(Self { all, free: Cell::new(OWN as u16), pending })
    }

    /// The same pool with the slots' own requests out of use.
    pub fn without_own(self) -> Self {
        for request in &self.all.head()[..SLOTS] {
            request.state.set(State::WITHHELD);
        }
        self
    }

    /// Puts the request of `slot` out of use, or into use again, unless it is in use. Whether it is as wanted.
    pub fn withhold(&self, slot: usize, yes: bool) -> bool {
        let own = self.own(slot);
        match (own.state(), yes) {
            (State::FREE, true) => own.state.set(State::WITHHELD),
            (State::WITHHELD, false) => own.state.set(State::FREE),
            _ => {}
        }
        (own.state() == State::WITHHELD) == yes
    }

    /// The same pool with the requests of usual flushes out of use.
    pub fn without_flushes(self) -> Self {
        for request in &self.all.head()[SLOTS..] {
            request.state.set(State::WITHHELD);
        }
        self
    }

    /// Tells every request whom it belongs to: the address that test() starts from.
    pub fn set_owner(&mut self, owner: usize) {
        for request in &*self.all {
            request.owner.set(owner);
        }
    }

    /// The request that belongs to `slot`.
    #[inline(always)]
    pub fn own(&self, slot: usize) -> &Request {
        &self.all.head()[slot % SLOTS]
    }

    /// The request that belongs to flush number `flush`.
    #[inline(always)]
    pub fn own_flush(&self, flush: usize) -> &Request {
        &self.all.head()[SLOTS + flush % SLOTS]
    }

    /// Takes a request that belongs to something and is free.
    #[inline(always)]
    pub fn take_own(&self, request: &Request) {
        request.state.set(self.pending);
    }

    /// How many are given out and not complete.
    pub fn pending(&self) -> usize {
        self.all.iter().filter(|request| request.is_pending()).count()
    }

    /// Whether one can be taken from the free list.
    pub fn has_free(&self) -> bool {
        self.get(self.free.get()).is_some()
    }

    /// Takes a request from the free list, in state pending, with `members` members.
    pub fn take(&self, members: u8) -> Option<&Request> {
        let request = self.get(self.free.get())?;
        self.free.set(request.link.get());
        request.state.set(self.pending);
        request.link.set(members.into());
        Some(request)
    }

    /// As [`Self::take`], for a request whose test has more to do than polling one queue.
    pub fn take_watched(&self, members: u8) -> Option<&Request> {
        let request = self.take(members)?;
        request.state.set(State::PENDING_RAILS);
        Some(request)
    }

    /// Request number `index`, if there is one.
    pub fn get(&self, index: u16) -> Option<&Request> {
        self.all.get(usize::from(index))
    }

    /// Takes request number `index` back if it is complete; `None` if it is not in flight.
    pub fn finish(&self, index: u16) -> Option<Outcome> {
        let request = self.get(index)?;
        match request.state() {
            State::DONE | State::TIMED => {
                let members = request.members();
                self.put(request);
                Some(Outcome::Done(members))
            }
            State::PENDING | State::PENDING_RAILS => Some(Outcome::Pending),
            _ => None,
        }
    }

    /// Takes back a complete request of this pool. Its sizes stay readable until it is taken again.
    #[inline(always)]
    pub fn put(&self, request: &Request) {
        request.state.set(State::FREE);
        if !request.is_own() {
            request.link.set(self.free.get());
            self.free.set(request.index);
        }
    }

    /// Requests given out.
    pub fn in_use(&self) -> usize {
        self.all
            .iter()
            .filter(|r| r.is_pending() || matches!(r.state(), State::DONE | State::TIMED))
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        /// Against a set: no request is given out twice, none is lost, addresses stay, slots' own are left alone.
        #[test]
        fn behaves_as_a_set(capacity in 0..40_u16, actions in prop::collection::vec(any::<(bool, u16)>(), 0..200)) {
            let pool = RequestPool::new(capacity, 1).unwrap();
            let mut out: Vec<u16> = Vec::new();
            for (take, pick) in actions {
                if take {
                    match pool.take(1) {
                        Some(request) => {
                            prop_assert!(request.is_pending() && request.is_valid());
                            let index = request.index();
                            prop_assert!(!out.contains(&index) && usize::from(index) >= OWN);
                            out.push(index);
                        }
                        None => prop_assert_eq!(out.len(), usize::from(capacity)),
                    }
                } else if !out.is_empty() {
                    let index = out.swap_remove(usize::from(pick) % out.len());
                    let before: *const Request = pool.get(index).unwrap();
                    prop_assert_eq!(pool.finish(index), Some(Outcome::Pending));
                    pool.get(index).unwrap().complete();
                    prop_assert_eq!(pool.finish(index), Some(Outcome::Done(1)));
                    prop_assert_eq!(pool.finish(index), None);
                    prop_assert_eq!(before, std::ptr::from_ref(pool.get(index).unwrap()));
                }
                prop_assert_eq!(pool.in_use(), out.len());
                prop_assert_eq!(pool.has_free(), out.len() < usize::from(capacity));
            }
            let distinct: HashSet<_> = out.iter().collect();
            prop_assert_eq!(distinct.len(), out.len());
        }
    }

    #[test]
    fn a_slots_own_request_comes_back_by_itself() {
        let pool = RequestPool::new(0, 1).unwrap();
        let request = pool.own(SLOTS + 3);
        assert_eq!(request.index(), 3);
        pool.take_own(request);
        assert_eq!(pool.in_use(), 1);
        request.complete();
        assert_eq!(pool.finish(3), Some(Outcome::Done(1)));
        assert_eq!(pool.finish(3), None);
        assert!(!pool.has_free());
    }

    #[test]
    fn parts_complete_a_request_once() {
        let pool = RequestPool::new(1, 2).unwrap();
        let request = pool.take(0).unwrap();
        request.set_parts(2);
        assert!(!request.is_simply_pending() && request.is_pending());
        request.complete_part();
        assert!(request.is_pending());
        request.complete_part();
        assert_eq!(request.state(), State::DONE);
    }
}
