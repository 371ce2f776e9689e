//! Runs a program under callgrind and adds up the instructions of one shared object.

use crate::failure::{Failure, Result};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const STAGE: &str = "callgrind";
/// The marker functions of [`super::phases`].
const PHASE: &str = "pinrail_bench_phase";
const PROBE: &str = "pinrail_bench_probe";

/// What a run counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Everything from entering to leaving a phase, in all threads.
    Phase,
    /// Only the parts inside the probe, in the thread that enters it.
    Probe,
}

/// A finished run.
#[derive(Debug)]
pub struct Run {
    /// The program's standard output.
    pub output: String,
    /// Instructions of the object, phase by phase.
    pub instructions: Vec<u64>,
}

/// Runs `program`, whose counts go to `folder` under `name`.
pub fn run(
    program: &Command,
    object: &Path,
    scope: Scope,
    folder: &Path,
    name: &str,
) -> Result<Run> {
    let out = folder.join(format!("callgrind.{name}.out"));
    let mut command = Command::new("valgrind");
    command.args(["-q", "--tool=callgrind"]);
    command.arg(format!("--callgrind-out-file={}", out.display()));
    command.arg(format!("--zero-before={PHASE}")).arg(format!("--dump-after={PHASE}"));
    if scope == Scope::Probe {
        command.arg(format!("--toggle-collect={PROBE}"));
    }
    command.arg(program.get_program()).args(program.get_args());
    for (key, value) in program.get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    let output = command.output().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Failure::new(
            STAGE,
            "valgrind is not installed (Debian and Ubuntu: apt install valgrind)",
        ),
        _ => Failure::io(STAGE, "valgrind", &error),
    })?;
    let errors = String::from_utf8_lossy(&output.stderr);
    eprint!("{errors}");
    if !output.status.success() {
        let last = errors.lines().next_back().unwrap_or("no message").to_owned();
        return Err(Failure::new(
            STAGE,
            format!("the counted program failed ({}): {last}", output.status),
        ));
    }
    let instructions = phase_files(&out)
        .iter()
        .map(|path| {
            let text = std::fs::read_to_string(path)
                .map_err(|error| Failure::io(STAGE, &path.display().to_string(), &error))?;
            Ok(object_cost(&text, object))
        })
        .collect::<Result<_>>()?;
    Ok(Run { output: String::from_utf8_lossy(&output.stdout).into_owned(), instructions })
}

/// callgrind numbers the dumps of a run: out.1, out.2, ….
fn phase_files(out: &Path) -> Vec<PathBuf> {
    (1..)
        .map(|part| PathBuf::from(format!("{}.{part}", out.display())))
        .take_while(|path| path.exists())
        .collect()
}

/// The self cost of all functions of one object. Calls carry the callee's cost on the line that follows them; that line
/// is somebody else's.
fn object_cost(text: &str, object: &Path) -> u64 {
    let mut names: HashMap<&str, &str> = HashMap::new();
    let mut inside = false;
    let mut skip = false;
    let mut total = 0;
    for line in text.lines() {
        if let Some(reference) = line.strip_prefix("ob=").or_else(|| line.strip_prefix("cob=")) {
            // "(3) /path" gives number 3 a name, "(3)" uses it.
            let (number, name) = reference.split_once(' ').unwrap_or((reference, ""));
            if !name.is_empty() {
                names.insert(number, name);
            }
            if line.starts_with("ob=") {
                let name = names.get(number).copied().unwrap_or(number);
                inside = Path::new(name) == object;
            }
        } else if line.starts_with("calls=") {
            skip = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            if !skip && inside {
                let cost = line.split_whitespace().nth(1).and_then(|cost| cost.parse().ok());
                total += cost.unwrap_or(0);
            }
            skip = false;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::object_cost;
    use std::path::Path;

    const DUMP: &str = "\
positions: line
events: Ir
summary: 100

ob=(3) /usr/lib/libc.so.6
fn=(1) memcpy
10 7

ob=(5) /dist/plugin.so
fn=(2) isend
12 3
cob=(3)
cfn=(1)
calls=4 10
+1 28
* 2
-3 1

fn=(4) test
cob=(6) /tmp/libibverbs.so.1
cfn=(9) poll
calls=1 0
0 50
0 5

ob=(6)
fn=(9)
0 50

ob=(5)
fn=(2)
20 9
totals: 100
";

    #[test]
    fn adds_own_cost_only() {
        assert_eq!(object_cost(DUMP, Path::new("/dist/plugin.so")), 3 + 2 + 1 + 5 + 9);
        assert_eq!(object_cost(DUMP, Path::new("/tmp/libibverbs.so.1")), 50);
        assert_eq!(object_cost(DUMP, Path::new("/nowhere")), 0);
    }
}
