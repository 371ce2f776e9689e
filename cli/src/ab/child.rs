//! One run of the command: started, listened to, and ended when its time is over.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Lines that are kept for the report.
const TAIL: usize = 20;
/// What is longer is cut.
const LONGEST: usize = 16 << 10;
/// How long processes may take to end when they are asked to, and their output to end after the command.
const GRACE: Duration = Duration::from_secs(5);
/// How often an interruption is looked for.
const LOOK: Duration = Duration::from_millis(200);
/// Lines on their way; a full queue slows the command down and loses nothing.
const QUEUE: usize = 1024;

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// As it should.
    Well,
    /// With another status than 0.
    Status(i32),
    /// By a signal.
    Signal(i32),
    /// It took too long.
    Deadline(u64),
    /// It could not be started.
    NotStarted(String),
    /// The user ended it.
    Interrupted,
}

impl Ending {
    fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(0), _) => Self::Well,
            (Some(code), _) => Self::Status(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Well => f.write_str("ended well"),
            Self::Status(code) => write!(f, "ended with status {code}"),
            Self::Signal(signal) => write!(f, "was ended by signal {signal}"),
            Self::Deadline(seconds) => {
                write!(f, "did not end within {seconds} s (--deadline), and was killed")
            }
            Self::NotStarted(why) => write!(f, "could not be started: {why}"),
            Self::Interrupted => f.write_str("was interrupted"),
        }
    }
}

/// What is known of a run beside what its lines say.
#[derive(Debug, Clone)]
pub struct Ended {
    /// How.
    pub ending: Ending,
    /// Its last lines.
    pub tail: Vec<String>,
    /// How long it took.
    pub seconds: f64,
}

enum Event {
    Line(String),
    OutputEnds,
    CommandEnds,
}

/// Runs a command in a process group of its own; `line` sees every line of both outputs.
pub fn run(
    command: &[OsString],
    environment: &BTreeMap<String, Option<String>>,
    deadline: Duration,
    interrupted: &AtomicBool,
    mut line: impl FnMut(&str),
) -> Ended {
    let start = Instant::now();
    let ended = |ending, tail: VecDeque<String>| Ended {
        ending,
        tail: tail.into(),
        seconds: start.elapsed().as_secs_f64(),
    };
    let mut child = match start_child(command, environment) {
        Ok(child) => child,
        Err(why) => return ended(Ending::NotStarted(why), VecDeque::new()),
    };
    let (sender, events) = sync_channel(QUEUE);
    let mut open = 0;
    let outputs: [Option<Box<dyn Read + Send>>; 2] = [
        child.stdout.take().map(|pipe| Box::new(pipe) as _),
        child.stderr.take().map(|pipe| Box::new(pipe) as _),
    ];
    for output in outputs.into_iter().flatten() {
        open += 1;
        let sender = sender.clone();
        thread::spawn(move || read_lines(output, &sender));
    }
    // The process is left unreaped, so that its number stays its group's until the group has been ended.
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    thread::spawn(move || {
        if let Some(pid) = pid {
            // Whatever it says, waiting longer would not help.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        }
        let _ = sender.send(Event::CommandEnds);
    });

    let mut state = State { events, open, running: true, tail: VecDeque::new() };
    let mut forced = None;
    let limit = start + deadline;
    while state.running && forced.is_none() {
        let left = limit.saturating_duration_since(Instant::now());
        if interrupted.load(Ordering::Relaxed) {
            forced = Some(Ending::Interrupted);
        } else if left.is_zero() {
            forced = Some(Ending::Deadline(deadline.as_secs()));
        } else {
            state.next(left.min(LOOK), &mut line);
        }
    }
    if forced.is_some() {
        signal(pid, Signal::TERM);
    }
    // Processes that it left behind hold its output open.
    let end = Instant::now() + GRACE;
    while (state.running || state.open > 0) && Instant::now() < end {
        state.next(end.saturating_duration_since(Instant::now()), &mut line);
    }
    // The last of them, if any are left.
    signal(pid, Signal::KILL);
    let end = Instant::now() + GRACE;
    while (state.running || state.open > 0) && Instant::now() < end {
        state.next(end.saturating_duration_since(Instant::now()), &mut line);
    }
    let status = child.wait();
    let ending = forced.unwrap_or_else(|| match status {
        Ok(status) => Ending::of(status),
        Err(error) => Ending::NotStarted(error.to_string()),
    });
    ended(ending, state.tail)
}

fn start_child(
    command: &[OsString],
    environment: &BTreeMap<String, Option<String>>,
) -> Result<Child, String> {
    let (program, arguments) = command.split_first().ok_or("there is no command")?;
    let mut started = Command::new(program);
    started.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    started.process_group(0);
    for (name, value) in environment {
        match value {
            Some(value) => started.env(name, value),
            None => started.env_remove(name),
        };
    }
    started.spawn().map_err(|error| format!("{}: {error}", program.display()))
}

fn signal(pid: Option<Pid>, signal: Signal) {
    if let Some(pid) = pid {
        // A group without processes is what is wanted.
        let _ = kill_process_group(pid, signal);
    }
}

struct State {
    events: Receiver<Event>,
    /// Outputs that have not ended.
    open: u32,
    /// The command has not ended.
    running: bool,
    tail: VecDeque<String>,
}

impl State {
    fn next(&mut self, patience: Duration, line: &mut impl FnMut(&str)) {
        match self.events.recv_timeout(patience) {
            Ok(Event::Line(text)) => {
                line(&text);
                if !text.trim().is_empty() {
                    if self.tail.len() == TAIL {
                        self.tail.pop_front();
                    }
                    self.tail.push_back(text);
                }
            }
            Ok(Event::OutputEnds) => self.open = self.open.saturating_sub(1),
            Ok(Event::CommandEnds) => self.running = false,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => (self.open, self.running) = (0, false),
        }
    }
}

/// Sends the lines of an output, the ends of very long ones left out.
fn read_lines(output: Box<dyn Read + Send>, to: &SyncSender<Event>) {
    let mut output = BufReader::new(output);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let Ok(read) = (&mut output).take(LONGEST as u64).read_until(b'\n', &mut bytes) else {
            break;
        };
        if read == 0 {
            break;
        }
        let whole = bytes.last() == Some(&b'\n');
        let text = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned();
        if to.send(Event::Line(text)).is_err() || (!whole && skip_line(&mut output).is_err()) {
            break;
        }
    }
    let _ = to.send(Event::OutputEnds);
}

