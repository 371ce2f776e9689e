//! The `softrnic` command: looks into the processes of a fabric from outside, and breaks things in them.
//!
//! It joins the fabric as one more process, finds the other one's region as a peer does, and acts on its tables. The
//! process it acts on need not know, and need not run.

mod act;
mod look;
mod man;

use std::ffi::OsString;
use std::sync::Arc;

use crate::env::settings;
use crate::process::Process;
use crate::shm::peer::{Peer, Unreachable};

/// What `softrnic help` prints.
pub const USAGE: &str = "\
softrnic: looks into the processes of a fabric, and breaks things in them

  softrnic ps                                processes with their devices and ports
  softrnic qps PID                           queue pairs of a process
  softrnic counters PID                      its counters, those that are not zero
  softrnic check FILE [DEVICE,...]           reads a fault plan and says what is wrong with it
  softrnic faults PID                        its fault rules: about how many requests, how often fired
  softrnic faults PID set FILE               replaces its fault plan
  softrnic faults PID add FILE               adds rules behind those that are there
  softrnic faults PID clear                  ends its fault plan
  softrnic port PID DEVICE PORT down|up      takes a port down or up
  softrnic gid PID DEVICE PORT INDEX ADDRESS changes an entry of a GID table
  softrnic kill-qp PID QPN                   breaks a queue pair
  softrnic device-fatal PID DEVICE           lets a device die

FILE may be - for standard input. PID/SLOT names one of several instances of the library in a process. SOFTRNIC_FABRIC
names the fabric, as for the processes.
";

/// Why a command did not do what it should.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// It was not understood.
    Usage(String),
    /// It could not be done.
    Refused(String),
}

fn usage<T>(why: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Usage(why.into()))
}

fn refused<T>(why: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Refused(why.into()))
}

/// Runs a command; the text that it prints.
pub fn run(words: &[OsString]) -> Result<String, Failure> {
    let words: Vec<&str> = words
        .iter()
        .map(|word| word.to_str().ok_or_else(|| Failure::Usage(format!("{word:?} is not UTF-8"))))
        .collect::<Result<_, _>>()?;
    match words[..] {
        ["help" | "--help" | "-h"] => Ok(USAGE.into()),
        // For `make release`.
        ["man"] => Ok(man::page()),
        ["ps"] => inside(|us| Ok(look::processes(us))),
        ["qps", pid] => on(pid, |_, peer| Ok(look::queue_pairs(peer))),
        ["counters", pid] => on(pid, |_, peer| look::counters(peer)),
        ["check", file] => act::check(file, &settings().names),
        ["check", file, devices] => {
            let devices: Vec<String> = devices.split(',').map(str::to_owned).collect();
            act::check(file, &devices)
        }
        ["faults", pid] => on(pid, |us, peer| Ok(look::rules(us, peer))),
        ["faults", pid, "set", file] => on(pid, |us, peer| act::plan(us, peer, file, false)),
        ["faults", pid, "add", file] => on(pid, |us, peer| act::plan(us, peer, file, true)),
        ["faults", pid, "clear"] => on(pid, act::clear),
        ["port", pid, device, port, state @ ("down" | "up")] => {
            on(pid, |_, peer| act::port(peer, device, port, state == "up"))
        }
        ["gid", pid, device, port, index, address] => {
            on(pid, |_, peer| act::gid(peer, device, port, index, address))
        }
        ["kill-qp", pid, qpn] => on(pid, |us, peer| act::kill_qp(us, peer, qpn)),
        ["device-fatal", pid, device] => on(pid, |us, peer| act::device_fatal(us, peer, device)),
        [] => usage("no command"),
        [name, ..] => {
            let known = |line: &str| line.trim_start().starts_with(&format!("softrnic {name} "));
            match USAGE.lines().any(known) {
                true => usage(format!("{name} is not used like that")),
                false => usage(format!("there is no command {name}")),
            }
        }
    }
}

/// As a member of the fabric.
fn inside(body: impl FnOnce(&Process) -> Result<String, Failure>) -> Result<String, Failure> {
    let process = Process::open()
        .map_err(|e| Failure::Refused(format!("fabric {}: {e}", settings().fabric)))?;
    let done = body(&process);
    process.close();
    done
}

/// On one process of the fabric.
fn on(
    pid: &str,
    body: impl FnOnce(&Process, &Arc<Peer>) -> Result<String, Failure>,
) -> Result<String, Failure> {
    let (number, slot) = match pid.split_once('/') {
        Some((pid, slot)) => (pid.parse::<i32>().ok(), slot.parse::<u32>().ok()),
        None => (pid.parse().ok(), Some(0)),
    };
    let (Some(number), Some(slot)) = (number, slot) else {
        return usage(format!("{pid} is no process; give a PID as softrnic ps shows it"));
    };
    inside(|us| {
        let here: Vec<u32> = look::members(us)
            .filter(|record| record.pid == number && (slot == 0 || record.id & 0xff == slot))
            .map(|record| record.id & 0xff)
            .collect();
        let fabric = &settings().fabric;
        let slot = match here[..] {
            [slot] => slot,
            [] => {
                let why = "softrnic ps shows who is there, SOFTRNIC_FABRIC names another fabric";
                return refused(format!(
                    "process {pid} has no device open in fabric {fabric}; {why}"
                ));
            }
            [first, ..] => {
                let why = format!("name one of them, for example {number}/{first}");
                return refused(format!("process {pid} has {} instances; {why}", here.len()));
            }
        };
        let peer = us.peer(slot).map_err(|why| {
            Failure::Refused(match why {
                Unreachable::Gone => format!("process {pid} is gone"),
                Unreachable::Refused(error) => format!("process {pid} cannot be reached: {error}"),
            })
        })?;
        body(us, &peer)
    })
}
