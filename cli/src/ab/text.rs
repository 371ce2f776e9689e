//! The comparison for people.

use super::child::Ending;
use super::compare::{Spread, figure, size};
use super::row::Series;
use super::side::differences;
use super::study::{Level, Study};
use crate::output::{Colour, Style};
use nccl_net_pinrail::config::printable;

/// The whole report.
pub fn report(study: &Study, colour: Colour) -> String {
    let mut out = String::new();
    for (side, network) in study.sides.iter().zip(&study.networks) {
        let network = network.as_ref().map_or_else(String::new, |name| format!("; network {name}"));
        let line = format!("{}: {}{network}", side.letter, side.name());
        out += &format!("{}\n", colour.paint(Style::Strong, &line));
    }
    out += &format!(
        "{}; {} of {} rounds with figures of both\n",
        printable_whole(&study.shown_command()),
        study.whole_rounds(),
        study.asked
    );
    if !study.parameters.is_empty() {
        out += &format!("{}\n", printable_whole(&measured(study)));
    }
    for remark in &study.remarks {
        let (word, style) = match remark.level {
            Level::Problem => ("PROBLEM", Style::Bad),
            Level::Unknown => ("UNKNOWN", Style::Doubtful),
            Level::Note => ("note", Style::Doubtful),
        };
        let about = study.about(remark);
        let about = if about.is_empty() { about } else { format!("{about}: ") };
        out += &format!("{}  {about}{}\n", colour.paint(style, word), remark.text);
    }
    failures(study, &mut out);
    if !study.points.is_empty() {
        out += "\n";
        table(study, colour, &mut out);
    }
    settings(study, &mut out);
    if let Some(page) = &study.page {
        out += &format!("\nwritten: {}\n", page.display());
    }
    out
}

/// How the program measured.
pub fn measured(study: &Study) -> String {
    let releases = study.releases.iter().map(|release| format!("nccl-tests {release}"));
    releases.chain(study.parameters.iter().cloned()).collect::<Vec<_>>().join("; ")
}

/// The last lines of runs that failed.
fn failures(study: &Study, out: &mut String) {
    for run in study.runs.iter().filter(|run| run.ended.ending != Ending::Well) {
        let letter = study.sides[run.side].letter;
        *out += &format!("\nlast lines of {letter} in round {}:\n", run.round);
        for line in &run.ended.tail {
            let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            *out += &format!("  | {line}\n");
        }
        if run.ended.tail.is_empty() {
            *out += "  | (none)\n";
        }
    }
}

fn cell(spread: Option<Spread>) -> String {
    spread.map_or_else(|| "-".into(), |spread| figure(spread.median))
}

fn table(study: &Study, colour: Colour, out: &mut String) {
    let head = [
        "size", "what", "", "A us", "B us", "A GB/s", "B GB/s", "B to A", "lowest", "highest",
        "#wrong",
    ]
    .map(str::to_owned);
    let mut lines = vec![(head, None)];
    for point in &study.points {
        let ratio = |of: fn(&Spread) -> f64| {
            point.ratio.as_ref().map_or_else(|| "-".into(), |ratio| format!("{:.3}", of(ratio)))
        };
        let wrong = match point.wrong {
            [None, None] => "N/A".to_owned(),
            wrong => format!("{}", wrong.iter().flatten().sum::<f64>()),
        };
        let style = point
            .ratio
            .filter(Spread::is_one_sided)
            .map(|ratio| if ratio.median > 1.0 { Style::Good } else { Style::Bad });
        let cells = [
            size(point.size),
            printable(&point.label),
            point.series.name().to_owned(),
            cell(point.time[0]),
            cell(point.time[1]),
            cell(point.bandwidth[0]),
            cell(point.bandwidth[1]),
            ratio(|ratio| ratio.median),
            ratio(|ratio| ratio.least),
            ratio(|ratio| ratio.most),
            wrong,
        ];
        lines.push((cells, style));
    }
    let width = |at: usize| lines.iter().map(|(cells, _)| cells[at].chars().count()).max();
    let widths: Vec<usize> = (0..11).map(|at| width(at).unwrap_or(0)).collect();
    for (index, (cells, style)) in lines.iter().enumerate() {
        let mut line = String::new();
        for (at, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            line += &if matches!(at, 1 | 2) {
                format!("  {cell:<width$}")
            } else {
                format!("  {cell:>width$}")
            };
        }
        let style = if index == 0 { Some(Style::Strong) } else { *style };
        let line = line.trim_end();
        *out += &style.map_or_else(|| line.to_owned(), |style| colour.paint(style, line));
        *out += "\n";
    }
    *out += "\nB to A: how much faster B is, above 1; the middle, the lowest and the highest of the rounds' ratios\n";
    for short in &study.summaries {
        let what = [short.series.name(), &short.label].join(" ");
        *out += &format!(
            "{}: B to A {:.3} over all sizes; lowest {:.3} at {}, highest {:.3} at {}\n",
            printable(what.trim()),
            short.ratio.median,
            short.ratio.least,
            size(short.at[0]),
            short.ratio.most,
            size(short.at[1])
        );
    }
    if study.points.iter().any(|p| matches!(p.series, Series::InPlace | Series::OutOfPlace)) {
        *out += "GB/s is what nccl-tests calls bus bandwidth, 10^9 bytes\n";
    }
}

/// What the sides were set to, as far as it differs.
fn settings(study: &Study, out: &mut String) {
    let [a, b] = &study.sides;
    let shown = |value: Option<String>| value.map_or_else(|| "(not set)".into(), |v| printable(&v));
    *out += "\nvariables that differ:\n";
    for (name, a, b) in differences(a, b) {
        *out += &format!("  {name}: A {}, B {}\n", shown(a), shown(b));
    }
    for (side, log) in study.sides.iter().zip(&study.logs) {
        for (settings, times) in &log.settings {
            let times =
                if log.settings.len() > 1 { format!(" ({times} times)") } else { String::new() };
            *out += &format!("{}: {}{times}\n", side.letter, printable_whole(settings));
        }
    }
}

/// A line that is not cut.
fn printable_whole(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
