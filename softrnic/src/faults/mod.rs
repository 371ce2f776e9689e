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

use std::sync::{Arc, Mutex};

use crate::env::settings;
use crate::process::Process;
use crate::sync::lock;
use parse::Plan;
use rule::{Facts, Side};

/// The plan of a process that has no device open: what SOFTRNIC_FAULTS names until somebody sets another.
static PLAN: Mutex<Option<Result<Plan, String>>> = Mutex::new(None);

fn load() -> Result<Plan, String> {
    let path = &settings().faults;
    if path.is_empty() {
        return Ok(Plan::default());
    }
    let text = std::fs::read_to_string(path).map_err(|error| {
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
