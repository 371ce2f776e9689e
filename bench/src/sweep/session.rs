//! Two ranks under one roof: starts them, carries commands and handles, and reports the one that fails or dies.

use crate::bounce::Placement;
use crate::failure::{Failure, Result};
use crate::host::Fabric;
use crate::link::{Command, Reply};
use crate::net::Device;
use pinrail_client::worker::{Worker, wait_readable};
use std::path::Path;
use std::time::{Duration, Instant};

/// After one rank failed, the other gets this long to say why as well.
const GRACE: Duration = Duration::from_secs(1);

/// One rank process.
#[derive(Debug)]
struct Rank {
    number: usize,
    worker: Worker,
}

/// The ranks of one plugin.
#[derive(Debug)]
pub struct Session {
    ranks: Vec<Rank>,
    timeout: Duration,
    /// What the plugin says of itself.
    pub name: String,
    /// The table version in use.
    pub version: u8,
    /// The device in use.
    pub device: Device,
    /// All devices of the plugin.
    pub devices: Vec<Device>,
}

/// What a session is started with.
#[derive(Debug)]
pub struct Plan<'a> {
    /// The plugin.
    pub plugin: &'a Path,
    /// Its table version, if not the newest.
    pub abi: Option<u8>,
    /// The verbs library.
    pub fabric: &'a Fabric,
    /// Device by name.
    pub device: Option<&'a str>,
    /// Queue pairs per connection.
    pub qps: Option<u64>,
    /// Time without progress that is a failure.
    pub timeout: Duration,
    /// Show all log lines.
    pub verbose: bool,
}

impl Session {
    /// Starts `ranks` processes and loads the plugin in each.
    pub fn open(plan: &Plan<'_>, ranks: usize) -> Result<Self> {
        let ranks = (0..ranks).map(|number| Rank::start(number, plan)).collect::<Result<_>>()?;
        let nothing = Device {
            index: 0,
            name: String::new(),
            speed: 0,
            port: 0,
            max_recvs: 0,
            pci_path: None,
        };
        let mut session = Self {
            ranks,
            timeout: plan.timeout,
            name: String::new(),
            version: 0,
            device: nothing,
            devices: Vec::new(),
        };
        let replies = session.all(&Command::Open {
            plugin: plan.plugin.to_owned(),
            abi: plan.abi,
            timeout_s: plan.timeout.as_secs(),
            verbose: plan.verbose,
        })?;
        if let Some(Reply::Opened { name, version, devices }) = replies.into_iter().next() {
            session.device = choose(&devices, plan.device)?;
            session.name = name;
            session.version = version;
            session.devices = devices;
        }
        Ok(session)
    }

    /// Connects the two ranks in both directions, with buffers of so many bytes. How many pages of them, in both ranks
    /// together, are proved to be reached through copies.
    pub fn connect(&mut self, buffer: usize, placement: Option<&Placement>) -> Result<u64> {
        let replies = self.all(&Command::Listen { device: self.device.index })?;
        let mut handles: Vec<Vec<u8>> = replies
            .into_iter()
            .filter_map(|reply| match reply {
                Reply::Listening { handle } => Some(handle),
                _ => None,
            })
            .collect();
        // Each rank connects to the other's handle.
        handles.reverse();
        let commands: Vec<Command> = handles
            .into_iter()
            .map(|handle| Command::Connect { handle, buffer, placement: placement.cloned() })
            .collect();
        let replies = self.exchange(&commands)?;
        let pages = replies.iter().map(|reply| match reply {
            Reply::Connected { bounced_pages } => *bounced_pages,
            _ => 0,
        });
        Ok(pages.sum())
    }

    /// Gives both ranks the same command.
    pub fn all(&mut self, command: &Command) -> Result<Vec<Reply>> {
        let commands = vec![command.clone(); self.ranks.len()];
        self.exchange(&commands)
    }

    /// A timed pass: the longer of the two ranks' times.
    pub fn seconds(&mut self, command: &Command) -> Result<f64> {
        let replies = self.all(command)?;
        let seconds = replies.iter().filter_map(|reply| match reply {
            Reply::Timed { seconds } => Some(*seconds),
            _ => None,
        });
        Ok(seconds.fold(0.0, f64::max))
    }

    /// Closes the connection, unloads the plugin and waits for the processes.
    pub fn close(mut self) -> Result<()> {
        self.all(&Command::Close)?;
        for rank in std::mem::take(&mut self.ranks) {
            rank.join(self.timeout)?;
        }
        Ok(())
    }

