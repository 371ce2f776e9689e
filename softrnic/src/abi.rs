//! The public verbs structures, declared by hand.
//!
//! This is a second, independent declaration of the C layout (the plugin has its own), so that each checks the
//! other. Enums of the C header are plain integers here: callers may pass values we do not know.
//! Work requests are only ever read field by field, because callers allocate shorter variants than the header's.
#![allow(missing_docs)] // Field names are the C header's; the header is their documentation.

use std::ffi::{c_char, c_int, c_void};

pub use crate::abi_consts::*;

/// A function pointer slot that is published but never called by this crate.
pub type Slot = *const c_void;

#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Gid {
    pub raw: [u8; 16],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GidEntry {
    pub gid: Gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct IbvDevice {
    pub ops: [Slot; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

/// Slots of `ibv_context.ops` that are in use, by index.
pub const OP_POLL_CQ: usize = 11;
pub const OP_REQ_NOTIFY_CQ: usize = 12;
pub const OP_POST_SRQ_RECV: usize = 20;
pub const OP_POST_SEND: usize = 25;
pub const OP_POST_RECV: usize = 26;

#[repr(C)]
pub struct IbvContext {
    pub device: *mut IbvDevice,
    pub ops: [Slot; 32],
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub abi_compat: *mut c_void,
}

/// Slots of `verbs_context` that are in use, by index from its start.
pub const EXT_QUERY_PORT: usize = 0;
pub const EXT_QUERY_DEVICE_EX: usize = 27;
pub const EXT_CREATE_QP_EX: usize = 33;
pub const EXT_GET_SRQ_NUM: usize = 34;
pub const EXT_CREATE_SRQ_EX: usize = 35;

/// The extended context: members grow towards lower addresses, `sz` sits right before the plain context.
#[repr(C)]
pub struct VerbsContext {
    pub ext: [Slot; 39],
    pub sz: usize,
    pub context: IbvContext,
}

#[repr(C)]
#[derive(Debug)]
pub struct IbvPd {
    pub context: *mut IbvContext,
    pub handle: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct IbvMr {
    pub context: *mut IbvContext,
    pub pd: *mut IbvPd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct IbvCompChannel {
    pub context: *mut IbvContext,
    pub fd: c_int,
    pub refcnt: c_int,
}

#[repr(C)]
pub struct IbvCq {
    pub context: *mut IbvContext,
    pub channel: *mut IbvCompChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

#[repr(C)]
pub struct IbvSrq {
    pub context: *mut IbvContext,
    pub srq_context: *mut c_void,
    pub pd: *mut IbvPd,
    pub handle: u32,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
pub struct IbvQp {
    pub context: *mut IbvContext,
    pub qp_context: *mut c_void,
    pub pd: *mut IbvPd,
    pub send_cq: *mut IbvCq,
    pub recv_cq: *mut IbvCq,
    pub srq: *mut IbvSrq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: u32,
    pub qp_type: u32,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct IbvAh {
    pub context: *mut IbvContext,
    pub pd: *mut IbvPd,
    pub handle: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// The leading 80 bytes of a send work request: all that RC operations need and all that NCCL allocates.
#[repr(C)]
#[derive(Debug)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut Self,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: u32,
    pub imm_data: u32,
    /// `remote_addr` of RDMA and atomic requests.
    pub remote_addr: u64,
    /// `rkey` (low half) of RDMA requests, `compare_add` of atomics.
    pub rkey_or_compare: u64,
    /// `swap` of atomics.
    pub swap: u64,
    /// `rkey` of atomics.
    pub atomic_rkey: u32,
    pub pad: u32,
    pub xrc_srqn: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut Self,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut IbvCq,
    pub recv_cq: *mut IbvCq,
    pub srq: *mut IbvSrq,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// The head of `ibv_qp_init_attr_ex` up to the fields that are understood.
#[repr(C)]
#[derive(Debug)]
pub struct QpInitAttrEx {
    pub base: QpInitAttr,
    pub comp_mask: u32,
    pub pd: *mut IbvPd,
    pub xrcd: *mut c_void,
    pub create_flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `ibv_qp_attr` without its `rate_limit` tail: the part that every caller allocates.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct QpAttr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct SrqAttr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub attr: SrqAttr,
}

/// The head of `ibv_srq_init_attr_ex` up to the fields that are understood.
#[repr(C)]
#[derive(Debug)]
pub struct SrqInitAttrEx {
    pub base: SrqInitAttr,
    pub comp_mask: u32,
    pub srq_type: u32,
    pub pd: *mut IbvPd,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_int,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `ibv_port_attr` as of rdma-core 61 and later; shorter callers receive a prefix.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct PortAttr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    pub active_speed_ex: u32,
}

/// Size of the port attribute structure that the exported (not the extended) query fills.
pub const PORT_ATTR_COMPAT: usize = 48;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AsyncEvent {
    /// Pointer or port number, by event type.
    pub element: u64,
    pub event_type: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Ece {
    pub vendor_id: u32,
    pub options: u32,
    pub comp_mask: u32,
}

macro_rules! sizes {
    ($($t:ty = $n:expr),+ $(,)?) => { $(const _: () = assert!(size_of::<$t>() == $n);)+ };
}
macro_rules! offsets {
    ($($t:ty, $f:ident = $n:expr);+ $(;)?) => { $(const _: () = assert!(std::mem::offset_of!($t, $f) == $n);)+ };
}

#[cfg(target_arch = "x86_64")]
mod layout {
    //! The numbers of the C header on x86-64, where the pthread types have their usual sizes.
    use super::*;
    sizes!(
        IbvDevice = 664,
        IbvContext = 328,
        VerbsContext = 648,
        IbvPd = 16,
        IbvMr = 48,
        IbvCq = 128,
        IbvQp = 160,
        IbvSrq = 128,
        IbvCompChannel = 16,
        IbvAh = 24,
    );
    offsets!(
        IbvContext, cmd_fd = 264; IbvContext, async_fd = 268; IbvContext, mutex = 280; IbvContext, abi_compat = 320;
        VerbsContext, sz = 312; VerbsContext, context = 320;
        IbvQp, qp_num = 52; IbvQp, state = 56; IbvQp, mutex = 64; IbvQp, events_completed = 152;
        IbvCq, cqe = 28; IbvCq, mutex = 32; IbvCq, comp_events_completed = 120;
        IbvSrq, mutex = 32; IbvSrq, events_completed = 120;
    );
}
sizes!(
    Gid = 16,
    GidEntry = 32,
    Wc = 48,
    Sge = 16,
    SendWr = 80,
    RecvWr = 32,
    QpCap = 20,
    QpInitAttr = 64,
    GlobalRoute = 24,
    AhAttr = 32,
    QpAttr = 136,
    SrqAttr = 12,
    SrqInitAttr = 24,
    DeviceAttr = 232,
    PortAttr = 56,
    AsyncEvent = 16,
    Ece = 12,
);
offsets!(
    SendWr, opcode = 28; SendWr, send_flags = 32; SendWr, imm_data = 36; SendWr, remote_addr = 40;
    SendWr, rkey_or_compare = 48; SendWr, swap = 56; SendWr, atomic_rkey = 64;
    QpAttr, cap = 36; QpAttr, ah_attr = 56; QpAttr, alt_ah_attr = 88; QpAttr, pkey_index = 120;
    QpAttr, max_rd_atomic = 126; QpAttr, timeout = 130; QpAttr, alt_timeout = 134;
    AhAttr, dlid = 24; AhAttr, port_num = 30;
    QpInitAttrEx, comp_mask = 64; QpInitAttrEx, pd = 72; QpInitAttrEx, create_flags = 88;
    SrqInitAttrEx, comp_mask = 24; SrqInitAttrEx, pd = 32;
    PortAttr, pkey_tbl_len = 32; PortAttr, link_layer = 46; PortAttr, port_cap_flags2 = 48; PortAttr, active_speed_ex = 52;
    DeviceAttr, max_qp = 108; DeviceAttr, phys_port_cnt = 227;
    Wc, qp_num = 28; Wc, wc_flags = 36; Wc, dlid_path_bits = 45;
);

impl std::fmt::Debug for IbvContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IbvContext").field("async_fd", &self.async_fd).finish_non_exhaustive()
    }
}
impl std::fmt::Debug for VerbsContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsContext").field("context", &self.context).finish_non_exhaustive()
    }
}
impl std::fmt::Debug for IbvCq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IbvCq").field("handle", &self.handle).finish_non_exhaustive()
    }
}
impl std::fmt::Debug for IbvSrq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IbvSrq").field("handle", &self.handle).finish_non_exhaustive()
    }
}
impl std::fmt::Debug for IbvQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IbvQp").field("qp_num", &self.qp_num).finish_non_exhaustive()
    }
}
