//! The processes that are asked about.

use nccl_net_pinrail::config::printable;
use nccl_net_pinrail::host::process::Stat;
use nccl_net_pinrail::host::procfs::Proc;
use nccl_net_pinrail::memory::status::Status;
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

/// The beginning of the plugin's file name.
const PLUGIN: &str = "libnccl-net-pinrail";

/// What a process shows.
#[derive(Debug, Clone)]
pub enum Shown {
    /// What its connections do.
    Status(Box<Status>),
    /// It has the plugin loaded and no connection, or shows none.
    Nothing,
    /// There is something that cannot be read, and why.
    Unreadable(String),
}

/// One process with the plugin in it.
#[derive(Debug, Clone)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// The name of its program.
    pub name: String,
    /// Stopped by a signal or a debugger.
    pub stopped: bool,
    /// What it shows.
    pub shown: Shown,
    /// When it was looked at.
    pub at: Instant,
}

impl Process {
    /// The process with this number, or all of this user that have the plugin loaded.
    ///
    /// # Errors
    /// In words, with what to do: there is none, or it may not be looked at.
    pub fn find(pid: Option<u32>) -> Result<Vec<Self>, String> {
        let proc = Proc::default();
        if !proc.path("self").exists() {
            return Err("/proc is not mounted; this command reads everything from there".into());
        }
        if let Some(pid) = pid {
            return Self::read(&proc, pid).map(|process| vec![process]);
        }
        let user = rustix::process::geteuid().as_raw();
        let entries = std::fs::read_dir(proc.path("")).map_err(|e| format!("/proc: {e}"))?;
        let mut pids: Vec<u32> = entries
            .flatten()
            .filter(|entry| entry.metadata().is_ok_and(|meta| meta.uid() == user))
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        pids.sort_unstable();
        // One that ended meanwhile, or has nothing to do with the plugin, is none.
        let found: Vec<_> =
            pids.into_iter().filter_map(|pid| Self::read(&proc, pid).ok()).collect();
        if found.is_empty() {
            return Err(
                "no process of this user has pinrail loaded, as far as /proc shows; as another user or from outside a \
                 container, give its PID"
                    .into(),
            );
        }
        Ok(found)
    }

    fn read(proc: &Proc, pid: u32) -> Result<Self, String> {
        let stat = proc.text(&format!("{pid}/stat"));
        let stat = stat.ok_or_else(|| format!("there is no process {pid}"))?;
        let name = Stat::parse(&stat).map_or_else(String::new, |stat| printable(&stat.name));
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        if state == Some('Z') {
            return Err(format!("process {pid} has ended and waits to be reaped"));
        }
        let shown = match Status::of(proc, pid) {
            Ok(Some(status)) => Shown::Status(Box::new(status)),
            Ok(None) if has_plugin(proc, pid) => Shown::Nothing,
            Ok(None) => {
                return Err(format!(
                    "process {pid} has no pinrail loaded: NCCL took another network, or has not begun yet (NCCL_DEBUG=INFO \
                     tells; `pinrail doctor` looks for reasons)"
                ));
            }
            Err(reason) if has_plugin(proc, pid) => Shown::Unreadable(printable(&reason)),
            Err(reason) => return Err(printable(&reason)),
        };
        let stopped = matches!(state, Some('T' | 't'));
        Ok(Self { pid, name, stopped, shown, at: Instant::now() })
    }

    /// What its connections do, if that is known.
    pub fn status(&self) -> Option<&Status> {
        match &self.shown {
            Shown::Status(status) => Some(status),
            Shown::Nothing | Shown::Unreadable(_) => None,
        }
    }
}

/// Whether the plugin is loaded, by the name of its file.
fn has_plugin(proc: &Proc, pid: u32) -> bool {
    proc.text(&format!("{pid}/maps")).is_some_and(|maps| {
        maps.lines()
            .any(|line| line.rsplit('/').next().is_some_and(|name| name.starts_with(PLUGIN)))
    })
}
