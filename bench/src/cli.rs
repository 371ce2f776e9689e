//! The command line.

use crate::bounce::Bounce;
use crate::size;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Measures NCCL network plugins between two processes, as NCCL drives them.
///
/// Without a subcommand: a sweep over message sizes, first a pass in which every byte of every message is checked, then
/// timed passes. On a real verbs device if the machine has an active one, else on softrnic.
#[derive(Debug, Parser)]
#[command(name = "pinrail-bench", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// Something else than the sweep.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of the sweep.
    #[command(flatten)]
    pub sweep: Sweep,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Count the instructions, posts and bytes of memory a plugin costs, on a provider that costs nothing
    Cpu(Cpu),
    /// One of the two processes of a sweep; started by the sweep itself
    #[command(hide = true)]
    Rank(Rank),
    /// The program whose instructions are counted; started by `cpu` under valgrind
    #[command(hide = true)]
    CpuLoop(CpuLoop),
    /// Time registrations of more and more distinct ranges, on a provider that costs nothing
    Register(Register),
    /// The program that is timed; started by `register`
    #[command(hide = true)]
    RegisterLoop(RegisterLoop),
    /// Writes the manual pages into a folder; `make release` does
    #[command(hide = true)]
    Man(Man),
}

/// Options of `man`.
#[derive(Debug, Clone, Args)]
pub struct Man {
    /// A folder that exists.
    pub folder: PathBuf,
}

/// Options of the sweep.
#[derive(Debug, Clone, Args)]
pub struct Sweep {
    /// Plugin to load; several are measured in turns and compared with the first
    /// [default: dist/libnccl-net-pinrail.so]
    #[arg(long = "plugin", value_name = "PATH")]
    pub plugins: Vec<PathBuf>,
    /// Table version to use instead of the newest (6 to 12)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(6..=12))]
    pub abi: Option<u8>,
    /// Verbs library the plugins use (NCCL_IBVERBS_LIB) [default: the system's, or softrnic]
    #[arg(long, value_name = "PATH")]
    pub verbs_lib: Option<PathBuf>,
    /// Device to use, by the plugin's name for it [default: the first]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Smallest message
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "8", value_parser = size::parse)]
    pub begin: usize,
    /// Largest message
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "64M", value_parser = size::parse)]
    pub end: usize,
    /// From one size to the next, multiply by this
    #[arg(short = 'f', long, value_name = "N", default_value = "2",
          value_parser = clap::value_parser!(u64).range(2..=1024))]
    pub factor: u64,
    /// Receives in flight (NCCL's own limit is 32)
    #[arg(long, value_name = "N", default_value = "32",
          value_parser = clap::value_parser!(u64).range(1..=32))]
    pub window: u64,
    /// Messages per timed pass [default: as many as fit into --pass-ms]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub iters: Option<u64>,
    /// Length of one timed pass where --iters is not given [default: 100, beside perftest and from 1M with --bounce 250]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub pass_ms: Option<u64>,
    /// Timed passes per size; the median is shown [default: 3, with --perftest or --bounce 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=99))]
    pub rounds: Option<u64>,
    /// Check every byte of every message before measuring (on by default)
    #[arg(long, overrides_with = "no_check")]
    pub check: bool,
    /// Do not check
    #[arg(long)]
    pub no_check: bool,
    /// Members of each receive; the sender sends as many messages, told apart by tags
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u64).range(1..=8))]
    pub recvs: u64,
    /// Queue pairs per connection (NCCL_IB_QPS_PER_CONNECTION)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=128))]
    pub qps: Option<u64>,
    /// Run perftest's ib_write_bw on the same library in turns with the plugin, from --perftest-from on
    #[arg(long)]
    pub perftest: bool,
    /// Smallest size that is also measured with perftest
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = size::parse)]
    pub perftest_from: usize,
    /// Measure message buffers that cannot be pinned where they lie in turns with ordinary ones: those of the sending
    /// ends, of the receiving ends, or both; on softrnic only
    #[arg(long, value_name = "END")]
    pub bounce: Option<Bounce>,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// List the plugin's devices and stop
    #[arg(long)]
    pub list: bool,
    /// Seconds without any progress after which a run has failed
    #[arg(long, value_name = "S", default_value = "30",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Show all of the plugin's log lines, not only warnings
    #[arg(short, long)]
    pub verbose: bool,
}

