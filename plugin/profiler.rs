//! Calls of the profiler callback that NCCL gives to init.
//!
//! An event begins when a work request is about to be posted and ends when what it is part of has completed. Whoever
//! holds an [`Event`] has one that the profiler knows: dropping it is the one way to end it, so that each ends once, on
//! success, on failure and when a connection is closed.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::num::NonZeroUsize;
use std::ptr;

/// `ncclProfilerCallback_t`: where the event's handle goes, what happens, the parent of a new event, who made its
/// description, and that.
pub type Callback =
    unsafe extern "C" fn(*mut *mut c_void, c_int, *mut c_void, i64, *mut c_void) -> c_int;

const START: c_int = 0;
const STOP: c_int = 1;
/// An event of an RDMA transport, described as below.
const IDENTITY: i64 = (1 << 16) | 1;
/// The description is of a queue pair.
const ABOUT_A_QUEUE_PAIR: u8 = 1;

/// What NCCL wants events of a transfer to belong to; opaque, and `None` where it has nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parent(Option<NonZeroUsize>);

impl Parent {
    /// The pointer that came with a transfer.
    #[inline(always)]
    pub fn new(pointer: *mut c_void) -> Self {
        Self(NonZeroUsize::new(pointer.expose_provenance()))
    }

    /// Whether events can belong to it.
    pub fn is_some(self) -> bool {
        self.0.is_some()
    }
}

/// A work request, as a profiler is told of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// The port's number among the devices.
    pub device: c_int,
    /// Its identifier.
    pub id: u64,
    /// Its operation, `IBV_WR_*`.
    pub opcode: c_int,
    /// The queue pair's number.
    pub queue_pair: c_int,
    /// Bytes.
    pub bytes: usize,
}

/// `ncclProfilerNetIbDescr_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Description {
    about: u8,
    work: Work,
}
const _: () = {
    assert!(size_of::<Description>() == 40 && offset_of!(Description, work) == 8);
    assert!(offset_of!(Work, device) == 0 && offset_of!(Work, id) == 8);
    assert!(offset_of!(Work, opcode) == 16 && offset_of!(Work, queue_pair) == 20);
    assert!(offset_of!(Work, bytes) == 24);
};

/// NCCL's way to the profiler.
#[derive(Clone, Copy, Debug)]
pub struct Profiler(Callback);

impl Profiler {
    /// # Safety
    /// The callback may be called from any thread as long as anything lives that was made with this value; it reads the
    /// description during the call only.
    pub unsafe fn new(callback: Callback) -> Self {
        Self(callback)
    }

    /// Begins an event. `None`: nobody wants it, as is usual, or it has no parent.
    pub fn start(self, parent: Parent, work: Work) -> Option<Event> {
        let parent = ptr::with_exposed_provenance_mut(parent.0?.get());
        let mut told = Description { about: ABOUT_A_QUEUE_PAIR, work };
        // NCCL leaves it alone where nobody listens.
        let mut handle: *mut c_void = ptr::null_mut();
        // SAFETY: as promised to `new`; the parent came from NCCL with the transfer, which is not complete.
        let rc =
            unsafe { (self.0)(&raw mut handle, START, parent, IDENTITY, (&raw mut told).cast()) };
        let handle = NonZeroUsize::new(handle.expose_provenance()).filter(|_| rc == 0)?;
        Some(Event { profiler: self, handle })
    }
}

/// An event that the profiler knows. Dropping it ends it.
#[derive(Debug)]
pub struct Event {
    profiler: Profiler,
    handle: NonZeroUsize,
}

impl Drop for Event {
    fn drop(&mut self) {
        let mut handle: *mut c_void = ptr::with_exposed_provenance_mut(self.handle.get());
        let nothing = ptr::null_mut();
        // SAFETY: as promised to `Profiler::new`; the handle is the profiler's own, and this is its only end.
        unsafe { (self.profiler.0)(&raw mut handle, STOP, nothing, 0, nothing) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// What happened, its parent or handle, who described it, and how.
    type Call = (c_int, usize, i64, Option<Description>);

    thread_local! {
        static CALLS: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) };
    }
    const INACTIVE: usize = 0x10;
    const FAILING: usize = 0x20;

    unsafe extern "C" fn record(
        handle: *mut *mut c_void,
        kind: c_int,
        parent: *mut c_void,
        identity: i64,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the caller's, as NCCL's profiler may expect.
        let (work, before) = unsafe { (data.cast::<Description>().as_ref().copied(), *handle) };
        let about = if kind == START { parent.addr() } else { before.addr() };
        CALLS.with_borrow_mut(|calls| calls.push((kind, about, identity, work)));
        if kind == START && parent.addr() != INACTIVE {
            assert!(before.is_null(), "a profiler that is not active leaves it alone");
            // SAFETY: as above.
            unsafe { *handle = ptr::without_provenance_mut(parent.addr() + 1) };
        }
        c_int::from(parent.addr() == FAILING)
    }

    #[test]
    fn each_event_that_was_taken_ends_once() {
        // SAFETY: a function of this program.
        let profiler = unsafe { Profiler::new(record) };
        let work = Work { device: 2, id: u64::MAX, opcode: 1, queue_pair: 77, bytes: 1 << 40 };
        let parent = |address| Parent::new(ptr::without_provenance_mut(address));
        assert!(profiler.start(Parent::new(ptr::null_mut()), work).is_none());
        assert_eq!(CALLS.take(), []);
        for refused in [INACTIVE, FAILING] {
            assert!(profiler.start(parent(refused), work).is_none());
            assert_eq!(CALLS.take().len(), 1, "no end of what did not begin");
        }
        drop(profiler.start(parent(0x30), work).unwrap());
        let told = Description { about: 1, work };
        assert_eq!(CALLS.take(), [(START, 0x30, 0x1_0001, Some(told)), (STOP, 0x31, 0, None)]);
    }
}
