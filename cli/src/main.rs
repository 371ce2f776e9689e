//! The `pinrail` command: see `pinrail --help`.

mod args;
mod forks;
mod output;

use clap::Parser as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = args::Args::parse();
    match args.command {
        args::Command::Forks(options) => forks::run(&options),
    }
}
