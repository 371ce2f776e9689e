//! What only the library of mlx5 devices knows: whether a device has a Data Direct interface, a second PCI function
//! through which it reaches GPU memory.
//!
//! libibverbs loads that library for its devices; it is looked for among what is loaded, and never loaded from here.

use super::Context;
use super::sys::ibv_context;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

type Path = unsafe extern "C" fn(*mut ibv_context, *mut c_char, usize) -> c_int;

/// The longest path that is asked for.
const ROOM: usize = 512;

/// The path below /sys of a device's Data Direct interface, if it has one. To be asked of devices of the mlx5 driver only:
/// the library takes every context for one of its own.
pub fn data_direct(context: &Context) -> Option<String> {
    // SAFETY: a NUL-terminated name; NOLOAD only looks.
    let library = unsafe {
        libc::dlopen(
            c"libmlx5.so.1".as_ptr(),
            libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD,
        )
    };
    let library = NonNull::new(library)?;
    let (name, version) = (c"mlx5dv_get_data_direct_sysfs_path", c"MLX5_1.25");
    // SAFETY: an open handle and NUL-terminated strings.
    let symbol = unsafe { libc::dlvsym(library.as_ptr(), name.as_ptr(), version.as_ptr()) };
    let path = NonNull::new(symbol).and_then(|symbol| {
        // SAFETY: the function with this version has this signature.
        let get = unsafe { std::mem::transmute::<NonNull<c_void>, Path>(symbol) };
        let mut text: [c_char; ROOM] = [0; ROOM];
        // SAFETY: an open context, and one byte more than is said, so that the text ends in NUL whatever is written.
        let rc = unsafe { get(context.raw(), text.as_mut_ptr(), ROOM - 1) };
        // SAFETY: the last byte is NUL.
        let path = unsafe { CStr::from_ptr(text.as_ptr()) };
        (rc == 0).then(|| path.to_string_lossy().into_owned())
    });
    // SAFETY: gives back the reference taken above; whoever loaded the library has its own.
    unsafe { libc::dlclose(library.as_ptr()) };
    path
}
