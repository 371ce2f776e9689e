//! Protection domains, memory regions, fork.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;

use super::{code, guard, pointer};
use crate::abi::*;
use crate::context::Context;
use crate::env::settings;
use crate::mr::{Mr, Registration};
use crate::pd::Pd;

/// `ibv_alloc_pd`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut IbvContext) -> *mut IbvPd {
    pointer(|| Ok(Pd::alloc(&Context::find(context).ok_or(libc::EINVAL)?)?.ptr()))
}

/// `ibv_dealloc_pd`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut IbvPd) -> c_int {
    code(|| Pd::find(pd).ok_or(libc::EINVAL)?.dealloc())
}

fn register(pd: *mut IbvPd, addr: *mut c_void, len: usize, iova: u64, access: u32) -> *mut IbvMr {
    pointer(|| {
        let pd = Pd::find(pd).ok_or(libc::EINVAL)?;
        let what = Registration { va: addr.expose_provenance() as u64, len, iova, access };
        Ok(Mr::register(&pd, &what)?.ptr())
    })
}

/// `ibv_reg_mr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut IbvPd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut IbvMr {
    register(pd, addr, len, addr as u64, access.cast_unsigned())
}

/// `ibv_reg_mr_iova`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut IbvPd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut IbvMr {
    register(pd, addr, len, iova, access.cast_unsigned())
}

/// `ibv_reg_mr_iova2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut IbvPd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut IbvMr {
    register(pd, addr, len, iova, access)
}

/// `ibv_reg_dmabuf_mr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut IbvPd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut IbvMr {
    pointer(|| {
        let pd = Pd::find(pd).ok_or(libc::EINVAL)?;
        if fd < 0 {
            return Err(libc::EBADF);
        }
        // SAFETY: the caller's descriptor is open during the call; a closed one is reported by the kernel.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let what = Registration { va: 0, len, iova, access: access.cast_unsigned() };
        Ok(Mr::register_fd(&pd, fd, offset, what)?.ptr())
    })
}

/// `ibv_dereg_mr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut IbvMr) -> c_int {
    code(|| Mr::find(mr).ok_or(libc::EINVAL)?.deregister())
}

/// `ibv_rereg_mr`: not supported; the old region stays valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_rereg_mr(
    _mr: *mut IbvMr,
    _flags: c_int,
    _pd: *mut IbvPd,
    _addr: *mut c_void,
    _len: usize,
    _access: c_int,
) -> c_int {
    super::set_errno(libc::EOPNOTSUPP);
    // IBV_REREG_MR_ERR_INPUT.
    -1
}

static FORK: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// `ibv_fork_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_fork_init() -> c_int {
    FORK.store(true, std::sync::atomic::Ordering::Relaxed);
    0
}

/// `ibv_is_fork_initialized`: 0 disabled, 1 enabled, 2 not needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_is_fork_initialized() -> c_int {
    guard(0, || {
        if !settings().old_kernel_fork {
            return 2;
        }
        c_int::from(FORK.load(std::sync::atomic::Ordering::Relaxed))
    })
}

/// `ibv_dontfork_range`: what a forked child inherits is the kernel's business here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// `ibv_dofork_range`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
