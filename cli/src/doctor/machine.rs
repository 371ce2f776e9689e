//! The host that is looked at: this one, or a captured tree.

use super::verbs::VerbsFacts;
use nccl_net_pinrail::config::{Notice, Settings};
use nccl_net_pinrail::host::container::Container;
use nccl_net_pinrail::host::inside::Bounds;
use nccl_net_pinrail::host::plain;
use nccl_net_pinrail::host::procfs::Proc;
use nccl_net_pinrail::host::sysfs::Sysfs;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// No file that is read is longer; a captured tree may hold anything.
const LONGEST: u64 = 1 << 20;

/// The host.
#[derive(Debug)]
pub struct Machine {
    /// Where its file system begins.
    pub root: PathBuf,
    /// It is this one.
    pub live: bool,
    /// Its sysfs.
    pub sysfs: Sysfs,
    /// Its procfs.
    pub proc: Proc,
    /// The plugin's settings, as it would read them.
    pub settings: Settings,
    /// What reading them had to tell.
    pub notices: Vec<Notice>,
    /// What the verbs library says; `None`: it was not captured.
    pub verbs: Option<VerbsFacts>,
    /// Whether the process is in a container.
    pub container: Container,
    /// The variables could be read.
    pub knows_environment: bool,
    environment: Vec<(OsString, OsString)>,
    bounds: Bounds,
}

impl Machine {
    /// This host, as this process sees it.
    pub fn live() -> Self {
        let (settings, notices) = Settings::from_process();
        let (sysfs, proc) = (Sysfs::from_settings(&settings), Proc::from_settings(&settings));
        Self {
            root: "/".into(),
            bounds: Bounds::default(),
            knows_environment: true,
            live: true,
            verbs: Some(VerbsFacts::of_process(&settings)),
            container: Container::read(&proc),
            environment: std::env::vars_os().collect(),
            sysfs,
            proc,
            settings,
            notices,
        }
    }

    /// A captured tree.
    ///
    /// # Errors
    /// There is none.
    pub fn at(root: &Path) -> Result<Self, String> {
        let bounds = Bounds::of(root);
        let is_folder = |part: &&str| bounds.follow(&root.join(part)).is_dir();
        let missing = ["proc/self", "sys"].into_iter().find(|part| !is_folder(part));
        if let Some(missing) = missing {
            return Err(format!(
                "{} holds no captured tree: there is no folder {missing} in it. pinrail doctor --bundle FILE captures \
                 one, tar -xf FILE -C DIR unpacks it",
                root.display()
            ));
        }
        let (settings, notices) = Settings::from_tree(root);
        let (sysfs, proc) = (Sysfs::captured(root), Proc::captured(root));
        let environ = read(&bounds.follow(&root.join("proc/self/environ")));
        let knows_environment = environ.is_some();
        let environ = environ.unwrap_or_default();
        let environment = environ.split(|byte| *byte == 0).filter_map(|entry| {
            let at = entry.iter().position(|byte| *byte == b'=')?;
            let os = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
            Some((os(&entry[..at]), os(&entry[at + 1..])))
        });
        Ok(Self {
            root: root.to_owned(),
            live: false,
            verbs: VerbsFacts::of_tree(root)?,
            knows_environment,
            bounds,
            container: Container::read(&proc),
            environment: environment.collect(),
            sysfs,
            proc,
            settings,
            notices,
        })
    }

    /// A variable of the process.
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        self.environment.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_os_str())
    }

    /// All variables of the process.
    pub fn variables(&self) -> &[(OsString, OsString)] {
        &self.environment
    }

    /// Where a path of the host lies.
    pub fn path(&self, path: &str) -> PathBuf {
        self.bounds.follow(&self.root.join(path.trim_start_matches('/')))
    }

    /// A folder below sysfs, wherever that is.
    pub fn sys(&self, path: &str) -> PathBuf {
        self.bounds.follow(&self.sysfs.root().join(path))
    }

    /// What a symbolic link below sysfs holds.
    pub fn sys_link(&self, path: &str) -> Option<PathBuf> {
        fs::read_link(self.bounds.beside(&self.sysfs.root().join(path))).ok()
    }

    /// The bytes of a file of the host; `None` where it cannot be read.
    pub fn read(&self, path: &Path) -> Option<Vec<u8>> {
        read(&self.bounds.follow(path))
    }

    /// The names in a folder of the host, sorted; empty where it cannot be read.
    pub fn names(&self, folder: &Path) -> Vec<String> {
        names(&self.bounds.follow(folder))
    }

    /// Those of some files in procfs that cannot be read, for a sentence; `None`: all can.
    pub fn unread(&self, files: &[&str]) -> Option<String> {
        let lost = files.iter().filter(|file| self.proc.text(file).is_none());
        let lost: Vec<String> = lost.map(|file| format!("/proc/{file}")).collect();
        (!lost.is_empty()).then(|| format!("{} cannot be read", lost.join(", ")))
    }

    /// A file in procfs is there and cannot be read.
    pub fn withholds(&self, file: &str) -> bool {
        self.proc.path(file).symlink_metadata().is_ok() && self.proc.text(file).is_none()
    }

    /// The text of a file below sysfs, without surrounding blanks.
    pub fn sys_text(&self, path: &str) -> Option<String> {
        let bytes = read(&self.sys(path))?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// Architecture of the host, as the kernel names it.
    pub fn architecture(&self) -> String {
        let text = self.proc.text("sys/kernel/arch").map(|text| text.trim().to_owned());
        text.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
    }

    /// The process is in a container.
    pub fn contained(&self) -> bool {
        self.container.inside() == Some(true)
    }

    /// NVIDIA GPUs on the PCI bus: their paths in the device tree.
    pub fn gpus(&self) -> Vec<String> {
        self.names(&self.sys("bus/pci/devices"))
            .into_iter()
            .filter(|name| {
                let file = |file: &str| self.sys_text(&format!("bus/pci/devices/{name}/{file}"));
                let class = file("class").unwrap_or_default();
                file("vendor").as_deref() == Some("0x10de") && class.starts_with("0x03")
            })
            .collect()
    }
}

/// The bytes of a file; `None` where it cannot be read.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    plain::open(path).ok()?.take(LONGEST).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// The names in a folder, sorted; empty where it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}
