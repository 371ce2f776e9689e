//! `pinrail status`: what the connections of running processes do.
//!
//! [`process`] finds and reads the processes, [`port`] what the kernel counts at their ports, [`finding`] draws the conclusions, [`text`], [`json`] and [`prometheus`] show
//! them. Everything that is read may be of a hostile or dying process.

mod finding;
mod json;
mod port;
mod process;
mod prometheus;
mod text;

use crate::args::Status;
use crate::output::Colour;
use finding::Finding;
use process::Process;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

/// Nothing is wrong.
const FINE: u8 = 0;
/// Something is.
const PROBLEMS: u8 = 1;
/// It could not be told.
const UNKNOWN: u8 = 2;

/// Runs the command.
pub fn run(options: &Status) -> ExitCode {
    let Some(every) = options.watch else {
        let Look { shown, code } = look(options, &mut Vec::new());
        // A reader that has gone away has seen enough.
        let _ = write(&shown);
        return ExitCode::from(code);
    };
    let mut before = Vec::new();
    loop {
        let Look { mut shown, code } = look(options, &mut before);
        if !options.json && std::io::stdout().is_terminal() {
            // From the top of a cleared screen. Nothing has to be put back when the command is interrupted.
            shown.insert_str(0, "\x1b[H\x1b[2J\x1b[3J");
        } else if !options.json {
            shown.push('\n');
        }
        let over = options.pid.is_some() && code == UNKNOWN && before.is_empty();
        if write(&shown).is_err() || over {
            return ExitCode::from(code);
        }
        std::thread::sleep(Duration::from_secs_f64(every));
    }
}

/// What there is to show now, and the verdict.
struct Look {
    shown: String,
    code: u8,
}

/// Looks once. `before`: what the last look saw, which rates are computed from; becomes what this one saw.
fn look(options: &Status, before: &mut Vec<Process>) -> Look {
    let (processes, error) = match Process::find(options.pid) {
        Ok(processes) => (processes, None),
        Err(reason) => (Vec::new(), Some(reason)),
    };
    let findings: Vec<_> =
        processes.iter().map(|process| Finding::of(process, options.stalled)).collect();
    let code = match (&error, findings.iter().map(Finding::code).collect::<Vec<_>>()) {
        (Some(_), _) => UNKNOWN,
        (None, codes) if codes.contains(&PROBLEMS) => PROBLEMS,
        (None, codes) => codes.into_iter().max().unwrap_or(UNKNOWN),
    };
    if let Some(reason) = &error {
        eprintln!("pinrail status: {reason}");
    }
    let ports = port::of_processes(&processes);
    let shown = if options.json {
        json::document(&findings, &ports, error.as_deref(), code, options.watch.is_some())
    } else if options.prometheus {
        prometheus::page(&processes, &ports)
    } else {
        text::report(&findings, &ports, before, Colour::of_stdout())
    };
    drop(findings);
    *before = processes;
    Look { shown, code }
}

fn write(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
