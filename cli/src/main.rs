//! The `pinrail` command: see `pinrail --help`.

mod ab;
mod args;
mod check;
mod doctor;
mod ending;
mod forks;
mod man;
mod output;
mod reach;
mod settings;
mod status;

use clap::Parser as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = match args::Args::try_parse() {
        Ok(args) => args,
        // What was asked for, and not an error.
        Err(help) if !help.use_stderr() => {
            output::print(&help.render().to_string());
            return ending(ExitCode::SUCCESS);
        }
        Err(error) => error.exit(),
    };
    ending(match args.command {
        args::Command::Ab(options) => ab::run(&options),
        args::Command::Man(options) => man::run(&options),
        args::Command::Check(options) => check::run(&options),
        args::Command::CheckProbe(options) => check::probe(&options),
        args::Command::CheckRank(options) => check::rank(&options),
        args::Command::Status(options) => status::run(&options),
        args::Command::Forks(options) => forks::run(&options),
        args::Command::Reach(options) => reach::run(&options),
        args::Command::ReachWorker(options) => reach::worker(&options),
        args::Command::Doctor(options) => doctor::run(&options),
        args::Command::Settings(options) => settings::run(&options),
    })
}

/// A verdict that nobody could read is none.
fn ending(verdict: ExitCode) -> ExitCode {
    if output::was_lost() { ExitCode::from(2) } else { verdict }
}
