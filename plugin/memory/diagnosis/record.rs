//! A diagnosis as JSON: everything that was asked, read and tried, under stable keys.
//!
//! `docs/registration.md` describes the keys. What is not known is null. Addresses and identifiers are hexadecimal text,
//! because many readers of JSON keep numbers as floating point.

use super::facts::{Facts, Quota};
use super::failure::{Failure, access_names};
use super::probe::{Cut, Probe, Trial};
use super::report::Report;
use crate::host::limits::Limit;
use crate::host::placement::Place;
use crate::memory::page::page_size;
use serde_json::{Map, Value, json};
use std::io;
use std::time::UNIX_EPOCH;

/// Raised when a key changes its meaning or goes away.
pub const SCHEMA_VERSION: u32 = 1;

impl Report {
    /// The whole record.
    pub fn json(&self) -> Value {
        let facts = &self.facts;
        let verdict = &self.verdict;
        let time = self.time.duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs_f64());
        json!({
            "schema": "pinrail-registration",
            "schema_version": SCHEMA_VERSION,
            "plugin_version": env!("CARGO_PKG_VERSION"),
            "unix_time": time,
            "pid": std::process::id(),
            "host": crate::records::hostname(),
            "verdict": {
                "cause": verdict.cause.word(),
                "confidence": verdict.confidence.word(),
                "evidence": verdict.evidence,
                "remedy": verdict.remedy,
            },
            "request": request(&self.failure),
            "device": device(&self.failure),
            "memlock": memlock(&self.failure, facts),
            "process": process(facts),
            "control_group": control_group(facts),
            "memory": {
                "total_bytes": facts.meminfo.total,
                "free_bytes": facts.meminfo.free,
                "available_bytes": facts.meminfo.available,
                "mlocked_bytes": facts.meminfo.mlocked,
                "cma_total_bytes": facts.meminfo.cma_total,
                "cma_free_bytes": facts.meminfo.cma_free,
            },
            "kernel": {
                "release": facts.release,
                "architecture": facts.architecture,
                "command_line": facts.cmdline.as_ref().map(|line| {
                    let given = line.given().into_iter();
                    given.map(|(name, value)| (name.to_owned(), Value::from(value))).collect::<Map<_, _>>()
                }),
            },
            "placement": placement(facts, &self.places),
            "range": range(facts),
            "gpu": gpu(facts),
            "probe": self.probe.as_ref().map(probe),
        })
    }
}

fn hex(number: u64) -> String {
    format!("{number:#x}")
}

fn error(errno: i32) -> String {
    io::Error::from_raw_os_error(errno).to_string()
}

fn request(f: &Failure) -> Value {
    json!({
        "verb": f.verb,
        "errno": f.errno,
        "error": error(f.errno),
        "access": hex(f.access.into()),
        "access_names": access_names(f.access),
        "optional_flags_demanded": f.optional_demanded,
        "retry_without_optional_flags": f.retry.map(|retry| json!({
            "verb": retry.verb,
            "access": hex(retry.access.into()),
            "errno": retry.errno,
            "error": retry.errno.map(error),
        })),
        "address": hex(f.address),
        "length": f.length,
        "pages": f.pages(),
        "page_size": page_size(),
        "pointer": f.kind_word(),
        "fd": f.fd,
        "offset": f.fd.map(|_| f.offset),
        "held": f.held,
        "direction": f.direction.map(|direction| direction.word()),
        "peer": f.peer,
        "comm": f.comm.map(hex),
        // The protocol of the collective is not known to a network plugin.
        "protocol": null,
        // Every registration of memory by address pins long-term; the exporter of a DMA-BUF pins for it.
        "long_term": if f.fd.is_some() { "exporter" } else { "yes" },
    })
}

fn device(f: &Failure) -> Value {
    json!({
        "name": f.device,
        "max_mr": f.limits.max_mr,
        "max_mr_size": f.limits.max_mr_size,
        "live_regions": f.live.regions,
        "live_bytes": f.live.bytes,
        "peak_regions": f.live.peak_regions,
        "peak_bytes": f.live.peak_bytes,
    })
}

/// A side of a limit: bytes, or the word for none.
fn side(side: Option<u64>) -> Value {
    side.map_or_else(|| "unlimited".into(), Value::from)
}

fn memlock(f: &Failure, facts: &Facts) -> Value {
    let Limit { soft, hard } = facts.memlock;
    let quota = Quota::of(f, facts);
    json!({
        "soft": side(soft),
        "hard": side(hard),
        "vm_pin_bytes": facts.status.pinned,
        "own_pinned_bytes": f.own_pinned,
        "used_bytes": quota.pinned,
        "used_source": quota.pinned.map(|_| if quota.counted_here { "own" } else { "vm_pin" }),
        "request_bytes": quota.pages.saturating_mul(page_size() as u64),
        "exempt": quota.exempt,
        "refuses": quota.refuses(quota.pages),
    })
}

