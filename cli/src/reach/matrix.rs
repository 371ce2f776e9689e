//! Who is tried with whom, and what follows from all of it.

use super::ask::Outcome;
use super::protocol::Host;
use super::{Cell, End};
use crate::doctor::finding::Finding;

/// Hosts as they were named, with what they say.
pub type Hosts = [(String, Result<Host, String>)];

/// Pairs of hosts in rounds: in each round a host occurs once, and after all of them everybody met everybody.
pub fn rounds(hosts: &[usize]) -> Vec<Vec<(usize, usize)>> {
    // One stays, the others go round the table; an odd one out meets nobody.
    let mut table: Vec<Option<usize>> = hosts.iter().copied().map(Some).collect();
    if table.len() % 2 == 1 {
        table.push(None);
    }
    let count = table.len();
    let mut rounds = Vec::new();
    for _ in 1..count {
        let pair = |at: usize| Some((table[at]?, table[count - 1 - at]?));
        rounds.push((0..count / 2).filter_map(pair).collect());
        table[1..].rotate_right(1);
    }
    rounds
}

/// Transfers between two hosts with so many rails, both ways. `same`: between rails of equal number only.
pub fn rails(pair: (usize, usize), counts: (usize, usize), same: bool) -> Vec<(End, End)> {
    let mut ends = Vec::new();
    for one in 0..counts.0 {
        for other in (0..counts.1).filter(|other| !same || *other == one) {
            ends.push(((pair.0, one), (pair.1, other)));
            ends.push(((pair.1, other), (pair.0, one)));
        }
    }
    ends
}

/// A rail in words: host, device and port, address.
pub fn name(hosts: &Hosts, end: End) -> String {
    let (asked, host) = &hosts[end.0];
    match host.as_ref().ok().and_then(|host| host.rails.get(end.1)) {
        Some(rail) => format!("{asked} {} (GID {})", rail.label, rail.address),
        None => format!("{asked} rail {}", end.1),
    }
}

/// Verdicts: hosts first, then rails that nobody reaches, then single pairs.
pub fn judge(hosts: &Hosts, cells: &[Cell]) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        hosts.iter().filter_map(|(asked, host)| of_host(asked, host)).collect();
    findings.extend(versions(hosts));
    let failed = |cell: &&Cell| matches!(cell.outcome, Outcome::Failed { .. });
    let reached = |cell: &&Cell| matches!(cell.outcome, Outcome::Reached { .. });
    // A rail that fails with everybody is one trouble and not many.
    let mut ends: Vec<End> = cells.iter().flat_map(|cell| [cell.from, cell.to]).collect();
    ends.sort_unstable();
    ends.dedup();
    let touches = |cell: &&Cell, end: End| cell.from == end || cell.to == end;
    let lonely: Vec<End> = ends
        .into_iter()
        .filter(|end| {
            let own: Vec<_> = cells.iter().filter(|cell| touches(cell, *end)).collect();
            let tried = own.iter().filter(|cell| failed(cell)).count();
            tried > 1 && !own.iter().any(reached)
        })
        .collect();
    // Where all fail, nobody in particular is to blame.
    let blamed = |end: &End| {
        let others = cells.iter().filter(|cell| !touches(cell, *end));
        others.clone().any(|cell| reached(&cell))
    };
    let lonely: Vec<End> = lonely.into_iter().filter(blamed).collect();
    for end in &lonely {
        let own: Vec<_> = cells.iter().filter(|cell| touches(cell, *end)).filter(failed).collect();
        let evidence = own.first().map_or_else(String::new, |cell| words(&cell.outcome));
        findings.push(Finding::problem(
            "rail",
            format!("{} reaches nobody, and nobody reaches it", name(hosts, *end)),
            format!("{} transfers failed; the first: {evidence}", own.len()),
            "pinrail doctor on that host says what is wrong with the port; cable, switch port, VLAN and subnet are next",
        ));
    }
    for cell in cells.iter().filter(failed) {
        if lonely.iter().any(|end| touches(&cell, *end)) {
            continue;
        }
        findings.push(Finding::problem(
            "pair",
            format!("{} does not reach {}", name(hosts, cell.from), name(hosts, cell.to)),
            words(&cell.outcome),
            "see docs/failures.md for the words; rails that are not meant to meet: --same-rail",
        ));
    }
    let untried: Vec<_> =
        cells.iter().filter(|cell| matches!(cell.outcome, Outcome::Untried(_))).collect();
    if let Some(first) = untried.first() {
        findings.push(Finding::unknown(
            "pair",
            format!("{} transfers were not tried", untried.len()),
            format!(
                "the first, {} to {}: {}",
                name(hosts, first.from),
                name(hosts, first.to),
                words(&first.outcome)
            ),
            "run again once that is mended",
        ));
    }
    let good = cells.iter().filter(reached).count();
    if good > 0 {
        let all = cells.len();
        let what = format!("{good} of {all} transfers went through with every byte");
        findings.push(Finding::fine("pair", what, String::new()));
    }
    findings
}

/// What both ends say.
pub fn words(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Reached { micros } => format!("{micros} us"),
        Outcome::Untried(why) => why.clone(),
        Outcome::Failed { sender, receiver } => {
            let said = [("the sender says", sender), ("the receiver says", receiver)];
            let said: Vec<_> = said
                .into_iter()
                .filter_map(|(who, text)| Some(format!("{who}: {}", text.as_ref()?)))
                .collect();
            said.join("; ")
        }
    }
}

