//! The responder: waits for the one who asks, and does on this host what he asks for. Whoever else comes to the port is
//! sent away: nothing that arrives is run, names a file or decides more than which rail moves a few messages.

use super::protocol::{
    Answer, GREETING, Host, LONGEST_QUESTION, Question, is_readable, read, read_bytes, write,
};
use crate::args::Reach;
use crate::output;
use nccl_net_pinrail::config::variables_of_process;
use nccl_net_pinrail::transport::wire;
use pinrail_client::failure::{Failure, Result};
use pinrail_client::worker::{Worker, wait_readable};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// A stranger has this long to say who he is.
const GREETING_TIME: Duration = Duration::from_secs(5);
/// Strangers that are listened to at once.
const MOST_STRANGERS: usize = 16;
/// The one who asks may think this long.
const IDLE: Duration = Duration::from_secs(600);
/// What a worker gets beyond the time that it was given for a transfer.
const GRACE: Duration = Duration::from_secs(15);
/// Seconds that making a connection may take where nobody sets it: it ends before the transfer's time does, with the
/// plugin's own words.
const CONNECT_SECONDS: &str = "20";
/// Longest time between two looks at whether a session has ended.
const TURN: Duration = Duration::from_millis(200);

/// Serves until a session has ended, or nobody has come in time. The exit status.
pub fn run(options: &Reach) -> Result<u8> {
    let listener = bind(options.bind, options.port)?;
    let address = listener
        .local_addr()
        .map_err(|error| Failure::io("listen", "the socket's address", &error))?;
    listener
        .set_nonblocking(true)
        .map_err(|error| Failure::io("listen", "a non-blocking socket", &error))?;
    let key = super::key(options)?;
    if key.is_empty() && !address.ip().is_loopback() {
        eprintln!(
            "pinrail reach: no --key: whoever reaches {address} may ask this host to move test messages"
        );
    }
    output::print(&format!("serving on {address}\n"));
    let door = Door {
        key,
        verbose: options.verbose,
        strangers: AtomicUsize::new(0),
        busy: AtomicBool::new(false),
    };
    let door = Arc::new(door);
    let (over, ended) = channel();
    let patience = Duration::from_secs(options.wait.unwrap_or(super::SERVE_WAIT));
    let mut deadline = Instant::now() + patience;
    loop {
        wait_readable(std::iter::once(&listener), TURN)?;
        while let Ok((stream, from)) = listener.accept() {
            door.open(stream, from, &over);
        }
        match next_end(&ended) {
            Some(code) if !options.stay => return Ok(code),
            Some(_) => deadline = Instant::now() + patience,
            None => {}
        }
        if !door.busy.load(Ordering::Acquire) && Instant::now() >= deadline {
            let seconds = patience.as_secs();
            return Err(Failure::new("listen", format!("nobody came within {seconds} s")));
        }
    }
}

fn next_end(ended: &Receiver<u8>) -> Option<u8> {
    ended.try_recv().ok()
}

fn bind(address: Option<IpAddr>, port: u16) -> Result<TcpListener> {
    let of = |ip: IpAddr| TcpListener::bind(SocketAddr::new(ip, port));
    let listener = match address {
        Some(ip) => of(ip),
        // Both families, or the older one where the kernel has no other.
        None => of(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| of([0, 0, 0, 0].into())),
    };
    listener.map_err(|error| {
        Failure::new("listen", format!("port {port}: {error}; --port chooses another one"))
    })
}

/// Who is let in.
struct Door {
    key: String,
    verbose: bool,
    strangers: AtomicUsize,
    busy: AtomicBool,
}

/// Somebody is being served.
struct Busy<'a>(&'a Door);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}

