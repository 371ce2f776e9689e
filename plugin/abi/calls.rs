//! The operations with raw arguments, as the tables need them: pointers are checked and out-pointers written here.
//!
//! Each function is `unsafe` for the same reason: pointers come from C. What must hold is NCCL's contract — out-pointers
//! and arrays are valid for what the call's signature says, handles are what this plugin gave out and not yet closed,
//! and one thread drives a communicator's data path at a time.

use super::boundary::enter;
use super::net;
use super::objects::{self, Context, Owner};
use super::types::{
    Logger, MAX_MESSAGE, MAX_RECVS, NcclResult, OPTIONAL_COMPLETION, PTR_CUDA, PTR_DMABUF,
    PTR_HOST, Properties, SUCCESS,
};
use crate::error::{Error, Fault};
use crate::memory::{Region, RegionKind};
use crate::transport::connect::Connecting;
use crate::transport::listener::Listener;
use crate::transport::recv::{Posted, RecvComm};
use crate::transport::request::{Outcome, Request, Start, State};
use crate::transport::send::SendComm;
use crate::transport::wire::{self, HANDLE_BYTES, Handle};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Attempts to connect, by the name that their handle carries.
static ATTEMPTS: Mutex<Option<HashMap<u64, Box<Connecting>>>> = Mutex::new(None);
static NEXT_ATTEMPT: AtomicU64 = AtomicU64::new(1);

/// How long nobody polls an attempt that was given up: NCCL polls without a pause.
const ABANDONED: Duration = Duration::from_secs(2);

/// Drops attempts that were given up without a word: all of them, or those past their deadline or not polled any more.
/// An empty table keeps no memory: it outlives the library.
fn forget_attempts(all: bool) {
    let now = Instant::now();
    let mut gone = Vec::new();
    let mut table = ATTEMPTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(attempts) = &mut *table {
        let over =
            |a: &Connecting| all || a.deadline < now || now.duration_since(a.polled) > ABANDONED;
        let tokens: Vec<u64> = attempts.iter().filter(|(_, a)| over(a)).map(|(t, _)| *t).collect();
        gone.extend(tokens.iter().filter_map(|t| attempts.remove(t)));
        if attempts.is_empty() {
            *table = None;
        }
    }
    drop(table);
    // Verbs run here, after the lock was released.
    drop(gone);
}

fn attempts<R>(f: impl FnOnce(&mut HashMap<u64, Box<Connecting>>) -> R) -> R {
    f(ATTEMPTS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// [`enter`] for everything but the data path, which has its own sign: refused in a forked child. What the objects
/// stand for belongs to the parent, and a close here would end the parent's connection.
fn enter_owned(call: &'static str, body: impl FnOnce() -> Result<(), Fault>) -> NcclResult {
    enter(call, || {
        if objects::in_child() {
            return Err(Box::new(Error::usage(
                "called in a forked child: what the parent opened belongs to the parent",
            )));
        }
        body()
    })
}

#[cold]
fn null(what: &'static str) -> Fault {
    Box::new(Error::argument(format!("{what} is NULL")))
}

/// Writes through an out-pointer.
///
/// # Safety
/// The pointer is NULL or valid for a write.
#[inline(always)]
unsafe fn put<T>(out: *mut T, value: T, what: &'static str) -> Result<(), Fault> {
    if out.is_null() {
        return Err(null(what));
    }
    // SAFETY: not NULL, and valid by the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

/// init of v6 to v10.
pub fn init(logger: Logger) -> NcclResult {
    super::logger::set(logger);
    enter_owned("init", || Ok(net::init(|_| ())?))
}

/// init of v11 and later.
///
/// # Safety
/// See the module text.
pub unsafe fn init_context(
    out: *mut *mut c_void,
    traffic_class: Option<c_int>,
    logger: Logger,
) -> NcclResult {
    super::logger::set(logger);
    enter_owned("init", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, std::ptr::null_mut(), "the context's out-pointer") }?;
        let context = net::init(|transport| {
            objects::export(Context {
                transport: Arc::clone(transport),
                traffic_class: class(traffic_class),
            })
        })?;
        // SAFETY: as above.
        unsafe { put(out, context, "the context's out-pointer") }
    })
}

