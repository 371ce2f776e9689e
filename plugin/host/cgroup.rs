//! Control groups: what a group may use of an RDMA device, and of memory.
//!
//! A limit of any group above counts as well, so that every level is read. Where a container shows
//! only its own part of the hierarchy, the path of the process leads nowhere there and the group at
//! the mount point is the container's.

use std::path::{Path, PathBuf};

use super::procfs::{Proc, text};

/// Levels of a hierarchy that are looked at.
const DEEPEST: usize = 32;

/// What memory regions count towards. Open devices (`hca_handle`) have a limit of their own, which is often just met: one
/// device, one handle.
const OBJECTS: &str = "hca_object";

/// Version 1 shows "no limit" as a number of this size.
const NO_LIMIT: u64 = 1 << 62;

/// Use of one resource of one device by one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaUse {
    /// The device.
    pub device: String,
    /// `hca_handle` (open devices) or `hca_object` (everything made on them, memory regions too).
    pub resource: String,
    /// In use.
    pub current: Option<u64>,
    /// The limit; `None`: no limit.
    pub max: Option<u64>,
    /// Path of the group below the mount point.
    pub group: String,
}

impl RdmaUse {
    /// Nothing more can be registered.
    pub fn refuses_registrations(&self) -> bool {
        self.resource == OBJECTS && self.exhausted()
    }

    /// Nothing more is granted.
    fn exhausted(&self) -> bool {
        matches!((self.current, self.max), (Some(current), Some(max)) if current >= max)
    }
}

/// Use of memory by one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in use.
    pub current: u64,
    /// Bytes of them that hold content of files. The kernel drops these before it refuses anything.
    pub file_cache: u64,
    /// The limit in bytes.
    pub max: u64,
    /// Path of the group below the mount point.
    pub group: String,
}

impl MemoryUse {
    /// Bytes that are still granted.
    pub fn left(&self) -> u64 {
        self.max.saturating_sub(self.current.saturating_sub(self.file_cache))
    }
}

/// The limits of the groups that the process is in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// RDMA devices, every limited resource at every level. Empty where nothing is limited or the
    /// kernel has no such controller.
    pub rdma: Vec<RdmaUse>,
    /// The memory limit with the least left.
    pub ram: Option<MemoryUse>,
}

impl Cgroup {
    /// The limits of this process. `sysfs` is the root of sysfs, below which control groups are
    /// mounted.
    pub fn read(proc: &Proc, sysfs: &Path) -> Self {
        let groups = proc.text("self/cgroup").unwrap_or_default();
        let mount = sysfs.join("fs/cgroup");
        let rdma = levels(&groups, &mount, "rdma").into_iter().flat_map(|(folder, group)| {
            let read = |file: &str| text(&proc.found(&folder.join(file))).unwrap_or_default();
            uses(&read("rdma.max"), &read("rdma.current"), &group)
        });
        let ram = levels(&groups, &mount, "memory").into_iter().filter_map(|(folder, group)| {
            let read =
                |file: &str| text(&proc.found(&folder.join(file)))?.trim().parse::<u64>().ok();
            let max = read("memory.max").or_else(|| read("memory.limit_in_bytes"))?;
            let current = read("memory.current").or_else(|| read("memory.usage_in_bytes"))?;
            let file_cache =
                text(&proc.found(&folder.join("memory.stat"))).map_or(0, |text| file_cache(&text));
            (max < NO_LIMIT).then_some(MemoryUse { current, file_cache, max, group })
        });
        Self { rdma: rdma.collect(), ram: ram.min_by_key(MemoryUse::left) }
    }

    /// A file with limits of RDMA devices that is there and cannot be read.
    pub fn withheld(proc: &Proc, sysfs: &Path) -> Option<PathBuf> {
        let groups = proc.text("self/cgroup")?;
        let levels = levels(&groups, &sysfs.join("fs/cgroup"), "rdma").into_iter();
        let mut files = levels.map(|(folder, _)| proc.found(&folder.join("rdma.max")));
        files.find(|file| file.symlink_metadata().is_ok() && text(file).is_none())
    }

    /// The first limit that keeps a device from granting more of a resource, `hca_handle` or `hca_object`.
    pub fn refuses(&self, device: &str, resource: &str) -> Option<&RdmaUse> {
        self.rdma
            .iter()
            .find(|item| item.device == device && item.resource == resource && item.exhausted())
    }

