//! `pinrail ab`: a command run in turns with two plugins, and what the turns say.
//!
//! [`child`] runs it, [`table`], [`record`] and [`log`] read what it says, [`side`] knows what each plugin needs,
//! [`compare`] takes the ratios; [`text`], [`json`] and [`html`] show them.

mod bench;
mod child;
mod compare;
mod html;
mod json;
mod log;
mod plot;
mod record;
mod row;
mod side;
mod study;
mod table;
mod text;

use crate::args::Ab;
use crate::output::{self, Colour};
use side::{Plugin, Side};
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use study::{Study, UNKNOWN};

/// Runs the command.
pub fn run(options: &Ab) -> ExitCode {
    match compare_both(options) {
        Ok(study) => {
            output::print(&if options.json {
                json::document(&study)
            } else {
                text::report(&study, Colour::of_stdout())
            });
            ExitCode::from(study.code())
        }
        Err(reason) => {
            if options.json {
                output::print(&json::failure(&reason, UNKNOWN));
            }
            eprintln!("pinrail ab: {reason}");
            ExitCode::from(UNKNOWN)
        }
    }
}

fn compare_both(options: &Ab) -> Result<Study, String> {
    let sides = sides(options)?;
    if bench::is_bench(&options.command) {
        bench::check(&options.command, &sides)?;
    }
    let page = if options.no_html { None } else { Some(Page::new(&options.html)?) };
    let interrupted = catch_interruptions()?;
    let mut study = Study::new(options, sides);
    for round in 0..options.rounds {
        // The order alternates, so that whatever drifts favours neither.
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        study.begin_round();
        for side in order {
            let well =
                study.run(side, Duration::from_secs(options.deadline), &interrupted, progress);
            if !well && !options.keep_going {
                break;
            }
        }
        if study.is_over(options.keep_going) {
            break;
        }
    }
    study.conclude();
    if let Some(page) = page {
        study.page = Some(page.write(&html::page(&study))?);
    }
    Ok(study)
}

fn sides(options: &Ab) -> Result<[Side; 2], String> {
    let inherited = |name: &str| std::env::var(name).ok();
    let plugin = |flag: &str, text: &str| Plugin::parse(text).map_err(|e| format!("{flag}: {e}"));
    let a = Side::new("A", plugin("--a", &options.a)?, &options.a_env, inherited);
    let b = Side::new("B", plugin("--b", &options.b)?, &options.b_env, inherited);
    if a.plugin == b.plugin && a.environment == b.environment {
        return Err(format!(
            "both sides are {} with the same variables, and there is nothing to compare; give another --a or --b, or \
             --b-env NAME=VALUE",
            a.name()
        ));
    }
    Ok([a, b])
}

/// The first interruption ends the run that goes on, and what is known is shown; the second ends everything.
fn catch_interruptions() -> Result<Arc<AtomicBool>, String> {
    let flag = Arc::new(AtomicBool::new(false));
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
            .map_err(|error| format!("signals cannot be caught: {error}"))?;
    }
    Ok(flag)
}

/// Tells a person that something goes on.
fn progress(text: &str) {
    if io::stderr().is_terminal() {
        eprintln!("{text}");
    }
}

/// The page, whose place is taken before hours of runs.
struct Page {
    path: PathBuf,
    new: PathBuf,
    file: File,
}

impl Page {
    fn new(path: &Path) -> Result<Self, String> {
        if path.is_dir() || path.file_name().is_none() {
            return Err(format!("--html {}: it is a folder", path.display()));
        }
        // A rename would put a file in the place of a device.
        if path.metadata().is_ok_and(|found| !found.is_file()) {
            return Err(format!(
                "--html {}: it is no plain file; give another name",
                path.display()
            ));
        }
        let mut new = path.as_os_str().to_owned();
        new.push(format!(".{}.new", std::process::id()));
        let new = PathBuf::from(new);
        let file = File::create_new(&new)
            .map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
        Ok(Self { path: path.to_owned(), new, file })
    }

    fn write(mut self, page: &str) -> Result<PathBuf, String> {
        self.file
            .write_all(page.as_bytes())
            .and_then(|()| self.file.sync_all())
            .and_then(|()| std::fs::rename(&self.new, &self.path))
            .map_err(|error| format!("{} cannot be written: {error}", self.path.display()))?;
        Ok(self.path.clone())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // After a success it is not there.
        let _ = std::fs::remove_file(&self.new);
    }
}
