//! From what was asked, what the machine says and what a probe found to a verdict.
//!
//! The errno chooses the questions. A rule that names a cause states the figures that make it so; where figures
//! contradict each other the probe, which is what the kernel did a moment ago, outweighs what was read.

use super::facts::{Facts, Quota};
use super::failure::{Failure, access_names};
use super::probe::Probe;
use super::remedy;
use super::verdict::{Cause, Confidence, Verdict};
use crate::cuda::driver::MemoryKind;
use crate::host::amount;
use crate::host::nvidia::LongTerm;
use crate::host::placement::Place;
use crate::memory::RegionKind;
use Confidence::{Certain, Likely, Possible};

/// Memory that the kernel keeps for itself: with less than this beyond the request it is short of memory.
const RESERVE: u64 = 64 << 20;

/// Everything a verdict rests on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case<'a> {
    pub failure: &'a Failure,
    pub facts: &'a Facts,
    pub probe: Option<&'a Probe>,
    /// Where the first and the last failing page lie: address, page frame, place.
    pub places: &'a [(u64, u64, Place)],
}

/// The verdict on a case.
pub(super) fn judge(case: Case<'_>) -> Verdict {
    let f = case.failure;
    if f.retry_worked() {
        let why = format!(
            "the same range registers without optional flags: {} instead of {}",
            f.retry.map_or_else(String::new, |retry| access_names(retry.access)),
            access_names(f.access)
        );
        return verdict(Cause::AccessFlags, Certain, vec![why], remedy::access_flags(f));
    }
    if let Some(max) = f.limits.max_mr_size.filter(|max| *max > 0 && f.length > *max) {
        let why =
            format!("{} is more than the device's limit of {}", amount(f.length), amount(max));
        return verdict(Cause::DeviceLimit, Certain, vec![why], remedy::smaller_regions());
    }
    match f.errno {
        libc::ENOMEM => case.out_of_memory(),
        libc::EFAULT => case.bad_address(),
        libc::EINVAL => case.invalid(),
        libc::EBADF if f.kind == RegionKind::DmaBuf => case.dmabuf_descriptor(),
        libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS => case.unsupported(),
        // A limit of 0 is refused before anything is counted.
        libc::EPERM if case.facts.memlock.soft == Some(0) => {
            case.memlock().unwrap_or_else(|| case.unknown())
        }
        libc::EAGAIN | libc::ENOSPC => case.refused_by_device(),
        _ => case.unknown(),
    }
}

fn verdict(cause: Cause, confidence: Confidence, evidence: Vec<String>, remedy: String) -> Verdict {
    Verdict { cause, confidence, evidence, remedy }
}

/// The name of a mapping.
fn name_of(path: &str) -> &str {
    if path.is_empty() { "anonymous memory" } else { path }
}

