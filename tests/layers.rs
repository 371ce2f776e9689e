//! The layer rules, read from the source.
//!
//! Comments, the contents of strings, and code under `cfg(test)` do not count.

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Places that may contain unsafe code: folders end in a slash. The reason stands in each file's first lines.
const UNSAFE_ROOMS: [&str; 19] = [
    "abi/",
    "verbs/",
    "cuda/",
    "memory/page.rs",
    "memory/given.rs",
    "memory/child.rs",
    "memory/wiped.rs",
    "memory/inventory/shared.rs",
    "memory/status/board.rs",
    "memory/status/pages.rs",
    "transport/fifo.rs",
    "transport/request.rs",
    "profiler.rs",
    "thread.rs",
    "library.rs",
    "capi.rs",
    "clock.rs",
    "hint.rs",
    "signal.rs",
];

/// Places that may define functions for C, with the only names they may give them; none: any.
const C_FUNCTIONS: [(&str, &[&str]); 4] = [
    ("abi/", &[]),
    (
        "capi.rs",
        &[
            "pinrail_version",
            "pinrail_host_alloc",
            "pinrail_host_free",
            // What pinrail_host_free calls. Private.
            "host_free",
            "pinrail_provoke_panic",
        ],
    ),
    // What pthread_create calls. Private.
    ("thread.rs", &["run"]),
    // The handler of SIGUSR2. Private.
    ("signal.rs", &["on_signal"]),
];

/// Folder or file, and modules that it must not name.
const MUST_NOT_NAME: [(&str, &[&str]); 15] = [
    ("transport/", &["abi"]),
    ("verbs/", &["abi", "transport", "memory", "config"]),
    ("cuda/", &["abi", "transport", "memory", "verbs"]),
    ("memory/", &["abi", "transport"]),
    ("host/", &["abi", "transport", "verbs", "memory"]),
    ("config/", &["abi", "transport", "verbs", "memory"]),
    ("thread.rs", &["abi", "transport", "verbs", "memory"]),
    ("profiler.rs", &["abi", "transport", "verbs", "memory"]),
    ("library.rs", &["abi", "transport", "verbs", "memory"]),
    ("clock.rs", &["abi", "transport", "verbs", "memory"]),
    ("hint.rs", &["abi", "transport", "verbs", "memory"]),
    ("signal.rs", &["abi", "transport", "verbs", "memory"]),
    ("sync.rs", &["abi", "transport", "verbs", "memory"]),
    ("error.rs", &["abi", "transport", "verbs", "memory"]),
    ("", &["softrnic"]),
];

/// One file of the product: its path below plugin/ and its code.
struct Source {
    path: String,
    code: String,
}

fn sources() -> Vec<Source> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    let root = common::root().join("plugin");
    let mut found = Vec::new();
    walk(&root, &mut found);
    found.sort();
    let all: Vec<Source> = found
        .iter()
        .filter(|path| path.file_name().is_none_or(|name| name != "tests.rs"))
        .map(|path| Source {
            path: path.strip_prefix(&root).expect("below plugin/").to_str().expect("text").into(),
            code: without_tests(&without_prose(&std::fs::read_to_string(path).expect("text"))),
        })
        .collect();
    assert!(all.len() > 40, "only {} files found", all.len());
    all
}

