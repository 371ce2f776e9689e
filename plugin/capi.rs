//! The C functions for programs, beside the tables for NCCL. `include/pinrail.h` is generated from this file.

use std::ffi::c_char;

/// The plugin's version as a NUL-terminated string, such as "0.1.0". Static: never freed. Callable from any thread, at
/// any time.
#[unsafe(no_mangle)]
pub extern "C" fn pinrail_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Panics inside the boundary, so that a test can prove that a panic becomes ncclInternalError (3).
///
/// cbindgen:ignore
#[cfg(feature = "provoke-panic")]
#[unsafe(no_mangle)]
pub extern "C" fn pinrail_provoke_panic() -> std::ffi::c_int {
    crate::abi::boundary::enter("pinrail_provoke_panic", || panic!("provoked"))
}
