//! Plan text to rules, and back. Strict: a word that is not understood makes the whole plan invalid, because a rule
//! that silently never fires makes a test prove nothing.

use std::fmt::{self, Write as _};

use super::rule::*;
use crate::env::MAX_GIDS;

/// Most rules of a plan.
pub const MAX_RULES: usize = 64;

/// Completion statuses by name, in the order of their codes; the first is success and no fault.
pub const STATUSES: [&str; 24] = [
    "success",
    "loc-len",
    "loc-qp-op",
    "loc-eec-op",
    "loc-prot",
    "wr-flush",
    "mw-bind",
    "bad-resp",
    "loc-access",
    "rem-inv-req",
    "rem-access",
    "rem-op",
    "retry-exc",
    "rnr-retry-exc",
    "loc-rdd-viol",
    "rem-inv-rd-req",
    "rem-abort",
    "inv-eecn",
    "inv-eec-state",
    "fatal",
    "resp-timeout",
    "general",
    "tm",
    "tm-rndv",
];

const ERRNOS: [(&str, i32); 8] = [
    ("ENOMEM", libc::ENOMEM),
    ("EFAULT", libc::EFAULT),
    ("EINVAL", libc::EINVAL),
    ("ENOSPC", libc::ENOSPC),
    ("EPERM", libc::EPERM),
    ("EIO", libc::EIO),
    ("EAGAIN", libc::EAGAIN),
    ("EOPNOTSUPP", libc::EOPNOTSUPP),
];

const MATCHERS: &str = "device=NAME port=N qp=N|0xN|#N op=NAME,... side=local|remote bytes=N|LO..HI nth=N skip=N \
                        every=N times=N after=TIME p=0..1";
const ACTIONS: &str = "status=NAME|N [vendor=N], drop, delay=TIME, behind=N [for=TIME], shuffle[=BYTES], corrupt[=N], \
                       kill-qp, cq-overrun, port-down [for=TIME], gid=INDEX/ADDRESS, device-fatal, fail=ERRNO";

/// How long `behind` waits at most if the rule does not say.
const BEHIND_NS: u64 = 10_000_000;

/// A whole plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Seed of every random choice, unless SOFTRNIC_SEED is meant.
    pub seed: Option<u64>,
    /// Rules, in their order.
    pub rules: Vec<Rule>,
}

/// Why a plan is not one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong.
    pub what: String,
    /// What to write instead.
    pub remedy: String,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}; {}", self.line, self.what, self.remedy)
    }
}

/// What is wrong, and the remedy.
type Wrong = (String, String);

fn wrong<T>(what: impl Into<String>, remedy: impl Into<String>) -> Result<T, Wrong> {
    Err((what.into(), remedy.into()))
}

/// One line of bearable length, whatever a word of the plan holds.
fn printable(text: &str) -> String {
    let mut line = String::new();
    for c in text.chars() {
        if line.len() >= 400 {
            return line + "...";
        }
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

impl Plan {
    /// Reads a plan for a process with these devices.
    pub fn parse(text: &str, devices: &[String]) -> Result<Self, Invalid> {
        let mut plan = Self::default();
        for (index, line) in text.lines().enumerate() {
            let line = code(line);
            let at = |(what, remedy): Wrong| Invalid {
                line: index + 1,
                what: printable(&what),
                remedy: printable(&remedy),
            };
            if line.is_empty() {
                continue;
            }
            if let Some(seed) = line.strip_prefix("seed=") {
                if plan.seed.is_some() {
                    return Err(at(("a second seed".into(), "give one seed for the plan".into())));
                }
                plan.seed = Some(integer("seed", seed).map_err(at)?);
                continue;
            }
            let rule = rule(line, devices).map_err(at)?;
            if plan.rules.len() >= MAX_RULES {
                let what = format!("more than {MAX_RULES} rules");
                return Err(at((what, "leave some out".into())));
            }
            plan.rules.push(rule);
        }
        Ok(plan)
    }
}

/// A line without its comment. In `qp=#2` the sign is none: there it follows an equals sign.
fn code(line: &str) -> &str {
    let comment = line.char_indices().find(|(i, c)| *c == '#' && !line[..*i].ends_with('='));
    line[..comment.map_or(line.len(), |(i, _)| i)].trim()
}

fn integer(name: &str, text: &str) -> Result<u64, Wrong> {
    let value = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        // `parse` alone would take a sign.
        None => text.starts_with(|c: char| c.is_ascii_digit()).then(|| text.parse().ok()).flatten(),
    };
    value.ok_or_else(|| {
        (format!("{name}={text} is not a number"), format!("write {name}=5 or {name}=0x5"))
    })
}

fn within(name: &str, text: &str, least: u64, most: u64) -> Result<u64, Wrong> {
    let value = integer(name, text)?;
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    wrong(format!("{name}={text} is out of range"), format!("use {least} to {most}"))
}

fn narrow<T: TryFrom<u64>>(name: &str, text: &str, least: u64, most: u64) -> Result<T, Wrong> {
    let value = within(name, text, least, most)?;
    T::try_from(value)
        .map_err(|_| (format!("{name}={text} is out of range"), format!("use up to {most}")))
}

const UNITS: [(&str, u64); 4] = [("ns", 1), ("us", 1000), ("ms", 1_000_000), ("s", 1_000_000_000)];

fn time(name: &str, text: &str) -> Result<u64, Wrong> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = UNITS.iter().find(|(unit, _)| *unit == &text[digits.len()..]);
    let value = unit
        .zip(integer(name, digits).ok())
        .and_then(|((_, ns), n)| n.checked_mul(*ns))
        // A year: far enough from overflow when it is added to the clock.
        .filter(|ns| *ns <= 31_536_000_000_000_000);
    value.ok_or_else(|| {
        let remedy = format!("write a whole number with ns, us, ms or s: {name}=20ms");
        (format!("{name}={text} is not a time"), remedy)
    })
}