    /// The first limit that keeps a device from registering more.
    pub fn refuses_registrations(&self, device: &str) -> Option<&RdmaUse> {
        self.rdma.iter().find(|item| item.device == device && item.refuses_registrations())
    }
}

/// Bytes of files in memory by `memory.stat`. Version 1 counts groups below in the lines with `total_` only, as it does in
/// what is in use; version 2 always does. Shared memory is in neither.
fn file_cache(stat: &str) -> u64 {
    let of = |names: [&str; 2]| {
        let amounts = stat.lines().filter_map(|line| line.split_once(' '));
        let amounts = amounts.filter(|(name, _)| names.contains(name));
        let amounts = amounts.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok());
        amounts.reduce(u64::saturating_add)
    };
    let total = of(["total_inactive_file", "total_active_file"]);
    total.or_else(|| of(["inactive_file", "active_file"])).unwrap_or(0)
}

/// The folders that may hold a controller's files, innermost first, with the path of the group.
fn levels(groups: &str, mount: &Path, controller: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for line in groups.lines().take(DEEPEST) {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let roots: &[&str] = if controllers.is_empty() {
            &["", "unified"]
        } else if controllers.split(',').any(|name| name == controller) {
            &[controllers, controller]
        } else {
            continue;
        };
        // A path that leads out of the namespace says nothing about folders here.
        let path = if path.split('/').any(|part| part == "..") { "" } else { path };
        let path = Path::new(path.trim_start_matches('/'));
        for root in roots {
            for level in path.ancestors().take(DEEPEST) {
                let folder = mount.join(root).join(level);
                let group = format!("/{}", level.display());
                if !found.iter().any(|(known, _)| *known == folder) {
                    found.push((folder, group));
                }
            }
        }
    }
    found
}

