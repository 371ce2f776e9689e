//! Objects that C holds pointers to, and the way back from a pointer.
//!
//! Every object begins with a word that says what it is. The data path checks it, which catches the wrong kind of
//! object; everything else looks the pointer up in a table of live objects first, which also catches stale ones.

use crate::error::{Error, Fault, Result};
use crate::memory::Region;
use crate::transport::listener::Listener;
use crate::transport::pump::Pump;
use crate::transport::recv::RecvComm;
use crate::transport::request::Request;
use crate::transport::send::SendComm;
use crate::transport::{Comm, CommShared, Transport};
use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What kind of object a pointer leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[expect(missing_docs, reason = "named for the objects")]
pub enum Kind {
    Context = 0x5052_4301,
    Listener = 0x5052_4302,
    Send = 0x5052_4303,
    Recv = 0x5052_4304,
    Region = 0x5052_4305,
}

/// The first word of every object; the kind as an integer, because C may hand in anything.
type Tag = u32;

/// An object as C holds it.
#[repr(C)]
#[derive(Debug)]
pub struct Object<T> {
    tag: Tag,
    value: T,
}

/// One end of a connection: data for one thread, the rest for all.
#[repr(C)]
#[derive(Debug)]
pub struct End<T> {
    // Dropped first, see Comm.
    data: UnsafeCell<T>,
    shared: CommShared,
}

// SAFETY: `data` is only touched by the thread that drives the communicator, which NCCL's contract makes one at a
// time; `shared` is Sync itself.
unsafe impl<T: Send> Sync for End<T> {}

/// What a v11 or later context stands for.
#[derive(Debug)]
pub struct Context {
    /// Keeps the process-wide state.
    pub transport: Arc<Transport>,
    /// The communicator's traffic class.
    pub traffic_class: Option<u8>,
    /// NCCL's identifier of the communicator.
    pub comm_id: u64,
}

/// Where the pump is in an object of either kind of end.
const PUMP: usize = offset_of!(Object<End<SendComm>>, value) + offset_of!(End<SendComm>, data);
const _: () = assert!(
    PUMP == offset_of!(Object<End<RecvComm>>, value) + offset_of!(End<RecvComm>, data)
        && SendComm::PUMP_OFFSET == 0
        && RecvComm::PUMP_OFFSET == 0
);

/// The pump of the end that a request belongs to.
///
/// # Safety
/// The request is pending, so it belongs to a live end; and as [`data`].
#[inline(always)]
pub unsafe fn pump_of<'a>(request: &Request) -> &'a mut Pump {
    let owner: *mut c_void = std::ptr::with_exposed_provenance_mut(request.owner());
    // SAFETY: the pump is the first field of the data of either kind, see above; the end is alive.
    unsafe { &mut *owner.byte_add(PUMP).cast::<Pump>() }
}

/// A context, listener, region, sending or receiving end.
pub trait Kinded {
    /// Its kind.
    const KIND: Kind;
}
impl Kinded for Context {
    const KIND: Kind = Kind::Context;
}
impl Kinded for Mutex<Listener> {
    const KIND: Kind = Kind::Listener;
}
impl Kinded for End<SendComm> {
    const KIND: Kind = Kind::Send;
}
impl Kinded for End<RecvComm> {
    const KIND: Kind = Kind::Recv;
}
impl Kinded for Region {
    const KIND: Kind = Kind::Region;
}

/// What is alive.
#[derive(Debug)]
struct Table {
    objects: BTreeMap<usize, Kind>,
    /// Allocations of an application, see [`Hold`].
    holds: usize,
}

impl Table {
    /// Contexts, listeners and communicators.
    fn opened(&self) -> usize {
        self.objects.values().filter(|kind| **kind != Kind::Region).count()
    }

    fn users(&self) -> usize {
        self.opened() + self.holds
    }

