//! NCCL's logger behind the plugin's own log.

use super::types::Logger;
use crate::log;
use std::ffi::{CString, c_int, c_ulong};
use std::sync::atomic::{AtomicUsize, Ordering};
use tracing::Level;

/// `NCCL_NET`.
const SUBSYSTEM_NET: c_ulong = 0x10;
/// `NCCL_INIT`: shown by default, for lines that users look for.
const SUBSYSTEM_INIT: c_ulong = 0x1;

/// The logger given last, as an address; 0 when there is none.
static LOGGER: AtomicUsize = AtomicUsize::new(0);

/// Sends lines to `logger` from now on. NULL keeps the one before.
pub fn set(logger: Logger) {
    if let Some(logger) = logger {
        LOGGER.store(logger as usize, Ordering::Release);
    }
    log::install(emit);
}

fn emit(level: Level, file: &str, line: u32, text: &str) {
    let logger = LOGGER.load(Ordering::Acquire);
    if logger == 0 {
        return;
    }
    // SAFETY: the address of a function of this type, stored by `set`; NCCL's logger is never unloaded before its
    // plugins.
    let logger: Logger = unsafe { std::mem::transmute::<usize, Logger>(logger) };
    let Some(logger) = logger else { return };
    // NCCL's levels: 2 WARN, 3 INFO, 5 TRACE.
    let level = match level {
        Level::ERROR | Level::WARN => 2,
        Level::INFO => 3,
        _ => 5,
    };
    // Text from outside, such as settings, must not be able to forge lines or steer a terminal.
    let printable = |s: &str| {
        let s: String = s.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        CString::new(s).unwrap_or_default()
    };
    let (file, text) = (printable(file), printable(&format!("NET/pinrail: {text}")));
    // SAFETY: NUL-terminated strings that live through the call. The text is an argument, never the format.
    unsafe {
        logger(
            level,
            SUBSYSTEM_INIT | SUBSYSTEM_NET,
            file.as_ptr(),
            c_int::try_from(line).unwrap_or(0),
            c"%s".as_ptr(),
            text.as_ptr(),
        );
    }
}