fn size(name: &str, text: &str) -> Result<u64, Wrong> {
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) if text.ends_with('K') => (digits, 10),
        Some(digits) if text.ends_with('M') => (digits, 20),
        Some(digits) => (digits, 30),
        None => (text, 0),
    };
    let value = integer(name, digits)?;
    match value.checked_mul(1 << shift) {
        Some(value) => Ok(value),
        None => wrong(format!("{name}={text} is too large"), "use a size below 2^64"),
    }
}

fn pick(name: &str, text: &str, names: &[&str]) -> Result<usize, Wrong> {
    names.iter().position(|n| *n == text).ok_or_else(|| {
        (format!("{name}={text} is unknown"), format!("use one of {}", names.join(", ")))
    })
}

/// Words of one half of a rule, each taken at most once.
struct Words<'a> {
    list: Vec<(&'a str, Option<&'a str>)>,
}

impl<'a> Words<'a> {
    fn of(text: &'a str) -> Result<Self, Wrong> {
        let mut list: Vec<(&str, Option<&str>)> = Vec::new();
        for word in text.split_whitespace() {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (word, None),
            };
            if list.iter().any(|(n, _)| *n == name) {
                return wrong(format!("{name} twice in one rule"), "give it once");
            }
            list.push((name, value));
        }
        Ok(Self { list })
    }

    /// The value of a word that has to have one.
    fn take(&mut self, name: &str) -> Result<Option<&'a str>, Wrong> {
        match self.flag(name) {
            None => Ok(None),
            Some(Some(value)) if !value.is_empty() => Ok(Some(value)),
            Some(_) => wrong(format!("{name} has no value"), format!("write {name}=...")),
        }
    }

    /// A word that may go without a value.
    fn flag(&mut self, name: &str) -> Option<Option<&'a str>> {
        let at = self.list.iter().position(|(n, _)| *n == name)?;
        Some(self.list.remove(at).1)
    }

    /// Nothing may be left over.
    fn done(self, side: &str, known: &str) -> Result<(), Wrong> {
        match self.list.first() {
            None => Ok(()),
            Some((name, _)) => {
                wrong(format!("{name} does not belong {side}"), format!("known there: {known}"))
            }
        }
    }
}

fn rule(line: &str, devices: &[String]) -> Result<Rule, Wrong> {
    let Some((left, right)) = line.split_once("->") else {
        return wrong(
            "no -> in the rule",
            "write matchers -> action, for example op=write -> drop",
        );
    };
    let (when, named) = matcher(Words::of(left)?, devices)?;
    let (stage, action) = action(Words::of(right)?)?;
    let mut rule = Rule { when, stage, action };
    fit(&mut rule, named)?;
    Ok(rule)
}

