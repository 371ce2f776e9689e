//! `pinrail settings`: what the plugin makes of its variables.

use crate::args::Settings as Options;
use crate::output::{self, Colour, Style};
use nccl_net_pinrail::config::{Notice, Origin, Row, Settings, Severity, TABLE, printable};
use nccl_net_pinrail::host::inside::follow;
use nccl_net_pinrail::host::plain;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;

/// Counts the times when keys of the document changed otherwise than by being added.
const FORMAT: u32 = 1;

/// One row of the table with its effective value.
struct Shown<'a> {
    row: &'a Row,
    value: String,
    origin: Origin,
    /// The text it was set to.
    text: Option<String>,
}

impl Shown<'_> {
    /// The value is not pinrail's default.
    fn is_changed(&self) -> bool {
        self.value != self.row.default
    }

    /// What the stock transport would use in the same environment; `None`: it has no such variable.
    fn stock(&self) -> Option<&str> {
        let untouched = || self.row.stock_default.unwrap_or(self.row.default);
        // What is given is taken by both alike, ranges apart.
        let given = self.text.as_deref().map(str::trim);
        self.row.is_stock().then(|| given.map_or_else(untouched, |_| &self.value))
    }

    fn is_unlike_stock(&self) -> bool {
        self.stock().is_some_and(|stock| stock != self.value)
    }
}

/// Runs the command.
pub fn run(options: &Options) -> ExitCode {
    if let Some(reason) = options.root.as_deref().and_then(unreadable) {
        if options.json {
            output::print(&format!(
                "{:#}\n",
                json!({ "format": FORMAT, "exit_code": 2, "error": reason })
            ));
        }
        eprintln!("pinrail settings: {reason}");
        return ExitCode::from(2);
    }
    let (settings, notices) =
        options.root.as_deref().map_or_else(Settings::from_process, Settings::from_tree);
    let all: Vec<_> = TABLE.iter().map(|row| shown(row, &settings)).collect();
    let code = u8::from(notices.iter().any(|notice| notice.severity() == Severity::Warn));
    let chosen =
        all.iter().filter(|one| !options.diff || one.is_changed() || one.is_unlike_stock());
    let text = if options.json {
        document(chosen, &settings, &notices, code)
    } else {
        table(chosen, &settings, &notices, Colour::of_stdout())
    };
    output::print(&text);
    ExitCode::from(code)
}

/// Why a tree says nothing about the settings of a process.
fn unreadable(root: &Path) -> Option<String> {
    let folder = "proc/self";
    if !follow(root, Path::new(folder)).is_dir() {
        return Some(format!(
            "{} holds no captured tree: there is no folder {folder} in it. pinrail doctor --bundle makes one",
            root.display()
        ));
    }
    let environ = follow(root, &Path::new(folder).join("environ"));
    let error = plain::open(&environ).err()?;
    Some(format!(
        "the variables of the process cannot be told: {} cannot be read: {error}",
        environ.display()
    ))
}

fn shown<'a>(row: &'a Row, settings: &Settings) -> Shown<'a> {
    let given = settings.given.iter().find(|given| given.name == row.name);
    Shown {
        row,
        value: settings.shown(row.name).unwrap_or_default(),
        origin: given.map_or(Origin::Default, |given| given.origin.clone()),
        text: given.map(|given| given.text.clone()),
    }
}

/// Text for a cell.
fn cell(text: &str) -> String {
    if text.is_empty() { "not set".to_owned() } else { printable(text) }
}

fn table<'a>(
    rows: impl Iterator<Item = &'a Shown<'a>>,
    settings: &Settings,
    notices: &[Notice],
    colour: Colour,
) -> String {
    let head = ["variable", "value", "origin", "default", "stock", "accepts"].map(str::to_owned);
    let mut lines = vec![(head, Style::Strong)];
    for one in rows {
        let unit = one.row.form.unit().word();
        let unit = if unit.is_empty() { String::new() } else { format!(" ({unit})") };
        let stock = one.stock().map_or_else(|| "-".to_owned(), cell);
        let mark = if one.is_unlike_stock() { " *" } else { "" };
        let cells = [
            one.row.name.to_owned(),
            cell(&one.value),
            one.origin.to_string(),
            cell(one.row.default),
            stock + mark,
            one.row.form.accepts() + &unit,
        ];
        let style = if one.is_changed() { Style::Doubtful } else { Style::Good };
        lines.push((cells, style));
    }
    let widths: Vec<usize> = (0..5)
        .map(|at| lines.iter().map(|(cells, _)| cells[at].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for (index, (cells, style)) in lines.iter().enumerate() {
        let mut line = String::new();
        for (at, cell) in cells.iter().enumerate() {
            let width = widths.get(at).copied().unwrap_or(0);
            line += &format!("{cell:width$}  ");
        }
        let line = line.trim_end();
        // Only the heading and what was changed stand out.
        let plain = index > 0 && *style == Style::Good;
        text += &if plain { line.to_owned() } else { colour.paint(*style, line) };
        text.push('\n');
    }
    text += "\n* differs from what the stock transport would use here\n";
    if let Some(time) = settings.failure_time() {
        text += &format!("a dead peer is noticed after about {:.1} s\n", time.as_secs_f64());
    }
    for notice in notices {
        let (word, style) = match notice.severity() {
            Severity::Warn => ("PROBLEM", Style::Bad),
            Severity::Info => ("note", Style::Doubtful),
        };
        text += &format!("{}  {notice}\n", colour.paint(style, word));
    }
    text
}

fn origin(origin: &Origin) -> Value {
    match origin {
        Origin::Default => json!({ "kind": "default" }),
        Origin::Environment => json!({ "kind": "environment" }),
        Origin::File(path) => json!({ "kind": "file", "path": path.to_string_lossy() }),
    }
}

fn document<'a>(
    rows: impl Iterator<Item = &'a Shown<'a>>,
    settings: &Settings,
    notices: &[Notice],
    code: u8,
) -> String {
    let rows: Vec<_> = rows
        .map(|one| {
            json!({
                "name": one.row.name,
                "value": one.value,
                "text": one.text,
                "origin": origin(&one.origin),
                "default": one.row.default,
                "stock": one.stock(),
                "accepts": one.row.form.accepts(),
                "unit": one.row.form.unit().word(),
                "meaning": one.row.prose.split_whitespace().collect::<Vec<_>>().join(" "),
                "changed": one.is_changed(),
                "unlike_stock": one.is_unlike_stock(),
            })
        })
        .collect();
    let notices: Vec<_> = notices
        .iter()
        .map(|notice| {
            json!({
                "subject": notice.subject,
                "problem": notice.severity() == Severity::Warn,
                "text": notice.text,
            })
        })
        .collect();
    let value = json!({
        "format": FORMAT,
        "exit_code": code,
        "settings": rows,
        "notices": notices,
        "disabled": settings.disabled(),
        "failure_seconds": settings.failure_time().map(|time| time.as_secs_f64()),
    });
    format!("{value:#}\n")
}
