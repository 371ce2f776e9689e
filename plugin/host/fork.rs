//! What a fork does to registered memory, as far as the verbs library's release and its variables tell.
//!
//! With fork handling armed, rdma-core marks every page that a registration touches so that a child does not get it. From
//! release 51 on it leaves that out where the kernel copies pinned pages for a child; before, it marks whenever somebody
//! armed it, necessary or not.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

/// The first release of rdma-core that marks no page where the kernel makes it unnecessary.
const NO_NEEDLESS_MARKS: u32 = 51;

/// Yes, no, or nobody can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// Yes.
    Yes,
    /// No.
    No,
    /// Nobody can tell.
    Unknown,
}

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Unknown => "unknown",
        })
    }
}

/// A release of rdma-core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// The number that counts.
    pub major: u32,
    /// The one behind it.
    pub minor: u32,
}

impl Release {
    /// From a file's name, such as `libibverbs.so.1.14.44.0`: behind the version of the private interface comes that of
    /// the package.
    pub fn of_file(name: &OsStr) -> Option<Self> {
        let mut numbers = name.to_str()?.strip_prefix("libibverbs.so.")?.split('.');
        let mut number = || numbers.next()?.parse::<u32>().ok();
        let (_soname, _private, major, minor) = (number()?, number()?, number()?, number()?);
        (major > 0).then_some(Self { major, minor })
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rdma-core {}.{}", self.major, self.minor)
    }
}

/// A verbs library that is loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Library {
    /// Its file, with links resolved; `None`: not known.
    pub file: Option<PathBuf>,
    /// Its release, where the file's name tells it.
    pub release: Option<Release>,
}

impl Library {
    /// The library in this file.
    pub fn of(file: Option<PathBuf>) -> Self {
        let release = file.as_deref().and_then(Path::file_name).and_then(Release::of_file);
        Self { file, release }
    }

    /// Whether it marks pages once it is armed. `copies`: whether the kernel copies pinned pages for a child.
    pub fn marks_when_armed(&self, copies: Known) -> Known {
        match (copies, self.release) {
            (Known::No, _) => Known::Yes,
            (_, Some(release)) if release.major < NO_NEEDLESS_MARKS => Known::Yes,
            (Known::Yes, Some(_)) => Known::No,
            _ => Known::Unknown,
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.release {
            Some(release) => write!(f, "{release}")?,
            None => f.write_str("a verbs library of unknown release")?,
        }
        self.file.as_ref().map_or(Ok(()), |file| write!(f, " ({})", file.display()))
    }
}

/// The variables by which rdma-core can be asked for fork handling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Variables {
    /// `RDMAV_FORK_SAFE`: it arms itself.
    pub rdmav: bool,
    /// `IBV_FORK_SAFE`: the same.
    pub ibv: bool,
    /// `RDMAV_HUGEPAGES_SAFE`: what it marks is rounded to the pages of the mapping, which may be huge.
    pub huge_pages: bool,
}

impl Variables {
    /// Those of this process. rdma-core asks for their presence only.
    pub fn of_process() -> Self {
        let set = |name| std::env::var_os(name).is_some();
        Self {
            rdmav: set("RDMAV_FORK_SAFE"),
            ibv: set("IBV_FORK_SAFE"),
            huge_pages: set("RDMAV_HUGEPAGES_SAFE"),
        }
    }

    /// Whether one of them arms the library when it first lists devices.
    pub fn arm(self) -> bool {
        self.rdmav || self.ibv
    }

    /// For the log: which are set, and whether this library heeds them on this kernel.
    pub fn describe(self, library: &Library, copies: Known) -> String {
        let heeded = library.marks_when_armed(copies);
        let one = |name: &str, set: bool| {
            if set { format!("{name} set, heeded: {heeded}") } else { format!("{name} not set") }
        };
        [
            one("RDMAV_FORK_SAFE", self.rdmav),
            one("IBV_FORK_SAFE", self.ibv),
            one("RDMAV_HUGEPAGES_SAFE", self.huge_pages),
        ]
        .join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn library(name: &str) -> Library {
        Library::of(Some(Path::new("/usr/lib").join(name)))
    }

    #[test]
    fn a_file_name_tells_the_release() {
        let release = |name: &str| Release::of_file(OsStr::new(name));
        let of = |major, minor| Some(Release { major, minor });
        assert_eq!(release("libibverbs.so.1.14.44.0"), of(44, 0));
        assert_eq!(release("libibverbs.so.1.15.56.1"), of(56, 1));
        for none in
            ["libibverbs.so.1", "libibverbs.so.1.0.0", "libibverbs.so.1.14.x.0", "libc.so.6", ""]
        {
            assert_eq!(release(none), None, "{none}");
        }
    }

    /// Measured with rdma-core 44 and 56 on kernels that copy, and with the kernel's answer hidden.
    #[test]
    fn old_releases_mark_without_need() {
        let (old, new) = (library("libibverbs.so.1.14.44.0"), library("libibverbs.so.1.14.56.1"));
        let last_old = library("libibverbs.so.1.14.50.0");
        assert_eq!(
            [&old, &last_old, &new].map(|l| l.marks_when_armed(Known::Yes)),
            [Known::Yes, Known::Yes, Known::No]
        );
        assert_eq!([&old, &new].map(|l| l.marks_when_armed(Known::No)), [Known::Yes; 2]);
        assert_eq!(
            [&old, &new].map(|l| l.marks_when_armed(Known::Unknown)),
            [Known::Yes, Known::Unknown]
        );
        let unknown = Library::default();
        assert_eq!(unknown.marks_when_armed(Known::Yes), Known::Unknown);
        assert_eq!(unknown.marks_when_armed(Known::No), Known::Yes);
    }

    #[test]
    fn the_variables_are_told_with_whether_they_count() {
        let set = Variables { rdmav: true, ..Variables::default() };
        assert!(set.arm() && !Variables { huge_pages: true, ..Variables::default() }.arm());
        let text = set.describe(&library("libibverbs.so.1.14.56.1"), Known::Yes);
        assert!(text.contains("RDMAV_FORK_SAFE set, heeded: no, IBV_FORK_SAFE not set"), "{text}");
        let text = set.describe(&library("libibverbs.so.1.14.44.0"), Known::Yes);
        assert!(text.contains("heeded: yes"), "{text}");
    }

    #[test]
    fn a_library_says_what_it_is() {
        let text = library("libibverbs.so.1.14.44.0").to_string();
        assert_eq!(text, "rdma-core 44.0 (/usr/lib/libibverbs.so.1.14.44.0)");
        assert_eq!(Library::default().to_string(), "a verbs library of unknown release");
    }

    proptest! {
        #[test]
        fn any_name_is_read(name in "(libibverbs.so.)?[0-9a-z.]{0,30}") {
            let _ = Release::of_file(OsStr::new(&name));
        }
    }
}
