//! The process that is asked about, as it was at one moment.

use nccl_net_pinrail::config::{Settings, printable};
use nccl_net_pinrail::host::process::{ProcessId, Stat};
use nccl_net_pinrail::host::procfs::Proc;
use nccl_net_pinrail::host::smaps::Smaps;
use nccl_net_pinrail::memory::inventory::{FOLDER, Inventory, stale};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// What is known of the process's registrations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// It publishes them.
    Read(Inventory),
    /// It does not: no pinrail in it, or none that has registered anything.
    Absent,
    /// It does, but they cannot be read.
    Unreadable(String),
}

impl Known {
    /// The registrations, if they are known.
    pub fn inventory(&self) -> Option<&Inventory> {
        match self {
            Self::Read(inventory) => Some(inventory),
            Self::Absent | Self::Unreadable(_) => None,
        }
    }
}

/// The process.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its number.
    pub pid: u32,
    /// The name of its program.
    pub name: String,
    /// Its mappings.
    pub smaps: Smaps,
    /// Its registrations.
    pub known: Known,
}

impl Target {
    /// Reads everything.
    ///
    /// # Errors
    /// In words, with what to do: there is no such process, or it may not be looked at.
    pub fn read(pid: u32) -> Result<Self, String> {
        let proc = Proc::default();
        if !proc.path("self").exists() {
            return Err("/proc is not mounted; this command reads everything from there".into());
        }
        let before = Stat::read(&proc, pid);
        let smaps = Smaps::of_process(pid).map_err(|e| match e.kind() {
            ErrorKind::NotFound => format!("there is no process {pid}"),
            ErrorKind::PermissionDenied => format!(
                "process {pid} belongs to somebody else, or forbids being looked at; run this as its user or as root"
            ),
            _ if e.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
                format!("process {pid} has ended")
            }
            _ => format!("/proc/{pid}/smaps: {e}"),
        })?;
        if smaps.mappings.is_empty() {
            return Err(format!(
                "process {pid} has no memory: it is ending, is waited for, or is a thread of the kernel"
            ));
        }
        if smaps.mappings.iter().all(|mapping| mapping.flags.is_empty()) {
            return Err(format!("/proc/{pid}/smaps has no VmFlags; the kernel is older than 3.8"));
        }
        let known = match Inventory::of(&proc, pid, &smaps) {
            Ok(None) => Known::Absent,
            Ok(Some(inventory)) => Known::Read(inventory),
            Err(reason) => Known::Unreadable(printable(&reason)),
        };
        // The number may have gone to another process between two looks.
        match (before, Stat::read(&proc, pid)) {
            (Some(before), Some(after)) if before.start == after.start => {
                Ok(Self { pid, name: printable(&after.name), smaps, known })
            }
            _ => Err(format!("process {pid} has ended meanwhile")),
        }
    }
}

/// Removes what dead processes of this user left behind, where the plugin puts its files; returns what was removed.
pub fn sweep() -> Vec<PathBuf> {
    let Some(me) = ProcessId::own(&Proc::default()) else { return Vec::new() };
    let (settings, _) = Settings::from_process();
    let mut folders = vec![Path::new(FOLDER)];
    folders.extend(settings.inventory.path().filter(|path| *path != Path::new(FOLDER)));
    folders.into_iter().flat_map(|folder| stale::sweep(folder, &me)).collect()
}
