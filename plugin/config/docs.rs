//! `docs/settings.md`, generated from the tables.

use std::fmt::Write;

use super::{INERT, Row, TABLE};

const HEAD: &str = "\
# Settings

This page is generated from the tables in `plugin/config/`; a test compares the two.
`UPDATE=1 cargo test --lib config::docs` rewrites it.

Variables are read once, when the plugin is initialised: from the environment, then from the file
named by `NCCL_CONF_FILE` or else `~/.nccl.conf`, then from `/etc/nccl.conf`. The first that sets a
name wins, and an empty text counts as not set. Numbers may be decimal, hexadecimal (`0x…`) or octal
(`0…`). A number out of range is replaced by the nearest bound, text that cannot be read by the
default, and a `PINRAIL_*`, `NCCL_IB_*`, `NCCL_SOCKET_*` or `NCCL_GDR_*` name that is not on this page is
reported with the nearest name that is; each of these is one warning in the log. One line in the log lists the values that
differ from their defaults, with their origin.
";

/// Text for a table cell.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// A value for a table cell.
fn code(text: &str) -> String {
    if text.is_empty() { "not set".to_owned() } else { format!("`{}`", cell(text)) }
}

fn rows<'a>(page: &mut String, rows: impl Iterator<Item = &'a Row>) {
    page.push_str("\n| variable | default | accepts | meaning |\n| --- | --- | --- | --- |\n");
    for row in rows {
        let stock = row
            .stock_default
            .map_or_else(String::new, |stock| format!(" (stock: {})", code(stock)));
        let unit = row.form.unit().word();
        let unit = if unit.is_empty() { String::new() } else { format!(" ({unit})") };
        // Writing to a string cannot fail.
        let _ = writeln!(
            page,
            "| `{}` | {}{stock} | {}{unit} | {} |",
            row.name,
            code(row.default),
            cell(&row.form.accepts()),
            cell(row.prose)
        );
    }
}

fn inert(page: &mut String, core: bool) {
    page.push_str("\n| variable | stock default | why |\n| --- | --- | --- |\n");
    for inert in INERT.iter().filter(|inert| inert.core == core) {
        let _ = writeln!(
            page,
            "| `{}` | {} | {} |",
            inert.name,
            code(inert.default),
            cell(inert.reason)
        );
    }
}

/// The page.
pub fn markdown() -> String {
    let mut page = HEAD.to_owned();
    page.push_str("\n## pinrail's own\n");
    rows(&mut page, TABLE.iter().filter(|row| !row.is_stock()));
    page.push_str("\n## NCCL's, with their stock meaning\n");
    rows(&mut page, TABLE.iter().filter(|row| row.is_stock()));
    page.push_str(
        "\n## NCCL's, acted on by NCCL itself\n\nThey work with pinrail as with any network.\n",
    );
    inert(&mut page, true);
    page.push_str(
        "\n## NCCL's, without effect in pinrail\n\nSetting one to another value than its default \
         is noted in the log.\n",
    );
    inert(&mut page, false);
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_what_the_tables_say() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/settings.md");
        let page = markdown();
        if std::env::var_os("UPDATE").is_some_and(|update| update == "1") {
            std::fs::write(path, &page).unwrap();
        }
        let stored = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            stored == page,
            "docs/settings.md is stale; refresh it with `UPDATE=1 cargo test --lib config::docs`"
        );
    }
}
