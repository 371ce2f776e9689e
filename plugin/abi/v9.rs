//! ABI v9: NCCL 2.24 and 2.25. Message sizes become `size_t`; devices can be fused.

use super::types::{
    Logger, MAX_MESSAGE, MAX_RECVS, NAME, NET_DEVICE_HOST, NcclResult, Properties, Table,
};
use super::{calls, transfer, v6, v7, v8};
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `ncclNetVDeviceProps_t` of v9 to v11: up to four members.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct VDeviceProps {
    pub ndevs: c_int,
    pub devs: [c_int; 4],
}
const _: () = assert!(size_of::<VDeviceProps>() == 20);

impl VDeviceProps {
    /// The members of a device, as many as fit; unused entries are 0.
    pub fn new(members: &[c_int]) -> Self {
        let mut devs = [0; 4];
        let mut ndevs = 0;
        for (slot, member) in devs.iter_mut().zip(members) {
            *slot = *member;
            ndevs += 1;
        }
        Self { ndevs, devs }
    }
}

/// `ncclNetProperties_v9_t`. v10 has the same.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct NetProperties {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub v_props: VDeviceProps,
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
}
const _: () = {
    assert!(size_of::<NetProperties>() == 104);
    assert!(offset_of!(NetProperties, force_flush) == 32);
    assert!(offset_of!(NetProperties, speed) == 36);
    assert!(offset_of!(NetProperties, max_recvs) == 52);
    assert!(offset_of!(NetProperties, v_props) == 64);
    assert!(offset_of!(NetProperties, max_p2p_bytes) == 88);
    assert!(offset_of!(NetProperties, max_coll_bytes) == 96);
};

impl From<&Properties> for NetProperties {
    fn from(p: &Properties) -> Self {
        Self {
            name: p.name,
            pci_path: p.pci_path,
            guid: p.guid,
            ptr_support: p.ptr_support,
            reg_is_global: 1,
            force_flush: p.force_flush,
            speed: p.speed,
            port: p.port,
            latency: p.latency,
            max_comms: p.max_comms,
            max_recvs: MAX_RECVS,
            net_device_type: NET_DEVICE_HOST,
            net_device_version: 0,
            v_props: VDeviceProps::new(&p.members),
            max_p2p_bytes: MAX_MESSAGE,
            max_coll_bytes: MAX_MESSAGE,
        }
    }
}

/// `ncclNet_v9_t`.
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
    pub reg_mr: v8::RegMr,
    pub reg_mr_dmabuf: v6::RegMrDmaBuf,
    pub dereg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult,
    pub isend: unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        usize,
        c_int,
        *mut c_void,
        *mut *mut c_void,
    ) -> NcclResult,
    pub irecv: Irecv,
    pub iflush: v6::Iflush,
    pub test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> NcclResult,
    pub close_send: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_recv: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_listen: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub get_device_mr:
        Option<unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> NcclResult>,
    pub irecv_consumed: Option<unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> NcclResult>,
    pub make_vdevice: Option<MakeVDevice>,
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

/// `irecv` of v9.
pub type Irecv = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
/// `makeVDevice` of v9 to v11.
pub type MakeVDevice = unsafe extern "C" fn(*mut c_int, *mut VDeviceProps) -> NcclResult;

pub(super) unsafe extern "C" fn get_properties(dev: c_int, out: *mut NetProperties) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::properties(dev, out, |p| p.into()) }
}
unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    handle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { transfer::isend(comm, data, size, tag, handle, std::ptr::null_mut(), request) }
}
unsafe extern "C" fn irecv(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe {
        let parents = std::ptr::null_mut();
        transfer::irecv::<_, true>(comm, n, data, sizes, tags, handles, parents, request)
    }
}
pub(super) unsafe extern "C" fn make_vdevice(
    out: *mut c_int,
    props: *mut VDeviceProps,
) -> NcclResult {
    if props.is_null() {
        return super::types::INVALID_ARGUMENT;
    }
    // SAFETY: NCCL's struct, not NULL; the call checks the count against the array's size.
    unsafe { calls::make_virtual(out, (&raw const (*props).devs).cast(), (*props).ndevs, 4) }
}

/// The table that NCCL looks up.
#[unsafe(export_name = "ncclNetPlugin_v9")]
pub static TABLE: Table<Net> = Table(Net {
    name: NAME.as_ptr(),
    init: v7::init,
    devices: v6::devices,
    get_properties,
    listen: v6::listen,
    connect: v7::connect,
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
    make_vdevice: Some(make_vdevice),
});
