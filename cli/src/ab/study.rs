//! Everything that the runs of one comparison said.

use super::bench;
use super::child::{self, Ended, Ending};
use super::compare::{Point, Round, Summary, points, summaries};
use super::log::Log;
use super::record;
use super::row::Row;
use super::side::{Plugin, Side, Used};
use super::table::Table;
use crate::args::Ab;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

/// It could not be told.
pub const UNKNOWN: u8 = 2;

/// How much a remark matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// For the record.
    Note,
    /// The comparison may say nothing.
    Unknown,
    /// The comparison is of something else, or a side does not work.
    Problem,
}

impl Level {
    /// Its name in JSON, as the doctor's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Note => "advice",
            Self::Unknown => "unknown",
            Self::Problem => "problem",
        }
    }
}

/// Something that a person must know before reading a number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remark {
    /// How much it matters.
    pub level: Level,
    /// Of which side; `None`: of both.
    pub side: Option<usize>,
    /// What.
    pub text: String,
    /// The rounds in which it was so, from 1; empty: it is about all of them together.
    pub rounds: Vec<usize>,
}

/// One run.
#[derive(Debug, Clone)]
pub struct Run {
    /// 0 for A, 1 for B.
    pub side: usize,
    /// From 1.
    pub round: usize,
    /// How it ended, its last lines, and how long it took.
    pub ended: Ended,
    /// Rows that were read.
    pub rows: usize,
}

/// The comparison.
#[derive(Debug)]
pub struct Study {
    /// What is run.
    pub command: Vec<OsString>,
    /// The two.
    pub sides: [Side; 2],
    /// Rounds that were asked for.
    pub asked: u32,
    /// When it began.
    pub began: SystemTime,
    /// What each side's log says.
    pub logs: [Log; 2],
    /// The networks that were used as they should have been.
    pub networks: [Option<String>; 2],
    /// How the runs measured, as the program says it; more than one where they differ.
    pub parameters: BTreeSet<String>,
    /// Releases of nccl-tests.
    pub releases: BTreeSet<String>,
    /// Every run, in the order in which they were made.
    pub runs: Vec<Run>,
    /// What must be known.
    pub remarks: Vec<Remark>,
    /// The figures.
    pub points: Vec<Point>,
    /// The figures in short.
    pub summaries: Vec<Summary>,
    /// The page, once it is written.
    pub page: Option<PathBuf>,
    rounds: Vec<Round>,
    is_bench: bool,
}

impl Study {
    /// Nothing has been run.
    pub fn new(options: &Ab, sides: [Side; 2]) -> Self {
        Self {
            is_bench: bench::is_bench(&options.command),
            command: options.command.clone(),
            sides,
            asked: options.rounds,
            began: SystemTime::now(),
            logs: Default::default(),
            networks: Default::default(),
            parameters: BTreeSet::new(),
            releases: BTreeSet::new(),
            runs: Vec::new(),
            remarks: Vec::new(),
            points: Vec::new(),
            summaries: Vec::new(),
            page: None,
            rounds: Vec::new(),
        }
    }

    /// The next round begins.
    pub fn begin_round(&mut self) {
        self.rounds.push(Round::default());
    }

    /// Makes one run; false: it failed.
    pub fn run(
        &mut self,
        side: usize,
        deadline: Duration,
        interrupted: &AtomicBool,
        tell: impl Fn(&str),
    ) -> bool {
        let round = self.rounds.len();
        let letter = self.sides[side].letter;
        tell(&format!("round {round} of {}: {letter} {}", self.asked, self.sides[side].name()));
        let scratch = bench::Scratch::new();
        let command = match &self.sides[side].plugin {
            Plugin::File(path) if self.is_bench => bench::command(&self.command, path, &scratch.0),
            _ => self.command.clone(),
        };
        let (mut table, mut log) = (Table::default(), Log::default());
        let ended =
            child::run(&command, &self.sides[side].environment, deadline, interrupted, |line| {
                table.line(line);
                log.line(line);
            });
        tell(&format!("  {} after {:.1} s", ended.ending, ended.seconds));
        let well = ended.ending == Ending::Well;
        if !well {
            // A user who ends it knows that it is not whole.
            let level =
                if ended.ending == Ending::Interrupted { Level::Unknown } else { Level::Problem };
            self.remark(level, Some(side), format!("the command {}", ended.ending));
        }
        let (rows, used) = self.read(side, table, &log, &scratch.0, well);
        match used {
            Used::Right(name) => self.networks[side] = Some(name),
            Used::Wrong(why) => self.remark(Level::Problem, Some(side), why),
            // A run that failed says why itself.
            Used::Unknown(why) if well => self.remark(Level::Unknown, Some(side), why),
            Used::Unknown(_) => {}
        }
        self.logs[side].merge(&log);
        self.runs.push(Run { side, round, ended, rows: rows.len() });
        // Half a run's figures are no round's.
        if well && let Some(last) = self.rounds.last_mut() {
            last[side] = rows;
        }
        well
    }

