//! One plugin that NCCL may open: what was tried, what was found, what each of its tables does.

use super::elf::Elf;
use super::probe::{End, Opened, Order, Said, ask};
use super::release::{Release, is_the_program};
use pinrail_client::failure::Result;
use pinrail_client::net::Properties;
use pinrail_client::net::abi::VERSIONS;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// How plugins are tried.
#[derive(Debug)]
pub struct Trial<'a> {
    /// Whose rules count.
    pub release: &'a Release,
    /// What NCCL would add to the environment from its files.
    pub environment: Vec<(String, OsString)>,
    /// How long a call may take.
    pub patience: Duration,
    /// Show the plugin's lines.
    pub verbose: bool,
}

/// What one table does.
#[derive(Debug, Clone)]
pub struct Use {
    /// The plugin's name.
    pub name: Option<String>,
    /// What `devices` said.
    pub count: Option<i32>,
    /// The devices up to the failure, if there is one.
    pub devices: Vec<Properties>,
    /// How it ended.
    pub end: End,
}

/// One plugin.
#[derive(Debug)]
pub struct Candidate {
    /// As `NCCL_NET_PLUGIN` names it.
    pub plugin: String,
    /// Names that could not be opened, with the loader's reason.
    pub refused: Vec<(String, String)>,
    /// The library, where it could be.
    pub opened: Option<Opened>,
    /// How opening it ended.
    pub end: End,
    /// The file that was opened, or that should have been, with what its headers say.
    pub file: Option<(PathBuf, std::result::Result<Elf, String>)>,
    /// What each of its tables does that can be called here.
    pub uses: BTreeMap<u8, Use>,
}

impl Candidate {
    /// Opens it and uses its tables.
    pub fn try_out(plugin: &str, trial: &Trial<'_>) -> Result<Self> {
        let mut candidate = Self {
            plugin: plugin.to_owned(),
            refused: Vec::new(),
            opened: None,
            end: End::Done,
            file: None,
            uses: BTreeMap::new(),
        };
        if is_the_program(plugin) {
            return Ok(candidate);
        }
        let names = trial.release.names(plugin);
        let (said, end) = trial.ask(&Order::Open { names: names.clone() })?;
        candidate.end = end;
        for said in said {
            match said {
                Said::Refused { name, why } => candidate.refused.push((name, why)),
                Said::Opened(opened) => candidate.opened = Some(opened),
                _ => {}
            }
        }
        let path = match &candidate.opened {
            Some(opened) => opened.file.clone().map(PathBuf::from),
            None => super::place::find(&names),
        };
        candidate.file = path.map(|path| {
            let elf = Elf::read(&path);
            (path, elf)
        });
        if let Some(opened) = &candidate.opened {
            for version in opened.tables.iter().copied().filter(|v| VERSIONS.contains(v)) {
                let seen = trial.try_table(&opened.name, version)?;
                candidate.uses.insert(version, seen);
            }
        }
        Ok(candidate)
    }

    /// The table that NCCL takes.
    pub fn taken(&self, release: &Release) -> Option<u8> {
        release.takes(&self.opened.as_ref()?.tables)
    }
}

impl Trial<'_> {
    /// Has a process do something.
    pub fn ask(&self, order: &Order) -> Result<(Vec<Said>, End)> {
        ask(order, &self.environment, self.patience, self.verbose)
    }

    fn try_table(&self, name: &str, version: u8) -> Result<Use> {
        let (said, end) = self.ask(&Order::Use { name: name.to_owned(), version })?;
        let mut seen = Use { name: None, count: None, devices: Vec::new(), end };
        for said in said {
            match said {
                Said::Named(name) => seen.name = Some(name),
                Said::Count(count) => seen.count = Some(count),
                Said::Device(device) => seen.devices.push(device),
                _ => {}
            }
        }
        Ok(seen)
    }
}
