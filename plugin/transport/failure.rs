//! Why a connection failed: the line that its end logs, and the record for those who come later.
//!
//! A failed queue pair completes everything that was posted to it. One of those completions has the reason, the others
//! are flushed; they are counted and not told. Of a completion in error only identifier, status and vendor code are
//! defined, so what the work request was comes from what was posted.

use super::comm::Peer;
use super::pace::Age;
use crate::clock;
use crate::config::Settings;
use crate::error::{Blame, Error};
use crate::memory::status::{self, Status};
use crate::records::{Records, hostname};
use crate::verbs::cq::{Completion, status_name};
use crate::verbs::event::event_name;
use crate::verbs::wr::{Local, Remote};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Records that one process writes: a job that fails for ever must not fill a disk.
const MOST_RECORDS: u32 = 64;
/// Time from one record of the status to the next, where failures cause them.
const BETWEEN: Duration = Duration::from_secs(1);
/// Raised when a key of the record changes its meaning or goes away.
const SCHEMA_VERSION: u32 = 1;

/// What failures of all connections of a process are told with.
#[derive(Debug, Default)]
pub struct Failures {
    records: Records,
    number: AtomicU32,
    /// Records of the status so far, and when the last one of a failure was, in nanoseconds.
    statuses: AtomicU32,
    last_status: AtomicU64,
    timeout: u8,
    retries: u8,
    /// How long the other end may take to answer when a rail failed.
    pub(super) answer: Duration,
}

impl Failures {
    /// As the settings want it.
    pub fn from_settings(settings: &Settings) -> Arc<Self> {
        Arc::new(Self {
            records: Records::new(settings.report_dir.clone()),
            timeout: settings.timeout,
            retries: settings.retry_cnt,
            answer: settings.failover_timeout,
            ..Self::default()
        })
    }

    /// How long a device tries before it gives up, in words.
    pub(super) fn patience(&self) -> String {
        let Self { timeout, retries, .. } = self;
        let names = format!("NCCL_IB_TIMEOUT={timeout}, NCCL_IB_RETRY_CNT={retries}");
        let attempts = u32::from(*retries) + 1;
        match ack_timeout(*timeout) {
            Some(one) => {
                let (one, all) = (one.as_secs_f64(), (one * attempts).as_secs_f64());
                format!(
                    "{attempts} attempts, {one:.3} s each or longer, {all:.1} s in all ({names})"
                )
            }
            None => format!("{attempts} attempts ({names})"),
        }
    }

    /// Writes down the status of all connections. Where many fail at once, one record tells of all.
    pub(super) fn record_status_once(&self) {
        let (now, last) = (clock::nanos(), self.last_status.load(Ordering::Relaxed));
        let due = last == 0 || now.saturating_sub(last) >= BETWEEN.as_nanos() as u64;
        let mine = due
            && self
                .last_status
                .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if mine && self.statuses.load(Ordering::Relaxed) < MOST_RECORDS {
            self.record_status();
        }
    }

    /// Writes down the status of all connections.
    pub(super) fn record_status(&self) {
        if !self.records.are_wanted() {
            return;
        }
        let Some(file) = status::file() else { return };
        let number = self.statuses.fetch_add(1, Ordering::Relaxed);
        let read = file.file().try_clone().map_err(|e| e.to_string());
        match read.and_then(|file| Status::read(&file.into())) {
            Ok(status) => drop(self.records.write("status", number, &status::json(&status))),
            Err(reason) => tracing::info!("no record of the status: {reason}"),
        }
    }

    /// Writes the record of a failure.
    pub(super) fn record(&self, error: &Error, peer: &Peer, broken: Option<&Broken>) {
        if !self.records.are_wanted() {
            return;
        }
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        if number < MOST_RECORDS {
            self.records.write("connection", number, &self.json(error, peer, broken));
        }
    }