    fn exchange(&mut self, commands: &[Command]) -> Result<Vec<Reply>> {
        let stage = commands.first().map_or_else(String::new, Command::stage);
        let allowance = commands.iter().map(allowance).max().unwrap_or_default();
        let mut deadline = Instant::now() + self.timeout + allowance;
        let mut outcomes: Vec<Option<Result<Reply>>> = Vec::new();
        for (rank, command) in self.ranks.iter_mut().zip(commands) {
            outcomes.push(rank.worker.tell(&command.stage(), command).err().map(Err));
        }
        while outcomes.iter().any(Option::is_none) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            let silent = self.ranks.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_none());
            wait_readable(silent.map(|(rank, _)| rank.worker.socket()), left)?;
            for (rank, outcome) in self.ranks.iter_mut().zip(&mut outcomes) {
                if outcome.is_none() {
                    *outcome = rank.worker.hear(&stage).transpose();
                }
            }
            if outcomes.iter().flatten().any(failed) {
                deadline = deadline.min(Instant::now() + GRACE);
            }
        }
        self.judge(&stage, outcomes)
    }

    /// All replies, or one error that names every rank with something to say.
    fn judge(&mut self, stage: &str, outcomes: Vec<Option<Result<Reply>>>) -> Result<Vec<Reply>> {
        let any_failed = outcomes.iter().flatten().any(failed);
        let mut replies = Vec::new();
        let mut texts = Vec::new();
        for (number, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Some(Ok(Reply::Failed { stage, text })) => {
                    texts.push(format!("rank {number}: {stage}: {text}"));
                }
                Some(Ok(reply)) => replies.push(reply),
                Some(Err(error)) => texts.push(format!("rank {number} {}", error.text())),
                // The other one's failure explains the silence.
                None if any_failed => {}
                None => texts.push(format!(
                    "rank {number} did not answer in time (more than {} s): a plugin call blocks",
                    self.timeout.as_secs()
                )),
            }
        }
        if texts.is_empty() {
            return Ok(replies);
        }
        Err(Failure::new(stage, texts.join("; ")))
    }
}

impl Rank {
    fn start(number: usize, plan: &Plan<'_>) -> Result<Self> {
        let stage = "start";
        let exe = std::env::current_exe()
            .map_err(|error| Failure::io(stage, "the path of this program", &error))?;
        let mut command = std::process::Command::new(exe);
        command.arg("rank").arg(number.to_string());
        command.envs(plan.fabric.environment());
        if let Some(qps) = plan.qps {
            command.env("NCCL_IB_QPS_PER_CONNECTION", qps.to_string());
        }
        Ok(Self { number, worker: Worker::start(command)? })
    }

    /// Waits for the process to end by itself.
    fn join(self, timeout: Duration) -> Result<()> {
        let number = self.number;
        self.worker
            .join(timeout)
            .map_err(|error| Failure::new("exit", format!("rank {number} {}", error.text())))
    }
}

fn failed(outcome: &Result<Reply>) -> bool {
    matches!(outcome, Err(_) | Ok(Reply::Failed { .. }))
}

/// Time a command may take in good order on a slow machine, on top of the time without progress.
fn allowance(command: &Command) -> Duration {
    const SLOW_BYTES_PER_S: u64 = 20 << 20;
    const SLOW_MESSAGES_PER_S: u64 = 2_000;
    let (messages, size) = match command {
        Command::Check(plan) => (plan.groups * plan.members as u64, plan.size),
        Command::Stream(plan) => ((plan.warmup + plan.count) * plan.members as u64, plan.size),
        Command::PingPong { size, count } => (2 * count + 2000, *size),
        _ => (0, 0),
    };
    let seconds = messages / SLOW_MESSAGES_PER_S + messages * size as u64 / SLOW_BYTES_PER_S;
    Duration::from_secs(5 + seconds)
}

fn choose(devices: &[Device], wanted: Option<&str>) -> Result<Device> {
    let found = match wanted {
        Some(name) => devices.iter().find(|device| device.name == name),
        None => devices.first(),
    };
    found.cloned().ok_or_else(|| {
        let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        Failure::usage(format!(
            "the plugin has no device {}; it has {}",
            wanted.unwrap_or(""),
            names.join(", ")
        ))
    })
}
