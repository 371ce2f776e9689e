//! The one who asks: connections to the responders, and transfers between two of them.

use super::protocol::{
    Answer, GREETING, Host, LONGEST_ANSWER, Messages, PORT, Question, is_readable, read, write,
    write_bytes,
};
use nccl_net_pinrail::transport::wire;
use pinrail_client::worker::wait_readable;
use std::io;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

/// What a responder may take beyond the time of a transfer: its own grace is shorter.
const GRACE: Duration = Duration::from_secs(30);
/// Pause between two attempts to reach a responder that has not started yet.
const RETRY: Duration = Duration::from_millis(200);

/// Where a responder is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// As it was named.
    pub asked: String,
    host: String,
    port: u16,
}

impl Place {
    /// `host`, `host:port`, `[address]:port` or an address.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mistake =
            || format!("{text:?} is no host such as node1, node1:{PORT} or [fe80::1]:{PORT}");
        let number =
            |port: &str| port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(mistake);
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) = rest.split_once(']').ok_or_else(mistake)?;
            match rest.strip_prefix(':') {
                Some(port) => (host, number(port)?),
                None if rest.is_empty() => (host, PORT),
                None => return Err(mistake()),
            }
        } else {
            match text.split_once(':') {
                // An address of version 6 without brackets.
                Some((_, rest)) if rest.contains(':') => (text, PORT),
                Some((host, port)) => (host, number(port)?),
                None => (text, PORT),
            }
        };
        let blank = |c: char| c.is_whitespace() || c.is_control();
        if host.is_empty() || host.contains(blank) {
            return Err(mistake());
        }
        Ok(Self { asked: text.to_owned(), host: host.to_owned(), port })
    }
}

/// A responder that is there.
#[derive(Debug)]
pub struct Responder {
    stream: TcpStream,
    /// What it says of its host.
    pub host: Host,
    /// Why it can be asked nothing any more.
    pub lost: Option<String>,
}

/// What came of one transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It went through, in so many microseconds from connecting to closing.
    Reached { micros: u64 },
    /// It did not; what either end says.
    Failed { sender: Option<String>, receiver: Option<String> },
    /// It was not tried.
    Untried(String),
}

impl Responder {
    /// Reaches a responder, trying again until the deadline, for it may not have started.
    pub fn reach(place: &Place, key: &str, deadline: Instant) -> Result<Self, String> {
        let mut last;
        loop {
            match Self::try_to_reach(place, key, deadline) {
                Ok(Ok(responder)) => return Ok(responder),
                Ok(Err(refused)) => return Err(format!("it refuses: {refused}")),
                Err(error) => last = error.to_string(),
            }
            if Instant::now() + RETRY >= deadline {
                return Err(last);
            }
            std::thread::sleep(RETRY);
        }
    }

    fn try_to_reach(
        place: &Place,
        key: &str,
        deadline: Instant,
    ) -> io::Result<Result<Self, String>> {
        let mut stream = connect(place, deadline)?;
        stream.set_nodelay(true)?;
        write_bytes(&mut stream, &GREETING, deadline)?;
        let hello = Question::Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            wire: wire::VERSION,
            key: key.to_owned(),
        };
        write(&mut stream, &hello, deadline)?;
        // From here on somebody is there, and init of the plugin takes as long as it does.
        match read(&mut stream, LONGEST_ANSWER, deadline + GRACE)? {
            Answer::Welcome(host) if host.wire == wire::VERSION => {
                Ok(Ok(Self { stream, host, lost: None }))
            }
            Answer::Welcome(host) => Ok(Err(format!(
                "pinrail {} speaks protocol {}, this one {}: install one version on every host",
                host.version,
                host.wire,
                wire::VERSION
            ))),
            Answer::Refused(why) => Ok(Err(why)),
            Answer::Busy => Err(io::Error::other("its responder works for somebody else")),
            _ => Ok(Err("it answers something else than hello".into())),
        }
    }

    fn tell(&mut self, question: &Question) -> bool {
        match write(&mut self.stream, question, Instant::now() + GRACE) {
            Ok(()) => true,
            Err(error) => {
                self.lost = Some(format!("its responder is gone: {error}"));
                false
            }
        }
    }

    fn hear(&mut self, deadline: Instant) -> Option<Answer> {
        match read(&mut self.stream, LONGEST_ANSWER, deadline) {
            Ok(answer) => Some(answer),
            Err(error) => {
                self.lost = Some(format!("its responder is gone: {error}"));
                None
            }
        }
    }

    /// Says good-bye, so that the responder ends in order.
    pub fn close(mut self) {
        self.tell(&Question::Bye);
    }
}

