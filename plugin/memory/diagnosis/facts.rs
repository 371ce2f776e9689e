//! What the machine says around the time of a failure. Everything is read without privileges where that is possible,
//! and unknown where it is not.

use super::failure::Failure;
use crate::config::Settings;
use crate::cuda::driver::{self, MemoryKind, PointerFacts};
use crate::cuda::nvml::{Bar1, Nvml};
use crate::host::bootlog::Area;
use crate::host::cgroup::Cgroup;
use crate::host::container::Container;
use crate::host::fdinfo::{self, DmaBufInfo};
use crate::host::kernel::{self, Cmdline};
use crate::host::limits::{self, Limit};
use crate::host::meminfo::Meminfo;
use crate::host::mounts;
use crate::host::nvidia::{self, LongTerm};
use crate::host::placement::{self, Place};
use crate::host::procfs::Proc;
use crate::host::smaps::{Mapping, Smaps};
use crate::host::status::Status;
use crate::host::sysfs::Sysfs;
use crate::host::zones::{Zones, cma_in_blocks};
use crate::memory::RegionKind;
use crate::memory::page::page_size;

/// Where facts about this machine are read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// procfs.
    pub proc: Proc,
    /// sysfs.
    pub sysfs: Sysfs,
}

impl Machine {
    /// The machine the settings point at.
    pub fn from_settings(settings: &Settings) -> Self {
        Self { proc: Proc::from_settings(settings), sysfs: Sysfs::from_settings(settings) }
    }
}

/// What the machine says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The processor architecture, as [`std::env::consts::ARCH`] names it.
    pub architecture: &'static str,
    /// Release of the kernel.
    pub release: Option<String>,
    /// Its command line.
    pub cmdline: Option<Cmdline>,
    /// What the kernel counts for this process.
    pub status: Status,
    /// How much it may lock.
    pub memlock: Limit,
    /// Limits of its control groups.
    pub cgroup: Cgroup,
    /// Whether it lives in a container.
    pub container: Container,
    /// Memory of the machine.
    pub meminfo: Meminfo,
    /// Its zones.
    pub zones: Zones,
    /// Where the contiguous areas lie, as far as the kernel's log says.
    pub areas: Vec<Area>,
    /// Pages in CMA page blocks.
    pub cma_in_blocks: Option<u64>,
    /// Why memory of this machine may be refused.
    pub risk: Option<String>,
    /// The NVIDIA kernel driver.
    pub nvidia: Option<nvidia::Driver>,
    /// The module that lets devices reach GPU memory by address.
    pub peermem: Option<&'static str>,
    /// Whether the kernel's modules can be seen, so that an absent one is absent.
    pub modules_visible: bool,
    /// What the CUDA driver knows about the address.
    pub pointer: Option<PointerFacts>,
    /// Windows of the GPU, or of all GPUs where it is not known which.
    pub bar1: Vec<Bar1>,
    /// The DMA-BUF; `None`: no such descriptor, or it cannot be read.
    pub dmabuf: Option<DmaBufInfo>,
    /// Whether its descriptor is open.
    pub descriptor_open: Option<bool>,
    /// The mappings of the range.
    pub range: Option<RangeFacts>,
}

/// What is mapped where the range lies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeFacts {
    /// The mapping at its beginning.
    pub mapping: Option<Mapping>,
    /// The type of the file system that it is of.
    pub filesystem: Option<String>,
    /// Mappings it touches.
    pub mappings: usize,
    /// First address where nothing is mapped.
    pub unmapped: Option<u64>,
    /// First address that this process may not write.
    pub read_only: Option<u64>,
}

impl RangeFacts {
    fn of(maps: &Smaps, mountinfo: &str, (start, end): (u64, u64)) -> Self {
        let mut facts = Self::default();
        let mut reached = start;
        for mapping in maps.overlapping(start..end) {
            facts.mappings += 1;
            if mapping.range.start > reached {
                facts.unmapped.get_or_insert(reached);
            }
            reached = reached.max(mapping.range.end);
            if mapping.permissions.as_bytes().get(1) != Some(&b'w') {
                facts.read_only.get_or_insert(mapping.range.start.max(start));
            }
            facts.mapping.get_or_insert_with(|| mapping.clone());
        }
        if reached < end {
            facts.unmapped.get_or_insert(reached);
        }
        let file = facts.mapping.as_ref().filter(|mapping| !mapping.is_anonymous());
        let filesystem = file.and_then(|file| mounts::filesystem(mountinfo, file.device));
        facts.filesystem = filesystem.map(str::to_owned);
        facts
    }

    /// The file that is mapped, unless it is memory by another name.
    fn file(&self) -> Option<&Mapping> {
        let file = self.mapping.as_ref().filter(|mapping| !mapping.is_anonymous())?;
        (!file.is_shared_memory(self.filesystem.as_deref())).then_some(file)
    }