/// A traffic class, if one is set.
fn class(value: Option<c_int>) -> Option<u8> {
    value.and_then(|v| u8::try_from(v).ok())
}

/// finalize of v11 and later. NULL is accepted: NCCL 2.28.3 calls it after a failed init.
pub fn finalize(context: *mut c_void) -> NcclResult {
    enter_owned("finalize", || {
        if !context.is_null() {
            let context = objects::take::<Context>(context)?;
            drop(context);
            if objects::users() == 0 {
                forget_attempts(true);
            }
            net::release(true);
        }
        Ok(())
    })
}

/// The context argument of a call.
///
/// # Safety
/// See the module text.
unsafe fn context<'a>(pointer: Option<*mut c_void>) -> crate::error::Result<Option<&'a Context>> {
    // SAFETY: looked up among live objects; NCCL does not finalize a context in use.
    pointer.map(|p| unsafe { objects::borrow::<Context>(p) }).transpose()
}

/// devices.
///
/// # Safety
/// See the module text.
pub unsafe fn devices(out: *mut c_int) -> NcclResult {
    enter_owned("devices", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, 0, "ndev") }?;
        // SAFETY: as above.
        unsafe { put(out, net::devices()?, "ndev") }
    })
}

/// getProperties: `fill` turns the canonical properties into the version's struct, every field of it.
///
/// # Safety
/// See the module text.
pub unsafe fn properties<T>(
    device: c_int,
    out: *mut T,
    fill: impl FnOnce(&Properties) -> T,
) -> NcclResult {
    enter_owned("getProperties", || {
        if out.is_null() {
            return Err(null("props"));
        }
        let properties = net::properties(device)?;
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, fill(&properties), "props") }
    })
}

/// makeVDevice.
///
/// # Safety
/// See the module text; `members` is valid for `count` entries.
pub unsafe fn make_virtual(
    out: *mut c_int,
    members: *const c_int,
    count: c_int,
    limit: usize,
) -> NcclResult {
    enter_owned("makeVDevice", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, -1, "the device's out-pointer") }?;
        let count = usize::try_from(count).ok().filter(|n| (1..=limit).contains(n));
        let count = count
            .ok_or_else(|| Error::argument(format!("a fused device has 1 to {limit} members")))?;
        // SAFETY: an array inside the caller's struct, with room for `limit` entries.
        let members = unsafe { std::slice::from_raw_parts(members, count) };
        // SAFETY: as above.
        unsafe { put(out, net::fuse(members)?, "the device's out-pointer") }
    })
}

/// listen.
///
/// # Safety
/// See the module text; `handle` has 128 bytes.
pub unsafe fn listen(
    ctx: Option<*mut c_void>,
    device: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
) -> NcclResult {
    enter_owned("listen", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, std::ptr::null_mut(), "listenComm") }?;
        if handle.is_null() {
            return Err(null("the handle"));
        }
        // SAFETY: as the module text says.
        let transport = net::transport(unsafe { context(ctx) }?)?;
        let mut bytes = [0; HANDLE_BYTES];
        let listener = Listener::new(&transport, transport.rails(device)?, &mut bytes)?;
        // SAFETY: NCCL's handle buffer has this size; it may be unaligned.
        unsafe { handle.cast::<[u8; HANDLE_BYTES]>().write_unaligned(bytes) };
        // SAFETY: as above.
        unsafe { put(out, objects::export(Mutex::new(listener)), "listenComm") }
    })
}

