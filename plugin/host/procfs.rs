//! Where the facts about process and machine in procfs are read from.
//!
//! The root is a value, as with [`super::sysfs`]: tests and `PINRAIL_PROC` point it at plain files.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::config::Settings;

/// Where procfs is mounted.
const SYSTEM_ROOT: &str = "/proc";

/// No file that is read is longer on any machine; a captured tree may hold anything.
const LONGEST: u64 = 16 << 20;

/// A procfs tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proc {
    root: PathBuf,
}

impl Default for Proc {
    fn default() -> Self {
        Self::at(SYSTEM_ROOT)
    }
}

impl Proc {
    /// A tree with this root.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The tree the settings ask for.
    pub fn from_settings(settings: &Settings) -> Self {
        settings.proc_root.as_ref().map_or_else(Self::default, Self::at)
    }

    /// A path below the root.
    pub fn path(&self, file: &str) -> PathBuf {
        self.root.join(file)
    }

    /// The text of a file; `None` where it cannot be read.
    pub fn text(&self, file: &str) -> Option<String> {
        text(&self.path(file))
    }

    /// What a symbolic link holds, such as `cgroup:[4026531835]`.
    pub fn link(&self, file: &str) -> Option<String> {
        fs::read_link(self.path(file)).ok()?.into_os_string().into_string().ok()
    }
}

/// The text of a file, at most [`LONGEST`] bytes of it; `None` where it cannot be read.
pub(super) fn text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(LONGEST).read_to_end(&mut bytes).ok()?;
    // Names of mapped files and of processes need not be UTF-8.
    Some(String::from_utf8_lossy(&bytes).into_owned())
}
