//! What a process says, as one JSON value: for `pinrail status --json` and for the records that the plugin writes.

use super::layout::{Wait, bound};
use super::reader::{End, Latency, Rail, Status};
use serde_json::{Value, json as value};

/// Raised when a key changes its meaning or goes away.
const SCHEMA_VERSION: u32 = 1;

/// Everything about a process.
pub fn json(status: &Status) -> Value {
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let [sent, sent_bytes, received, received_bytes] = status.closed;
    value!({
        "schema": "pinrail-status",
        "schema_version": SCHEMA_VERSION,
        "plugin_version": status.plugin,
        "host": status.host,
        "pid": status.owner.pid,
        "watched_seconds_ago": seconds(status.now.saturating_sub(status.looked)),
        "watched_every_seconds": seconds(status.every),
        "ticks_per_second": status.ticks_per_second,
        "ticks_are_steady": status.steady,
        "sampled_one_in": super::layout::SAMPLING,
        "ends_opened": status.opened,
        "ends_failed": status.failed,
        "ends_left_out": status.left_out,
        "ends_unreadable": status.unsteady,
        "bounce_bytes_set_aside": status.aside,
        "closed": {
            "sent_messages": sent, "sent_bytes": sent_bytes,
            "received_messages": received, "received_bytes": received_bytes,
        },
        "ends": status.ends.iter().map(|end| of_end(status, end)).collect::<Vec<_>>(),
    })
}

fn of_end(status: &Status, end: &End) -> Value {
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let ago = |at: u64| seconds(status.now.saturating_sub(at));
    let waits = (end.wait != Wait::Nothing).then(|| {
        value!({
            "for": end.wait.name(),
            // Less than how often the process looks where it has not seen it.
            "seconds": status.waited(end).map(seconds),
            "receives": end.receives.saturating_sub(end.completed),
            "flushes": end.flushes.saturating_sub(end.flushed),
        })
    });
    value!({
        "number": end.number,
        "direction": end.direction.word(),
        "communicator": end.comm.map(|id| format!("{id:#x}")),
        "peer": {
            "host": end.peer_host, "pid": end.peer_pid,
            "device": end.peer_device, "address": end.peer_addr,
        },
        "seconds_since_connected": ago(end.ready),
        "state": end.state.name(),
        "waits": waits,
        "messages": end.messages,
        "bytes": end.bytes,
        "receives_posted": end.receives,
        "receives_completed": end.completed,
        "posts": end.posts(),
        "sent_again": end.again,
        "shortened": end.shortened,
        "flushes": {
            "begun": end.flushes, "completed": end.flushed,
            "by_driver": end.driver_flushes, "nothing_to_do": end.skipped_flushes,
        },
        "memory": {
            "handles": end.registered, "bytes": end.registered_bytes,
            "bounced_handles": end.bounced, "bounced_bytes": end.bounced_bytes,
            "bytes_copied": end.copied_bytes, "chunks_in_use": end.chunks,
        },
        "rails": end.rails.iter().map(of_rail).collect::<Vec<_>>(),
        "latency": end.latencies.iter().map(|latency| of_latency(status, latency)).collect::<Vec<_>>(),
        "error": end.error.as_ref().map(|error| value!({
            "seconds_ago": ago(error.at),
            "message": error.message,
            "blame": if error.of_peer { "peer" } else { "this side" },
            "errno": error.errno,
        })),
    })
}

fn of_rail(rail: &Rail) -> Value {
    value!({
        "device": rail.name,
        "megabits_per_second": rail.speed,
        "queue_pairs": rail.lanes,
        "queue_pairs_given_up": rail.stopped,
        "bytes": rail.bytes,
        "posts": rail.posts,
    })
}

fn of_latency(status: &Status, latency: &Latency) -> Value {
    let nanos = |ticks: Option<u64>| {
        ticks.filter(|_| latency.count() > 0).and_then(|ticks| status.nanos(ticks))
    };
    let buckets = latency.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
    value!({
        "of": latency.stage.name(),
        "samples": latency.count(),
        "p50_nanoseconds": nanos(latency.quantile(500)),
        "p99_nanoseconds": nanos(latency.quantile(990)),
        "max_nanoseconds": nanos(Some(latency.most)),
        // The end of each bucket that is not empty, in ticks, and its count.
        "buckets": buckets.map(|(at, count)| value!([bound(at), count])).collect::<Vec<_>>(),
    })
}
