//! Raw verbs types: the only file that names `rdma-sys`.
//!
//! Types and constants only. Every function is reached through [`super::library::Verbs`], so that the plugin
//! carries no link-time dependency on libibverbs. Status, opcode and event numbers are plain integers here:
//! a newer kernel or library may add values, and a Rust enum that the library fills would make those undefined
//! behaviour.

pub use rdma_sys::{
    ibv_ah_attr, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_ece, ibv_gid, ibv_mr,
    ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr,
    ibv_send_wr, ibv_sge, ibv_srq, ibv_wc, imm_data_invalidated_rkey_union_t, rdma_t,
    verbs_context, wr_t,
};
use std::ffi::{c_int, c_uint};

/// `struct ibv_async_event` with the event type as an integer; see the module text.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "a raw union; AsyncEvent is the readable form")]
pub struct ibv_async_event {
    /// The object: a pointer to a CQ, QP or SRQ, or a port number, by event type.
    pub element: AsyncElement,
    /// `IBV_EVENT_*`.
    pub event_type: c_int,
}

/// What an asynchronous event is about.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "which member is valid depends on the event type")]
pub union AsyncElement {
    /// Completion queue.
    pub cq: *mut ibv_cq,
    /// Queue pair.
    pub qp: *mut ibv_qp,
    /// Shared receive queue.
    pub srq: *mut ibv_srq,
    /// Port number, from 1.
    pub port_num: c_int,
}

/// `struct ibv_port_attr` with what newer libraries write behind it.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "PortAttr is the readable form")]
pub struct PortAttrEx {
    /// What older libraries know.
    pub base: ibv_port_attr,
    /// Speed of a lane, which the byte in `base` cannot hold from XDR on; 0 where the library does not say.
    pub active_speed_ex: u32,
}

const _: () = assert!(std::mem::offset_of!(PortAttrEx, active_speed_ex) == 52);
const _: () = assert!(size_of::<PortAttrEx>() == 56);
const _: () = assert!(size_of::<ibv_async_event>() == 16);
const _: () = assert!(size_of::<ibv_wc>() == 48);
const _: () = assert!(size_of::<ibv_send_wr>() == 128);
const _: () = assert!(size_of::<ibv_recv_wr>() == 32);
const _: () = assert!(size_of::<ibv_mr>() == 48);

/// `IBV_ACCESS_*` bits.
pub mod access {
    use std::ffi::c_int;
    /// The device may write locally (receives, reads).
    pub const LOCAL_WRITE: c_int = 1;
    /// A peer may write.
    pub const REMOTE_WRITE: c_int = 2;
    /// A peer may read.
    pub const REMOTE_READ: c_int = 4;
    /// PCIe relaxed ordering: an optional bit, ignored by devices without it when asked through iova2.
    pub const RELAXED_ORDERING: c_int = 1 << 20;
}

/// `IBV_QP_*` attribute mask bits.
pub mod mask {
    use std::ffi::c_int;
    /// State.
    pub const STATE: c_int = 1;
    /// Access flags.
    pub const ACCESS_FLAGS: c_int = 1 << 3;
    /// Partition key index.
    pub const PKEY_INDEX: c_int = 1 << 4;
    /// Port.
    pub const PORT: c_int = 1 << 5;
    /// Address vector.
    pub const AV: c_int = 1 << 7;
    /// Path MTU.
    pub const PATH_MTU: c_int = 1 << 8;
    /// Transport timeout.
    pub const TIMEOUT: c_int = 1 << 9;
    /// Retry count.
    pub const RETRY_CNT: c_int = 1 << 10;
    /// Receiver-not-ready retry count.
    pub const RNR_RETRY: c_int = 1 << 11;
    /// Receive packet sequence number.
    pub const RQ_PSN: c_int = 1 << 12;
    /// Outstanding reads and atomics as initiator.
    pub const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    /// Receiver-not-ready timer.
    pub const MIN_RNR_TIMER: c_int = 1 << 15;
    /// Send packet sequence number.
    pub const SQ_PSN: c_int = 1 << 16;
    /// Outstanding reads and atomics as responder.
    pub const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    /// Peer queue pair number.
    pub const DEST_QPN: c_int = 1 << 20;
}

/// Queue pair states.
pub mod qp_state {
    use std::ffi::c_uint;
    /// Initialised.
    pub const INIT: c_uint = 1;
    /// Ready to receive.
    pub const RTR: c_uint = 2;
    /// Ready to send.
    pub const RTS: c_uint = 3;
    /// Error: nothing more is executed and everything outstanding is flushed.
    pub const ERR: c_uint = 6;
}