    fn json(&self, error: &Error, peer: &Peer, broken: Option<&Broken>) -> Value {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        json!({
            "schema": "pinrail-connection",
            "schema_version": SCHEMA_VERSION,
            "plugin_version": env!("CARGO_PKG_VERSION"),
            "unix_time": time.map(|time| time.as_secs_f64()),
            "pid": std::process::id(),
            "host": hostname(),
            "message": error.to_string(),
            "blame": if error.blame() == Blame::Remote { "peer" } else { "this side" },
            "errno": error.errno(),
            "device": peer.local,
            "peer": {
                "host": peer.host,
                "pid": peer.pid,
                "device": peer.device,
                "address": peer.addr,
            },
            "settings": { "NCCL_IB_TIMEOUT": self.timeout, "NCCL_IB_RETRY_CNT": self.retries },
            "completion": broken.map(Broken::json),
        })
    }
}

/// How long a device waits for one acknowledgement, at least. `None`: for ever.
fn ack_timeout(exponent: u8) -> Option<Duration> {
    let nanos = 4096_u64.checked_shl(exponent.into())?;
    (exponent != 0).then(|| Duration::from_nanos(nanos))
}

/// A work request as it was posted, as far as is known.
#[derive(Clone, Debug, Default)]
pub struct Work {
    /// What it was for: `send of receive 17`.
    pub what: String,
    /// The receive that it belongs to, counted from 0.
    pub number: Option<u32>,
    /// The memory on this side.
    pub local: Option<Local>,
    /// The memory on the peer's side, or for a flush this side's.
    pub remote: Option<Remote>,
    /// The queue pair, with both its ends.
    pub way: String,
}

/// One completion in error.
#[derive(Clone, Copy, Debug)]
pub struct Reason {
    /// The work request's identifier.
    pub id: u64,
    status: u32,
    vendor: u32,
}

/// What a failed queue pair gave back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Given {
    cause: Option<Reason>,
    flushed: Option<Reason>,
    flushes: u32,
}

impl Given {
    /// Takes note of one completion.
    pub fn add(&mut self, wc: Completion<'_>) {
        let reason = Reason { id: wc.id(), status: wc.status(), vendor: wc.vendor_err() };
        if wc.is_flush() {
            self.flushes += 1;
            self.flushed.get_or_insert(reason);
        } else if !wc.is_success() {
            self.cause.get_or_insert(reason);
        }
    }

    /// The reason: the first completion in error that was not just flushed, or else the first that was.
    pub fn reason(&self) -> Option<Reason> {
        self.cause.or(self.flushed)
    }

    /// How many were flushed.
    pub fn flushes(&self) -> u32 {
        self.flushes
    }
}

/// A work request that failed, and what else was under way.
#[derive(Clone, Debug)]
pub struct Broken {
    /// The completion.
    pub reason: Reason,
    /// What was posted.
    pub work: Work,
    /// How long ago.
    pub age: Option<Age>,
    /// What the device reported about the queue, `IBV_EVENT_*`.
    pub event: Option<u8>,
    /// Work requests that were flushed with it.
    pub flushes: u32,
    /// Requests that were not complete.
    pub pending: usize,
}

impl Broken {
    /// The error that ends the connection. The most important comes first and the whole stays short: NCCL's logger cuts
    /// what is longer than a kilobyte.
    pub fn error(&self, peer: &Peer) -> Error {
        let Self { reason: Reason { status, vendor, .. }, work, age, event, flushes, pending } =
            self;
        let name = status_name(*status);
        // What was only flushed has its reason in the event.
        let (hint, blame) = match event.filter(|_| name == "WR_FLUSH_ERR") {
            Some(event) => queue_failed(event),
            None => (hint(name, &peer.failures), blame(name)),
        };
        let age = age.map_or_else(String::new, |age| format!(", posted {age},"));
        let mut text = format!(
            "{peer}: {}{age} completed with IBV_WC_{name} (status {status}, vendor code {vendor:#x}): {hint}",
            work.what
        );
        if let Some(Local { addr, len, lkey }) = work.local {
            text += &format!("; {len} bytes at {addr:#x} with key {lkey:#x}");
        }
        if let Some(Remote { addr, rkey }) = work.remote {
            text += &format!("; the other side's {addr:#x} with key {rkey:#x}");
        }
        text += &format!(
            "; {}; {pending} requests not complete, {flushes} work requests flushed",
            work.way
        );
        Error::new(blame, text)
    }

