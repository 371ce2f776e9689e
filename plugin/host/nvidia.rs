//! The NVIDIA kernel driver, and whether it declares its pins of host memory as long-term ones.
//!
//! A pin that does not say so leaves a page where a later registration refuses it. Only what the
//! published sources of the driver show is stated; everything else is unknown.

use super::procfs::Proc;

/// The file in procfs that names it.
pub const FILE: &str = "driver/nvidia/version";

/// The driver, as `/proc/driver/nvidia/version` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// The release, such as `560.35.03`.
    pub version: String,
    /// The branch, such as 560.
    pub branch: u32,
    /// Open kernel modules, or the proprietary ones.
    pub open: bool,
}

/// Whether a pin is declared as a long-term one (`FOLL_LONGTERM`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LongTerm {
    /// It is.
    Yes,
    /// It is not.
    No,
    /// Nobody looked at the source of this branch for this architecture.
    Unknown,
}

impl LongTerm {
    /// The word for it in logs and records.
    pub fn word(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Unknown => "unknown",
        }
    }
}

impl Driver {
    /// Reads the text of the file, whose first line is `NVRM version: NVIDIA UNIX Open Kernel Module
    /// for x86_64  560.35.03  Release Build …` or `NVRM version: NVIDIA UNIX x86_64 Kernel Module
    /// 535.129.03  …`.
    pub fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
        let (version, branch) = line.split_whitespace().find_map(|word| {
            let numeric = word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
            let (branch, _) = word.split_once('.').filter(|_| numeric)?;
            Some((word.to_owned(), branch.parse().ok()?))
        })?;
        Some(Self { version, branch, open: line.contains("Open Kernel Module") })
    }

    /// The driver that is loaded, if any.
    pub fn read(proc: &Proc) -> Option<Self> {
        Self::parse(&proc.text(FILE)?)
    }

    /// The flavour in a word.
    pub fn flavour(&self) -> &'static str {
        if self.open { "open" } else { "proprietary" }
    }

    /// Whether its pins of host memory are declared long-term on this architecture (as
    /// [`std::env::consts::ARCH`] names it).
    pub fn long_term(&self, architecture: &str) -> LongTerm {
        match self.branch {
            525 | 535 => LongTerm::No,
            branch if long_term_since(architecture).is_some_and(|since| branch >= since) => {
                LongTerm::Yes
            }
            _ => LongTerm::Unknown,
        }
    }
}

/// The branch from which on pins of host memory are declared long-term on this architecture; `None`: not known of any.
pub fn long_term_since(architecture: &str) -> Option<u32> {
    (architecture == "x86_64").then_some(555)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn both_flavours_are_recognised() {
        for (text, version, branch, open) in [
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build  (dvs-builder@x)  Fri Aug 16 21:42:42 UTC 2024\nGCC version:  gcc version 12.3.0\n",
                "560.35.03",
                560,
                true,
            ),
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n",
                "535.129.03",
                535,
                false,
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build\n",
                "580.95.05",
                580,
                true,
            ),
        ] {
            let driver = Driver::parse(text).unwrap();
            assert_eq!(
                (driver.version.as_str(), driver.branch, driver.open),
                (version, branch, open)
            );
        }
        for text in ["", "NVRM version:", "GCC version: 12.3.0", "NVRM version: x 99999999999.1"] {
            assert_eq!(Driver::parse(text), None, "{text}");
        }
        assert_eq!(Driver::read(&Proc::at("/no/such/folder")), None);
    }

    #[test]
    fn only_what_the_sources_show_is_stated() {
        let asks =
            |branch, arch| Driver { version: String::new(), branch, open: true }.long_term(arch);
        for (branch, arch, expected) in [
            (525, "x86_64", LongTerm::No),
            (535, "x86_64", LongTerm::No),
            (530, "x86_64", LongTerm::Unknown),
            (545, "x86_64", LongTerm::Unknown),
            (550, "x86_64", LongTerm::Unknown),
            (555, "x86_64", LongTerm::Yes),
            (580, "x86_64", LongTerm::Yes),
            (580, "aarch64", LongTerm::Unknown),
            (470, "x86_64", LongTerm::Unknown),
        ] {
            assert_eq!(asks(branch, arch), expected, "{branch} {arch}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>(), n in "[0-9.]{0,30}") {
            let _ = Driver::parse(&text);
            let _ = Driver::parse(&format!("NVRM version: {text} {n}"));
        }
    }
}