    /// Something is gone. An empty table keeps no memory: it outlives the library.
    fn tidy(&mut self) {
        if self.users() == 0 {
            OWNER.store(0, Ordering::Release);
        }
        if self.objects.is_empty() {
            self.objects = BTreeMap::new();
        }
    }
}

static LIVE: Mutex<Table> = Mutex::new(Table { objects: BTreeMap::new(), holds: 0 });

fn live() -> MutexGuard<'static, Table> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process whose objects are in the table; 0 while there is none that counts as a user.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Whether this process is a forked child of the one that uses the plugin. Asked before any lock is taken: a lock that
/// another thread held during the fork is never released in the child.
pub fn in_child() -> bool {
    let owner = OWNER.load(Ordering::Acquire);
    owner != 0 && owner != std::process::id()
}

/// Live contexts, listeners and communicators: what NCCL has open. Regions do not count.
pub fn opened() -> usize {
    live().opened()
}

/// What keeps the plugin in use: what NCCL has open, and memory of an application.
pub fn users() -> usize {
    live().users()
}

/// Counts as a user without being an object that C holds.
#[derive(Debug)]
pub struct Hold(());

impl Hold {
    /// One more user.
    pub fn take() -> Self {
        live().holds += 1;
        OWNER.store(std::process::id(), Ordering::Release);
        Self(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut live = live();
        live.holds -= 1;
        live.tidy();
    }
}

/// Frees the memory handles that nobody deregistered, once nothing is left that they could belong to.
pub fn drop_stray_regions() {
    let stray: Vec<_> =
        live().objects.iter().filter(|(_, k)| **k == Kind::Region).map(|(p, _)| *p).collect();
    for pointer in stray {
        // Failing means that somebody else freed it meanwhile.
        let _ = take::<Region>(std::ptr::with_exposed_provenance_mut(pointer));
    }
}

fn describe(kind: Kind) -> &'static str {
    match kind {
        Kind::Context => "a context",
        Kind::Listener => "a listening communicator",
        Kind::Send => "a sending communicator",
        Kind::Recv => "a receiving communicator",
        Kind::Region => "a memory handle",
    }
}

/// Gives an object to C.
pub fn export<T: Kinded>(value: T) -> *mut c_void {
    publish(Box::new(Object { tag: T::KIND as Tag, value }))
}

fn publish<T: Kinded>(object: Box<Object<T>>) -> *mut c_void {
    let pointer = Box::into_raw(object);
    live().objects.insert(pointer.expose_provenance(), T::KIND);
    if T::KIND != Kind::Region {
        OWNER.store(std::process::id(), Ordering::Release);
    }
    pointer.cast()
}

/// Gives a sending end to C; its requests learn where they belong.
pub fn export_send(comm: Comm<SendComm>) -> *mut c_void {
    let Comm { data, shared } = comm;
    let mut object = Box::new(Object {
        tag: Kind::Send as Tag,
        value: End { data: UnsafeCell::new(data), shared },
    });
    let owner = (&raw mut *object).expose_provenance();
    object.value.data.get_mut().set_owner(owner);
    publish(object)
}

/// Gives a receiving end to C; its requests learn where they belong.
pub fn export_recv(comm: Comm<RecvComm>) -> *mut c_void {
    let Comm { data, shared } = comm;
    let mut object = Box::new(Object {
        tag: Kind::Recv as Tag,
        value: End { data: UnsafeCell::new(data), shared },
    });
    let owner = (&raw mut *object).expose_provenance();
    object.value.data.get_mut().set_owner(owner);
    publish(object)
}

fn check_live(pointer: *mut c_void, wanted: &[Kind]) -> Result<Kind> {
    let found = live().objects.get(&pointer.addr()).copied();
    match found {
        Some(kind) if wanted.contains(&kind) => Ok(kind),
        Some(kind) => Err(Error::argument(format!(
            "{pointer:p} is {}, not {}",
            describe(kind),
            describe(wanted[0])
        ))),
        None if pointer.is_null() => {
            Err(Error::argument(format!("NULL instead of {}", describe(wanted[0]))))
        }
        None => {
            Err(Error::argument(format!("{pointer:p} is not {} that is open", describe(wanted[0]))))
        }
    }
}

