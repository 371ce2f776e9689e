//! The table that nccl-tests prints, of any release: the heading says which columns there are.
//!
//! Ranks write their log into the same stream, so that a line of the log may begin in the middle of a row, and the row go
//! on below it. Launchers put their own marks in front of each line.

use super::row::{Row, Series};
use std::collections::BTreeSet;

/// A row has at most this many words.
const MOST_WORDS: usize = 64;
/// So many hosts are told apart; a job has fewer ranks whose lines meet a row.
const MOST_HOSTS: usize = 4096;

/// One column of the right-hand part, which there is once for each buffer placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Time,
    Algorithm,
    Bus,
    Wrong,
    /// Something that is not compared: the largest deviation in old releases, figures of single iterations in new ones.
    Other,
}

/// What a heading says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Layout {
    /// Words in front of the first time.
    left: usize,
    /// Columns of one placement.
    group: Vec<Column>,
    /// Placements.
    groups: usize,
}

impl Layout {
    /// Reads the words of a heading.
    fn of(words: &[&str]) -> Option<Self> {
        let is_time = |word: &&str| matches!(*word, "time" | "cputime");
        if words.first() != Some(&"size") || !words.contains(&"busbw") {
            return None;
        }
        let left = words.iter().position(&is_time)?;
        let right = &words[left..];
        let groups = right.iter().filter(|word| is_time(word)).count();
        let length = right.iter().skip(1).position(is_time).map_or_else(
            || right.iter().position(|word| *word == "timestamp").unwrap_or(right.len()),
            |at| at + 1,
        );
        let column = |word: &&str| match *word {
            "time" | "cputime" => Column::Time,
            "algbw" => Column::Algorithm,
            "busbw" => Column::Bus,
            "#wrong" => Column::Wrong,
            _ => Column::Other,
        };
        Some(Self { left, group: right[..length].iter().map(column).collect(), groups })
    }

    /// Words of a whole row, without what may follow.
    fn words(&self) -> usize {
        self.left + self.group.len() * self.groups
    }
}

/// What a run printed, read line by line.
#[derive(Debug, Default)]
pub struct Table {
    layout: Option<Layout>,
    /// A row that is not whole yet.
    open: Vec<String>,
    hosts: BTreeSet<String>,
    /// The rows.
    pub rows: Vec<Row>,
    /// Lines in the place of rows that are none.
    pub odd: u32,
    /// How often the program counts results as wrong, from its last lines.
    pub out_of_bounds: Option<u64>,
    /// What the program says about how it measures: sizes, warm-up and iterations.
    pub parameters: Option<String>,
    /// The release of nccl-tests, where it says so.
    pub release: Option<String>,
    /// Where the program says that it writes the same as JSON.
    pub json: Option<String>,
}

impl Table {
    /// Takes the next line.
    pub fn line(&mut self, line: &str) {
        let line = without_mark(line);
        let line = self.without_log(line);
        let trimmed = line.trim();
        if trimmed.is_empty() {
            return;
        }
        if let Some(comment) = trimmed.strip_prefix('#') {
            self.comment(comment.trim());
            return;
        }
        let Some(layout) = self.layout.clone() else { return };
        // A row is set off by blanks; other programs' lines hardly ever are.
        let numeric = trimmed.split_whitespace().next().is_some_and(is_number);
        if !line.starts_with("  ") && !numeric {
            return;
        }
        let words: Vec<&str> = trimmed.split_whitespace().take(MOST_WORDS).collect();
        if starts_row(&words) && !self.open.is_empty() {
            // The open one was never ended.
            self.odd += 1;
            self.open.clear();
        }
        if self.open.is_empty() && !starts_row(&words) {
            return;
        }
        self.open.extend(words.iter().map(|word| (*word).to_owned()));
        let single = layout.left + layout.group.len();
        if self.open.len() >= layout.words() {
            self.close(&layout, false);
        } else if layout.groups == 2 && self.open.len() >= single && skips_first(line) {
            self.close(&layout, true);
        } else if self.open.len() > MOST_WORDS {
            self.odd += 1;
            self.open.clear();
        }
    }

