//! Paths of a captured tree: links are followed as on the host that it was captured from, so that none leads to a file of
//! this one.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// Links that are followed on one path, as many as the kernel follows.
const MOST_LINKS: u32 = 40;

/// Where a path lies that is not to be had: nothing is below a file.
const NOWHERE: &str = "/dev/null/nowhere";

/// The tree that paths must not leave, if there is one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds(Option<PathBuf>);

impl Bounds {
    /// Those of a captured tree.
    pub fn of(tree: impl Into<PathBuf>) -> Self {
        Self(Some(tree.into()))
    }

    /// Where a path below the tree really lies. Without a tree the path itself: the kernel follows its links.
    pub fn follow(&self, path: &Path) -> PathBuf {
        self.apply(path, follow)
    }

    /// The same without following the last name.
    pub fn beside(&self, path: &Path) -> PathBuf {
        self.apply(path, beside)
    }

    fn apply(&self, path: &Path, with: fn(&Path, &Path) -> PathBuf) -> PathBuf {
        let Some(tree) = &self.0 else { return path.to_owned() };
        path.strip_prefix(tree).map_or_else(|_| NOWHERE.into(), |below| with(tree, below))
    }
}

/// Where a path of the tree really lies, with every link followed. Absolute links begin at the tree's root, and `..` ends
/// there. Of what does not exist, the names are kept.
pub fn follow(root: &Path, path: &Path) -> PathBuf {
    resolve(root, path).unwrap_or_else(|| NOWHERE.into())
}

/// The same without following the last name, for links that say something by their text.
pub fn beside(root: &Path, path: &Path) -> PathBuf {
    match (path.parent(), path.file_name()) {
        (Some(folder), Some(name)) => follow(root, folder).join(name),
        _ => follow(root, path),
    }
}

fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut left = MOST_LINKS;
    // What lies ahead, the next name last.
    let mut ahead: Vec<PathBuf> = Vec::new();
    push(&mut ahead, path);
    // Names below the root, none of them a link.
    let mut place = PathBuf::new();
    while let Some(next) = ahead.pop() {
        if next == Path::new("/") {
            place.clear();
        } else if next == Path::new("..") {
            place.pop();
        } else if let Ok(target) = fs::read_link(root.join(&place).join(&next)) {
            left = left.checked_sub(1)?;
            push(&mut ahead, &target);
        } else {
            place.push(next);
        }
    }
    Some(root.join(place))
}

fn push(ahead: &mut Vec<PathBuf>, path: &Path) {
    for part in path.components().rev() {
        match part {
            Component::RootDir | Component::ParentDir | Component::Normal(_) => {
                ahead.push(part.as_os_str().into());
            }
            Component::CurDir | Component::Prefix(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;
    use proptest::prelude::*;

    #[test]
    fn links_are_those_of_the_captured_host() {
        let tree = Tree::new(&[("etc/real", "captured"), ("a/b/file", "x")]);
        tree.link("etc/absolute", "/etc/real");
        tree.link("a/up", "../../../../../etc/real");
        tree.link("a/folder", "/a/b");
        tree.link("round", "round");
        tree.link("a/to-round", "../round");
        let at = |path: &str| {
            let found = follow(tree.root(), Path::new(path));
            found.strip_prefix(tree.root()).ok().map(|p| p.to_str().unwrap().to_owned())
        };
        let of = |text: &str| Some(text.to_owned());
        assert_eq!(at("etc/absolute"), of("etc/real"));
        assert_eq!(at("/etc/absolute"), of("etc/real"), "a path of the host is one of the tree");
        assert_eq!(at("a/up"), of("etc/real"), "there is nothing above the root");
        assert_eq!(at("a/folder/file"), of("a/b/file"));
        assert_eq!(at("a/folder/../../etc/real"), of("etc/real"), "`..` is that of the link's end");
        assert_eq!(at("../../etc/real"), of("etc/real"));
        assert_eq!(at("no/such/../file"), of("no/file"));
        assert_eq!(at("round"), None);
        assert_eq!(at("a/to-round/x"), None);
        assert!(!follow(tree.root(), Path::new("round")).exists());
        let kept = beside(tree.root(), Path::new("/a/folder/../up"));
        assert_eq!(kept, tree.root().join("a/up"));
    }

    proptest! {
        #[test]
        fn nothing_leads_out(path in "[a-c./]{0,24}", target in "[a-c./]{1,24}") {
            let tree = Tree::new(&[("a/b", "x")]);
            tree.link("c", &target);
            let found = follow(tree.root(), Path::new(&path));
            let inside = found.strip_prefix(tree.root()).ok().is_some_and(|below| {
                below.components().all(|part| matches!(part, Component::Normal(_)))
            });
            prop_assert!(inside || found == Path::new(NOWHERE), "{} -> {}", path, found.display());
        }
    }
}
