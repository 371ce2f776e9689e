//! The release: what `make release` lays out and packs, from what `make` built.

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// A folder below the build's, empty at the beginning of a test.
fn empty(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("release").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } =
        command.output().unwrap_or_else(|e| panic!("{command:?} does not start: {e}"));
    let (out, err) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{out}{err}");
    out.into_owned()
}

fn bench() -> PathBuf {
    let path = common::root().join("target/release/pinrail-bench");
    assert!(path.exists(), "{} is missing: run make bench-build", path.display());
    path
}

/// Lays out and packs into a folder; returns the tarball.
fn pack(out: &Path, time: &str) -> PathBuf {
    let root = common::root();
    run(Command::new(root.join("release/stage")).arg(root.join("dist")).arg(bench()).arg(out));
    run(Command::new(root.join("release/pack")).arg(out).env("SOURCE_DATE_EPOCH", time));
    let name = std::fs::read_to_string(out.join("name")).expect("a name");
    out.join(format!("{}.tar.gz", name.trim()))
}

/// One release for all tests, unpacked.
fn unpacked() -> &'static Path {
    static PLACE: OnceLock<PathBuf> = OnceLock::new();
    PLACE.get_or_init(|| {
        let out = empty("shared");
        let tarball = pack(&out, "1");
        let place = out.join("unpacked");
        std::fs::create_dir(&place).expect("a folder");
        run(Command::new("tar").arg("-xzf").arg(&tarball).arg("-C").arg(&place));
        let name = tarball.file_name().and_then(|name| name.to_str()).expect("a name");
        place.join(name.trim_end_matches(".tar.gz"))
    })
}

/// Every file, link and folder below a folder.
fn everything(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(&next).expect("a folder") {
            let path = entry.expect("an entry").path();
            found.insert(path.strip_prefix(folder).expect("below").to_owned());
            if path.is_dir() && !path.is_symlink() {
                open.push(path);
            }
        }
    }
    found
}

fn make(folder: &Path, target: &str, destination: &Path, prefix: &str) -> Command {
    let mut command = Command::new("make");
    command.arg("-C").arg(folder).arg(target).arg(format!("PREFIX={prefix}"));
    command.arg(format!("DESTDIR={}", destination.display())).env_remove("MAKEFLAGS");
    command
}

#[test]
fn the_same_files_give_the_same_bytes() {
    let tarballs = [pack(&empty("one"), "1700000000"), pack(&empty("two"), "1700000000")];
    let [one, two] = tarballs.each_ref().map(|path| std::fs::read(path).expect("a tarball"));
    assert!(one == two, "two releases of the same files differ");
    let list = run(Command::new("tar").arg("-tvzf").arg(&tarballs[0]).env("TZ", "UTC"));
    for line in list.lines() {
        assert!(line.contains(" 0/0 ") && line.contains("2023-11-14 22:13"), "{line}");
    }
    // The checksum beside it is that of the tarball.
    let folder = tarballs[0].parent().expect("a folder");
    let name = tarballs[0].file_name().and_then(|name| name.to_str()).expect("a name");
    run(Command::new("sha256sum").arg("-c").arg(format!("{name}.sha256")).current_dir(folder));
    // No path of the machine that built it stands in a table for debuggers.
    let plugin = unpacked().join("lib/libnccl-net-pinrail.so");
    let sections = run(Command::new("readelf").arg("-SW").arg(plugin));
    assert!(!sections.contains(".debug_"), "{sections}");
}

#[test]
fn a_release_that_is_unpacked_is_whole_and_runs_where_it_is() {
    let place = unpacked();
    run(make(place, "check", Path::new(""), "/usr/local").current_dir(place));
    for file in [
        "lib/libnccl-net-pinrail.so",
        "lib/pinrail/softrnic/libibverbs.so.1",
        "bin/pinrail",
        "bin/pinrail-bench",
        "bin/softrnic",
        "include/pinrail.h",
        "LICENSE",
        "README.md",
        "share/doc/pinrail/README.md",
        "share/doc/pinrail/docs/doctor.md",
    ] {
        assert!(place.join(file).is_file(), "{file} is missing");
    }
    // A file that was changed is found.
    let folder = empty("damaged");
    run(Command::new("cp").arg("-r").arg(place).arg(&folder));
    let copy = folder.join(place.file_name().expect("a name"));
    std::fs::write(copy.join("include/pinrail.h"), "other").expect("written");
    let output = make(&copy, "check", Path::new(""), "/usr/local").output().expect("make");
    assert!(!output.status.success(), "a changed file passes");

    // The bench finds plugin and software RNIC beside it, and they work.
    let list = run(Command::new(place.join("bin/pinrail-bench"))
        .args(["--list", "--verbs-lib"])
        .arg(place.join("lib/pinrail/softrnic/libibverbs.so.1"))
        .current_dir("/"));
    assert!(list.contains("softrnic0"), "{list}");
}