/// Reads `rdma.max` and `rdma.current`: lines such as `mlx5_0 hca_handle=2 hca_object=max`.
fn uses(max: &str, current: &str, group: &str) -> Vec<RdmaUse> {
    let pairs = |text: &str| -> Vec<(String, String, String)> {
        let of_line = |line: &str| {
            let mut words = line.split_whitespace();
            let device = words.next().unwrap_or_default().to_owned();
            let pairs = words.filter_map(move |word| {
                let (resource, value) = word.split_once('=')?;
                Some((device.clone(), resource.to_owned(), value.to_owned()))
            });
            pairs.collect::<Vec<_>>()
        };
        text.lines().flat_map(of_line).collect()
    };
    let current = pairs(current);
    let limited = pairs(max).into_iter().filter_map(|(device, resource, value)| {
        let max = value.parse().ok()?;
        let of_this = |(d, r, _): &&(String, String, String)| *d == device && *r == resource;
        let current = current.iter().find(of_this).and_then(|(_, _, value)| value.parse().ok());
        Some(RdmaUse { current, max: Some(max), group: group.to_owned(), device, resource })
    });
    limited.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;
    use proptest::prelude::*;

    fn read(groups: &str, files: &[(&str, &str)]) -> Cgroup {
        let tree = Tree::new(files);
        tree.write("proc/self/cgroup", groups.as_bytes());
        Cgroup::read(&Proc::at(tree.root().join("proc")), &tree.root().join("sys"))
    }

    #[test]
    fn version_2_with_a_limit_above() {
        let cgroup = read(
            "0::/jobs/rank\n",
            &[
                ("sys/fs/cgroup/jobs/rank/rdma.max", "mlx5_0 hca_handle=max hca_object=max\n"),
                ("sys/fs/cgroup/jobs/rank/rdma.current", "mlx5_0 hca_handle=1 hca_object=20\n"),
                ("sys/fs/cgroup/jobs/rdma.max", "mlx5_0 hca_handle=2 hca_object=2000\nmlx5_1\n"),
                ("sys/fs/cgroup/jobs/rdma.current", "mlx5_0 hca_handle=1 hca_object=2000\n"),
                ("sys/fs/cgroup/jobs/memory.max", "1000\n"),
                ("sys/fs/cgroup/jobs/memory.current", "900\n"),
                ("sys/fs/cgroup/jobs/rank/memory.max", "max\n"),
                ("sys/fs/cgroup/jobs/rank/memory.current", "800\n"),
            ],
        );
        assert_eq!(cgroup.rdma.len(), 2);
        let exhausted = cgroup.refuses_registrations("mlx5_0").unwrap();
        assert_eq!((exhausted.resource.as_str(), exhausted.max), ("hca_object", Some(2000)));
        assert_eq!(exhausted.group, "/jobs");
        assert_eq!(cgroup.refuses_registrations("mlx5_1"), None);
        assert_eq!(cgroup.refuses("mlx5_0", "hca_object"), Some(exhausted));
        assert_eq!(cgroup.refuses("mlx5_0", "hca_handle"), None);
        assert_eq!(cgroup.ram.unwrap().left(), 100);
    }

    #[test]
    fn version_1_and_a_container_that_sees_only_its_own_part() {
        let cgroup = read(
            "9:rdma:/docker/77\n8:cpu,memory:/docker/77\n",
            &[
                ("sys/fs/cgroup/rdma/rdma.max", "rxe0 hca_handle=5 hca_object=10\n"),
                ("sys/fs/cgroup/rdma/rdma.current", "rxe0 hca_handle=5\n"),
                ("sys/fs/cgroup/cpu,memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("sys/fs/cgroup/cpu,memory/memory.usage_in_bytes", "5\n"),
            ],
        );
        assert_eq!(cgroup.rdma.len(), 2);
        assert_eq!(cgroup.rdma[1].current, None);
        assert!(cgroup.refuses_registrations("rxe0").is_none() && cgroup.ram.is_none());
    }

    #[test]
    fn only_objects_say_something_about_registrations() {
        for (resource, expected) in [("hca_handle", None), ("hca_new", None), (OBJECTS, Some(1))] {
            let line = format!("mlx5_0 {resource}=1\n");
            let files = [("sys/fs/cgroup/rdma.max", &*line), ("sys/fs/cgroup/rdma.current", &line)];
            let cgroup = read("0::/\n", &files);
            assert!(cgroup.rdma[0].exhausted());
            let found = cgroup.refuses_registrations("mlx5_0").and_then(|found| found.max);
            assert_eq!(found, expected, "{resource}");
        }
    }

    #[test]
    fn content_of_files_is_not_in_the_way() {
        let second = "anon 50\nfile 800\ninactive_file 500\nactive_file 200\nslab 9\n";
        let first = "cache 900\ninactive_file 1\nactive_file 1\ntotal_inactive_file 300\ntotal_active_file 400\n";
        for (stat, left) in [
            (second, 705),
            (first, 705),
            ("inactive_file 30\n", 35),
            ("inactive_file x\nactive_file\n", 5),
            ("", 5),
            // Read a moment later than what is in use.
            ("inactive_file 2000\n", 1000),
            ("inactive_file 18446744073709551615\nactive_file 18446744073709551615\n", 1000),
        ] {
            let files = [
                ("sys/fs/cgroup/memory.max", "1000\n"),
                ("sys/fs/cgroup/memory.current", "995\n"),
                ("sys/fs/cgroup/memory.stat", stat),
            ];
            assert_eq!(read("0::/\n", &files).ram.unwrap().left(), left, "{stat}");
            let files = [
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "995\n"),
                ("sys/fs/cgroup/memory/memory.stat", stat),
            ];
            assert_eq!(read("8:memory:/\n", &files).ram.unwrap().left(), left, "{stat}");
        }
    }

    #[test]
    fn nothing_is_limited_where_nothing_is_said() {
        let secret =
            [("sys/rdma.max", "x hca_object=0\n"), ("sys/rdma.current", "x hca_object=1\n")];
        assert_eq!(read("0::/../..\n", &secret), Cgroup::default());
        assert_eq!(read("", &[]), Cgroup::default());
        let current = ("sys/fs/cgroup/rdma.current", "m hca_object=3\n");
        assert_eq!(
            read("0::/", &[("sys/fs/cgroup/rdma.max", "m hca_object=\n"), current]).rdma,
            []
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read(a in any::<String>(), b in "\\PC{0,40}( \\PC{0,9}=[0-9]{0,30}){0,4}") {
            let _ = uses(&a, &b, "/");
            let _ = uses(&b, &a, "/");
            let _ = (file_cache(&a), file_cache(&b));
            let _ = levels(&a, Path::new("/no/such"), "rdma");
        }
    }
}