fn connect(place: &Place, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (place.host.as_str(), place.port).to_socket_addrs()? {
        let left = deadline
            .checked_duration_since(Instant::now())
            .ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))?;
        match TcpStream::connect_timeout(&address, left.max(RETRY)) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// One transfer, from a rail of one host to a rail of another.
pub fn transfer(
    from: (&mut Responder, usize),
    to: (&mut Responder, usize),
    messages: &Messages,
    seconds: u64,
) -> Outcome {
    let ((sender, source), (receiver, target)) = (from, to);
    if let Some(why) = sender.lost.as_ref().or(receiver.lost.as_ref()) {
        return Outcome::Untried(why.clone());
    }
    let deadline = Instant::now() + Duration::from_secs(seconds) + GRACE;
    let rail = |rail: usize| i32::try_from(rail).unwrap_or(i32::MAX);
    let failed = |receiver: &Responder, text: Option<String>| Outcome::Failed {
        sender: None,
        receiver: text.or_else(|| receiver.lost.clone()),
    };
    let messages = messages.clone();
    let question = Question::Receive { rail: rail(target), messages: messages.clone(), seconds };
    if !receiver.tell(&question) {
        return failed(receiver, None);
    }
    let handle = match receiver.hear(deadline) {
        Some(Answer::Listening { handle }) => handle,
        Some(Answer::Failed { text }) => return failed(receiver, Some(text)),
        other => {
            let text = other.map(|_| "answers something else than where it listens".to_owned());
            receiver.lost = receiver.lost.take().or_else(|| text.clone());
            return failed(receiver, text);
        }
    };
    sender.tell(&Question::Send { rail: rail(source), handle, messages, seconds });
    both(sender, receiver, deadline)
}

/// Waits for what both ends have to say; the one that is still at it is told when the other failed.
fn both(sender: &mut Responder, receiver: &mut Responder, deadline: Instant) -> Outcome {
    let mut said: [Option<Result<u64, String>>; 2] = [None, None];
    let mut given_up = false;
    loop {
        let ends = [&mut *sender, &mut *receiver];
        for (end, said) in ends.into_iter().zip(&mut said) {
            if let Some(why) = end.lost.as_ref().filter(|_| said.is_none()) {
                *said = Some(Err(why.clone()));
            }
        }
        if let [Some(sent), Some(received)] = said {
            return match (sent, received) {
                (Ok(micros), Ok(_)) => Outcome::Reached { micros },
                (sent, received) => {
                    Outcome::Failed { sender: sent.err(), receiver: received.err() }
                }
            };
        }
        let any_failed = said.iter().flatten().any(Result::is_err);
        if any_failed && !std::mem::replace(&mut given_up, true) {
            let end = if said[0].is_none() { &mut *sender } else { &mut *receiver };
            end.tell(&Question::Abandon);
        }
        let waiting: Vec<_> = [&sender.stream, &receiver.stream]
            .into_iter()
            .zip(&said)
            .filter(|(_, said)| said.is_none())
            .map(|(stream, _)| stream)
            .collect();
        let left = deadline.saturating_duration_since(Instant::now());
        if let Err(error) = wait_readable(waiting.into_iter(), left) {
            return Outcome::Untried(error.to_string());
        }
        let late = Instant::now() >= deadline;
        let ends = [&mut *sender, &mut *receiver];
        for (end, said) in ends.into_iter().zip(&mut said).filter(|(_, said)| said.is_none()) {
            if late {
                end.lost = Some("its responder does not answer in time".to_owned());
            } else if is_readable(&end.stream) {
                *said = match end.hear(deadline) {
                    Some(Answer::Done { micros }) => Some(Ok(micros)),
                    Some(Answer::Failed { text }) => Some(Err(text)),
                    Some(_) => {
                        end.lost = Some("its responder talks out of turn".to_owned());
                        None
                    }
                    None => None,
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_named_as_people_name_them() {
        let place = |text: &str| Place::parse(text).map(|place| (place.host, place.port));
        assert_eq!(place("node1"), Ok(("node1".into(), PORT)));
        assert_eq!(place("node1:99"), Ok(("node1".into(), 99)));
        assert_eq!(place("10.0.0.1:99"), Ok(("10.0.0.1".into(), 99)));
        assert_eq!(place("fe80::1"), Ok(("fe80::1".into(), PORT)));
        assert_eq!(place("[fe80::1]"), Ok(("fe80::1".into(), PORT)));
        assert_eq!(place("[fe80::1]:99"), Ok(("fe80::1".into(), 99)));
        for bad in
            ["", ":99", "node1:", "node1:0", "node1:x", "node1:99999", "[fe80::1", "[a]b", "a b"]
        {
            assert!(Place::parse(bad).is_err(), "{bad:?}");
        }
    }
}
