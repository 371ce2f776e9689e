//! Control calls for tests; see `include/softrnic.h`.

use std::ffi::{CStr, c_char, c_int};

use super::{code, guard};
use crate::abi::*;
use crate::context::Context;
use crate::control;
use crate::device::devices;
use crate::objects::QPS;
use crate::qp::Qp;
use crate::sync::lock;

/// Starts (non-zero) or ends holding send requests.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_hold(on: c_int) -> c_int {
    code(|| {
        control::set_hold(on != 0);
        Ok(())
    })
}

/// Runs up to `n` held requests, oldest first; returns how many were released.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_release(n: u64) -> u64 {
    guard(0, || crate::post::release(n))
}

/// Reads a counter by name; `u64::MAX` if there is none. Names ending in `live` count objects.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_counter(name: *const c_char) -> u64 {
    guard(u64::MAX, || {
        if name.is_null() {
            return u64::MAX;
        }
        // SAFETY: a NUL-terminated string of the caller.
        let Ok(name) = (unsafe { CStr::from_ptr(name) }).to_str() else { return u64::MAX };
        let live = control::live().into_iter().find(|(n, _)| name.strip_suffix("_live") == Some(n));
        match live {
            Some((_, n)) => n as u64,
            None => crate::stats::by_name(name).unwrap_or(u64::MAX),
        }
    })
}

/// Number of live objects; prints each kind on stderr if there are any.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_leaks() -> c_int {
    guard(-1, || {
        let mut total = 0;
        for (name, n) in control::live() {
            if n > 0 {
                eprintln!("softrnic: live {name}: {n}");
            }
            total += n;
        }
        c_int::try_from(total).unwrap_or(c_int::MAX)
    })
}

/// Attributes of the last successful change of a QP to `state`: ENOENT if there was none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_qp_trace(
    qpn: u32,
    state: c_int,
    attr: *mut QpAttr,
    mask: *mut c_int,
) -> c_int {
    code(|| {
        let qp = Qp::by_number(qpn).ok_or(libc::EINVAL)?;
        let state = usize::try_from(state).map_err(|_| libc::EINVAL)?;
        let (given, from) =
            lock(&qp.sq).trace.get(state).copied().ok_or(libc::EINVAL)?.ok_or(libc::ENOENT)?;
        // SAFETY: out-pointers of the caller; the attribute structure has at least 136 bytes.
        unsafe {
            if !attr.is_null() {
                attr.write(from);
            }
            if !mask.is_null() {
                mask.write(given.cast_signed());
            }
        }
        Ok(())
    })
}

/// Numbers of the live QPs of the process in ascending order, up to `max`; returns how many there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_qps(numbers: *mut u32, max: c_int) -> c_int {
    guard(-1, || {
        let mut all: Vec<u32> = QPS.all().iter().map(|qp| qp.qpn()).collect();
        all.sort_unstable();
        for (at, number) in all.iter().take(usize::try_from(max).unwrap_or(0)).enumerate() {
            if !numbers.is_null() {
                // SAFETY: the caller's array has `max` entries.
                unsafe { numbers.add(at).write(*number) };
            }
        }
        c_int::try_from(all.len()).unwrap_or(c_int::MAX)
    })
}

/// The vendor extensions that were set on a QP: ENOENT if none were.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_qp_ece(qpn: u32, ece: *mut Ece) -> c_int {
    code(|| {
        let qp = Qp::by_number(qpn).filter(|_| !ece.is_null()).ok_or(libc::EINVAL)?;
        let set = lock(&qp.sq).ece;
        if set.vendor_id == 0 {
            return Err(libc::ENOENT);
        }
        // SAFETY: a non-null structure of the caller.
        unsafe { ece.write(set) };
        Ok(())
    })
}

/// Opcode and payload bytes of the newest request with an id that was posted on a QP: ENOENT if it is not remembered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_posted(
    qpn: u32,
    wr_id: u64,
    opcode: *mut c_int,
    bytes: *mut u64,
) -> c_int {
    code(|| {
        let qp = Qp::by_number(qpn).ok_or(libc::EINVAL)?;
        let sq = lock(&qp.sq);
        let found = sq.recent.iter().rev().find(|r| r.wr_id == wr_id).copied();
        drop(sq);
        let found = found.ok_or(libc::ENOENT)?;
        // SAFETY: out-pointers of the caller.
        unsafe {
            if !opcode.is_null() {
                opcode.write(found.opcode.cast_signed());
            }
            if !bytes.is_null() {
                bytes.write(found.len);
            }
        }
        Ok(())
    })
}

