//! The C side of `ncclNet` v5 … v12, declared from NCCL's headers and not from the plugin's own declarations: a mistake
//! shared by both sides of the interface would cancel out and be seen by nobody.

use std::ffi::{c_int, c_void};

/// Opaque pointers of the C interface: comms, registrations, requests, contexts.
pub type Ptr = *mut c_void;

/// `ncclResult_t`, as the integer it is at the boundary.
pub type Code = c_int;

/// Bytes of the connection handle that NCCL carries from listener to connector.
pub const HANDLE_BYTES: usize = 128;

/// Entries of the size array NCCL gives to `test`.
pub const TEST_SIZES: usize = 64;

/// Host memory, as `regMr`'s type.
pub const PTR_HOST: c_int = 1;

/// The versions this client speaks, newest first: the order in which NCCL looks.
pub const VERSIONS: [u8; 8] = [12, 11, 10, 9, 8, 7, 6, 5];

/// Name of an `ncclResult_t`.
pub fn code_name(code: Code) -> &'static str {
    match code {
        0 => "ncclSuccess",
        1 => "ncclUnhandledCudaError",
        2 => "ncclSystemError",
        3 => "ncclInternalError",
        4 => "ncclInvalidArgument",
        5 => "ncclInvalidUsage",
        6 => "ncclRemoteError",
        7 => "ncclInProgress",
        8 => "ncclTimeout",
        _ => "unknown result",
    }
}

/// `ncclNetCommConfig_v10` and later.
#[repr(C)]
#[derive(Debug)]
pub struct CommConfig {
    /// −1: undefined.
    pub traffic_class: c_int,
}

/// `ncclNetAttr_v11` and later: what NCCL is about to use the network for.
#[repr(C)]
#[derive(Debug)]
pub struct NetAttr {
    /// Most and fewest peers at once, most and fewest flows for each: of sends, then of receives.
    pub comms: [[i32; 4]; 2],
    /// Bit masks: operations, algorithms, protocols.
    pub masks: [u32; 3],
}

const _: () = assert!(size_of::<CommConfig>() == 4 && size_of::<NetAttr>() == 44);

/// Index of each function in the table: its byte offset divided by the pointer size. v5 lacks `regMrDmaBuf`, so that
/// everything behind it lies one slot earlier there.
pub mod slot {
    #![allow(missing_docs)]
    pub const NAME: usize = 0;
    pub const INIT: usize = 1;
    pub const DEVICES: usize = 2;
    pub const GET_PROPERTIES: usize = 3;
    pub const LISTEN: usize = 4;
    pub const CONNECT: usize = 5;
    pub const ACCEPT: usize = 6;
    pub const REG_MR: usize = 7;
    /// Not in v5.
    pub const REG_MR_DMA_BUF: usize = 8;
    pub const DEREG_MR: usize = 9;
    pub const ISEND: usize = 10;
    pub const IRECV: usize = 11;
    pub const IFLUSH: usize = 12;
    pub const TEST: usize = 13;
    pub const CLOSE_SEND: usize = 14;
    pub const CLOSE_RECV: usize = 15;
    pub const CLOSE_LISTEN: usize = 16;
    /// v11 and v12 only.
    pub const FINALIZE: usize = 20;
    /// v11 and v12 only; may be NULL.
    pub const SET_NET_ATTR: usize = 21;
}

/// Signatures that all versions share.
pub mod common {
    #![allow(missing_docs)]
    use super::{Code, Ptr};
    use std::ffi::c_int;

    pub type Devices = unsafe extern "C" fn(*mut c_int) -> Code;
    pub type GetProperties = unsafe extern "C" fn(c_int, Ptr) -> Code;
    pub type DeregMr = unsafe extern "C" fn(Ptr, Ptr) -> Code;
    pub type Iflush =
        unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut Ptr, *mut Ptr) -> Code;
    pub type Test = unsafe extern "C" fn(Ptr, *mut c_int, *mut c_int) -> Code;
    pub type Close = unsafe extern "C" fn(Ptr) -> Code;
    pub type SetNetAttr = unsafe extern "C" fn(Ptr, *mut super::NetAttr) -> Code;
}

/// `init`, by the version that introduced the signature.
#[derive(Debug, Clone, Copy)]
pub enum Init {
    /// v5 … v9.
    V6(unsafe extern "C" fn(super::log::Logger) -> Code),
    /// v10.
    V10(unsafe extern "C" fn(super::log::Logger, Ptr) -> Code),
    /// v11, v12.
    V11(unsafe extern "C" fn(*mut Ptr, u64, *const CommConfig, super::log::Logger, Ptr) -> Code),
}

/// `listen`.
#[derive(Debug, Clone, Copy)]
pub enum Listen {
    /// v5 … v10.
    V6(unsafe extern "C" fn(c_int, Ptr, *mut Ptr) -> Code),
    /// v11, v12.
    V11(unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr) -> Code),
}

/// `connect`. The last pointer is a device handle, which host networks leave alone.
#[derive(Debug, Clone, Copy)]
pub enum Connect {
    /// v5, v6.
    V6(unsafe extern "C" fn(c_int, Ptr, *mut Ptr) -> Code),
    /// v7 … v9.
    V7(unsafe extern "C" fn(c_int, Ptr, *mut Ptr, *mut Ptr) -> Code),
    /// v10.
    V10(unsafe extern "C" fn(c_int, *const CommConfig, Ptr, *mut Ptr, *mut Ptr) -> Code),
    /// v11, v12.
    V11(unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr, *mut Ptr) -> Code),
}

/// `accept`.
#[derive(Debug, Clone, Copy)]
pub enum Accept {
    /// v5, v6.
    V6(unsafe extern "C" fn(Ptr, *mut Ptr) -> Code),
    /// v7 … v12.
    V7(unsafe extern "C" fn(Ptr, *mut Ptr, *mut Ptr) -> Code),
}

/// `regMr`.
#[derive(Debug, Clone, Copy)]
pub enum RegMr {
    /// v5 … v7: the size is an int.
    V6(unsafe extern "C" fn(Ptr, Ptr, c_int, c_int, *mut Ptr) -> Code),
    /// v8 … v12.
    V8(unsafe extern "C" fn(Ptr, Ptr, usize, c_int, *mut Ptr) -> Code),
}

/// `isend`.
#[derive(Debug, Clone, Copy)]
pub enum Isend {
    /// v5 … v8: the size is an int.
    V6(unsafe extern "C" fn(Ptr, Ptr, c_int, c_int, Ptr, *mut Ptr) -> Code),
    /// v9.
    V9(unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, *mut Ptr) -> Code),
    /// v10 … v12: a profiler handle comes before the request.
    V10(unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, Ptr, *mut Ptr) -> Code),
}

/// `irecv`.
#[derive(Debug, Clone, Copy)]
pub enum Irecv {
    /// v5 … v8: sizes are ints.
    V6(
        unsafe extern "C" fn(
            Ptr,
            c_int,
            *mut Ptr,
            *mut c_int,
            *mut c_int,
            *mut Ptr,
            *mut Ptr,
        ) -> Code,
    ),
    /// v9.
    V9(
        unsafe extern "C" fn(
            Ptr,
            c_int,
            *mut Ptr,
            *mut usize,
            *mut c_int,
            *mut Ptr,
            *mut Ptr,
        ) -> Code,
    ),
    /// v10 … v12: profiler handles come before the request.
    V10(
        unsafe extern "C" fn(
            Ptr,
            c_int,
            *mut Ptr,
            *mut usize,
            *mut c_int,
            *mut Ptr,
            *mut Ptr,
            *mut Ptr,
        ) -> Code,
    ),
}
