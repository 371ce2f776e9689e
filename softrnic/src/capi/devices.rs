//! Devices, contexts, ports, GIDs.

use std::ffi::{c_char, c_int};

use super::{code, guard, pointer, set_errno};
use crate::abi::*;
use crate::context::Context;
use crate::device::{Device, devices};
use crate::env::settings;

/// `ibv_get_device_list`. A fault plan that cannot be read leaves no devices: running without its faults would prove
/// the wrong thing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut IbvDevice {
    pointer(|| {
        if let Err(why) = crate::faults::initial() {
            eprintln!("softrnic: ERROR {why}");
            if !count.is_null() {
                // SAFETY: a non-null out-pointer of the caller.
                unsafe { count.write(0) };
            }
            return Err(libc::EINVAL);
        }
        crate::fork::init_from_environment();
        let list = devices();
        // SAFETY: plain allocation; freed by `ibv_free_device_list`.
        let array: *mut *mut IbvDevice =
            unsafe { libc::calloc(list.len() + 1, size_of::<usize>()) }.cast();
        if array.is_null() {
            return Err(libc::ENOMEM);
        }
        for (i, device) in list.iter().enumerate() {
            // SAFETY: the array has one entry per device and a terminator.
            unsafe { array.add(i).write(device.ptr()) };
        }
        if !count.is_null() {
            // SAFETY: a non-null out-pointer of the caller.
            unsafe { count.write(c_int::try_from(list.len()).unwrap_or(0)) };
        }
        Ok(array)
    })
}

/// `ibv_free_device_list`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut IbvDevice) {
    // SAFETY: the array of `ibv_get_device_list`, or NULL.
    unsafe { libc::free(list.cast()) };
}

/// `ibv_get_device_name`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut IbvDevice) -> *const c_char {
    guard(std::ptr::null(), || match Device::find(device) {
        // SAFETY: takes the address of a field of a live device.
        Some(_) => unsafe { (&raw const (*device).name).cast() },
        None => std::ptr::null(),
    })
}

/// `ibv_get_device_guid`, network byte order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(device: *mut IbvDevice) -> u64 {
    guard(0, || Device::find(device).map_or(0, Device::guid))
}

/// `ibv_get_device_index`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_index(device: *mut IbvDevice) -> c_int {
    guard(-1, || Device::find(device).and_then(|d| c_int::try_from(d.index).ok()).unwrap_or(-1))
}

/// `ibv_open_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut IbvDevice) -> *mut IbvContext {
    pointer(|| {
        let device = Device::find(device).ok_or(libc::EINVAL)?;
        Context::open(device).map(|c| c.ptr()).map_err(|error| {
            eprintln!("softrnic: ERROR cannot open {}: {error}", device.name());
            error.raw_os_error().unwrap_or(libc::EIO)
        })
    })
}

/// `ibv_close_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut IbvContext) -> c_int {
    code(|| {
        Context::find(context).ok_or(libc::EINVAL)?.close();
        Ok(())
    })
}

/// `ibv_query_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(
    context: *mut IbvContext,
    attr: *mut DeviceAttr,
) -> c_int {
    code(|| {
        let context = Context::find(context).ok_or(libc::EINVAL)?;
        if attr.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null structure of the caller.
        unsafe { attr.write(context.device.attributes()) };
        Ok(())
    })
}

/// `query_device_ex` of the extended context: the classic attributes, zeros for all extensions.
pub unsafe extern "C" fn query_device_ex(
    context: *mut IbvContext,
    _input: *const u32,
    attr: *mut DeviceAttr,
    size: usize,
) -> c_int {
    code(|| {
        let context = Context::find(context).ok_or(libc::EINVAL)?;
        if attr.is_null() || size < size_of::<DeviceAttr>() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller's structure has `size` bytes and starts with the classic attributes.
        unsafe {
            attr.cast::<u8>().write_bytes(0, size);
            attr.write(context.device.attributes());
        }
        Ok(())
    })
}

fn port_attributes(context: *mut IbvContext, port: u8) -> Result<PortAttr, i32> {
    let context = Context::find(context).ok_or(libc::EINVAL)?;
    context.device.port(port, context.process.region.header()).ok_or(libc::EINVAL)
}

/// `ibv_query_port`, the exported one: fills the 48 bytes that its callers allocate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut IbvContext,
    port: u8,
    attr: *mut PortAttr,
) -> c_int {
    // SAFETY: passed on to the caller.
    unsafe { query_port_sized(context, port, attr, PORT_ATTR_COMPAT) }
}

/// `query_port` of the extended context: fills exactly as much as the caller has.
pub unsafe extern "C" fn query_port_sized(
    context: *mut IbvContext,
    port: u8,
    attr: *mut PortAttr,
    size: usize,
) -> c_int {
    code(|| {
        let from = port_attributes(context, port)?;
        if attr.is_null() {
            return Err(libc::EINVAL);
        }
        let known = size.min(size_of::<PortAttr>());
        // SAFETY: the caller's structure has `size` bytes; the source has at least `known`.
        unsafe {
            attr.cast::<u8>().write_bytes(0, size);
            std::ptr::copy_nonoverlapping((&raw const from).cast::<u8>(), attr.cast::<u8>(), known);
        }
        Ok(())
    })
}

