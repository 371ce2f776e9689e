//! A diagnosis: how it is made, and its line for the log.

use super::facts::{Facts, Machine};
use super::failure::{Failure, access_names};
use super::probe::{Bounds, Candidate, Probe, probe};
use super::rules::{Case, judge};
use super::verdict::{Cause, Verdict};
use crate::config::printable;
use crate::host::amount;
use crate::host::placement::Place;
use crate::log::one_line;
use crate::memory::RegionKind;
use std::io;
use std::time::SystemTime;

/// A failed registration, explained.
#[derive(Clone, Debug)]
pub struct Report {
    pub(super) failure: Failure,
    pub(super) facts: Facts,
    pub(super) probe: Option<Probe>,
    pub(super) places: Vec<(u64, u64, Place)>,
    pub(super) verdict: Verdict,
    pub(super) time: SystemTime,
}

/// Explains a failure. For ENOMEM a few registrations are tried: `register` makes one on the same device with the same
/// access, and returns a guard whose drop ends it, or an errno. `thorough`: the pages that fail are looked for too, which
/// takes many more and is worth it once for each device ([`super::Reporter::knows`]); the cause is found without.
pub fn diagnose<G>(
    machine: &Machine,
    failure: Failure,
    thorough: bool,
    register: impl FnMut(Candidate<'_>) -> Result<G, i32>,
) -> Report {
    let time = SystemTime::now();
    let facts = Facts::gather(machine, &failure);
    let wanted = failure.errno == libc::ENOMEM && !failure.retry_worked();
    let probe = wanted.then(|| {
        let (start, end) = failure.pages_range();
        let range = (failure.kind == RegionKind::Host).then_some((start, end));
        let bounds = Bounds { pages: thorough, ..bounds(&facts) };
        probe(end - start, range, bounds, register)
    });
    let ends = probe.as_ref().and_then(|probe| probe.bad).map(|bad| (bad.first, bad.last));
    let mut addresses: Vec<u64> =
        ends.into_iter().flat_map(|(first, last)| [Some(first), last]).flatten().collect();
    addresses.dedup();
    let places: Vec<(u64, u64, Place)> = addresses
        .into_iter()
        .filter_map(|address| {
            let (pfn, place) = facts.place(machine, address)?;
            Some((address, pfn, place))
        })
        .collect();
    let verdict =
        judge(Case { failure: &failure, facts: &facts, probe: probe.as_ref(), places: &places });
    Report { failure, facts, probe, places, verdict, time }
}

/// A machine that is short of memory is not asked for much more.
fn bounds(facts: &Facts) -> Bounds {
    let usual = Bounds::default();
    let spare = facts.available().map_or(usual.bytes as u64, |(_, all)| all / 8);
    Bounds { bytes: usize::try_from(spare).unwrap_or(usize::MAX).min(usual.bytes), ..usual }
}

impl Report {
    /// The verdict.
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// What failed.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }

    /// Whether data of this buffer may go through memory that registers: it is host memory, and the only thing wrong
    /// with it is where it lies. Memory that was `set_aside` before helps against whatever keeps the kernel from giving
    /// more.
    pub fn bounce_may_help(&self, set_aside: bool) -> bool {
        let helps = match self.verdict.cause {
            Cause::Placement => true,
            Cause::BadAddress => false,
            _ => set_aside && self.failure.errno == libc::ENOMEM,
        };
        helps && self.facts.is_host_memory(&self.failure)
    }

    /// Whether the same range registered when it was tried again, so that the caller may do so too.
    pub fn transient(&self) -> bool {
        self.probe.as_ref().and_then(|probe| probe.again).is_some_and(|again| again.worked())
    }

    /// What failed, the verdict and its figures, and the remedy, as one line without a full stop at the end. The most
    /// important comes first and the whole stays short, because NCCL's logger cuts what is longer than a kilobyte.
    pub fn line(&self) -> String {
        let f = &self.failure;
        format!(
            "{} on {} failed: {}. Verdict: {} ({}): {}. Remedy: {}",
            f.verb,
            printable(&f.device),
            io::Error::from_raw_os_error(f.errno),
            self.verdict.cause.word().replace('_', " "),
            self.verdict.confidence.word(),
            one_line(&self.evidence()),
            one_line(&self.verdict.remedy),
        )
    }

    /// As many of the figures as make a readable line; the record has them all.
    fn evidence(&self) -> String {
        const ENOUGH: usize = 360;
        let mut text = String::new();
        for figure in &self.verdict.evidence {
            if !text.is_empty() && text.len() + figure.len() > ENOUGH {
                text.push_str("; …");
                break;
            }
            let comma = if text.is_empty() { "" } else { "; " };
            text.extend([comma, figure]);
        }
        text
    }

    /// What was asked for, in the words of the log.
    pub fn asked(&self) -> String {
        let f = &self.failure;
        let kind = match f.kind {
            RegionKind::Host => "host memory",
            RegionKind::Cuda => "GPU memory",
            RegionKind::DmaBuf => "DMA-BUF",
        };
        let pages = f.pages();
        let plural = if pages == 1 { "" } else { "s" };
        let towards = match (f.direction, &f.peer) {
            (None, None) => String::new(),
            (direction, peer) => {
                let word = direction.map_or("connection", |direction| direction.word());
                let peer =
                    peer.as_ref().map_or_else(String::new, |p| format!(", {}", printable(p)));
                format!(", for {word}{peer}")
            }
        };
        let second = f.retry.map_or_else(String::new, |retry| {
            let outcome = match retry.errno {
                None => "works".into(),
                Some(errno) => format!("fails: {}", io::Error::from_raw_os_error(errno)),
            };
            format!("; {} without optional flags {outcome}", retry.verb)
        });
        format!(
            "{} ({pages} page{plural}) at {:#x}, {kind}, access {}{towards}{second}",
            amount(f.length),
            f.address,
            access_names(f.access),
        )
    }
}