impl Door {
    /// Hears what somebody has to say, in a thread of its own, so that one who says nothing holds up nobody.
    fn open(self: &Arc<Self>, stream: TcpStream, from: SocketAddr, over: &Sender<u8>) {
        if self.strangers.fetch_add(1, Ordering::AcqRel) >= MOST_STRANGERS {
            self.strangers.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let (door, over) = (Arc::clone(self), over.clone());
        let thread = std::thread::Builder::new().spawn(move || {
            let mut stream = stream;
            let greeted = door.greet(&mut stream);
            door.strangers.fetch_sub(1, Ordering::AcqRel);
            match greeted {
                Ok(true) => {
                    // Whatever becomes of the session, the next one finds the door open.
                    let busy = Busy(&door);
                    let ended = session(&mut stream, door.verbose);
                    if let Err(error) = &ended {
                        eprintln!("pinrail reach: {from}: {error}");
                    }
                    drop(busy);
                    // The command may have ended already.
                    let _ = over.send(u8::from(ended.is_err()));
                }
                Ok(false) => {}
                Err(error) => eprintln!("pinrail reach: {from} is sent away: {error}"),
            }
        });
        if thread.is_err() {
            self.strangers.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Whether this is somebody to work for.
    fn greet(&self, stream: &mut TcpStream) -> std::io::Result<bool> {
        let deadline = Instant::now() + GREETING_TIME;
        stream.set_nonblocking(false)?;
        let mut greeting = [0; GREETING.len()];
        read_bytes(stream, &mut greeting, deadline)?;
        if greeting != GREETING {
            return Err(std::io::Error::other("it speaks something else"));
        }
        let why = match read(stream, LONGEST_QUESTION, deadline)? {
            Question::Hello { version, wire, key } => {
                if key != self.key {
                    Some("the key is another one: give both sides the same --key".to_owned())
                } else if wire != wire::VERSION {
                    Some(format!(
                        "pinrail {version} speaks protocol {wire} to other plugins, this is {} with protocol {}: \
                         install one version on every host",
                        env!("CARGO_PKG_VERSION"),
                        wire::VERSION
                    ))
                } else if self.busy.swap(true, Ordering::AcqRel) {
                    write(stream, &Answer::Busy, deadline)?;
                    return Err(std::io::Error::other("somebody else is asking this host"));
                } else {
                    None
                }
            }
            _ => Some("the first thing to say is hello".to_owned()),
        };
        let Some(why) = why else { return Ok(true) };
        write(stream, &Answer::Refused(why.clone()), deadline)?;
        Err(std::io::Error::other(why))
    }
}

/// The process that uses the plugin, and what it said of the host.
fn start(verbose: bool) -> Result<(Worker, Host)> {
    let exe = std::env::current_exe()
        .map_err(|error| Failure::io("start", "the path of this program", &error))?;
    let mut command = Command::new(exe);
    command.arg("reach-worker");
    if verbose {
        command.arg("--verbose");
    }
    let (variables, _) = variables_of_process();
    if !variables.iter().any(|variable| variable.name == "PINRAIL_CONNECT_TIMEOUT") {
        command.env("PINRAIL_CONNECT_TIMEOUT", CONNECT_SECONDS);
    }
    let mut worker = Worker::start(command)?;
    match worker.hear_until("init", Instant::now() + IDLE)? {
        Some(Answer::Welcome(host)) => Ok((worker, host)),
        Some(_) => Err(Failure::new("init", "the worker says something else than hello")),
        None => Err(Failure::new("init", "the plugin does not return from init")),
    }
}

/// Works for the one who asks, until he has had enough.
fn session(stream: &mut TcpStream, verbose: bool) -> Result<()> {
    let lost = |error: std::io::Error| Failure::io("session", "the one who asks", &error);
    let soon = || Instant::now() + GRACE;
    let (worker, host) = match start(verbose) {
        Ok(started) => started,
        Err(error) => {
            write(stream, &Answer::Refused(error.to_string()), soon()).map_err(lost)?;
            return Err(error);
        }
    };
    write(stream, &Answer::Welcome(host), soon()).map_err(lost)?;
    let mut worker = Some(worker);
    loop {
        let question = read(stream, LONGEST_QUESTION, Instant::now() + IDLE).map_err(lost)?;
        let (seconds, messages) = match &question {
            Question::Bye => return Ok(()),
            Question::Abandon => continue,
            Question::Hello { .. } => return Err(Failure::new("session", "hello again")),
            Question::Receive { seconds, messages, .. }
            | Question::Send { seconds, messages, .. } => {
                ((*seconds).min(IDLE.as_secs()), messages)
            }
        };
        if !messages.is_bearable() {
            let text = "that is more than a test".to_owned();
            write(stream, &Answer::Failed { text }, soon()).map_err(lost)?;
            continue;
        }
        let mut active = match worker.take() {
            Some(worker) => worker,
            // The last one died of a transfer.
            None => start(verbose)?.0,
        };
        match carry_out(stream, &mut active, &question, Duration::from_secs(seconds)) {
            Ok(()) => worker = Some(active),
            Err(Trouble::Worker(text)) => {
                active.stop();
                write(stream, &Answer::Failed { text }, soon()).map_err(lost)?;
            }
            Err(Trouble::Asker(error)) => return Err(error),
        }
    }
}

/// Why a question is not answered as it should be.
enum Trouble {
    /// The plugin's process is of no use any more.
    Worker(String),
    /// The one who asks is gone, or talks nonsense.
    Asker(Failure),
}

/// Has the worker do what was asked, and passes on what it says, and that it is to give up.
fn carry_out(
    stream: &mut TcpStream,
    worker: &mut Worker,
    question: &Question,
    time: Duration,
) -> std::result::Result<(), Trouble> {
    let stage = match question {
        Question::Receive { .. } => "receiving",
        _ => "sending",
    };
    let died = |error: Failure| Trouble::Worker(format!("the plugin's process {}", error.text()));
    let gone =
        |error: std::io::Error| Trouble::Asker(Failure::io("session", "the one who asks", &error));
    worker.tell(stage, question).map_err(died)?;
    let deadline = Instant::now() + time + GRACE;
    loop {
        while let Some(answer) = worker.hear::<Answer>(stage).map_err(died)? {
            let last = !matches!(answer, Answer::Listening { .. });
            write(stream, &answer, Instant::now() + GRACE).map_err(gone)?;
            if last {
                return Ok(());
            }
        }
        let Some(left) = deadline.checked_duration_since(Instant::now()) else {
            let seconds = (time + GRACE).as_secs();
            return Err(Trouble::Worker(format!("the plugin did not return within {seconds} s")));
        };
        let both: [BorrowedFd<'_>; 2] = [stream.as_fd(), worker.socket().as_fd()];
        wait_readable(both.iter(), left).map_err(Trouble::Asker)?;
        if is_readable(stream) {
            match read(stream, LONGEST_QUESTION, Instant::now() + GRACE).map_err(gone)? {
                Question::Abandon => worker.tell(stage, &Question::Abandon).map_err(died)?,
                _ => {
                    let text = "asks for more while something is under way";
                    return Err(Trouble::Asker(Failure::new("session", text)));
                }
            }
        }
    }
}