/// Borrows a live object.
///
/// # Safety
/// The object is not closed while the borrow lives: NCCL closes nothing that it is using.
///
/// # Errors
/// The pointer is not a live object of this kind.
pub unsafe fn borrow<'a, T: Kinded>(pointer: *mut c_void) -> Result<&'a T> {
    check_live(pointer, &[T::KIND])?;
    // SAFETY: the table says that this is a live object of this type; the caller keeps it so.
    Ok(unsafe { &(*pointer.cast::<Object<T>>()).value })
}

/// Takes a pointer out of the table; whether it was there.
fn forget(pointer: *mut c_void) -> bool {
    let mut live = live();
    let was_there = live.objects.remove(&pointer.addr()).is_some();
    live.tidy();
    was_there
}

/// Takes an object back from C.
///
/// # Errors
/// The pointer is not a live object of this kind.
pub fn take<T: Kinded>(pointer: *mut c_void) -> Result<Box<Object<T>>> {
    check_live(pointer, &[T::KIND])?;
    if !forget(pointer) {
        return Err(Error::argument(format!("{pointer:p} was closed twice at once")));
    }
    // SAFETY: made by `publish` with this type and removed from the table by this call only.
    let mut object = unsafe { Box::from_raw(pointer.cast::<Object<T>>()) };
    object.tag = 0;
    Ok(object)
}

/// The part of a communicator that every thread may use.
///
/// # Safety
/// As [`borrow`].
///
/// # Errors
/// The pointer is not a live communicator.
pub unsafe fn shared<'a>(pointer: *mut c_void) -> Result<&'a CommShared> {
    match check_live(pointer, &[Kind::Send, Kind::Recv])? {
        // SAFETY: the table says which of the two live types it is; the caller keeps it so.
        Kind::Send => Ok(unsafe { &(*pointer.cast::<Object<End<SendComm>>>()).value.shared }),
        // SAFETY: as above.
        _ => Ok(unsafe { &(*pointer.cast::<Object<End<RecvComm>>>()).value.shared }),
    }
}

/// The data path of a communicator.
///
/// # Safety
/// A pointer that this plugin gave out and that is not closed, or NULL; and no other borrow of this data path lives:
/// one thread drives a communicator at a time.
///
/// # Errors
/// NULL, or another kind of object.
#[inline(always)]
pub unsafe fn data<'a, T>(pointer: *mut c_void) -> std::result::Result<&'a mut T, Fault>
where
    End<T>: Kinded,
{
    let object = pointer.cast::<Object<End<T>>>();
    // SAFETY: aligned and readable by the caller's promise; the tag is the first word of every object.
    if object.is_null() || unsafe { (*object).tag } != <End<T> as Kinded>::KIND as Tag {
        return Err(wrong_kind(pointer, <End<T> as Kinded>::KIND));
    }
    // SAFETY: the tag says the type, and the caller that nothing else borrows the data.
    Ok(unsafe { &mut *(*object).value.data.get() })
}

/// As [`data`], without a word about why not.
///
/// # Safety
/// As [`data`], and not NULL.
#[inline(always)]
pub unsafe fn data_or_none<'a, T>(pointer: *mut c_void) -> Option<&'a mut T>
where
    End<T>: Kinded,
{
    let object = pointer.cast::<Object<End<T>>>();
    // SAFETY: as `data`.
    if unsafe { (*object).tag } != <End<T> as Kinded>::KIND as Tag {
        return None;
    }
    // SAFETY: as `data`.
    Some(unsafe { &mut *(*object).value.data.get() })
}

