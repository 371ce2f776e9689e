//! `/proc/<pid>/smaps`: what the kernel says about each mapping.
//!
//! A diagnosis asks which mapping an address lies in, how large its pages are, and what a fork does
//! to it. Unknown lines and flags are kept apart from wrong ones: a new kernel adds both.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

use super::meminfo::kilobytes;

/// The flags of a mapping, as the kernel's two-letter names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VmFlags(Vec<[u8; 2]>);

impl VmFlags {
    /// A child does not inherit the mapping (`MADV_DONTFORK`).
    pub const DONTCOPY: &'static str = "dc";
    /// A child finds the mapping zeroed (`MADV_WIPEONFORK`).
    pub const WIPEONFORK: &'static str = "wf";
    /// The mapping is locked (`mlock`).
    pub const LOCKED: &'static str = "lo";
    /// The mapping shows memory of a device.
    pub const IO: &'static str = "io";
    /// The mapping holds raw page frames without page structs.
    pub const PFNMAP: &'static str = "pf";
    /// The mapping uses huge pages of hugetlbfs.
    pub const HUGETLB: &'static str = "ht";
    /// The mapping is shared.
    pub const SHARED: &'static str = "sh";

    fn parse(text: &str) -> Self {
        Self(text.split_whitespace().filter_map(|flag| flag.as_bytes().try_into().ok()).collect())
    }

    /// Whether none is set: the kernel does not list them.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a flag is set.
    pub fn has(&self, flag: &str) -> bool {
        self.0.iter().any(|known| known == flag.as_bytes())
    }
}

impl fmt::Display for VmFlags {
    /// As the kernel writes them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(|flag| String::from_utf8_lossy(flag)).collect();
        f.write_str(&names.join(" "))
    }
}

/// One mapping.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mapping {
    /// The addresses.
    pub range: Range<u64>,
    /// Permissions, such as `rw-p`.
    pub permissions: String,
    /// Offset into the file.
    pub offset: u64,
    /// Number of the device that the file is on, as (major, minor).
    pub device: (u32, u32),
    /// Inode of the file; 0 for anonymous memory.
    pub inode: u64,
    /// Path of the file, or the kernel's name such as `[heap]`; empty for anonymous memory.
    pub path: String,
    /// Size of a page of the mapping, in bytes.
    pub kernel_page_size: Option<u64>,
    /// Bytes present in memory.
    pub resident: Option<u64>,
    /// Bytes locked.
    pub locked: Option<u64>,
    /// Bytes in transparent huge pages.
    pub anon_huge: Option<u64>,
    /// The flags.
    pub flags: VmFlags,
}

impl Mapping {
    /// Reads a line such as `7f00-7f01 rw-p 00000000 00:00 0   [heap]`.
    fn parse_header(line: &str) -> Option<Self> {
        let mut rest = line;
        let mut field = || {
            let trimmed = rest.trim_start_matches(' ');
            let (word, tail) = trimmed.split_once(' ').unwrap_or((trimmed, ""));
            rest = tail;
            (!word.is_empty()).then_some(word)
        };
        let (start, end) = field()?.split_once('-')?;
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end) = (hex(start)?, hex(end)?);
        let permissions = field()?;
        let offset = hex(field()?)?;
        let (major, minor) = field()?.split_once(':')?;
        let number = |text: &str| u32::from_str_radix(text, 16).ok();
        let device = (number(major)?, number(minor)?);
        let inode = field()?.parse().ok()?;
        if start > end || permissions.len() != 4 {
            return None;
        }
        Some(Self {
            range: start..end,
            permissions: permissions.to_owned(),
            offset,
            device,
            inode,
            path: rest.trim_start_matches(' ').to_owned(),
            ..Self::default()
        })
    }

    /// Takes one line of detail.
    fn take(&mut self, name: &str, value: &str) {
        match name {
            "KernelPageSize" => self.kernel_page_size = kilobytes(value),
            "Rss" => self.resident = kilobytes(value),
            "Locked" => self.locked = kilobytes(value),
            "AnonHugePages" => self.anon_huge = kilobytes(value),
            "VmFlags" => self.flags = VmFlags::parse(value),
            _ => {}
        }
    }

    /// The mapping has no file behind it.
    pub fn is_anonymous(&self) -> bool {
        self.inode == 0
    }

    /// The file behind it exists in memory only: shared memory and huge pages, under the names that the kernel and the
    /// usual places give them. `filesystem`: the type of the file system it is on, if known.
    pub fn is_shared_memory(&self, filesystem: Option<&str>) -> bool {
        const PLACES: [&str; 5] =
            ["/dev/shm/", "/dev/hugepages/", "/memfd:", "/SYSV", "/anon_hugepage"];
        // Mapped, /dev/zero is fresh memory; anonymous memory that is shared goes by that name.
        let zero = self.path == "/dev/zero" || self.path == "/dev/zero (deleted)";
        // The devices of a container are on a tmpfs.
        let in_memory = match filesystem {
            Some("tmpfs") => !self.path.starts_with("/dev/"),
            Some("hugetlbfs") => true,
            _ => false,
        };
        !self.is_anonymous()
            && (zero || in_memory || PLACES.iter().any(|place| self.path.starts_with(place)))
    }
}