/// connect: polled with the same handle until it yields a communicator.
///
/// # Safety
/// See the module text; `handle` has 128 bytes.
pub unsafe fn connect(
    ctx: Option<*mut c_void>,
    device: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
    traffic_class: Option<c_int>,
) -> NcclResult {
    enter_owned("connect", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, std::ptr::null_mut(), "sendComm") }?;
        if handle.is_null() {
            return Err(null("the handle"));
        }
        let buffer = handle.cast::<[u8; HANDLE_BYTES]>();
        // SAFETY: NCCL's handle buffer has this size; it may be unaligned.
        let mut bytes = unsafe { buffer.read_unaligned() };
        // First of all, and every time: what the handle says of an attempt means nothing in another transport's handle.
        let peer = Handle::read(&bytes)?;
        let attempt = match wire::token(&bytes).map(|t| attempts(|a| a.remove(&t))) {
            Some(Some(attempt)) => attempt,
            Some(None) => {
                return Err(Box::new(Error::usage("this attempt to connect has ended already")));
            }
            None => {
                // SAFETY: as the module text says.
                let context = unsafe { context(ctx) }?;
                let transport = net::transport(context)?;
                let class = context.and_then(|c| c.traffic_class).or(class(traffic_class));
                forget_attempts(false);
                let rails = transport.rails(device)?;
                Box::new(Connecting::start(&transport, rails, peer, class)?)
            }
        };
        match attempt.step() {
            Ok(Ok(comm)) => {
                wire::set_token(&mut bytes, 0);
                // SAFETY: as above.
                unsafe { put(out, objects::export_send(*comm), "sendComm") }?;
            }
            Ok(Err(attempt)) => {
                let token = wire::token(&bytes)
                    .unwrap_or_else(|| NEXT_ATTEMPT.fetch_add(1, Ordering::Relaxed));
                attempts(|a| a.insert(token, attempt));
                wire::set_token(&mut bytes, token);
            }
            Err(e) => {
                // The name stays used up, so that a further call on this handle says that the attempt has ended.
                wire::set_token(&mut bytes, u64::MAX);
                // SAFETY: as above.
                unsafe { buffer.write_unaligned(bytes) };
                return Err(Box::new(e));
            }
        }
        // SAFETY: as above.
        unsafe { buffer.write_unaligned(bytes) };
        Ok(())
    })
}

/// accept: polled until it yields a communicator.
///
/// # Safety
/// See the module text.
pub unsafe fn accept(listener: *mut c_void, out: *mut *mut c_void) -> NcclResult {
    enter_owned("accept", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, std::ptr::null_mut(), "recvComm") }?;
        // SAFETY: looked up among live objects; NCCL does not close a listener in use.
        let listener = unsafe { objects::borrow::<Mutex<Listener>>(listener) }?;
        let accepted = listener.lock().unwrap_or_else(PoisonError::into_inner).accept()?;
        if let Some(comm) = accepted {
            // SAFETY: as above.
            unsafe { put(out, objects::export_recv(*comm), "recvComm") }?;
        }
        Ok(())
    })
}

/// regMr.
///
/// # Safety
/// See the module text.
pub unsafe fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    out: *mut *mut c_void,
) -> NcclResult {
    enter_owned("regMr", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, std::ptr::null_mut(), "mhandle") }?;
        let kind = match kind {
            PTR_HOST => RegionKind::Host,
            PTR_CUDA => RegionKind::Cuda,
            _ => {
                return Err(Box::new(Error::argument(format!(
                    "regMr of pointer type {kind}; 1 (host) and 2 (CUDA) exist"
                ))));
            }
        };
        // SAFETY: looked up among live objects; NCCL does not close a communicator that it registers with.
        let shared = unsafe { objects::shared(comm) }?;
        let region = shared.register(data.addr(), size, kind)?;
        // SAFETY: as above.
        unsafe { put(out, objects::export(region), "mhandle") }
    })
}

/// regMrDmaBuf.
///
/// # Safety
/// See the module text.
pub unsafe fn reg_mr_dmabuf(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
    out: *mut *mut c_void,
) -> NcclResult {
    enter_owned("regMrDmaBuf", || {
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, std::ptr::null_mut(), "mhandle") }?;
        if !matches!(kind, PTR_HOST | PTR_CUDA | PTR_DMABUF) {
            return Err(Box::new(Error::argument(format!("regMrDmaBuf of pointer type {kind}"))));
        }
        if fd < 0 {
            return Err(Box::new(Error::argument(format!("regMrDmaBuf of file descriptor {fd}"))));
        }
        // SAFETY: looked up among live objects; NCCL does not close a communicator that it registers with.
        let shared = unsafe { objects::shared(comm) }?;
        // SAFETY: not negative; a number that is no open descriptor is refused by the kernel.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let region = shared.register_dmabuf(data.addr(), size, offset, fd)?;
        // SAFETY: as above.
        unsafe { put(out, objects::export(region), "mhandle") }
    })
}

