//! The rules for ENOMEM: whose memory, whose quota or whose limit it is that does not suffice.

use super::probe::Cut;
use super::remedy;
use super::rules::{Case, verdict};
use super::verdict::{Cause, Confidence, Verdict};
use crate::cuda::driver::MemoryKind;
use crate::host::amount;
use crate::host::limits;
use crate::host::nvidia::LongTerm;
use crate::host::placement::Place;
use crate::memory::page::page_size;
use Confidence::{Certain, Likely, Possible};

/// Memory that the kernel keeps for itself: with less than this beyond the request it is short of memory.
const RESERVE: u64 = 64 << 20;

impl Case<'_> {
    pub(super) fn out_of_memory(&self) -> Verdict {
        // A library that keeps marks about forks answers so for what is not mapped. It must never pass for memory that
        // could be reached in another way.
        if let Some(found) = self.mapping().filter(|found| found.confidence == Certain) {
            return found;
        }
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

    /// The kernel has no memory, or none where a registration may lie.
    fn short_of_memory(&self) -> Option<Verdict> {
        if self.probe.is_some_and(|probe| probe.no_memory) {
            let mut why = vec!["the process gets no fresh memory".to_owned()];
            let remedy = match limits::address_space().soft {
                Some(limit) => {
                    why.push(format!("its address space is limited to {}", amount(limit)));
                    remedy::address_space()
                }
                None => remedy::kernel_memory(),
            };
            return Some(verdict(Cause::KernelMemory, Likely, why, remedy));
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
        // What failed last is fresh host memory, which counts whatever the request was for.
        let fresh = self.probe.and_then(|probe| probe.fresh).map_or(0, |trial| trial.length);
        let pages = if page == Some(false) { 1 } else { fresh / page_size() as u64 };
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
                "this process has {} registrations on the device ({}), at most {} so far",
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
        let page = page_size() as u64;
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
            let reason = match probe.cut_short {
                Some(Cut::ToldBefore) => "not looked for, as the cause was told before".to_owned(),
                cut => format!("{} reached", cut.map_or("bound", Cut::words)),
            };
            let pages = (end - start) / page;
            why.push(format!(
                "at least one of the {pages} pages from {start:#x} on fails ({reason})"
            ));
        }
        why.extend(self.facts.risk.clone());
        why.extend(self.pinned_by_cuda());
        let mut known = false;
        for (address, pfn, place) in self.places {
            let zone = self.facts.zones.of(*pfn);
            let plain = zone.is_some_and(|z| z.cma == Some(0) && z.free_cma.unwrap_or(0) == 0);
            let (certain, place) = match place {
                Place::MovableZone => (true, "ZONE_MOVABLE".to_owned()),
                Place::Cma(area) => (true, format!("the contiguous area {area}")),
                Place::Zone(zone) if plain && self.facts.risk.is_none() => {
                    (false, format!("zone {zone}, which has no contiguous area"))
                }
                // Says nothing for or against it; the record has it.
                Place::Zone(_) => continue,
            };
            known |= certain;
            why.push(format!("the page at {address:#x} is frame {pfn:#x} in {place}"));
        }
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
}
