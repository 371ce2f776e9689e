//! The operations with raw arguments, as the tables need them: pointers are checked and out-pointers written here.
//!
//! Each function is `unsafe` for the same reason: pointers come from C. What must hold is NCCL's contract — out-pointers
//! and arrays are valid for what the call's signature says, handles are what this plugin gave out and not yet closed,
//! one thread drives a communicator's data path at a time, and callbacks stay callable until what was opened with them
//! is closed.

use super::boundary::enter;
use super::net;
use super::objects::{self, Context};
use super::types::{
    Logger, NcclResult, PTR_CUDA, PTR_DMABUF, PTR_HOST, ProfilerCallback, Properties,
};
use crate::error::{Error, Fault};
use crate::memory::{Given, Region, RegionKind};
use crate::profiler::Profiler;
use crate::transport::connect::Connecting;
use crate::transport::listener::Listener;
use crate::transport::profile::Origin;
use crate::transport::recv::RecvComm;
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

/// How long nobody polls an attempt that was given up. NCCL polls without a pause, but one round of one thread takes as
/// long as all its attempts and whatever the machine does besides: many seconds where each makes its queue pairs slowly.
const ABANDONED: Duration = Duration::from_secs(30);

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
    enter_cleared(call, || Ok(()), body)
}

/// The same for a call with an out-pointer, which is written in a child too.
fn enter_cleared(
    call: &'static str,
    clear: impl FnOnce() -> Result<(), Fault>,
    body: impl FnOnce() -> Result<(), Fault>,
) -> NcclResult {
    enter(call, || {
        clear()?;
        if objects::in_child() {
            return Err(Box::new(objects::in_child_error()));
        }
        body()
    })
}

/// Whether an attempt to connect is under way.
pub(super) fn is_connecting() -> bool {
    ATTEMPTS.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(|a| !a.is_empty())
}

/// [`enter_cleared`] for calls that open something: what they took for it is given back if they fail and nothing else
/// is open.
fn enter_opening(
    call: &'static str,
    clear: impl FnOnce() -> Result<(), Fault>,
    body: impl FnOnce() -> Result<(), Fault>,
) -> NcclResult {
    enter_cleared(call, clear, || body().inspect_err(|_| net::release(false)))
}

#[cold]
pub(super) fn null(what: &'static str) -> Fault {
    Box::new(Error::argument(format!("{what} is NULL")))
}

/// Writes through an out-pointer.
///
/// # Safety
/// The pointer is NULL or valid for a write.
#[inline(always)]
pub(super) unsafe fn put<T>(out: *mut T, value: T, what: &'static str) -> Result<(), Fault> {
    if out.is_null() {
        return Err(null(what));
    }
    // SAFETY: not NULL, and valid by the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

/// init of v6 to v10. A profiler from v10 on.
///
/// # Safety
/// See the module text.
pub unsafe fn init(logger: Logger, profiler: ProfilerCallback) -> NcclResult {
    enter_owned("init", || {
        super::logger::set(logger);
        net::init(true, |_| ())?;
        // SAFETY: as the module text says.
        net::set_profiler(unsafe { told(profiler) });
        Ok(())
    })
}

/// The way to NCCL's profiler.
///
/// # Safety
/// As [`Profiler::new`].
unsafe fn told(callback: ProfilerCallback) -> Option<Profiler> {
    // SAFETY: as the caller promises.
    callback.map(|callback| unsafe { Profiler::new(callback) })
}

/// init of v11 and later.
///
/// # Safety
/// See the module text.
pub unsafe fn init_context(
    out: *mut *mut c_void,
    comm_id: u64,
    traffic_class: Option<c_int>,
    logger: Logger,
    profiler: ProfilerCallback,
) -> NcclResult {
    let clear = || {
        if !objects::in_child() {
            super::logger::set(logger);
        }
        // SAFETY: an out-pointer of the call.
        unsafe { put(out, std::ptr::null_mut(), "the context's out-pointer") }
    };
    enter_cleared("init", clear, || {
        let context = net::init(false, |transport| {
            // Whoever has a context gives it back, and with it what is pinned ahead.
            transport.prepare();
            objects::export(Context {
                transport: Arc::clone(transport),
                traffic_class: class(traffic_class),
                // SAFETY: as the module text says.
                origin: Origin { id: Some(comm_id), profiler: unsafe { told(profiler) } },
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
            if objects::opened() == 0 {
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
    // SAFETY: an out-pointer of the call.
    let clear = || unsafe { put(out, 0, "ndev") };
    enter_cleared("devices", clear, || {
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
    // SAFETY: an out-pointer of the call.
    let clear = || unsafe { put(out, -1, "the device's out-pointer") };
    enter_cleared("makeVDevice", clear, || {
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
    // SAFETY: an out-pointer of the call.
    let clear = || unsafe { put(out, std::ptr::null_mut(), "listenComm") };
    enter_opening("listen", clear, || {
        if handle.is_null() {
            return Err(null("the handle"));
        }
        // SAFETY: as the module text says.
        let context = unsafe { context(ctx) }?;
        let transport = net::transport(context)?;
        let mut bytes = [0; HANDLE_BYTES];
        let rails = transport.rails(device)?;
        let listener = Listener::new(&transport, rails, net::origin(context), &mut bytes)?;
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
    // SAFETY: an out-pointer of the call.
    let clear = || unsafe { put(out, std::ptr::null_mut(), "sendComm") };
    enter_opening("connect", clear, || {
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
                let origin = net::origin(context);
                Box::new(Connecting::start(&transport, device, peer, class, origin)?)
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
    // SAFETY: an out-pointer of the call.
    let clear = || unsafe { put(out, std::ptr::null_mut(), "recvComm") };
    enter_cleared("accept", clear, || {
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
    // SAFETY: an out-pointer of the call.
    let clear = || unsafe { put(out, std::ptr::null_mut(), "mhandle") };
    enter_cleared("regMr", clear, || {
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
        // SAFETY: NCCL keeps a registered range mapped until it is deregistered, and readable and writable where it says
        // that it is host memory.
        let given = unsafe { Given::new(data, size) }.ok_or_else(|| null("the range"))?;
        let region = shared.register(given, kind)?;
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
    // SAFETY: an out-pointer of the call.
    let clear = || unsafe { put(out, std::ptr::null_mut(), "mhandle") };
    enter_cleared("regMrDmaBuf", clear, || {
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

fn close<T: objects::Kinded>(call: &'static str, pointer: *mut c_void) -> NcclResult {
    enter_owned(call, || {
        drop(objects::take::<T>(pointer)?);
        if objects::opened() == 0 {
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
