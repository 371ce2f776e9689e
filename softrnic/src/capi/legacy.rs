//! Old helpers that clients still import.

use std::ffi::{c_char, c_int};

use super::set_errno;

/// `ibv_get_sysfs_path`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// `ibv_read_sysfs_file`: the devices have no sysfs files.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_read_sysfs_file(
    _dir: *const c_char,
    _file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    if !buf.is_null() && size > 0 {
        // SAFETY: the caller's buffer has `size` bytes.
        unsafe { buf.write(0) };
    }
    set_errno(libc::ENOENT);
    -1
}

/// Providers announce themselves here from their constructors; there is nothing to do with them.
#[unsafe(no_mangle)]
pub extern "C" fn verbs_register_driver_34(_ops: *const u8) {}
