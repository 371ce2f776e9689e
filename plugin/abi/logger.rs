//! NCCL's logger behind the plugin's own log.

use super::types::Logger;
use crate::log::{self, one_line};
use std::ffi::{CString, c_int, c_ulong};
use std::io::Write;
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

/// Sends lines to nobody's logger from now on: the one there was may go.
pub fn forget() {
    LOGGER.store(0, Ordering::Release);
}

fn emit(level: Level, file: &str, line: u32, text: &str) {
    let text = format!("NET/pinrail: {}", one_line(text));
    let logger = LOGGER.load(Ordering::Acquire);
    if logger == 0 {
        if level <= Level::WARN {
            // In one piece, as several threads may have something to say. A closed stream is no reason to fail.
            let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
        }
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
    let (file, text) = (CString::new(one_line(file)), CString::new(text));
    let (file, text) = (file.unwrap_or_default(), text.unwrap_or_default());
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
