//! The manifest: the crates that the product is to be built on are ordinary dependencies of its default build, and
//! every dependency is really used.

mod common;

use std::collections::BTreeSet;
use std::path::Path;

/// Dependencies of the product's default build as cargo resolves them, without the product itself.
fn tree(edges: &str, depth: &[&str]) -> BTreeSet<String> {
    let mut arguments =
        vec!["tree", "--offline", "--locked", "--package", "pinrail", "--prefix", "none"];
    arguments.extend(["--format", "{p}", "--edges", edges]);
    arguments.extend(depth);
    let text = common::tool(env!("CARGO"), "rustup", &arguments);
    text.lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect()
}

/// The lines of the Rust files below a folder, or of one file, that are not comments.
fn code(path: &Path, out: &mut String) {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).expect("a folder of the repository") {
            code(&entry.expect("an entry").path(), out);
        }
    } else if path.extension().is_some_and(|e| e == "rs") {
        let text = std::fs::read_to_string(path).expect("a file of text");
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
            out.push_str(line);
            out.push('\n');
        }
    }
}

/// Dependencies whose name never stands before `::` in the code.
fn unused<'a>(names: impl IntoIterator<Item = &'a String>, code: &str) -> Vec<&'a String> {
    names
        .into_iter()
        .filter(|name| {
            let path = format!("{}::", name.replace('-', "_"));
            let starts = |at: usize| {
                !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':')
            };
            !code.match_indices(&path).any(|(at, _)| starts(at))
        })
        .collect()
}

#[test]
fn the_named_crates_are_ordinary_dependencies() {
    let normal = tree("normal", &["--depth", "1"]);
    for name in ["rdma-sys", "cudarc", "libc", "tracing"] {
        assert!(normal.contains(name), "{name} is no dependency of the default build: {normal:?}");
    }
    assert!(
        normal.iter().any(|name| name == "crossbeam" || name.starts_with("crossbeam-")),
        "no crate of crossbeam among {normal:?}"
    );
    assert!(tree("build", &["--depth", "1"]).contains("cbindgen"));
}

#[test]
fn every_dependency_is_used() {
    let mut product = String::new();
    code(&common::root().join("plugin"), &mut product);
    let dependencies = tree("normal", &["--depth", "1"]);
    assert_eq!(unused(&dependencies, &product), Vec::<&String>::new(), "declared but not used");

    let mut script = String::new();
    code(&common::root().join("build.rs"), &mut script);
    let dependencies = tree("build", &["--depth", "1"]);
    assert_eq!(unused(&dependencies, &script), Vec::<&String>::new(), "declared but not used");
}

#[test]
fn the_software_rnic_is_no_part_of_the_product() {
    let all = tree("normal,build", &[]);
    assert!(all.contains("rdma-sys"), "the list is not the product's: {all:?}");
    for name in ["softrnic", "pinrail-bench", "pinrail-client"] {
        assert!(!all.contains(name), "{name} is a dependency of the product");
    }
}