/// The text with comments and the contents of string and character literals blanked.
fn without_prose(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    let word =
        |at: usize| at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    while at < bytes.len() {
        let rest = &bytes[at..];
        let (len, keep) = if rest.starts_with(b"//") {
            (rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len()), "")
        } else if rest.starts_with(b"/*") {
            (find(rest, b"*/").map_or(rest.len(), |end| end + 2), "")
        } else if !word(at)
            && (rest.starts_with(b"r\"") || rest.starts_with(b"r#"))
            && raw(rest) > 0
        {
            (raw(rest), "\"\"")
        } else if rest[0] == b'"' {
            (quoted(rest, b'"'), "\"\"")
        } else if rest[0] == b'\'' && character(rest) > 0 {
            (character(rest), "''")
        } else {
            out.push(char::from(rest[0]));
            at += 1;
            continue;
        };
        out.push_str(keep);
        // Lines stay lines.
        out.extend(rest[..len].iter().filter(|b| **b == b'\n').map(|_| '\n'));
        at += len;
    }
    out
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// Length of a literal that begins here and ends with an unescaped `quote`.
fn quoted(text: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < text.len() && text[at] != quote {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(text.len())
}

/// Length of a raw string; 0 if it is none (a raw identifier).
fn raw(text: &[u8]) -> usize {
    let hashes = text[1..].iter().take_while(|b| **b == b'#').count();
    if text.get(1 + hashes) != Some(&b'"') {
        return 0;
    }
    let end = [b"\"".as_slice(), &b"################"[..hashes]].concat();
    find(&text[2 + hashes..], &end).map_or(text.len(), |at| 2 + hashes + at + end.len())
}

/// Length of a character literal; 0 if it is a lifetime.
fn character(text: &[u8]) -> usize {
    match text.get(1) {
        Some(b'\\') => quoted(text, b'\''),
        Some(first) => {
            let wide = match first {
                0xf0.. => 4,
                0xe0.. => 3,
                0xc0.. => 2,
                _ => 1,
            };
            if text.get(1 + wide) == Some(&b'\'') { wide + 2 } else { 0 }
        }
        None => 0,
    }
}

/// The code without items under `#[cfg(test)]`.
fn without_tests(code: &str) -> String {
    let mut out = String::new();
    let mut rest = code;
    while let Some(at) = rest.find("#[cfg(test)]") {
        out.push_str(&rest[..at]);
        let item = &rest[at..];
        let open = item.find('{').unwrap_or(item.len());
        let end = match item.find(';') {
            Some(semicolon) if semicolon < open => semicolon + 1,
            _ => {
                let mut depth = 0;
                item.char_indices()
                    .find_map(|(at, c)| {
                        depth += i32::from(c == '{') - i32::from(c == '}');
                        (c == '}' && depth == 0).then_some(at + 1)
                    })
                    .unwrap_or(item.len())
            }
        };
        out.extend(item[..end].chars().filter(|c| *c == '\n'));
        rest = &item[end..];
    }
    out + rest
}

/// Lines (from 1) that contain a word.
fn lines_with(code: &str, word: &str) -> Vec<usize> {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    (1..)
        .zip(code.lines())
        .filter(|(_, line)| line.split(|c| !inside(c)).any(|token| token == word))
        .map(|(number, _)| number)
        .collect()
}

fn in_place(path: &str, place: &str) -> bool {
    path == place || ((place.ends_with('/') || place.is_empty()) && path.starts_with(place))
}

#[test]
fn lower_layers_do_not_name_higher_ones() {
    let mut broken = Vec::new();
    for source in sources() {
        for (place, names) in MUST_NOT_NAME {
            if !in_place(&source.path, place) {
                continue;
            }
            for name in names {
                for line in lines_with(&source.code, name) {
                    broken.push(format!("plugin/{}:{line} names {name}", source.path));
                }
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn unsafe_code_stays_in_its_rooms() {
    let mut broken = Vec::new();
    let mut used = BTreeSet::new();
    for source in sources() {
        let lines = lines_with(&source.code, "unsafe");
        match UNSAFE_ROOMS.iter().find(|room| in_place(&source.path, room)) {
            Some(room) if !lines.is_empty() => {
                used.insert(*room);
            }
            Some(_) => {}
            None => {
                broken.extend(lines.iter().map(|line| format!("plugin/{}:{line}", source.path)));
            }
        }
    }
    assert!(broken.is_empty(), "unsafe code outside its rooms:\n{}", broken.join("\n"));
    // A room that needs none is no room any more.
    assert_eq!(used, UNSAFE_ROOMS.iter().copied().collect());
}

/// What pins memory is named in one place, which asks the ledger first.
#[test]
fn only_the_registry_pins() {
    for source in sources() {
        let asks = source.code.contains("MemoryRegion::register");
        assert!(!asks || source.path == "memory/registry.rs", "plugin/{} registers", source.path);
    }
    let registry = sources().into_iter().find(|s| s.path == "memory/registry.rs").expect("there");
    let place = |what: &str| registry.code.find(what).expect(what);
    assert!(place("PinLedger::process().pin(") < place("MemoryRegion::register(&self.pd, start"));
}

/// What the GPU may pin is memory that devices hold, and one type says so.
#[test]
fn only_long_term_pins_come_before_the_gpu() {
    let sealed: Vec<String> = sources()
        .into_iter()
        .filter(|source| !lines_with(&source.code, "Sealed").is_empty())
        .map(|source| source.path)
        .collect();
    assert_eq!(sealed, ["cuda/host.rs", "memory/pinned.rs"]);
}

#[test]
fn only_the_boundary_defines_functions_for_c() {
    let mut broken = Vec::new();
    let mut seen = 0;
    for source in sources() {
        // A definition has a name after `fn`; a type of function has none.
        let mut rest = source.code.as_str();
        while let Some(at) = rest.find("extern \"\"") {
            rest = rest[at + "extern \"\"".len()..].trim_start();
            let Some(name) = rest.strip_prefix("fn ") else { continue };
            let name =
                name.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default();
            seen += 1;
            let allowed = C_FUNCTIONS.iter().any(|(place, names)| {
                in_place(&source.path, place) && (names.is_empty() || names.contains(&name))
            });
            if !allowed {
                broken.push(format!("plugin/{}: {name}", source.path));
            }
        }
    }
    assert!(broken.is_empty(), "functions for C outside abi/ and capi.rs:\n{}", broken.join("\n"));
    assert!(seen > 20, "only {seen} definitions found: the search is wrong");
}

#[test]
fn the_reader_knows_code_from_prose() {
    let text = "let a = \"unsafe\"; // unsafe\n/* unsafe */ let b = r#\"unsafe\"#; let c: &'static u8 = &b'\\'';\n\
                unsafe {}\n#[cfg(test)]\nmod tests { fn f() { unsafe {} } }\nfn g() {}\n";
    let code = without_tests(&without_prose(text));
    assert_eq!(lines_with(&code, "unsafe"), [3]);
    assert_eq!(lines_with(&code, "g"), [6]);
}