/// Reads the left half; also whether it names opcodes.
fn matcher(mut words: Words<'_>, devices: &[String]) -> Result<(Match, bool), Wrong> {
    let mut when = Match::default();
    if let Some(name) = words.take("device")? {
        let names: Vec<&str> = devices.iter().map(String::as_str).collect();
        when.device = u8::try_from(pick("device", name, &names)?).ok();
    }
    if let Some(port) = words.take("port")? {
        when.port = Some(narrow("port", port, 1, 4)?);
    }
    if let Some(qp) = words.take("qp")? {
        when.qp = Some(match qp.strip_prefix('#') {
            Some(nth) => QpMatch::Ordinal(narrow("qp", nth, 1, u64::from(u32::MAX))?),
            None => QpMatch::Number(narrow("qp", qp, 1, 0x00ff_ffff)?),
        });
    }
    let mut named = false;
    if let Some(ops) = words.take("op")? {
        named = true;
        when.ops = 0;
        for op in ops.split(',') {
            when.ops |= 1 << pick("op", op, &OPS)?;
        }
    }
    if let Some(side) = words.take("side")? {
        when.side = [Side::Local, Side::Remote][pick("side", side, &["local", "remote"])?];
    }
    if let Some(bytes) = words.take("bytes")? {
        when.bytes = match bytes.split_once("..") {
            None => size("bytes", bytes).map(|n| (n, n))?,
            Some((least, most)) => {
                let most = if most.is_empty() { u64::MAX } else { size("bytes", most)? };
                (if least.is_empty() { 0 } else { size("bytes", least)? }, most)
            }
        };
        if when.bytes.0 > when.bytes.1 {
            return wrong(format!("bytes={bytes} is empty"), "put the smaller number first");
        }
    }
    position(&mut words, &mut when)?;
    words.done("left of ->", MATCHERS)?;
    Ok((when, named))
}

fn position(words: &mut Words<'_>, when: &mut Match) -> Result<(), Wrong> {
    let nth = words.take("nth")?;
    let (every, times) = (words.take("every")?, words.take("times")?);
    let skip = words.take("skip")?;
    if let Some(every) = every {
        when.every = within("every", every, 1, u64::MAX)?;
    }
    if let Some(times) = times {
        when.times = within("times", times, 1, u64::MAX - 1)?;
    }
    if let Some(skip) = skip {
        when.skip = integer("skip", skip)?;
    }
    if let Some(nth) = nth {
        if every.is_some() || times.is_some() || skip.is_some() {
            let what = "nth together with skip, every or times";
            return wrong(what, "nth=N alone means the N-th and only that");
        }
        when.skip = within("nth", nth, 1, u64::MAX)? - 1;
        when.times = 1;
    }
    if let Some(after) = words.take("after")? {
        when.quiet_ns = time("after", after)?;
    }
    if let Some(text) = words.take("p")? {
        match text.parse::<f64>() {
            Ok(p) if p > 0.0 && p <= 1.0 => when.p = p,
            _ => return wrong(format!("p={text} is no probability"), "use p=0.01 to p=1"),
        }
    }
    Ok(())
}

