//! Values of the verbs header's enums, as integers, under the header's names without their prefix.
#![allow(missing_docs)] // The names are the C header's.

pub const ACCESS_LOCAL_WRITE: u32 = 1;
pub const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
pub const ACCESS_REMOTE_READ: u32 = 1 << 2;
pub const ACCESS_REMOTE_ATOMIC: u32 = 1 << 3;
pub const ACCESS_MW_BIND: u32 = 1 << 4;
pub const ACCESS_ZERO_BASED: u32 = 1 << 5;
pub const ACCESS_ON_DEMAND: u32 = 1 << 6;
pub const ACCESS_HUGETLB: u32 = 1 << 7;
pub const ACCESS_RELAXED_ORDERING: u32 = 1 << 20;
/// Bits that a device may ignore when it does not know them (relaxed ordering is the first).
pub const ACCESS_OPTIONAL_RANGE: u32 = 0x3ff0_0000;

pub const QPS_RESET: u32 = 0;
pub const QPS_INIT: u32 = 1;
pub const QPS_RTR: u32 = 2;
pub const QPS_RTS: u32 = 3;
pub const QPS_SQD: u32 = 4;
pub const QPS_SQE: u32 = 5;
pub const QPS_ERR: u32 = 6;

pub const QPT_RC: u32 = 2;

pub const QP_STATE: u32 = 1;
pub const QP_CUR_STATE: u32 = 1 << 1;
pub const QP_EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
pub const QP_ACCESS_FLAGS: u32 = 1 << 3;
pub const QP_PKEY_INDEX: u32 = 1 << 4;
pub const QP_PORT: u32 = 1 << 5;
pub const QP_QKEY: u32 = 1 << 6;
pub const QP_AV: u32 = 1 << 7;
pub const QP_PATH_MTU: u32 = 1 << 8;
pub const QP_TIMEOUT: u32 = 1 << 9;
pub const QP_RETRY_CNT: u32 = 1 << 10;
pub const QP_RNR_RETRY: u32 = 1 << 11;
pub const QP_RQ_PSN: u32 = 1 << 12;
pub const QP_MAX_QP_RD_ATOMIC: u32 = 1 << 13;
pub const QP_ALT_PATH: u32 = 1 << 14;
pub const QP_MIN_RNR_TIMER: u32 = 1 << 15;
pub const QP_SQ_PSN: u32 = 1 << 16;
pub const QP_MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
pub const QP_PATH_MIG_STATE: u32 = 1 << 18;
pub const QP_DEST_QPN: u32 = 1 << 20;

pub const WR_RDMA_WRITE: u32 = 0;
pub const WR_RDMA_WRITE_WITH_IMM: u32 = 1;
pub const WR_SEND: u32 = 2;
pub const WR_SEND_WITH_IMM: u32 = 3;
pub const WR_RDMA_READ: u32 = 4;
pub const WR_ATOMIC_CMP_AND_SWP: u32 = 5;
pub const WR_ATOMIC_FETCH_AND_ADD: u32 = 6;

pub const SEND_FENCE: u32 = 1;
pub const SEND_SIGNALED: u32 = 1 << 1;
pub const SEND_SOLICITED: u32 = 1 << 2;
pub const SEND_INLINE: u32 = 1 << 3;

pub const WC_SUCCESS: u32 = 0;
pub const WC_LOC_LEN_ERR: u32 = 1;
pub const WC_LOC_QP_OP_ERR: u32 = 2;
pub const WC_LOC_PROT_ERR: u32 = 4;
pub const WC_WR_FLUSH_ERR: u32 = 5;
pub const WC_REM_INV_REQ_ERR: u32 = 9;
pub const WC_REM_ACCESS_ERR: u32 = 10;
pub const WC_REM_OP_ERR: u32 = 11;
pub const WC_RETRY_EXC_ERR: u32 = 12;
pub const WC_RNR_RETRY_EXC_ERR: u32 = 13;
pub const WC_GENERAL_ERR: u32 = 21;

pub const WC_SEND: u32 = 0;
pub const WC_RDMA_WRITE: u32 = 1;
pub const WC_RDMA_READ: u32 = 2;
pub const WC_COMP_SWAP: u32 = 3;
pub const WC_FETCH_ADD: u32 = 4;
pub const WC_RECV: u32 = 128;
pub const WC_RECV_RDMA_WITH_IMM: u32 = 129;

pub const WC_FLAG_GRH: u32 = 1;
pub const WC_FLAG_WITH_IMM: u32 = 1 << 1;

pub const EVENT_CQ_ERR: u32 = 0;
pub const EVENT_QP_FATAL: u32 = 1;
pub const EVENT_QP_REQ_ERR: u32 = 2;
pub const EVENT_QP_ACCESS_ERR: u32 = 3;
pub const EVENT_COMM_EST: u32 = 4;
pub const EVENT_SQ_DRAINED: u32 = 5;
pub const EVENT_PATH_MIG: u32 = 6;
pub const EVENT_PATH_MIG_ERR: u32 = 7;
pub const EVENT_DEVICE_FATAL: u32 = 8;
pub const EVENT_PORT_ACTIVE: u32 = 9;
pub const EVENT_PORT_ERR: u32 = 10;
pub const EVENT_SRQ_ERR: u32 = 14;
pub const EVENT_SRQ_LIMIT_REACHED: u32 = 15;
pub const EVENT_QP_LAST_WQE_REACHED: u32 = 16;
pub const EVENT_GID_CHANGE: u32 = 18;
pub const EVENT_WQ_FATAL: u32 = 19;

pub const PORT_DOWN: u32 = 1;
pub const PORT_ACTIVE: u32 = 4;
pub const LINK_INFINIBAND: u32 = 1;
pub const LINK_ETHERNET: u32 = 2;

pub const GID_TYPE_IB: u32 = 0;
pub const GID_TYPE_ROCE_V1: u32 = 1;
pub const GID_TYPE_ROCE_V2: u32 = 2;

pub const SRQ_MAX_WR: u32 = 1;
pub const SRQ_LIMIT: u32 = 2;