/// A line of detail is "Name:  value"; a mapping's first word is an address range.
fn detail(line: &str) -> Option<(&str, &str)> {
    line.split_once(':').filter(|(name, _)| {
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    })
}

/// All mappings of a process, by ascending address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Smaps {
    /// The mappings.
    pub mappings: Vec<Mapping>,
}

impl Smaps {
    /// Reads the text of the file. Lines that are not understood are skipped.
    pub fn parse(text: &str) -> Self {
        let mut mappings: Vec<Mapping> = Vec::new();
        for line in text.lines() {
            match (detail(line), mappings.last_mut()) {
                (Some((name, value)), Some(mapping)) => mapping.take(name, value),
                (Some(_), None) => {}
                (None, _) => mappings.extend(Mapping::parse_header(line)),
            }
        }
        mappings.sort_by_key(|mapping| mapping.range.start);
        Self { mappings }
    }

    /// The mapping of this process that holds an address. Reads no further than that: the kernel walks the pages of each
    /// mapping whose part of the file is read.
    pub fn find_in_self(address: u64) -> io::Result<Option<Mapping>> {
        Self::find(BufReader::new(File::open("/proc/self/smaps")?), address)
    }

    fn find(mut file: impl BufRead, address: u64) -> io::Result<Option<Mapping>> {
        let (mut line, mut found) = (Vec::new(), None::<Mapping>);
        loop {
            line.clear();
            if file.read_until(b'\n', &mut line)? == 0 {
                return Ok(found);
            }
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end_matches('\n');
            match (detail(text), &mut found) {
                (Some((name, value)), Some(mapping)) => mapping.take(name, value),
                (Some(_), None) => {}
                // The next mapping begins: the one before is complete.
                (None, Some(_)) => return Ok(found),
                (None, None) => {
                    found = Mapping::parse_header(text).filter(|m| m.range.contains(&address));
                }
            }
        }
    }

    /// The mappings of this process with their names and without what the kernel has to count for each, which is cheap.
    pub fn names_of_self() -> io::Result<Self> {
        Self::read("/proc/self/maps")
    }

    /// The mappings of this process.
    pub fn of_self() -> io::Result<Self> {
        Self::read("/proc/self/smaps")
    }

    /// The mappings of another process.
    pub fn of_process(pid: u32) -> io::Result<Self> {
        Self::read(&format!("/proc/{pid}/smaps"))
    }

    fn read(path: &str) -> io::Result<Self> {
        // Paths of mapped files need not be UTF-8.
        fs::read(path).map(|text| Self::parse(&String::from_utf8_lossy(&text)))
    }

    /// The mapping that holds an address.
    pub fn at(&self, address: u64) -> Option<&Mapping> {
        self.overlapping(address..address.saturating_add(1)).next()
    }