fn action(mut words: Words<'_>) -> Result<(Stage, Action), Wrong> {
    let known: Vec<&str> = ACTIONS
        .split(", ")
        .map(|a| a.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).next().unwrap_or(""))
        .collect();
    let given: Vec<&str> =
        words.list.iter().map(|(n, _)| *n).filter(|n| known.contains(n)).collect();
    let name = match given[..] {
        [name] => name,
        [] => return wrong("no action", format!("write one of {ACTIONS}")),
        _ => return wrong(format!("{} in one rule", given.join(" and ")), "write two rules"),
    };
    let bare = |words: &mut Words<'_>| match words.flag(name) {
        Some(Some(value)) => wrong(format!("{name}={value}"), format!("{name} takes no value")),
        _ => Ok(()),
    };
    let action = match name {
        "status" => {
            let text = words.take(name)?.unwrap_or("");
            let status = match text.starts_with(|c: char| c.is_ascii_digit()) {
                true => narrow(name, text, 1, 23)?,
                false => u8::try_from(pick(name, text, &STATUSES)?).unwrap_or(0),
            };
            if status == 0 {
                return wrong("status=success is no fault", "name an error or leave the rule out");
            }
            let vendor = words.take("vendor")?;
            let vendor = vendor.map(|v| narrow("vendor", v, 0, u64::from(u32::MAX))).transpose()?;
            Action::Status { status, vendor }
        }
        "drop" => bare(&mut words).map(|()| Action::Drop)?,
        "delay" => Action::Delay { ns: time(name, words.take(name)?.unwrap_or(""))? },
        "behind" => {
            let text = words.take(name)?.unwrap_or("");
            let count = narrow(name, text, 1, u64::from(u32::MAX))?;
            let limit = words.take("for")?.map(|t| time("for", t)).transpose()?;
            Action::Behind { count, ns: limit.unwrap_or(BEHIND_NS) }
        }
        "shuffle" => {
            let piece = match words.flag(name).flatten() {
                None => 0,
                Some(text) => match size(name, text)? {
                    n @ 1..=0x4000_0000 => u32::try_from(n).unwrap_or(0),
                    _ => return wrong(format!("shuffle={text}"), "use pieces of 1 to 1G bytes"),
                },
            };
            Action::Shuffle { piece }
        }
        "corrupt" => {
            let text = words.flag(name).flatten().unwrap_or("1");
            Action::Corrupt { bytes: narrow(name, text, 1, u64::from(u32::MAX))? }
        }
        "kill-qp" => bare(&mut words).map(|()| Action::KillQp)?,
        "cq-overrun" => bare(&mut words).map(|()| Action::CqOverrun)?,
        "port-down" => {
            bare(&mut words)?;
            let ns = words.take("for")?.map(|t| time("for", t)).transpose()?;
            Action::PortDown { ns }
        }
        "gid" => gid(words.take(name)?.unwrap_or(""))?,
        "device-fatal" => bare(&mut words).map(|()| Action::DeviceFatal)?,
        _ => {
            let text = words.take(name)?.unwrap_or("");
            let errno = match ERRNOS.iter().find(|(n, _)| *n == text) {
                Some((_, errno)) => u16::try_from(*errno).unwrap_or(0),
                None => narrow(name, text, 1, 4095).map_err(|(what, _)| {
                    let names: Vec<&str> = ERRNOS.iter().map(|(n, _)| *n).collect();
                    (what, format!("use a number up to 4095 or one of {}", names.join(", ")))
                })?,
            };
            Action::Fail { errno }
        }
    };
    let mut stage = Stage::Start;
    if let Some(at) = words.take("at")? {
        use Action::{Delay, DeviceFatal, Drop, KillQp, PortDown, Status};
        if !matches!(
            action,
            Status { .. } | Drop | Delay { .. } | KillQp | PortDown { .. } | DeviceFatal
        ) {
            return wrong(format!("at with {name}"), "leave at out: this fault has its own moment");
        }
        stage = [Stage::Start, Stage::Half, Stage::Payload, Stage::End][pick("at", at, &STAGES)?];
    }
    words.done("right of ->", &format!("one of {ACTIONS}, and at={}", STAGES.join("|")))?;
    Ok((stage, action))
}

fn gid(text: &str) -> Result<Action, Wrong> {
    let remedy = "write gid=INDEX/ADDRESS, for example gid=0/10.0.0.9 or gid=1/fe80::1";
    let Some((index, address)) = text.split_once('/') else {
        return wrong(format!("gid={text} has no address"), remedy);
    };
    let index = narrow("gid", index, 0, MAX_GIDS as u64 - 1)?;
    match address.parse() {
        Ok(std::net::IpAddr::V4(v4)) => {
            Ok(Action::Gid { index, gid: v4.to_ipv6_mapped().octets() })
        }
        Ok(std::net::IpAddr::V6(v6)) => Ok(Action::Gid { index, gid: v6.octets() }),
        Err(_) => wrong(format!("{address} is no address"), remedy),
    }
}

/// Checks that the halves fit each other, and narrows opcodes that the rule left open to those that the action knows.
fn fit(rule: &mut Rule, named: bool) -> Result<(), Wrong> {
    let (when, action) = (&mut rule.when, rule.action);
    let fails = matches!(action, Action::Fail { .. });
    if when.ops & CALLS != 0 || fails {
        let elsewhere = when.port.is_some() || when.qp.is_some() || when.side == Side::Remote;
        if when.ops & !CALLS != 0 || !fails || elsewhere {
            let remedy = "write op=reg-mr [device=] [bytes=] [nth=] -> fail=ENOMEM (or create-qp, create-cq, alloc-pd), and \
                          requests in rules of their own";
            return wrong("a call and something else in one rule", remedy);
        }
        return Ok(());
    }
    let knows = match action {
        Action::Shuffle { .. } => WRITES,
        Action::Corrupt { .. } => PAYLOADS,
        _ => REQUESTS,
    };
    if named && when.ops & !knows != 0 {
        let names = |bits: u16| {
            let names = OPS.iter().enumerate().filter(|(i, _)| bits & 1 << i != 0);
            names.map(|(_, name)| *name).collect::<Vec<_>>().join(",")
        };
        let what = format!("the action does not fit op={}", names(when.ops & !knows));
        return wrong(what, format!("it knows op={}", names(knows)));
    }
    when.ops &= knows;
    if matches!(action, Action::Behind { .. }) && when.side == Side::Remote {
        return wrong("behind with side=remote", "put the rule into the plan of the sender");
    }
    Ok(())
}

