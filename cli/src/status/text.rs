//! The findings as text for a person.

use super::finding::{Finding, counted, seconds, waits};
use super::port::Counters;
use super::process::{Process, Shown};
use crate::output::{Colour, Style};
use nccl_net_pinrail::host::amount;
use nccl_net_pinrail::memory::diagnosis::Direction;
use nccl_net_pinrail::memory::status::reader::{Latency, Rail};
use nccl_net_pinrail::memory::status::{End, Status, Wait};
use std::collections::BTreeMap;

/// Everything. `before`: what an earlier look saw; rates are computed from it.
pub fn report(
    findings: &[Finding<'_>],
    ports: &BTreeMap<String, Counters>,
    before: &[Process],
    colour: Colour,
) -> String {
    let mut lines = Lines { text: String::new(), colour };
    for finding in findings {
        let before = before.iter().find(|process| process.pid == finding.process.pid);
        lines.process(finding, before);
    }
    for (port, counters) in ports {
        let some: Vec<_> = counters
            .iter()
            .filter(|(_, count)| **count > 0)
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        if !some.is_empty() {
            let line = format!("port {port}, all its users since the start: {}", some.join(", "));
            lines.say(0, &line);
        }
    }
    lines.text
}

/// Lines of a report.
struct Lines {
    text: String,
    colour: Colour,
}

impl Lines {
    fn say(&mut self, indent: usize, line: &str) {
        self.text.push_str(&" ".repeat(indent));
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn paint(&self, style: Style, text: &str) -> String {
        self.colour.paint(style, text)
    }

    fn process(&mut self, finding: &Finding<'_>, before: Option<&Process>) {
        let process = finding.process;
        let title =
            self.paint(Style::Strong, &format!("process {} ({})", process.pid, process.name));
        match &process.shown {
            Shown::Nothing => self.say(
                0,
                &format!("{title}: pinrail is loaded and shows no connection: there is none, or PINRAIL_STATUS=0"),
            ),
            Shown::Unreadable(_) => self.say(0, &format!("{title}: pinrail is loaded, but its status cannot be read")),
            Shown::Status(status) => {
                self.say(0, &format!("{title} on {}: {}", status.host, summary(status)));
                let since = before.and_then(|before| Some((before.status()?, process.at - before.at)));
                for end in &status.ends {
                    let rate = since.and_then(|(before, time)| rate(before, end, time.as_secs_f64()));
                    self.end(status, end, rate);
                }
            }
        }
        for (end, problem) in &finding.problems {
            let line = self.paint(Style::Bad, &format!("end {end}: {problem}"));
            self.say(0, &line);
        }
        for doubt in &finding.doubts {
            let line = self.paint(Style::Doubtful, doubt);
            self.say(0, &line);
        }
        if finding.problems.is_empty() && finding.doubts.is_empty() {
            let line = self.paint(Style::Good, "nothing is wrong");
            self.say(0, &line);
        }
    }

    fn end(&mut self, status: &Status, end: &End, rate: Option<(f64, f64)>) {
        let whom = match end.direction {
            Direction::Send => "sends to",
            Direction::Receive => "receives from",
        };
        let comm = end.comm.map_or_else(String::new, |id| format!(", communicator {id:#x}"));
        self.say(
            2,
            &format!(
                "end {} {whom} {} pid {} ({}) {}{comm}",
                end.number, end.peer_host, end.peer_pid, end.peer_addr, end.peer_device
            ),
        );
        let style = if end.is_over() && !end.is_closed() { Style::Bad } else { Style::Good };
        let state = self.paint(style, end.state.name());
        self.say(
            4,
            &format!(
                "{state} for {}; {}",
                seconds(status.now.saturating_sub(end.ready)),
                wait(status, end)
            ),
        );
        let rate = rate.map_or_else(String::new, |(messages, bytes)| {
            format!("; now {messages:.0} messages/s, {}/s", amount(bytes as u64))
        });
        let again =
            if end.again > 0 { format!(", {} sent again", end.again) } else { String::new() };
        let cut = if end.shortened > 0 {
            format!(", {} shortened", end.shortened)
        } else {
            String::new()
        };
        self.say(
            4,
            &format!(
                "{} messages, {}, {} work requests{again}{cut}{rate}",
                end.messages,
                amount(end.bytes),
                end.posts()
            ),
        );
        for rail in &end.rails {
            self.say(4, &of_rail(rail));
        }
        let taken: Vec<_> = end
            .latencies
            .iter()
            .filter(|l| l.count() > 0)
            .map(|l| of_latency(status, end, l))
            .collect();
        if !taken.is_empty() {
            self.say(4, &format!("latency p50/p99/max: {}", taken.join("; ")));
        }
        if end.flushes + end.driver_flushes + end.skipped_flushes > 0 {
            self.say(
                4,
                &format!(
                    "flushes: {} by reads, {} by the CUDA driver, {} had nothing to wait for",
                    end.flushes, end.driver_flushes, end.skipped_flushes
                ),
            );
        }
        self.say(4, &memory(end));
    }
}

fn summary(status: &Status) -> String {
    let sending = status.ends.iter().filter(|end| end.direction == Direction::Send).count();
    let aside = if status.aside > 0 {
        format!("; {} set aside for copies", amount(status.aside))
    } else {
        String::new()
    };
    format!(
        "pinrail {}, {sending} sending and {} receiving ends; {} were opened, {} failed{aside}",
        status.plugin,
        status.ends.len() - sending,
        status.opened,
        status.failed
    )
}

fn wait(status: &Status, end: &End) -> String {
    let what = waits(end);
    match (end.wait, status.waited(end)) {
        (Wait::Nothing, _) => what,
        (_, Some(nanos)) => format!("{what}; nothing moved for {}", seconds(nanos)),
        (_, None) => format!("{what}; for less than {}", seconds(status.every)),
    }
}

/// Messages and bytes per second since an earlier look.
fn rate(before: &Status, end: &End, time: f64) -> Option<(f64, f64)> {
    let earlier = before.ends.iter().find(|earlier| earlier.number == end.number)?;
    let per_second = |now: u64, then: u64| now.saturating_sub(then) as f64 / time.max(1e-3);
    Some((per_second(end.messages, earlier.messages), per_second(end.bytes, earlier.bytes)))
}

fn of_rail(rail: &Rail) -> String {
    let lost =
        if rail.stopped > 0 { format!(", {} given up", rail.stopped) } else { String::new() };
    let bytes = rail.bytes.map_or_else(|| "bytes known to the sender".into(), amount);
    format!(
        "rail {} {} Mb/s: {}{lost}, {bytes}, {}",
        rail.name,
        rail.speed,
        counted(rail.lanes as u64, "queue pair", "queue pairs"),
        counted(rail.posts, "work request", "work requests")
    )
}

fn of_latency(status: &Status, end: &End, latency: &Latency) -> String {
    use nccl_net_pinrail::memory::status::Stage;
    let name = match (latency.stage, end.direction) {
        (Stage::Credit, _) => "asked to post",
        (Stage::Transfer, Direction::Send) => "post to completion",
        (Stage::Transfer, Direction::Receive) => "credit to data",
        (Stage::Test, _) => "completion to test",
    };
    let time = |ticks: Option<u64>| match ticks.and_then(|ticks| status.nanos(ticks)) {
        Some(nanos) => short(nanos),
        None => "not known yet".into(),
    };
    format!(
        "{name} {}/{}/{} ({} samples)",
        time(latency.quantile(500)),
        time(latency.quantile(990)),
        time(Some(latency.most)),
        latency.count()
    )
}

/// A short time for people.
fn short(nanos: f64) -> String {
    if nanos < 1e3 {
        format!("{nanos:.0} ns")
    } else if nanos < 1e6 {
        format!("{:.1} us", nanos / 1e3)
    } else {
        format!("{:.1} ms", nanos / 1e6)
    }
}

fn memory(end: &End) -> String {
    let mut text = format!(
        "memory: {} of {}",
        counted(end.registered, "handle", "handles"),
        amount(end.registered_bytes)
    );
    if end.bounced > 0 || end.copied_bytes > 0 {
        text += &format!(
            "; {} of {} reached through copies, {} copied, {} chunks in use",
            end.bounced,
            amount(end.bounced_bytes),
            amount(end.copied_bytes),
            end.chunks
        );
    }
    text
}
