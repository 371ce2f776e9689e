//! Faults on purpose: a plan of rules says which requests break, and how.
//!
//! [`parse`] reads a plan, [`rule`] says what one rule means, [`table`] keeps the rules of a process where its peers find
//! them, [`act`] lets them happen to a request, [`timers`] ends what lasts for a time only. Without a plan all of this
//! costs a request one load and one branch.

pub mod act;
pub mod parse;
pub mod rule;
pub mod table;
pub mod timers;

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::env::settings;
use crate::process::Process;
use crate::sync::lock;
use parse::Plan;
use rule::{Facts, Side};

/// The plan of a process that has no device open: what SOFTRNIC_FAULTS names until somebody sets another.
static PLAN: Mutex<Option<Result<Plan, String>>> = Mutex::new(None);

/// No plan is longer.
const LONGEST: u64 = 1 << 20;

/// Reads a plan from a plain file. Whatever else has the name is neither waited for nor read for ever: a FIFO, a device.
pub fn read_file(path: &Path) -> io::Result<String> {
    // Without it, opening a FIFO waits for a writer; opening a terminal could make it the process's own.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no plain file"));
    }
    read_all(file)
}

/// Reads a plan from whatever is open, up to a length that no plan has.
pub fn read_all(from: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    from.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST {
        return Err(io::Error::other(format!("it is longer than {LONGEST} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::other("it is no text in UTF-8"))
}

fn load() -> Result<Plan, String> {
    let path = &settings().faults;
    if path.is_empty() {
        return Ok(Plan::default());
    }
    let text = read_file(Path::new(path)).map_err(|error| {
        format!(
            "SOFTRNIC_FAULTS={path}: {error}; name a readable file with a fault plan, or unset it"
        )
    })?;
    Plan::parse(&text, &settings().names).map_err(|why| format!("SOFTRNIC_FAULTS={path}, {why}"))
}

/// The plan that a new region starts with, or why there is none.
pub fn initial() -> Result<Plan, String> {
    lock(&PLAN).get_or_insert_with(load).clone()
}

/// Puts the initial plan into a fresh region.
pub fn publish(process: &Process) {
    // A plan that cannot be read has hidden the devices already; only tools come as far as this with one.
    if let Ok(plan) = initial()
        && !plan.rules.is_empty()
    {
        table::put(process, &process.region, &plan, false);
    }
}

/// Replaces the rules of this process, or adds some.
pub fn set(text: &str, keep: bool) -> Result<(), String> {
    let plan = Plan::parse(text, &settings().names).map_err(|why| why.to_string())?;
    let room = || format!("more than {} rules; leave some out", parse::MAX_RULES);
    if let Some(process) = Process::current() {
        if !table::put(&process, &process.region, &plan, keep) {
            return Err(room());
        }
    } else if keep {
        let mut now = initial()?;
        now.rules.extend(plan.rules);
        now.seed = plan.seed.or(now.seed);
        if now.rules.len() > parse::MAX_RULES {
            return Err(room());
        }
        *lock(&PLAN) = Some(Ok(now));
    } else {
        *lock(&PLAN) = Some(Ok(plan));
    }
    Ok(())
}

/// The errno with which a rule makes a call fail: `op` is its bit, `bytes` the size of the region or the entries of the
/// larger queue.
pub fn refusal(process: &Arc<Process>, device: usize, op: u16, bytes: u64) -> Option<i32> {
    let facts = Facts {
        side: Side::Local,
        device: u8::try_from(device).unwrap_or(0),
        port: 0,
        qpn: 0,
        ordinal: 0,
        op,
        bytes,
    };
    let firing = table::examine(process, &process.region, &facts, true)?;
    match firing.action {
        rule::Action::Fail { errno } => Some(i32::from(errno)),
        _ => None,
    }
}
