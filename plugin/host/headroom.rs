//! How much memory the process could still have.

use std::path::Path;

use super::cgroup::Cgroup;
use super::meminfo::Meminfo;
use super::procfs::Proc;

/// Bytes that can be had without swapping, on the machine and in the control group of the process;
/// `None` where neither says. The kernel does not refuse what goes beyond: it ends a process.
pub fn headroom(proc: &Proc, sysfs: &Path) -> Option<u64> {
    let meminfo = proc.text("meminfo").map(|text| Meminfo::parse(&text)).unwrap_or_default();
    let group = Cgroup::read(proc, sysfs).ram.map(|ram| ram.left());
    meminfo.available.into_iter().chain(group).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;

    #[test]
    fn the_tighter_bound_counts() {
        let tree = Tree::new(&[]);
        let left = || headroom(&Proc::at(tree.root().join("proc")), &tree.root().join("sys"));
        assert_eq!(left(), None);
        tree.write("proc/meminfo", b"MemFree: 1 kB\nMemAvailable: 1000 kB\n");
        assert_eq!(left(), Some(1_024_000));
        tree.write("proc/self/cgroup", b"0::/job\n");
        tree.write("sys/fs/cgroup/job/memory.max", b"4096000\n");
        tree.write("sys/fs/cgroup/job/memory.current", b"4000000\n");
        assert_eq!(left(), Some(96_000));
    }
}
