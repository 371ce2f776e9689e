//! The bench as the command. It opens the plugin itself, so that it gets a path instead of variables.

use super::side::{Plugin, Side};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

const PROGRAM: &str = "pinrail-bench";

/// Whether the command runs the bench, by whatever launcher.
pub fn is_bench(command: &[OsString]) -> bool {
    command.iter().any(|word| Path::new(word).file_name() == Some(OsStr::new(PROGRAM)))
}

/// What cannot work.
///
/// # Errors
/// In words, with what to do.
pub fn check(command: &[OsString], sides: &[Side; 2]) -> Result<(), String> {
    for side in sides {
        if !matches!(side.plugin, Plugin::File(_)) {
            return Err(format!(
                "{PROGRAM} opens a file itself and knows neither names nor NCCL's own transport, and {} is {}: give --a FILE \
                 and --b FILE, with a slash in each",
                side.letter,
                side.name()
            ));
        }
    }
    let own = ["--plugin", "--json", "--list"];
    let taken = |word: &&OsString| {
        let word = word.to_string_lossy();
        own.iter().any(|name| word == *name || word.starts_with(&format!("{name}=")))
    };
    if let Some(word) = command.iter().find(taken) {
        return Err(format!("{} is given to {PROGRAM} by this command", word.to_string_lossy()));
    }
    let subcommand = |word: &&OsString| matches!(word.to_str(), Some("cpu" | "register"));
    if let Some(word) = command.iter().find(subcommand) {
        return Err(format!(
            "{PROGRAM} {} is not a sweep: its figures are the same in every run, and need no turns",
            word.to_string_lossy()
        ));
    }
    Ok(())
}

/// A file that goes away with the value.
#[derive(Debug)]
pub struct Scratch(pub PathBuf);

impl Scratch {
    /// A name that nothing has yet, in the folder for such files.
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("pinrail-ab-{}-{number}.json", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The bench may have failed before it wrote.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The command for a side.
pub fn command(command: &[OsString], plugin: &Path, record: &Path) -> Vec<OsString> {
    let mut words = command.to_vec();
    words.extend(["--plugin".into(), plugin.into(), "--json".into(), record.into()]);
    words.push("--verbose".into());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn side(plugin: Plugin) -> Side {
        Side::new("A", plugin, &[], |_| None)
    }

    #[test]
    fn the_bench_is_known_under_a_launcher() {
        assert!(is_bench(&words("numactl -N 0 target/release/pinrail-bench -b 8")));
        assert!(!is_bench(&words("mpirun -n 2 all_reduce_perf")));
    }

    #[test]
    fn what_cannot_work_is_said_before_anything_runs() {
        let files = || ["/a.so", "/b.so"].map(|path| side(Plugin::File(path.into())));
        assert_eq!(check(&words("pinrail-bench -b 8"), &files()), Ok(()));
        let mut sides = files();
        sides[0] = side(Plugin::None);
        for (text, sides, part) in [
            ("pinrail-bench", &sides, "give --a FILE"),
            ("pinrail-bench --plugin x", &files(), "--plugin is given"),
            ("pinrail-bench --json=x", &files(), "--json=x is given"),
            ("pinrail-bench cpu", &files(), "cpu is not a sweep"),
        ] {
            assert!(check(&words(text), sides).unwrap_err().contains(part), "{text}");
        }
    }
}
