//! `pinrail check`: whether NCCL would use a network plugin, and what it would see.
//!
//! [`release`] knows what each NCCL looks for; [`probe`] loads the plugin in a process of its own; [`candidate`] keeps
//! what was tried; [`refusal`], with [`elf`] and [`place`], explains what the loader refuses; [`verdict`] draws the conclusions; [`text`] and
//! [`json`] show them. [`conformance`] plays the rules of the interface.

mod candidate;
mod conformance;
mod elf;
mod json;
mod place;
mod probe;
mod refusal;
pub mod release;
mod text;
mod verdict;

use crate::args::{Check, CheckProbe, Table};
use crate::doctor::finding::{Finding, exit_code};
use crate::ending;
use crate::output::{self, Colour};
use candidate::{Candidate, Trial};
use conformance::{CASES, Case, Outcome, Outcomes, Part, Stage};
use nccl_net_pinrail::config::{Origin, Variable, variables_of_process};
use pinrail_client::failure::{Failure, Result};
use pinrail_client::progress::Progress;
use release::{Naming, Release};
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

/// What NCCL is told to open.
#[derive(Debug)]
struct Request {
    /// The value of `NCCL_NET_PLUGIN`; `None`: not set.
    value: Option<String>,
    /// Where it is from.
    origin: String,
    /// `NCCL_NET`.
    network: Option<String>,
}

/// All that was found.
#[derive(Debug)]
struct Report {
    release: &'static Release,
    request: Request,
    candidates: Vec<Candidate>,
    findings: Vec<Finding>,
    /// What came of each case, by table; empty where nobody asked.
    played: Vec<(u8, Outcomes)>,
}

/// Runs the command.
pub fn run(options: &Check) -> ExitCode {
    if options.list {
        let line = |case: &Case| format!("{:28} {}\n", case.name, case.rule);
        output::print(&CASES.iter().map(line).collect::<String>());
        return ExitCode::SUCCESS;
    }
    let report = match examine(options) {
        Ok(report) => report,
        Err(error) => return ending::failure("check", options.json, &error.to_string()),
    };
    let code = exit_code(&report.findings);
    if options.json {
        output::print(&json::document(&report, code));
    } else {
        output::print(&text::report(&report, Colour::of_stdout()));
    }
    ExitCode::from(code)
}

/// The process that loads the plugin.
pub fn probe(options: &CheckProbe) -> ExitCode {
    ending::process("check", probe::serve(options.verbose))
}

/// A process of a conformance case.
pub fn rank(options: &CheckProbe) -> ExitCode {
    ending::process("check", conformance::serve(options.verbose))
}

/// The verdict on a table that was played.
fn broken(version: u8, outcomes: &Outcomes) -> Option<Finding> {
    let broken: Vec<_> = outcomes
        .iter()
        .filter(|(_, outcome)| matches!(outcome, Outcome::Fail(_)))
        .map(|(case, _)| case.name)
        .collect();
    (!broken.is_empty()).then(|| {
        Finding::problem(
            "conformance",
            format!("v{version} breaks rules that NCCL relies on: {}", broken.join(", ")),
            format!("{} of {} cases failed", broken.len(), outcomes.len()),
            "report it to whoever made the plugin, with the evidence that stands with each case",
        )
    })
}

/// Plays the cases that were asked for with each of the tables.
fn play(options: &Check, candidate: &Candidate, trial: &Trial<'_>) -> Result<Vec<(u8, Outcomes)>> {
    let Some(opened) = &candidate.opened else { return Ok(Vec::new()) };
    let usable = |version: &u8| candidate.uses.contains_key(version);
    let tables: Vec<u8> = match options.table {
        None => candidate.taken(trial.release).into_iter().filter(usable).collect(),
        Some(Table::All) => candidate.uses.keys().rev().copied().collect(),
        Some(Table::One(version)) if usable(&version) => vec![version],
        Some(Table::One(version)) => {
            return Err(Failure::usage(format!("the plugin has no table v{version}")));
        }
    };
    let cases: Vec<&'static Case> = match &options.cases[..] {
        [] => CASES.iter().collect(),
        names => names.iter().map(|name| case(name)).collect::<Result<_>>()?,
    };
    let stage =
        Stage { environment: &trial.environment, patience: trial.patience, verbose: trial.verbose };
    let mut progress = Progress::new(tables.len() * cases.len());
    let mut played = Vec::new();
    for version in tables {
        let device = device(options, candidate, version)?;
        let mut outcomes = Vec::new();
        for case in &cases {
            progress.step(&format!("v{version} {}", case.name));
            let part = Part {
                plugin: opened.name.clone(),
                version,
                device,
                case: case.name.to_owned(),
                rank: 0,
            };
            outcomes.push((*case, stage.play(case, &part)?));
        }
        played.push((version, outcomes));
    }
    Ok(played)
}