/// Makes the next `count` changes of any QP to `state` fail with `errno`.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_fail_modify_qp(state: c_int, count: u64, errno: c_int) -> c_int {
    code(|| control::fail_modify(u32::try_from(state).map_err(|_| libc::EINVAL)?, count, errno))
}

/// Replaces an entry of a port's GID table, by the text of `SOFTRNIC_GIDS`, with the async event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_set_gid(
    device: *const c_char,
    port: c_int,
    index: c_int,
    entry: *const c_char,
) -> c_int {
    code(|| {
        if device.is_null() || entry.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: NUL-terminated strings of the caller.
        let (name, entry) = unsafe { (CStr::from_ptr(device), CStr::from_ptr(entry)) };
        let (name, entry) = (name.to_str(), entry.to_str());
        let (name, entry) = (name.map_err(|_| libc::EINVAL)?, entry.map_err(|_| libc::EINVAL)?);
        let device = devices().iter().find(|d| d.name() == name).ok_or(libc::ENODEV)?;
        let port = u8::try_from(port).map_err(|_| libc::EINVAL)?;
        let index = u8::try_from(index).map_err(|_| libc::EINVAL)?;
        control::set_gid_entry(device, port, index, entry)
    })
}

/// Makes the next registration wait (non-zero), or ends that and lets the one that waits go on.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_pause_reg(on: c_int) -> c_int {
    code(|| {
        control::pause_registration(on != 0);
        Ok(())
    })
}

/// Whether a registration waits because of that.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_reg_paused() -> c_int {
    guard(0, || c_int::from(control::is_registration_paused()))
}

/// Raises an async event on a context. `element`: QP number, CQ handle, SRQ handle or port number, by event type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_inject_event(
    context: *mut IbvContext,
    event: c_int,
    element: u32,
) -> c_int {
    code(|| {
        let context = Context::find(context).ok_or(libc::EINVAL)?;
        let event = u32::try_from(event).ok().filter(|e| *e <= 19).ok_or(libc::EINVAL)?;
        let region = &context.process.region;
        let generation = match event {
            EVENT_CQ_ERR => region.cq(element).map(|s| &s.generation),
            EVENT_SRQ_ERR | EVENT_SRQ_LIMIT_REACHED => region.srq(element).map(|s| &s.generation),
            _ => None,
        };
        let generation = generation.map_or(0, |g| g.load(std::sync::atomic::Ordering::Relaxed));
        context.raise(event, element, generation);
        Ok(())
    })
}

/// Moves a QP of this process to the error state with a fatal event.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_kill_qp(qpn: u32) -> c_int {
    code(|| control::kill_qp(qpn))
}

/// Takes a port of a device (by name) of this process up or down.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_port(device: *const c_char, port: c_int, up: c_int) -> c_int {
    code(|| {
        if device.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a NUL-terminated string of the caller.
        let name = unsafe { CStr::from_ptr(device) }.to_str().map_err(|_| libc::EINVAL)?;
        let device = devices().iter().find(|d| d.name() == name).ok_or(libc::ENODEV)?;
        let port = u8::try_from(port).map_err(|_| libc::EINVAL)?;
        control::set_port(device.index, port, up != 0)
    })
}

/// Makes the `n`-th registration from now fail; 0 = none.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_fail_reg_mr(n: u64) -> c_int {
    code(|| {
        control::fail_registration(n);
        Ok(())
    })
}

/// Makes every registration from the `n`-th from now on fail; 0 = none.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_fail_reg_from(n: u64) -> c_int {
    code(|| {
        control::fail_registrations_from(n);
        Ok(())
    })
}

/// The errno of registrations that those two calls make fail; 0 = ENOMEM again.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_reg_errno(errno: c_int) -> c_int {
    code(|| control::set_failure(errno))
}
