//! The C functions for programs, beside the tables for NCCL. `include/pinrail.h` is generated from this file.

use crate::abi::{boundary, host_memory};
use crate::library::Library;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// The plugin's version as a NUL-terminated string, such as "0.1.0". Static: never freed. Callable from any thread, at
/// any time.
#[unsafe(no_mangle)]
pub extern "C" fn pinrail_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// For pinrail_host_alloc: huge pages from the pool that the administrator set aside (hugetlb, its default page size),
/// and where the pool has not enough of them, ordinary memory in which the kernel is asked to use huge pages
/// (transparent ones). The size is rounded up to whole pages of the pool in the first case.
pub const PINRAIL_HOST_HUGE: c_uint = 1;

/// For pinrail_host_alloc: the memory is not mapped for the GPU.
pub const PINRAIL_HOST_NO_CUDA: c_uint = 2;

/// Allocates at least `size` bytes of zeroes that every RDMA device of this host may reach, and writes the address to
/// `*out`, NULL if it fails. Each page is pinned in the order that cannot fail later: faulted in, then registered with
/// every device that pinrail uses (a long-term pin), and only then mapped for the GPU.
///
/// When the memory, or any part of it, is handed to NCCL, the registrations that were made here are used. A program and
/// NCCL must have loaded the same file for that.
///
/// size       bytes, more than 0; rounded up to whole pages. The address is the start of a page.
/// flags      0, or PINRAIL_HOST_HUGE and PINRAIL_HOST_NO_CUDA in any combination.
/// numa_node  the number of the node whose memory is preferred, or -1 for any.
/// out        where the address goes: a valid pointer.
///
/// The memory is mapped for the GPU (cuMemHostRegister, for all contexts) if the process has loaded a CUDA driver and a
/// context is current on the calling thread; else that step is left out. Without an RDMA device, or without a verbs
/// library, the memory is plain: it can be used, nothing is pinned, and nothing is mapped for the GPU.
///
/// If NCCL has not initialised the plugin, this does, with the settings of that moment: as long as any memory is
/// allocated, later changes of the environment mean nothing. Lines of the log go to NCCL's logger; before there is one,
/// warnings go to stderr.
///
/// Live memory keeps what it needs: the library stays mapped and the devices stay open, whatever NCCL finalizes and
/// whoever calls dlclose. The memory belongs to the process that allocated it: a forked child has a hole there, and both
/// functions refuse to work in a child of a process that uses the plugin.
///
/// Returns 0 or an errno value:
/// EINVAL  out is NULL, size is 0, a flag is unknown, or there is no such NUMA node with memory for this process
/// ENOMEM  there is not that much memory or address space, or it may not be pinned (`ulimit -l`)
/// EPERM   called in a forked child, or mbind is forbidden in this container and a node was asked for
/// other   a device refused the memory (the errno of its verb) or CUDA did (EIO)
/// Each failure is one warning in the log. All that was done is undone.
///
/// Callable from any thread, at any time.
#[expect(clippy::missing_safety_doc, reason = "said above, in words for the header")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinrail_host_alloc(
    size: usize,
    flags: c_uint,
    numa_node: c_int,
    out: *mut *mut c_void,
) -> c_int {
    if !out.is_null() {
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { out.write(std::ptr::null_mut()) };
    }
    let (errno, pointer) = boundary::enter_api("pinrail_host_alloc", || {
        if out.is_null() {
            return Err(crate::error::Error::argument("out is NULL"));
        }
        host_memory::alloc(size, flags, numa_node).map(Some)
    });
    if let Some(pointer) = pointer {
        // SAFETY: as above; NULL was refused.
        unsafe { out.write(pointer) };
    }
    errno
}

/// Frees memory of pinrail_host_alloc, which nobody may be using any more: no transfer is under way, and the GPU does not
/// access it. NULL is accepted and nothing happens.
///
/// The GPU's mapping ends, then the registrations, then the memory. Where a communicator still has a part of the memory
/// registered, registrations and mapping stay until it deregisters that part or is closed, so that no device reaches
/// memory that belongs to somebody else by then; for the caller the memory is gone all the same. If it was the last
/// memory, and NCCL has nothing open, devices are closed and the library may be unmapped.
///
/// Returns 0 or an errno value:
/// EINVAL  the pointer is not one that pinrail_host_alloc gave out, or it was freed before
/// EPERM   called in a forked child
/// Each failure is one warning in the log, and nothing is freed.
///
/// Callable from any thread, at any time; of two calls with the same pointer, one fails.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub extern "C" fn pinrail_host_free(pointer: *mut c_void) -> c_int {
    // The memory may have been all that kept this code mapped. So the last instruction is a jump to dlclose, which
    // returns 0 to the caller of this function, and nothing of this library runs after that.
    #[cfg(target_arch = "x86_64")]
    std::arch::naked_asm!(
        "sub rsp, 8",
        "call {free}",
        "add rsp, 8",
        "test rdx, rdx",
        "jnz 2f",
        "ret",
        "2:",
        "mov rdi, rdx",
        "jmp qword ptr [rip + {dlclose}@GOTPCREL]",
        free = sym host_free,
        dlclose = sym libc::dlclose,
    );
    #[cfg(target_arch = "aarch64")]
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "bl {free}",
        "ldp x29, x30, [sp], #16",
        "cbnz x1, 2f",
        "ret",
        "2:",
        "mov x0, x1",
        "b {dlclose}",
        free = sym host_free,
        dlclose = sym libc::dlclose,
    );
}

/// How pinrail_host_free goes on: it returns the number, or closes the library. Two registers in either ABI.
#[repr(C)]
struct Freed {
    errno: c_int,
    library: *mut c_void,
}

extern "C" fn host_free(pointer: *mut c_void) -> Freed {
    if pointer.is_null() {
        return Freed { errno: 0, library: std::ptr::null_mut() };
    }
    let (errno, library) = boundary::enter_api("pinrail_host_free", || host_memory::free(pointer));
    Freed { errno, library: library.map_or(std::ptr::null_mut(), Library::into_raw) }
}

/// Panics inside the boundary, so that a test can prove that a panic becomes ncclInternalError (3).
///
/// cbindgen:ignore
#[cfg(feature = "provoke-panic")]
#[unsafe(no_mangle)]
pub extern "C" fn pinrail_provoke_panic() -> c_int {
    boundary::enter("pinrail_provoke_panic", || panic!("provoked"))
}