/// deregMr. NULL is accepted; the communicator may be closed already.
pub fn dereg_mr(handle: *mut c_void) -> NcclResult {
    enter_owned("deregMr", || {
        if !handle.is_null() {
            drop(objects::take::<Region>(handle)?);
        }
        Ok(())
    })
}

/// isend. Would block: success with a NULL request.
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
    unsafe { isend_general(comm, data, size, tag, handle, request) }
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
        if let Some(started) =
            comm.isend(data.addr() as u64, size as u32, tag.cast_unsigned(), region)?
        {
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

/// irecv. `may_complete_early`: the version passes on the marker by which the caller accepts an early completion.
///
/// The usual case runs here without a panic boundary, because nothing in it can panic; everything else, and every
/// error, in [`irecv_general`].
///
/// # Safety
/// See the module text; the arrays have `n` entries.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the ABI's arguments")]
pub unsafe fn irecv<S: Size>(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
    may_complete_early: bool,
) -> NcclResult {
    // SAFETY: as the module text says.
    let start =
        unsafe { try_irecv(comm, n, data, sizes, tags, handles, request, may_complete_early) };
    match start {
        Some(result) => result,
        // SAFETY: as the module text says.
        None => unsafe {
            irecv_general(comm, n, data, sizes, tags, handles, request, may_complete_early)
        },
    }
}

/// The usual case of irecv; `None` leaves it to the general one.
///
/// # Safety
/// As [`irecv`].
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the ABI's arguments")]
unsafe fn try_irecv<S: Size>(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
    may_complete_early: bool,
) -> Option<NcclResult> {
    if n != 1 || comm.is_null() {
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
    if handle.is_null() || size > MAX_MESSAGE {
        return None;
    }
    // SAFETY: not NULL, and as the module text says.
    let region = unsafe { objects::region_or_none(handle) }?;
    let optional = may_complete_early && before.addr() == OPTIONAL_COMPLETION;
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
fn pointer(request: &Request) -> *mut c_void {
    std::ptr::from_ref(request).cast_mut().cast()
}

#[cold]
#[inline(never)]
#[expect(clippy::too_many_arguments, reason = "the ABI's arguments")]
unsafe fn irecv_general<S: Size>(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
    may_complete_early: bool,
) -> NcclResult {
    enter("irecv", || {
        if request.is_null() {
            return Err(null("request"));
        }
        // SAFETY: not NULL, and NCCL's own variable: it holds a request, NULL or the marker.
        let optional =
            may_complete_early && unsafe { request.read() }.addr() == OPTIONAL_COMPLETION;
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
            }
        });
        if let Some(started) = comm.irecv(members, optional)? {
            // SAFETY: as above.
            unsafe { request.write(pointer(started)) };
        }
        Ok(())
    })
}

