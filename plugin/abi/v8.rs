//! ABI v8: NCCL 2.20 to 2.23. Registration sizes become `size_t`.

use super::types::{Logger, MAX_RECVS, NAME, NET_DEVICE_HOST, NcclResult, Properties, Table};
use super::{calls, v6, v7};
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `ncclNetProperties_v8_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct NetProperties {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
}
const _: () = {
    assert!(size_of::<NetProperties>() == 64);
    assert!(offset_of!(NetProperties, reg_is_global) == 28);
    assert!(offset_of!(NetProperties, speed) == 32);
    assert!(offset_of!(NetProperties, max_recvs) == 48);
    assert!(offset_of!(NetProperties, net_device_version) == 56);
};

impl From<&Properties> for NetProperties {
    fn from(p: &Properties) -> Self {
        Self {
            name: p.name,
            pci_path: p.pci_path,
            guid: p.guid,
            ptr_support: p.ptr_support,
            reg_is_global: 1,
            speed: p.speed,
            port: p.port,
            latency: p.latency,
            max_comms: p.max_comms,
            max_recvs: MAX_RECVS,
            net_device_type: NET_DEVICE_HOST,
            net_device_version: 0,
        }
    }
}

/// `ncclNet_v8_t`.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct Net {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(Logger) -> NcclResult,
    pub devices: unsafe extern "C" fn(*mut c_int) -> NcclResult,
    pub get_properties: unsafe extern "C" fn(c_int, *mut NetProperties) -> NcclResult,
    pub listen: unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult,
    pub connect: v7::Connect,
    pub accept: v7::Accept,
    pub reg_mr: RegMr,
    pub reg_mr_dmabuf: v6::RegMrDmaBuf,
    pub dereg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult,
    pub isend: unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        c_int,
        c_int,
        *mut c_void,
        *mut *mut c_void,
    ) -> NcclResult,
    pub irecv: v6::Irecv,
    pub iflush: v6::Iflush,
    pub test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> NcclResult,
    pub close_send: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_recv: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_listen: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub get_device_mr:
        Option<unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> NcclResult>,
    pub irecv_consumed: Option<unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> NcclResult>,
}
const _: () = {
    assert!(size_of::<Net>() == 152);
    assert!(offset_of!(Net, reg_mr_dmabuf) == 64);
    assert!(offset_of!(Net, isend) == 80);
    assert!(offset_of!(Net, test) == 104);
    assert!(offset_of!(Net, close_listen) == 128);
    assert!(offset_of!(Net, get_device_mr) == 136);
    assert!(offset_of!(Net, irecv_consumed) == 144);
};

/// `regMr` from v8 on.
pub type RegMr =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut *mut c_void) -> NcclResult;

unsafe extern "C" fn get_properties(dev: c_int, out: *mut NetProperties) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::properties(dev, out, |p| p.into()) }
}
pub(super) unsafe extern "C" fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    out: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::reg_mr(comm, data, size, kind, out) }
}

/// The table that NCCL looks up.
#[unsafe(export_name = "ncclNetPlugin_v8")]
pub static TABLE: Table<Net> = Table(Net {
    name: NAME.as_ptr(),
    init: v7::init,
    devices: v6::devices,
    get_properties,
    listen: v6::listen,
    connect: v7::connect,
    accept: v7::accept,
    reg_mr,
    reg_mr_dmabuf: v6::reg_mr_dmabuf,
    dereg_mr: v6::dereg_mr,
    isend: v6::isend,
    irecv: v6::irecv,
    iflush: v6::iflush,
    test: v6::test,
    close_send: v6::close_send,
    close_recv: v6::close_recv,
    close_listen: v6::close_listen,
    get_device_mr: None,
    irecv_consumed: None,
});
