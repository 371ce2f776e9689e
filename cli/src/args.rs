//! The command line.

use crate::check::release::Version;
use clap::{Args as Arguments, Parser, Subcommand};
use std::ffi::OsString;
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
    /// What the connections of running processes do: peers, waits, messages, bytes, latencies, errors
    ///
    /// Reads what the plugin shows; the processes are not disturbed and notice nothing.
    ///
    /// Exit status: 0 nothing is wrong, 1 a connection failed, lost a rail or has waited for long, 2 it could not be told.
    #[command(verbatim_doc_comment)]
    Status(Status),
    /// Runs a command of nccl-tests (or pinrail-bench) in turns with two plugins, and says what differs
    ///
    /// The command is given after `--`. NCCL_NET_PLUGIN and NCCL_NET are set for each run, and NCCL_DEBUG=INFO unless it is
    /// set; a launcher must hand them to every rank (Open MPI: -x NAME).
    ///
    /// Exit status: 0 both sides ran as they should, 1 a run failed, used another network or had wrong results, 2 it
    /// could not be told. Which side is faster does not count.
    #[command(verbatim_doc_comment)]
    Ab(Ab),
    /// Writes the manual pages of all commands into a folder; `make release` does
    #[command(hide = true)]
    Man(Man),
}

/// Options of `man`.
#[derive(Debug, Clone, Arguments)]
pub struct Man {
    /// A folder that exists
    pub folder: PathBuf,
}

/// Options of `ab`.
#[derive(Debug, Clone, Arguments)]
pub struct Ab {
    /// First plugin: a name as in NCCL_NET_PLUGIN, a file (with a slash), or none for NCCL's own transport
    #[arg(long, value_name = "PLUGIN", default_value = "none")]
    pub a: String,
    /// Second plugin
    #[arg(long, value_name = "PLUGIN", default_value = "pinrail")]
    pub b: String,
    /// A variable for runs of the first plugin only; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub a_env: Vec<(String, String)>,
    /// A variable for runs of the second plugin only; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub b_env: Vec<(String, String)>,
    /// Rounds; each has one run of both, and the order alternates
    #[arg(short = 'n', long, value_name = "N", default_value = "5",
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Seconds after which a run has failed and is killed
    #[arg(long, value_name = "S", default_value = "600",
          value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub deadline: u64,
    /// Go on after a run that failed
    #[arg(long)]
    pub keep_going: bool,
    /// Where the page with the plots goes; a file of that name is replaced
    #[arg(long, value_name = "FILE", default_value = "pinrail-ab.html")]
    pub html: PathBuf,
    /// Write no page
    #[arg(long, conflicts_with = "html")]
    pub no_html: bool,
    /// Write one JSON document instead of text
    #[arg(long)]
    pub json: bool,
    /// The command, with its arguments
    #[arg(last = true, required = true, num_args = 1.., value_name = "COMMAND")]
    pub command: Vec<OsString>,
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

/// Options of `status`.
#[derive(Debug, Clone, Arguments)]
pub struct Status {
    /// The process; else all of this user that have pinrail loaded
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// Look again and again, every so many seconds, until interrupted; a process that was named, until it ends
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "2", value_parser = interval)]
    pub watch: Option<f64>,
    /// Seconds without any progress after which a wait is a problem
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = interval)]
    pub stalled: f64,
    /// Write one JSON document instead of text; with --watch one on each line
    #[arg(long)]
    pub json: bool,
    /// Write the text format of Prometheus, for a scraper or a textfile collector
    #[arg(long, conflicts_with_all = ["json", "watch"])]
    pub prometheus: bool,
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

/// A time in seconds that can be waited.
fn interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds, such as 2 or 0.5")?;
    let sound = (0.05..=86400.0).contains(&seconds);
    sound.then_some(seconds).ok_or_else(|| "from 0.05 to 86400 seconds".into())
}

/// A variable with its value, which may be empty.
fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !text.contains('\0') => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err("a variable is given as NAME=VALUE".into()),
    }
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
    fn intervals_are_bounded() {
        assert_eq!(interval("0.5"), Ok(0.5));
        for bad in ["", "x", "0", "-1", "nan", "inf", "1e9"] {
            assert!(interval(bad).is_err(), "{bad:?}");
        }
        let parse = |line: &[&str]| Args::try_parse_from(line);
        assert!(parse(&["pinrail", "status", "5", "--watch"]).is_ok());
        assert!(parse(&["pinrail", "status", "--watch=0.2", "--json"]).is_ok());
        assert!(parse(&["pinrail", "status", "--prometheus", "--json"]).is_err());
        assert!(parse(&["pinrail", "status", "0"]).is_err());
    }

    #[test]
    fn variables_have_a_name() {
        assert_eq!(variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(variable("A="), Ok(("A".into(), String::new())));
        for bad in ["", "A", "=b"] {
            assert!(variable(bad).is_err(), "{bad:?}");
        }
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
