//! `pinrail doctor`: what on a host keeps the plugin from working, or from working well.
//!
//! [`machine`], [`verbs`], [`port`] and [`pci`] gather facts with the plugin's own parser, probes and choices; [`check`]
//! draws the conclusions, a [`finding`] each; [`text`] and [`json`] show them; [`bundle`] keeps the files they rest on.
//! Everything is read below one root, so that a captured tree is judged like a host.

mod bundle;
mod check;
pub mod finding;
mod heard;
pub mod json;
mod machine;
mod pci;
mod port;
pub mod text;
mod verbs;

use crate::args::Doctor;
use crate::output::{self, Colour};
use finding::{Finding, exit_code};
use machine::Machine;
use port::Port;
use std::process::ExitCode;

/// It could not be told.
const UNKNOWN: u8 = 2;

/// Runs the command.
pub fn run(options: &Doctor) -> ExitCode {
    let machine = match options.root.as_deref().map_or_else(|| Ok(Machine::live()), Machine::at) {
        Ok(machine) => machine,
        Err(reason) => return failure(options, &reason),
    };
    let ports = port::ports(&machine);
    let findings = examine(&machine, &ports);
    let code = exit_code(&findings);
    let document = json::document(&machine, &ports, &findings, code);
    if let Some(path) = &options.bundle
        && let Err(error) = bundle::write(path, &machine, &document)
    {
        return failure(options, &format!("{} cannot be written: {error}", path.display()));
    }
    if options.json {
        output::print(&document);
    } else {
        output::print(&text::report(&machine, &ports, &findings, Colour::of_stdout()));
    }
    ExitCode::from(code)
}

fn failure(options: &Doctor, reason: &str) -> ExitCode {
    if options.json {
        output::print(&json::failure(reason, UNKNOWN));
    }
    eprintln!("pinrail doctor: {reason}");
    ExitCode::from(UNKNOWN)
}

/// All checks, in the order in which things are needed.
fn examine(machine: &Machine, ports: &[Port]) -> Vec<Finding> {
    let mut findings = check::library::check(machine, ports);
    findings.extend(check::nodes::check(machine));
    findings.extend(check::variables::check(machine));
    findings.extend(check::link::check(machine, ports));
    findings.extend(check::filter::check(machine, ports));
    findings.extend(check::gid::check(machine, ports));
    findings.extend(check::pkey::check(ports));
    findings.extend(check::class::check(machine, ports));
    findings.extend(check::sibling::check(ports));
    findings.extend(check::bond::check(machine, ports));
    findings.extend(check::socket::check(machine));
    findings.extend(check::limits::check(machine));
    findings.extend(check::placement::check(machine));
    findings.extend(check::forks::check(machine));
    findings.extend(check::gpu::check(machine));
    findings.extend(check::pcie::check(machine, ports));
    findings
}
