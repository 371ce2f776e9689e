//! ABI v12: NCCL 2.30 and later. Up to eight members of a fused device; rail and plane numbers.

use super::types::{
    Logger, MAX_MESSAGE, MAX_RECVS, NAME, NET_DEVICE_HOST, NcclResult, ProfilerCallback,
    Properties, Table,
};
use super::v10::CommConfig;
use super::v11::NetAttr;
use super::{calls, v6, v7, v8, v10, v11};
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `ncclNetVDeviceProps_t` of v12: up to eight members.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct VDeviceProps {
    pub ndevs: c_int,
    pub devs: [c_int; 8],
}
const _: () = assert!(size_of::<VDeviceProps>() == 36);

impl VDeviceProps {
    /// The members of a device, as many as fit; unused entries are 0.
    pub fn new(members: &[c_int]) -> Self {
        let mut devs = [0; 8];
        let mut ndevs = 0;
        for (slot, member) in devs.iter_mut().zip(members) {
            *slot = *member;
            ndevs += 1;
        }
        Self { ndevs, devs }
    }
}

/// `ncclNetProperties_v12_t`.
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
    pub max_multi_request_size: c_int,
    pub rail_id: i16,
    pub plane_id: i16,
}
const _: () = {
    assert!(size_of::<NetProperties>() == 128);
    assert!(offset_of!(NetProperties, force_flush) == 32);
    assert!(offset_of!(NetProperties, speed) == 36);
    assert!(offset_of!(NetProperties, max_recvs) == 52);
    assert!(offset_of!(NetProperties, v_props) == 64);
    assert!(offset_of!(NetProperties, max_p2p_bytes) == 104);
    assert!(offset_of!(NetProperties, max_coll_bytes) == 112);
    assert!(offset_of!(NetProperties, max_multi_request_size) == 120);
    assert!(offset_of!(NetProperties, rail_id) == 124);
    assert!(offset_of!(NetProperties, plane_id) == 126);
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
            max_multi_request_size: 1,
            rail_id: p.rail_id,
            plane_id: p.plane_id,
        }
    }
}

/// `ncclNet_v12_t`.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct Net {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut CommConfig,
        Logger,
        ProfilerCallback,
    ) -> NcclResult,
    pub devices: unsafe extern "C" fn(*mut c_int) -> NcclResult,
    pub get_properties: unsafe extern "C" fn(c_int, *mut NetProperties) -> NcclResult,
    pub listen:
        unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> NcclResult,
    pub connect: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> NcclResult,
    pub accept: v7::Accept,
    pub reg_mr: v8::RegMr,
    pub reg_mr_dmabuf: v6::RegMrDmaBuf,
    pub dereg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult,
    pub isend: v10::Isend,
    pub irecv: v10::Irecv,
    pub iflush: v6::Iflush,
    pub test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> NcclResult,
    pub close_send: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_recv: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub close_listen: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub get_device_mr:
        Option<unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> NcclResult>,
    pub irecv_consumed: Option<unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> NcclResult>,
    pub make_vdevice: Option<unsafe extern "C" fn(*mut c_int, *mut VDeviceProps) -> NcclResult>,
    pub finalize: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    pub set_net_attr: Option<unsafe extern "C" fn(*mut c_void, *mut NetAttr) -> NcclResult>,
}
const _: () = {
    assert!(size_of::<Net>() == 176);
    assert!(offset_of!(Net, reg_mr_dmabuf) == 64);
    assert!(offset_of!(Net, isend) == 80);
    assert!(offset_of!(Net, test) == 104);
    assert!(offset_of!(Net, close_listen) == 128);
    assert!(offset_of!(Net, get_device_mr) == 136);
    assert!(offset_of!(Net, irecv_consumed) == 144);
    assert!(offset_of!(Net, make_vdevice) == 152);
    assert!(offset_of!(Net, finalize) == 160);
    assert!(offset_of!(Net, set_net_attr) == 168);
};

unsafe extern "C" fn get_properties(dev: c_int, out: *mut NetProperties) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::properties(dev, out, |p| p.into()) }
}
unsafe extern "C" fn make_vdevice(out: *mut c_int, props: *mut VDeviceProps) -> NcclResult {
    if props.is_null() {
        return super::types::INVALID_ARGUMENT;
    }
    // SAFETY: NCCL's struct, not NULL; the call checks the count against the array's size.
    unsafe { calls::make_virtual(out, (&raw const (*props).devs).cast(), (*props).ndevs, 8) }
}

/// The table that NCCL looks up.
#[unsafe(export_name = "ncclNetPlugin_v12")]
pub static TABLE: Table<Net> = Table(Net {
    name: NAME.as_ptr(),
    init: v11::init,
    devices: v6::devices,
    get_properties,
    listen: v11::listen,
    connect: v11::connect,
    accept: v7::accept,
    reg_mr: v8::reg_mr,
    reg_mr_dmabuf: v6::reg_mr_dmabuf,
    dereg_mr: v6::dereg_mr,
    isend: v10::isend,
    irecv: v10::irecv,
    iflush: v6::iflush,
    test: v6::test,
    close_send: v6::close_send,
    close_recv: v6::close_recv,
    close_listen: v6::close_listen,
    get_device_mr: None,
    irecv_consumed: None,
    make_vdevice: Some(make_vdevice),
    finalize: v11::finalize,
    set_net_attr: None,
});