    fn json(&self) -> Value {
        let Self { reason: Reason { status, vendor, .. }, work, age, event, flushes, pending } =
            self;
        json!({
            "event": event.map(|event| format!("IBV_EVENT_{}", event_name(event.into()))),
            "status": format!("IBV_WC_{}", status_name(*status)),
            "status_code": status,
            "vendor_code": vendor,
            "work": work.what,
            "posted_seconds_ago": age.map(|age| json!({
                "at_least": age.least.as_secs_f64(),
                "at_most": age.most.as_secs_f64(),
            })),
            "queue_pair": work.way,
            "local": work.local.map(|local| json!({
                "address": format!("{:#x}", local.addr),
                "bytes": local.len,
                "key": format!("{:#x}", local.lkey),
            })),
            "remote": work.remote.map(|remote| json!({
                "address": format!("{:#x}", remote.addr),
                "key": format!("{:#x}", remote.rkey),
            })),
            "requests_not_complete": pending,
            "work_requests_flushed": flushes,
        })
    }
}

/// What an event of a queue means for its connection.
pub(super) fn queue_failed(event: u8) -> (String, Blame) {
    let name = event_name(event.into());
    let (why, blame) = match name {
        "QP_REQ_ERR" => ("the peer sent an invalid request", Blame::Remote),
        "QP_ACCESS_ERR" => (
            "the peer wrote to memory that is not registered for it: it was deregistered or freed with a receive in \
             flight, or the peer is broken",
            Blame::Remote,
        ),
        "CQ_ERR" => (
            "a completion queue overran, which never should happen; please report this",
            Blame::System,
        ),
        _ => ("the device ended a queue; look at the kernel log", Blame::System),
    };
    (format!("{why} (IBV_EVENT_{name})"), blame)
}

fn blame(status: &str) -> Blame {
    match status {
        "RETRY_EXC_ERR" | "RNR_RETRY_EXC_ERR" | "REM_ACCESS_ERR" | "REM_INV_REQ_ERR"
        | "REM_INV_RD_REQ_ERR" | "REM_OP_ERR" | "REM_ABORT_ERR" | "RESP_TIMEOUT_ERR" => {
            Blame::Remote
        }
        _ => Blame::System,
    }
}

