//! `pinrail check --conformance`: the rules of the interface as cases, each played by processes of its own, so that a
//! crash or a call that never returns fails one case and no more.
//!
//! [`cases`] holds the rules; [`side`] is one of the processes, [`end`] a connection in it.

pub mod cases;
mod end;
mod side;

use pinrail_client::failure::{Failure, Result};
use pinrail_client::worker::{Service, Worker, wait_readable};
use serde::{Deserialize, Serialize};
use side::Side;
use std::ffi::OsString;
use std::process::Command;
use std::time::{Duration, Instant};

pub use cases::{CASES, Case};

/// After one process failed, the other gets this long to say why as well.
const GRACE: Duration = Duration::from_secs(1);

/// What a process is to play.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Part {
    /// The name that opens the plugin.
    pub plugin: String,
    /// The table.
    pub version: u8,
    /// The device, by index.
    pub device: i32,
    /// The case.
    pub case: String,
    /// 0 sends, 1 receives.
    pub rank: usize,
}

/// From a process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Said {
    /// About to do this.
    Step(String),
    /// For the other process.
    Tell(Vec<u8>),
    /// It is going to kill itself.
    Dying,
    /// The end.
    Outcome(Outcome),
}

/// What came of a case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The rule is kept.
    Pass,
    /// It is broken, and how.
    Fail(String),
    /// It does not apply, and why.
    NotApplicable(String),
}

/// What came of the cases that were played.
pub type Outcomes = Vec<(&'static Case, Outcome)>;

/// How cases are played.
#[derive(Debug)]
pub struct Stage<'a> {
    /// What NCCL would add to the environment from its files.
    pub environment: &'a [(String, OsString)],
    /// How long a case may take.
    pub patience: Duration,
    /// Show the plugin's lines.
    pub verbose: bool,
}

/// One process of a case, as the command sees it.
struct Player {
    worker: Worker,
    step: String,
    dying: bool,
    outcome: Option<Outcome>,
}

impl Stage<'_> {
    /// Plays one case. `part` is the first process's.
    pub fn play(&self, case: &Case, part: &Part) -> Result<Outcome> {
        let mut players = (0..case.processes)
            .map(|rank| self.start(&Part { rank, ..part.clone() }))
            .collect::<Result<Vec<_>>>()?;
        let mut deadline = Instant::now() + self.patience;
        while players.iter().any(|player| player.outcome.is_none()) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            let live = players.iter().filter(|player| player.outcome.is_none());
            wait_readable(live.map(|player| player.worker.socket()), left)?;
            for rank in 0..players.len() {
                if players[rank].outcome.is_none() {
                    listen(&mut players, rank);
                }
            }
            let failed = |player: &Player| matches!(player.outcome, Some(Outcome::Fail(_)));
            if players.iter().any(failed) {
                deadline = deadline.min(Instant::now() + GRACE);
            }
        }
        Ok(self.sum_up(players))
    }

    fn start(&self, part: &Part) -> Result<Player> {
        let exe = std::env::current_exe()
            .map_err(|error| Failure::io("start", "the path of this program", &error))?;
        let mut command = Command::new(exe);
        command.arg("check-rank").envs(self.environment.iter().map(|(name, value)| (name, value)));
        if self.verbose {
            command.arg("--verbose");
        }
        let mut worker = Worker::start(command)?;
        worker.tell("start", part)?;
        Ok(Player { worker, step: "start".into(), dying: false, outcome: None })
    }

    fn sum_up(&self, players: Vec<Player>) -> Outcome {
        let late: Vec<_> = players
            .iter()
            .enumerate()
            .filter(|(_, player)| player.outcome.is_none())
            .map(|(rank, player)| format!("process {rank} in {}", player.step))
            .collect();
        let mut failures = Vec::new();
        let mut not_applicable = None;
        for (rank, player) in players.into_iter().enumerate() {
            match player.outcome {
                Some(Outcome::Fail(why)) => failures.push(format!("process {rank}: {why}")),
                Some(Outcome::NotApplicable(why)) => not_applicable = Some(why),
                Some(Outcome::Pass) if !player.dying => {
                    if let Err(error) = player.worker.join(self.patience) {
                        failures.push(format!("process {rank} {}", error.text()));
                    }
                }
                Some(Outcome::Pass) | None => {}
            }
        }
        if !failures.is_empty() {
            return Outcome::Fail(failures.join("; "));
        }
        if !late.is_empty() {
            let seconds = self.patience.as_secs();
            return Outcome::Fail(format!("no end within {seconds} s: {}", late.join(", ")));
        }
        not_applicable.map_or(Outcome::Pass, Outcome::NotApplicable)
    }
}

/// Takes what one process has to say.
fn listen(players: &mut [Player], rank: usize) {
    loop {
        let player = &mut players[rank];
        match player.worker.hear::<Said>(&player.step.clone()) {
            Ok(None) => return,
            Ok(Some(Said::Step(step))) => player.step = step,
            Ok(Some(Said::Dying)) => player.dying = true,
            Ok(Some(Said::Tell(bytes))) => {
                if let Some(other) = players.get_mut(1 - rank).filter(|p| p.outcome.is_none()) {
                    // One that is gone says so itself.
                    let _ = other.worker.tell("a message", &bytes);
                }
            }
            Ok(Some(Said::Outcome(outcome))) => {
                player.outcome = Some(outcome);
                return;
            }
            Err(_) if player.dying => {
                player.outcome = Some(Outcome::Pass);
                return;
            }
            Err(error) => {
                player.outcome = Some(Outcome::Fail(format!("the process {}", error.text())));
                return;
            }
        }
    }
}

/// The process's side.
pub fn serve(verbose: bool) -> Result<()> {
    let mut service = Service::begin("check")?;
    let Some(part) = service.command::<Part>()? else { return Ok(()) };
    let case = CASES
        .iter()
        .find(|case| case.name == part.case)
        .ok_or_else(|| Failure::usage(format!("there is no case {}", part.case)))?;
    let mut side = Side::new(service, part, verbose);
    let outcome = side.run(case).unwrap_or_else(|error| Outcome::Fail(error.to_string()));
    side.say(&Said::Outcome(outcome))
}
