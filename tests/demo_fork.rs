//! `make demo-fork`: its table says what it must, and a row that is wrong is noticed.

mod common;

use std::process::{Command, Output};
use std::sync::OnceLock;

/// Builds the programs, once for all tests of this binary.
fn build() {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| {
        common::tool("make", "make", &["-s", "-f", "demo/demo.mk", "demo-programs"]);
    });
}

/// Runs a program of the demonstration on what ships, without the settings of whoever runs the tests.
fn demo(program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    build();
    let path = std::env::var_os("PATH").unwrap_or_default();
    Command::new(common::root().join(program))
        .args(arguments)
        .current_dir(common::root())
        .env_clear()
        .env("PATH", path)
        .env("SOFTRNIC_FABRIC", format!("demo-test-{}", std::process::id()))
        .env("FFI_PLUGIN", common::plugin())
        .env("FFI_SOFTRNIC", common::softrnic())
        .envs(environment.iter().copied())
        .output()
        .unwrap_or_else(|error| panic!("{program} does not start: {error}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// One row: asked for, withheld, the child, verdict.
type Row = [String; 4];

/// The sections with their rows; a row is indented, and its columns are two spaces apart.
fn sections(table: &str) -> Vec<(String, Vec<Row>)> {
    let mut sections: Vec<(String, Vec<Row>)> = Vec::new();
    for line in table.lines().skip_while(|line| !line.contains("asked for")).skip(1) {
        if let Some(row) = line.strip_prefix("  ") {
            let cells: Vec<String> = row
                .split("  ")
                .map(str::trim)
                .filter(|cell| !cell.is_empty())
                .map(str::to_owned)
                .collect();
            let row: Row = cells.try_into().unwrap_or_else(|_| panic!("not four cells: {line:?}"));
            sections.last_mut().expect("a section comes before its rows").1.push(row);
        } else if !line.is_empty() && !line.starts_with("Every row") {
            sections.push((line.to_owned(), Vec::new()));
        }
    }
    sections
}

/// The first three cells of each row.
fn cells(rows: &[Row]) -> Vec<[&str; 3]> {
    rows.iter().map(|[asked, withheld, child, _]| [asked, withheld, child].map(|c| &**c)).collect()
}

#[test]
fn the_table_says_what_it_must() {
    let done = demo("demo/fork/run", &[], &[]);
    let table = text(&done.stdout);
    assert!(done.status.success(), "{table}\n{}", text(&done.stderr));
    assert!(table.ends_with("Every row is as it must be.\n"), "{table}");
    let sections = sections(&table);
    let titles: Vec<&str> = sections
        .iter()
        .map(|(title, _)| title.split([':', ',', '(']).next().unwrap_or_default().trim())
        .collect();
    assert_eq!(
        titles,
        [
            "No RDMA",
            "libibverbs of this system",
            "softrnic",
            "softrnic",
            "softrnic",
            "pinrail with its flush scratch",
            "pinrail with its flush scratch"
        ]
    );
    for (title, rows) in &sections {
        for row in rows {
            assert!(row[3].starts_with("right: "), "{title}: {row:?}");
        }
    }

    let page = format!("{} bytes, dc in smaps", rustix::param::page_size());
    let shared = ["4 bytes beside other data", &page, "killed by signal 11"];
    let alone = ["4 bytes on a page of their own", &page, "exit 0"];
    assert_eq!(cells(&sections[0].1), [shared, alone]);
    let given_back = ["the same after ibv_dereg_mr", "nothing", "exit 0"];
    assert_eq!(cells(&sections[2].1), [shared, given_back, alone]);
    assert_eq!(cells(&sections[3].1), [shared, given_back, alone]);
    assert_eq!(cells(&sections[4].1), [["4 bytes beside other data", "nothing", "exit 0"]]);
    // Whether the system's library marks is the system's business; it is said in the title.
    if sections[1].0.contains("not needed") {
        assert_eq!(sections[1].1.len(), 3, "{table}");
    } else {
        let given_back = ["the same after ibv_dofork_range", "nothing", "exit 0"];
        assert_eq!(cells(&sections[1].1), [shared, given_back, alone]);
    }
    for (_, rows) in &sections[5..] {
        let [open, closed] = &rows[..] else { panic!("two rows: {rows:?}") };
        assert!(open[0].ends_with("regions, connected") && open[1].ends_with("dc in smaps"));
        assert_eq!(open[2], "exit 0");
        assert!(open[3].ends_with("mappings of the plugin's own, 30000 canaries read"), "{open:?}");
        assert_eq!(cells(&rows[1..]), [["nothing, closed", "nothing", "exit 0"]], "{closed:?}");
    }
}

#[test]
fn a_harmed_child_is_noticed() {
    let done = demo("target/demo/plugin", &["planted"], &[]);
    let table = text(&done.stdout);
    assert!(!done.status.success(), "{table}");
    let open = table.lines().find(|line| line.contains("connected")).expect("its row");
    assert!(open.contains("killed by signal 11"), "{open}");
    assert!(open.contains("WRONG: pages of something larger are withheld"), "{open}");
    // The plugin gives back its own, not what somebody else has taken.
    let closed = table.lines().find(|line| line.contains("closed")).expect("its row");
    assert!(closed.contains("WRONG: something is still withheld"), "{closed}");
}

#[test]
fn a_missing_library_fails_the_demonstration() {
    let missing = [("FFI_SOFTRNIC", "/nonexistent/libibverbs.so.1")];
    let done = demo("demo/fork/run", &[], &missing);
    let (table, errors) = (text(&done.stdout), text(&done.stderr));
    assert_eq!(done.status.code(), Some(1), "{table}\n{errors}");
    assert!(errors.contains("/nonexistent/libibverbs.so.1"), "{errors}");
    assert!(errors.ends_with("Not every row is as it must be.\n"), "{errors}");
    assert!(table.contains("killed by signal 11"), "what can be shown is shown: {table}");
}