    fn comment(&mut self, text: &str) {
        let words: Vec<&str> = text.split_whitespace().take(MOST_WORDS).collect();
        if let Some(layout) = Layout::of(&words) {
            self.layout = Some(layout);
            self.open.clear();
            return;
        }
        if let Some((name, rest)) = text.split_once(':')
            && name.trim() == "Out of bounds values"
        {
            let count = rest.split_whitespace().next().and_then(|word| word.parse().ok());
            // Several tables in one output add up.
            self.out_of_bounds = match (self.out_of_bounds, count) {
                (Some(before), Some(now)) => Some(u64::saturating_add(before, now)),
                (before, now) => now.or(before),
            };
        }
        if text.starts_with("nThread ") {
            let parameters = text.split_whitespace().collect::<Vec<_>>().join(" ");
            self.parameters.get_or_insert(parameters);
        }
        if let Some(rest) = text.strip_prefix("nccl-tests version ") {
            self.release = rest.split_whitespace().next().map(str::to_owned);
        }
        if let Some(path) = text.strip_prefix("Writing JSON output to ") {
            self.json = Some(path.trim().to_owned());
        }
    }

    /// What stands in front of a line of NCCL's log, or all of it if it is none.
    fn without_log<'a>(&mut self, line: &'a str) -> &'a str {
        if !line.contains(" NCCL ") {
            return line;
        }
        let start = line.trim_start();
        if let Some(host) = log_host(start) {
            if self.hosts.len() < MOST_HOSTS {
                self.hosts.insert(host.to_owned());
            }
            return "";
        }
        // It begins somewhere in the line, glued to what is in front of it.
        let at = self
            .hosts
            .iter()
            .flat_map(|host| line.match_indices(host.as_str()))
            .filter(|(at, host)| log_host(&line[*at..]) == Some(*host))
            .map(|(at, _)| at)
            .min();
        at.map_or("", |at| &line[..at])
    }

    fn close(&mut self, layout: &Layout, second_only: bool) {
        let words = std::mem::take(&mut self.open);
        let (left, right) = words.split_at(layout.left.min(words.len()));
        let Some(size) = left.first().and_then(|word| word.parse().ok()) else {
            self.odd += 1;
            return;
        };
        // What tells rows of one size apart: type, operation and root, where they say something.
        let telling = |word: &&String| !matches!(word.as_str(), "none" | "-1");
        let label: Vec<&str> = left.iter().skip(2).filter(telling).map(String::as_str).collect();
        let label = label.join(" ");
        for (index, part) in right.chunks(layout.group.len()).take(layout.groups).enumerate() {
            let inplace = second_only || index == 1;
            let series = if inplace { Series::InPlace } else { Series::OutOfPlace };
            let mut row = Row::new(size, label.clone(), series);
            for (column, word) in layout.group.iter().zip(part) {
                let number = word.parse::<f64>().ok().filter(|number| number.is_finite());
                match column {
                    Column::Time => row.time_us = number,
                    Column::Algorithm => row.algorithm_gbs = number,
                    Column::Bus => row.bandwidth_gbs = number,
                    Column::Wrong => row.wrong = number,
                    Column::Other => {}
                }
            }
            if row.time_us.is_none() {
                self.odd += 1;
            } else {
                self.rows.push(row);
            }
        }
    }
}

fn is_number(word: &str) -> bool {
    word.parse::<f64>().is_ok()
}

/// Bytes, elements, and a word for the type.
fn starts_row(words: &[&str]) -> bool {
    let whole = |at: usize| words.get(at).is_some_and(|word| word.parse::<u64>().is_ok());
    whole(0) && whole(1) && words.get(2).is_some_and(|word| !is_number(word))
}

/// A row whose first placement was not measured has blanks there.
fn skips_first(line: &str) -> bool {
    line.contains(&" ".repeat(32))
}

/// The host in front of `:process:thread [`, at the beginning of a text.
pub fn log_host(text: &str) -> Option<&str> {
    let (host, rest) = text.split_once(':')?;
    let name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if host.is_empty() || !host.chars().all(name) {
        return None;
    }
    let (process, rest) = rest.split_once(':')?;
    let (thread, _) = rest.split_once(' ')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (digits(process) && digits(thread)).then_some(host)
}

/// A line without what a launcher put in front of it: `[1,0]<stdout>:` of Open MPI, `0: ` of Slurm.
pub fn without_mark(line: &str) -> &str {
    if let Some(rest) = line.strip_prefix('[')
        && let Some((mark, rest)) = rest.split_once(']')
        && mark.contains(',')
        && let Some(rest) = rest.strip_prefix('<')
        && let Some((stream, rest)) = rest.split_once(">:")
        && matches!(stream, "stdout" | "stderr" | "stddiag")
    {
        return rest;
    }
    let blank = line.trim_start_matches(' ');
    match blank.split_once(": ") {
        Some((rank, rest)) if !rank.is_empty() && rank.bytes().all(|b| b.is_ascii_digit()) => rest,
        _ => line,
    }
}

#[cfg(test)]
mod tests;
