//! ABI v10: NCCL 2.26 and 2.27. Adds a traffic class per connection and profiler handles per transfer.

use super::types::{Logger, NAME, NcclResult, ProfilerCallback, Table};
use super::{calls, transfer, v6, v7, v8, v9};
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `ncclNetCommConfig_t`, from v10 on.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommConfig {
    /// Traffic class, or -1.
    pub traffic_class: c_int,
}
const _: () = assert!(size_of::<CommConfig>() == 4);

/// `ncclNet_v10_t`.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct Net {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(Logger, ProfilerCallback) -> NcclResult,
    pub devices: unsafe extern "C" fn(*mut c_int) -> NcclResult,
    pub get_properties: unsafe extern "C" fn(c_int, *mut v9::NetProperties) -> NcclResult,
    pub listen: unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult,
    pub connect: unsafe extern "C" fn(
        c_int,
        *mut CommConfig,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> NcclResult,
    pub accept: v7::Accept,
    pub reg_mr: v8::RegMr,
    pub reg_mr_dmabuf: v6::RegMrDmaBuf,
    pub dereg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult,
    pub isend: Isend,
    pub irecv: Irecv,
    pub iflush: v6::Iflush,
    pub test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> NcclResult,
    pub close_send: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_recv: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_listen: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub get_device_mr:
        Option<unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> NcclResult>,
    pub irecv_consumed: Option<unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> NcclResult>,
    pub make_vdevice: Option<v9::MakeVDevice>,
}
const _: () = {
    assert!(size_of::<Net>() == 160);
    assert!(offset_of!(Net, reg_mr_dmabuf) == 64);
    assert!(offset_of!(Net, isend) == 80);
    assert!(offset_of!(Net, test) == 104);
    assert!(offset_of!(Net, close_listen) == 128);
    assert!(offset_of!(Net, get_device_mr) == 136);
    assert!(offset_of!(Net, irecv_consumed) == 144);
    assert!(offset_of!(Net, make_vdevice) == 152);
};

/// `isend` from v10 on.
pub type Isend = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `irecv` from v10 on.
pub type Irecv = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;

/// The traffic class of a configuration that may be absent.
///
/// # Safety
/// NULL or NCCL's struct.
pub(super) unsafe fn traffic_class(config: *mut CommConfig) -> Option<c_int> {
    // SAFETY: as the caller says.
    unsafe { config.as_ref() }.map(|c| c.traffic_class)
}

unsafe extern "C" fn init(logger: Logger, profiler: ProfilerCallback) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::init(logger, profiler) }
}
unsafe extern "C" fn connect(
    dev: c_int,
    config: *mut CommConfig,
    handle: *mut c_void,
    out: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::connect(None, dev, handle, out, traffic_class(config)) }
}
pub(super) unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    handle: *mut c_void,
    profiler_handle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { transfer::isend(comm, data, size, tag, handle, profiler_handle, request) }
}
pub(super) unsafe extern "C" fn irecv(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    profiler_handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe {
        transfer::irecv::<_, true>(comm, n, data, sizes, tags, handles, profiler_handles, request)
    }
}

/// The table that NCCL looks up.
#[unsafe(export_name = "ncclNetPlugin_v10")]
pub static TABLE: Table<Net> = Table(Net {
    name: NAME.as_ptr(),
    init,
    devices: v6::devices,
    get_properties: v9::get_properties,
    listen: v6::listen,
    connect,
    accept: v7::accept,
    reg_mr: v8::reg_mr,
    reg_mr_dmabuf: v6::reg_mr_dmabuf,
    dereg_mr: v6::dereg_mr,
    isend,
    irecv,
    iflush: v6::iflush,
    test: v6::test,
    close_send: v6::close_send,
    close_recv: v6::close_recv,
    close_listen: v6::close_listen,
    get_device_mr: None,
    irecv_consumed: None,
    make_vdevice: Some(v9::make_vdevice),
});
