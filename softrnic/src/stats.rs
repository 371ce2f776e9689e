//! Counters of the process, readable by name through the control calls.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($id:ident = $name:literal),+ $(,)?) => {
        /// One counter.
        #[allow(missing_docs)] // The names say it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Counter { $($id),+ }
        /// Names, in the order of the enum.
        pub const NAMES: &[&str] = &[$($name),+];
    };
}

counters! {
    PostWrite = "post_write", PostWriteImm = "post_write_imm", PostSend = "post_send", PostSendImm = "post_send_imm",
    PostRead = "post_read", PostCmpSwap = "post_cmp_swap", PostFetchAdd = "post_fetch_add",
    PostRecv = "post_recv", PostSrqRecv = "post_srq_recv", Inline = "inline", Signaled = "signaled",
    Unsignaled = "unsignaled", Doorbells = "doorbells", BytesWritten = "bytes_written", BytesRead = "bytes_read",
    Parked = "parked", RnrParked = "rnr_parked", Held = "held", Released = "released",
    SendCompletions = "send_completions", RecvCompletions = "recv_completions", ErrorCompletions = "error_completions",
    CqOverruns = "cq_overruns", PollCalls = "poll_nonempty", AsyncEvents = "async_events", RegMr = "reg_mr",
    DeregMr = "dereg_mr", RegisteredBytes = "registered_bytes", PinnedBytes = "pinned_bytes",
    MigratedPages = "migrated_pages", RegDelayNs = "reg_delay_ns", DontFork = "dontfork", DoFork = "dofork", ModifyQp = "modify_qp", SqFull = "sq_full",
}

static VALUES: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

/// Where the counters of this process lie, and how many there are: the `softrnic` command reads them from outside.
pub fn place() -> (u64, u32) {
    let address = VALUES.as_ptr().expose_provenance() as u64;
    (address, u32::try_from(VALUES.len()).unwrap_or(0))
}

/// Adds to a counter and returns what it shows then.
pub fn add(counter: Counter, n: u64) -> u64 {
    // Relaxed: counters order nothing.
    VALUES[counter as usize].fetch_add(n, Ordering::Relaxed).wrapping_add(n)
}

/// Subtracts from a counter that shows a level.
pub fn sub(counter: Counter, n: u64) {
    VALUES[counter as usize].fetch_sub(n, Ordering::Relaxed);
}

/// Sets a counter that shows a level to nothing.
pub fn clear(counter: Counter) {
    VALUES[counter as usize].store(0, Ordering::Relaxed);
}

/// Reads a counter.
pub fn get(counter: Counter) -> u64 {
    VALUES[counter as usize].load(Ordering::Relaxed)
}

/// Reads a counter by name.
pub fn by_name(name: &str) -> Option<u64> {
    let index = NAMES.iter().position(|n| *n == name)?;
    VALUES.get(index).map(|v| v.load(Ordering::Relaxed))
}

/// The counter of a send opcode.
pub fn of_opcode(opcode: u32) -> Option<Counter> {
    use Counter::*;
    [PostWrite, PostWriteImm, PostSend, PostSendImm, PostRead, PostCmpSwap, PostFetchAdd]
        .get(opcode as usize)
        .copied()
}