    /// A mapping of a device's memory.
    pub fn of_device(&self) -> Option<&str> {
        let path = self.file()?.path.as_str();
        path.starts_with("/dev/").then_some(path)
    }

    /// A mapping of a file's pages that others share, and that the kernel writes back.
    pub fn shared_file(&self) -> Option<&str> {
        let file = self.file().filter(|file| file.permissions.ends_with('s'))?;
        Some(file.path.as_str())
    }
}

impl Facts {
    /// Reads everything that concerns a failure.
    pub fn gather(machine: &Machine, failure: &Failure) -> Self {
        let Machine { proc, sysfs } = machine;
        let meminfo = proc.text("meminfo").map(|text| Meminfo::parse(&text)).unwrap_or_default();
        let zones = Zones::read(proc);
        let cmdline = Cmdline::read(proc);
        let host = failure.kind == RegionKind::Host;
        let pointer = (failure.kind != RegionKind::DmaBuf)
            .then(driver::Driver::loaded)
            .flatten()
            .map(|driver| driver.facts(failure.address));
        let bar1 = Nvml::loaded().filter(|_| !host).map_or_else(Vec::new, |nvml| {
            nvml.bar1(pointer.as_ref().and_then(|pointer| pointer.pci_bus_id.as_deref()))
        });
        let maps = host.then(|| proc.text("self/maps")).flatten();
        let range = maps.map(|maps| {
            let mounts = proc.text("self/mountinfo").unwrap_or_default();
            RangeFacts::of(&Smaps::parse(&maps), &mounts, failure.pages_range())
        });
        Self {
            architecture: std::env::consts::ARCH,
            release: kernel::release(proc),
            risk: placement::risk(&meminfo, &zones, &cmdline.clone().unwrap_or_default()),
            cmdline,
            status: Status::read(proc),
            memlock: limits::memlock_of(proc),
            cgroup: Cgroup::read(proc, sysfs.root()),
            container: Container::read(proc),
            areas: placement::areas(proc, &meminfo),
            meminfo,
            cma_in_blocks: proc.text("pagetypeinfo").and_then(|text| cma_in_blocks(&text)),
            zones,
            nvidia: nvidia::Driver::read(proc),
            peermem: sysfs.peermem(),
            modules_visible: sysfs.root().join("module").is_dir(),
            pointer,
            bar1,
            dmabuf: failure.fd.and_then(|fd| DmaBufInfo::read(proc, fd)),
            descriptor_open: failure.fd.and_then(|fd| fdinfo::is_open(proc, fd)),
            range,
        }
    }

    /// Memory that can be had, outside of contiguous areas and with them: (outside, all). `None` where the machine does
    /// not say.
    pub fn available(&self) -> Option<(u64, u64)> {
        let all = self.meminfo.available.or(self.meminfo.free)?;
        let all = self.cgroup.ram.as_ref().map_or(all, |ram| all.min(ram.left()));
        let in_cma = placement::free_in_cma(&self.meminfo, &self.zones).unwrap_or(0);
        Some((all.saturating_sub(in_cma), all))
    }

    /// Whether what failed is host memory: said to be, and no GPU's as far as its driver tells.
    pub fn is_host_memory(&self, failure: &Failure) -> bool {
        failure.kind == RegionKind::Host && !self.is_gpu_memory()
    }

    /// Whether the CUDA driver says that the address is a GPU's.
    pub fn is_gpu_memory(&self) -> bool {
        self.pointer.as_ref().is_some_and(|pointer| pointer.kind == MemoryKind::Device)
    }

    /// Whether CUDA declares its pins of host memory as long-term ones.
    pub fn cuda_long_term(&self) -> Option<LongTerm> {
        self.nvidia.as_ref().map(|driver| driver.long_term(self.architecture))
    }

    /// Where a page lies, as far as the kernel tells this process.
    pub fn place(&self, machine: &Machine, address: u64) -> Option<(u64, Place)> {
        let Machine { proc, sysfs } = machine;
        placement::place_of(proc, sysfs.root(), &self.zones, &self.areas, address)
    }
}

/// The rule by which the kernel refuses to pin: what the process holds pinned and this request, in whole pages and
/// without regard to pages that are pinned twice, against the soft limit. Memory locked with `mlock` does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Bytes pinned before the request; `None`: not known.
    pub pinned: Option<u64>,
    /// They were counted here, because that is more than the kernel's `VmPin`.
    pub counted_here: bool,
    /// Pages of the request that count: none of a GPU's memory and none of a DMA-BUF, which others pin.
    pub pages: u64,
    /// The soft limit in bytes; `None`: unlimited.
    pub limit: Option<u64>,
    /// The process is exempt (CAP_IPC_LOCK, in the first user namespace).
    pub exempt: Option<bool>,
}

