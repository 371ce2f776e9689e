//! The `pinrail` command: see `pinrail --help`.

mod args;
mod check;
mod doctor;
mod ending;
mod forks;
mod output;
mod reach;
mod settings;

use clap::Parser as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = args::Args::parse();
    match args.command {
        args::Command::Check(options) => check::run(&options),
        args::Command::CheckProbe(options) => check::probe(&options),
        args::Command::CheckRank(options) => check::rank(&options),
        args::Command::Forks(options) => forks::run(&options),
        args::Command::Reach(options) => reach::run(&options),
        args::Command::ReachWorker(options) => reach::worker(&options),
        args::Command::Doctor(options) => doctor::run(&options),
        args::Command::Settings(options) => settings::run(&options),
    }
}
