//! `pinrail man`: the manual pages, from the declaration of the command line, so that no command lacks one.

use crate::args::{Args, Man};
use clap::CommandFactory as _;
use std::process::ExitCode;

/// Runs the command.
pub fn run(options: &Man) -> ExitCode {
    match clap_mangen::generate_to(Args::command(), &options.folder) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pinrail man: {}: {error}", options.folder.display());
            ExitCode::from(2)
        }
    }
}
