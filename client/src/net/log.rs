//! The plugin's log lines: shown on stderr under the process's name, the last ones kept for the error message.

use std::ffi::{CStr, c_char, c_int, c_ulong};
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

/// NCCL's level for messages that a user should see by default.
const WARN: i32 = 2;

/// The highest level that is printed.
static VERBOSITY: AtomicI32 = AtomicI32::new(WARN);
static STATE: Mutex<State> =
    Mutex::new(State { prefix: String::new(), last_warning: None, last_line: None, lines: None });

/// Lines that are kept where all are asked for.
const MOST_LINES: usize = 1000;

struct State {
    prefix: String,
    last_warning: Option<String>,
    last_line: Option<String>,
    lines: Option<Vec<String>>,
}

/// The C side of the logger: `ncclDebugLogger_t`. Only its address is used here; the plugin makes the variadic call.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

unsafe extern "C" {
    /// Formats and forwards to [`pinrail_client_log_line`]; defined in `logger.c`.
    pub fn pinrail_client_logger(
        level: c_int,
        flags: c_ulong,
        file: *const c_char,
        line: c_int,
        format: *const c_char,
        ...
    );
}

/// Names the process in front of each line and sets what is printed: warnings, or with `verbose` everything.
pub fn configure(prefix: &str, verbose: bool) {
    VERBOSITY.store(if verbose { i32::MAX } else { WARN }, Ordering::Relaxed);
    if let Ok(mut state) = STATE.lock() {
        state.prefix = prefix.to_owned();
    }
}

/// The plugin's latest warning, once: it explains the error code that follows it.
pub fn take_warning() -> Option<String> {
    STATE.lock().ok()?.last_warning.take()
}

/// The plugin's latest line of any level, once: what it says where it has no reason to warn.
pub fn take_line() -> Option<String> {
    STATE.lock().ok()?.last_line.take()
}

/// Keeps all lines for [`take_lines`] from here on, or no longer.
pub fn keep_lines(keep: bool) {
    if let Ok(mut state) = STATE.lock() {
        state.lines = keep.then(Vec::new);
    }
}

/// The lines that were kept, once.
pub fn take_lines() -> Vec<String> {
    let lines = STATE.lock().ok().and_then(|mut state| state.lines.as_mut().map(std::mem::take));
    lines.unwrap_or_default()
}

/// Prints nothing; lines are kept to be asked for.
pub fn keep_quiet() {
    VERBOSITY.store(0, Ordering::Relaxed);
}

/// Receives one formatted line. Called by the plugin's threads through `logger.c`.
///
/// # Safety
/// `text` is a NUL-terminated string that lives for the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn pinrail_client_log_line(
    level: c_int,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    text: *const c_char,
) {
    // SAFETY: `logger.c` passes its own stack buffer, which vsnprintf terminated.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let Ok(mut state) = STATE.lock() else { return };
    if level <= VERBOSITY.load(Ordering::Relaxed) {
        // One write per line: both ranks share the terminal.
        let line = format!("{}{}\n", state.prefix, text.trim_end());
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    if level == WARN {
        state.last_warning = Some(text.trim_end().to_owned());
    }
    if let Some(lines) = state.lines.as_mut().filter(|lines| lines.len() < MOST_LINES) {
        lines.push(text.trim_end().to_owned());
    }
    state.last_line = Some(text.trim_end().to_owned());
}
