//! What this machine offers: an RDMA device or not, and where the built files are.

use crate::failure::{Failure, Result};
use std::path::{Path, PathBuf};

const PLUGIN: &str = "libnccl-net-pinrail.so";
const SOFTRNIC: &str = "softrnic/libibverbs.so.1";
const CLASS: &str = "/sys/class/infiniband";

/// The verbs library a run uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fabric {
    /// The system's library and a device of this machine.
    System { device: String },
    /// The software RNIC.
    SoftRnic { library: PathBuf },
    /// A library named by the user.
    Given { library: PathBuf },
}

impl Fabric {
    /// Decides where to run: a library the user names, else an active device, else softrnic. A device the user names
    /// decides between the last two.
    pub fn choose(verbs_lib: Option<&Path>, device: Option<&str>) -> Result<Self> {
        if let Some(library) = verbs_lib {
            let library = existing(library)?;
            return Ok(if library.ends_with(SOFTRNIC) {
                Self::SoftRnic { library }
            } else {
                Self::Given { library }
            });
        }
        let found = match device {
            Some(name) => Path::new(CLASS).join(name).exists().then(|| name.to_owned()),
            None => active_device(Path::new(CLASS)),
        };
        if let Some(device) = found {
            return Ok(Self::System { device });
        }
        let library = built(SOFTRNIC).ok_or_else(|| {
            Failure::usage(format!(
                "this machine has no active RDMA device, and {SOFTRNIC} is not in dist/: run make, or name a \
                 library with --verbs-lib"
            ))
        })?;
        Ok(Self::SoftRnic { library })
    }

    /// The library's path, where it is not the system's.
    pub fn library(&self) -> Option<&Path> {
        match self {
            Self::System { .. } => None,
            Self::SoftRnic { library } | Self::Given { library } => Some(library),
        }
    }

    /// Environment for a process that shall use this library: NCCL's own variable, and the loader's for programs (and
    /// older plugins) that do not know it.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let Some(library) = self.library() else { return Vec::new() };
        let mut variables = vec![("NCCL_IBVERBS_LIB", library.display().to_string())];
        if let Some(folder) = library.parent() {
            let mut path = folder.display().to_string();
            if let Some(old) = std::env::var_os("LD_LIBRARY_PATH").filter(|old| !old.is_empty()) {
                path = format!("{path}:{}", old.to_string_lossy());
            }
            variables.push(("LD_LIBRARY_PATH", path));
        }
        variables
    }

    /// One line for the user.
    pub fn describe(&self) -> String {
        match self {
            Self::System { device } => {
                format!("RDMA device {device} of this machine, system libibverbs")
            }
            Self::SoftRnic { library } => format!(
                "softrnic ({}): soft fabric, the bandwidth is the copy engine's, not a network's",
                library.display()
            ),
            Self::Given { library } => format!("verbs library {}", library.display()),
        }
    }
}

/// The first device with an active port.
fn active_device(class: &Path) -> Option<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(class).ok()?.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    names.into_iter().find_map(|name| {
        let ports = std::fs::read_dir(class.join(&name).join("ports")).ok()?;
        let active = ports.flatten().any(|port| {
            std::fs::read_to_string(port.path().join("state"))
                .is_ok_and(|state| state.contains("ACTIVE"))
        });
        active.then(|| name.to_string_lossy().into_owned())
    })
}

/// The plugin to load: the one given, else the built one.
pub fn plugin(given: Option<&Path>) -> Result<PathBuf> {
    match given {
        Some(path) => existing(path),
        None => built(PLUGIN).ok_or_else(|| {
            Failure::usage(format!(
                "dist/{PLUGIN} is not built: run make, or name a plugin with --plugin"
            ))
        }),
    }
}

fn existing(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(|error| Failure::usage(format!("{}: {error}", path.display())))
}

/// A file of dist/: beside the program, where an installation has it, in the working directory, or above the program's target
/// folder.
fn built(name: &str) -> Option<PathBuf> {
    let exe = std::env::current_exe().ok();
    let mut folders = Vec::new();
    if let Some(folder) = exe.as_deref().and_then(Path::parent) {
        folders.push(folder.to_owned());
        folders.extend(["../lib", "../lib/pinrail"].map(|installed| folder.join(installed)));
        folders.extend(folder.ancestors().skip(1).take(4).map(|up| up.join("dist")));
    }
    folders.push(PathBuf::from("dist"));
    folders.into_iter().find_map(|folder| folder.join(name).canonicalize().ok())
}

#[cfg(test)]
mod tests {
    use super::active_device;
    use std::fs;

    #[test]
    fn only_an_active_port_counts() {
        let class =
            std::env::temp_dir().join(format!("pinrail-bench-class-{}", std::process::id()));
        for (device, state) in [("mlx5_0", "1: DOWN"), ("mlx5_1", "4: ACTIVE")] {
            let port = class.join(device).join("ports/1");
            fs::create_dir_all(&port).expect("a folder");
            fs::write(port.join("state"), state).expect("a file");
        }
        assert_eq!(active_device(&class).as_deref(), Some("mlx5_1"));
        fs::write(class.join("mlx5_1/ports/1/state"), "1: DOWN").expect("a file");
        assert_eq!(active_device(&class), None);
        fs::remove_dir_all(&class).expect("removed");
    }
}
