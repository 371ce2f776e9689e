//! From what was asked, what the machine says and what a probe found to a verdict.
//!
//! The errno chooses the questions. A rule that names a cause states the figures that make it so; where figures
//! contradict each other the probe, which is what the kernel did a moment ago, outweighs what was read.

use super::facts::{Facts, Quota};
use super::failure::{Failure, access_names};
use super::probe::Probe;
use super::remedy;
use super::verdict::{Cause, Confidence, Verdict};
use crate::host::amount;
use crate::host::placement::Place;
use crate::memory::RegionKind;
use crate::memory::page::page_size;
use Confidence::{Certain, Likely, Possible};

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

pub(super) fn verdict(
    cause: Cause,
    confidence: Confidence,
    evidence: Vec<String>,
    remedy: String,
) -> Verdict {
    Verdict { cause, confidence, evidence, remedy }
}

impl Case<'_> {
    pub(super) fn quota(&self) -> Quota {
        Quota::of(self.failure, self.facts)
    }

    pub(super) fn host(&self) -> bool {
        self.facts.is_host_memory(self.failure)
    }

    pub(super) fn unknown(&self) -> Verdict {
        let why = match self.facts.available() {
            Some((_, all)) => format!("{}; {} of memory to be had", self.quota_text(), amount(all)),
            None => self.quota_text(),
        };
        verdict(Cause::Unknown, Possible, vec![why], remedy::unknown())
    }

    /// Whether fresh memory registers: one page of it, and as much as was asked for.
    pub(super) fn fresh(&self) -> (Option<bool>, Option<bool>) {
        let tried = |trial: Option<super::Trial>| trial.map(|trial| trial.worked());
        self.probe.map_or((None, None), |probe| (tried(probe.page), tried(probe.fresh)))
    }

    /// The quota's figures in words.
    pub(super) fn quota_text(&self) -> String {
        let quota = self.quota();
        let page = page_size() as u64;
        let Some(limit) = quota.limit else { return "memory lock limit unlimited".into() };
        let pinned = quota.pinned.map_or_else(|| "unknown".into(), amount);
        let source = if quota.counted_here { "registered by this process" } else { "VmPin" };
        let exempt = match quota.exempt {
            Some(true) => "; CAP_IPC_LOCK exempts the process",
            Some(false) => "",
            None => "; whether CAP_IPC_LOCK exempts the process is unknown",
        };
        let request = match quota.pages.saturating_mul(page) {
            0 => ", to which this request adds nothing,".to_owned(),
            bytes => format!(" and this request {}", amount(bytes)),
        };
        format!(
            "pinned before {pinned} ({source}){request} against a memory lock limit of {}{exempt}",
            amount(limit),
        )
    }

    /// The kernel's rule.
    pub(super) fn memlock(&self) -> Option<Verdict> {
        let quota = self.quota();
        if quota.refuses(quota.pages) != Some(true) {
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

    /// Limits on the number of registrations.
    pub(super) fn exhausted(&self) -> Option<Verdict> {
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
        let why = format!("this process has {live} registrations, the device allows {max}");
        Some(verdict(Cause::DeviceLimit, confidence, vec![why], remedy::fewer_regions()))
    }

    pub(super) fn control_group(&self) -> Option<Verdict> {
        let device = self.failure.device.split(':').next().unwrap_or_default();
        let found = self.facts.cgroup.refuses_registrations(device)?;
        let why = format!(
            "{} of {device} in control group {}: {} of {} in use",
            found.resource,
            found.group,
            found.current.unwrap_or(0),
            found.max.unwrap_or(0)
        );
        Some(verdict(Cause::DeviceLimit, Certain, vec![why], remedy::control_group(found)))
    }

    /// EAGAIN comes from the control group, ENOSPC from a device without a free key.
    fn refused_by_device(&self) -> Verdict {
        if let Some(found) = self.exhausted() {
            return found;
        }
        if self.failure.errno == libc::ENOSPC {
            let live = self.failure.live.regions;
            let why =
                vec![format!("the device has no room; this process has {live} registrations")];
            return verdict(Cause::DeviceLimit, Likely, why, remedy::fewer_regions());
        }
        self.unknown()
    }
}