fn time_text(ns: u64) -> String {
    let (unit, one) =
        UNITS.iter().rev().find(|(_, one)| ns.is_multiple_of(*one)).unwrap_or(&UNITS[0]);
    format!("{}{unit}", ns / one)
}

/// A rule as it would be written.
pub fn show(rule: &Rule, devices: &[String]) -> String {
    let mut words: Vec<String> = Vec::new();
    let w = &rule.when;
    if let Some(device) = w.device {
        let name = devices.get(usize::from(device)).map_or("?", String::as_str);
        words.push(format!("device={name}"));
    }
    words.extend(w.port.map(|p| format!("port={p}")));
    match w.qp {
        None => {}
        Some(QpMatch::Number(n)) => words.push(format!("qp={n:#x}")),
        Some(QpMatch::Ordinal(n)) => words.push(format!("qp=#{n}")),
    }
    if w.ops != REQUESTS {
        let names = OPS.iter().enumerate().filter(|(i, _)| w.ops & 1 << i != 0).map(|(_, n)| *n);
        words.push(format!("op={}", names.collect::<Vec<_>>().join(",")));
    }
    if w.side == Side::Remote {
        words.push("side=remote".into());
    }
    match w.bytes {
        (0, u64::MAX) => {}
        (least, u64::MAX) => words.push(format!("bytes={least}..")),
        (least, most) if least == most => words.push(format!("bytes={least}")),
        (least, most) => words.push(format!("bytes={least}..{most}")),
    }
    match (w.skip, w.every, w.times) {
        (0, 1, u64::MAX) => {}
        (skip, 1, 1) => words.push(format!("nth={}", skip.saturating_add(1))),
        (skip, every, times) => {
            words.extend((skip > 0).then(|| format!("skip={skip}")));
            words.extend((every > 1).then(|| format!("every={every}")));
            words.extend((times < u64::MAX).then(|| format!("times={times}")));
        }
    }
    words.extend((w.quiet_ns > 0).then(|| format!("after={}", time_text(w.quiet_ns))));
    words.extend((w.p < 1.0).then(|| format!("p={}", w.p)));
    words.push("->".into());
    let mut text = match rule.action {
        Action::Status { status, vendor } => {
            let name = STATUSES.get(usize::from(status)).copied().unwrap_or("?");
            let vendor = vendor.map_or(String::new(), |v| format!(" vendor={v:#x}"));
            format!("status={name}{vendor}")
        }
        Action::Drop => "drop".into(),
        Action::Delay { ns } => format!("delay={}", time_text(ns)),
        Action::Behind { count, ns } => format!("behind={count} for={}", time_text(ns)),
        Action::Shuffle { piece: 0 } => "shuffle".into(),
        Action::Shuffle { piece } => format!("shuffle={piece}"),
        Action::Corrupt { bytes } => format!("corrupt={bytes}"),
        Action::KillQp => "kill-qp".into(),
        Action::CqOverrun => "cq-overrun".into(),
        Action::PortDown { ns: None } => "port-down".into(),
        Action::PortDown { ns: Some(ns) } => format!("port-down for={}", time_text(ns)),
        Action::Gid { index, gid } => format!("gid={index}/{}", std::net::Ipv6Addr::from(gid)),
        Action::DeviceFatal => "device-fatal".into(),
        Action::Fail { errno } => match ERRNOS.iter().find(|(_, e)| *e == i32::from(errno)) {
            Some((name, _)) => format!("fail={name}"),
            None => format!("fail={errno}"),
        },
    };
    if rule.stage != Stage::Start {
        // Writing into a string cannot fail.
        let _ = write!(text, " at={}", STAGES[rule.stage as usize]);
    }
    words.push(text);
    words.join(" ")
}
