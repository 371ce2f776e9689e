//! The rules of a process, in its region: whoever performs an operation there finds them, whoever may write there can
//! change them, and how often each fired is read by anybody.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::parse::{MAX_RULES, Plan};
use super::rule::{Action, Facts, Rule, Stage, WORDS};
use crate::env::settings;
use crate::process::Process;
use crate::rng::Rng;
use crate::shm::lock::RobustLock;
use crate::shm::mapping::Shared;
use crate::shm::region::Region;

/// Bit of the header's gate: there are rules.
pub const RULES: u32 = 1;
/// Bit of the header's gate: the owner's requests are taken apart by the stepped engine.
pub const STEPPED: u32 = 1 << 1;

/// One rule.
#[repr(C, align(64))]
#[derive(Debug)]
struct RuleSlot {
    words: [AtomicU64; WORDS],
    matched: AtomicU64,
    fired: AtomicU64,
}

/// All rules.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct FaultTable {
    lock: RobustLock,
    count: AtomicU32,
    seed: AtomicU64,
    /// Clock at the first request that met the plan; 0 = none yet.
    began: AtomicU64,
    rules: [RuleSlot; MAX_RULES],
}

// SAFETY: atomics only.
unsafe impl Shared for FaultTable {}

/// A rule that fires for a request.
#[derive(Clone, Copy, Debug)]
pub struct Firing {
    /// Number of the rule, from 0.
    pub rule: u32,
    /// Which time it fires, from 1.
    pub time: u64,
    /// What happens.
    pub action: Action,
    /// How far the request gets.
    pub stage: Stage,
    /// Random choices of this firing.
    pub rng: Rng,
}

/// A rule with its counts.
#[derive(Clone, Debug)]
pub struct Counted {
    /// The rule.
    pub rule: Rule,
    /// Requests that it is about.
    pub matched: u64,
    /// How often it fired.
    pub fired: u64,
}

fn read(slot: &RuleSlot) -> Option<Rule> {
    Rule::from_words(&std::array::from_fn(|i| slot.words[i].load(Ordering::Relaxed)))
}

fn length(table: &FaultTable) -> usize {
    (table.count.load(Ordering::Relaxed) as usize).min(MAX_RULES)
}

/// Replaces the rules of a region by a plan, or adds the plan's. `false`: there is no room.
pub fn put(us: &Process, region: &Region, plan: &Plan, keep: bool) -> bool {
    let table = region.faults();
    let guard = table.lock.lock(us.id(), |id| us.fabric.alive(id));
    let first = if keep { length(table) } else { 0 };
    let Some(slots) = table.rules.get(first..first + plan.rules.len()) else { return false };
    if !keep || plan.seed.is_some() {
        table.seed.store(plan.seed.unwrap_or(settings().seed()), Ordering::Relaxed);
    }
    if !keep {
        table.began.store(0, Ordering::Relaxed);
    }
    for (slot, rule) in slots.iter().zip(&plan.rules) {
        for (to, from) in slot.words.iter().zip(rule.words()) {
            to.store(from, Ordering::Relaxed);
        }
        slot.matched.store(0, Ordering::Relaxed);
        slot.fired.store(0, Ordering::Relaxed);
    }
    let count = first + plan.rules.len();
    table.count.store(u32::try_from(count).unwrap_or(0), Ordering::Relaxed);
    let gate = &region.header().gate;
    if count > 0 {
        gate.fetch_or(RULES, Ordering::SeqCst);
    } else {
        gate.fetch_and(!RULES, Ordering::SeqCst);
    }
    drop(guard);
    true
}

/// The rules of a region with their counts.
pub fn list(us: &Process, region: &Region) -> Vec<Counted> {
    let table = region.faults();
    let _guard = table.lock.lock(us.id(), |id| us.fabric.alive(id));
    let counted = |slot: &RuleSlot| {
        let (matched, fired) = (&slot.matched, &slot.fired);
        let (matched, fired) = (matched.load(Ordering::Relaxed), fired.load(Ordering::Relaxed));
        Some(Counted { rule: read(slot)?, matched, fired })
    };
    table.rules[..length(table)].iter().filter_map(counted).collect()
}

/// Shows a request to the rules of a region. All that cover it count it; the first that picks it fires, unless another
/// region's rule has fired for it.
pub fn examine(us: &Process, region: &Region, facts: &Facts, fires: bool) -> Option<Firing> {
    if region.header().gate.load(Ordering::SeqCst) & RULES == 0 {
        return None;
    }
    let now = crate::clock::now();
    let table = region.faults();
    let _guard = table.lock.lock(us.id(), |id| us.fabric.alive(id));
    let mut began = table.began.load(Ordering::Relaxed);
    if began == 0 {
        began = now.max(1);
        table.began.store(began, Ordering::Relaxed);
    }
    let mut firing = None;
    for (index, slot) in (0_u32..).zip(&table.rules[..length(table)]) {
        let Some(rule) = read(slot).filter(|r| r.when.covers(facts)) else { continue };
        let n = slot.matched.load(Ordering::Relaxed).wrapping_add(1);
        slot.matched.store(n, Ordering::Relaxed);
        let fired = slot.fired.load(Ordering::Relaxed);
        let mut rng = Rng::of(table.seed.load(Ordering::Relaxed), u64::from(index), n);
        let picked = rule.when.picks(n)
            && fired < rule.when.times
            && now.saturating_sub(began) >= rule.when.quiet_ns
            && (rule.when.p >= 1.0 || rng.chance(rule.when.p));
        if fires && picked && firing.is_none() {
            slot.fired.store(fired + 1, Ordering::Relaxed);
            let (action, stage) = (rule.action, rule.stage);
            firing = Some(Firing { rule: index, time: fired + 1, action, stage, rng });
        }
    }
    firing
}