/// What this status means here, and what to look at.
fn hint(status: &str, failures: &Failures) -> String {
    let text = match status {
        "LOC_LEN_ERR" => "the device takes no message of this length",
        "LOC_QP_OP_ERR" | "LOC_EEC_OP_ERR" => {
            "the device found the work request or its queue pair inconsistent; please report this"
        }
        "LOC_PROT_ERR" | "LOC_ACCESS_ERR" => {
            "the memory on this side is not registered any more, or a bridge (ACS, IOMMU) denies the device access"
        }
        "WR_FLUSH_ERR" => {
            "the queue pair had failed before without a reason of its own: an event of the device, or the peer's \
             request was refused"
        }
        "MW_BIND_ERR" => "memory windows are not used here; please report this",
        "BAD_RESP_ERR" => "the peer's device answered out of turn; compare the firmware of both",
        "REM_INV_REQ_ERR" => {
            "the peer's device refused the request as invalid; compare MTU and firmware of both"
        }
        "REM_ACCESS_ERR" => {
            "the peer's memory is not registered for this: it was deregistered or freed with a receive in flight"
        }
        "REM_OP_ERR" | "REM_ABORT_ERR" => {
            "the peer's device could not carry it out; look at the peer's kernel log"
        }
        "RETRY_EXC_ERR" => {
            return format!(
                "no acknowledgement came in {}: the peer or its port is gone, or packets do not get through (link, \
                 VLAN, GID, MTU, firewall, lossless class)",
                failures.patience()
            );
        }
        "RNR_RETRY_EXC_ERR" => {
            "the peer's queue pair had no receive posted, which pinrail never lets happen; please report this"
        }
        "RESP_TIMEOUT_ERR" => "the peer's device did not answer in time",
        "FATAL_ERR" => "the device failed; look at the kernel log",
        _ => "the driver gives no reason; look at the kernel log",
    };
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(status: u32) -> Broken {
        Broken {
            reason: Reason { id: 0, status, vendor: 0x81 },
            work: Work {
                what: "send of receive 17".into(),
                number: Some(17),
                local: Some(Local { addr: 0x7000, len: 4096, lkey: 0x11 }),
                remote: Some(Remote { addr: 0x9000, rkey: 0x22 }),
                way: "mlx5_0:1 QP 5 to QP 6".into(),
            },
            age: Some(Age { least: Duration::from_secs(34), most: Duration::from_secs(35) }),
            event: None,
            flushes: 3,
            pending: 2,
        }
    }

    fn peer() -> Peer {
        let failures = Arc::new(Failures { timeout: 20, retries: 7, ..Failures::default() });
        Peer {
            local: "mlx5_0:1".into(),
            host: "node7".into(),
            pid: 4711,
            failures,
            ..Peer::default()
        }
    }

    #[test]
    fn every_status_has_a_hint_of_its_own_and_fits_into_a_line() {
        for status in 1..=24 {
            let error = broken(status).error(&peer());
            let text = error.to_string();
            let name = status_name(status);
            for part in [
                "node7",
                "send of receive 17, posted 34 to 36 s ago, completed",
                name,
                "0x81",
                "4096 bytes at 0x7000",
                "QP 5",
                "3 work",
            ] {
                assert!(text.contains(part), "{text:?} lacks {part:?}");
            }
            assert!(text.len() < 900 && !text.contains('\n'), "{text}");
            // The time that a device tries is told where it ran out, and nowhere else.
            assert_eq!(text.contains("NCCL_IB_TIMEOUT"), name == "RETRY_EXC_ERR", "{text}");
        }
        let error = broken(12).error(&peer());
        assert_eq!(error.blame(), Blame::Remote);
        assert!(
            error.to_string().contains("8 attempts, 4.295 s each or longer, 34.4 s in all"),
            "{error}"
        );
        assert_eq!(broken(4).error(&peer()).blame(), Blame::System);
    }

    #[test]
    fn an_event_explains_what_was_only_flushed() {
        let with_event = |status| Broken { event: Some(3), ..broken(status) }.error(&peer());
        let flushed = with_event(5);
        assert_eq!(flushed.blame(), Blame::Remote);
        assert!(flushed.to_string().contains("(IBV_EVENT_QP_ACCESS_ERR)"), "{flushed}");
        assert!(!with_event(12).to_string().contains("IBV_EVENT"));
        for event in 0..=u8::MAX {
            assert!(queue_failed(event).0.contains("IBV_EVENT_"));
        }
    }

    #[test]
    fn timeouts_are_powers_of_two() {
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(1), Some(Duration::from_nanos(8192)));
        assert_eq!(ack_timeout(31), Some(Duration::from_nanos(4096 << 31)));
        let endless = Failures { timeout: 0, retries: 1, ..Failures::default() };
        assert_eq!(endless.patience(), "2 attempts (NCCL_IB_TIMEOUT=0, NCCL_IB_RETRY_CNT=1)");
    }

    #[test]
    fn the_record_has_what_the_line_has() {
        let (broken, peer) = (broken(12), peer());
        let record = peer.failures.json(&broken.error(&peer), &peer, Some(&broken));
        assert_eq!(record["blame"], "peer");
        assert_eq!(record["peer"]["pid"], 4711);
        assert_eq!(record["completion"]["status"], "IBV_WC_RETRY_EXC_ERR");
        assert_eq!(record["completion"]["local"]["bytes"], 4096);
        assert_eq!(record["completion"]["posted_seconds_ago"]["at_least"], 34.0);
        assert_eq!(record["completion"]["remote"]["address"], "0x9000");
        let record = peer.failures.json(&Error::remote("the peer process is gone"), &peer, None);
        assert!(record["completion"].is_null());
    }
}
