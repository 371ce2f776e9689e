//! The command line.

use crate::check::release::Version;
use clap::{Args as Arguments, Parser, Subcommand};
use std::net::IpAddr;
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
    /// Whether NCCL would load a network plugin, which table each release takes, and which devices it would see
    ///
    /// Opens the library under the names that NCCL tries, in a process of its own, and uses each of its tables. Works on
    /// any network plugin.
    ///
    /// Exit status: 0 NCCL would use it, 1 it would not, 2 it could not be told.
    #[command(verbatim_doc_comment)]
    Check(Check),
    /// The process that loads the plugin; started by `check` itself
    #[command(hide = true)]
    CheckProbe(CheckProbe),
    /// A process of a conformance case; started by `check` itself
    #[command(hide = true)]
    CheckRank(CheckProbe),
    /// Whether every rail of every host reaches every rail of the others, with a few checked messages
    ///
    /// On each host runs `pinrail reach --serve`, started by the job's launcher or by hand; one more `pinrail reach`, on
    /// any machine, names them all and tries every pair with the plugin's own transport.
    ///
    /// Exit status: 0 all reach all, 1 some do not, 2 it could not be told.
    #[command(verbatim_doc_comment)]
    Reach(Reach),
    /// The process of a responder that uses the plugin; started by `reach --serve` itself
    #[command(hide = true)]
    ReachWorker(CheckProbe),
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

/// Options of `check`.
#[derive(Debug, Clone, Arguments)]
pub struct Check {
    /// As NCCL_NET_PLUGIN would name it: a word, a path, or a list [default: NCCL_NET_PLUGIN, else libnccl-net.so]
    #[arg(value_name = "PLUGIN")]
    pub plugin: Option<String>,
    /// Judge as this NCCL release does, such as 2.27 or 2.27.3 [default: the newest known]
    #[arg(long, value_name = "RELEASE", value_parser = Version::parse)]
    pub nccl: Option<Version>,
    /// Also play the rules of the interface as cases, each between processes of its own
    #[arg(long)]
    pub conformance: bool,
    /// Play only this case; may be given several times
    #[arg(long = "case", value_name = "NAME", requires = "conformance")]
    pub cases: Vec<String>,
    /// Play with this table, or with all that the plugin has [default: the one that the release takes]
    #[arg(long, value_name = "N|all", requires = "conformance", value_parser = table)]
    pub table: Option<Table>,
    /// Play on this device, by the plugin's name for it [default: the first]
    #[arg(long, value_name = "NAME", requires = "conformance")]
    pub device: Option<String>,
    /// List the cases with their rules and stop
    #[arg(long)]
    pub list: bool,
    /// Seconds that a call of the plugin may take, and a case
    #[arg(long, value_name = "S", default_value = "60",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Show all that the plugin says
    #[arg(short, long)]
    pub verbose: bool,
    /// Write one JSON document instead of text
    #[arg(long)]
    pub json: bool,
}

/// Tables to play with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// All.
    All,
    /// This version.
    One(u8),
}

fn table(text: &str) -> Result<Table, String> {
    match text.parse() {
        _ if text == "all" => Ok(Table::All),
        Ok(version @ 5..=12) => Ok(Table::One(version)),
        _ => Err("a table is a number from 5 to 12, or all".into()),
    }
}

/// Options of the processes that load the plugin.
#[derive(Debug, Clone, Arguments)]
pub struct CheckProbe {
    /// Show all that the plugin says.
    #[arg(short, long)]
    pub verbose: bool,
}

/// Options of `reach`.
#[derive(Debug, Clone, Arguments)]
pub struct Reach {
    /// Hosts whose responders to ask, as host or host:port, also in lists with commas; @FILE reads a host file
    #[arg(value_name = "HOST", required_unless_present = "serve", conflicts_with = "serve")]
    pub hosts: Vec<String>,
    /// Be the responder of this host, until somebody has asked it
    #[arg(long)]
    pub serve: bool,
    /// Stay after somebody has asked, for the next one
    #[arg(long, requires = "serve")]
    pub stay: bool,
    /// Port to serve on; 0: any, which is printed
    #[arg(long, requires = "serve", default_value_t = crate::reach::PORT)]
    pub port: u16,
    /// Address to serve on [default: all]
    #[arg(long, value_name = "ADDRESS", requires = "serve")]
    pub bind: Option<IpAddr>,
    /// A word that both sides must know, or @FILE that holds it
    #[arg(long, value_name = "WORD")]
    pub key: Option<String>,
    /// Seconds to wait: for responders to start (default 30), or to be asked (default 600)
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub wait: Option<u64>,
    /// Seconds that a transfer may take
    #[arg(long, value_name = "S", default_value = "60",
          value_parser = clap::value_parser!(u64).range(1..=600))]
    pub timeout: u64,
    /// Only between rails of equal number: where the others are not meant to meet
    #[arg(long)]
    pub same_rail: bool,
    /// Show all that the plugin says
    #[arg(short, long)]
    pub verbose: bool,
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
