//! ABI v6: NCCL 2.13 to 2.30. The oldest version offered; later ones reuse what did not change.

use super::types::{Logger, MAX_RECVS, NAME, NcclResult, Properties, Table};
use super::{calls, completion, transfer};
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `ncclNetProperties_v6_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct NetProperties {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
}
const _: () = {
    assert!(size_of::<NetProperties>() == 48);
    assert!(offset_of!(NetProperties, guid) == 16);
    assert!(offset_of!(NetProperties, ptr_support) == 24);
    assert!(offset_of!(NetProperties, speed) == 28);
    assert!(offset_of!(NetProperties, latency) == 36);
    assert!(offset_of!(NetProperties, max_recvs) == 44);
};

impl From<&Properties> for NetProperties {
    fn from(p: &Properties) -> Self {
        Self {
            name: p.name,
            pci_path: p.pci_path,
            guid: p.guid,
            ptr_support: p.ptr_support,
            speed: p.speed,
            port: p.port,
            latency: p.latency,
            max_comms: p.max_comms,
            max_recvs: MAX_RECVS,
        }
    }
}

/// `ncclNet_v6_t`.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct Net {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(Logger) -> NcclResult,
    pub devices: unsafe extern "C" fn(*mut c_int) -> NcclResult,
    pub get_properties: unsafe extern "C" fn(c_int, *mut NetProperties) -> NcclResult,
    pub listen: unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult,
    pub connect: unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult,
    pub accept: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> NcclResult,
    pub reg_mr: unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        c_int,
        c_int,
        *mut *mut c_void,
    ) -> NcclResult,
    pub reg_mr_dmabuf: RegMrDmaBuf,
    pub dereg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult,
    pub isend: unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        c_int,
        c_int,
        *mut c_void,
        *mut *mut c_void,
    ) -> NcclResult,
    pub irecv: Irecv,
    pub iflush: Iflush,
    pub test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> NcclResult,
    pub close_send: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_recv: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_listen: unsafe extern "C" fn(*mut c_void) -> NcclResult,
}
const _: () = {
    assert!(size_of::<Net>() == 136);
    assert!(offset_of!(Net, reg_mr_dmabuf) == 64);
    assert!(offset_of!(Net, isend) == 80);
    assert!(offset_of!(Net, test) == 104);
    assert!(offset_of!(Net, close_listen) == 128);
};

/// `regMrDmaBuf`, all versions.
pub type RegMrDmaBuf = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    *mut *mut c_void,
) -> NcclResult;
/// `irecv` up to v8.
pub type Irecv = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `iflush`, all versions.
pub type Iflush = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;

unsafe extern "C" fn init(logger: Logger) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::init(logger, None) }
}
pub(super) unsafe extern "C" fn devices(out: *mut c_int) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::devices(out) }
}
unsafe extern "C" fn get_properties(dev: c_int, out: *mut NetProperties) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::properties(dev, out, |p| p.into()) }
}
pub(super) unsafe extern "C" fn listen(
    dev: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::listen(None, dev, handle, out) }
}
unsafe extern "C" fn connect(dev: c_int, handle: *mut c_void, out: *mut *mut c_void) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::connect(None, dev, handle, out, None) }
}
unsafe extern "C" fn accept(listener: *mut c_void, out: *mut *mut c_void) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::accept(listener, out) }
}
pub(super) unsafe extern "C" fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    kind: c_int,
    out: *mut *mut c_void,
) -> NcclResult {
    // A negative size becomes one that no address space holds, and is refused as such.
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::reg_mr(comm, data, usize::try_from(size).unwrap_or(usize::MAX), kind, out) }
}
pub(super) unsafe extern "C" fn reg_mr_dmabuf(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
    out: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::reg_mr_dmabuf(comm, data, size, kind, offset, fd, out) }
}
pub(super) unsafe extern "C" fn dereg_mr(_comm: *mut c_void, handle: *mut c_void) -> NcclResult {
    calls::dereg_mr(handle)
}
pub(super) unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    handle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // A negative size becomes one above the limit, and is refused as such.
    // SAFETY: NCCL's contract, see `calls`.
    unsafe {
        transfer::isend(
            comm,
            data,
            usize::try_from(size).unwrap_or(usize::MAX),
            tag,
            handle,
            std::ptr::null_mut(),
            request,
        )
    }
}
pub(super) unsafe extern "C" fn irecv(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe {
        let parents = std::ptr::null_mut();
        transfer::irecv::<_, false>(comm, n, data, sizes, tags, handles, parents, request)
    }
}
pub(super) unsafe extern "C" fn iflush(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { transfer::iflush(comm, n, data, sizes, handles, request) }
}
pub(super) unsafe extern "C" fn test(
    request: *mut c_void,
    done: *mut c_int,
    sizes: *mut c_int,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { completion::test(request, done, sizes) }
}
pub(super) unsafe extern "C" fn close_send(comm: *mut c_void) -> NcclResult {
    calls::close_send(comm)
}
pub(super) unsafe extern "C" fn close_recv(comm: *mut c_void) -> NcclResult {
    calls::close_recv(comm)
}
pub(super) unsafe extern "C" fn close_listen(comm: *mut c_void) -> NcclResult {
    calls::close_listen(comm)
}

/// The table that NCCL looks up.
#[unsafe(export_name = "ncclNetPlugin_v6")]
pub static TABLE: Table<Net> = Table(Net {
    name: NAME.as_ptr(),
    init,
    devices,
    get_properties,
    listen,
    connect,
    accept,
    reg_mr,
    reg_mr_dmabuf,
    dereg_mr,
    isend,
    irecv,
    iflush,
    test,
    close_send,
    close_recv,
    close_listen,
});
