//! What the one who asks and the responders say to each other over TCP: a greeting, then frames of JSON with a length in
//! front. Every read has a deadline and a bound, because anybody may be at the other end.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The first bytes of a connection: who speaks, and the version of what follows.
pub const GREETING: [u8; 8] = *b"PRREACH1";

/// The port where nobody names one.
pub const PORT: u16 = 17473;

/// No frame to a responder is longer.
pub const LONGEST_QUESTION: usize = 64 << 10;

/// No frame from one is longer.
pub const LONGEST_ANSWER: usize = 1 << 20;

/// Shortest time that a system call may wait: zero would mean for ever.
const TICK: Duration = Duration::from_millis(1);

/// What a handle is on its way.
pub type HandleBytes = Vec<u8>;

/// Messages of one transfer: their sizes and what their bytes follow from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Messages {
    /// Sizes, in order.
    pub sizes: Vec<usize>,
    /// Makes the bytes of each transfer others.
    pub key: u64,
}

impl Messages {
    /// Largest message, and most of them, that a responder takes part in.
    const MOST: (usize, usize) = (16 << 20, 64);

    /// Whether a responder would do it.
    pub fn is_bearable(&self) -> bool {
        self.sizes.len() <= Self::MOST.1 && self.sizes.iter().all(|size| *size <= Self::MOST.0)
    }
}

/// To a responder.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Question {
    /// The first one.
    Hello { version: String, wire: u16, key: String },
    /// Receive on a rail. Answers: [`Answer::Listening`], then [`Answer::Done`] or [`Answer::Failed`].
    Receive { rail: i32, messages: Messages, seconds: u64 },
    /// Send from a rail to a handle. Answer: [`Answer::Done`] or [`Answer::Failed`].
    Send { rail: i32, handle: HandleBytes, messages: Messages, seconds: u64 },
    /// The other end failed: give up what is under way, which then fails.
    Abandon,
    /// That was all.
    Bye,
}

/// From a responder.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// To [`Question::Hello`].
    Welcome(Host),
    /// It will not speak to this one.
    Refused(String),
    /// It works for somebody else; later perhaps.
    Busy,
    /// It listens there.
    Listening { handle: HandleBytes },
    /// The messages went through, in so many microseconds.
    Done { micros: u64 },
    /// They did not.
    Failed { text: String },
}

/// What a responder says of its host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Its name for itself.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Version of pinrail.
    pub version: String,
    /// Version of what plugins say to each other.
    pub wire: u16,
    /// Its rails.
    pub rails: Vec<Rail>,
    /// Ports that are left out, each with its reason.
    pub left_out: Vec<String>,
    /// Why there are no rails.
    pub error: Option<String>,
}

/// A port that the plugin uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rail {
    /// `device:port`.
    pub label: String,
    /// Its GID, with index.
    pub address: String,
    /// Mb/s.
    pub mbps: u32,
}

/// Writes a frame.
pub fn write(stream: &mut TcpStream, what: &impl Serialize, deadline: Instant) -> io::Result<()> {
    let text = serde_json::to_vec(what)?;
    let length = u32::try_from(text.len()).map_err(|_| io::Error::other("too long"))?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend(text);
    write_bytes(stream, &frame, deadline)
}

/// Writes bytes.
pub fn write_bytes(stream: &mut TcpStream, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match stream.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => rest = &rest[count..],
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads a frame of at most `longest` bytes.
pub fn read<T: DeserializeOwned>(
    stream: &mut TcpStream,
    longest: usize,
    deadline: Instant,
) -> io::Result<T> {
    let mut length = [0; 4];
    read_bytes(stream, &mut length, deadline)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > longest {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("a frame of {length} bytes")));
    }
    let mut text = vec![0; length];
    read_bytes(stream, &mut text, deadline)?;
    serde_json::from_slice(&text).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

/// Fills a buffer.
pub fn read_bytes(stream: &mut TcpStream, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether something, or the end, can be read.
pub fn is_readable(stream: &TcpStream) -> bool {
    let mut byte = [0];
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut byte));
    let restored = stream.set_nonblocking(false);
    restored.is_err() || !peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn left(deadline: Instant) -> io::Result<Duration> {
    deadline
        .checked_duration_since(Instant::now())
        .map(|left| left.max(TICK))
        .ok_or_else(|| io::Error::new(ErrorKind::TimedOut, "no answer in time"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(300)
    }

    #[test]
    fn a_frame_arrives_whole() {
        let (mut one, mut other) = pair();
        let rail = Rail { label: "mlx5_0:1".into(), address: "3 10.0.0.1".into(), mbps: 400_000 };
        let host = Host { name: "node1".into(), rails: vec![rail], ..Host::default() };
        write(&mut one, &Answer::Welcome(host.clone()), later()).unwrap();
        match read(&mut other, LONGEST_ANSWER, later()).unwrap() {
            Answer::Welcome(seen) => assert_eq!(seen, host),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn frames_are_bounded_and_nothing_is_waited_for_too_long() {
        let (mut one, mut other) = pair();
        write_bytes(&mut one, &u32::MAX.to_le_bytes(), later()).unwrap();
        let error = read::<Question>(&mut other, LONGEST_QUESTION, later()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        // A length, and never what it promises.
        write_bytes(&mut one, &8u32.to_le_bytes(), later()).unwrap();
        let soon = Instant::now() + Duration::from_millis(20);
        let error = read::<Question>(&mut other, LONGEST_QUESTION, soon).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        write_bytes(&mut one, b"nonsense", later()).unwrap();
        drop(one);
        let error = read::<Question>(&mut other, LONGEST_QUESTION, later()).unwrap_err();
        assert_ne!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn what_is_asked_for_has_a_limit() {
        let of = |sizes: Vec<usize>| Messages { sizes, key: 0 }.is_bearable();
        assert!(of(vec![1, 4096]) && of(vec![16 << 20; 64]));
        assert!(!of(vec![usize::MAX]) && !of(vec![1; 65]));
    }
}