    /// The mappings that share an address with a range.
    pub fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = &Mapping> {
        self.mappings.iter().filter(move |mapping| {
            mapping.range.start < range.end && range.start < mapping.range.end
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "\
55d0c0a00000-55d0c0a21000 rw-p 00000000 00:00 0                          [heap]
Size:                132 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:                  16 kB
Locked:                0 kB
VmFlags: rd wr mr mw me ac sd
7f3a40000000-7f3a40200000 rw-s 00001000 00:0f 1234                       /a file: with (deleted)
Size:               2048 kB
KernelPageSize:     2048 kB
Rss:                2048 kB
Private_Hugetlb:    2048 kB
Locked:             2048 kB
VmFlags: rd wr sh mr mw me ms de ht lo dc sd
7ffe00000000-7ffe00001000 r-xp 00000000 00:00 0
VmFlags: rd ex wf um
";

    #[test]
    fn mappings_with_their_details() {
        let smaps = Smaps::parse(TEXT);
        assert_eq!(smaps.mappings.len(), 3);
        let heap = smaps.at(0x55d0_c0a2_0fff).unwrap();
        assert_eq!(heap.flags.to_string(), "rd wr mr mw me ac sd");
        assert_eq!((heap.path.as_str(), heap.kernel_page_size), ("[heap]", Some(4096)));
        assert!(heap.is_anonymous() && !heap.flags.has(VmFlags::DONTCOPY));
        let file = smaps.at(0x7f3a_4000_0000).unwrap();
        assert_eq!(file.path, "/a file: with (deleted)");
        assert_eq!((file.inode, file.offset, file.permissions.as_str()), (1234, 0x1000, "rw-s"));
        assert_eq!((file.device, heap.device), ((0, 15), (0, 0)));
        assert_eq!((file.locked, file.kernel_page_size), (Some(2 << 20), Some(2 << 20)));
        for flag in [VmFlags::DONTCOPY, VmFlags::LOCKED, VmFlags::HUGETLB, VmFlags::SHARED] {
            assert!(file.flags.has(flag), "{flag}");
        }
        let last = smaps.at(0x7ffe_0000_0000).unwrap();
        assert!(last.flags.has(VmFlags::WIPEONFORK) && last.path.is_empty());
    }

    #[test]
    fn what_is_in_memory_only_is_known_by_name_and_place() {
        for (path, filesystem, expected) in [
            ("/dev/zero (deleted)", None, true),
            ("/dev/zero", Some("devtmpfs"), true),
            ("/dev/zeros", None, false),
            ("/dev/shm/nccl-7Yt3Qa", Some("tmpfs"), true),
            ("/dev/shm/nccl-7Yt3Qa (deleted)", None, true),
            ("/memfd:cuda (deleted)", None, true),
            ("/SYSV00001234 (deleted)", None, true),
            ("/anon_hugepage (deleted)", None, true),
            ("/dev/hugepages/pool", None, true),
            ("/dev/hugepages-1G/pool", Some("hugetlbfs"), true),
            ("/mnt/huge/rte", Some("hugetlbfs"), true),
            ("/run/user/0/x", Some("tmpfs"), true),
            ("/dev/nvidia0", Some("tmpfs"), false),
            ("/dev/infiniband/uverbs0", Some("devtmpfs"), false),
            ("/data/memfd:x", Some("ext4"), false),
            ("/data/x", None, false),
        ] {
            let line = format!("7f00-7f01 rw-s 00000000 00:05 77   {path}");
            let mapping = Mapping::parse_header(&line).unwrap();
            assert_eq!(mapping.is_shared_memory(filesystem), expected, "{path}");
        }
        let heap = Mapping::parse_header("7f00-7f01 rw-p 00000000 00:00 0   [heap]").unwrap();
        assert!(!heap.is_shared_memory(None));
    }

    #[test]
    fn ranges_are_half_open() {
        let smaps = Smaps::parse(TEXT);
        assert_eq!(smaps.at(0x55d0_c0a2_1000), None);
        assert_eq!(smaps.at(u64::MAX), None);
        assert_eq!(smaps.overlapping(0x55d0_c0a2_0000..0x7f3a_4000_0001).count(), 2);
        assert_eq!(smaps.overlapping(0..0x55d0_c0a0_0000).count(), 0);
        assert_eq!(smaps.overlapping(5..5).count(), 0);
    }

    #[test]
    fn damaged_text_gives_what_is_left() {
        let smaps = Smaps::parse(
            "Size: 4 kB\n10-20 rw-p\n30-20 rw-p 0 0:0 0\n10-20 rw-p 0 0:0 0\nRss: x\n",
        );
        assert_eq!(smaps.mappings.len(), 1);
        assert_eq!(smaps.mappings[0].resident, None);
    }

    #[test]
    fn this_process_has_a_stack() {
        let on_stack = 0u8;
        let address = u64::try_from(std::ptr::from_ref(&on_stack).addr()).unwrap();
        let smaps = Smaps::of_self().unwrap();
        let mapping = smaps.at(address).unwrap();
        assert!(mapping.permissions.starts_with("rw"));
        assert!(mapping.kernel_page_size.unwrap().is_power_of_two());
    }

    #[test]
    fn one_mapping_is_found_with_its_details() {
        let all = Smaps::parse(TEXT);
        for mapping in &all.mappings {
            for address in [mapping.range.start, mapping.range.end - 1] {
                let found = Smaps::find(TEXT.as_bytes(), address).unwrap();
                assert_eq!(found.as_ref(), Some(mapping));
            }
        }
        assert_eq!(Smaps::find(TEXT.as_bytes(), 0x55d0_c0a2_1000).unwrap(), None);
        assert_eq!(all.mappings[2].flags.to_string(), "rd ex wf um");
    }

    #[test]
    fn names_come_without_details() {
        let on_stack = 0u8;
        let address = u64::try_from(std::ptr::from_ref(&on_stack).addr()).unwrap();
        let (cheap, full) = (Smaps::names_of_self().unwrap(), Smaps::find_in_self(address));
        let (cheap, full) = (cheap.at(address).unwrap().clone(), full.unwrap().unwrap());
        assert_eq!((cheap.kernel_page_size, cheap.path), (None, full.path));
        assert!(full.kernel_page_size.is_some() && !full.flags.to_string().is_empty());
    }

    proptest! {
        #[test]
        fn any_text_is_read(
            text in "(\\PC{0,40}\n|[0-9a-f]{0,9}-[0-9a-f]{0,9} rw-p 0 0:0 [0-9]{0,4}\n){0,8}",
        ) {
            let smaps = Smaps::parse(&text);
            prop_assert!(smaps.mappings.iter().all(|m| m.range.start <= m.range.end));
            let _ = smaps.at(0);
        }
    }
}