    /// What a run measured, and with which network.
    fn read(
        &mut self,
        side: usize,
        table: Table,
        log: &Log,
        scratch: &Path,
        well: bool,
    ) -> (Vec<Row>, Used) {
        if self.is_bench {
            return match record::of_bench(scratch) {
                Ok(bench) => {
                    self.wrong_results(side, &bench.rows, None);
                    (bench.rows, Used::Right(bench.plugin))
                }
                Err(why) => {
                    if well {
                        self.remark(Level::Unknown, Some(side), why);
                    }
                    (Vec::new(), Used::Unknown("the bench left no record".into()))
                }
            };
        }
        self.parameters.extend(table.parameters);
        self.releases.extend(table.release);
        let mut rows = table.rows;
        let mut bounds = table.out_of_bounds;
        if let Some(path) = table.json.filter(|_| well) {
            match record::of_nccl_tests(Path::new(&path)) {
                // The same figures with all digits.
                Ok(record) if record.rows.len() == rows.len() => {
                    rows = record.rows;
                    bounds = record.out_of_bounds.or(bounds);
                }
                Ok(record) => self.remark(
                    Level::Note,
                    Some(side),
                    format!(
                        "{path} has {} figures and the output {}; those of the output are used",
                        record.rows.len(),
                        rows.len()
                    ),
                ),
                Err(why) => {
                    self.remark(Level::Note, Some(side), format!("{why}; the output is used"));
                }
            }
        }
        if well && rows.is_empty() {
            let what = "there is no table of nccl-tests in the output; the command must be one of its programs, or pinrail-bench";
            self.remark(Level::Unknown, Some(side), what.into());
        }
        if table.odd > 0 {
            let what = format!("{} rows of the table could not be read", table.odd);
            self.remark(Level::Note, Some(side), what);
        }
        self.wrong_results(side, &rows, bounds);
        (rows, self.sides[side].used(log))
    }

    fn wrong_results(&mut self, side: usize, rows: &[Row], bounds: Option<u64>) {
        let wrong: f64 = rows.iter().filter_map(|row| row.wrong).sum();
        if wrong > 0.0 {
            self.remark(Level::Problem, Some(side), format!("{wrong} results were wrong"));
        } else if let Some(count) = bounds.filter(|count| *count > 0) {
            let what = format!("the program counts {count} values out of bounds");
            self.remark(Level::Problem, Some(side), what);
        }
    }

    /// Keeps a remark on the round that goes on.
    fn remark(&mut self, level: Level, side: Option<usize>, text: String) {
        let round = self.rounds.len();
        let same = |one: &&mut Remark| one.level == level && one.side == side && one.text == text;
        match self.remarks.iter_mut().find(same) {
            Some(known) => {
                if known.rounds.last() != Some(&round) {
                    known.rounds.push(round);
                }
            }
            None => self.remarks.push(Remark { level, side, text, rounds: vec![round] }),
        }
    }

    /// No further run is to be made.
    pub fn is_over(&self, keep_going: bool) -> bool {
        self.runs.iter().any(|run| match run.ended.ending {
            Ending::Well => false,
            // Neither gets better.
            Ending::Interrupted | Ending::NotStarted(_) => true,
            _ => !keep_going,
        })
    }

    /// Draws the conclusions, after the last run.
    pub fn conclude(&mut self) {
        self.points = points(&self.rounds);
        self.summaries = summaries(&self.points);
        let mut about_all = |level, text: String| {
            self.remarks.push(Remark { level, side: None, text, rounds: Vec::new() });
        };
        let whole = self.rounds.iter().filter(|round| round.iter().all(|r| !r.is_empty())).count();
        if self.points.is_empty() || whole == 0 {
            let what = "no round has figures of both sides, and there is no ratio";
            about_all(Level::Unknown, what.into());
        } else if whole < self.asked as usize {
            let what = format!("only {whole} of {} rounds have figures of both sides", self.asked);
            about_all(Level::Note, what);
        }
        if self.parameters.len() > 1 {
            let all: Vec<&str> = self.parameters.iter().map(String::as_str).collect();
            about_all(Level::Note, format!("runs measured differently: {}", all.join(" | ")));
        }
        let lone = self.points.iter().filter(|point| point.ratio.is_none()).count();
        if whole > 0 && lone > 0 {
            about_all(Level::Note, format!("{lone} figures have no counterpart on the other side"));
        }
        self.remarks.sort_by_key(|one| (std::cmp::Reverse(one.level), one.side));
    }

    /// Rounds that have figures of both sides.
    pub fn whole_rounds(&self) -> usize {
        self.rounds.iter().filter(|round| round.iter().all(|rows| !rows.is_empty())).count()
    }

    /// The verdict.
    pub fn code(&self) -> u8 {
        match self.remarks.iter().map(|one| one.level).max() {
            Some(Level::Problem) => 1,
            Some(Level::Unknown) => UNKNOWN,
            Some(Level::Note) | None => 0,
        }
    }

    /// The verdict in a word.
    pub fn verdict(&self) -> &'static str {
        match self.code() {
            0 => "fine",
            1 => "problems",
            _ => "unknown",
        }
    }

    /// The command as a shell would read it.
    pub fn shown_command(&self) -> String {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+^".contains(c);
        let quote = |word: &OsString| {
            let word = word.to_string_lossy();
            if !word.is_empty() && word.chars().all(plain) {
                word.into_owned()
            } else {
                format!("'{}'", word.replace('\'', "'\\''"))
            }
        };
        self.command.iter().map(quote).collect::<Vec<_>>().join(" ")
    }

    /// What a remark is about: `A, round 2`.
    pub fn about(&self, remark: &Remark) -> String {
        let side = remark.side.map(|side| self.sides[side].letter);
        let rounds: Vec<String> = remark.rounds.iter().map(usize::to_string).collect();
        let rounds = match rounds.len() {
            0 => None,
            1 => Some(format!("round {}", rounds[0])),
            _ => Some(format!("rounds {}", rounds.join(", "))),
        };
        let parts: Vec<String> = side.map(str::to_owned).into_iter().chain(rounds).collect();
        parts.join(", ")
    }
}
