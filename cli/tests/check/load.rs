//! What NCCL would open, and why it would not.

use super::plugins::{compile, fixture, not_a_plugin, scratch};
use super::{Report, dist, pinrail, report};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Judged with these variables.
fn judged(plugin: impl AsRef<OsStr>, variables: &[(&str, &str)]) -> Report {
    let mut command = pinrail();
    command.arg(plugin).envs(variables.iter().copied()).args(["--timeout", "300"]);
    report(command)
}

/// A folder that holds one file under another name.
fn folder(name: &str, file: &Path, as_name: &str) -> PathBuf {
    let folder = scratch(name);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(file, folder.join(as_name)).unwrap();
    folder
}

/// A shared object of a few lines of C.
fn built(name: &str, code: &str, arguments: &[&str]) -> PathBuf {
    let (source, output) = (scratch(&format!("{name}.c")), scratch(&format!("{name}.so")));
    std::fs::write(&source, code).unwrap();
    let mut all = vec![source.to_str().unwrap()];
    all.extend(arguments);
    compile(&output, &all);
    output
}

/// The fixture with some bytes of its head changed.
fn damaged(name: &str, changes: &[(usize, u8)]) -> PathBuf {
    let mut bytes = std::fs::read(fixture(12)).unwrap();
    for (at, byte) in changes {
        bytes[*at] = *byte;
    }
    let path = scratch(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn the_built_plugin_is_found_by_its_name() {
    let folder = dist("libnccl-net-pinrail.so").parent().unwrap().to_str().unwrap().to_owned();
    let softrnic = dist("softrnic/libibverbs.so.1");
    let report = judged(
        "pinrail",
        &[
            ("LD_LIBRARY_PATH", &folder),
            ("NCCL_NET", "PINRAIL"),
            ("NCCL_IBVERBS_LIB", softrnic.to_str().unwrap()),
            ("SOFTRNIC_FABRIC", "check-load"),
            ("SOFTRNIC_DEVICES", "2"),
        ],
    );
    assert_eq!(report.code, 0, "{:?}", report.findings("problem"));
    let candidate = &report.document["candidates"][0];
    assert_eq!(candidate["opened_as"], "libnccl-net-pinrail.so");
    assert_eq!(candidate["tables"], serde_json::json!([12, 11, 10, 9, 8, 7, 6]));
    assert_eq!(candidate["collnet"], serde_json::json!([]));
    assert_eq!(candidate["taken"], 12);
    let releases = candidate["releases"].as_array().unwrap();
    let takes = |first: &str| {
        releases.iter().find(|release| release["first"] == first).expect("a release")["takes"]
            .clone()
    };
    assert_eq!(
        (takes("2.30.3"), takes("2.13.4"), takes("2.12.7")),
        (12.into(), 6.into(), ().into())
    );
    let uses = candidate["uses"].as_array().unwrap();
    assert_eq!(uses.len(), 7);
    for seen in uses {
        assert_eq!(seen["devices"].as_array().unwrap().len(), 2, "{seen}");
        assert_eq!(seen["devices"][1]["name"], "softrnic1");
        assert_eq!(seen["devices"][1]["speed"], 100_000);
        assert_eq!(seen["error"], serde_json::Value::Null);
    }
}

#[test]
fn each_release_takes_its_own_table() {
    let plugin = fixture(10);
    let of = |release: &str| {
        let mut command = pinrail();
        command.args(["--nccl", release]).arg(&plugin);
        report(command)
    };
    for (release, table) in [("2.26.2", 10), ("2.29", 10), ("2.32.3", 10)] {
        let report = of(release);
        assert_eq!((report.code, &report.document["candidates"][0]["taken"]), (0, &table.into()));
    }
    let [check, what, evidence, remedy] = of("2.25.1").problem();
    assert_eq!(check, "table");
    assert!(what.contains("too new"), "{what}");
    assert!(
        evidence.contains("it looks for v9, v8") && evidence.contains("ncclNetPlugin_v10"),
        "{evidence}"
    );
    assert!(remedy.contains("newer NCCL"), "{remedy}");
    // A path is no name before 2.21.
    let [check, _, evidence, remedy] = of("2.20").problem();
    assert_eq!(check, "search");
    assert!(evidence.contains("libnccl-net-/"), "{evidence}");
    assert!(remedy.contains("takes no path"), "{remedy}");

    let old = built("old", "const void *ncclNetPlugin_v4[32] = {\"old\"};", &[]);
    let mut command = pinrail();
    command.arg(&old);
    let [_, what, ..] = report(command).problem();
    assert!(what.contains("too old"), "{what}");
    // 2.12 takes it, and what it does then is not known here.
    let folder = folder("old-folder", &old, "libnccl-net-old.so");
    let mut command = pinrail();
    command.args(["--nccl", "2.12", "old"]).env("LD_LIBRARY_PATH", folder);
    let seen = report(command);
    assert_eq!(seen.code, 2);
    assert!(seen.findings("unknown")[0][1].contains("v4"), "{:?}", seen.findings("unknown"));
}

#[test]
fn what_is_not_found_says_where_to_put_it() {
    let [check, what, evidence, remedy] = judged("nowhere", &[]).problem();
    assert_eq!(check, "search");
    assert!(what.contains("no plugin \"nowhere\""), "{what}");
    assert!(evidence.contains("libnccl-net-nowhere.so: cannot open"), "{evidence}");
    assert!(remedy.contains("libnccl-net-nowhere.so into LD_LIBRARY_PATH (not set)"), "{remedy}");

    let [.., remedy] = judged("nowhere", &[("LD_LIBRARY_PATH", "/a:/b")]).problem();
    assert!(remedy.contains("(now /a:/b)"), "{remedy}");

    let folder = folder("beside", &fixture(12), "libx.so");
    let mut command = pinrail();
    command.arg("libx.so").current_dir(&folder);
    let [.., remedy] = report(command).problem();
    assert!(remedy.contains("NCCL_NET_PLUGIN=./libx.so"), "{remedy}");

    let [.., remedy] = judged("/nowhere/libx.so", &[]).problem();
    assert!(remedy.contains("inside the container"), "{remedy}");
}

/// Damaged or foreign files, and the word that must say so.
#[test]
fn a_file_that_cannot_be_loaded_says_why() {
    let text = scratch("text.so");
    std::fs::write(&text, "#!/bin/sh\n# more than twenty bytes\n").unwrap();
    let empty = scratch("empty.so");
    std::fs::write(&empty, "").unwrap();
    let fresh = built(
        "fresh-libc",
        "void fresh(void) {}",
        &[
            "-Wl,-soname,libc.so.6",
            &format!("-Wl,--version-script={}", {
                let script = scratch("fresh.map");
                std::fs::write(&script, "GLIBC_2.99 { fresh; };\n").unwrap();
                script.display().to_string()
            }),
        ],
    );
    let newer =
        built("newer", "void fresh(void); void go(void) { fresh(); }", &[fresh.to_str().unwrap()]);
    let gone = built("gone-library", "void gone(void) {}", &["-Wl,-soname,libgone.so.7"]);
    let needy =
        built("needy", "void gone(void); void go(void) { gone(); }", &[gone.to_str().unwrap()]);
    let unresolved = built("unresolved", "void nobody(void); void go(void) { nobody(); }", &[]);
    let cases: [(PathBuf, &str, &str, &str); 8] = [
        (text, "file", "#!/bin/sh", "name the plugin's file"),
        (empty, "file", "it is empty", "name the plugin's file"),
        (damaged("arm.so", &[(18, 183)]), "architecture", "aarch64", "build for x86_64"),
        (damaged("narrow.so", &[(4, 1), (18, 3)]), "architecture", "32 bit", "build for x86_64"),
        (newer, "glibc", "GLIBC_2.99", "this distribution or an older one"),
        (needy, "needed", "libgone.so.7", "LD_LIBRARY_PATH"),
        (unresolved, "file", "undefined symbol: nobody", "link the plugin against"),
        (not_a_plugin(), "table", "no network plugin", "NCCL_NET_PLUGIN"),
    ];
    for (path, check, word, remedy) in cases {
        let problem = judged(&path, &[]).problem();
        assert_eq!(problem[0], check, "{problem:?}");
        assert!(problem[1..3].iter().any(|text| text.contains(word)), "{word}: {problem:?}");
        assert!(problem[3].contains(remedy), "{remedy}: {problem:?}");
    }
}

#[test]
fn a_plugin_that_fails_crashes_or_hangs_is_a_verdict() {
    let plugin = fixture(11);
    let with = |fault: &str| judged(&plugin, &[("FIXTURE_FAULT", fault)]).problem();
    let [check, what, evidence, _] = with("init");
    assert_eq!(check, "init");
    assert!(what.contains("init of v11 fails") && what.contains("falls back"), "{what}");
    assert!(
        evidence.contains("ncclSystemError (2)") && evidence.contains("init fails on purpose, 42"),
        "{evidence}"
    );
    let [check, what, ..] = with("none");
    assert_eq!((check.as_str(), what.contains("finds no device")), ("devices", true), "{what}");
    let [_, what, evidence, _] = with("crash");
    assert!(what.contains("init of v11 takes the process with it"), "{what}");
    assert!(evidence.contains("killed by signal 6"), "{evidence}");
    let [_, what, ..] = with("groups");
    assert!(what.contains("maxRecvs is out of range"), "{what}");

    // It never returns, so that any time is enough to see it.
    let mut command = pinrail();
    command.arg(&plugin).args(["--timeout", "1"]).env("FIXTURE_FAULT", "hang");
    let [_, what, evidence, _] = report(command).problem();
    assert!(what.contains("init of v11"), "{what}");
    assert!(evidence.contains("did not return within 1 s"), "{evidence}");

    let code =
        "#include <stdlib.h>\n__attribute__((constructor)) static void go(void) { abort(); }\n";
    let [_, what, evidence, _] = judged(built("dies", code, &[]), &[]).problem();
    assert!(what.contains("dlopen of /"), "{what}");
    assert!(evidence.contains("killed by signal 6"), "{evidence}");

    let holes = built("holes", "const void *ncclNetPlugin_v12[22] = {\"holes\"};", &[]);
    let [_, _, evidence, remedy] = judged(holes, &[]).problem();
    assert!(evidence.contains("init is NULL"), "{evidence}");
    assert!(remedy.contains("whoever made it"), "{remedy}");
}

#[test]
fn another_network_by_name_keeps_nccl_away() {
    let [check, _, evidence, remedy] = judged(fixture(12), &[("NCCL_NET", "IB")]).problem();
    assert_eq!((check.as_str(), remedy.as_str()), ("name", "NCCL_NET=fixture"));
    assert!(evidence.contains("\"fixture\""), "{evidence}");
    let report = judged(fixture(12), &[]);
    assert_eq!(report.code, 0);
    assert!(report.findings("advice").iter().any(|[check, ..]| check == "name"));
}

/// The first that works is taken; that the one before it does not is a silent fall.
#[test]
fn a_list_is_gone_through_in_order() {
    let good = fixture(12);
    let list = format!("nowhere,{},behind", good.display());
    let report = judged(&list, &[]);
    assert_eq!(report.problem()[0], "search");
    let candidates = report.document["candidates"].as_array().unwrap();
    assert_eq!(candidates.len(), 2, "what stands behind the first that works is not looked at");
    assert_eq!(candidates[1]["taken"], 12);
}

#[test]
fn the_variable_counts_wherever_it_is_set() {
    let plugin = fixture(12);
    let conf = scratch("check-nccl.conf");
    std::fs::write(&conf, format!("NCCL_NET_PLUGIN={}\nFIXTURE_FAULT=none\n", plugin.display()))
        .unwrap();
    let mut command = pinrail();
    command.env("NCCL_CONF_FILE", &conf);
    // The file's other variables reach the plugin as NCCL exports them.
    let seen = report(command);
    assert_eq!(seen.problem()[0], "devices");
    assert_eq!(seen.document["origin"], conf.to_str().unwrap());

    let mut command = pinrail();
    command.env("NCCL_CONF_FILE", &conf).env("NCCL_NET_PLUGIN", "none");
    let [_, what, evidence, _] = report(command).problem();
    assert!(what.contains("loads no plugin"), "{what}");
    assert!(evidence.contains("NCCL_NET_PLUGIN=none (environment)"), "{evidence}");

    // Nothing is named: there is a default.
    let folder = folder("default", &plugin, "libnccl-net.so");
    let mut command = pinrail();
    command.env("LD_LIBRARY_PATH", folder);
    let seen = report(command);
    assert_eq!(
        (seen.code, &seen.document["candidates"][0]["opened_as"]),
        (0, &"libnccl-net.so".into())
    );
    assert_eq!(judged("static", &[]).code, 2);
}

#[test]
fn text_is_for_people_and_has_no_colour_in_a_pipe() {
    let collnet = built(
        "collnet",
        "const void *ncclCollNetPlugin_v10[32]; const void *ncclTunerPlugin_v4[4];\n\
         const void *ncclNetPlugin_v12[22] = {\"\\x1b[31mred\"};\n",
        &[],
    );
    let output = pinrail().arg(&collnet).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(!text.contains('\x1b'), "{text}");
    for part in
        ["CollNet: v10", "takes v12", "PROBLEM  table: load of v12 fails", "problems: problems 1"]
    {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let report = judged(&collnet, &[]);
    let symbols = report.document["candidates"][0]["symbols"].to_string();
    assert!(symbols.contains("ncclTunerPlugin_v4"), "{symbols}");
}
