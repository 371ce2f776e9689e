//! Results and how they look: an aligned table on standard output, and the same numbers as JSON.

use super::Subject;
use crate::cli::Sweep;
use crate::failure::{Failure, Result};
use crate::host::Fabric;
use crate::size;
use crate::stats::{best_ratio, median, paired_ratio};
use serde::Serialize;
use std::path::Path;

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

/// One bandwidth against another that was measured in turns with it.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Ratio {
    /// The median of the rounds' ratios.
    pub median: f64,
    /// The best round against the best round.
    pub best: f64,
}

impl Ratio {
    fn of(values: &[f64], references: &[f64]) -> Self {
        Self { median: paired_ratio(values, references), best: best_ratio(values, references) }
    }
}

/// All figures of one size.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// One entry per plugin, in command-line order.
    pub plugins: Vec<Figures>,
    /// The same on buffers that cannot be pinned, where they were measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bounced: Vec<Figures>,
    /// For each plugin the latter against the former.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bounced_to_direct: Vec<Ratio>,
    /// ib_write_bw's bandwidth of each round, where it was run.
    pub perftest_gbs: Vec<f64>,
}

impl Row {
    /// A row of what was measured; the ratios follow from it.
    pub fn new(plugins: Vec<Figures>, bounced: Vec<Figures>, perftest_gbs: Vec<f64>) -> Self {
        let bounced_to_direct = bounced
            .iter()
            .zip(&plugins)
            .map(|(bounced, direct)| Ratio::of(&bounced.bandwidth_gbs, &direct.bandwidth_gbs))
            .collect();
        Self { plugins, bounced, bounced_to_direct, perftest_gbs }
    }

    /// Figures of this row against ib_write_bw.
    fn beside_perftest(&self, figures: &Figures) -> Option<Ratio> {
        (!self.perftest_gbs.is_empty())
            .then(|| Ratio::of(&figures.bandwidth_gbs, &self.perftest_gbs))
    }

    /// Plugin `index` against ib_write_bw.
    fn to_perftest(&self, index: usize) -> Option<Ratio> {
        self.beside_perftest(self.plugins.get(index)?)
    }

    /// Plugin `index` on bounced buffers against itself on others, at sizes that have a goal.
    fn to_direct(&self, index: usize) -> Option<Ratio> {
        let large = self.plugins.get(index)?.size >= BOUNCE_GOAL_FROM;
        self.bounced_to_direct.get(index).copied().filter(|_| large)
    }
}

/// Smallest message at which the bandwidth on bounced buffers has a goal.
pub const BOUNCE_GOAL_FROM: usize = 1 << 20;

/// What the columns are for.
#[derive(Debug, Clone, Copy)]
pub struct Columns {
    /// Several plugins: a letter and a ratio to the first.
    pub several: bool,
    /// A second line for bounced buffers, with a ratio to the first.
    pub bounced: bool,
    /// ib_write_bw beside each.
    pub perftest: bool,
}

