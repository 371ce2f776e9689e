//! Variables of NCCL that pinrail knows and does not act on.

use super::row::Inert;

/// A variable NCCL's core acts on, whatever the transport is.
const fn core(name: &'static str, default: &'static str, reason: &'static str) -> Inert {
    Inert { name, default, reason, core: true }
}

/// A variable of the stock transport that has no effect here.
const fn none(name: &'static str, default: &'static str, reason: &'static str) -> Inert {
    Inert { name, default, reason, core: false }
}

const FAILOVER: &str = "pinrail asks the other end over the side channel, once and at once";
const RECOVERY: &str = "the messages that try a path are as many as must be acknowledged";
const MERGE: &str = "NCCL decides which devices are fused and calls the plugin to do it";
const GDR: &str = "NCCL decides which GPUs and NICs exchange data directly";
const SHARING: &str = "NCCL decides which channels share a connection";
const TCP: &str = "concerns NCCL's TCP transport, not the side channel of a plugin";
const SIDE_CHANNEL: &str = "the side channel carries a few kilobytes per connection, as it is";
const GIN: &str = "pinrail offers no GIN table";
const LATER: &str = "an addition of NCCL 2.31 or later whose mechanism is not documented";

/// Every variable that is accepted without effect.
pub static INERT: &[Inert] = &[
    none("NCCL_IB_DATA_DIRECT", "1", "pinrail does not use Data Direct interfaces"),
    none("NCCL_IB_OOO_RQ", "0", "receives are matched in order"),
    none(
        "NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS",
        "-2",
        "pinrail decides itself when it posts receives",
    ),
    none("NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME", "-2", "pinrail's wire format has one scheme"),
    none("NCCL_IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS", "1", FAILOVER),
    none("NCCL_IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY", "10", FAILOVER),
    none("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE", "5", RECOVERY),
    none("NCCL_IB_WQE_LATENCY_REPORT", "1", LATER),
    none("NCCL_IB_WQE_LATENCY_THRESHOLD_NS", "0", LATER),
    none("NCCL_IB_EVENT_BASED_LB", "0", LATER),
    none("NCCL_IB_EVENT_BASED_LB_REMOTE", "1", LATER),
    none("NCCL_IB_RAIL_POLICY", "", LATER),
    none("NCCL_IB_SORT_MERGE_NICS", "1", LATER),
    none("NCCL_IB_VR_SOCKET_COUNT", "", LATER),
    none("NCCL_IB_VR_RAILS_PER_SOCKET", "", LATER),
    none("NCCL_RMA_IB_WR_BATCHSIZE", "64", GIN),
    none("NCCL_GIN_IB_TC", "-1", GIN),
    none("NCCL_GIN_TYPE", "-1", GIN),
    core("NCCL_NET_PLUGIN", "", "NCCL picks the plugin before the plugin runs"),
    core("NCCL_NET_PLUGIN_REF_COUNT", "0", "NCCL decides when the plugin is unloaded"),
    core("NCCL_NET_MERGE_LEVEL", "PORT", MERGE),
    core("NCCL_NET_FORCE_MERGE", "", MERGE),
    core("NCCL_NET_MERGE_POLICY", "ALL", MERGE),
    core("NCCL_NET_GDR_LEVEL", "", GDR),
    core("NCCL_NET_GDR_READ", "-2", GDR),
    core("NCCL_NET_GDR_C2C", "1", GDR),
    core("NCCL_NET_GDR_MLOPART", "0", GDR),
    core("NCCL_DMABUF_ENABLE", "1", "NCCL decides whether it hands GPU memory over as a DMA-BUF"),
    core("NCCL_NET_SHARED_BUFFERS", "-2", SHARING),
    core("NCCL_NET_SHARED_COMMS", "1", SHARING),
    core(
        "NCCL_NET_OPTIONAL_RECV_COMPLETION",
        "1",
        "NCCL decides which receives are marked; pinrail obeys the mark",
    ),
    core("NCCL_NET_OVERHEAD", "-2", "part of NCCL's performance model"),
    core("NCCL_NET_DISABLE_INTRA", "0", "NCCL decides which pairs use the network"),
    core("NCCL_IGNORE_NET_MISMATCH", "1", "NCCL compares device counts between ranks"),
    core("NCCL_OOB_NET_ENABLE", "0", "NCCL decides whether its bootstrap uses the plugin"),
    core("NCCL_OOB_NET_IFNAME", "", "NCCL decides which device its bootstrap uses"),
    none("NCCL_SOCKET_MAGIC", "", "pinrail's handshake has a magic number and version of its own"),
    none("NCCL_SOCKET_POLL_TIMEOUT_MSEC", "0", SIDE_CHANNEL),
    none("NCCL_SOCKET_RCVBUF", "-1", SIDE_CHANNEL),
    none("NCCL_SOCKET_SNDBUF", "-1", SIDE_CHANNEL),
    none("NCCL_SOCKET_NTHREADS", "-2", TCP),
    none("NCCL_NSOCKS_PERTHREAD", "-2", TCP),
    none("NCCL_SOCKET_INLINE", "128", TCP),
    none("NCCL_SOCKET_MIN_TASKSIZE", "65536", TCP),
];
