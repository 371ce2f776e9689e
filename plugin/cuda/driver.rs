//! The driver calls that the plugin uses, looked up in the library that the process has loaded.
//!
//! cudarc gives types and constants; its functions are not called, because they panic where the driver or a symbol is
//! missing. Result codes stay integers: a newer driver may return values that an enum does not have.

use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute};
use std::ffi::{c_uint, c_void};
use std::ptr::NonNull;

type PointerGetAttribute = unsafe extern "C" fn(*mut c_void, c_uint, u64) -> c_uint;

/// The CUDA driver of this process.
#[derive(Debug)]
pub struct Driver {
    pointer_get_attribute: PointerGetAttribute,
}

/// What kind of memory an address belongs to, as the driver tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Host memory that the driver knows.
    Host,
    /// Device memory.
    Device,
    /// Anything else: memory the driver does not know, or a kind this version has no name for.
    Unknown,
}

impl Driver {
    /// The driver, if the process has loaded it already. Never loads it: a plugin does not decide that.
    pub fn loaded() -> Option<Self> {
        // SAFETY: a NUL-terminated name; NOLOAD only looks, and the reference taken keeps the driver, which is never
        // unloaded anyway.
        let library = NonNull::new(unsafe {
            libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD)
        })?;
        // SAFETY: the handle is open and the name NUL-terminated.
        let symbol = unsafe { libc::dlsym(library.as_ptr(), c"cuPointerGetAttribute".as_ptr()) };
        NonNull::new(symbol).map(|symbol| Self {
            // SAFETY: the driver's function of this name has had this signature since CUDA 4.0.
            pointer_get_attribute: unsafe {
                std::mem::transmute::<NonNull<c_void>, PointerGetAttribute>(symbol)
            },
        })
    }

    /// What kind of memory `addr` is.
    pub fn kind(&self, addr: u64) -> MemoryKind {
        const SUCCESS: c_uint = 0;
        let mut kind: c_uint = 0;
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as c_uint;
        // SAFETY: the out-pointer has the size of this attribute; the address is only looked up.
        let rc = unsafe { (self.pointer_get_attribute)((&raw mut kind).cast(), attribute, addr) };
        match kind {
            _ if rc != SUCCESS => MemoryKind::Unknown,
            k if k == CUmemorytype::CU_MEMORYTYPE_HOST as c_uint => MemoryKind::Host,
            k if k == CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint => MemoryKind::Device,
            _ => MemoryKind::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_driver_is_no_error() {
        // Nothing in this test process loads the driver.
        assert!(Driver::loaded().is_none());
    }
}