fn process(facts: &Facts) -> Value {
    json!({
        "vm_lck_bytes": facts.status.locked,
        "vm_rss_bytes": facts.status.resident,
        "cap_ipc_lock": facts.status.ipc_lock(),
        "own_user_namespace": facts.container.own_user_namespace,
        "in_container": facts.container.inside(),
        "container_runtime": facts.container.runtime,
        "control_group": facts.container.cgroup,
    })
}

fn control_group(facts: &Facts) -> Value {
    let rdma: Vec<Value> = facts
        .cgroup
        .rdma
        .iter()
        .map(|item| {
            json!({
                "group": item.group,
                "device": item.device,
                "resource": item.resource,
                "current": item.current,
                "max": side(item.max),
            })
        })
        .collect();
    let ram = facts.cgroup.ram.as_ref().map(|ram| {
        json!({
            "group": ram.group,
            "current_bytes": ram.current,
            "file_cache_bytes": ram.file_cache,
            "max_bytes": ram.max,
        })
    });
    json!({ "rdma": rdma, "memory": ram })
}

fn placement(facts: &Facts, places: &[(u64, u64, Place)]) -> Value {
    let bytes = |pages: Option<u64>| pages.map(|pages| pages.saturating_mul(page_size() as u64));
    let pages: Vec<Value> = places
        .iter()
        .map(|(address, pfn, place)| {
            let (zone, area, migratetype) = match place {
                Place::MovableZone => (Some("Movable"), None, None),
                Place::Cma(area) => (None, Some(area), Some("cma")),
                Place::Zone(zone) => (Some(zone.as_str()), None, None),
            };
            json!({
                "address": hex(*address),
                "frame": hex(*pfn),
                "zone": zone,
                "cma_area": area,
                "migratetype": migratetype,
            })
        })
        .collect();
    json!({
        "risk": facts.risk,
        "zone_movable_bytes": bytes(facts.zones.movable()),
        "zone_cma_bytes": bytes(facts.zones.cma()),
        "zone_cma_free_bytes": bytes(facts.zones.free_cma()),
        "cma_page_block_bytes": bytes(facts.cma_in_blocks),
        "pages": pages,
    })
}

fn range(facts: &Facts) -> Value {
    facts.range.as_ref().map_or(Value::Null, |range| {
        let mapping = range.mapping.as_ref();
        json!({
            "mappings": range.mappings,
            "permissions": mapping.map(|mapping| &mapping.permissions),
            "path": mapping.map(|mapping| &mapping.path),
            "filesystem": range.filesystem,
            "unmapped_at": range.unmapped.map(hex),
            "read_only_at": range.read_only.map(hex),
        })
    })
}

fn gpu(facts: &Facts) -> Value {
    let windows: Vec<Value> = facts
        .bar1
        .iter()
        .map(|bar1| json!({ "gpu": bar1.gpu, "total_bytes": bar1.total, "used_bytes": bar1.used }))
        .collect();
    let module = match facts.peermem {
        Some(name) => name.into(),
        None if facts.modules_visible => "none".into(),
        None => Value::Null,
    };
    json!({
        "driver": facts.nvidia.as_ref().map(|driver| json!({
            "version": driver.version,
            "branch": driver.branch,
            "flavour": driver.flavour(),
            "host_pin_long_term": facts.cuda_long_term().map(|long_term| long_term.word()),
        })),
        "pointer": facts.pointer.as_ref().map(|pointer| json!({
            "kind": pointer.kind.word(),
            "managed": pointer.managed,
            "classic_allocation": pointer.classic,
            "allocation_start": pointer.allocation.map(|(start, _)| hex(start)),
            "allocation_bytes": pointer.allocation.map(|(_, bytes)| bytes),
            "pci_bus_id": pointer.pci_bus_id,
        })),
        "bar1": windows,
        "peer_memory_module": module,
        "dmabuf": facts.dmabuf.as_ref().map(|info| json!({
            "exporter": info.exporter,
            "size_bytes": info.size,
        })),
        "descriptor_open": facts.descriptor_open,
    })
}

fn probe(found: &Probe) -> Value {
    let trial = |trial: Option<Trial>| {
        trial.map(|trial| json!({ "length": trial.length, "errno": trial.errno, "worked": trial.worked() }))
    };
    json!({
        "fresh_page": trial(found.page),
        "fresh_range": trial(found.fresh),
        "same_range": trial(found.again),
        "failing_from": found.narrowed.map(|(start, _)| hex(start)),
        "failing_to": found.narrowed.map(|(_, end)| hex(end)),
        "first_failing_page": found.bad.map(|bad| hex(bad.first)),
        "last_failing_page": found.bad.and_then(|bad| bad.last).map(hex),
        "failing_pages": found.bad.map(|bad| bad.count),
        "failing_pages_exact": found.bad.map(|bad| bad.exact),
        "fails_only_as_a_whole": found.only_whole,
        "no_fresh_memory": found.no_memory,
        "registrations": found.registrations,
        "elapsed_us": u64::try_from(found.elapsed.as_micros()).unwrap_or(u64::MAX),
        "cut_short_by": found.cut_short.map(Cut::words),
    })
}