/// Options of `cpu`.
#[derive(Debug, Clone, Args)]
pub struct Cpu {
    /// Plugin to count [default: dist/libnccl-net-pinrail.so]
    #[arg(long, value_name = "PATH")]
    pub plugin: Option<PathBuf>,
    /// Table version to use instead of the newest (6 to 12)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(6..=12))]
    pub abi: Option<u8>,
    /// The checked-in record to compare with
    #[arg(long, value_name = "FILE", default_value = "bench/record/cpu.json")]
    pub record: PathBuf,
    /// Write the figures into the record
    #[arg(long)]
    pub update: bool,
    /// Fail when a figure is over its budget
    #[arg(long)]
    pub enforce: bool,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Messages per phase
    #[arg(long, value_name = "N", default_value = "2048",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub count: u64,
    /// Keep callgrind's files in this folder, for callgrind_annotate
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// Show all of the plugin's log lines, not only warnings
    #[arg(short, long)]
    pub verbose: bool,
}

/// Options of `register`.
#[derive(Debug, Clone, Args)]
pub struct Register {
    /// Plugin to measure [default: dist/libnccl-net-pinrail.so]
    #[arg(long, value_name = "PATH")]
    pub plugin: Option<PathBuf>,
    /// Table version to use instead of the newest (6 to 12)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(6..=12))]
    pub abi: Option<u8>,
    /// Numbers of ranges, each in a process of its own
    #[arg(long, value_name = "N,…", value_delimiter = ',',
          default_values_t = [1000, 10_000, 25_000, 50_000, 100_000])]
    pub counts: Vec<usize>,
    /// Runs for each number; the best is shown
    #[arg(long, value_name = "N", default_value = "3",
          value_parser = clap::value_parser!(u64).range(1..=99))]
    pub rounds: u64,
}

/// Options of the program that `register` times.
#[derive(Debug, Clone, Args)]
pub struct RegisterLoop {
    /// The plugin.
    #[arg(long)]
    pub plugin: PathBuf,
    /// The null provider, already in NCCL_IBVERBS_LIB.
    #[arg(long)]
    pub provider: PathBuf,
    /// Table version.
    #[arg(long)]
    pub abi: Option<u8>,
    /// Ranges.
    #[arg(long)]
    pub count: usize,
}

/// Options of a rank. Everything else arrives over its standard input, which is a socket.
#[derive(Debug, Clone, Args)]
pub struct Rank {
    /// 0 or 1.
    pub rank: usize,
}

/// Options of the counted program.
#[derive(Debug, Clone, Args)]
pub struct CpuLoop {
    /// The plugin.
    #[arg(long)]
    pub plugin: PathBuf,
    /// The null provider, already in NCCL_IBVERBS_LIB.
    #[arg(long)]
    pub provider: PathBuf,
    /// Table version.
    #[arg(long)]
    pub abi: Option<u8>,
    /// Messages per phase.
    #[arg(long)]
    pub count: u64,
    /// Connections to open for the memory figures; 0: run the message phases instead.
    #[arg(long, default_value = "0")]
    pub connections: usize,
    /// Show all log lines.
    #[arg(long)]
    pub verbose: bool,
}

impl Sweep {
    /// Timed passes per size: a ratio of two noisy numbers needs more of them.
    pub fn rounds(&self) -> u64 {
        let ratio = self.perftest || self.bounce.is_some();
        self.rounds.unwrap_or(if ratio { 5 } else { 3 })
    }

    /// Length of a timed pass in seconds; `ratio`: what counts is a ratio that has a goal.
    pub fn pass_seconds(&self, ratio: bool) -> f64 {
        let default = if ratio { 250 } else { 100 };
        self.pass_ms.unwrap_or(default) as f64 / 1e3
    }
}
