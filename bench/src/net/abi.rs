//! The C side of `ncclNet` v6 … v12, declared from NCCL's headers and not from the plugin's own declarations: a mistake
//! shared by both sides of the interface would cancel out and be seen by nobody.

use std::ffi::{c_char, c_float, c_int, c_void};
use std::mem::{offset_of, size_of};

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
pub const VERSIONS: [u8; 7] = [12, 11, 10, 9, 8, 7, 6];

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

/// `ncclNetProperties_v6`.
#[repr(C)]
#[derive(Debug)]
pub struct PropertiesV6 {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: c_float,
    pub max_comms: c_int,
    pub max_recvs: c_int,
}

/// `ncclNetProperties_v7`.
#[repr(C)]
#[derive(Debug)]
pub struct PropertiesV7 {
    pub base: PropertiesV6,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
}

/// `ncclNetProperties_v8`.
#[repr(C)]
#[derive(Debug)]
pub struct PropertiesV8 {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: c_float,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
}

/// The common head of `ncclNetProperties_v9` … `v12`. What follows differs, and the bench does not read it.
#[repr(C)]
#[derive(Debug)]
pub struct PropertiesV9 {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: c_float,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
}

/// Room for any version's properties: larger than the largest (v12, 128 bytes), so that a plugin that writes too much is
/// caught by the bytes behind the struct.
#[repr(C, align(8))]
#[derive(Debug)]
pub struct PropertiesRoom {
    pub bytes: [u8; 256],
}

/// Bytes of `ncclNetProperties_vN`.
pub const fn properties_size(version: u8) -> usize {
    match version {
        6 => 48,
        7 => 56,
        8 => 64,
        9 | 10 => 104,
        11 => 112,
        _ => 128,
    }
}

const _: () = {
    assert!(size_of::<PropertiesV6>() == 48 && offset_of!(PropertiesV6, max_recvs) == 44);
    assert!(size_of::<PropertiesV7>() == 56 && offset_of!(PropertiesV7, net_device_type) == 48);
    assert!(size_of::<PropertiesV8>() == 64 && offset_of!(PropertiesV8, speed) == 32);
    assert!(offset_of!(PropertiesV9, speed) == 36 && offset_of!(PropertiesV9, max_recvs) == 52);
    assert!(size_of::<CommConfig>() == 4);
};

/// Index of each function in the table: its byte offset divided by the pointer size.
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
}

/// `init`, by the version that introduced the signature.
#[derive(Debug, Clone, Copy)]
pub enum Init {
    /// v6 … v9.
    V6(unsafe extern "C" fn(super::log::Logger) -> Code),
    /// v10.
    V10(unsafe extern "C" fn(super::log::Logger, Ptr) -> Code),
    /// v11, v12.
    V11(unsafe extern "C" fn(*mut Ptr, u64, *const CommConfig, super::log::Logger, Ptr) -> Code),
}

/// `listen`.
#[derive(Debug, Clone, Copy)]
pub enum Listen {
    /// v6 … v10.
    V6(unsafe extern "C" fn(c_int, Ptr, *mut Ptr) -> Code),
    /// v11, v12.
    V11(unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr) -> Code),
}

/// `connect`. The last pointer is a device handle, which host networks leave alone.
#[derive(Debug, Clone, Copy)]
pub enum Connect {
    /// v6.
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
    /// v6.
    V6(unsafe extern "C" fn(Ptr, *mut Ptr) -> Code),
    /// v7 … v12.
    V7(unsafe extern "C" fn(Ptr, *mut Ptr, *mut Ptr) -> Code),
}

/// `regMr`.
#[derive(Debug, Clone, Copy)]
pub enum RegMr {
    /// v6, v7: the size is an int.
    V6(unsafe extern "C" fn(Ptr, Ptr, c_int, c_int, *mut Ptr) -> Code),
    /// v8 … v12.
    V8(unsafe extern "C" fn(Ptr, Ptr, usize, c_int, *mut Ptr) -> Code),
}

/// `isend`.
#[derive(Debug, Clone, Copy)]
pub enum Isend {
    /// v6 … v8: the size is an int.
    V6(unsafe extern "C" fn(Ptr, Ptr, c_int, c_int, Ptr, *mut Ptr) -> Code),
    /// v9.
    V9(unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, *mut Ptr) -> Code),
    /// v10 … v12: a profiler handle comes before the request.
    V10(unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, Ptr, *mut Ptr) -> Code),
}

/// `irecv`.
#[derive(Debug, Clone, Copy)]
pub enum Irecv {
    /// v6 … v8: sizes are ints.
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
