//! A process that drives a plugin for another one. They say one JSON value per line to each other over a socket pair,
//! which is the worker's standard input. It ends when the socket does, or with whoever started it.

use crate::failure::{Failure, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// No answer is longer: a worker runs code that nobody knows.
const LONGEST: usize = 4 << 20;

/// The end of whoever started the process.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    socket: UnixStream,
    received: Vec<u8>,
}

impl Worker {
    /// Starts a program. What it prints goes to standard error, because a plugin that prints must not disturb a table.
    pub fn start(mut command: Command) -> Result<Self> {
        let stage = "start";
        let (socket, theirs) =
            UnixStream::pair().map_err(|error| Failure::io(stage, "socketpair", &error))?;
        socket
            .set_nonblocking(true)
            .map_err(|error| Failure::io(stage, "a non-blocking socket", &error))?;
        let output = rustix::io::dup(io::stderr())
            .map_err(|error| Failure::io(stage, "standard error", &error.into()))?;
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::from(output));
        let child =
            command.spawn().map_err(|error| Failure::io(stage, "a worker process", &error))?;
        Ok(Self { child, socket, received: Vec::new() })
    }

    /// Its process number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Readable when it has said something, or is gone.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Says something to it. A line is far smaller than a socket's buffer, and the worker has read the one before.
    pub fn tell(&mut self, stage: &str, what: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(what)
            .map_err(|error| Failure::new("command", error.to_string()))?;
        line.push('\n');
        match self.socket.write_all(line.as_bytes()) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.obituary(stage)),
        }
    }

    /// What it said, if that is complete. Its end is an error that says how it ended.
    pub fn hear<T: DeserializeOwned>(&mut self, stage: &str) -> Result<Option<T>> {
        let mut chunk = [0; 4096];
        loop {
            if let Some(line) = self.line() {
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|error| Failure::new(stage, format!("answered nonsense: {error}")));
            }
            if self.received.len() > LONGEST {
                return Err(Failure::new(stage, "answered without end"));
            }
            match self.socket.read(&mut chunk) {
                Ok(0) => return Err(self.obituary(stage)),
                Ok(count) => self.received.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(self.obituary(stage)),
            }
        }
    }

    /// As [`Self::hear`], waiting for it; `None`: nothing came in time.
    pub fn hear_until<T: DeserializeOwned>(
        &mut self,
        stage: &str,
        deadline: Instant,
    ) -> Result<Option<T>> {
        loop {
            if let Some(said) = self.hear(stage)? {
                return Ok(Some(said));
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Ok(None);
            };
            wait_readable(std::iter::once(&self.socket), left)?;
        }
    }

    fn line(&mut self) -> Option<Vec<u8>> {
        let end = self.received.iter().position(|&byte| byte == b'\n')?;
        Some(self.received.drain(..=end).collect())
    }

    /// The socket is closed: says how the process ended.
    pub fn obituary(&mut self, stage: &str) -> Failure {
        let text = match self.child.wait() {
            Ok(status) => match (status.signal(), status.code()) {
                (Some(signal), _) => format!("was killed by signal {signal} during {stage}"),
                (None, Some(code)) => format!("exited with status {code} during {stage}"),
                (None, None) => format!("ended during {stage}"),
            },
            Err(error) => format!("is gone during {stage}: {error}"),
        };
        Failure::new(stage, text)
    }

    /// Waits for the process to end by itself, which it does when its socket closes.
    pub fn join(mut self, timeout: Duration) -> Result<()> {
        if self.socket.shutdown(std::net::Shutdown::Write).is_ok() {
            let deadline = Instant::now() + timeout;
            // End of file on our side is the process's exit.
            while let Some(left) = deadline.checked_duration_since(Instant::now()) {
                wait_readable(std::iter::once(&self.socket), left)?;
                match self.socket.read(&mut [0; 64]) {
                    Ok(0) => break,
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => break,
                    _ => {}
                }
            }
        }
        match self.child.try_wait() {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(_)) => Err(self.obituary("exit")),
            _ => match self.child.wait() {
                Ok(status) if status.success() => Ok(()),
                _ => Err(self.obituary("exit")),
            },
        }
    }

    /// Ends the process, whatever it is doing.
    pub fn stop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let id = self.child.id();
            if let Err(error) = self.child.kill() {
                eprintln!("process {id} cannot be stopped: {error}");
            }
            if let Err(error) = self.child.wait() {
                eprintln!("process {id} cannot be waited for: {error}");
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Sleeps until one of the sockets has something to read or `left` is over.
pub fn wait_readable<'a, S: AsFd + 'a>(
    sockets: impl Iterator<Item = &'a S>,
    left: Duration,
) -> Result<()> {
    let mut fds: Vec<PollFd<'_>> =
        sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    let left = Timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&left)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(Failure::io("wait", "poll", &error.into())),
    }
}

/// The worker's end.
#[derive(Debug)]
pub struct Service {
    commands: BufReader<UnixStream>,
    answers: UnixStream,
}

impl Service {
    /// Takes the socket from standard input. `who` is for messages. From here on the process dies with the one that
    /// started it, so that none stays behind that spins.
    pub fn begin(who: &str) -> Result<Self> {
        let signal = Some(rustix::process::Signal::KILL);
        if let Err(error) = rustix::process::set_parent_process_death_signal(signal) {
            eprintln!("{who}: no parent death signal: {error}");
        }
        let socket = io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .map(UnixStream::from)
            .map_err(|error| Failure::io("start", "standard input", &error))?;
        let answers =
            socket.try_clone().map_err(|error| Failure::io("start", "the socket", &error))?;
        Ok(Self { commands: BufReader::new(socket), answers })
    }

    /// The next command; `None`: there will be none.
    pub fn command<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut line = String::new();
        match self.commands.read_line(&mut line) {
            Ok(0) | Err(_) => Ok(None),
            Ok(_) => serde_json::from_str(&line)
                .map(Some)
                .map_err(|error| Failure::new("start", format!("not a command: {error}"))),
        }
    }

    /// Whether somebody says something, or is gone; asked in the middle of a command.
    pub fn is_called(&self) -> bool {
        let mut fds = [PollFd::new(&self.answers, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1))
    }

    /// Answers. `false`: nobody listens any more.
    pub fn answer(&mut self, what: &impl Serialize) -> Result<bool> {
        let mut line = serde_json::to_string(what)
            .map_err(|error| Failure::new("answer", error.to_string()))?;
        line.push('\n');
        Ok(self.answers.write_all(line.as_bytes()).is_ok())
    }
}
