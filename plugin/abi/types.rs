//! Constants and types that all versions share.

use std::ffi::{CStr, c_char, c_int, c_ulong};

/// `ncclResult_t`, an integer at the edge.
pub type NcclResult = c_int;

/// `ncclSuccess`.
pub const SUCCESS: NcclResult = 0;
/// `ncclSystemError`: this host failed.
pub const SYSTEM_ERROR: NcclResult = 2;
/// `ncclInternalError`: the plugin or its use by NCCL is broken.
pub const INTERNAL_ERROR: NcclResult = 3;
/// `ncclInvalidArgument`: an argument of this call.
pub const INVALID_ARGUMENT: NcclResult = 4;
/// `ncclInvalidUsage`: settings, or a call that the object's state does not allow.
pub const INVALID_USAGE: NcclResult = 5;
/// `ncclRemoteError`: the peer or the path to it.
pub const REMOTE_ERROR: NcclResult = 6;

/// Pointer kinds.
pub const PTR_HOST: c_int = 1;
/// Device memory by address.
pub const PTR_CUDA: c_int = 2;
/// Device memory by DMA-BUF.
pub const PTR_DMABUF: c_int = 4;

/// The table's name: what `NCCL_NET` selects.
pub const NAME: &CStr = c"pinrail";
/// Members of one receive that the plugin accepts.
pub const MAX_RECVS: c_int = 8;
/// The largest message: sizes are reported in an `int`.
pub const MAX_MESSAGE: usize = c_int::MAX as usize;
/// Not defined: rail, plane, traffic class.
pub const UNDEFINED: c_int = -1;
/// `NCCL_NET_DEVICE_HOST`.
pub const NET_DEVICE_HOST: c_int = 0;
/// What an irecv request pointer holds on entry when the caller accepts an early completion.
pub const OPTIONAL_COMPLETION: usize = 1;

/// `ncclDebugLogger_t`.
pub type Logger = Option<
    unsafe extern "C" fn(
        level: c_int,
        flags: c_ulong,
        file: *const c_char,
        line: c_int,
        format: *const c_char,
        ...
    ),
>;

/// `ncclProfilerCallback_t`.
pub type ProfilerCallback = Option<crate::profiler::Callback>;

/// A table with raw pointers that C reads.
#[derive(Debug)]
#[repr(transparent)]
pub struct Table<T>(pub T);

// SAFETY: tables are immutable and their pointers lead to functions and static strings.
unsafe impl<T> Sync for Table<T> {}

/// A device's properties, from which every version fills its struct.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "named as in the ABI")]
pub struct Properties {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    /// Members of a fused device; a plain device names itself.
    pub members: Vec<c_int>,
    pub rail_id: i16,
    pub plane_id: i16,
}
