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

/// The name of a home folder is somebody's name.
#[test]
fn nothing_in_a_bundle_names_the_home_folder() {
    let host = Host::healthy();
    let mut environ = "HOME=/u/alice/\0".to_owned();
    for (name, value) in [
        ("LD_LIBRARY_PATH", "/u/alice/lib:/opt/lib:/u/alice"),
        ("PINRAIL_REPORT_DIR", "/u/alice/reports"),
        ("NCCL_CONF_FILE", "/u/alice/nccl.conf"),
        ("NCCL_IBVERBS_LIB", "/u/alice/lib/libibverbs.so.1"),
        // A name that only begins alike is another one.
        ("NCCL_TOPO_FILE", "/u/alice2/topo.xml"),
    ] {
        environ += &format!("{name}={value}\0");
    }
    host.write("proc/self/environ", environ.as_bytes());
    host.files(&[
        ("u/alice/nccl.conf", "NCCL_IB_SL=3\nNCCL_TOPO_DUMP_FILE=/u/alice/dump\n"),
        ("u/alice/lib/libibverbs.so.1", ""),
    ]);
    host.library(
        r#"{ "asked": "/u/alice/lib/libibverbs.so.1", "file": "/u/alice/lib/libibverbs.so.1",
             "devices": [{ "name": "mlx5_0" }, { "name": "mlx5_1" }], "copies_for_children": true }"#,
    );
    let (archive, direct, again) = replayed(&host);
    let bytes = std::fs::read(&archive).unwrap();
    for (at, part) in bytes.windows(5).enumerate() {
        let next = bytes.get(at + 5);
        assert!(part != b"alice" || next == Some(&b'2'), "the home folder is named");
    }
    let renamed: Vec<Vec<String>> = verdicts(&direct)
        .into_iter()
        .map(|all| all.into_iter().map(|what| what.replace("/u/alice/", "/home/")).collect())
        .collect();
    assert_eq!(verdicts(&again), renamed);
    assert_eq!(direct.code, 0, "{:?}", direct.findings("problem"));
}

/// What could not be read on the host is as unreadable elsewhere, and says the same.
#[test]
fn what_could_not_be_read_is_not_merely_absent_in_a_bundle() {
    let host = Host::healthy();
    // A folder cannot be read as a file by anybody.
    std::fs::create_dir_all(host.root().join("root/.nccl.conf")).unwrap();
    host.files(&[("etc/nccl.conf", "NCCL_IB_SL=3\nnonsense hunter2\n\nexport NCCL_IB_TC=1\n")]);
    let (archive, direct, again) = replayed(&host);
    assert!(!String::from_utf8_lossy(&std::fs::read(archive).unwrap()).contains("hunter2"));
    let problems: Vec<String> =
        direct.findings("problem").into_iter().map(|[_, what, ..]| what).collect();
    assert_eq!(
        problems,
        [
            "cannot read /root/.nccl.conf: it is no plain file; its settings have no effect",
            "/etc/nccl.conf: line 2, 4 has no effect: a line is NAME=value without blanks around the name, or begins with #",
        ]
    );
    let renamed: Vec<String> =
        problems.iter().map(|what| what.replace("/root/", "/home/")).collect();
    let replayed: Vec<String> =
        again.findings("problem").into_iter().map(|[_, what, ..]| what).collect();
    assert_eq!(replayed, renamed);
}

/// A bundle of a host, its verdicts, and those of the bundle.
fn replayed(host: &Host) -> (std::path::PathBuf, Report, Report) {
    let archive = host.root().join("report.tar");
    let direct =
        Report::of(&host.run(&["doctor", "--json", "--bundle", archive.to_str().unwrap()]));
    let unpacked = Host::empty();
    let status =
        Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(unpacked.root()).status();
    assert!(status.unwrap().success());
    let again = unpacked.report();
    (archive, direct, again)
}

fn verdicts(report: &Report) -> Vec<Vec<String>> {
    ["problem", "unknown", "advice", "fine"]
        .map(|level| {
            let all = report.findings(level).into_iter();
            all.map(|[check, what, ..]| format!("{check}: {what}")).collect()
        })
        .into()
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
