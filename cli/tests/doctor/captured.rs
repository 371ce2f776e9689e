//! Trees that lack files, hold what cannot be read, or have links and paths that lead out of them.

use crate::host::{Host, PINRAIL, Report};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Plain files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let kind = path.symlink_metadata().unwrap().file_type();
        if kind.is_dir() {
            found.extend(files(&path));
        } else if kind.is_file() {
            found.push(path);
        }
    }
    found
}

/// Check and words of each finding, by level.
fn verdicts(report: &Report) -> Vec<(String, String, String)> {
    let of = |level: &'static str| {
        let all = report.findings(level).into_iter();
        all.map(move |[check, what, ..]| (level.to_owned(), check, what))
    };
    ["problem", "unknown", "advice", "fine"].into_iter().flat_map(of).collect()
}

/// Where a file is missing, or there and not to be read, the check that rests on it is not fine.
#[test]
fn a_check_without_its_files_is_unknown() {
    let gpu = |host: &Host| {
        host.remove("proc/driver/nvidia/version");
        host.remove("sys/bus/pci");
    };
    type Loss = fn(&Host);
    let plain = |check: &'static str, file: &'static str| (check, file);
    for (check, file) in [
        plain("settings", "proc/self/environ"),
        plain("placement", "proc/meminfo"),
        plain("placement", "proc/zoneinfo"),
        plain("placement", "proc/cmdline"),
        plain("cgroup", "proc/self/cgroup"),
        plain("memlock", "proc/self/limits"),
    ] {
        for unreadable in [false, true] {
            let host = Host::healthy();
            host.remove(file);
            if unreadable {
                // Nobody reads a folder, root neither.
                fs::create_dir(host.root().join(file)).unwrap();
            }
            let report = host.report();
            let found = verdicts(&report);
            assert_eq!(report.code, 2, "{file}: {found:?}");
            let levels: Vec<&str> = found
                .iter()
                .filter(|(_, one, _)| one == check)
                .map(|(level, ..)| level.as_str())
                .collect();
            assert!(levels.contains(&"unknown"), "{file}: {levels:?}");
            assert!(!levels.contains(&"fine"), "{file}: {levels:?}");
        }
    }
    let losses: [(&str, Loss); 5] = [
        ("gpu", gpu),
        ("gpu", |host| {
            host.remove("proc/driver/nvidia/version");
            fs::create_dir(host.root().join("proc/driver/nvidia/version")).unwrap();
        }),
        ("gpu", |host| {
            // An old driver of the proprietary kind needs a module, and whether there is one was not captured.
            host.remove("sys/module");
            host.files(&[(
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  x\n",
            )]);
        }),
        ("placement", |host| {
            host.files(&[("proc/cmdline", "cma=64M\n")]);
            host.remove("proc/driver/nvidia/version");
            fs::create_dir(host.root().join("proc/driver/nvidia/version")).unwrap();
        }),
        ("cgroup", |host| {
            host.files(&[("proc/self/cgroup", "0::/job\n")]);
            fs::create_dir_all(host.root().join("sys/fs/cgroup/job/rdma.max")).unwrap();
        }),
    ];
    for (number, (check, lose)) in losses.into_iter().enumerate() {
        let host = Host::healthy();
        lose(&host);
        let report = host.report();
        let found = verdicts(&report);
        assert_eq!(report.code, 2, "{number}: {found:?}");
        let of_check: Vec<_> = found.iter().filter(|(_, one, _)| one == check).collect();
        assert!(of_check.len() == 1 && of_check[0].0 == "unknown", "{number}: {of_check:?}");
    }
    // The command for settings says it too.
    let host = Host::healthy();
    host.remove("proc/self/environ");
    let output = host.run(&["settings", "--json"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("proc/self/environ cannot be read"), "{error}");
}

/// A tree whose files are links to files outside is one whose links lead nowhere, whatever lies outside.
#[test]
fn no_link_leads_out_of_a_tree() {
    let outside = Host::healthy();
    let of = |lead: &dyn Fn(&Path, usize) -> PathBuf| {
        let host = Host::healthy();
        let all = files(host.root());
        assert!(all.len() > 60, "{}", all.len());
        for path in all {
            let below = path.strip_prefix(host.root()).unwrap().to_owned();
            fs::remove_file(&path).unwrap();
            symlink(lead(&below, below.components().count()), &path).unwrap();
        }
        let report = host.report();
        let settings = host.run(&["settings"]).status.code();
        (verdicts(&report), report.code, settings)
    };
    let nowhere = of(&|below, _| Path::new("/no/such/place").join(below));
    let absolute = of(&|below, _| outside.root().join(below));
    assert_eq!(absolute, nowhere, "an absolute link was followed out of the tree");
    let up = of(&|below, _| {
        let above: PathBuf = "../".repeat(40).into();
        above.join(outside.root().strip_prefix("/").unwrap()).join(below)
    });
    assert_eq!(up, nowhere, "`..` led out of the tree");
    assert_eq!(nowhere.1, 1, "no library, no port");
}

/// Absolute links are common in what is captured, and mean files of the same host.
#[test]
fn absolute_links_within_a_tree_are_followed() {
    let host = Host::healthy();
    let straight = verdicts(&host.report());
    for path in files(host.root()) {
        let below = path.strip_prefix(host.root()).unwrap().to_owned();
        if below.starts_with("real") {
            continue;
        }
        let real = Path::new("/real").join(&below);
        let place = host.root().join(real.strip_prefix("/").unwrap());
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::rename(&path, &place).unwrap();
        symlink(real, &path).unwrap();
    }
    assert_eq!(verdicts(&host.report()), straight);
}

#[test]
fn a_relative_configuration_file_is_not_looked_for_here() {
    let folder = Host::empty();
    folder.files(&[("nccl.conf", "NCCL_IB_DISABLE=1\n")]);
    for name in ["nccl.conf", "./nccl.conf", "../nccl.conf"] {
        let host = Host::healthy();
        host.environment(&[("NCCL_CONF_FILE", name)]);
        let output = Command::new(PINRAIL)
            .args(["doctor", "--json", "--root"])
            .arg(host.root())
            .current_dir(folder.root())
            .env_clear()
            .output()
            .unwrap();
        let report = Report::of(&output);
        let problems = report.findings("problem");
        assert_eq!(problems.len(), 1, "{name}: {problems:?}");
        assert!(problems[0][1].contains("a relative path"), "{name}: {problems:?}");
    }
}

/// For whatever commands there are: an answer that cannot be written is no success, and is said.
#[test]
fn an_answer_that_cannot_be_written_is_a_failure() {
    let host = Host::healthy();
    let root = host.root().to_str().unwrap();
    let help = Command::new(PINRAIL).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands: Vec<&str> = commands
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next().filter(|w| !w.is_empty()))
        .collect();
    assert!(commands.len() >= 4, "{help}");
    let own = std::process::id().to_string();
    let mut lines: Vec<Vec<&str>> = vec![
        vec!["--help"],
        vec!["--version"],
        vec!["doctor", "--root", root],
        vec!["doctor", "--root", root, "--json"],
        vec!["settings", "--root", root],
        vec!["settings", "--root", root, "--json"],
        vec!["settings", "--root", "/no/such/tree", "--json"],
        vec!["forks", &own],
        vec!["forks", &own, "--json"],
        vec!["ab", "--no-html", "-n", "1", "--", "true"],
        vec!["ab", "--json", "--no-html", "-n", "1", "--", "true"],
    ];
    lines.extend(commands.iter().map(|command| vec!["help", *command]));
    for arguments in lines {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output =
            Command::new(PINRAIL).args(&arguments).stdout(Stdio::from(full)).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains("cannot be written: No space left"), "{arguments:?}: {error}");
    }
}
