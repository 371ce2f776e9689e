//! The limits of the process that RDMA runs into.

use std::fmt;
use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::procfs::Proc;

/// One limit; `None` is unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limit {
    /// What applies.
    pub soft: Option<u64>,
    /// How far the process may raise it.
    pub hard: Option<u64>,
}

impl Limit {
    fn of(resource: Resource) -> Self {
        let limit = getrlimit(resource);
        Self { soft: limit.current, hard: limit.maximum }
    }

    /// Whether an amount is allowed.
    pub fn allows(&self, amount: u64) -> bool {
        self.soft.is_none_or(|soft| amount <= soft)
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word =
            |side: Option<u64>| side.map_or_else(|| "unlimited".to_owned(), |n| n.to_string());
        write!(f, "soft {}, hard {}", word(self.soft), word(self.hard))
    }
}

/// Bytes the process may lock into memory; registering host memory counts against it.
pub fn memlock() -> Limit {
    Limit::of(Resource::Memlock)
}

/// The same as `self/limits` of a procfs tree tells it, else as the kernel does.
pub fn memlock_of(proc: &Proc) -> Limit {
    proc.text("self/limits").and_then(|text| in_text(&text, MEMLOCK)).unwrap_or_else(memlock)
}

/// The line of [`in_text`] for [`memlock`].
pub const MEMLOCK: &str = "Max locked memory";
/// The line of [`in_text`] for [`nofile`].
pub const NOFILE: &str = "Max open files";

/// Reads a line of `/proc/<pid>/limits` such as `Max locked memory  8388608  unlimited  bytes`.
pub fn in_text(text: &str, name: &str) -> Option<Limit> {
    let amount = |word: &str| match word {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = line.split_whitespace();
    Some(Limit { soft: amount(words.next()?)?, hard: amount(words.next()?)? })
}

/// Bytes of address space the process may have.
pub fn address_space() -> Limit {
    Limit::of(Resource::As)
}

/// Bytes that a file may get; a longer write ends the process unless it handles a signal.
pub fn file_size() -> Limit {
    Limit::of(Resource::Fsize)
}

/// File descriptors the process may hold.
pub fn nofile() -> Limit {
    Limit::of(Resource::Nofile)
}

/// Raises the number of file descriptors to what the process is entitled to; each connection holds
/// a socket, and the usual soft limit is 1024. Returns the limit afterwards.
pub fn raise_nofile() -> io::Result<Limit> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    }
    Ok(nofile())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_reaches_the_hard_one() {
        let before = nofile();
        let after = raise_nofile().unwrap();
        assert_eq!((after.soft, after.hard), (before.hard, before.hard));
        assert_eq!(raise_nofile().unwrap(), after);
    }

    #[test]
    fn the_limit_of_a_captured_process() {
        let text = "Limit  Soft  Hard  Units\nMax locked memory         8388608              unlimited            bytes     \n";
        let limit = in_text(text, MEMLOCK).unwrap();
        assert_eq!(limit, Limit { soft: Some(8 << 20), hard: None });
        assert_eq!(in_text(text, NOFILE), None);
        for bad in ["", "Max locked memory", "Max locked memory 1", "Max locked memory x 1 bytes"] {
            assert_eq!(in_text(bad, MEMLOCK), None, "{bad}");
        }
        assert_eq!(memlock_of(&Proc::default()), memlock());
        assert_eq!(memlock_of(&Proc::at("/no/such/folder")), memlock());
    }

    #[test]
    fn amounts_are_compared_with_the_soft_limit() {
        let limit = Limit { soft: Some(10), hard: None };
        assert!(limit.allows(10) && !limit.allows(11));
        assert!(Limit { soft: None, hard: None }.allows(u64::MAX));
        assert_eq!(limit.to_string(), "soft 10, hard unlimited");
        assert!(memlock().allows(0));
    }
}
