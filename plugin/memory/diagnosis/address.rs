//! The rules for errnos that say something about the range itself: its address, its kind, its flags.

use super::failure::access_names;
use super::remedy;
use super::rules::{Case, verdict};
use super::verdict::{Cause, Confidence, Verdict};
use crate::cuda::driver::MemoryKind;
use crate::host::amount;
use crate::memory::RegionKind;
use Confidence::{Certain, Likely, Possible};

/// The name of a mapping.
fn name_of(path: &str) -> &str {
    if path.is_empty() { "anonymous memory" } else { path }
}

impl Case<'_> {
    pub(super) fn bad_address(&self) -> Verdict {
        let f = self.failure;
        let device_memory = self.facts.is_gpu_memory();
        if f.kind == RegionKind::Cuda || (f.kind == RegionKind::Host && device_memory) {
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
    pub(super) fn mapping(&self) -> Option<Verdict> {
        let range = self.facts.range.as_ref().filter(|_| self.host())?;
        let (why, confidence) = if let Some(address) = range.unmapped {
            (format!("nothing is mapped at {address:#x}"), Certain)
        } else if let Some(address) = range.read_only {
            (format!("the memory at {address:#x} cannot be written by this process"), Certain)
        } else if let Some(path) = range.of_device() {
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
        if self.failure.kind == RegionKind::Host {
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

    pub(super) fn invalid(&self) -> Verdict {
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
        // Before what is mapped there: a range that is refused by its kind is EFAULT.
        if f.asked_optional() && f.retry.is_none() {
            let mut why = vec![format!("access flags {}", access_names(f.access))];
            if f.optional_demanded {
                why.push("the settings demand the optional ones, so nothing else was tried".into());
            }
            return verdict(Cause::AccessFlags, Likely, why, remedy::access_flags(f));
        }
        if let Some(found) = self.mapping() {
            return found;
        }
        let dmabuf = f.kind == RegionKind::DmaBuf;
        let mut found = if dmabuf { self.dmabuf_descriptor() } else { self.unknown() };
        if f.retry.is_some() {
            found.evidence.insert(0, "it fails without optional access flags too".into());
        }
        found
    }

    /// What is wrong with a DMA-BUF.
    pub(super) fn dmabuf_descriptor(&self) -> Verdict {
        let f = self.failure;
        let bad = |confidence, why: String| {
            verdict(Cause::BadAddress, confidence, vec![why], remedy::bad_address())
        };
        let fd = f.fd.unwrap_or(-1);
        let closed = f.errno == libc::EBADF;
        let Some(info) = &self.facts.dmabuf else {
            if self.facts.descriptor_open == Some(false) {
                let confidence = if closed { Certain } else { Likely };
                return bad(confidence, format!("descriptor {fd} is not open"));
            }
            let unread = format!("what descriptor {fd} is cannot be read");
            if closed {
                return bad(Possible, format!("the kernel knows no such descriptor; {unread}"));
            }
            let mut found = self.unknown();
            found.evidence.insert(0, unread);
            return found;
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

    pub(super) fn unsupported(&self) -> Verdict {
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
            RegionKind::Cuda if self.facts.peermem.is_none() => self.gpu_address(false),
            _ if f.asked_optional() => {
                let why = vec![format!("access flags {}", access_names(f.access))];
                verdict(Cause::AccessFlags, Likely, why, remedy::access_flags(f))
            }
            RegionKind::Cuda => self.gpu_address(true),
            RegionKind::Host => self.mapping().unwrap_or_else(|| self.unknown()),
        }
    }
}
