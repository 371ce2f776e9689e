//! Memory of a connection, measured as the growth of a process that opens many: bytes in use of the C heap, plus
//! private anonymous mappings. Which end owns it is seen when first all sending and then all receiving comms are closed.

use super::provider::Provider;
use crate::cli::CpuLoop;
use crate::failure::{Failure, Result};
use crate::net::{Net, log};
use crate::rank::endpoint::pair;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Rounds of opening and closing in which what stays is looked for.
const ROUNDS: usize = 5;

/// What one connection holds.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Bytes per sending comm: heap.
    pub send_heap: f64,
    /// Bytes per sending comm: mappings.
    pub send_mapped: f64,
    /// Bytes per receiving comm: heap.
    pub recv_heap: f64,
    /// Bytes per receiving comm: mappings.
    pub recv_mapped: f64,
    /// Bytes per connection that closing did not give back.
    pub kept: f64,
    /// File descriptors per connection (both ends).
    pub fds: f64,
    /// Queue pairs per connection.
    pub qps: f64,
    /// Completion queues per connection.
    pub cqs: f64,
    /// Memory regions per connection.
    pub mrs: f64,
    /// Registered bytes per connection.
    pub mr_bytes: f64,
}

/// Opens the connections, measures and prints JSON.
pub fn run(options: &CpuLoop) -> Result<()> {
    log::configure("", options.verbose);
    let provider = Provider::open(&options.provider)?;
    let net = Net::open(&options.plugin, options.abi)?;
    let device = net.devices()?.first().map_or(0, |device| device.index);
    let connect = || {
        let (listener, handle) = net.listen(device)?;
        pair(&net, device, listener, handle, TIMEOUT)
    };
    let close = |(send, recv)| net.close_send(send).and_then(|()| net.close_recv(recv));
    // The first connection allocates what all share. It stays open, so that closing the others does not free that. As
    // many as are measured come and go first, so that tables that only ever grow have their size by then.
    let first = connect()?;
    let mut comms = Vec::with_capacity(options.connections);
    for _ in 0..options.connections {
        comms.push(connect()?);
    }
    comms.drain(..).try_for_each(close)?;
    let before = Usage::now()?;
    let objects_before = provider.counters();
    for _ in 0..options.connections {
        comms.push(connect()?);
    }
    let objects = provider.counters();
    let open = Usage::now()?;
    for &(send, _) in &comms {
        net.close_send(send)?;
    }
    let senders_closed = Usage::now()?;
    for &(_, recv) in &comms {
        net.close_recv(recv)?;
    }
    let closed = Usage::now()?;
    comms.clear();
    // Blocks of the heap have some bytes more or less, as threads happen to take turns. What is really kept is kept in every
    // round, so the least of all rounds has it.
    let (mut kept, mut last) = (closed.total() - before.total(), closed.total());
    for _ in 1..ROUNDS {
        for _ in 0..options.connections {
            comms.push(connect()?);
        }
        comms.drain(..).try_for_each(close)?;
        let now = Usage::now()?.total();
        kept = kept.min(now - last);
        last = now;
    }
    close(first)?;
    net.close()?;

    let each = |more: i64, less: i64| (more - less) as f64 / options.connections.max(1) as f64;
    let object = |more: u64, less: u64| each(more as i64, less as i64);
    let memory = Memory {
        send_heap: each(open.heap, senders_closed.heap),
        send_mapped: each(open.mapped, senders_closed.mapped),
        recv_heap: each(senders_closed.heap, closed.heap),
        recv_mapped: each(senders_closed.mapped, closed.mapped),
        kept: each(kept.max(0), 0),
        fds: each(open.fds, before.fds),
        qps: object(objects.live_qps, objects_before.live_qps),
        cqs: object(objects.live_cqs, objects_before.live_cqs),
        mrs: object(objects.live_mrs, objects_before.live_mrs),
        mr_bytes: object(objects.live_mr_bytes, objects_before.live_mr_bytes),
    };
    let text = serde_json::to_string(&memory)
        .map_err(|error| Failure::new("memory", error.to_string()))?;
    println!("{text}");
    Ok(())
}

/// The process at one moment.
#[derive(Debug, Clone, Copy)]
struct Usage {
    heap: i64,
    mapped: i64,
    fds: i64,
}

impl Usage {
    fn total(&self) -> i64 {
        self.heap + self.mapped
    }

    fn now() -> Result<Self> {
        let read = |path: &str| {
            std::fs::read_to_string(path).map_err(|error| Failure::io("memory", path, &error))
        };
        let mapped = anonymous_bytes(&read("/proc/self/maps")?);
        let fds = std::fs::read_dir("/proc/self/fd")
            .map_err(|error| Failure::io("memory", "/proc/self/fd", &error))?
            .count() as i64;
        // Large blocks of the heap are mappings of their own, counted there; `uordblks` has the others.
        // SAFETY: mallinfo2 only reads the allocator's counters.
        let heap = unsafe { libc::mallinfo2() }.uordblks as i64;
        Ok(Self { heap, mapped, fds })
    }
}

/// Bytes of accessible private mappings without a file: no heap, no stack, no guard pages.
fn anonymous_bytes(maps: &str) -> i64 {
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let range = fields.next()?;
            let permissions = fields.next()?;
            let named = fields.nth(3).is_some();
            if named || !permissions.ends_with('p') || permissions.starts_with("---") {
                return None;
            }
            let (start, end) = range.split_once('-')?;
            let start = i64::from_str_radix(start, 16).ok()?;
            Some(i64::from_str_radix(end, 16).ok()? - start)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::anonymous_bytes;

    #[test]
    fn only_private_memory_without_a_name_counts() {
        let maps = "\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000004000 rw-p 00000000 00:00 0
7f0000004000-7f0000005000 ---p 00000000 00:00 0
7f0000005000-7f0000006000 rw-s 00000000 00:01 77                         /memfd:x (deleted)
7f0000006000-7f0000007000 r--p 00000000 08:01 99                         /usr/lib/libc.so.6
7f0000007000-7f0000008000 r--p 00000000 00:00 0
";
        assert_eq!(anonymous_bytes(maps), 0x4000 + 0x1000);
    }
}
