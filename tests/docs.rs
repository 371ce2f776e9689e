//! The documentation's command lines: programs have the subcommands and options that are shown.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Pages that users read.
fn pages() -> Vec<PathBuf> {
    let root = common::root();
    let mut pages: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "bench/README.md", "release/README.md"]
            .map(|page| root.join(page))
            .into();
    let docs = std::fs::read_dir(root.join("docs")).expect("docs/");
    pages.extend(docs.map(|entry| entry.expect("an entry").path()));
    pages.retain(|page| page.extension().is_some_and(|end| end == "md"));
    pages.sort();
    pages
}

/// What stands in code: lines of blocks, continued ones joined, and spans of sentences.
fn code(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block = false;
    let joined = text.replace("\\\n", " ");
    for line in joined.lines() {
        if line.trim_start().starts_with("```") {
            block = !block;
        } else if block {
            found.push(line.to_owned());
        } else {
            found.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    found
}

/// Helps of a program and of its subcommands.
struct Help {
    own: String,
    commands: BTreeMap<String, String>,
}

impl Help {
    fn of(program: &Path) -> Self {
        assert!(program.exists(), "{} is missing: run make dist bench-build", program.display());
        let help = |words: &[&str]| {
            let output = Command::new(program).args(words).output().expect("the program starts");
            String::from_utf8(output.stdout).expect("text")
        };
        let own = help(&["--help"]);
        let names: Vec<String> = own
            .lines()
            .skip_while(|line| *line != "Commands:")
            .skip(1)
            .take_while(|line| !line.is_empty())
            .filter_map(|line| line.strip_prefix("  ")?.split(' ').next().map(str::to_owned))
            .filter(|name| !name.is_empty() && name != "help")
            .collect();
        assert!(!names.is_empty(), "{own}");
        let commands = names.into_iter().map(|name| (name.clone(), help(&[&name, "--help"])));
        Self { commands: commands.collect(), own }
    }
}

/// Whether a help names an option, whole.
fn has(help: &str, option: &str) -> bool {
    let end = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
    help.match_indices(option).any(|(at, _)| {
        let (before, after) = (&help[..at], &help[at + option.len()..]);
        before.ends_with([' ', ',', '\n', '[']) && (after.is_empty() || after.starts_with(end))
    })
}

#[test]
fn command_lines_in_the_documentation_are_understood() {
    let root = common::root();
    // Not shown by --help, and for `make release` alone.
    let hidden = ["man"];
    let programs = [
        ("pinrail", Help::of(&root.join("dist/pinrail"))),
        ("pinrail-bench", Help::of(&root.join("target/release/pinrail-bench"))),
    ];
    let (mut wrong, mut seen) = (BTreeSet::new(), 0);
    for page in pages() {
        let text = std::fs::read_to_string(&page).expect("a page");
        let shown = page.strip_prefix(root).expect("below").display().to_string();
        for line in code(&text) {
            let words: Vec<&str> = line.split_whitespace().collect();
            for (at, word) in words.iter().enumerate() {
                let name = Path::new(word).file_name().and_then(|name| name.to_str());
                let Some((_, help)) = programs.iter().find(|(known, _)| Some(*known) == name)
                else {
                    continue;
                };
                // Where a shell expects a command: first, or behind variables. Elsewhere it is a name in a sentence.
                let before = words[..at].rsplit(|word| matches!(*word, "&&" | "|" | ";")).next();
                if before.is_some_and(|words| words.iter().any(|word| !word.contains('='))) {
                    continue;
                }
                let rest = &words[at + 1..];
                let mut options = rest;
                let mut text = &help.own;
                if let Some(first) = rest.first()
                    && first.bytes().all(|b| b.is_ascii_lowercase())
                {
                    if hidden.contains(first) {
                        continue;
                    }
                    match help.commands.get(*first) {
                        Some(known) => text = known,
                        None => {
                            wrong.insert(format!("{shown}: there is no command {word} {first}"));
                            continue;
                        }
                    }
                    options = &rest[1..];
                }
                seen += 1;
                let ends = |word: &&&str| !matches!(**word, "--" | "|" | "&" | "&&" | ";" | "#");
                for option in options.iter().take_while(ends) {
                    let option = option.split('=').next().unwrap_or_default();
                    let option = option.trim_matches(['[', ']', ',', '.', ')']);
                    let is_option = option.len() > 1
                        && option.starts_with('-')
                        && option[1..].starts_with(|c: char| c.is_ascii_alphabetic() || c == '-');
                    if is_option && !has(text, option) {
                        wrong.insert(format!("{shown}: `{line}`: {option} is not known"));
                    }
                }
            }
        }
    }
    assert!(seen > 20, "only {seen} command lines were found");
    assert_eq!(wrong, BTreeSet::new());
}

#[test]
fn options_are_found_whole() {
    let help = "  -b, --begin <SIZE>  x\n      --json-lines\n";
    assert!(has(help, "--begin") && has(help, "-b") && has(help, "--json-lines"));
    assert!(!has(help, "--json") && !has(help, "--beg") && !has(help, "-x"));
}
