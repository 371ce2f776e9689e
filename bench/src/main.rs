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

use clap::Parser as _;
use pinrail_client::{buffer, failure, net, patience, progress};
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let outcome = match cli.command {
        None => sweep::run(&cli.sweep),
        Some(cli::Command::Rank(options)) => rank::serve(options.rank),
        Some(cli::Command::Cpu(options)) => cpu::run(&options),
        Some(cli::Command::CpuLoop(options)) => cpu::run_loop(&options),
        Some(cli::Command::Register(options)) => registry::run(&options),
        Some(cli::Command::RegisterLoop(options)) => registry::run_loop(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pinrail-bench: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