fn of_host(asked: &str, host: &Result<Host, String>) -> Option<Finding> {
    match host {
        Err(why) => Some(Finding::unknown(
            "host",
            format!("{asked} does not answer, and its rails were not tried"),
            why.clone(),
            "start pinrail reach --serve there, with the job's launcher or by hand; a firewall must let its port through",
        )),
        Ok(host) if host.rails.is_empty() => Some(Finding::problem(
            "host",
            format!("{asked} has no rails"),
            host.error.clone().unwrap_or_else(|| host.left_out.join("; ")),
            "pinrail doctor on that host says why",
        )),
        Ok(host) if !host.left_out.is_empty() => Some(Finding::advice(
            "host",
            format!("{asked} leaves out ports"),
            host.left_out.join("; "),
            "pinrail doctor on that host says more, if they should be used",
        )),
        Ok(_) => None,
    }
}

fn versions(hosts: &Hosts) -> Option<Finding> {
    let known: Vec<_> =
        hosts.iter().filter_map(|(asked, host)| Some((asked, host.as_ref().ok()?))).collect();
    let first = known.first()?.1;
    known.iter().any(|(_, host)| host.version != first.version).then(|| {
        let list: Vec<_> =
            known.iter().map(|(asked, host)| format!("{asked} {}", host.version)).collect();
        Finding::advice(
            "version",
            "hosts have different versions of pinrail, which understand each other",
            list.join(", "),
            "install one version on every host",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Rail;
    use super::*;
    use crate::doctor::finding::{Level, exit_code};
    use std::collections::BTreeSet;

    #[test]
    fn everybody_meets_everybody_once_and_nobody_twice_in_a_round() {
        for count in 0..9 {
            let hosts: Vec<_> = (10..10 + count).collect();
            let rounds = rounds(&hosts);
            let mut met = BTreeSet::new();
            for round in &rounds {
                let mut busy = BTreeSet::new();
                for (one, other) in round {
                    assert!(busy.insert(*one) && busy.insert(*other));
                    assert!(met.insert((one.min(other), one.max(other))));
                }
            }
            assert_eq!(met.len(), count * count.saturating_sub(1) / 2);
            assert!(rounds.len() <= count);
        }
    }

    #[test]
    fn rails_are_tried_both_ways() {
        let all = rails((0, 3), (2, 3), false);
        assert_eq!(all.len(), 12);
        assert!(all.contains(&((0, 1), (3, 2))) && all.contains(&((3, 2), (0, 1))));
        let same = rails((0, 3), (2, 3), true);
        assert_eq!(same.len(), 4);
        assert!(same.iter().all(|(from, to)| from.1 == to.1));
    }

    fn hosts(count: usize) -> Vec<(String, Result<Host, String>)> {
        let rail =
            |label: &str| Rail { label: label.into(), address: "3 10.0.0.1".into(), mbps: 1 };
        let host = || Host { rails: vec![rail("a:1"), rail("b:1")], ..Host::default() };
        (0..count).map(|at| (format!("node{at}"), Ok(host()))).collect()
    }

    fn cells(hosts: usize, fails: impl Fn(End, End) -> bool) -> Vec<Cell> {
        let mut cells = Vec::new();
        for pair in rounds(&(0..hosts).collect::<Vec<_>>()).into_iter().flatten() {
            for (from, to) in rails(pair, (2, 2), false) {
                let text = || Some("the words".to_owned());
                let outcome = if fails(from, to) {
                    Outcome::Failed { sender: text(), receiver: None }
                } else {
                    Outcome::Reached { micros: 1 }
                };
                cells.push(Cell { from, to, outcome });
            }
        }
        cells
    }

    #[test]
    fn a_rail_that_is_down_is_one_problem() {
        let bad = (1, 1);
        let findings = judge(&hosts(3), &cells(3, |from, to| from == bad || to == bad));
        let problems: Vec<_> = findings.iter().filter(|f| f.level == Level::Problem).collect();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].what.starts_with("node1 b:1 (GID 3 10.0.0.1) reaches nobody"));
        assert!(
            problems[0]
                .evidence
                .contains("8 transfers failed; the first: the sender says: the words")
        );
        assert_eq!(exit_code(&findings), 1);
    }

    #[test]
    fn single_pairs_are_told_one_by_one() {
        let findings = judge(&hosts(2), &cells(2, |from, to| (from, to) == ((0, 0), (1, 1))));
        let problems: Vec<_> = findings.iter().filter(|f| f.level == Level::Problem).collect();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].what.contains("node0 a:1 (GID 3 10.0.0.1) does not reach node1 b:1"));
        // Where everything fails no rail is singled out.
        let findings = judge(&hosts(2), &cells(2, |_, _| true));
        assert_eq!(findings.iter().filter(|f| f.check == "pair").count(), 8);
    }

    #[test]
    fn a_host_that_does_not_answer_leaves_it_open() {
        let mut two = hosts(2);
        two.push(("node2".into(), Err("connection refused".into())));
        let findings = judge(&two, &cells(2, |_, _| false));
        assert_eq!(exit_code(&findings), 2);
        let findings = judge(&two, &cells(2, |from, _| from == (0, 0)));
        assert_eq!(exit_code(&findings), 1);
        assert_eq!(exit_code(&judge(&hosts(2), &cells(2, |_, _| false))), 0);
        two[0].1.as_mut().unwrap().rails.clear();
        assert_eq!(exit_code(&judge(&two, &[])), 1);
    }
}
