//! `pinrail reach`: a few checked messages from every rail of every host to every rail of the others, before the job.
//!
//! [`serve`] is the responder of a host, [`worker`] its process that uses the plugin's transport, [`protocol`] what goes
//! over TCP, [`ask`] the other side of it. [`matrix`] says who is tried with whom and when; [`text`] and [`json`] show
//! what came of it.

mod ask;
mod json;
mod matrix;
mod protocol;
mod serve;
mod text;
mod worker;

use crate::args::{CheckProbe, Reach};
use crate::doctor::finding::{Finding, exit_code};
use crate::ending;
use crate::output::{self, Colour};
use ask::{Outcome, Place, Responder, transfer};
use matrix::{rails, rounds};
use nccl_net_pinrail::host::plain;
use pinrail_client::failure::{Failure, Result};
use pinrail_client::progress::Progress;
pub use protocol::PORT;
use protocol::{Host, Messages};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Seconds that a responder waits for somebody, where nobody says.
const SERVE_WAIT: u64 = 600;
/// Seconds that responders get to start, where nobody says.
const ASK_WAIT: u64 = 30;
/// No key is longer.
const LONGEST_KEY: u64 = 4096;
/// Bytes of the messages of each transfer: less than a packet, a page, more than any path's window.
const SIZES: [usize; 3] = [1, 4096, 1 << 20];
/// No list of hosts is longer.
const LONGEST_LIST: u64 = 1 << 20;

/// A rail of a host, by their places in the lists.
pub type End = (usize, usize);

/// One transfer and what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cell {
    from: End,
    to: End,
    outcome: Outcome,
}

/// All that was found.
#[derive(Debug)]
struct Report {
    /// The hosts as they were named, and what they say of themselves, or why they say nothing.
    hosts: Vec<(String, std::result::Result<Host, String>)>,
    cells: Vec<Cell>,
    findings: Vec<Finding>,
}

/// Runs the command.
pub fn run(options: &Reach) -> ExitCode {
    if options.serve {
        return match serve::run(options) {
            Ok(code) => ExitCode::from(code),
            Err(error) => ending::failure("reach", false, &error.to_string()),
        };
    }
    let report = match examine(options) {
        Ok(report) => report,
        Err(error) => return ending::failure("reach", options.json, &error.to_string()),
    };
    let code = exit_code(&report.findings);
    if options.json {
        output::print(&json::document(&report, code));
    } else {
        output::print(&text::report(&report, Colour::of_stdout()));
    }
    ExitCode::from(code)
}

/// The process of a responder that uses the plugin.
pub fn worker(options: &CheckProbe) -> ExitCode {
    ending::process("reach", worker::serve(options.verbose))
}

/// The word that both sides must know; empty: none.
fn key(options: &Reach) -> Result<String> {
    let Some(word) = &options.key else { return Ok(String::new()) };
    let Some(file) = word.strip_prefix('@') else { return Ok(word.clone()) };
    let bytes = plain::read(Path::new(file), LONGEST_KEY)
        .map_err(|error| Failure::usage(format!("--key @{file}: {error}")))?;
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    if text.is_empty() {
        return Err(Failure::usage(format!("--key @{file}: there is no word in it")));
    }
    Ok(text)
}

fn examine(options: &Reach) -> Result<Report> {
    let places = places(&options.hosts)?;
    let wait = Duration::from_secs(options.wait.unwrap_or(ASK_WAIT));
    let (key, deadline) = (key(options)?, Instant::now() + wait);
    // All at once: one that is not there must not cost the others its time.
    let reached: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = places
            .iter()
            .map(|place| scope.spawn(|| Responder::reach(place, &key, deadline)))
            .collect();
        let panicked = || Err("the thread that asks it panicked".to_owned());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    let hosts: Vec<_> = places
        .iter()
        .zip(&reached)
        .map(|(place, reached)| {
            (place.asked.clone(), reached.as_ref().map(|r| r.host.clone()).map_err(Clone::clone))
        })
        .collect();
    let responders: Vec<Option<Mutex<Responder>>> =
        reached.into_iter().map(|reached| reached.ok().map(Mutex::new)).collect();
    let cells = try_all(&hosts, &responders, options);
    for responder in responders.into_iter().flatten() {
        responder.into_inner().unwrap_or_else(PoisonError::into_inner).close();
    }
    let findings = matrix::judge(&hosts, &cells);
    Ok(Report { hosts, cells, findings })
}

