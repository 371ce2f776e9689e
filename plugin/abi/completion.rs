//! test with raw arguments.
//!
//! What must hold of the arguments is NCCL's contract, see [`super::calls`].

use super::boundary::enter;
use super::calls::put;
use super::objects::{self, Owner};
use super::transfer::pointer;
use super::types::{NcclResult, SUCCESS};
use crate::error::Fault;
use crate::hint::apart;
use crate::transport::comm::Ending;
use crate::transport::request::{Outcome, Request, State};
use crate::verbs::cq::At;
use std::ffi::{c_int, c_void};

/// test. `done` means SenderCompleted for a send, HostVisible for a receive, GpuVisible for a flush.
///
/// A test that finds nothing is most of what NCCL's Progress thread does, so it runs here without a panic boundary
/// (nothing in it can panic) and keeps nothing across the poll but the request, which remembers where the answer goes.
///
/// # Safety
/// See the module text; `sizes` is NULL or has room for the members of the request.
#[inline(always)]
pub unsafe fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> NcclResult {
    if request.is_null() || done.is_null() {
        // SAFETY: as the module text says.
        return unsafe { test_general(request, done, sizes) };
    }
    // SAFETY: an out-pointer of the call, not NULL.
    unsafe { done.write(0) };
    // SAFETY: as the module text says, aligned and readable.
    let waiting = unsafe { &*request.cast::<Request>() };
    if !waiting.is_simply_pending() {
        // SAFETY: as the module text says.
        return unsafe { test_settled(waiting, done, sizes) };
    }
    waiting.set_answer(done.expose_provenance(), sizes.expose_provenance());
    // SAFETY: pending; and one thread drives a communicator.
    let pump = unsafe { objects::pump_of(waiting) };
    if !pump.gate().is_open() {
        // SAFETY: as the module text says.
        return unsafe { test_general(request, done, sizes) };
    }
    match pump.poll_first() {
        0 => SUCCESS,
        // SAFETY: as the module text says.
        found => unsafe { test_found(waiting, found) },
    }
}

/// A test of a request that another test has seen complete, or that is not simply pending.
#[inline(never)]
unsafe extern "C" fn test_settled(
    request: &Request,
    done: *mut c_int,
    sizes: *mut c_int,
) -> NcclResult {
    if request.state() == State::DONE && request.is_of_receive() {
        request.put_own();
        // SAFETY: the pointers are those of this test; a receive's own has one member.
        unsafe { write_one(request, done, sizes) };
        return SUCCESS;
    }
    if request.state() == State::TIMED {
        // SAFETY: as for this function.
        return unsafe { test_timed(request, done, sizes) };
    }
    if request.state() == State::DONE {
        // Before it goes back: its place in the free list takes the number's.
        let members = request.members();
        // SAFETY: a complete request belongs to a live communicator.
        match unsafe { objects::owner_of(request) } {
            Some(Owner::Send(comm)) => comm.put(request),
            Some(Owner::Recv(comm)) => comm.put(request),
            None => {}
        }
        // SAFETY: the pointers are those of this test.
        unsafe { write(request, members, done, sizes) };
        return SUCCESS;
    }
    let request: *mut c_void = pointer(request);
    // SAFETY: as the module text says.
    unsafe { test_general(request, done, sizes) }
}

/// A test of a request that another test has seen complete, and whose time is being taken. It is a receive's own.
#[inline(never)]
unsafe extern "C" fn test_timed(
    request: &Request,
    done: *mut c_int,
    sizes: *mut c_int,
) -> NcclResult {
    // SAFETY: a complete request belongs to a live communicator.
    match unsafe { objects::owner_of(request) } {
        Some(Owner::Send(comm)) => comm.pick_up(),
        Some(Owner::Recv(comm)) => comm.pick_up(),
        None => {}
    }
    request.put_own();
    // SAFETY: the pointers are those of this test; a receive's own has one member.
    unsafe { write_one(request, done, sizes) };
    SUCCESS
}

/// Goes on with a test whose poll found something.
///
/// This and what it goes on with are called as C does, so that the end of [`test`] and theirs can be jumps.
#[inline(never)]
unsafe extern "C" fn test_found(request: &Request, found: i32) -> NcclResult {
    // SAFETY: a pending request, by the caller; see there.
    let owner = unsafe { objects::owner_of(request) };
    match owner {
        Some(Owner::Send(comm)) if found == 1 => {
            if !comm.settle::<false>(At::FIRST) {
                // SAFETY: as for this function.
                return unsafe { test_found_one(request) };
            }
            if request.state() == State::DONE {
                request.put_own();
                // SAFETY: the answer's pointers were given to this test; a send has one member.
                unsafe { answer_one(request) };
            }
            SUCCESS
        }
        Some(Owner::Recv(comm)) if found == 1 => {
            if !comm.settle::<false>(At::FIRST) {
                // SAFETY: as for this function.
                return unsafe { test_found_one(request) };
            }
            if request.state() != State::DONE {
                return SUCCESS;
            }
            if request.is_of_receive() {
                request.put_own();
                // SAFETY: the answer's pointers were given to this test; a receive's own has one member.
                unsafe { answer_one(request) };
                return SUCCESS;
            }
            // Before it goes back: its place in the free list takes the number's.
            let members = request.members();
            comm.put(request);
            // SAFETY: as above.
            unsafe { answer(request, members) };
            SUCCESS
        }
        // SAFETY: as for this function.
        _ => unsafe { test_found_several(request, found) },
    }
}

