//! isend, irecv and iflush with raw arguments.
//!
//! The usual case of each runs without a panic boundary, because nothing in it can panic; everything else, and every
//! error, in its general case. What must hold of the arguments is NCCL's contract, see [`super::calls`].

use super::boundary::enter;
use super::calls::{null, put};
use super::objects;
use super::types::{MAX_MESSAGE, MAX_RECVS, NcclResult, OPTIONAL_COMPLETION, SUCCESS};
use crate::error::{Error, Fault};
use crate::hint::apart;
use crate::memory::Region;
use crate::profiler::Parent;
use crate::transport::recv::{Posted, RecvComm};
use crate::transport::request::{Request, Start};
use crate::transport::send::SendComm;
use std::ffi::{c_int, c_void};

/// isend. Would block: success with a NULL request. `parent`: what a profiler's events belong to, or NULL.
///
/// The usual case runs here without a panic boundary, because nothing in it can panic; everything else, and every
/// error, in [`isend_general`].
///
/// # Safety
/// See the module text.
#[inline(always)]
pub unsafe fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    handle: *mut c_void,
    parent: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    if !comm.is_null() && !handle.is_null() && !request.is_null() {
        // SAFETY: not NULL, and as the module text says.
        let usual =
            unsafe { (objects::data_or_none::<SendComm>(comm), objects::region_or_none(handle)) };
        if let (Some(comm), Some(region)) = usual {
            let (addr, tag) = (data.addr() as u64, tag.cast_unsigned());
            // SAFETY: an out-pointer of the call, not NULL.
            let hand_out = |started: &Request| unsafe { request.write(pointer(started)) };
            match comm.try_isend(addr, size, tag, region, hand_out) {
                Start::Started => return SUCCESS,
                Start::Failed => return isend_failed(comm),
                Start::WouldBlock => {
                    // SAFETY: as above.
                    unsafe { request.write(std::ptr::null_mut()) };
                    return SUCCESS;
                }
                Start::General => {}
            }
        }
    }
    // SAFETY: as the module text says.
    unsafe { isend_general(comm, data, size, tag, handle, parent, request) }
}

#[cold]
#[inline(never)]
fn isend_failed(comm: &mut SendComm) -> NcclResult {
    enter("isend", || Err(comm.try_failed()))
}

#[cold]
#[inline(never)]
fn irecv_failed(comm: &mut RecvComm) -> NcclResult {
    enter("irecv", || Err(comm.try_failed()))
}

#[cold]
#[inline(never)]
unsafe fn isend_general(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    handle: *mut c_void,
    parent: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    enter("isend", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(request, std::ptr::null_mut(), "request") }?;
        // SAFETY: as the module text says.
        let (comm, region) =
            unsafe { (objects::data::<SendComm>(comm)?, objects::region(handle)?) };
        if size > MAX_MESSAGE {
            return Err(too_large("isend", size));
        }
        let parent = Parent::new(parent);
        let started =
            comm.isend(data.addr() as u64, size as u32, tag.cast_unsigned(), region, parent)?;
        if let Some(started) = started {
            // SAFETY: as above.
            unsafe { request.write(pointer(started)) };
        }
        Ok(())
    })
}

#[cold]
fn too_large(call: &'static str, size: usize) -> Fault {
    Box::new(Error::argument(format!(
        "{call} of {size} bytes: test() reports sizes as int, so {MAX_MESSAGE} is the limit (maxP2pBytes)"
    )))
}

/// A size as the version's irecv has it.
pub trait Size: Copy {
    /// As bytes; `None` when negative.
    fn bytes(self) -> Option<usize>;
}
impl Size for c_int {
    #[inline(always)]
    fn bytes(self) -> Option<usize> {
        usize::try_from(self).ok()
    }
}
impl Size for usize {
    #[inline(always)]
    fn bytes(self) -> Option<usize> {
        Some(self)
    }
}

