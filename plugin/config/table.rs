//! The settings table: every variable that has an effect, declared once.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use super::Given;
use super::address::{AddrRange, Family};
use super::choice::{
    FlushMethod, FlushPolicy, ForkCollateral, ForkPolicy, LogLevel, ProfilerPolicy, RegFallback,
    RelaxedOrdering,
};
use super::folder::Folder;
use super::gid_index::GidIndex;
use super::hca::HcaFilter;
use super::ifname::IfnameFilter;
use super::row::{Row, settings};
use super::value::{Form, Reading, Refused, Unit, Value};

/// A plain number in a closed range.
const fn number(min: i64, max: i64) -> Form {
    Form::Number { min, max, unit: Unit::None }
}

/// A counted number in a closed range.
const fn counted(min: i64, max: i64, unit: Unit) -> Form {
    Form::Number { min, max, unit }
}

/// A number in a closed range, or the special number that means "not set".
const fn number_or(special: i64, meaning: &'static str, min: i64, max: i64) -> Form {
    Form::NumberOr { special, meaning, stands_for: None, min, max, unit: Unit::None }
}

settings! {
    /// 1 turns InfiniBand and RoCE off, and with them pinrail: NCCL goes on to its next network.
    /// Has no effect where `NCCL_NET=pinrail` asks for the plugin by name.
    ib_disable: bool = "NCCL_IB_DISABLE", Form::Flag, default "0";

    /// The network NCCL was told to use. Read only to know whether pinrail was asked for by name.
    net_name: Option<String> = "NCCL_NET", Form::Text("a network name"), default "";

    /// Which devices and ports are used. An optional `^` excludes instead of selecting, then an
    /// optional `=` asks for exact names instead of prefixes, then a comma list of
    /// `hca[:port[:rail[:plane]]]`.
    hca: HcaFilter = "NCCL_IB_HCA",
        Form::Text("[^][=]hca[:port[:rail[:plane]]],…"), default "";

    /// The verbs library to load. When not set, `libibverbs.so.1` is loaded.
    verbs_lib: Option<PathBuf> = "NCCL_IBVERBS_LIB",
        Form::Text("a path or library name"), default "";

    /// How long the device waits for an acknowledgement: 4.096 µs × 2^value, up to four times that
    /// on some devices; 0 waits for ever. A dead peer is noticed after about this time, once
    /// for each retry and once more.
    timeout: u8 = "NCCL_IB_TIMEOUT", number(0, 31), default "20";

    /// How often the device sends again before a connection fails.
    retry_cnt: u8 = "NCCL_IB_RETRY_CNT", number(0, 7), default "7";

    /// The GID table entry of RoCE ports; -1 chooses it from the table for each device and
    /// connection, which is what works where tables differ between devices. A list `device:index,…`
    /// fixes single devices and leaves the others to the choice; stock knows one number only.
    gid_index: GidIndex = "NCCL_IB_GID_INDEX",
        Form::Text("a number from 0 to 255, -1 for automatic, or device:index,…"), default "-1";

    /// On InfiniBand ports, the GID table entry that is used if it carries a routable identifier
    /// (FLID).
    flid_gid_index: u32 = "NCCL_IB_ROUTABLE_FLID_GID_INDEX", number(0, 255), default "1";

    /// The address family that the automatic GID choice prefers. Where a table holds no usable
    /// entry of it, the other family is used and the log says so.
    addr_family: Family = "NCCL_IB_ADDR_FAMILY", Form::Words(Family::WORDS), default "AF_INET";

    /// The subnet the automatic GID choice is confined to.
    addr_range: Option<AddrRange> = "NCCL_IB_ADDR_RANGE",
        Form::Text("address/bits of the family of NCCL_IB_ADDR_FAMILY"), default "";

    /// The RoCE version that the automatic GID choice prefers.
    roce_version: u8 = "NCCL_IB_ROCE_VERSION_NUM", number(1, 2), default "2";

    /// Service level. When not set, the communicator's traffic class, or else 0.
    sl: Option<u8> = "NCCL_IB_SL", number_or(-1, "not set", 0, 15), default "-1";

    /// Traffic class (RoCE). When not set, the communicator's traffic class, or else 0.
    tc: Option<u8> = "NCCL_IB_TC", number_or(-1, "not set", 0, 255), default "-1";

    /// Traffic class of the credits, which a receiver writes to its sender (RoCE). When not set,
    /// that of the data.
    fifo_tc: Option<u8> = "NCCL_IB_FIFO_TC", number_or(-1, "not set", 0, 255), default "-1";

    /// Partition key, by its index in the port's table.
    pkey_index: u16 = "NCCL_IB_PKEY", number(0, 65535), default "0";

    /// Partition key, by value. When set it wins over the index; a port whose table does not hold
    /// the value is left out, with a warning that names both.
    pkey_value: Option<u16> = "NCCL_IB_PKEY_VALUE",
        number_or(-1, "not set", 0, 65535), default "-1";

    /// Credits are written inline where the device grants enough inline room. Stock defaults to 0;
    /// here the default is 1, because an inline credit saves the device a read of host memory and a
    /// device that cannot is noticed when the queue pair is created.
    use_inline: bool = "NCCL_IB_USE_INLINE", Form::Flag, default "1", stock "0";

    /// Vendor options (ECE) are negotiated when a connection is made.
    ece_enable: bool = "NCCL_IB_ECE_ENABLE", Form::Flag, default "1";

    /// Queue pairs per connection and member device. When not set: as many as links where either end has a port over a
    /// bond of several (at most 4), because one queue pair stays on one link.
    qps_per_connection: u32 = "NCCL_IB_QPS_PER_CONNECTION", number(1, 128), default "1";

    /// 1 splits each message over all queue pairs; 0 sends each message on one per member, in turn.
    split_data_on_qps: bool = "NCCL_IB_SPLIT_DATA_ON_QPS", Form::Flag, default "0";

    /// With adaptive routing, messages above this size are written without notice and a separate
    /// notification follows, so that the network may reorder the data.
    ar_threshold: usize = "NCCL_IB_AR_THRESHOLD",
        Form::NumberOr {
            special: -2,
            meaning: "8192",
            stands_for: Some(8192),
            min: 0,
            max: i64::MAX,
            unit: Unit::Bytes,
        },
        default "8192";

    /// Whether the network routes adaptively. When not set: yes on InfiniBand, no on RoCE.
    adaptive_routing: Option<bool> = "NCCL_IB_ADAPTIVE_ROUTING",
        number_or(-2, "by link layer", 0, 1), default "-2";

    /// Relaxed PCI ordering for bulk memory, never for credits, flags or flush words. 0 never, 1
    /// always and an error where the library cannot, 2 where the library can. Stock treats 1 like
    /// 2.
    relaxed_ordering: RelaxedOrdering = "NCCL_IB_PCI_RELAXED_ORDERING", number(0, 2), default "2";

    /// Virtual functions of one bus are reported as one PCI device.
    merge_vfs: bool = "NCCL_IB_MERGE_VFS", Form::Flag, default "1";

    /// NCCL may fuse several devices into one virtual device.
    merge_nics: bool = "NCCL_IB_MERGE_NICS", Form::Flag, default "1";

    /// Devices are reported in PCI order, which makes their numbers agree between equal hosts; 0
    /// keeps the order of the verbs library.
    device_pci_order: bool = "NCCL_IB_DEVICE_PCI_ORDER", Form::Flag, default "1";

    /// A fatal asynchronous event of the device fails the connections concerned; 0 only logs it.
    return_async_events: bool = "NCCL_IB_RETURN_ASYNC_EVENTS", Form::Flag, default "1";

    /// The speed of a port is asked for directly where the verbs library can; 0 multiplies lane
    /// speed and width.
    query_port_speed: bool = "NCCL_IB_QUERY_PORT_SPEED", Form::Flag, default "1";

    /// 1 leaves the flush after a receive into GPU memory out.
    gdr_flush_disable: bool = "NCCL_GDR_FLUSH_DISABLE", Form::Flag, default "0";

    /// 1 makes NCCL ask for a flush also on GPUs that need none, Hopper and later. NCCL reads it itself; pinrail says it of
    /// its devices too, unless it is told not to flush.
    force_flush: bool = "NCCL_NET_FORCE_FLUSH", Form::Flag, default "0";

    /// 1 tries every failed change of a queue pair's state again; 0 only those that timed out.
    mqp_retry_all: bool = "NCCL_IB_MQP_RETRY_ALL", Form::Flag, default "0";

    /// How often a failed change of a queue pair's state is tried again.
    mqp_retry_cnt: u32 = "NCCL_IB_MQP_RETRY_CNT", number(0, 10_000), default "34";

    /// Pause before the first of these attempts; the n-th waits n times as long. The caller never
    /// sleeps: the pause passes between polls.
    mqp_retry_sleep: Duration = "NCCL_IB_MQP_RETRY_SLEEP_MSEC",
        counted(0, 60_000, Unit::Milliseconds), default "100";

    /// 1 replaces the device that NCCL chose where one of its RoCE ports shares no subnet with the peer, by the first one
    /// whose ports all do. Fused devices also have their ports put in an order in which queue pairs stay in one subnet.
    subnet_aware_routing: bool = "NCCL_IB_SUBNET_AWARE_ROUTING", Form::Flag, default "0";

    /// How much of an IPv4 address names its subnet in that choice; of an IPv6 address it is the first half.
    subnet_prefix_len: u32 = "NCCL_IB_SUBNET_PREFIX_LEN", counted(1, 32, Unit::Bits), default "24";

    /// 1 warns of connections whose two ends do not use the same devices by number.
    warn_rail_local: bool = "NCCL_IB_WARN_RAIL_LOCAL", Form::Flag, default "0";

    /// 1 lets a connection with several rails go on over the others when one fails: what was under way is sent again,
    /// and every message arrives once. Both ends must ask for it.
    port_failover: bool = "NCCL_IB_RESILIENCY_PORT_FAILOVER", Form::Flag, default "0";

    /// 1 takes a rail that failed into use again when its path is well: with new queue pairs, made and tried in the
    /// background. Needs `NCCL_IB_RESILIENCY_PORT_FAILOVER=1`, and both ends must ask for both.
    port_recovery: bool = "NCCL_IB_RESILIENCY_PORT_RECOVERY", Form::Flag, default "0";

    /// How long after a rail failed the first attempt to bring it back begins; the pause is twice as long after each
    /// attempt that failed, up to 30 s.
    recovery_start_delay: Duration = "NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY",
        counted(0, 600_000, Unit::Milliseconds), default "200";

    /// How long the device waits for an acknowledgement of what tries the path before it sends that again; taken as the
    /// next shorter 4.096 µs × 2^n.
    recovery_interval: Duration = "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL",
        counted(1, 60_000, Unit::Milliseconds), default "500";

    /// How many messages must be acknowledged for the path to be well.
    recovery_sequence: u32 = "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE",
        number(1, 10), default "5";

    /// How long that may take.
    recovery_alive_timeout: Duration = "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT",
        counted(1, 600_000, Unit::Milliseconds), default "4000";

    /// How long the other end may take to answer a step of an attempt.
    recovery_ack_timeout: Duration = "NCCL_IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT",
        counted(1, 600_000, Unit::Milliseconds), default "5000";

    /// Attempts in a row that may fail before a rail stays unused; an event that its port is up begins anew. A rail that
    /// fails again within a minute of its return counts as one.
    recovery_attempts: u32 = "NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX",
        number(1, 1_000_000), default "5";

    /// Interfaces that may carry the TCP side channel. An optional `^` excludes, an optional `=`
    /// asks for exact names, then a comma list of name prefixes. When not set: `ib*`, then the
    /// subnet of `NCCL_COMM_ID`, then anything but docker, lo and virbr, then those.
    socket_ifname: IfnameFilter = "NCCL_SOCKET_IFNAME", Form::Text("[^][=]prefix,…"), default "";

    /// Address family of the TCP side channel. When not set, any.
    socket_family: Option<Family> = "NCCL_SOCKET_FAMILY", Form::Words(Family::WORDS), default "";

    /// How often a refused or timed-out TCP connection is tried again.
    socket_retry_cnt: u32 = "NCCL_SOCKET_RETRY_CNT", number(0, 10_000), default "34";

    /// Pause before the first of these attempts; the n-th waits n times as long, between polls.
    socket_retry_sleep: Duration = "NCCL_SOCKET_RETRY_SLEEP_MSEC",
        counted(0, 60_000, Unit::Milliseconds), default "100";

    /// Address of the communicator's root. Read only to prefer an interface of the same subnet for
    /// the side channel; a host name gives no such hint.
    comm_id: Option<String> = "NCCL_COMM_ID", Form::Text("address:port"), default "";

    /// How long making a connection may take on either side, all stages together, before it fails
    /// with an error that names the peer and the stage.
    connect_timeout: Duration = "PINRAIL_CONNECT_TIMEOUT",
        counted(1, 86_400, Unit::Seconds), default "60";

    /// How long a sending end may wait for the first receive of the other, from its first send on, before the connection fails
    /// with an error that names the peer. 0: for as long as the peer lives. NCCL may begin to send long before the other
    /// rank receives, so that only somebody who knows the job can say what is too long.
    first_credit_timeout: Duration = "PINRAIL_FIRST_CREDIT_TIMEOUT",
        counted(0, 86_400, Unit::Seconds), default "0";

    /// With failover, how long the other end may take to tell what it has received over a rail that failed, before the
    /// connection fails. It answers over the side channel, which may be slow where that shares the cable.
    failover_timeout: Duration = "PINRAIL_FAILOVER_TIMEOUT",
        counted(1, 86_400, Unit::Seconds), default "30";

    /// When a receive into GPU memory is followed by a flush: `auto` where it is needed, `always`
    /// for every flush NCCL asks for, `never`.
    flush: FlushPolicy = "PINRAIL_FLUSH", Form::Words(FlushPolicy::WORDS), default "auto";

    /// What such a flush is: `read`, a read over each device that carried data, or `cuda`,
    /// `cuFlushGPUDirectRDMAWrites` where the GPU offers it and is that of NCCL's thread, else a read. The driver's needs no
    /// device and makes NCCL's thread wait in the driver.
    flush_method: FlushMethod = "PINRAIL_FLUSH_METHOD", Form::Words(FlushMethod::WORDS), default "read";

    /// What happens with host memory that cannot be pinned where it lies: `bounce` copies through
    /// memory that was pinned first, `fail` fails the registration.
    reg_fallback: RegFallback = "PINRAIL_REG_FALLBACK",
        Form::Words(RegFallback::WORDS), default "bounce";

    /// The most memory that copies for such buffers may use in this process: about the size of the
    /// buffers that are received into. Up to 256 MiB of it are set aside when the plugin starts where
    /// the machine shows the risk; the rest is taken when it is needed.
    bounce_bytes: usize = "PINRAIL_BOUNCE_BYTES",
        counted(1 << 20, 1 << 40, Unit::Bytes), default "4294967296";

    /// Whether the verbs library is asked to keep registered pages from forked children (`ibv_fork_init`) before
    /// anything else: `auto` unless it says that this kernel makes it unnecessary, `arm`, or `never`. Without either a
    /// device's write can change what a child sees. [fork.md](fork.md) says what to choose.
    fork: ForkPolicy = "PINRAIL_FORK", Form::Words(ForkPolicy::WORDS), default "auto";

    /// What happens with host memory that shares its pages with other data, where registering it takes those pages from
    /// forked children: `bounce` copies through memory that owns its pages, `register` registers it all the same.
    /// Copies need `PINRAIL_REG_FALLBACK=bounce`.
    fork_collateral: ForkCollateral = "PINRAIL_FORK_COLLATERAL",
        Form::Words(ForkCollateral::WORDS), default "bounce";

    /// 1 forks a child that looks whether it has all memory of its parent but the plugin's: after the first
    /// registration, before the first connection closes, and after the last close. The log tells what is missing. Takes
    /// up to a few seconds each time.
    fork_check: bool = "PINRAIL_FORK_CHECK", Form::Flag, default "0";

    /// Whether NCCL's profiler is told of transfers, one event for each queue pair that a message uses. NCCL never says
    /// whether it has a profiler, only an event's answer does: `auto` asks with each transfer, and with one in 32 when
    /// 256 events in a row were not answered; `on` asks with each; `off` with none.
    profiler: ProfilerPolicy = "PINRAIL_PROFILER", Form::Words(ProfilerPolicy::WORDS), default "auto";

    /// The least important message that pinrail hands to NCCL's logger. When not set, NCCL's own
    /// level (`NCCL_DEBUG`) decides.
    log: Option<LogLevel> = "PINRAIL_LOG", Form::Words(LogLevel::WORDS), default "";

    /// A folder that gets one JSON file for each registration that failed, with everything the
    /// verdict rests on; for each connection that failed; and the status of all connections then.
    /// When not set, only the log tells.
    report_dir: Option<PathBuf> = "PINRAIL_REPORT_DIR", Form::Text("a folder"), default "";

    /// Where a process with registrations keeps the list of them that `pinrail forks` reads: a file
    /// `pinrail.<pid>`, about 64 KiB, which only its user can read and which goes with the last
    /// registration. `off` keeps none.
    inventory: Folder = "PINRAIL_INVENTORY",
        Form::Text("a folder (absolute path), or off"), default "/dev/shm";

    /// Whether a process with connections shows what they do to `pinrail status`: in a memory file that only its user can
    /// read, of 4 KiB for each end of a connection, which goes with the last of them. 0 keeps no
    /// file.
    status: bool = "PINRAIL_STATUS", Form::Flag, default "1";

    /// 1 lets the signal SIGUSR2 write the status of all connections into `PINRAIL_REPORT_DIR`, within a second. Only where
    /// the program has no handler of its own for it when the first connection is made. The library then stays loaded
    /// until the process ends: a handler may be at work at any time.
    status_signal: bool = "PINRAIL_STATUS_SIGNAL", Form::Flag, default "0";

    /// Another root for the sysfs files the plugin reads, in place of `/sys`. For tests on hosts
    /// built from files: the PCI function of each device (`class/infiniband/*/device`), kind and
    /// interface of each GID (`class/infiniband/*/ports/*/gid_attrs`), the interfaces that are here
    /// (`class/net`), modules for GPU memory, and where memory lies. What is not there is not known;
    /// devices, ports and GIDs themselves come from the verbs library.
    sysfs_root: Option<PathBuf> = "PINRAIL_SYSFS", Form::Text("a folder"), default "";

    /// Another root for the procfs files the plugin reads about machine and process, in place of
    /// `/proc`. For tests on hosts built from files.
    proc_root: Option<PathBuf> = "PINRAIL_PROC", Form::Text("a folder"), default "";
}
