//! The far end of cross-process tests: `tests/c/target.c`.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::{Guarded, client, compile};

/// A running target process.
pub struct Target {
    child: Guarded,
    input: ChildStdin,
    lines: Receiver<String>,
    /// QP number.
    pub qpn: u32,
    /// Address of its buffer.
    pub addr: u64,
    /// Key of its buffer.
    pub rkey: u32,
    /// Process id.
    pub pid: i32,
}

/// Value of `name=` in a line.
pub fn field(line: &str, name: &str) -> u64 {
    let tag = format!("{name}=");
    let text = line.split_whitespace().find_map(|w| w.strip_prefix(tag.as_str()));
    text.and_then(|t| t.parse().ok()).unwrap_or_else(|| panic!("{name} missing in: {line}"))
}

impl Target {
    /// Starts one on a fabric.
    pub fn start(fabric: &str, args: &[&str]) -> Self {
        static PROGRAM: OnceLock<std::path::PathBuf> = OnceLock::new();
        let program: &Path = PROGRAM.get_or_init(|| compile("target"));
        let mut command = client(program.to_str().expect("UTF-8 path"), fabric);
        command.args(args).stdin(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = Guarded(command.spawn().expect("target starts"));
        let input = child.0.stdin.take().expect("stdin");
        let output = BufReader::new(child.0.stdout.take().expect("stdout"));
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let mut target = Self { child, input, lines, qpn: 0, addr: 0, rkey: 0, pid: 0 };
        let ready = target.line();
        let number = |name| u32::try_from(field(&ready, name)).expect("32 bits");
        (target.qpn, target.rkey) = (number("qpn"), number("rkey"));
        target.pid = number("pid").cast_signed();
        target.addr = field(&ready, "addr");
        target
    }

    fn line(&mut self) -> String {
        let line =
            self.lines.recv_timeout(Duration::from_secs(60)).expect("an answer of the target");
        assert!(!line.starts_with("error"), "target says: {line}");
        line
    }

    /// Sends a command without waiting.
    pub fn tell(&mut self, command: &str) {
        writeln!(self.input, "{command}").expect("target reads");
    }

    /// Sends a command and returns the answer.
    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.line()
    }

    /// The answer to an earlier `tell`.
    pub fn answer(&mut self) -> String {
        self.line()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a plain system call on our own child, which is not reaped before `self` is dropped.
        assert_eq!(unsafe { libc::kill(self.pid, signal) }, 0);
    }

    /// State letter of the process.
    pub fn state(&self) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).expect("stat");
        stat[stat.rfind(')').expect("name") + 2..].chars().next().expect("state")
    }

    /// Waits until the process has this state.
    pub fn await_state(&self, state: char) {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while self.state() != state {
            assert!(
                std::time::Instant::now() < deadline,
                "state {state} expected, is {}",
                self.state()
            );
            std::thread::yield_now();
        }
    }

    /// Kills it without letting it clean up; it stays unreaped.
    pub fn kill(&mut self) {
        self.child.0.kill().expect("kill");
        self.await_state('Z');
    }
}