impl Quota {
    /// The rule's figures for a failure.
    pub fn of(failure: &Failure, facts: &Facts) -> Self {
        let (kernel, here) = (facts.status.pinned, failure.own_pinned);
        Self {
            pinned: kernel.max(here),
            counted_here: here > kernel,
            pages: if facts.is_host_memory(failure) { failure.pages() } else { 0 },
            limit: facts.memlock.soft,
            exempt: match (facts.status.ipc_lock(), facts.container.own_user_namespace) {
                (Some(false), _) | (Some(true), Some(true)) => Some(false),
                (Some(true), Some(false)) => Some(true),
                (Some(true), None) | (None, _) => None,
            },
        }
    }

    /// Whether the rule refuses a request of so many pages; `None`: a figure is missing.
    pub fn refuses(&self, pages: u64) -> Option<bool> {
        let page = page_size() as u64;
        let Some(limit) = self.limit else { return Some(false) };
        // What does not count is not compared, whatever was pinned before.
        if pages == 0 || self.exempt == Some(true) {
            return Some(false);
        }
        // What this process holds already is beyond the limit: it is not what the kernel applies here.
        if self.counted_here && self.pinned.unwrap_or(0) > limit {
            return None;
        }
        let wanted = (self.pinned.unwrap_or(0) / page).saturating_add(pages);
        match wanted > limit / page {
            true => Some(true),
            false => self.pinned.map(|_| false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maps(text: &str) -> RangeFacts {
        let mounts = "31 25 0:26 / /run rw shared:4 - tmpfs tmpfs rw\n";
        RangeFacts::of(&Smaps::parse(text), mounts, (0x1000, 0x5000))
    }

    #[test]
    fn holes_and_write_protection_are_found() {
        let whole = maps("1000-9000 rw-p 0 0:0 0 [heap]\n");
        assert_eq!((whole.mappings, whole.unmapped, whole.read_only), (1, None, None));
        assert_eq!(whole.shared_file(), None);
        assert_eq!(maps("2000-9000 rw-p 0 0:0 0\n").unmapped, Some(0x1000));
        assert_eq!(maps("0-2000 rw-p 0 0:0 0\n4000-5000 rw-p 0 0:0 0\n").unmapped, Some(0x2000));
        assert_eq!(maps("0-4000 rw-p 0 0:0 0\n").unmapped, Some(0x4000));
        assert_eq!(maps("").unmapped, Some(0x1000));
        let text = maps("0-2000 rw-p 0 0:0 0\n2000-3000 r--p 0 0:0 0\n3000-5000 rw-p 0 0:0 0\n");
        assert_eq!((text.read_only, text.unmapped, text.mappings), (Some(0x2000), None, 3));
        let file = maps("0-9000 rw-s 0 8:1 77 /data/file\n");
        assert_eq!((file.shared_file(), file.of_device()), (Some("/data/file"), None));
        let device = maps("0-9000 rw-p 0 0:5 77 /dev/nvidia0\n");
        assert_eq!((device.of_device(), device.shared_file()), (Some("/dev/nvidia0"), None));
        for line in ["0:1a 77 /run/x", "0:1 77 /memfd:x (deleted)", "0:1 77 /dev/zero (deleted)"] {
            let memory = maps(&format!("0-9000 rw-s 0 {line}\n"));
            assert_eq!((memory.of_device(), memory.shared_file()), (None, None), "{line}");
        }
    }

    fn quota(pinned: Option<u64>, limit: Option<u64>, exempt: Option<bool>) -> Quota {
        let pages = |n: Option<u64>| n.map(|n| n * page_size() as u64);
        Quota { pinned: pages(pinned), counted_here: false, pages: 4, limit: pages(limit), exempt }
    }

    #[test]
    fn the_kernels_rule_is_exact_to_a_page() {
        for (pinned, limit, exempt, pages, expected) in [
            (Some(12), Some(16), Some(false), 4, Some(false)),
            (Some(13), Some(16), Some(false), 4, Some(true)),
            (Some(13), Some(16), None, 4, Some(true)),
            (Some(13), Some(16), Some(true), 4, Some(false)),
            (Some(13), None, Some(false), u64::MAX, Some(false)),
            (Some(17), Some(16), Some(false), 0, Some(false)),
            (None, Some(16), None, 0, Some(false)),
            (None, Some(16), Some(false), 17, Some(true)),
            (None, Some(16), Some(false), 16, None),
            (Some(u64::MAX / (1 << 20)), Some(16), Some(false), u64::MAX, Some(true)),
        ] {
            let quota = quota(pinned, limit, exempt);
            assert_eq!(quota.refuses(pages), expected, "{quota:?} {pages}");
        }
        // A limit that is no multiple of the page size is rounded down.
        let odd = Quota { limit: Some(17 * page_size() as u64 - 1), ..quota(Some(12), None, None) };
        assert_eq!((odd.refuses(4), odd.refuses(5)), (Some(false), Some(true)));
    }
}