/// irecv. `EARLY`: the version passes on the marker by which the caller accepts an early completion. `parents`: what a
/// profiler's events belong to, a pointer for each member, or NULL.
///
/// The usual case runs here without a panic boundary, because nothing in it can panic; everything else, and every
/// error, in [`irecv_general`].
///
/// # Safety
/// See the module text; the arrays have `n` entries.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the ABI's arguments")]
pub unsafe fn irecv<S: Size, const EARLY: bool>(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    parents: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as the module text says.
    let start = unsafe { try_irecv::<S, EARLY>(comm, n, data, sizes, tags, handles, request) };
    match start {
        Some(result) => result,
        // SAFETY: as the module text says.
        None => unsafe {
            irecv_general::<S, EARLY>(comm, n, data, sizes, tags, handles, parents, request)
        },
    }
}

/// The usual case of irecv; `None` leaves it to the general one.
///
/// # Safety
/// As [`irecv`].
#[inline(always)]
unsafe fn try_irecv<S: Size, const EARLY: bool>(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Option<NcclResult> {
    if comm.is_null() {
        return None;
    }
    apart();
    if n != 1 {
        return None;
    }
    // SAFETY: not NULL, and as the module text says; the arrays and the request variable are NULL or have an entry.
    let (comm, handle, addr, size, tag, before) = unsafe {
        (
            objects::data_or_none::<RecvComm>(comm)?,
            read(handles)?,
            read(data)?.addr() as u64,
            read(sizes)?.bytes()?,
            read(tags)?.cast_unsigned(),
            read(request)?,
        )
    };
    if size > MAX_MESSAGE {
        return None;
    }
    apart();
    if handle.is_null() {
        return None;
    }
    // SAFETY: not NULL, and as the module text says.
    let region = unsafe { objects::region_or_none(handle) }?;
    let optional = EARLY && before.addr() == OPTIONAL_COMPLETION;
    // SAFETY: an out-pointer of the call, not NULL.
    let hand_out = |started: &Request| unsafe { request.write(pointer(started)) };
    match comm.try_irecv(addr, size as u32, tag, region, optional, hand_out) {
        Start::Started => Some(SUCCESS),
        Start::Failed => Some(irecv_failed(comm)),
        Start::WouldBlock | Start::General => None,
    }
}

/// What a pointer leads to, unless it is NULL.
///
/// # Safety
/// NULL, or valid for a read.
#[inline(always)]
unsafe fn read<T: Copy>(from: *mut T) -> Option<T> {
    // SAFETY: as the caller promises.
    if from.is_null() { None } else { Some(unsafe { from.read() }) }
}

/// A request as C holds it.
#[inline(always)]
pub(super) fn pointer(request: &Request) -> *mut c_void {
    std::ptr::from_ref(request).cast_mut().cast()
}

#[cold]
#[inline(never)]
#[expect(clippy::too_many_arguments, reason = "the ABI's arguments")]
unsafe fn irecv_general<S: Size, const EARLY: bool>(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    parents: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    enter("irecv", || {
        if request.is_null() {
            return Err(null("request"));
        }
        // SAFETY: not NULL, and NCCL's own variable: it holds a request, NULL or the marker.
        let optional = EARLY && unsafe { request.read() }.addr() == OPTIONAL_COMPLETION;
        // SAFETY: an out-pointer of the call.
        unsafe { request.write(std::ptr::null_mut()) };
        // SAFETY: as the module text says.
        let comm = unsafe { objects::data::<RecvComm>(comm) }?;
        if !(1..=MAX_RECVS).contains(&n) {
            return Err(Box::new(Error::argument(format!(
                "irecv of {n} members; 1 to {MAX_RECVS} are possible"
            ))));
        }
        if data.is_null() || sizes.is_null() || tags.is_null() || handles.is_null() {
            return Err(null("data, sizes, tags or mhandles"));
        }
        let n = n as usize;
        for member in 0..n {
            // SAFETY: the arrays have `n` entries.
            let (size, handle) = unsafe { (*sizes.add(member), *handles.add(member)) };
            if size.bytes().is_none() {
                return Err(Box::new(Error::argument("irecv of a negative size")));
            }
            // SAFETY: as the module text says.
            unsafe { objects::region(handle) }?;
        }
        let members = (0..n).map(|member| {
            // SAFETY: the arrays have `n` entries, and every handle was checked above.
            let (addr, size, tag, handle) = unsafe {
                (*data.add(member), *sizes.add(member), *tags.add(member), *handles.add(member))
            };
            Posted {
                addr: addr.addr() as u64,
                // A larger buffer is no error: what arrives is limited by the send.
                len: size.bytes().unwrap_or(0).min(MAX_MESSAGE) as u32,
                tag: tag.cast_unsigned(),
                // SAFETY: as the module text says.
                region: unsafe { objects::region(handle) }.unwrap_or(None),
                // SAFETY: NULL, or an array of `n` entries.
                parent: unsafe {
                    read(parents.wrapping_add(if parents.is_null() { 0 } else { member }))
                }
                .map_or_else(Parent::default, Parent::new),
            }
        });
        if let Some(started) = comm.irecv(members, optional)? {
            // SAFETY: as above.
            unsafe { request.write(pointer(started)) };
        }
        Ok(())
    })
}

/// iflush of the last member that is not empty and was not copied by the host. A NULL request: nothing to wait for.
///
/// # Safety
/// See the module text; the arrays have `n` entries.
#[inline(always)]
pub unsafe fn iflush(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as the module text says.
    match unsafe { try_iflush(comm, n, data, sizes, handles, request) } {
        Some(result) => result,
        // SAFETY: as the module text says.
        None => unsafe { iflush_general(comm, n, data, sizes, handles, request) },
    }
}

/// The usual case of iflush; `None` leaves it to the general one.
///
/// # Safety
/// As [`iflush`].
#[inline(always)]
unsafe fn try_iflush(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Option<NcclResult> {
    if comm.is_null() {
        return None;
    }
    apart();
    if n != 1 {
        return None;
    }
    apart();
    if request.is_null() {
        return None;
    }
    // SAFETY: not NULL, and as the module text says; the arrays are NULL or have an entry.
    let (comm, addr, size, handle) = unsafe {
        (objects::data_or_none::<RecvComm>(comm)?, read(data)?, read(sizes)?, read(handles)?)
    };
    if size <= 0 {
        return None;
    }
    apart();
    if handle.is_null() {
        return None;
    }
    // SAFETY: not NULL, and as the module text says.
    let region = unsafe { objects::region_or_none(handle) }?;
    // SAFETY: an out-pointer of the call, not NULL.
    let hand_out = |started: &Request| unsafe { request.write(pointer(started)) };
    match comm.try_iflush(addr.addr() as u64, region, hand_out) {
        Start::Started => Some(SUCCESS),
        Start::Failed => Some(irecv_failed(comm)),
        Start::WouldBlock | Start::General => None,
    }
}

#[cold]
#[inline(never)]
unsafe fn iflush_general(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    enter("iflush", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(request, std::ptr::null_mut(), "request") }?;
        // SAFETY: as the module text says.
        let comm = unsafe { objects::data::<RecvComm>(comm) }?;
        if !(0..=MAX_RECVS).contains(&n) {
            return Err(Box::new(Error::argument(format!(
                "iflush of {n} members; 1 to {MAX_RECVS} are possible"
            ))));
        }
        let usable = !data.is_null() && !sizes.is_null() && !handles.is_null();
        let mut last = None;
        for member in (0..n as usize).filter(|_| usable) {
            // SAFETY: the arrays have `n` entries, and handles are as the module text says.
            let (size, region) =
                unsafe { (*sizes.add(member), objects::region(*handles.add(member))?) };
            if size > 0 && !region.is_some_and(Region::is_bounced) {
                last = Some(member);
            }
        }
        let Some(member) = last else {
            comm.skip_flush();
            return Ok(());
        };
        // SAFETY: as above.
        let (addr, handle) = unsafe { (*data.add(member), *handles.add(member)) };
        // SAFETY: as the module text says.
        let region =
            unsafe { objects::region(handle) }?.ok_or_else(|| null("the memory handle"))?;
        if let Some(started) = comm.iflush(addr.addr() as u64, region)? {
            // SAFETY: as above.
            unsafe { request.write(pointer(started)) };
        }
        Ok(())
    })
}
