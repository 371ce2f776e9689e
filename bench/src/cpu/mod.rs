//! CPU cost and memory of a plugin, without the noise of a machine: instructions counted by callgrind while the plugin
//! runs on a provider that costs next to nothing.
//!
//! Instructions are those of the plugin's own object, in all its threads; libc, the provider and this program do not
//! count. They are the same on every run with the same binaries, so a test may assert them.

mod callgrind;
mod figures;
pub mod memory;
pub mod phases;
pub mod provider;

use crate::cli::{Cpu, CpuLoop};
use crate::failure::{Failure, Result};
use crate::host;
use callgrind::Scope;
use figures::{Figure, Record};
use memory::Memory;
use phases::{PHASES, Summary};
use provider::ProviderFile;
use std::path::Path;
use std::process::{Command, Stdio};

/// Connections that the memory figures are an average over.
const CONNECTIONS: usize = 64;
/// Shapes of a connection that are measured.
const QPS: [u64; 2] = [1, 4];

/// The counted program, in its own process.
pub fn run_loop(options: &CpuLoop) -> Result<()> {
    if options.connections > 0 { memory::run(options) } else { phases::run(options) }
}

/// Counts, prints, compares with the record.
pub fn run(options: &Cpu) -> Result<()> {
    let plugin = host::plugin(options.plugin.as_deref())?;
    let provider = ProviderFile::new()?;
    let folder = match &options.keep {
        Some(folder) => {
            std::fs::create_dir_all(folder)
                .map_err(|error| Failure::io("keep", &folder.display().to_string(), &error))?;
            folder.as_path()
        }
        None => provider.folder(),
    };
    let measurement = Measurement { options, plugin: &plugin, provider: &provider, folder };
    let mut figures = Vec::new();
    let mut memory_figures = Vec::new();
    let mut identity = (String::new(), 0);
    for qps in QPS {
        let (summary, more) = measurement.instructions(qps)?;
        identity = (summary.name, summary.abi);
        figures.extend(more);
        memory_figures.extend(figures::of_memory(qps, &measurement.memory(qps)?));
    }
    figures.extend(memory_figures);
    let (name, abi) = identity;
    println!(
        "# {}: '{name}', ncclNet v{abi}; instructions of its own object, all threads, per operation",
        plugin.display()
    );
    let old = Record::read(&options.record)?;
    if let Some(old) = old.as_ref().filter(|old| old.rustc != env!("BENCH_RUSTC_VERSION")) {
        println!("# the record was made with {}", old.rustc);
    }
    figures::print(&figures, old.as_ref());
    let record = Record::new(&name, abi, &figures);
    if options.update {
        record.write(&options.record)?;
        println!("# written to {}", options.record.display());
    }
    if let Some(path) = &options.json {
        record.write(path)?;
    }
    let over: Vec<&str> =
        figures.iter().filter(|f| f.over_budget()).map(|f| f.name.as_str()).collect();
    if over.is_empty() {
        println!("# all within budget");
        return Ok(());
    }
    println!("# over budget: {}", over.join("; "));
    if options.enforce { Err(Failure::new("budget", over.join("; "))) } else { Ok(()) }
}

struct Measurement<'a> {
    options: &'a Cpu,
    plugin: &'a Path,
    provider: &'a ProviderFile,
    folder: &'a Path,
}

impl Measurement<'_> {
    /// Two runs: all instructions of each phase, and those inside the probe.
    fn instructions(&self, qps: u64) -> Result<(Summary, Vec<Figure>)> {
        let program = self.program(qps, 0)?;
        let count = |scope, name: &str| {
            let name = format!("{name}.{qps}qp");
            callgrind::run(&program, self.plugin, scope, self.folder, &name)
        };
        let whole = count(Scope::Phase, "phases")?;
        let probed = count(Scope::Probe, "halves")?;
        let summary: Summary = parse(&whole.output)?;
        for run in [&whole, &probed] {
            if run.instructions.len() != PHASES.len() {
                return Err(Failure::new(
                    "callgrind",
                    format!("{} of {} phases were counted", run.instructions.len(), PHASES.len()),
                ));
            }
        }
        if whole.instructions[0] == 0 {
            return Err(Failure::new(
                "callgrind",
                format!("no instruction of {} was seen", self.plugin.display()),
            ));
        }
        let figures =
            figures::of_phases(qps, &summary.phases, &whole.instructions, &probed.instructions);
        Ok((summary, figures))
    }

    fn memory(&self, qps: u64) -> Result<Memory> {
        let mut program = self.program(qps, CONNECTIONS)?;
        // One heap, whose bytes in use are known exactly; arenas of other threads would look like mappings.
        program.env("MALLOC_ARENA_MAX", "1").stderr(Stdio::inherit());
        // Freed blocks in a thread's cache would still count as in use.
        program.env("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0");
        let output =
            program.output().map_err(|error| Failure::io("memory", "the program", &error))?;
        if !output.status.success() {
            return Err(Failure::new("memory", format!("the program failed ({})", output.status)));
        }
        parse(&String::from_utf8_lossy(&output.stdout))
    }

    fn program(&self, qps: u64, connections: usize) -> Result<Command> {
        let exe = std::env::current_exe()
            .map_err(|error| Failure::io("cpu", "the path of this program", &error))?;
        let provider = self.provider.path();
        let mut program = Command::new(exe);
        program.arg("cpu-loop").arg("--plugin").arg(self.plugin);
        program.arg("--provider").arg(&provider);
        program.args(["--count", &self.options.count.to_string()]);
        program.args(["--connections", &connections.to_string()]);
        if let Some(abi) = self.options.abi {
            program.args(["--abi", &abi.to_string()]);
        }
        if self.options.verbose {
            program.arg("--verbose");
        }
        program.env("NCCL_IBVERBS_LIB", &provider);
        program.env("LD_LIBRARY_PATH", self.provider.folder());
        program.env("NCCL_IB_QPS_PER_CONNECTION", qps.to_string());
        Ok(program)
    }
}

/// The last line of the program's output; a plugin may have printed before it.
pub fn parse<T: serde::de::DeserializeOwned>(output: &str) -> Result<T> {
    let line = output.lines().next_back().unwrap_or_default();
    serde_json::from_str(line)
        .map_err(|error| Failure::new("cpu", format!("unexpected output '{line}': {error}")))
}