/// As [`region`], without a word about why not.
///
/// # Safety
/// As [`region`], and not NULL.
#[inline(always)]
pub unsafe fn region_or_none<'a>(pointer: *mut c_void) -> Option<&'a Region> {
    let object = pointer.cast::<Object<Region>>();
    // SAFETY: as `region`.
    if unsafe { (*object).tag } != Kind::Region as Tag {
        return None;
    }
    // SAFETY: as `region`.
    Some(unsafe { &(*object).value })
}

/// A memory handle; NULL is none.
///
/// # Safety
/// A handle that this plugin gave out and that is not deregistered, or NULL.
///
/// # Errors
/// Another kind of object.
#[inline(always)]
pub unsafe fn region<'a>(pointer: *mut c_void) -> std::result::Result<Option<&'a Region>, Fault> {
    if pointer.is_null() {
        return Ok(None);
    }
    let object = pointer.cast::<Object<Region>>();
    // SAFETY: aligned and readable by the caller's promise; the tag is the first word of every object.
    if unsafe { (*object).tag } != Kind::Region as Tag {
        return Err(wrong_kind(pointer, Kind::Region));
    }
    // SAFETY: the tag says the type.
    Ok(Some(unsafe { &(*object).value }))
}

/// What a request belongs to.
#[derive(Debug)]
pub enum Owner<'a> {
    /// A sending end.
    Send(&'a mut SendComm),
    /// A receiving end.
    Recv(&'a mut RecvComm),
}

/// The owner of a request that is known to be one.
///
/// # Safety
/// The request belongs to a live communicator; and as [`data`].
#[inline(always)]
pub unsafe fn owner_of<'a>(request: &Request) -> Option<Owner<'a>> {
    let owner: *mut c_void = std::ptr::with_exposed_provenance_mut(request.owner());
    // SAFETY: the owner is alive by the caller's promise.
    if let Some(comm) = unsafe { data_or_none(owner) } {
        return Some(Owner::Send(comm));
    }
    // SAFETY: as above.
    unsafe { data_or_none(owner) }.map(Owner::Recv)
}

/// The owner of a request and the request's number.
///
/// # Safety
/// A request that isend, irecv or iflush of a communicator gave out which is not closed, or NULL; and as [`data`].
///
/// # Errors
/// NULL, or not a request.
#[inline(always)]
pub unsafe fn owner<'a>(request: *mut c_void) -> std::result::Result<(Owner<'a>, u16), Fault> {
    let pointer = request.cast::<Request>();
    // SAFETY: aligned and readable by the caller's promise.
    if pointer.is_null() || !unsafe { (*pointer).is_valid() } {
        return Err(not_a_request(request));
    }
    // SAFETY: a request of a live communicator, whose address it carries.
    let (owner, index) = unsafe { ((*pointer).owner(), (*pointer).index()) };
    let owner: *mut c_void = std::ptr::with_exposed_provenance_mut(owner);
    // SAFETY: the owner is alive by the caller's promise; its first word is its tag.
    let owner = if unsafe { *owner.cast::<Tag>() } == Kind::Send as Tag {
        // SAFETY: as promised by the caller.
        Owner::Send(unsafe { data(owner) }?)
    } else {
        // SAFETY: as promised by the caller.
        Owner::Recv(unsafe { data(owner) }?)
    };
    Ok((owner, index))
}

#[cold]
fn wrong_kind(pointer: *mut c_void, wanted: Kind) -> Fault {
    Box::new(match check_live(pointer, &[wanted]) {
        Err(e) => e,
        Ok(_) => Error::argument(format!("{pointer:p} is damaged")),
    })
}

#[cold]
fn not_a_request(pointer: *mut c_void) -> Fault {
    Box::new(if pointer.is_null() {
        Error::argument("NULL instead of a request")
    } else if in_child() {
        in_child_error()
    } else {
        Error::argument(format!("{pointer:p} is not a request"))
    })
}

/// Why every call of a forked child is refused.
#[cold]
pub fn in_child_error() -> Error {
    Error::usage("called in a forked child: what the parent opened belongs to the parent")
}
