//! Hosts with one fault each: the doctor names that fault, with its figures and its remedy, and no other.

mod machine;
mod ports;
mod software;

use crate::host::{FIRST, Host, SECOND};

/// A host where one thing is wrong.
struct Fault {
    name: &'static str,
    make: fn(&Host),
    check: &'static str,
    what: &'static str,
    /// All of these are in the evidence.
    evidence: &'static [&'static str],
    remedy: &'static str,
}

#[test]
fn each_fault_is_named_alone_with_figures_and_remedy() {
    let mut wrong = Vec::new();
    let all = || [ports::FAULTS, software::FAULTS, machine::FAULTS].into_iter().flatten();
    for fault in all() {
        let host = Host::healthy();
        (fault.make)(&host);
        let report = host.report();
        let problems = report.findings("problem");
        let [[check, what, evidence, remedy]] = problems.as_slice() else {
            wrong.push(format!("{}: not one problem: {problems:#?}", fault.name));
            continue;
        };
        let told = report.code == 1
            && check == fault.check
            && what.contains(fault.what)
            && fault.evidence.iter().all(|part| evidence.contains(part))
            && remedy.contains(fault.remedy);
        if !told {
            wrong.push(format!("{}: {}: {problems:#?}", fault.name, report.code));
        }
    }
    assert!(wrong.is_empty(), "{} of {}: {}", wrong.len(), all().count(), wrong.join("\n"));
}

/// What is no fault and deserves a line: the exit status stays 0.
const NOTES: &[Fault] = &[
    Fault {
        name: "a second port without a cable, selected by a prefix",
        make: |host| {
            host.environment(&[("NCCL_IB_HCA", "mlx5")]);
            host.port(SECOND, &[("state", "1: DOWN\n"), ("phys_state", "3: Disabled\n")]);
        },
        check: "port",
        what: "mlx5_1:1 is not active",
        evidence: &["state DOWN"],
        remedy: "nothing",
    },
    Fault {
        name: "the usual MTU everywhere",
        make: |host| {
            host.files(&[
                ("sys/class/net/eth0/mtu", "1500\n"),
                ("sys/class/net/eth1/mtu", "9000\n"),
            ]);
            host.environment(&[("NCCL_IB_HCA", "=mlx5_0")]);
        },
        check: "mtu",
        what: "mlx5_0:1 sends packets of at most 1024 bytes",
        evidence: &["eth0 mtu 1500"],
        remedy: "eth0",
    },
    Fault {
        name: "a class with unusual ECN bits",
        make: |host| host.environment(&[("NCCL_IB_TC", "41")]),
        check: "class",
        what: "NCCL_IB_TC=41 sets the ECN bits",
        evidence: &["DSCP 10, ECN bits 1"],
        remedy: "42 for this DSCP",
    },
    Fault {
        name: "a limited member",
        make: |host| host.port(FIRST, &[("pkeys/0", "0x7fff\n")]),
        check: "pkey",
        what: "mlx5_0:1 is a limited member",
        evidence: &["index 0: 0x7fff"],
        remedy: "full membership",
    },
    Fault {
        name: "configuration space that only root sees",
        make: |host| {
            let config = format!("{}/config", Host::bridge());
            host.write(&config, &[0; 64]);
        },
        check: "acs",
        what: "is hidden",
        evidence: &["1 of 1 bridges"],
        remedy: "as root",
    },
    Fault {
        name: "a driver that moves what it pins",
        make: |host| host.files(&[("proc/cmdline", "cma=64M\n")]),
        check: "placement",
        what: "this driver moves it",
        evidence: &["cma=64M", "pins declared long-term: yes"],
        remedy: "unless registrations fail",
    },
];

#[test]
fn what_may_be_meant_is_a_note_and_no_problem() {
    for note in NOTES {
        let host = Host::healthy();
        (note.make)(&host);
        let report = host.report();
        assert_eq!(report.code, 0, "{}: {:#?}", note.name, report.findings("problem"));
        let advice = report.findings("advice");
        let [[check, what, evidence, remedy]] = advice.as_slice() else {
            panic!("{}: not one note: {advice:#?}", note.name);
        };
        assert_eq!(check, note.check, "{}", note.name);
        assert!(what.contains(note.what), "{}: {what}", note.name);
        assert!(
            note.evidence.iter().all(|part| evidence.contains(part)),
            "{}: {evidence}",
            note.name
        );
        assert!(remedy.contains(note.remedy), "{}: {remedy}", note.name);
    }
}

/// A limit that does not apply, and privileges that only look like it.
#[test]
fn a_privilege_counts_in_the_first_user_namespace_only() {
    let host = Host::healthy();
    host.limits("self", "8388608", "1048576");
    host.files(&[("proc/self/status", "PPid:\t77\nCapEff:\t000001ffffffffff\n")]);
    assert_eq!(host.report().code, 0);
    host.link("proc/self/ns/user", "user:[4026533000]");
    let problems = host.report().findings("problem");
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!(problems[0][0], "memlock");
}