/// Prints what is measured.
pub fn print_subjects(subjects: &[Subject]) {
    for subject in subjects.iter().filter(|subject| subject.bounce.is_none()) {
        let device = &subject.session.device;
        let port = device.port;
        println!(
            "# {} {}: '{}', ncclNet v{}, device {} ({}), port {port}, {} Mb/s",
            if subjects.iter().any(|other| other.letter != subject.letter) {
                subject.letter.to_string()
            } else {
                "plugin".into()
            },
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
    if columns.bounced {
        column(7, "buffers", "");
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
    if columns.bounced {
        column(9, "to direct", "(median)");
        column(8, "", "(best)");
    }
    if columns.perftest {
        column(12, "ib_write_bw", "(GB/s)");
        column(8, "ratio", "(median)");
        column(8, "ratio", "(best)");
    }
    println!("{first}\n{second}");
}

/// Prints one size: a line for each plugin, and below it one for bounced buffers.
pub fn print_row(columns: Columns, row: &Row) {
    for (index, direct) in row.plugins.iter().enumerate() {
        print_line(columns, row, index, direct, None);
        if let Some(bounced) = row.bounced.get(index) {
            print_line(columns, row, index, bounced, row.bounced_to_direct.get(index));
        }
    }
}

/// Prints one line; `to_direct` is there on those of bounced buffers only.
fn print_line(
    columns: Columns,
    row: &Row,
    index: usize,
    figures: &Figures,
    to_direct: Option<&Ratio>,
) {
    let mut line = String::from(" ");
    let mut column = |width: usize, text: &str| line.push_str(&format!(" {text:>width$}"));
    let ratio = |ratio: Option<f64>| ratio.map_or_else(String::new, |r| format!("{r:.2}"));
    if columns.several {
        column(1, &super::letter(index).to_string());
    }
    if columns.bounced {
        column(7, if to_direct.is_some() { "bounced" } else { "direct" });
    }
    column(11, &figures.size.to_string());
    column(9, &figures.count.to_string());
    column(10, &format!("{:.2}", figures.latency_us));
    column(10, &format!("{:.4}", figures.messages_mps));
    column(10, &format!("{:.3}", median(&figures.bandwidth_gbs)));
    column(7, &figures.wrong.map_or_else(|| "N/A".into(), |wrong| wrong.to_string()));
    if columns.several {
        // Like with like: the first plugin on the same kind of buffers.
        let all = if to_direct.is_some() { &row.bounced } else { &row.plugins };
        let first = all.first().filter(|_| index > 0);
        let to_first = first.map(|f| paired_ratio(&figures.bandwidth_gbs, &f.bandwidth_gbs));
        column(8, &ratio(to_first));
    }
    if columns.bounced {
        column(9, &ratio(to_direct.map(|r| r.median)));
        column(8, &ratio(to_direct.map(|r| r.best)));
    }
    if columns.perftest {
        let reference = match row.perftest_gbs.as_slice() {
            [] => String::new(),
            rounds => format!("{:.3}", median(rounds)),
        };
        let to_perftest = row.beside_perftest(figures);
        column(12, &reference);
        column(8, &ratio(to_perftest.map(|r| r.median)));
        column(8, &ratio(to_perftest.map(|r| r.best)));
    }
    println!("{}", line.trim_end());
}

/// The lines below the table.
pub fn print_foot(rows: &[Row], subjects: &[Subject]) {
    for (index, subject) in subjects.iter().filter(|s| s.bounce.is_none()).enumerate() {
        let name = &subject.session.name;
        if let Some((Ratio { median, best }, at)) = lowest(rows, index, Row::to_perftest) {
            println!(
                "# {name}: lowest ratio to ib_write_bw is {median:.2} at {} (goal: 0.90); of the best rounds {best:.2}",
                size::show(at)
            );
        }
        if let Some((Ratio { median, best }, at)) = lowest(rows, index, Row::to_direct) {
            println!(
                "# {name}: lowest ratio of bounced to direct from {} on is {median:.2} at {} (goal: 0.60); of the best \
                 rounds {best:.2}",
                size::show(BOUNCE_GOAL_FROM),
                size::show(at)
            );
        }
    }
}

/// The lowest median of plugin `index` with its size, and the lowest of the best rounds, each over all rows.
fn lowest(
    rows: &[Row],
    index: usize,
    ratio: fn(&Row, usize) -> Option<Ratio>,
) -> Option<(Ratio, usize)> {
    let all = || rows.iter().filter_map(|row| Some((ratio(row, index)?, row.plugins[index].size)));
    let (worst, at) = all().min_by(|a, b| a.0.median.total_cmp(&b.0.median))?;
    let best = all().map(|(ratio, _)| ratio.best).fold(worst.best, f64::min);
    Some((Ratio { best, ..worst }, at))
}

/// Writes everything as JSON.
pub fn write_json(
    path: &Path,
    fabric: &Fabric,
    subjects: &[Subject],
    rows: &[Row],
    options: &Sweep,
) -> Result<()> {
    let bounced_pages: Vec<u64> =
        subjects.iter().filter(|s| s.bounce.is_some()).map(|s| s.bounced_pages).collect();
    let plugins: Vec<_> = subjects
        .iter()
        .filter(|subject| subject.bounce.is_none())
        .map(|subject| {
            serde_json::json!({
                "path": subject.path,
                "name": subject.session.name,
                "abi": subject.session.version,
                "device": subject.session.device,
            })
        })
        .collect();
    let value = serde_json::json!({
        "fabric": fabric.describe(),
        "library": fabric.library(),
        "plugins": plugins,
        "window": options.window,
        "recvs": options.recvs,
        "rounds": options.rounds(),
        "bounce": options.bounce.map(|ends| serde_json::json!({ "ends": ends, "pages": bounced_pages })),
        "rows": rows,
    });
    let text = serde_json::to_string_pretty(&value)
        .map_err(|error| Failure::new("json", error.to_string()))?;
    std::fs::write(path, text + "\n")
        .map_err(|error| Failure::io("json", &path.display().to_string(), &error))
}