/// Goes on with a test whose poll found one completion that is not done with at once: the last of a batch, one whose time
/// is being taken, or an unusual one.
#[inline(never)]
unsafe extern "C" fn test_found_one(request: &Request) -> NcclResult {
    // SAFETY: a pending request, by the caller; see there.
    let settled = match unsafe { objects::owner_of(request) } {
        Some(Owner::Send(comm)) => comm.settle::<true>(At::FIRST),
        Some(Owner::Recv(comm)) => comm.settle::<true>(At::FIRST),
        None => false,
    };
    if !settled {
        // SAFETY: as for this function.
        return unsafe { test_found_several(request, 1) };
    }
    if request.is_pending() {
        return SUCCESS;
    }
    if request.is_of_receive() {
        request.put_own();
        // SAFETY: the answer's pointers were given to this test; a receive's own has one member.
        unsafe { answer_one(request) };
        return SUCCESS;
    }
    let (done, sizes) = request.answer();
    let done = std::ptr::with_exposed_provenance_mut(done);
    let sizes = std::ptr::with_exposed_provenance_mut(sizes);
    // SAFETY: as the module text says.
    unsafe { test_settled(request, done, sizes) }
}

/// Goes on with a test whose poll found several completions, or an unusual one.
#[inline(never)]
unsafe extern "C" fn test_found_several(request: &Request, found: i32) -> NcclResult {
    let count = usize::try_from(found).unwrap_or(0);
    let mut settled = 0;
    // SAFETY: a pending request, by the caller; see there.
    match unsafe { objects::owner_of(request) } {
        Some(Owner::Send(comm)) => {
            settled = At::first(count).take_while(|at| comm.settle::<true>(*at)).count();
        }
        Some(Owner::Recv(comm)) => {
            settled = At::first(count).take_while(|at| comm.settle::<true>(*at)).count();
        }
        None => {}
    }
    let (done, sizes) = request.answer();
    let done = std::ptr::with_exposed_provenance_mut(done);
    let sizes = std::ptr::with_exposed_provenance_mut(sizes);
    if settled == count && count > 0 {
        if request.is_pending() {
            return SUCCESS;
        }
        // SAFETY: as the module text says.
        return unsafe { test_settled(request, done, sizes) };
    }
    let request: *mut c_void = pointer(request);
    enter("test", || {
        // SAFETY: as the module text says.
        match unsafe { objects::owner(request) }?.0 {
            Owner::Send(comm) => comm.completions(settled, found)?,
            Owner::Recv(comm) => comm.completions(settled, found)?,
        }
        // SAFETY: as the module text says.
        unsafe { finish(request, done, sizes) }
    })
}

/// Answers the test of a request with `members` members.
///
/// # Safety
/// The request's answer is that of the test in progress.
unsafe fn answer(request: &Request, members: usize) {
    let (done, sizes) = request.answer();
    let done = std::ptr::with_exposed_provenance_mut(done);
    let sizes = std::ptr::with_exposed_provenance_mut(sizes);
    // SAFETY: the same.
    unsafe { write(request, members, done, sizes) };
}

/// Answers the test of a request with one member.
///
/// # Safety
/// The request's answer is that of the test in progress.
#[inline(always)]
unsafe fn answer_one(request: &Request) {
    let (done, sizes) = request.answer();
    let done = std::ptr::with_exposed_provenance_mut(done);
    let sizes = std::ptr::with_exposed_provenance_mut(sizes);
    // SAFETY: the same.
    unsafe { write_one(request, done, sizes) };
}

/// Writes that a request with `members` members is complete, and their sizes.
///
/// # Safety
/// The pointers are those of a test in progress, see the module text.
#[inline(always)]
unsafe fn write(request: &Request, members: usize, done: *mut c_int, sizes: *mut c_int) {
    // SAFETY: the out-pointer of the test in progress, not NULL.
    unsafe { done.write(1) };
    if !sizes.is_null() {
        apart();
        for member in 0..members {
            // SAFETY: room for the members, by the module text.
            unsafe { sizes.add(member).write(request.size(member)) };
        }
    }
}

/// The same of one member.
///
/// # Safety
/// As [`write`].
#[inline(always)]
unsafe fn write_one(request: &Request, done: *mut c_int, sizes: *mut c_int) {
    // SAFETY: the out-pointer of the test in progress, not NULL.
    unsafe { done.write(1) };
    if !sizes.is_null() {
        // SAFETY: room for the only member, by the module text.
        unsafe { sizes.write(request.size(0)) };
    }
}

#[cold]
#[inline(never)]
unsafe fn test_general(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> NcclResult {
    enter("test", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(done, 0, "done") }?;
        // SAFETY: as the module text says.
        unsafe { finish(request, done, sizes) }
    })
}

/// Polls if need be, and answers if the request is complete.
///
/// # Safety
/// As [`test`]; `done` is not NULL.
unsafe fn finish(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> Result<(), Fault> {
    // SAFETY: as the module text says.
    let (owner, index) = unsafe { objects::owner(request) }?;
    let (outcome, request) = match owner {
        Owner::Send(comm) => comm.test(index)?,
        Owner::Recv(comm) => comm.test(index)?,
    };
    if let (Outcome::Done(members), Some(request)) = (outcome, request) {
        // SAFETY: as above.
        unsafe { write(request, members, done, sizes) };
    }
    Ok(())
}
