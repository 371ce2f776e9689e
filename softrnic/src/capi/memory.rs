//! Protection domains, memory regions, fork.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;

use super::{code, guard, pointer};
use crate::abi::*;
use crate::context::Context;
use crate::env::settings;
use crate::fork;
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
        let base = addr.expose_provenance();
        let what = Registration { va: base as u64, len, iova, access };
        if access & ACCESS_ON_DEMAND != 0 {
            // Not pinned, so nothing to keep from children.
            return Ok(Mr::register(&pd, &what)?.ptr());
        }
        fork::withhold(base, len)?;
        let mr = Mr::register(&pd, &what).inspect_err(|_| fork::give_back(base, len))?;
        Ok(mr.ptr())
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
        // Before anything else is looked at: callers ask with a descriptor that cannot be.
        if let Some(errno) = settings().refuses_dmabuf(pd.context.device.index) {
            return Err(errno);
        }
        if fd < 0 {
            return Err(libc::EBADF);
        }
        // SAFETY: the caller's descriptor is open during the call; a closed one is reported by the kernel.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let what = Registration { va: 0, len, iova, access: access.cast_unsigned() };
        Ok(Mr::register_fd(&pd, fd, offset, what)?.ptr())
    })
}

/// `ibv_dereg_mr`. Only this gives a region's pages back to children: a region that goes with its context leaves them
/// withheld, as the library does not learn of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut IbvMr) -> c_int {
    code(|| {
        let mr = Mr::find(mr).ok_or(libc::EINVAL)?;
        mr.deregister()?;
        if let Some(pages) = mr.pages() {
            fork::give_back(pages.start(), pages.extent());
        }
        Ok(())
    })
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

/// `ibv_fork_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_fork_init() -> c_int {
    code(fork::init)
}

/// `ibv_is_fork_initialized`: 0 disabled, 1 enabled, 2 not needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_is_fork_initialized() -> c_int {
    guard(fork::DISABLED, fork::status)
}

/// `ibv_dontfork_range`: -1 sets errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dontfork_range(base: *mut c_void, size: usize) -> c_int {
    -c_int::from(code(|| fork::withhold(base.expose_provenance(), size)) != 0)
}

/// `ibv_dofork_range`: -1 sets errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dofork_range(base: *mut c_void, size: usize) -> c_int {
    let done = code(|| {
        fork::give_back(base.expose_provenance(), size);
        Ok(())
    });
    -c_int::from(done != 0)
}
