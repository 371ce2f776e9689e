//! ABI v11: NCCL 2.28 and 2.29. Every communicator gets a context, and an end.

use super::types::{
    Logger, MAX_MESSAGE, MAX_RECVS, NAME, NET_DEVICE_HOST, NcclResult, ProfilerCallback,
    Properties, Table,
};
use super::v9::VDeviceProps;
use super::v10::CommConfig;
use super::{calls, v6, v7, v8, v9, v10};
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `ncclNetProperties_v11_t`.
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
}
const _: () = {
    assert!(size_of::<NetProperties>() == 112);
    assert!(offset_of!(NetProperties, force_flush) == 32);
    assert!(offset_of!(NetProperties, speed) == 36);
    assert!(offset_of!(NetProperties, max_recvs) == 52);
    assert!(offset_of!(NetProperties, v_props) == 64);
    assert!(offset_of!(NetProperties, max_p2p_bytes) == 88);
    assert!(offset_of!(NetProperties, max_coll_bytes) == 96);
    assert!(offset_of!(NetProperties, max_multi_request_size) == 104);
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
        }
    }
}

/// `ncclNetCommAttr_t`: hints about one direction.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct CommAttr {
    pub max_concurrent_peers: i32,
    pub min_concurrent_peers: i32,
    pub max_flows_per_peer: i32,
    pub min_flows_per_peer: i32,
}

/// `ncclNetAttr_t`: hints about the transfers to come. Not used.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct NetAttr {
    pub send: CommAttr,
    pub recv: CommAttr,
    pub op: u32,
    pub algo: u32,
    pub proto: u32,
}
const _: () = assert!(size_of::<NetAttr>() == 44);

/// `ncclNet_v11_t`. v12 differs in the properties and in makeVDevice.
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
    pub make_vdevice: Option<v9::MakeVDevice>,
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

pub(super) unsafe extern "C" fn init(
    ctx: *mut *mut c_void,
    comm_id: u64,
    config: *mut CommConfig,
    logger: Logger,
    profiler: ProfilerCallback,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::init_context(ctx, comm_id, v10::traffic_class(config), logger, profiler) }
}
unsafe extern "C" fn get_properties(dev: c_int, out: *mut NetProperties) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::properties(dev, out, |p| p.into()) }
}
pub(super) unsafe extern "C" fn listen(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::listen(Some(ctx), dev, handle, out) }
}
pub(super) unsafe extern "C" fn connect(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's contract, see `calls`.
    unsafe { calls::connect(Some(ctx), dev, handle, out, None) }
}
pub(super) unsafe extern "C" fn finalize(ctx: *mut c_void) -> NcclResult {
    calls::finalize(ctx)
}

/// The table that NCCL looks up.
#[unsafe(export_name = "ncclNetPlugin_v11")]
pub static TABLE: Table<Net> = Table(Net {
    name: NAME.as_ptr(),
    init,
    devices: v6::devices,
    get_properties,
    listen,
    connect,
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
    make_vdevice: Some(v9::make_vdevice),
    finalize,
    set_net_attr: None,
});