/// The hosts of the command line, files of hosts included.
fn places(words: &[String]) -> Result<Vec<Place>> {
    let mut places: Vec<Place> = Vec::new();
    let mut add = |word: &str| {
        let place = Place::parse(word).map_err(Failure::usage)?;
        if places.contains(&place) {
            return Err(Failure::usage(format!("{word} is named twice")));
        }
        places.push(place);
        Ok(())
    };
    for word in words.iter().flat_map(|word| word.split(',')).filter(|word| !word.is_empty()) {
        let Some(file) = word.strip_prefix('@') else {
            add(word)?;
            continue;
        };
        let bytes = plain::read(Path::new(file), LONGEST_LIST)
            .map_err(|error| Failure::usage(format!("{file}: {error}")))?;
        let text = String::from_utf8_lossy(&bytes);
        // As launchers write them: a host a line, then what it has.
        for line in text.lines().filter(|line| !line.trim_start().starts_with('#')) {
            if let Some(host) = line.split_whitespace().next() {
                add(host)?;
            }
        }
    }
    if places.len() < 2 {
        return Err(Failure::usage(
            "name two hosts or more; on each of them pinrail reach --serve must run",
        ));
    }
    Ok(places)
}

/// Every transfer, as many at once as hosts allow: each is busy with one other host at a time.
fn try_all(
    hosts: &[(String, std::result::Result<Host, String>)],
    responders: &[Option<Mutex<Responder>>],
    options: &Reach,
) -> Vec<Cell> {
    let there: Vec<usize> = (0..hosts.len()).filter(|at| responders[*at].is_some()).collect();
    let count = |host: usize| hosts[host].1.as_ref().map_or(0, |host| host.rails.len());
    let rounds = rounds(&there);
    let pairs =
        |pair: &(usize, usize)| rails(*pair, (count(pair.0), count(pair.1)), options.same_rail);
    let steps = rounds.iter().flatten().map(|pair| pairs(pair).len()).sum();
    let progress = Mutex::new(Progress::new(steps));
    let cells = Mutex::new(Vec::new());
    for round in &rounds {
        std::thread::scope(|scope| {
            for pair in round {
                let (progress, cells) = (&progress, &cells);
                let ends = pairs(pair);
                let (Some(one), Some(other)) = (&responders[pair.0], &responders[pair.1]) else {
                    continue;
                };
                scope.spawn(move || {
                    let mut one = one.lock().unwrap_or_else(PoisonError::into_inner);
                    let mut other = other.lock().unwrap_or_else(PoisonError::into_inner);
                    for (number, (from, to)) in ends.into_iter().enumerate() {
                        let what = format!("{} -> {}", hosts[from.0].0, hosts[to.0].0);
                        progress.lock().unwrap_or_else(PoisonError::into_inner).step(&what);
                        let messages = Messages { sizes: SIZES.to_vec(), key: number as u64 };
                        let forth = from.0 == pair.0;
                        let (sender, receiver) =
                            if forth { (&mut *one, &mut *other) } else { (&mut *other, &mut *one) };
                        let outcome = transfer(
                            (sender, from.1),
                            (receiver, to.1),
                            &messages,
                            options.timeout,
                        );
                        let cell = Cell { from, to, outcome };
                        cells.lock().unwrap_or_else(PoisonError::into_inner).push(cell);
                    }
                });
            }
        });
    }
    let mut cells = cells.into_inner().unwrap_or_else(PoisonError::into_inner);
    cells.sort_by_key(|cell| (cell.from, cell.to));
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_come_from_words_and_files() {
        let names = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            places(&words).map(|all| all.into_iter().map(|one| one.asked).collect::<Vec<_>>())
        };
        assert_eq!(names(&["a,b", "c"]).unwrap(), ["a", "b", "c"]);
        let file = std::env::temp_dir().join(format!("pinrail-hosts-{}", std::process::id()));
        std::fs::write(&file, "# all\nnode1 slots=8\n\nnode2:99 slots=8\n").unwrap();
        let word = format!("@{}", file.display());
        assert_eq!(names(&[&word]).unwrap(), ["node1", "node2:99"]);
        assert!(names(&[&word, "node1"]).unwrap_err().to_string().contains("node1 is named twice"));
        std::fs::remove_file(&file).unwrap();
        assert!(names(&["a"]).unwrap_err().to_string().contains("two hosts"));
        assert!(names(&[&word]).unwrap_err().to_string().contains("No such file"));
    }
}