#[test]
fn manual_pages_have_every_command() {
    let place = unpacked();
    let pages: BTreeSet<String> = std::fs::read_dir(place.join("share/man/man1"))
        .expect("pages")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
        .collect();
    let mut expected = BTreeSet::from(["softrnic.1".to_owned()]);
    for program in ["pinrail", "pinrail-bench"] {
        expected.insert(format!("{program}.1"));
        let help = run(Command::new(place.join("bin").join(program)).arg("--help"));
        let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
        for line in commands.take_while(|line| line.starts_with("  ")) {
            // Continued meanings stand further in.
            let Some(word) = line.strip_prefix("  ").and_then(|l| l.split(' ').next()) else {
                continue;
            };
            if !word.is_empty() && word != "help" {
                expected.insert(format!("{program}-{word}.1"));
            }
        }
    }
    assert!(expected.len() > 6, "{expected:?}");
    assert_eq!(pages, expected);
    // Every option of a command is on its page.
    let options = run(Command::new(place.join("bin/pinrail")).args(["ab", "--help"]));
    let page = std::fs::read_to_string(place.join("share/man/man1/pinrail-ab.1")).expect("a page");
    let names: Vec<&str> = options
        .split_whitespace()
        .filter(|word| word.starts_with("--") && word.len() > 2)
        .collect();
    assert!(names.len() > 8, "{options}");
    for name in names {
        let name: String =
            name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        assert!(page.replace('\\', "").contains(&name), "{name} is not on the page");
    }
}

#[test]
fn what_was_installed_runs_and_uninstalling_leaves_nothing() {
    let place = unpacked();
    for (name, prefix) in [("usr", "/usr/local"), ("opt with blank", "/opt/pinrail")] {
        let destination = empty(name);
        run(&mut make(place, "install", &destination, prefix));
        let top = destination.join(prefix.trim_start_matches('/'));
        let settings =
            run(Command::new(top.join("bin/pinrail")).args(["settings", "--json"]).env_clear());
        assert!(settings.contains("PINRAIL_LOG"), "{settings}");
        let doctor = Command::new(top.join("bin/pinrail")).args(["doctor", "--json"]).output();
        let doctor = doctor.expect("the command runs");
        assert!(matches!(doctor.status.code(), Some(0..=2)), "{doctor:?}");
        assert!(String::from_utf8_lossy(&doctor.stdout).contains("\"findings\""));

        // Once more over it, then away, from the record alone.
        run(&mut make(place, "install", &destination, prefix));
        let makefile = common::root().join("release/Makefile");
        let uninstall = || {
            let mut command = Command::new("make");
            command.arg("-f").arg(&makefile).arg("uninstall").arg(format!("PREFIX={prefix}"));
            command.arg(format!("DESTDIR={}", destination.display())).current_dir("/");
            command.env_remove("MAKEFLAGS");
            command
        };
        run(&mut uninstall());
        assert_eq!(everything(&destination), BTreeSet::new(), "left behind");
        assert!(
            !uninstall().output().expect("make").status.success(),
            "there is nothing to remove"
        );
    }
}

#[test]
fn other_peoples_files_are_neither_written_over_nor_removed() {
    let place = unpacked();
    let destination = empty("shared-prefix");
    let bin = destination.join("usr/local/bin");
    std::fs::create_dir_all(&bin).expect("a folder");
    std::fs::write(bin.join("other"), "theirs").expect("written");
    run(&mut make(place, "install", &destination, "/usr/local"));
    std::fs::write(destination.join("usr/local/lib/late.so"), "theirs").expect("written");
    run(&mut make(place, "uninstall", &destination, "/usr/local"));
    let left: Vec<_> = [
        "usr",
        "usr/local",
        "usr/local/bin",
        "usr/local/bin/other",
        "usr/local/lib",
        "usr/local/lib/late.so",
    ]
    .map(PathBuf::from)
    .into();
    assert_eq!(everything(&destination).into_iter().collect::<Vec<_>>(), left);

    std::fs::write(bin.join("softrnic"), "theirs").expect("written");
    let before = everything(&destination);
    let output = make(place, "install", &destination, "/usr/local").output().expect("make");
    assert!(!output.status.success());
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("bin/softrnic is there"),
        "{output:?}"
    );
    assert_eq!(everything(&destination), before, "nothing was made");
    assert_eq!(std::fs::read_to_string(bin.join("softrnic")).expect("text"), "theirs");
}

#[test]
fn a_file_that_needs_a_newer_glibc_is_refused() {
    let root = common::root();
    let plugin = root.join("dist/libnccl-net-pinrail.so");
    let floor = |promise: &str| {
        Command::new(root.join("release/floor"))
            .arg(promise)
            .arg(&plugin)
            .output()
            .expect("it runs")
    };
    let output = floor("2.4");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("and 2.4 is promised: "),
        "{output:?}"
    );
    // What is promised is what README and the release's own README say.
    let stage = std::fs::read_to_string(root.join("release/stage")).expect("text");
    let promise = stage.lines().find_map(|line| line.strip_prefix("GLIBC=")).expect("a promise");
    assert!(floor(promise).status.success());
    let commands = stage.lines().find_map(|line| line.strip_prefix("GLIBC_COMMANDS="));
    for file in ["README.md", "release/README.md", "docs/containers.md", "docs/release.md"] {
        let text = std::fs::read_to_string(root.join(file)).expect("text");
        for promise in [promise, commands.expect("a promise")] {
            assert!(text.contains(&format!("glibc {promise}")), "{file} lacks glibc {promise}");
        }
    }
}