/// iflush of the last member that is not empty. A NULL request: nothing to wait for.
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
    if n != 1 || comm.is_null() || request.is_null() {
        return None;
    }
    // SAFETY: not NULL, and as the module text says; the arrays are NULL or have an entry.
    let (comm, addr, size, handle) = unsafe {
        (objects::data_or_none::<RecvComm>(comm)?, read(data)?, read(sizes)?, read(handles)?)
    };
    if handle.is_null() || size <= 0 {
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
        // SAFETY: the arrays have `n` entries.
        let last =
            (0..n as usize).rev().find(|member| usable && unsafe { *sizes.add(*member) } > 0);
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
unsafe fn test_settled(request: &Request, done: *mut c_int, sizes: *mut c_int) -> NcclResult {
    if request.state() == State::DONE && request.is_of_receive() {
        request.put_own();
        request.set_answer(done.expose_provenance(), sizes.expose_provenance());
        // SAFETY: the answer's pointers are those of this test; a receive's own has one member.
        unsafe { answer_one(request) };
        return SUCCESS;
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
        request.set_answer(done.expose_provenance(), sizes.expose_provenance());
        // SAFETY: the answer's pointers are those of this test.
        unsafe { answer(request, members) };
        return SUCCESS;
    }
    let request: *mut c_void = pointer(request);
    // SAFETY: as the module text says.
    unsafe { test_general(request, done, sizes) }
}

/// Goes on with a test whose poll found something.
#[inline(never)]
unsafe fn test_found(request: &Request, found: i32) -> NcclResult {
    // SAFETY: a pending request, by the caller; see there.
    let owner = unsafe { objects::owner_of(request) };
    match owner {
        Some(Owner::Send(comm)) if found == 1 => {
            if !comm.settle(0) {
                // SAFETY: as for this function.
                return unsafe { test_found_several(request, found) };
            }
            if request.state() == State::DONE {
                request.put_own();
                // SAFETY: the answer's pointers were given to this test; a send has one member.
                unsafe { answer_one(request) };
            }
            SUCCESS
        }
        Some(Owner::Recv(comm)) if found == 1 => {
            if !comm.settle::<false>(0) {
                // SAFETY: as for this function.
                return unsafe { test_found_several(request, found) };
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

/// Goes on with a test whose poll found several completions, or an unusual one.
#[inline(never)]
unsafe fn test_found_several(request: &Request, found: i32) -> NcclResult {
    let count = usize::try_from(found).unwrap_or(0);
    let mut settled = 0;
    // SAFETY: a pending request, by the caller; see there.
    match unsafe { objects::owner_of(request) } {
        Some(Owner::Send(comm)) => {
            while settled < count && comm.settle(settled) {
                settled += 1;
            }
        }
        Some(Owner::Recv(comm)) => {
            while settled < count && comm.settle::<true>(settled) {
                settled += 1;
            }
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
    // SAFETY: the out-pointer of the test in progress, not NULL.
    unsafe { std::ptr::with_exposed_provenance_mut::<c_int>(done).write(1) };
    let sizes = std::ptr::with_exposed_provenance_mut::<c_int>(sizes);
    if !sizes.is_null() {
        for member in 0..members {
            // SAFETY: room for the members, by the module text.
            unsafe { sizes.add(member).write(request.size(member)) };
        }
    }
}

/// Answers the test of a request with one member.
///
/// # Safety
/// The request's answer is that of the test in progress.
#[inline(always)]
unsafe fn answer_one(request: &Request) {
    let (done, sizes) = request.answer();
    // SAFETY: the out-pointer of the test in progress, not NULL.
    unsafe { std::ptr::with_exposed_provenance_mut::<c_int>(done).write(1) };
    if sizes != 0 {
        // SAFETY: room for the only member, by the module text.
        unsafe { std::ptr::with_exposed_provenance_mut::<c_int>(sizes).write(request.size(0)) };
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
        unsafe { done.write(1) };
        if !sizes.is_null() {
            for member in 0..members {
                // SAFETY: room for the members, by the module text.
                unsafe { sizes.add(member).write(request.size(member)) };
            }
        }
    }
    Ok(())
}

fn close<T: objects::Kinded>(call: &'static str, pointer: *mut c_void) -> NcclResult {
    enter_owned(call, || {
        drop(objects::take::<T>(pointer)?);
        if objects::users() == 0 {
            forget_attempts(false);
        }
        net::release(false);
        Ok(())
    })
}

/// closeSend. Never waits for the peer.
pub fn close_send(comm: *mut c_void) -> NcclResult {
    close::<objects::End<SendComm>>("closeSend", comm)
}

/// closeRecv. Never waits for the peer.
pub fn close_recv(comm: *mut c_void) -> NcclResult {
    close::<objects::End<RecvComm>>("closeRecv", comm)
}

/// closeListen, whether or not a connection was accepted or is half made.
pub fn close_listen(comm: *mut c_void) -> NcclResult {
    close::<Mutex<Listener>>("closeListen", comm)
}
