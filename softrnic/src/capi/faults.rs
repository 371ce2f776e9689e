//! Control calls for fault plans and the stepped engine; see `include/softrnic.h`.

use std::ffi::{CStr, c_char, c_int};
use std::io::Write as _;

use super::{code, guard};
use crate::device::devices;
use crate::env::{Engine, settings};
use crate::faults::{self, table};
use crate::process::Process;
use crate::{clock, control, stepped, trace};

/// A C string as text; NULL is empty.
///
/// # Safety
/// `text` is NULL or NUL-terminated.
unsafe fn given<'a>(text: *const c_char) -> Result<&'a str, i32> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| libc::EINVAL)
}

fn set(text: &str, keep: bool) -> Result<(), i32> {
    faults::set(text, keep).map_err(|why| {
        eprintln!("softrnic: ERROR fault plan, {why}");
        libc::EINVAL
    })
}

/// Replaces the fault plan of this process; NULL or an empty plan ends it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_faults(plan: *const c_char) -> c_int {
    // SAFETY: a NUL-terminated string of the caller.
    code(|| set(unsafe { given(plan)? }, false))
}

/// Adds rules to the fault plan of this process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_fault_add(rules: *const c_char) -> c_int {
    // SAFETY: a NUL-terminated string of the caller.
    code(|| set(unsafe { given(rules)? }, true))
}

fn counted(rule: u32, what: impl Fn(&table::Counted) -> u64) -> u64 {
    guard(u64::MAX, || {
        let Some(process) = Process::current() else { return u64::MAX };
        let rules = table::list(&process, &process.region);
        rules.get(rule as usize).map_or(u64::MAX, what)
    })
}

/// How often a rule fired.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_fault_fired(rule: u32) -> u64 {
    counted(rule, |r| r.fired)
}

/// How many requests a rule was about.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_fault_matched(rule: u32) -> u64 {
    counted(rule, |r| r.matched)
}

/// Ordinal of the device of this name.
///
/// # Safety
/// As [`given`].
unsafe fn device(name: *const c_char) -> Result<usize, i32> {
    // SAFETY: passed on to the caller.
    let name = unsafe { given(name)? };
    devices().iter().find(|d| d.name() == name).map(|d| d.index).ok_or(libc::ENODEV)
}

/// Lets a device die.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_device_fatal(name: *const c_char) -> c_int {
    // SAFETY: a NUL-terminated string of the caller.
    code(|| control::device_fatal(unsafe { device(name)? }))
}

/// Makes up to `n` steps and returns how many did something; it ends with the first that did not.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_step(n: u64) -> u64 {
    guard(0, || {
        if settings().engine != Engine::Stepped {
            return 0;
        }
        (0..n).take_while(|_| stepped::step()).count() as u64
    })
}

/// Moves the virtual clock.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_advance(ns: u64) -> c_int {
    code(|| {
        if settings().engine != Engine::Stepped {
            return Err(libc::EOPNOTSUPP);
        }
        clock::advance(ns);
        Ok(())
    })
}

/// Nanoseconds on the clock that delays and limits are measured with.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_now() -> u64 {
    guard(0, clock::now)
}

/// Begins the stepped engine anew with a seed.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_seed(seed: u64) -> c_int {
    code(|| stepped::restart(seed))
}

/// Copies the trace as text, cut to the buffer; returns the length of all of it, without the NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softrnic_trace(buffer: *mut c_char, size: usize) -> usize {
    guard(0, || {
        let text = trace::text(usize::MAX);
        if !buffer.is_null() && size > 0 {
            let n = text.len().min(size - 1);
            // SAFETY: the caller's buffer has `size` bytes; the text has at least `n`.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast::<u8>(), n);
                buffer.add(n).write(0);
            }
        }
        text.len()
    })
}

/// Prints the last `n` events on stderr.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_trace_print(n: u32) {
    guard((), || {
        // In one piece, so that nothing of other threads comes in between. A closed stderr hears nothing.
        let _ = std::io::stderr().write_all(trace::text(n as usize).as_bytes());
    });
}

/// A number that two equal traces share.
#[unsafe(no_mangle)]
pub extern "C" fn softrnic_trace_hash() -> u64 {
    guard(0, trace::hash)
}
