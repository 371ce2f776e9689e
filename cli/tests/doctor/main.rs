//! `pinrail doctor` and `pinrail settings` on made-up hosts.

mod bundle;
mod captured;
mod faults;
mod host;
mod settings;

use host::{Host, PINRAIL, Report};
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn a_host_where_all_is_well_has_no_problem_and_no_note() {
    let report = Host::healthy().report();
    assert_eq!(report.findings("problem"), [] as [[String; 4]; 0]);
    assert_eq!(report.findings("advice"), [] as [[String; 4]; 0]);
    assert_eq!((report.code, report.document["verdict"].as_str()), (0, Some("fine")));
    let checks: Vec<_> = report.findings("fine").into_iter().map(|[check, ..]| check).collect();
    for check in [
        "library",
        "provider",
        "nodes",
        "settings",
        "port",
        "mtu",
        "filter",
        "gid",
        "pkey",
        "class",
        "memlock",
        "nofile",
        "cgroup",
        "placement",
        "fork",
        "gpu",
        "acs",
        "iommu",
        "ordering",
        "pcie",
    ] {
        assert!(checks.iter().any(|known| known == check), "{check} is not among {checks:?}");
    }
    let port = &report.document["ports"][0];
    assert_eq!(port["port"], "mlx5_0:1");
    assert_eq!(port["mbps"], 400_000);
    assert_eq!(port["mtu"], 4096);
    assert_eq!(port["gid"]["index"], 3);
    assert_eq!(port["used"], true);
    assert_eq!(port["pci"], "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0");
}

#[test]
fn text_is_for_people_and_has_no_colour_in_a_pipe() {
    let host = Host::healthy();
    host.limits("self", "8388608", "1048576");
    // What a file holds must not reach a terminal as it is.
    host.port(host::FIRST, &[("rate", "400 Gb/sec \x1b[31m(4X NDR)\n")]);
    let output = host.run(&["doctor"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(!text.contains('\x1b'), "{text}");
    for part in [
        "mlx5_0:1: RoCE, ACTIVE, link LinkUp, 400 Gb/sec \\u{1b}[31m(4X NDR), MTU 4096, GID 3 10.0.0.1 v2 eth0",
        "PROBLEM  memlock: no more than 8 MiB can be registered",
        "evidence: soft 8 MiB, hard 8 MiB",
        "remedy:   ",
        "problems: problems 1, unknown 0, notes 0",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(text.find("PROBLEM").unwrap() < text.find("ok ").unwrap(), "{text}");
}

#[test]
fn what_cannot_be_told_is_no_verdict() {
    let nothing = Host::empty();
    let report = nothing.report();
    assert_eq!((report.code, report.document["verdict"].as_str()), (2, Some("unknown")));
    let error = report.document["error"].as_str().unwrap();
    assert!(error.contains("no folder proc/self") && error.contains("--bundle"), "{error}");

    let blind = Host::healthy();
    blind.remove("proc/self/limits");
    let report = blind.report();
    assert_eq!(report.code, 2);
    let unknown = report.findings("unknown");
    assert_eq!(unknown.len(), 1, "{unknown:?}");
    assert!(unknown[0][2].contains("proc/self/limits cannot be read"), "{unknown:?}");

    let damaged = Host::healthy();
    damaged.library("{");
    let report = damaged.report();
    assert_eq!(report.code, 2);
    assert!(report.document["error"].as_str().unwrap().contains("pinrail/verbs.json is damaged"));
}

/// Verdicts about the host itself that are the same on every machine.
#[test]
fn what_is_not_there_is_named_on_the_host_itself() {
    let output = Command::new(PINRAIL)
        .args(["doctor", "--json"])
        .env("NCCL_IBVERBS_LIB", "/no/such/libibverbs.so.1")
        .env("NCCL_SOCKET_IFNAME", "=no-such-if0")
        .output()
        .unwrap();
    let report = Report::of(&output);
    assert_eq!(report.code, 1);
    let problems = report.findings("problem");
    let library = problems.iter().find(|[check, ..]| check == "library").expect("a verdict");
    assert!(library[1].contains("/no/such/libibverbs.so.1 cannot be used"), "{library:?}");
    assert!(library[3].contains("NCCL_IBVERBS_LIB"), "{library:?}");
    let socket = problems.iter().find(|[check, ..]| check == "socket").expect("a verdict");
    assert!(socket[1].contains("there is no interface no-such-if0"), "{socket:?}");
    assert_eq!(report.document["captured"], false);
}

/// A library that has devices of its own, such as softrnic, on a host whose kernel has none.
#[test]
fn devices_of_the_library_alone_count() {
    let host = Host::healthy();
    host.remove("sys/class/infiniband");
    host.environment(&[
        ("NCCL_IBVERBS_LIB", "/opt/softrnic/libibverbs.so.1"),
        ("NCCL_IB_HCA", "mlx5"),
    ]);
    let library = |offered: &str| {
        let device = r#"[{ "name": "softrnic0", "error": null }]"#;
        host.library(&format!(
            r#"{{ "asked": "/opt/softrnic/libibverbs.so.1", "devices": {device}, "offered": {offered} }}"#
        ));
        host.report()
    };
    assert_eq!(library(r#"[{ "port": "softrnic0:1", "mbps": 100000 }]"#).code, 0);
    let report = library("[]");
    assert_eq!(report.code, 1);
    let problems = report.findings("problem");
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0][1].contains("lists softrnic0, and pinrail offers none"), "{problems:?}");
    assert!(problems[0][2].contains("NCCL_IB_HCA=mlx5"), "{problems:?}");
    // Where the plugin said why, that is the reason, and no setting is guessed at.
    let report = library(
        r#"[], "left_out": ["softrnic0:1 is left out: NCCL_IB_GID_INDEX 9 is an empty slot"]"#,
    );
    let problems = report.findings("problem");
    assert!(problems[0][2].contains("NCCL_IB_GID_INDEX 9 is an empty slot"), "{problems:?}");
    assert!(!problems[0].iter().any(|text| text.contains("NCCL_IB_HCA")), "{problems:?}");
}

/// A tree may come from anybody.
#[test]
fn whatever_the_files_hold_there_is_a_verdict() {
    fn files(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let kind = path.symlink_metadata().unwrap().file_type();
            if kind.is_dir() {
                files(&path, found);
            } else if kind.is_file() {
                found.push(path);
            }
        }
    }
    let kinds: [&[u8]; 5] = [
        b"",
        &[0xff; 5000],
        "é: 99999999999999999999 kB é.é Gb/sec -1\0=\0".as_bytes(),
        b"4: \n0: \nNCCL_IB_HCA=^=,:,\nmlx5_0 hca_object=\n:::\n-1 -1\n",
        &[1; 300],
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        let host = Host::healthy();
        let mut all = Vec::new();
        files(host.root(), &mut all);
        assert!(all.len() > 60, "{}", all.len());
        for path in all {
            std::fs::write(path, kind).unwrap();
        }
        // Reading the report asserts that status and document agree.
        assert!((1..=2).contains(&host.report().code), "{number}");
        let archive = host.root().join("bundle.tar");
        let output = host.run(&["doctor", "--bundle", archive.to_str().unwrap()]);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{number}: {output:?}");
        assert!(matches!(host.run(&["settings"]).status.code(), Some(0 | 1)), "{number}");
    }
}
