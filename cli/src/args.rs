//! The command line.

use clap::{Args as Arguments, Parser, Subcommand};
use std::path::PathBuf;

/// Questions about RDMA on this machine, answered by the code of the pinrail plugin.
#[derive(Debug, Parser)]
#[command(name = "pinrail", version)]
pub struct Args {
    /// The question.
    #[command(subcommand)]
    pub command: Command,
}

/// The questions.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Which pages of a process its forked children do not have, and which registration took them
    ///
    /// Exit status: 0 nothing is withheld but memory of the plugin and of devices (with --core-address: the address is
    /// not withheld), 1 something else is (the address is), 2 it could not be told.
    #[command(verbatim_doc_comment)]
    Forks(Forks),
    /// What on this host keeps pinrail from working, or from working well, with evidence and remedy
    ///
    /// Run it as the job's processes run: in the container, under the launcher, with their environment.
    ///
    /// Exit status: 0 nothing is wrong, 1 there are problems, 2 it could not be told.
    #[command(verbatim_doc_comment)]
    Doctor(Doctor),
    /// Every setting with its value, where it was set, what it accepts and what the stock transport uses
    ///
    /// Exit status: 0 every variable has the effect that its text asks for, 1 one has not, 2 it could not be told.
    #[command(verbatim_doc_comment)]
    Settings(Settings),
}

/// Options of `doctor`.
#[derive(Debug, Clone, Arguments)]
pub struct Doctor {
    /// Look at a captured tree (proc, sys, dev, etc and so on below this folder) instead of this host
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Also write what was looked at into one tar archive, for a bug report
    #[arg(long, value_name = "FILE")]
    pub bundle: Option<PathBuf>,
    /// Write one JSON document instead of text
    #[arg(long)]
    pub json: bool,
}

/// Options of `settings`.
#[derive(Debug, Clone, Arguments)]
pub struct Settings {
    /// Only settings that differ from pinrail's default or from what the stock transport would use
    #[arg(long)]
    pub diff: bool,
    /// Read the environment and files of a captured tree instead of this process
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Write one JSON document instead of text
    #[arg(long)]
    pub json: bool,
}

/// Options of `forks`.
#[derive(Debug, Clone, Arguments)]
pub struct Forks {
    /// The parent, not the child that crashed
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: u32,
    /// An address that a child could not read, in hexadecimal, as a debugger or the kernel's log shows it
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub core_address: Option<u64>,
    /// Write one JSON document instead of text
    #[arg(long)]
    pub json: bool,
}

/// An address, with or without `0x`.
fn address(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    // from_str_radix would take a sign.
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err("an address is hexadecimal, such as 0x7f3a40001010".into());
    }
    u64::from_str_radix(digits, 16).map_err(|_| "an address has at most 16 digits".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_declaration_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn addresses_are_hexadecimal() {
        assert_eq!(address("0x10"), Ok(16));
        assert_eq!(address("7F3a"), Ok(0x7f3a));
        assert_eq!(address("0Xffffffffffffffff"), Ok(u64::MAX));
        for bad in ["", "0x", "-1", "+1", "0x1g", "10000000000000000", " 1"] {
            assert!(address(bad).is_err(), "{bad:?}");
        }
    }
}
