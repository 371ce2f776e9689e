//! `docs/parity.md` names tests. Each exists, in a place where it runs, and each row has one or a reason why not.

mod common;

use std::collections::HashMap;
use std::path::Path;

/// Beginnings of the cell that says where pinrail stands, for rows without a test.
const REASONS: [&str; 3] = ["not offered", "not tested", "being built"];

/// The rows of all tables as cells, without headings and rules.
fn rows(page: &str) -> Vec<Vec<&str>> {
    let mut rows = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        if line.starts_with("| --- ") {
            inside = true;
        } else if !line.starts_with('|') {
            inside = false;
        } else if inside {
            rows.push(line.trim_matches('|').split('|').map(str::trim).collect());
        }
    }
    rows
}

/// What stands between backticks and looks like a test: `file::name`.
fn named(cell: &str) -> impl Iterator<Item = (&str, &str)> {
    cell.split('`').skip(1).step_by(2).filter_map(|text| text.split_once("::"))
}

/// Whether a file of C cases or of Rust tests has a test of this name.
fn has_test(path: &str, text: &str, name: &str) -> bool {
    if Path::new(path).extension().is_some_and(|e| e == "c") {
        return [format!("EACH({name})"), format!("ONCE({name})"), format!(".name = \"{name}\"")]
            .iter()
            .any(|entry| text.contains(entry));
    }
    let Some((before, _)) = text.split_once(&format!("fn {name}(")) else { return false };
    // The attribute stands above the function, perhaps with others between.
    let above = before.rsplit('\n').skip(1).map(str::trim);
    above
        .take_while(|line| line.starts_with("#[") || line.starts_with("///"))
        .any(|l| l == "#[test]")
}

#[test]
fn every_named_test_exists() {
    let page = std::fs::read_to_string(common::root().join("docs/parity.md")).expect("the page");
    let mut files = HashMap::new();
    let mut wrong = Vec::new();
    for row in rows(&page) {
        for (path, name) in row.iter().flat_map(|cell| named(cell)) {
            let text = files.entry(path).or_insert_with(|| {
                std::fs::read_to_string(common::root().join(path)).unwrap_or_default()
            });
            if !has_test(path, text, name) {
                wrong.push(format!("{path}::{name} ({})", row[0]));
            }
        }
    }
    assert!(files.len() > 20, "only {} files are named", files.len());
    assert!(wrong.is_empty(), "no such tests:\n{}", wrong.join("\n"));
}

#[test]
fn every_row_has_a_test_or_a_reason() {
    let page = std::fs::read_to_string(common::root().join("docs/parity.md")).expect("the page");
    let rows = rows(&page);
    assert!(rows.len() > 60, "only {} rows", rows.len());
    for row in rows {
        let tests = row.iter().flat_map(|cell| named(cell)).count();
        let reason = REASONS.iter().any(|reason| row.iter().any(|cell| cell.starts_with(reason)));
        assert!(tests > 0 || reason, "{}: neither a test nor a reason", row[0]);
    }
}

#[test]
fn a_missing_test_is_noticed() {
    let rust = "#[test]\n    #[ignore]\n    fn one() {}\nfn two() {}\n";
    assert!(has_test("a.rs", rust, "one") && !has_test("a.rs", rust, "two"));
    assert!(!has_test("a.rs", rust, "on"));
    let c = "static void three(int v) {}\n EACH(one), ONCE(two),";
    assert!(has_test("a.c", c, "one") && has_test("a.c", c, "two") && !has_test("a.c", c, "three"));
    let table = "| x | y |\n| --- | --- |\n| a | `f.c::g`, `h` |\n\n| no table |\n";
    let rows = rows(table);
    assert_eq!(rows, [["a", "`f.c::g`, `h`"]]);
    assert_eq!(named(rows[0][1]).collect::<Vec<_>>(), [("f.c", "g")]);
}