fn case(name: &str) -> Result<&'static Case> {
    CASES.iter().find(|case| case.name == name).ok_or_else(|| {
        Failure::usage(format!("there is no case {name:?}; --list shows their names"))
    })
}

/// The index of the device that was asked for.
fn device(options: &Check, candidate: &Candidate, version: u8) -> Result<i32> {
    let Some(wanted) = &options.device else { return Ok(0) };
    let devices = candidate.uses.get(&version).map_or(&[] as &[_], |seen| &seen.devices);
    let names: Vec<_> =
        devices.iter().map(|device| device.name.as_deref().unwrap_or_default()).collect();
    let found = names.iter().position(|name| name == wanted);
    found.and_then(|index| i32::try_from(index).ok()).ok_or_else(|| {
        Failure::usage(format!("the plugin has no device {wanted:?}; it has {}", names.join(", ")))
    })
}

fn examine(options: &Check) -> Result<Report> {
    let (variables, _) = variables_of_process();
    let release = options.nccl.map_or_else(Release::newest, Release::of);
    let request = Request::of(options, &variables);
    let trial = Trial {
        release,
        environment: from_files(variables),
        patience: Duration::from_secs(options.timeout),
        verbose: options.verbose,
    };
    let plugins = release.plugins(request.value.as_deref());
    let mut candidates = Vec::new();
    let mut findings = Vec::new();
    if plugins.is_empty() {
        findings.push(Finding::problem(
            "search",
            "NCCL loads no plugin",
            format!(
                "NCCL_NET_PLUGIN={} ({})",
                request.value.as_deref().unwrap_or(""),
                request.origin
            ),
            "name the plugin in NCCL_NET_PLUGIN",
        ));
    }
    if release.naming == Naming::Fixed && request.value.is_some() {
        findings.push(Finding::advice(
            "search",
            format!("NCCL {release} does not know NCCL_NET_PLUGIN"),
            "it opens libnccl-net.so",
            "make a link of that name to the plugin, in a folder of LD_LIBRARY_PATH",
        ));
    }
    // NCCL takes the first that works; what stands behind it is not looked at.
    for plugin in plugins {
        let candidate = Candidate::try_out(&plugin, &trial)?;
        let judged = verdict::judge(&candidate, &trial, request.network.as_deref())?;
        let works = exit_code(&judged) == 0;
        findings.extend(judged);
        candidates.push(candidate);
        if works {
            break;
        }
    }
    let mut played = Vec::new();
    if options.conformance {
        match candidates.iter().find(|candidate| candidate.opened.is_some()) {
            Some(candidate) => {
                played = play(options, candidate, &trial)?;
                findings.extend(
                    played.iter().filter_map(|(version, outcomes)| broken(*version, outcomes)),
                );
            }
            None => findings.push(Finding::problem(
                "conformance",
                "no case was played",
                "there is no plugin",
                "see above",
            )),
        }
    }
    Ok(Report { release, request, candidates, findings, played })
}

impl Request {
    fn of(options: &Check, variables: &[Variable]) -> Self {
        let find = |name: &str| variables.iter().find(|variable| variable.name == name);
        let text = |variable: &Variable| variable.value.to_string_lossy().into_owned();
        let network = find("NCCL_NET").map(text).filter(|name| !name.is_empty());
        let (value, origin) = match (&options.plugin, find("NCCL_NET_PLUGIN")) {
            (Some(plugin), _) => (Some(plugin.clone()), "command line".to_owned()),
            (None, Some(variable)) => (Some(text(variable)), variable.origin.to_string()),
            (None, None) => (None, "not set".to_owned()),
        };
        Self { value, origin, network }
    }
}

/// What NCCL exports from its files before it loads plugins.
fn from_files(variables: Vec<Variable>) -> Vec<(String, OsString)> {
    variables
        .into_iter()
        .filter(|variable| matches!(variable.origin, Origin::File(_)))
        .filter(|variable| !variable.name.is_empty() && !variable.name.contains('\0'))
        .map(|variable| (variable.name, variable.value))
        .collect()
}