/// Reliable connected queue pair.
pub const QPT_RC: c_uint = 2;
/// Work request: RDMA write.
pub const WR_RDMA_WRITE: c_uint = 0;
/// Work request: RDMA write with immediate.
pub const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
/// Work request: RDMA read.
pub const WR_RDMA_READ: c_uint = 4;
/// Send flag: make a completion.
pub const SEND_SIGNALED: c_uint = 2;
/// Send flag: the payload is copied into the work queue when posting.
pub const SEND_INLINE: c_uint = 8;
/// Completion status: success.
pub const WC_SUCCESS: c_uint = 0;
/// Completion status: the queue pair was in the error state.
pub const WC_WR_FLUSH_ERR: c_uint = 5;
/// Port state: active.
pub const PORT_ACTIVE: c_uint = 4;
/// Link layer: not stated, which means InfiniBand.
pub const LINK_LAYER_UNSPECIFIED: u8 = 0;
/// Link layer: InfiniBand.
pub const LINK_LAYER_INFINIBAND: u8 = 1;
/// Link layer: Ethernet (RoCE).
pub const LINK_LAYER_ETHERNET: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers written out above are those of the distribution's headers, as rdma-sys read them.
    #[test]
    fn constants_agree_with_the_headers() {
        use rdma_sys::{
            ibv_access_flags, ibv_port_state, ibv_qp_attr_mask, ibv_qp_state, ibv_qp_type,
            ibv_send_flags, ibv_wc_status, ibv_wr_opcode,
        };
        assert_eq!(access::LOCAL_WRITE as u32, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0);
        assert_eq!(access::REMOTE_WRITE as u32, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0);
        assert_eq!(access::REMOTE_READ as u32, ibv_access_flags::IBV_ACCESS_REMOTE_READ.0);
        assert_eq!(
            access::RELAXED_ORDERING as u32,
            ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0
        );
        for (ours, theirs) in [
            (mask::STATE, ibv_qp_attr_mask::IBV_QP_STATE),
            (mask::ACCESS_FLAGS, ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS),
            (mask::PKEY_INDEX, ibv_qp_attr_mask::IBV_QP_PKEY_INDEX),
            (mask::PORT, ibv_qp_attr_mask::IBV_QP_PORT),
            (mask::AV, ibv_qp_attr_mask::IBV_QP_AV),
            (mask::PATH_MTU, ibv_qp_attr_mask::IBV_QP_PATH_MTU),
            (mask::TIMEOUT, ibv_qp_attr_mask::IBV_QP_TIMEOUT),
            (mask::RETRY_CNT, ibv_qp_attr_mask::IBV_QP_RETRY_CNT),
            (mask::RNR_RETRY, ibv_qp_attr_mask::IBV_QP_RNR_RETRY),
            (mask::RQ_PSN, ibv_qp_attr_mask::IBV_QP_RQ_PSN),
            (mask::MAX_QP_RD_ATOMIC, ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC),
            (mask::MIN_RNR_TIMER, ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER),
            (mask::SQ_PSN, ibv_qp_attr_mask::IBV_QP_SQ_PSN),
            (mask::MAX_DEST_RD_ATOMIC, ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC),
            (mask::DEST_QPN, ibv_qp_attr_mask::IBV_QP_DEST_QPN),
        ] {
            assert_eq!(ours as u32, theirs.0);
        }
        assert_eq!(qp_state::INIT, ibv_qp_state::IBV_QPS_INIT);
        assert_eq!(qp_state::RTR, ibv_qp_state::IBV_QPS_RTR);
        assert_eq!(qp_state::RTS, ibv_qp_state::IBV_QPS_RTS);
        assert_eq!(qp_state::ERR, ibv_qp_state::IBV_QPS_ERR);
        assert_eq!(QPT_RC, ibv_qp_type::IBV_QPT_RC);
        assert_eq!(WR_RDMA_WRITE, ibv_wr_opcode::IBV_WR_RDMA_WRITE);
        assert_eq!(WR_RDMA_WRITE_WITH_IMM, ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM);
        assert_eq!(WR_RDMA_READ, ibv_wr_opcode::IBV_WR_RDMA_READ);
        assert_eq!(SEND_SIGNALED, ibv_send_flags::IBV_SEND_SIGNALED.0);
        assert_eq!(SEND_INLINE, ibv_send_flags::IBV_SEND_INLINE.0);
        assert_eq!(WC_SUCCESS, ibv_wc_status::IBV_WC_SUCCESS);
        assert_eq!(WC_WR_FLUSH_ERR, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        assert_eq!(PORT_ACTIVE, ibv_port_state::IBV_PORT_ACTIVE);
    }
}
