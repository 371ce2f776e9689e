//! The findings as text for a person.

use super::finding::{Finding, Level, exit_code};
use super::json::verdict;
use super::machine::Machine;
use super::port::Port;
use crate::output::{Colour, Style};
use nccl_net_pinrail::host::kernel;

/// Width of the column with the level.
const LEVEL: usize = 8;

/// Everything: ports first, then what is wrong, then the rest.
pub fn report(machine: &Machine, ports: &[Port], findings: &[Finding], colour: Colour) -> String {
    let mut text = String::new();
    let mut say = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    let container = match (machine.container.inside(), machine.container.runtime) {
        (Some(true), Some(runtime)) => format!(", in a container ({runtime})"),
        (Some(true), None) => ", in a container".to_owned(),
        _ => String::new(),
    };
    let release = kernel::release(&machine.proc).unwrap_or_else(|| "of unknown release".into());
    let place = if machine.live {
        "this host".to_owned()
    } else {
        format!("captured tree {}", machine.root.display())
    };
    let title = format!("{place}: kernel {release}, {}{container}", machine.architecture());
    say(&colour.paint(Style::Strong, &clean(&title)));
    for port in ports {
        say(&clean(&line(port)));
    }
    say("");
    text + &findings_text(findings, colour)
}

/// The findings, what is wrong first, and what they add up to.
pub fn findings_text(findings: &[Finding], colour: Colour) -> String {
    let mut text = String::new();
    let mut say = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    for wanted in [Level::Problem, Level::Unknown, Level::Advice, Level::Fine] {
        for finding in findings.iter().filter(|finding| finding.level == wanted) {
            let (word, style) = match wanted {
                Level::Problem => ("PROBLEM", Style::Bad),
                Level::Unknown => ("UNKNOWN", Style::Bad),
                Level::Advice => ("note", Style::Doubtful),
                Level::Fine => ("ok", Style::Good),
            };
            let word = colour.paint(style, &format!("{word:LEVEL$}"));
            say(&format!("{word} {}: {}", finding.check, clean(&finding.what)));
            let indent = " ".repeat(LEVEL + 1);
            if !finding.evidence.is_empty() {
                say(&format!("{indent}evidence: {}", clean(&finding.evidence)));
            }
            if !finding.remedy.is_empty() {
                say(&format!("{indent}remedy:   {}", clean(&finding.remedy)));
            }
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let code = exit_code(findings);
    let style = if code == 0 { Style::Good } else { Style::Bad };
    say("");
    say(&colour.paint(
        style,
        &format!(
            "{}: problems {}, unknown {}, notes {}",
            verdict(code),
            count(Level::Problem),
            count(Level::Unknown),
            count(Level::Advice)
        ),
    ));
    text
}

/// One port on one line.
fn line(port: &Port) -> String {
    let layer = if port.ethernet { "RoCE" } else { "InfiniBand" };
    let gid = match &port.gid {
        Ok(choice) => format!("GID {}", choice.entry),
        Err(_) => "no usable GID".to_owned(),
    };
    let mtu = port.mtu().map_or_else(String::new, |mtu| format!(", MTU {mtu}"));
    let used = if port.is_used() { "used" } else { "not used" };
    let why =
        if port.is_selected() { String::new() } else { format!(" ({})", port.decision.reason) };
    let place = port.pci().map_or_else(String::new, |pci| {
        format!(", PCI {:04x}:{:02x}:{:02x}.{}", pci.domain, pci.bus, pci.device, pci.function)
    });
    format!(
        "  {}: {layer}, {}, {}{mtu}, {gid}{place}: {used}{why}",
        port.label,
        port.state_text(),
        port.rate
    )
}

/// Text of a captured file as it may be shown: a terminal acts on control characters.
pub fn clean(text: &str) -> String {
    text.chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::clean;

    #[test]
    fn control_characters_are_shown_and_not_sent() {
        assert_eq!(clean("a\x1b[31m\n é"), "a\\u{1b}[31m\\n é");
    }
}
