//! Where a library would have been found, to say what is wrong with the file that is there. The loader itself decides
//! what is opened; this is asked only after it refused.

use super::elf::Elf;
use std::path::{Path, PathBuf};

/// Folders that the loader looks into at last, on the distributions that NCCL is used on.
const SYSTEM: [&str; 8] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
];

/// `LD_LIBRARY_PATH`, as it is.
pub fn loader_path() -> Option<String> {
    let value = std::env::var_os("LD_LIBRARY_PATH")?;
    (!value.is_empty()).then(|| value.to_string_lossy().into_owned())
}

/// The folders of `LD_LIBRARY_PATH`; an empty entry is the current folder.
fn folders() -> impl Iterator<Item = PathBuf> {
    let value = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let named: Vec<PathBuf> = if value.is_empty() {
        Vec::new()
    } else {
        std::env::split_paths(&value)
            .map(|path| if path.as_os_str().is_empty() { ".".into() } else { path })
            .collect()
    };
    named.into_iter().chain(SYSTEM.into_iter().map(PathBuf::from))
}

/// The first file that one of the names leads to.
pub fn find(names: &[String]) -> Option<PathBuf> {
    names.iter().find_map(|name| {
        if name.contains('/') {
            return Some(PathBuf::from(name)).filter(|path| path.exists());
        }
        folders().map(|folder| folder.join(name)).find(|path| path.exists())
    })
}

/// A file of this name that is not where the loader looks, but in the current folder.
pub fn beside(names: &[String]) -> Option<String> {
    let bare = |name: &&String| !name.contains('/') && Path::new(name.as_str()).is_file();
    names.iter().find(bare).cloned()
}

/// Whether a library of a file's own folders has this name.
pub fn in_runpath(file: &Path, elf: &Elf, name: &str) -> bool {
    let origin = file.parent().unwrap_or_else(|| Path::new(".")).to_string_lossy();
    elf.runpath.iter().any(|folder| {
        let folder = folder.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin);
        Path::new(&folder).join(name).exists()
    })
}
