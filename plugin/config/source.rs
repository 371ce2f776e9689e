//! Where variables come from: the environment, then NCCL's configuration files.
//!
//! NCCL reads the file named by `NCCL_CONF_FILE`, or else `~/.nccl.conf`, and then
//! `/etc/nccl.conf`, and puts what it finds into the environment of the process unless the name is
//! already there. So the environment wins over files, the first file over the second, and the first
//! line over later ones. NCCL does this before it loads a plugin; the files are read here again, so
//! that programs without NCCL agree with it and each value's origin can be told.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::notice::{Notice, Origin, Topic};
use crate::host::inside::follow;
use crate::host::plain;

/// No configuration file is longer; a device file must not be read for ever.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// So many odd lines are named one by one.
const MOST_LINES: usize = 8;
/// NCCL's file for all users.
const SYSTEM_FILE: &str = "/etc/nccl.conf";

/// One variable with its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its text. Paths need not be UTF-8.
    pub value: OsString,
    /// Where it was set.
    pub origin: Origin,
}

/// The assignments of one configuration file: `NAME=value` a line, `#` in the first column for
/// comments, blanks kept.
pub fn file_assignments(text: &[u8]) -> Vec<(OsString, OsString)> {
    text.split(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
        .filter(|line| line.first() != Some(&b'#'))
        .filter_map(|line| {
            let equals = line.iter().position(|byte| *byte == b'=')?;
            let value = &line[equals + 1..];
            let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
            Some((to_os(&line[..equals]), to_os(&value[..end])))
        })
        .collect()
}

fn to_os(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// Merges the environment and the files, most important first. `inherited` says whether a name was
/// in the environment the process started with; if it was not and a file holds the same text, the
/// file is where the value comes from (NCCL exported it).
pub fn merge(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
    files: &[(PathBuf, Vec<u8>)],
    inherited: impl Fn(&OsStr) -> bool,
) -> Vec<Variable> {
    let files: Vec<_> =
        files.iter().map(|(path, text)| (path.clone(), file_assignments(text))).collect();
    let in_file = |name: &OsStr| {
        files.iter().find_map(|(path, lines)| {
            let (_, value) = lines.iter().find(|(known, _)| known == name)?;
            Some((path, value))
        })
    };
    let mut seen = HashSet::new();
    let mut variables = Vec::new();
    let mut add = |name: &OsStr, value: &OsStr, origin: Origin| {
        if let Some(text) = name.to_str()
            && seen.insert(text.to_owned())
        {
            variables.push(Variable { name: text.to_owned(), value: value.to_owned(), origin });
        }
    };
    for (name, value) in environment {
        let origin = match in_file(&name) {
            Some((path, text)) if *text == value && !inherited(&name) => Origin::File(path.clone()),
            _ => Origin::Environment,
        };
        add(&name, &value, origin);
    }
    for (path, lines) in &files {
        for (name, value) in lines {
            add(name, value, Origin::File(path.clone()));
        }
    }
    variables
}

/// The beginning of a process's first environment, as much as files may hold.
fn first_environment(path: &Path) -> Vec<u8> {
    let mut text = Vec::new();
    let read = plain::open(path).and_then(|file| file.take(MAX_FILE_BYTES).read_to_end(&mut text));
    // Without it, values are not known to come from a file.
    if read.is_ok() { text } else { Vec::new() }
}

/// The lines of a file that neither assign nor comment, or assign to a name that no variable can have, by number. What NCCL
/// passes over without a word.
pub fn odd_lines(text: &[u8]) -> Vec<usize> {
    let odd = |line: &[u8]| {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.first() == Some(&b'#') || line.trim_ascii().is_empty() {
            return false;
        }
        let name = line.split(|byte| *byte == b'=').next().unwrap_or_default();
        !line.contains(&b'=') || name.is_empty() || name.iter().any(u8::is_ascii_whitespace)
    };
    let lines = text.split(|byte| *byte == b'\n').enumerate();
    lines.filter(|(_, line)| odd(line)).map(|(at, _)| at + 1).collect()
}

/// What is said about them. Not what they hold, which may be anything.
fn odd_notice(path: &Path, lines: &[usize]) -> Option<Notice> {
    let shown: Vec<String> = lines.iter().take(MOST_LINES).map(usize::to_string).collect();
    let more = if lines.len() > MOST_LINES { " and others" } else { "" };
    (!lines.is_empty()).then(|| Notice {
        subject: path.display().to_string(),
        topic: Topic::Line,
        text: format!(
            "{}: line {}{more} has no effect: a line is NAME=value without blanks around the name, or begins with #",
            path.display(),
            shown.join(", ")
        ),
    })
}

/// Where a captured tree says which of the files it should hold could not be read, and why: `path<tab>reason` a line.
pub const UNREADABLE: &str = "pinrail/unreadable";

/// What a captured tree says about a file that could not be captured.
fn why_uncaptured(root: &Path, path: &Path) -> Option<String> {
    let list = plain::read(&follow(root, Path::new(UNREADABLE)), MAX_FILE_BYTES).ok()?;
    let list = String::from_utf8_lossy(&list).into_owned();
    let of = |line: &str| {
        let (name, why) = line.split_once('\t')?;
        (Path::new(name) == path).then(|| why.to_owned())
    };
    list.lines().find_map(of)
}

/// Reads a configuration file of this host, or of a captured tree.
fn read_file(tree: Option<&Path>, path: &Path) -> io::Result<Vec<u8>> {
    let Some(root) = tree else { return plain::read(path, MAX_FILE_BYTES) };
    if let Some(why) = why_uncaptured(root, path) {
        return Err(io::Error::other(why));
    }
    if path.is_relative() {
        let why = "a relative path, and what it is relative to was not captured";
        return Err(io::Error::other(why));
    }
    plain::read(&follow(root, path), MAX_FILE_BYTES)
}

/// The variables of this process and its configuration files. A file that does not exist is normal
/// unless `NCCL_CONF_FILE` names it.
pub fn of_process() -> (Vec<Variable>, Vec<Notice>) {
    let started_with = first_environment(Path::new("/proc/self/environ"));
    gather(std::env::vars_os().collect(), &started_with, None)
}

/// The same of a process whose files were captured below `root`: its environment is in `proc/self/environ` there.
pub fn of_tree(root: &Path) -> (Vec<Variable>, Vec<Notice>) {
    let started_with = first_environment(&follow(root, Path::new("proc/self/environ")));
    let environment = assignments(&started_with).map(|(name, value)| (name.into(), value.into()));
    gather(environment.collect(), &started_with, Some(root))
}

/// The entries of `/proc/<pid>/environ`.
fn assignments(environ: &[u8]) -> impl Iterator<Item = (&OsStr, &OsStr)> {
    environ.split(|byte| *byte == 0).filter_map(|entry| {
        let equals = entry.iter().position(|byte| *byte == b'=')?;
        Some((OsStr::from_bytes(&entry[..equals]), OsStr::from_bytes(&entry[equals + 1..])))
    })
}

/// The environment merged with the files, which lie in the tree if there is one.
fn gather(
    environment: Vec<(OsString, OsString)>,
    started_with: &[u8],
    tree: Option<&Path>,
) -> (Vec<Variable>, Vec<Notice>) {
    let get = |wanted: &str| {
        let (_, value) = environment.iter().find(|(name, _)| name == wanted)?;
        (!value.is_empty()).then(|| value.clone())
    };
    let mut files = Vec::new();
    let mut notices = Vec::new();
    let user = get("NCCL_CONF_FILE").map(PathBuf::from);
    let asked = user.is_some();
    let user = user.or_else(|| Some(Path::new(&get("HOME")?).join(".nccl.conf")));
    for (path, asked) in
        user.map(|path| (path, asked)).into_iter().chain([(PathBuf::from(SYSTEM_FILE), false)])
    {
        match read_file(tree, &path) {
            Ok(text) => {
                notices.extend(odd_notice(&path, &odd_lines(&text)));
                files.push((path, text));
            }
            Err(error) if !asked && error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => notices.push(Notice {
                subject: path.display().to_string(),
                topic: Topic::File,
                text: format!(
                    "cannot read {}: {error}; its settings have no effect",
                    path.display()
                ),
            }),
        }
    }
    let started_with: HashSet<&OsStr> = assignments(started_with).map(|(name, _)| name).collect();
    (merge(environment, &files, |name| started_with.contains(name)), notices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;
    use proptest::prelude::*;

    fn pair(name: &str, value: &str) -> (OsString, OsString) {
        (name.into(), value.into())
    }

    fn find<'a>(variables: &'a [Variable], name: &str) -> (&'a str, Origin) {
        let hits: Vec<_> = variables.iter().filter(|v| v.name == name).collect();
        assert_eq!(hits.len(), 1, "{name}");
        (hits[0].value.to_str().unwrap(), hits[0].origin.clone())
    }

    #[test]
    fn files_follow_nccls_syntax() {
        let text = b"# comment\nA=1\r\n B=2\nnonsense\nC=x=y\nD=\n#E=5\nF=6";
        let expected =
            [pair("A", "1"), pair(" B", "2"), pair("C", "x=y"), pair("D", ""), pair("F", "6")];
        assert_eq!(file_assignments(text), expected);
    }

    #[test]
    fn lines_that_do_nothing_are_found() {
        let text = b"# comment\n\nA=1\r\n B=2\nnonsense\nexport C=3\nD =4\n=5\n  # indented\nE=\n \t\nF=x y\n";
        assert_eq!(odd_lines(text), [4, 5, 6, 7, 8, 9]);
        assert_eq!(odd_notice(Path::new("/c"), &[]), None);
        let text = odd_notice(Path::new("/c"), &[4, 5]).unwrap().text;
        assert!(text.starts_with("/c: line 4, 5 has no effect"), "{text}");
        let many: Vec<usize> = (1..20).collect();
        assert!(odd_notice(Path::new("/c"), &many).unwrap().text.contains("8 and others has no"));
    }

    #[test]
    fn a_captured_tree_is_read_from_itself_alone() {
        // What lies outside must not be read, whatever leads there.
        let outside = Tree::new(&[("conf", "NCCL_IB_TC=9\n")]);
        let out = outside.root().join("conf");
        let set = |tree: &Tree, conf: &str| {
            let environ = format!("HOME=/root\0NCCL_CONF_FILE={conf}\0");
            tree.write("proc/self/environ", environ.as_bytes());
            let (variables, notices) = of_tree(tree.root());
            let value = variables.into_iter().find(|one| one.name == "NCCL_IB_TC");
            let texts: Vec<_> = notices.into_iter().map(|notice| notice.text).collect();
            (value.map(|one| one.value.into_string().unwrap()), texts)
        };
        let tree = Tree::new(&[("conf", "NCCL_IB_TC=1\n"), ("a/real", "NCCL_IB_TC=2\n")]);
        tree.link("absolute", "/a/real");
        tree.link("escapes", out.to_str().unwrap());
        assert_eq!(set(&tree, "/conf"), (Some("1".into()), vec![]));
        assert_eq!(set(&tree, "/absolute"), (Some("2".into()), vec![]));
        assert_eq!(set(&tree, "/a/../../../conf"), (Some("1".into()), vec![]));
        for (conf, part) in [
            ("/escapes", "No such file"),
            (out.to_str().unwrap(), "No such file"),
            ("conf", "a relative path"),
            ("../../conf", "a relative path"),
            ("./Cargo.toml", "a relative path"),
        ] {
            let (value, notices) = set(&tree, conf);
            assert_eq!(value, None, "{conf}");
            assert!(notices[0].contains(part), "{conf}: {notices:?}");
        }
        // What the tree says it could not hold is not merely absent.
        tree.write(UNREADABLE, b"/root/.nccl.conf\tPermission denied (os error 13)\n");
        let (value, notices) = set(&tree, "");
        assert_eq!(value, None);
        let wanted = "cannot read /root/.nccl.conf: Permission denied (os error 13); its settings have no effect";
        assert_eq!(notices, [wanted]);
    }

    #[test]
    fn environment_then_user_file_then_system_file() {
        let files = [
            (PathBuf::from("user"), b"A=u\nB=u\nB=u2\n".to_vec()),
            (PathBuf::from("system"), b"A=s\nB=s\nC=s\n".to_vec()),
        ];
        let merged = merge([pair("A", "e"), pair("A", "again")], &files, |_| true);
        assert_eq!(find(&merged, "A"), ("e", Origin::Environment));
        assert_eq!(find(&merged, "B"), ("u", Origin::File("user".into())));
        assert_eq!(find(&merged, "C"), ("s", Origin::File("system".into())));
    }

    #[test]
    fn what_nccl_exported_from_a_file_is_told_apart() {
        let files = [(PathBuf::from("conf"), b"A=1\nB=1\nC=1\n".to_vec())];
        let environment = [pair("A", "1"), pair("B", "1"), pair("C", "2")];
        let merged = merge(environment, &files, |name| name == "B");
        assert_eq!(find(&merged, "A").1, Origin::File("conf".into()));
        assert_eq!(find(&merged, "B").1, Origin::Environment);
        assert_eq!(find(&merged, "C").1, Origin::Environment);
    }

    #[test]
    fn names_that_are_not_utf8_are_skipped() {
        let odd = OsString::from_vec(vec![0xff, b'A']);
        assert!(merge([(odd, "1".into())], &[], |_| true).is_empty());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_file(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let files = [(PathBuf::from("f"), text)];
            let _ = merge([], &files, |_| false);
        }
    }
}
