//! Files that processes left behind which did not end as they should.

use super::layout::{self, HEADER, Refused};
use crate::host::plain::open_unfollowed;
use crate::host::process::{ProcessId, Stat};
use crate::host::procfs::Proc;
use rustix::fs::unlink;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The name of a process's file.
pub fn name(pid: u32) -> String {
    format!("pinrail.{pid}")
}

/// The process that a file's name stands for.
pub fn pid(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("pinrail.")?;
    let pid = digits.parse().ok()?;
    // Not `+5` and not `05`.
    (self::name(pid) == name).then_some(pid)
}

/// Removes the files of this user's dead processes from a folder; returns what was removed. What belongs to another
/// user, another PID namespace or to nobody who can be found stays.
pub fn sweep(folder: &Path, me: &ProcessId) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().and_then(pid).is_some())
        .map(|entry| entry.path())
        .filter(|path| is_stale(path, me) && unlink(path).is_ok())
        .collect()
}

fn is_stale(path: &Path, me: &ProcessId) -> bool {
    let Ok((file, stat)) = open_unfollowed(path) else { return false };
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return false;
    }
    let mut head = Vec::with_capacity(HEADER);
    if file.take(HEADER as u64).read_to_end(&mut head).is_err() {
        return false;
    }
    let proc = Proc::default();
    let named = path.file_name().and_then(|name| pid(name.to_str()?));
    match (layout::owner(&head), named) {
        // A file that somebody renamed says nothing about the process of its name.
        (Ok(owner), Some(pid)) if pid == owner.pid => is_gone(&owner, me, stat.st_ino, &proc),
        // Its process ended, or was ended, while it wrote the header.
        (Err(Refused::Empty), Some(pid)) => Stat::read(&proc, pid).is_none(),
        _ => false,
    }
}

/// Whether the process of a file is gone.
fn is_gone(owner: &ProcessId, me: &ProcessId, inode: u64, proc: &Proc) -> bool {
    if owner.boot != me.boot {
        return true;
    }
    if owner.namespace != me.namespace {
        return false;
    }
    if owner.pid == me.pid && owner.start == me.start {
        // Of this process, or of the program that it was before exec.
        return !maps_inode(proc, inode);
    }
    Stat::read(proc, owner.pid).is_none_or(|stat| stat.start != owner.start)
}

/// Whether this process maps a file; true where that cannot be told.
fn maps_inode(proc: &Proc, inode: u64) -> bool {
    let inode = inode.to_string();
    proc.text("self/maps").is_none_or(|maps| {
        maps.lines().any(|line| line.split_whitespace().nth(4) == Some(inode.as_str()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: ProcessId = ProcessId { pid: 10, start: 100, namespace: 5, boot: [1, 2] };

    #[test]
    fn names_stand_for_processes() {
        assert_eq!(pid(&name(42)), Some(42));
        for other in
            ["pinrail.", "pinrail.x", "pinrail.+5", "pinrail.05", "xpinrail.5", "pinrail.5.new"]
        {
            assert_eq!(pid(other), None, "{other}");
        }
    }

    #[test]
    fn who_is_gone() {
        let stat = |pid: u32, start: u64| {
            format!("{pid} (x) S 1 1 1 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 {start} 1 2")
        };
        let tree = crate::host::tree::Tree::new(&[
            ("20/stat", &stat(20, 200)),
            ("self/maps", "10000-20000 rw-s 00000000 00:01 77   /dev/shm/pinrail.10\n"),
        ]);
        let proc = Proc::at(tree.root());
        for (owner, inode, gone) in [
            // Another process that lives, one whose number was used again, one that ended.
            (ProcessId { pid: 20, start: 200, ..ME }, 1, false),
            (ProcessId { pid: 20, start: 201, ..ME }, 1, true),
            (ProcessId { pid: 21, start: 200, ..ME }, 1, true),
            // Where this process cannot look, and before the last boot.
            (ProcessId { pid: 21, namespace: 6, ..ME }, 1, false),
            (ProcessId { pid: 20, start: 200, boot: [1, 3], ..ME }, 1, true),
            // This process's own, and one that it made before exec.
            (ME, 77, false),
            (ME, 78, true),
        ] {
            assert_eq!(is_gone(&owner, &ME, inode, &proc), gone, "{owner:?} {inode}");
        }
    }
}
