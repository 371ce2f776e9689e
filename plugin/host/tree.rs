//! Made-up hosts for tests: a folder of plain files that goes away with the value.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A tree of plain files.
#[derive(Debug)]
pub(crate) struct Tree(PathBuf);

impl Tree {
    /// A tree with these files: path and text.
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let root =
            std::env::temp_dir().join(format!("pinrail-tree-{}-{number}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        let tree = Self(root);
        for (path, text) in files {
            tree.write(path, text.as_bytes());
        }
        tree
    }

    /// The root.
    pub(crate) fn root(&self) -> &Path {
        &self.0
    }

    /// Writes one file.
    pub(crate) fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Makes one symbolic link, wherever it leads.
    pub(crate) fn link(&self, path: &str, to: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(to, path).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
