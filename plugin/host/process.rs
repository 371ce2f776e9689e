//! Which process a number stands for. A number is used again after its process has ended, and counts only in its own
//! PID namespace and since the last boot; with these three it says one process for good.

use super::procfs::Proc;

/// What `/proc/<pid>/stat` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// The number.
    pub pid: u32,
    /// Name of the program, as far as the kernel keeps it.
    pub name: String,
    /// When the process was started, in ticks since boot.
    pub start: u64,
}

impl Stat {
    /// Reads the text of the file.
    pub fn parse(text: &str) -> Option<Self> {
        let (pid, rest) = text.split_once(" (")?;
        // The name may hold anything, parentheses and blanks too.
        let (name, rest) = rest.rsplit_once(')')?;
        // The field behind the name is the third; the start is the 22nd.
        let start = rest.split_whitespace().nth(22 - 3)?.parse().ok()?;
        Some(Self { pid: pid.trim().parse().ok()?, name: name.to_owned(), start })
    }

    /// What is known about a process; `None`: there is none, or it is hidden.
    pub fn read(proc: &Proc, pid: u32) -> Option<Self> {
        Self::parse(&proc.text(&format!("{pid}/stat"))?)
    }
}

/// One process, and never another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessId {
    /// Its number.
    pub pid: u32,
    /// When it was started, in ticks since boot.
    pub start: u64,
    /// The PID namespace that the number counts in.
    pub namespace: u64,
    /// The boot that the start counts from.
    pub boot: [u64; 2],
}

impl ProcessId {
    /// This process. `None` where there is no procfs, or one of another PID namespace.
    pub fn own(proc: &Proc) -> Option<Self> {
        let stat = Stat::parse(&proc.text("self/stat")?)?;
        if stat.pid != std::process::id() {
            return None;
        }
        Some(Self {
            pid: stat.pid,
            start: stat.start,
            namespace: namespace(&proc.link("self/ns/pid")?)?,
            boot: boot(&proc.text("sys/kernel/random/boot_id")?)?,
        })
    }
}

/// The number in `pid:[4026531836]`.
fn namespace(link: &str) -> Option<u64> {
    link.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// The words of `cda45ea1-36fb-4d5c-a9d8-7f4e2e4f8ea5`.
fn boot(text: &str) -> Option<[u64; 2]> {
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    let id = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok())??;
    Some([(id >> 64) as u64, id as u64])
}

/// The number by which a process knows itself: the last of those that its PID namespaces give it.
pub fn inner_pid(proc: &Proc, pid: u32) -> Option<u32> {
    let status = proc.text(&format!("{pid}/status"))?;
    let all = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    all.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;
    use proptest::prelude::*;

    #[test]
    fn a_name_may_hold_anything() {
        let tail = "S 1 1 1 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 8812 1234 56";
        for name in ["cat", "a (b) c", ") R 1", ""] {
            let stat = Stat::parse(&format!("42 ({name}) {tail}\n")).unwrap();
            assert_eq!(stat, Stat { pid: 42, name: name.into(), start: 8812 });
        }
        for bad in ["", "42", "42 (cat", "42 (cat) S 1", "x (cat) S"] {
            assert_eq!(Stat::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn this_process_knows_itself() {
        let proc = Proc::default();
        let own = ProcessId::own(&proc).unwrap();
        assert_eq!(own.pid, std::process::id());
        assert_eq!(Stat::read(&proc, own.pid).unwrap().start, own.start);
        assert_eq!(inner_pid(&proc, own.pid), Some(own.pid));
        assert_ne!(own.boot, [0, 0]);
        assert_eq!(ProcessId::own(&Proc::at("/no/such/folder")), None);
    }

    #[test]
    fn a_procfs_of_another_namespace_is_not_ours() {
        let other = std::process::id() + 1;
        let stat = format!("{other} (x) S 1 1 1 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 8812 1");
        let tree = Tree::new(&[("self/stat", &stat)]);
        assert_eq!(ProcessId::own(&Proc::at(tree.root())), None);
    }

    #[test]
    fn the_last_number_is_the_process_s_own() {
        let tree = Tree::new(&[("7/status", "Name:\tx\nNSpid:\t7\t12\t1\n"), ("8/status", "x")]);
        let proc = Proc::at(tree.root());
        assert_eq!((inner_pid(&proc, 7), inner_pid(&proc, 8)), (Some(1), None));
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>(), id in "[0-9a-f-]{30,40}") {
            let _ = (Stat::parse(&text), namespace(&text), boot(&text), boot(&id));
        }
    }
}