impl Case<'_> {
    fn quota(&self) -> Quota {
        Quota::of(self.failure, self.facts)
    }

    fn host(&self) -> bool {
        self.failure.kind == RegionKind::Host
    }

    fn unknown(&self) -> Verdict {
        let why = match self.facts.available() {
            Some((_, all)) => format!("{}; {} of memory to be had", self.quota_text(), amount(all)),
            None => self.quota_text(),
        };
        verdict(Cause::Unknown, Possible, vec![why], remedy::unknown())
    }

    /// Whether fresh memory registers: one page of it, and as much as was asked for.
    fn fresh(&self) -> (Option<bool>, Option<bool>) {
        let tried = |trial: Option<super::Trial>| trial.map(|trial| trial.worked());
        self.probe.map_or((None, None), |probe| (tried(probe.page), tried(probe.fresh)))
    }

    fn out_of_memory(&self) -> Verdict {
        // A limit that one page of fresh memory meets as well, and one that only the size meets.
        let by_size = || self.memlock().or_else(|| self.short_of_memory());
        let by_number =
            || self.memlock().or_else(|| self.exhausted()).or_else(|| self.short_of_memory());
        match self.fresh() {
            (Some(true), Some(true)) if !self.host() => self.gpu_memory(),
            (Some(true), Some(true)) if self.capped() => {
                self.memlock().unwrap_or_else(|| self.this_memory())
            }
            (Some(true), Some(true)) => self.this_memory(),
            (Some(true), _) => by_size().unwrap_or_else(|| self.device_by_elimination()),
            (Some(false), _) => by_number().unwrap_or_else(|| self.device_by_elimination()),
            (None, _) => by_number().or_else(|| self.risky()).unwrap_or_else(|| self.unknown()),
        }
    }

    /// The probe could not try as much fresh memory as was asked for.
    fn capped(&self) -> bool {
        let tried = self.probe.and_then(|probe| probe.fresh).map_or(0, |trial| trial.length);
        tried < self.failure.length
    }

    /// The kernel's rule, for host memory only: GPU memory does not count.
    fn memlock(&self) -> Option<Verdict> {
        let quota = self.quota();
        if !self.host() || quota.refuses(quota.pages) != Some(true) {
            return None;
        }
        // The rule must say about fresh memory what the kernel did.
        let (page, _) = self.fresh();
        if page.is_some_and(|worked| quota.refuses(1) == Some(worked)) {
            return None;
        }
        let sure = quota.exempt == Some(false) && !quota.counted_here && quota.pinned.is_some();
        let confidence = if sure { Certain } else { Likely };
        let remedy = remedy::memlock(self.facts);
        Some(verdict(Cause::MemlockQuota, confidence, vec![self.quota_text()], remedy))
    }

    /// The quota's figures in words.
    fn quota_text(&self) -> String {
        let quota = self.quota();
        let page = crate::memory::page::page_size() as u64;
        let Some(limit) = quota.limit else { return "memory lock limit unlimited".into() };
        let pinned = quota.pinned.map_or_else(|| "unknown".into(), amount);
        let source = if quota.counted_here { "registered by this process" } else { "VmPin" };
        let exempt = match quota.exempt {
            Some(true) => "; CAP_IPC_LOCK exempts the process",
            Some(false) => "",
            None => "; whether CAP_IPC_LOCK exempts the process is unknown",
        };
        format!(
            "pinned before {pinned} ({source}) and this request {} against a memory lock limit of {}{exempt}",
            amount(quota.pages.saturating_mul(page)),
            amount(limit),
        )
    }

    /// Limits on the number of registrations.
    fn exhausted(&self) -> Option<Verdict> {
        let f = self.failure;
        if let Some(found) = self.control_group() {
            return Some(found);
        }
        let max = f.limits.max_mr.filter(|max| *max > 0)?;
        let live = f.live.regions;
        // Others use the device too, and it keeps some for itself.
        if live < max - max / 10 {
            return None;
        }
        let confidence = if live >= max { Certain } else { Likely };
        let why = format!("this process has {live} registrations on it, the device allows {max}");
        Some(verdict(Cause::DeviceLimit, confidence, vec![why], remedy::fewer_regions()))
    }

    fn control_group(&self) -> Option<Verdict> {
        let device = self.failure.device.split(':').next().unwrap_or_default();
        let found = self.facts.cgroup.exhausted(device)?;
        let why = format!(
            "{} of {device} in control group {}: {} of {} in use",
            found.resource,
            found.group,
            found.current.unwrap_or(0),
            found.max.unwrap_or(0)
        );
        Some(verdict(Cause::DeviceLimit, Certain, vec![why], remedy::control_group(found)))
    }

    /// The kernel has no memory, or none where a registration may lie.
    fn short_of_memory(&self) -> Option<Verdict> {
        if self.probe.is_some_and(|probe| probe.no_memory) {
            let why = "the process gets no fresh memory".to_owned();
            return Some(verdict(Cause::KernelMemory, Likely, vec![why], remedy::kernel_memory()));
        }
        let (outside, all) = self.facts.available()?;
        // The range itself is there already; what the kernel allocates is a few bytes for each of its pages.
        if all < RESERVE + self.failure.length / 64 {
            let mut why = vec![format!("{} of memory to be had", amount(all))];
            why.extend(self.facts.cgroup.ram.as_ref().map(|ram| {
                format!(
                    "control group {} has {} left of {}",
                    ram.group,
                    amount(ram.left()),
                    amount(ram.max)
                )
            }));
            return Some(verdict(Cause::KernelMemory, Likely, why, remedy::kernel_memory()));
        }
        // Pages that have to move need as much again outside; a single page of fresh memory just one.
        let (page, _) = self.fresh();
        let moving = if page == Some(false) { 0 } else { self.failure.length };
        if outside < moving.saturating_add(RESERVE) && self.facts.risk.is_some() && self.host() {
            let mut why = vec![format!(
                "of {} of memory to be had {} lie outside of contiguous areas, so that no page finds a place to move to",
                amount(all),
                amount(outside)
            )];
            why.extend(self.facts.risk.clone());
            return Some(verdict(Cause::Placement, Likely, why, remedy::placement(self.facts)));
        }
        None
    }

    /// Fresh memory fails too, and neither quota nor memory explain it.
    fn device_by_elimination(&self) -> Verdict {
        let quota = self.quota();
        let (page, _) = self.fresh();
        let pages = if page == Some(false) { 1 } else { quota.pages };
        let excluded = quota.refuses(pages) == Some(false) && self.facts.available().is_some();
        if !excluded {
            return self.unknown();
        }
        let (what, confidence) = match page {
            Some(true) => {
                ("one page of fresh memory registers and the same size does not", Possible)
            }
            _ => ("one page of fresh memory does not register either", Likely),
        };
        let live = self.failure.live;
        let mut why = vec![
            what.to_owned(),
            format!(
                "this process has {} registrations on it ({}), at most {} so far",
                live.regions,
                amount(live.bytes),
                live.peak_regions
            ),
            self.quota_text(),
        ];
        why.extend(
            self.facts.available().map(|(_, all)| format!("{} of memory to be had", amount(all))),
        );
        verdict(Cause::DeviceLimit, confidence, why, remedy::fewer_regions())
    }

    /// Fresh host memory registers and this does not.
    fn this_memory(&self) -> Verdict {
        let page = crate::memory::page::page_size() as u64;
        let Some(probe) = self.probe else { return self.unknown() };
        if probe.only_whole {
            let why = vec![
                "each part of the range registers and the whole does not".to_owned(),
                format!("{} pages", self.failure.pages()),
            ];
            return verdict(Cause::DeviceLimit, Possible, why, remedy::smaller_regions());
        }
        if probe.again.is_some_and(|again| again.worked()) {
            let mut why = vec!["the same range registered when it was tried again".to_owned()];
            why.extend(self.facts.risk.clone());
            let risky = self.facts.risk.is_some();
            let cause = if risky { Cause::Placement } else { Cause::Unknown };
            return verdict(cause, Possible, why, remedy::try_again());
        }
        let fresh = probe.fresh.map_or(0, |trial| trial.length);
        let mut why =
            vec![format!("{} of fresh memory register, this memory does not", amount(fresh))];
        if let Some(bad) = probe.bad {
            let last = bad.last.map_or_else(String::new, |last| format!(", last {last:#x}"));
            let least = if bad.exact { "" } else { "at least " };
            let (count, all) = (bad.count, self.failure.pages());
            why.push(format!("{least}{count} of {all} pages fail, first {:#x}{last}", bad.first));
        } else if let Some((start, end)) = probe.narrowed {
            why.push(format!(
                "at least one of the {} pages from {start:#x} on fails ({} reached)",
                (end - start) / page,
                probe.cut_short.unwrap_or("bound")
            ));
        }
        let mut known = false;
        for (address, pfn, place) in self.places {
            let place = match place {
                Place::MovableZone => "ZONE_MOVABLE".to_owned(),
                Place::Cma(area) => format!("the contiguous area {area}"),
                Place::Zone(zone) => format!("zone {zone}, migrate type unknown"),
            };
            known |= !place.starts_with("zone ");
            why.push(format!("the page at {address:#x} is frame {pfn} in {place}"));
        }
        why.extend(self.facts.risk.clone());
        why.extend(self.pinned_by_cuda());
        why.extend(self.facts.release.as_ref().map(|release| format!("kernel {release}")));
        let confidence = match (known, &self.facts.risk, probe.bad) {
            (true, ..) => Certain,
            (false, Some(_), Some(_)) => Likely,
            _ => Possible,
        };
        verdict(Cause::Placement, confidence, why, remedy::placement(self.facts))
    }

    /// What is known of an earlier pin by CUDA.
    fn pinned_by_cuda(&self) -> Option<String> {
        let known = self.facts.pointer.as_ref().is_some_and(|p| p.kind == MemoryKind::Host);
        let driver = self.facts.nvidia.as_ref();
        let says = match self.facts.cuda_long_term()? {
            LongTerm::No => "does not declare its pins of host memory long-term",
            LongTerm::Yes => {
                "declares its pins of host memory long-term, so that another pin holds the page"
            }
            LongTerm::Unknown => "may or may not declare its pins of host memory long-term",
        };
        let who = driver.map_or_else(String::new, |d| format!("{} ({})", d.version, d.flavour()));
        let held = if known { "CUDA knows this memory; " } else { "" };
        Some(format!("{held}NVIDIA driver {who} {says}"))
    }

    /// No probe, but a machine where it happens.
    fn risky(&self) -> Option<Verdict> {
        let quota = self.quota();
        if !self.host() || quota.refuses(quota.pages) != Some(false) {
            return None;
        }
        let mut why = vec![self.facts.risk.clone()?];
        why.extend(self.pinned_by_cuda());
        Some(verdict(Cause::Placement, Possible, why, remedy::placement(self.facts)))
    }

    /// Host memory registers and this GPU memory does not.
    fn gpu_memory(&self) -> Verdict {
        let full = self.facts.bar1.iter().find(|bar1| bar1.free() < self.failure.length);
        let mut why = vec!["host memory registers on this device".to_owned()];
        why.extend(self.facts.bar1.iter().map(|bar1| {
            format!("GPU {}: BAR1 {} used of {}", bar1.gpu, amount(bar1.used), amount(bar1.total))
        }));
        let one = self.facts.bar1.len() == 1;
        let (cause, confidence) = match full {
            Some(_) if one => (Cause::DeviceLimit, Likely),
            Some(_) => (Cause::DeviceLimit, Possible),
            None => return verdict(Cause::Unknown, Possible, why, remedy::unknown()),
        };
        verdict(cause, confidence, why, remedy::bar1())
    }

    fn bad_address(&self) -> Verdict {
        let f = self.failure;
        let device_memory =
            self.facts.pointer.as_ref().is_some_and(|p| p.kind == MemoryKind::Device);
        if f.kind == RegionKind::Cuda || (self.host() && device_memory) {
            return self.gpu_address(device_memory);
        }
        if f.kind == RegionKind::DmaBuf {
            return self.dmabuf_descriptor();
        }
        self.mapping().unwrap_or_else(|| {
            let why = vec![match &self.facts.range {
                Some(range) => format!(
                    "{} mapped there, writable, and refused by the kernel",
                    range.mapping.as_ref().map_or("memory", |m| name_of(&m.path))
                ),
                None => "what is mapped there cannot be read".to_owned(),
            }];
            verdict(Cause::BadAddress, Possible, why, remedy::bad_address())
        })
    }

    /// What the mappings of a host range say against it.
    fn mapping(&self) -> Option<Verdict> {
        let range = self.facts.range.as_ref().filter(|_| self.host())?;
        let path = range.mapping.as_ref().map(|m| m.path.as_str()).unwrap_or_default();
        let (why, confidence) = if let Some(address) = range.unmapped {
            (format!("nothing is mapped at {address:#x}"), Certain)
        } else if let Some(address) = range.read_only {
            (format!("the memory at {address:#x} cannot be written by this process"), Certain)
        } else if path.starts_with("/dev/") && !path.starts_with("/dev/shm/") {
            (format!("{path} is mapped there: memory of a device"), Likely)
        } else if let Some(file) = range.shared_file() {
            (
                format!(
                    "{} is mapped there and shared, which newer kernels do not pin",
                    name_of(file)
                ),
                Likely,
            )
        } else {
            return None;
        };
        Some(verdict(Cause::BadAddress, confidence, vec![why], remedy::bad_address()))
    }

    /// EFAULT for memory that is said, or known, to be a GPU's.
    fn gpu_address(&self, device_memory: bool) -> Verdict {
        let facts = self.facts;
        let mut why = Vec::new();
        if self.host() {
            why.push("passed as host memory, and the CUDA driver says it is a GPU's".to_owned());
        }
        if facts.peermem.is_none() && facts.modules_visible {
            why.push("no peer-memory kernel module (nvidia_peermem) is loaded".to_owned());
            let confidence = if device_memory { Certain } else { Likely };
            return verdict(Cause::PeerMemoryMissing, confidence, why, remedy::peer_memory());
        }
        why.push(format!("peer-memory kernel module {}", facts.peermem.unwrap_or("unknown")));
        let Some(pointer) = &facts.pointer else {
            why.push("no CUDA driver in this process knows the address".to_owned());
            return verdict(Cause::BadAddress, Possible, why, remedy::bad_address());
        };
        why.push(format!("the CUDA driver says {} memory", pointer.kind.word()));
        let f = self.failure;
        let outside = pointer.allocation.is_some_and(|(start, size)| {
            f.address < start || f.address.saturating_add(f.length) > start.saturating_add(size)
        });
        if pointer.kind == MemoryKind::Unknown || outside {
            why.extend(
                pointer.allocation.map(|(start, size)| {
                    format!("its allocation is {} at {start:#x}", amount(size))
                }),
            );
            return verdict(Cause::BadAddress, Likely, why, remedy::bad_address());
        }
        if pointer.managed == Some(true) {
            why.push("managed memory, which moves".to_owned());
            return verdict(Cause::BadAddress, Likely, why, remedy::bad_address());
        }
        if pointer.classic == Some(false) {
            why.push(
                "memory mapped in pieces or from a pool, which the module may not cover".into(),
            );
        }
        verdict(Cause::PeerMemoryMissing, Possible, why, remedy::peer_memory())
    }

    fn invalid(&self) -> Verdict {
        let f = self.failure;
        if f.length == 0 {
            let why = vec!["the range is empty".to_owned()];
            return verdict(Cause::BadAddress, Certain, why, remedy::bad_address());
        }
        if f.kind == RegionKind::DmaBuf
            && let found = self.dmabuf_descriptor()
            && found.cause == Cause::BadAddress
        {
            return found;
        }
        if let Some(found) = self.mapping() {
            return found;
        }
        if f.asked_optional() && f.retry.is_none() {
            let mut why = vec![format!("access flags {}", access_names(f.access))];
            if f.optional_demanded {
                why.push("the settings demand the optional ones, so nothing else was tried".into());
            }
            return verdict(Cause::AccessFlags, Likely, why, remedy::access_flags(f));
        }
        let mut found = self.unknown();
        if f.retry.is_some() {
            found.evidence.insert(0, "it fails without optional access flags too".into());
        }
        found
    }

    /// What is wrong with a DMA-BUF.
    fn dmabuf_descriptor(&self) -> Verdict {
        let f = self.failure;
        let bad = |confidence, why: String| {
            verdict(Cause::BadAddress, confidence, vec![why], remedy::bad_address())
        };
        let fd = f.fd.unwrap_or(-1);
        let Some(info) = &self.facts.dmabuf else {
            return bad(
                if f.errno == libc::EBADF { Certain } else { Likely },
                format!("descriptor {fd} is not open"),
            );
        };
        let Some(exporter) = &info.exporter else {
            return bad(
                Likely,
                format!("descriptor {fd} is no DMA-BUF: the kernel names no exporter"),
            );
        };
        if let Some(size) = info.size.filter(|size| f.offset.saturating_add(f.length) > *size) {
            return bad(
                Certain,
                format!(
                    "{} from offset {} of a DMA-BUF of {}",
                    amount(f.length),
                    f.offset,
                    amount(size)
                ),
            );
        }
        let mut found = self.unknown();
        found.evidence.insert(0, format!("DMA-BUF exported by {exporter}"));
        found
    }

    fn unsupported(&self) -> Verdict {
        let f = self.failure;
        match f.kind {
            RegionKind::DmaBuf => {
                let mut why = vec!["device, kernel or library cannot register DMA-BUFs".to_owned()];
                why.extend(
                    self.facts
                        .dmabuf
                        .as_ref()
                        .and_then(|info| Some(format!("exported by {}", info.exporter.as_ref()?))),
                );
                verdict(Cause::PeerMemoryMissing, Certain, why, remedy::dmabuf())
            }
            _ if f.asked_optional() => {
                let why = vec![format!("access flags {}", access_names(f.access))];
                verdict(Cause::AccessFlags, Likely, why, remedy::access_flags(f))
            }
            RegionKind::Cuda => self.gpu_address(true),
            RegionKind::Host => self.mapping().unwrap_or_else(|| self.unknown()),
        }
    }

    /// EAGAIN comes from the control group, ENOSPC from a device without a free key.
    fn refused_by_device(&self) -> Verdict {
        if let Some(found) = self.exhausted() {
            return found;
        }
        if self.failure.errno == libc::ENOSPC {
            let live = self.failure.live.regions;
            let why = vec![format!(
                "the device has no room; this process has {live} registrations on it"
            )];
            return verdict(Cause::DeviceLimit, Likely, why, remedy::fewer_regions());
        }
        self.unknown()
    }
}