fn skip_line(output: &mut impl BufRead) -> std::io::Result<()> {
    loop {
        let part = output.fill_buf()?;
        let end = part.iter().position(|byte| *byte == b'\n');
        let (used, done) = (end.map_or(part.len(), |at| at + 1), end.is_some() || part.is_empty());
        output.consume(used);
        if done {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, deadline: Duration) -> (Ended, Vec<String>) {
        let command = ["sh", "-c", script].map(OsString::from);
        let environment =
            [("AB_TEST".to_owned(), Some("set".to_owned())), ("HOME".to_owned(), None)];
        let mut lines = Vec::new();
        let no = AtomicBool::new(false);
        let ended = run(&command, &environment.into(), deadline, &no, |line| {
            lines.push(line.to_owned());
        });
        (ended, lines)
    }

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn every_line_of_both_outputs_arrives_with_the_ending() {
        let (ended, mut lines) = shell("echo $AB_TEST-$HOME; echo two >&2; printf three", LONG);
        lines.sort();
        assert_eq!(
            (ended.ending, lines),
            (Ending::Well, vec!["set-".into(), "three".into(), "two".into()])
        );
        assert_eq!(shell("exit 3", LONG).0.ending, Ending::Status(3));
        assert_eq!(shell("kill -9 $$", LONG).0.ending, Ending::Signal(9));
        let no = AtomicBool::new(false);
        let ended = run(&["/no/such".into()], &BTreeMap::new(), LONG, &no, |_| {});
        assert!(matches!(&ended.ending, Ending::NotStarted(why) if why.contains("/no/such")));
    }

    #[test]
    fn long_lines_are_cut_and_only_the_last_lines_kept() {
        let (ended, lines) = shell("head -c 100000 /dev/zero | tr '\\0' x; echo; seq 50", LONG);
        assert_eq!(lines.iter().map(String::len).max(), Some(LONGEST));
        assert_eq!((lines.len(), ended.tail.len(), ended.tail[0].as_str()), (51, TAIL, "31"));
    }

    #[test]
    fn a_run_that_hangs_is_ended_with_all_its_processes() {
        // The one that is left behind ignores the first signal, and holds the output open.
        let script =
            "echo before; (trap '' TERM; echo $$ >&2; while :; do sleep 1000; done) & wait";
        let (ended, lines) = shell(script, Duration::from_secs(1));
        assert_eq!(ended.ending, Ending::Deadline(1));
        assert!(lines.contains(&"before".to_owned()) && ended.tail.len() == 2, "{lines:?}");
    }

    #[test]
    fn an_interruption_ends_the_run() {
        let yes = AtomicBool::new(true);
        let command = ["sh", "-c", "sleep 1000"].map(OsString::from);
        let ended = run(&command, &BTreeMap::new(), LONG, &yes, |_| {});
        assert_eq!(ended.ending, Ending::Interrupted);
    }
}