/// `ibv_query_port_speed`, in units of 100 Mb/s.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port_speed(
    context: *mut IbvContext,
    port: u32,
    speed: *mut u64,
) -> c_int {
    code(|| {
        let context = Context::find(context).ok_or(libc::EINVAL)?;
        let port = u8::try_from(port).map_err(|_| libc::EINVAL)?;
        context.device.port(port, context.process.region.header()).ok_or(libc::EINVAL)?;
        if speed.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null out-pointer of the caller.
        unsafe { speed.write(context.device.speed(port)) };
        Ok(())
    })
}

fn gid_of(context: *mut IbvContext, port: u32, index: u32) -> Result<crate::env::GidSetting, i32> {
    let context = Context::find(context).ok_or(libc::EINVAL)?;
    let port = u8::try_from(port).map_err(|_| libc::EINVAL)?;
    let header = context.process.region.header();
    context.device.gid(port, index as usize, header).ok_or(libc::EINVAL)
}

/// `ibv_query_gid`. Returns -1 on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut IbvContext,
    port: u8,
    index: c_int,
    gid: *mut Gid,
) -> c_int {
    let done = code(|| {
        let index = u32::try_from(index).map_err(|_| libc::EINVAL)?;
        let from = gid_of(context, u32::from(port), index)?;
        if gid.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null out-pointer of the caller.
        unsafe { gid.write(from.gid) };
        Ok(())
    });
    if done == 0 { 0 } else { -1 }
}

fn entry(port: u32, index: u32, from: &crate::env::GidSetting) -> GidEntry {
    GidEntry {
        gid: from.gid,
        gid_index: index,
        port_num: port,
        gid_type: from.kind,
        ndev_ifindex: from.ifindex,
    }
}

/// `ibv_query_gid_ex`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut IbvContext,
    port: u32,
    index: u32,
    to: *mut GidEntry,
    flags: u32,
    size: usize,
) -> c_int {
    code(|| {
        if flags != 0 || to.is_null() || size < size_of::<GidEntry>() {
            return Err(libc::EINVAL);
        }
        let from = gid_of(context, port, index)?;
        // SAFETY: the caller's structure has `size` bytes.
        unsafe { to.write(entry(port, index, &from)) };
        Ok(())
    })
}

/// `ibv_query_gid_table`: number of entries, or a negative errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut IbvContext,
    entries: *mut GidEntry,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    let result = guard(Err(libc::EFAULT), || {
        let context = Context::find(context).ok_or(libc::EINVAL)?;
        if flags != 0 || entries.is_null() && max > 0 || size < size_of::<GidEntry>() {
            return Err(libc::EINVAL);
        }
        let mut n = 0;
        for port in 1..=settings().ports() {
            let header = context.process.region.header();
            let gids = context.device.gids(port, header).unwrap_or_default();
            for (index, gid) in (0_u32..).zip(gids) {
                if n >= max {
                    return Err(libc::EINVAL);
                }
                // SAFETY: the caller's array has `max` entries of `size` bytes each.
                unsafe { entries.byte_add(n * size).write(entry(u32::from(port), index, &gid)) };
                n += 1;
            }
        }
        Ok(isize::try_from(n).unwrap_or(0))
    });
    result.unwrap_or_else(|errno| -(errno as isize))
}

/// `ibv_query_gid_type` of the providers' interface: sysfs order (0 = IB or RoCE v1, 1 = RoCE v2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid_type(
    context: *mut IbvContext,
    port: u8,
    index: u32,
    kind: *mut u32,
) -> c_int {
    let done = code(|| {
        let from = gid_of(context, u32::from(port), index)?;
        if kind.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null out-pointer of the caller.
        unsafe { kind.write(u32::from(from.kind == GID_TYPE_ROCE_V2)) };
        Ok(())
    });
    if done == 0 { 0 } else { -1 }
}

/// `ibv_query_pkey`, network byte order. Returns -1 on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(
    context: *mut IbvContext,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    let done = code(|| {
        port_attributes(context, port)?;
        let key = usize::try_from(index)
            .ok()
            .and_then(|i| settings().pkeys.get(i))
            .ok_or(libc::EINVAL)?;
        if pkey.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a non-null out-pointer of the caller.
        unsafe { pkey.write(key.to_be()) };
        Ok(())
    });
    if done == 0 { 0 } else { -1 }
}

/// `ibv_get_pkey_index`. Returns -1 on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_pkey_index(
    context: *mut IbvContext,
    port: u8,
    pkey: u16,
) -> c_int {
    guard(-1, || {
        if port_attributes(context, port).is_err() {
            set_errno(libc::EINVAL);
            return -1;
        }
        let wanted = u16::from_be(pkey);
        let at = settings().pkeys.iter().position(|k| *k == wanted);
        at.and_then(|i| c_int::try_from(i).ok()).unwrap_or(-1)
    })
}
