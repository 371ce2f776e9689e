//! ABI v7: NCCL 2.19. Adds device handles, which this plugin does not have.

use super::types::{Logger, MAX_RECVS, NAME, NET_DEVICE_HOST, NcclResult, Properties, Table};
use super::{calls, v6};
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `ncclNetProperties_v7_t`.
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
    pub net_device_type: c_int,
    pub net_device_version: c_int,
}
const _: () = {
    assert!(size_of::<NetProperties>() == 56);
    assert!(offset_of!(NetProperties, speed) == 28);
    assert!(offset_of!(NetProperties, max_recvs) == 44);
    assert!(offset_of!(NetProperties, net_device_type) == 48);
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
            net_device_type: NET_DEVICE_HOST,
            net_device_version: 0,
        }
    }
}

/// `ncclNet_v7_t`.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct Net {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(Logger) -> NcclResult,
    pub devices: unsafe extern "C" fn(*mut c_int) -> NcclResult,
    pub get_properties: unsafe extern "C" fn(c_int, *mut NetProperties) -> NcclResult,
    pub listen: unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult,
    pub connect: Connect,
    pub accept: Accept,
    pub reg_mr: unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        c_int,
        c_int,
        *mut *mut c_void,
    ) -> NcclResult,
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

/// `connect` of v7 to v9.
pub type Connect =
    unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> NcclResult;
/// `accept` from v7 on.
pub type Accept =
    unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut c_void) -> NcclResult;

pub(super) unsafe extern "C" fn init(logger: Logger) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::init(logger, None) }
}
unsafe extern "C" fn get_properties(dev: c_int, out: *mut NetProperties) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::properties(dev, out, |p| p.into()) }
}
pub(super) unsafe extern "C" fn connect(
    dev: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> NcclResult {
    // The device handle is only looked at for device types other than host.
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::connect(None, dev, handle, out, None) }
}
pub(super) unsafe extern "C" fn accept(
    listener: *mut c_void,
    out: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::accept(listener, out) }
}

/// The table that NCCL looks up.
#[unsafe(export_name = "ncclNetPlugin_v7")]
pub static TABLE: Table<Net> = Table(Net {
    name: NAME.as_ptr(),
    init,
    devices: v6::devices,
    get_properties,
    listen: v6::listen,
    connect,
    accept,
    reg_mr: v6::reg_mr,
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
