//! Results and how they look: an aligned table on standard output, and the same numbers as JSON.

use super::Subject;
use crate::size;
use crate::stats::{median, paired_ratio};
use serde::Serialize;

/// One plugin's figures at one size.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// Bytes per message.
    pub size: usize,
    /// Receives per timed pass.
    pub count: u64,
    /// Median half round trip in microseconds.
    pub latency_us: f64,
    /// 99th percentile of the half round trip.
    pub latency_p99_us: f64,
    /// Bandwidth of each round in GB/s (10⁹ bytes).
    pub bandwidth_gbs: Vec<f64>,
    /// Messages per second, in millions, of the median round.
    pub messages_mps: f64,
    /// Messages whose bytes, guards or size were wrong; none if not checked.
    pub wrong: Option<u64>,
}

/// All figures of one size.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// One entry per plugin, in command-line order.
    pub plugins: Vec<Figures>,
    /// ib_write_bw's bandwidth of each round, where it was run.
    pub perftest_gbs: Vec<f64>,
}

impl Row {
    /// Plugin `index` against ib_write_bw.
    pub fn perftest_ratio(&self, index: usize) -> Option<f64> {
        let figures = self.plugins.get(index)?;
        (!self.perftest_gbs.is_empty())
            .then(|| paired_ratio(&figures.bandwidth_gbs, &self.perftest_gbs))
    }

    /// Plugin `index` against the first.
    fn first_ratio(&self, index: usize) -> Option<f64> {
        let (first, figures) = (self.plugins.first()?, self.plugins.get(index)?);
        (index > 0).then(|| paired_ratio(&figures.bandwidth_gbs, &first.bandwidth_gbs))
    }
}

/// What the columns are for.
#[derive(Debug, Clone, Copy)]
pub struct Columns {
    /// Several plugins: a letter and a ratio to the first.
    pub several: bool,
    /// ib_write_bw beside each.
    pub perftest: bool,
}

/// Prints what is measured.
pub fn print_subjects(subjects: &[Subject]) {
    for subject in subjects {
        let device = &subject.session.device;
        let port = device.port;
        println!(
            "# {} {}: '{}', ncclNet v{}, device {} ({}), port {port}, {} Mb/s",
            if subjects.len() > 1 { subject.letter.to_string() } else { "plugin".into() },
            subject.path.display(),
            subject.session.name,
            subject.session.version,
            device.index,
            device.name,
            device.speed,
        );
    }
}

/// Prints the table's head.
pub fn print_head(columns: Columns) {
    let mut first = String::from("#");
    let mut second = String::from("#");
    let mut column = |width: usize, name: &str, unit: &str| {
        first.push_str(&format!(" {name:>width$}"));
        second.push_str(&format!(" {unit:>width$}"));
    };
    if columns.several {
        column(1, "", "");
    }
    column(11, "size", "(B)");
    column(9, "count", "");
    column(10, "latency", "(us, p50)");
    column(10, "messages", "(M/s)");
    column(10, "bandwidth", "(GB/s)");
    column(7, "#wrong", "");
    if columns.several {
        column(8, "to A", "");
    }
    if columns.perftest {
        column(12, "ib_write_bw", "(GB/s)");
        column(8, "ratio", "");
    }
    println!("{first}\n{second}");
}

/// Prints one size.
pub fn print_row(columns: Columns, row: &Row) {
    for (index, figures) in row.plugins.iter().enumerate() {
        let mut line = String::from(" ");
        let mut column = |width: usize, text: &str| line.push_str(&format!(" {text:>width$}"));
        if columns.several {
            column(1, &super::letter(index).to_string());
        }
        column(11, &figures.size.to_string());
        column(9, &figures.count.to_string());
        column(10, &format!("{:.2}", figures.latency_us));
        column(10, &format!("{:.4}", figures.messages_mps));
        column(10, &format!("{:.3}", median(&figures.bandwidth_gbs)));
        column(7, &figures.wrong.map_or_else(|| "N/A".into(), |wrong| wrong.to_string()));
        let ratio = |ratio: Option<f64>| ratio.map_or_else(String::new, |r| format!("{r:.2}"));
        if columns.several {
            column(8, &ratio(row.first_ratio(index)));
        }
        if columns.perftest {
            let reference = match row.perftest_gbs.as_slice() {
                [] => String::new(),
                rounds => format!("{:.3}", median(rounds)),
            };
            column(12, &reference);
            column(8, &ratio(row.perftest_ratio(index)));
        }
        println!("{}", line.trim_end());
    }
}

/// The lines below the table.
pub fn print_foot(rows: &[Row], subjects: &[Subject]) {
    for (index, subject) in subjects.iter().enumerate() {
        let lowest = rows
            .iter()
            .filter_map(|row| Some((row.perftest_ratio(index)?, row.plugins[index].size)))
            .min_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((ratio, at)) = lowest {
            println!(
                "# {}: lowest ratio to ib_write_bw is {ratio:.2}, at {} (goal: 0.90 or more)",
                subject.session.name,
                size::show(at)
            );
        }
    }
}
