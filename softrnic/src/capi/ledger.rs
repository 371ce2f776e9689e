//! Control calls of the page ledger; see `include/softrnic.h`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::code;
use crate::ledger::pages::{Pages, page_size};
use crate::ledger::placement::Placement;
use crate::ledger::{self, Page};

/// The pages of a caller's range.
fn pages(addr: *const c_void, len: usize) -> Result<Pages, i32> {
    let addr = addr.expose_provenance() as u64;
    Pages::of(addr, len).filter(|_| addr != 0).ok_or(libc::EINVAL)
}

/// Replaces the placement map for pages that were not seen yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_cma(spec: *const c_char) -> c_int {
    code(|| {
        if spec.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a NUL-terminated string of the caller.
        let spec = unsafe { CStr::from_ptr(spec) }.to_str().map_err(|_| libc::EINVAL)?;
        ledger::set_map(Placement::parse(spec).ok_or(libc::EINVAL)?);
        Ok(())
    })
}

/// Pins pages as another driver would, with or without saying that it is for long.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_pin(addr: *mut c_void, len: usize, longterm: c_int) -> c_int {
    code(|| ledger::pin(pages(addr, len)?, longterm != 0))
}

/// Ends one pin of every page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_unpin(addr: *mut c_void, len: usize) -> c_int {
    code(|| ledger::unpin(pages(addr, len)?))
}

/// Says where a page lies and who holds it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_page(
    addr: *const c_void,
    pfn: *mut u64,
    migratetype: *mut c_int,
    short_pins: *mut c_uint,
    long_pins: *mut c_uint,
) -> c_int {
    code(|| {
        if addr.is_null() {
            return Err(libc::EINVAL);
        }
        let page: Page = ledger::look(addr.expose_provenance() as u64 / page_size() as u64)?;
        let count = |pins: u64| c_uint::try_from(pins).unwrap_or(c_uint::MAX);
        // SAFETY: out-pointers of the caller, each NULL or writable.
        unsafe {
            if !pfn.is_null() {
                pfn.write(page.pfn);
            }
            if !migratetype.is_null() {
                migratetype.write(page.migratetype);
            }
            if !short_pins.is_null() {
                short_pins.write(count(page.short));
            }
            if !long_pins.is_null() {
                long_pins.write(count(page.long));
            }
        }
        Ok(())
    })
}

/// Forgets pages: what is mapped there next is new.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_forget(addr: *mut c_void, len: usize) -> c_int {
    code(|| ledger::forget(pages(addr, len)?))
}
