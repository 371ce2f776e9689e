//! Where the facts about process and machine in procfs are read from.
//!
//! The root is a value, as with [`super::sysfs`]: tests and `PINRAIL_PROC` point it at plain files.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::inside::Bounds;
use super::plain;
use crate::config::Settings;

/// Where procfs is mounted.
const SYSTEM_ROOT: &str = "/proc";

/// No file that is read is longer on any machine; a captured tree may hold anything.
const LONGEST: u64 = 16 << 20;

/// A procfs tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proc {
    root: PathBuf,
    bounds: Bounds,
}

impl Default for Proc {
    fn default() -> Self {
        Self::at(SYSTEM_ROOT)
    }
}

impl Proc {
    /// A tree with this root.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), bounds: Bounds::default() }
    }

    /// That of a captured tree, whose links do not lead out of it.
    pub fn captured(tree: &Path) -> Self {
        Self { root: tree.join("proc"), bounds: Bounds::of(tree) }
    }

    /// The tree the settings ask for.
    pub fn from_settings(settings: &Settings) -> Self {
        settings.proc_root.as_ref().map_or_else(Self::default, Self::at)
    }

    /// A path below the root.
    pub fn path(&self, file: &str) -> PathBuf {
        self.found(&self.root.join(file))
    }

    /// Where a path of the same host really lies: itself, but in a captured tree.
    pub(super) fn found(&self, path: &Path) -> PathBuf {
        self.bounds.follow(path)
    }

    /// The kernel's log, in `/dev` beside it. Not `kmsg` in here: who reads that takes it from everybody.
    pub fn log(&self) -> PathBuf {
        self.found(&self.root.join("../dev/kmsg"))
    }

    /// The text of a file; `None` where it cannot be read.
    pub fn text(&self, file: &str) -> Option<String> {
        text(&self.path(file))
    }

    /// What a symbolic link holds, such as `cgroup:[4026531835]`.
    pub fn link(&self, file: &str) -> Option<String> {
        fs::read_link(self.bounds.beside(&self.root.join(file)))
            .ok()?
            .into_os_string()
            .into_string()
            .ok()
    }
}

/// The text of a file, at most [`LONGEST`] bytes of it; `None` where it cannot be read.
pub(super) fn text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    plain::open(path).ok()?.take(LONGEST).read_to_end(&mut bytes).ok()?;
    // Names of mapped files and of processes need not be UTF-8.
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;

    #[test]
    fn a_captured_tree_may_hold_anything() {
        let tree = Tree::new(&[("short", "text")]);
        tree.write("damaged", &[b'a', 0xff, b'b']);
        let file = fs::File::create(tree.root().join("huge")).unwrap();
        file.set_len(LONGEST + (1 << 30)).unwrap();
        let proc = Proc::at(tree.root());
        assert_eq!(proc.text("short").as_deref(), Some("text"));
        assert_eq!(proc.text("damaged").as_deref(), Some("a\u{fffd}b"));
        assert_eq!(proc.text("huge").map(|text| text.len() as u64), Some(LONGEST));
        assert_eq!((proc.text("absent"), proc.text(""), proc.link("short")), (None, None, None));
    }

    #[test]
    fn the_setting_moves_the_root() {
        let (settings, _) = Settings::parse([("PINRAIL_PROC".to_owned(), "/some/tree".to_owned())]);
        assert_eq!(Proc::from_settings(&settings), Proc::at("/some/tree"));
        assert_eq!(Proc::from_settings(&Settings::default()), Proc::default());
    }
}
