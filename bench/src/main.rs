//! Two-process measurements for NCCL network plugins: see `pinrail-bench --help`.

mod bounce;
mod cli;
mod cpu;
mod host;
mod link;
mod rank;
mod registry;
mod size;
mod softrnic;
mod stats;
mod sweep;

use clap::{CommandFactory as _, Parser as _};
use pinrail_client::{buffer, failure, net, patience, progress};
use std::path::Path;
use std::process::ExitCode;

/// Writes the manual pages, from the declaration of the command line.
fn manual(folder: &Path) -> failure::Result<()> {
    clap_mangen::generate_to(cli::Cli::command(), folder)
        .map_err(|error| failure::Failure::io("man", &folder.display().to_string(), &error))
}

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let outcome = match cli.command {
        None => sweep::run(&cli.sweep),
        Some(cli::Command::Rank(options)) => rank::serve(options.rank),
        Some(cli::Command::Cpu(options)) => cpu::run(&options),
        Some(cli::Command::CpuLoop(options)) => cpu::run_loop(&options),
        Some(cli::Command::Register(options)) => registry::run(&options),
        Some(cli::Command::RegisterLoop(options)) => registry::run_loop(&options),
        Some(cli::Command::Man(options)) => manual(&options.folder),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pinrail-bench: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
