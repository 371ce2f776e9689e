//! The process that loads the plugin: what it does may crash or never return, and then that is the verdict.
//!
//! It says what it is about to do before it does it, so that the last word of a process that died names the call.

use pinrail_client::failure::{Failure, Result};
use pinrail_client::net::library::Library;
use pinrail_client::net::{Net, Properties, log};
use pinrail_client::worker::{Service, Worker};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The newest table that anybody looks for, and the oldest.
const TABLES: std::ops::RangeInclusive<u8> = 2..=12;

/// What to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Open the first of these names that can be opened, and look for tables.
    Open { names: Vec<String> },
    /// Open a library only to see whether it can be.
    Need { name: String },
    /// Use one table up to the properties of its devices, and close it again.
    Use { name: String, version: u8 },
}

/// What was seen.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Said {
    /// About to call this.
    Step(String),
    /// A name could not be opened.
    Refused { name: String, why: String },
    /// The library is open.
    Opened(Opened),
    /// The plugin calls itself so.
    Named(String),
    /// `init` succeeded, `devices` said so many.
    Count(i32),
    /// A device.
    Device(Properties),
    /// A call failed; the plugin's last line, if it has not warned.
    Failed { stage: String, text: String, line: Option<String> },
    /// All is done.
    Done,
}

/// A library that is open.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Opened {
    /// The name that opened it.
    pub name: String,
    /// The file, as the loader calls it.
    pub file: Option<String>,
    /// Versions of network tables, newest first.
    pub tables: Vec<u8>,
    /// Versions of CollNet tables, newest first.
    pub collnet: Vec<u8>,
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// As it should.
    Done,
    /// A call failed.
    Failed { stage: String, text: String, line: Option<String> },
    /// The process died, or did not come back, in this call.
    Lost { step: String, how: String },
}

/// Has a process do something; what it said, and how it ended.
pub fn ask(
    order: &Order,
    environment: &[(String, OsString)],
    patience: Duration,
    verbose: bool,
) -> Result<(Vec<Said>, End)> {
    let exe = std::env::current_exe()
        .map_err(|error| Failure::io("start", "the path of this program", &error))?;
    let mut command = Command::new(exe);
    command.arg("check-probe").envs(environment.iter().map(|(name, value)| (name, value)));
    if verbose {
        command.arg("--verbose");
    }
    let mut worker = Worker::start(command)?;
    worker.tell("start", order)?;
    let mut said = Vec::new();
    let mut step = "start".to_owned();
    loop {
        match worker.hear_until::<Said>(&step, Instant::now() + patience) {
            Ok(Some(Said::Step(next))) => step = next,
            Ok(Some(Said::Done)) => return Ok((said, End::Done)),
            Ok(Some(Said::Failed { stage, text, line })) => {
                return Ok((said, End::Failed { stage, text, line }));
            }
            Ok(Some(other)) => said.push(other),
            Ok(None) => {
                worker.stop();
                let how = format!("did not return within {} s", patience.as_secs());
                return Ok((said, End::Lost { step, how }));
            }
            Err(error) => {
                let how = format!("the process {}", error.text());
                return Ok((said, End::Lost { step, how }));
            }
        }
    }
}

/// The process's side.
pub fn serve(verbose: bool) -> Result<()> {
    let mut service = Service::begin("check")?;
    if verbose {
        log::configure("", true);
    } else {
        log::keep_quiet();
    }
    let Some(order) = service.command::<Order>()? else { return Ok(()) };
    let last = match perform(&order, &mut service) {
        Ok(()) => Said::Done,
        Err(error) => Said::Failed {
            stage: error.stage().to_owned(),
            text: error.text().to_owned(),
            line: log::take_line().filter(|line| !error.text().contains(line.as_str())),
        },
    };
    service.answer(&last)?;
    Ok(())
}

fn perform(order: &Order, service: &mut Service) -> Result<()> {
    let mut say = |said: Said| service.answer(&said).map(drop);
    match order {
        Order::Open { names } => {
            for name in names {
                say(Said::Step(format!("dlopen of {name}")))?;
                match Library::open(Path::new(name)) {
                    Ok(library) => {
                        say(Said::Opened(opened(name, &library)))?;
                        say(Said::Step(format!("dlclose of {name}")))?;
                        // SAFETY: nothing of it was used but symbols that were looked up.
                        unsafe { library.close() };
                        return Ok(());
                    }
                    Err(error) => {
                        say(Said::Refused { name: name.clone(), why: error.text().to_owned() })?;
                    }
                }
            }
            Ok(())
        }
        Order::Need { name } => {
            say(Said::Step(format!("dlopen of {name}")))?;
            Library::open(Path::new(name)).map(drop)
        }
        Order::Use { name, version } => {
            say(Said::Step("dlopen".into()))?;
            let mut net = Net::load(Library::open(Path::new(name))?, Some(*version))?;
            say(Said::Named(net.name().to_owned()))?;
            say(Said::Step("init".into()))?;
            net.init()?;
            say(Said::Step("devices".into()))?;
            let count = net.device_count()?;
            say(Said::Count(count))?;
            for index in 0..count {
                say(Said::Step(format!("getProperties of device {index}")))?;
                say(Said::Device(net.properties(index)?))?;
            }
            say(Said::Step("finalize and dlclose".into()))?;
            net.close()
        }
    }
}

fn opened(name: &str, library: &Library) -> Opened {
    let find = |prefix: &str| -> Vec<u8> {
        let there = |version: &u8| library.symbol(&format!("{prefix}_v{version}")).is_some();
        TABLES.rev().filter(there).collect()
    };
    let (tables, collnet) = (find("ncclNetPlugin"), find("ncclCollNetPlugin"));
    let file = tables.first().map(|version| format!("ncclNetPlugin_v{version}"));
    let file = file.and_then(|symbol| library.file_of(&symbol));
    Opened { name: name.to_owned(), file, tables, collnet }
}
