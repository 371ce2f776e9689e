//! The report as text for a person.

use super::ask::Outcome;
use super::{Cell, End, Report};
use crate::doctor::text::{clean, findings_text};
use crate::output::{Colour, Style};

/// More columns than this do not fit a line.
const WIDEST: usize = 64;

/// Everything: hosts with their rails, the matrix, the verdicts.
pub fn report(report: &Report, colour: Colour) -> String {
    let mut text = String::new();
    let mut ends: Vec<End> = Vec::new();
    for (index, (asked, host)) in report.hosts.iter().enumerate() {
        match host {
            Ok(host) => {
                let title = format!("{asked}: {}, pinrail {}", host.name, host.version);
                text += &format!("{}\n", colour.paint(Style::Strong, &clean(&title)));
                for (rail, one) in host.rails.iter().enumerate() {
                    let line = format!(
                        "  {:>3}  {}: {} Mb/s, GID {}",
                        ends.len(),
                        one.label,
                        one.mbps,
                        one.address
                    );
                    text += &format!("{}\n", clean(&line));
                    ends.push((index, rail));
                }
            }
            Err(why) => {
                text +=
                    &format!("{}\n", colour.paint(Style::Bad, &clean(&format!("{asked}: {why}"))));
            }
        }
    }
    text.push('\n');
    if !report.cells.is_empty() {
        text += &matrix(report, &ends, colour);
        text.push('\n');
    }
    text + &findings_text(&report.findings, colour)
}

/// One row for each rail that sends, one column for each that receives.
fn matrix(report: &Report, ends: &[End], colour: Colour) -> String {
    if ends.len() > WIDEST {
        return format!("{} rails: too many for a table; --json has them all\n", ends.len());
    }
    let mut text = String::from("from \\ to");
    for column in 0..ends.len() {
        text += &format!(" {column:>3}");
    }
    text.push('\n');
    for (row, from) in ends.iter().enumerate() {
        text += &format!("{row:>9}");
        for to in ends {
            let cell = report.cells.iter().find(|cell| (cell.from, cell.to) == (*from, *to));
            let (word, style) = mark(cell);
            text += &format!(" {}", colour.paint(style, &format!("{word:>3}")));
        }
        text.push('\n');
    }
    text + "ok: every byte arrived, X: failed, ?: not tried\n"
}

fn mark(cell: Option<&Cell>) -> (&'static str, Style) {
    match cell.map(|cell| &cell.outcome) {
        None => ("-", Style::Doubtful),
        Some(Outcome::Reached { .. }) => ("ok", Style::Good),
        Some(Outcome::Failed { .. }) => ("X", Style::Bad),
        Some(Outcome::Untried(_)) => ("?", Style::Doubtful),
    }
}
