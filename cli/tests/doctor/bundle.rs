//! The archive for a bug report.

use crate::host::{FIRST, Host, Report};
use std::process::Command;

/// A host with a fault, secrets in every place, and a home folder that names somebody.
fn host() -> Host {
    let host = Host::healthy();
    host.environment(&[
        ("NCCL_IB_GID_INDEX", "3"),
        ("HF_TOKEN", "hunter2"),
        ("NCCL_AUTH_TOKEN", "hunter2"),
        ("SSH_AUTH_SOCK", "hunter2"),
        ("RDMAV_HUGEPAGES_SAFE", "1"),
    ]);
    host.files(&[
        ("root/.nccl.conf", "# hunter2\nNCCL_IB_SL=3\nWANDB_API_KEY=hunter2\n"),
        ("proc/cmdline", "kho=on hunter2 rd.luks.key=hunter2 iommu=pt\n"),
        ("etc/shadow", "hunter2\n"),
        ("proc/meminfo", "MemTotal: 131072000 kB\nCmaTotal: 0 kB\nCmaFree: 9751756 kB\n"),
        ("proc/sys/kernel/arch", "aarch64\n"),
    ]);
    host.port(FIRST, &[("gids/3", "0000:0000:0000:0000:0000:0000:0000:0000\n")]);
    host
}

#[test]
fn a_bundle_is_judged_as_the_host_and_holds_no_secret() {
    let host = host();
    let folder = Host::empty();
    let archive = folder.root().join("report.tar");
    let archive = archive.to_str().unwrap();
    let direct = Report::of(&host.run(&["doctor", "--json", "--bundle", archive]));
    assert_eq!(direct.code, 1);

    let bytes = std::fs::read(archive).unwrap();
    let secret = b"hunter2";
    assert!(!bytes.windows(secret.len()).any(|part| part == secret), "a secret is in the bundle");

    let unpacked = Host::empty();
    let status =
        Command::new("tar").args(["-xf", archive, "-C"]).arg(unpacked.root()).status().unwrap();
    assert!(status.success());
    let again = unpacked.report();
    let verdicts = |report: &Report| {
        ["problem", "advice", "fine"].map(|level| {
            let all = report.findings(level).into_iter();
            all.map(|[check, what, ..]| format!("{check}: {what}")).collect::<Vec<_>>()
        })
    };
    assert_eq!(verdicts(&again), verdicts(&direct));
    assert_eq!(again.document["ports"], direct.document["ports"]);
    let checks: Vec<_> = again.findings("problem").into_iter().map(|[check, ..]| check).collect();
    assert_eq!(checks, ["gid", "placement"]);

    // The user's file is read where the bundle put it.
    let settings = unpacked.run(&["settings", "--json"]);
    let text = String::from_utf8(settings.stdout).unwrap();
    assert!(text.contains("/home/.nccl.conf"), "{text}");
}

#[test]
fn a_file_that_exists_is_left_alone() {
    let host = Host::healthy();
    let archive = host.root().join("mine");
    std::fs::write(&archive, "kept").unwrap();
    let output = host.run(&["doctor", "--bundle", archive.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("mine cannot be written") && error.contains("exists"), "{error}");
    assert_eq!(std::fs::read_to_string(&archive).unwrap(), "kept");
}
