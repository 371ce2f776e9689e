//! Whoever else comes to the port of a responder, or to the one who asks, does no harm.

use super::{Report, Responder, fabric, plan};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

/// A greeting, as the protocol has it.
const GREETING: &[u8] = b"PRREACH1";

fn frame(json: &str) -> Vec<u8> {
    let length = u32::try_from(json.len()).unwrap();
    [&length.to_le_bytes(), json.as_bytes()].concat()
}

fn hello(wire: u16) -> Vec<u8> {
    frame(&format!(r#"{{"Hello":{{"version":"0.1.0","wire":{wire},"key":""}}}}"#))
}

/// Says something and hears all that comes back until the connection ends.
fn say(address: &str, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let mut heard = Vec::new();
    // It may be sent away before it has said all.
    let said = stream.write_all(bytes).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
    let _ = said.and_then(|()| stream.read_to_end(&mut heard));
    String::from_utf8_lossy(&heard).into_owned()
}

#[test]
fn strangers_on_the_port_are_harmless() {
    let fabric = fabric();
    let hosts = ["a", "b"].map(|name| Responder::of(&fabric, name, &[], &[]));
    let address = hosts[0].address.as_str();
    for bytes in [
        b"".to_vec(),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![0xff; 100_000],
        GREETING.to_vec(),
        [GREETING, &u32::MAX.to_le_bytes()].concat(),
        [GREETING, &frame("{")[..]].concat(),
        [GREETING, &frame("[1,2,3]")[..]].concat(),
        [GREETING, &frame("\"Bye\"")[..]].concat(),
    ] {
        let heard = say(address, &bytes);
        assert!(heard.is_empty() || heard.contains("Refused"), "{heard}");
    }
    // Some say nothing and stay, more than are listened to at once.
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    let report = Report::ask(&fabric, &[address, &hosts[1].address], &["--wait", "300"]);
    assert_eq!((report.code, report.transfers("reached").len()), (0, 8));
    drop(silent);
}

/// One who knows the protocol gets no further than to move a few messages.
#[test]
fn what_is_asked_for_is_bounded() {
    let fabric = fabric();
    let host = Responder::of(&fabric, "a", &[], &["--stay"]);
    let messages = |sizes: &str| format!(r#""messages":{{"sizes":{sizes},"key":0}},"seconds":5"#);
    let zeroes = vec!["0"; 128].join(",");
    let mut conversation = Conversation::begin(&host.address);
    for (question, answer) in [
        (
            format!(r#"{{"Receive":{{"rail":0,{}}}}}"#, messages("[99999999999]")),
            "more than a test",
        ),
        (
            format!(r#"{{"Send":{{"rail":0,"handle":[1,2],{}}}}}"#, messages("[1]")),
            "a handle of 2 bytes",
        ),
        (
            format!(r#"{{"Send":{{"rail":0,"handle":[{zeroes}],{}}}}}"#, messages("[1]")),
            "not made by pinrail",
        ),
        (format!(r#"{{"Send":{{"rail":99,"handle":[{zeroes}],{}}}}}"#, messages("[1]")), "Failed"),
        (format!(r#"{{"Receive":{{"rail":-1,{}}}}}"#, messages("[1]")), "there is no device -1"),
    ] {
        conversation.say(&question);
        let heard = conversation.hear();
        assert!(heard.contains(answer), "{answer}: {heard}");
    }
    conversation.say("\"Bye\"");
    // Versions are compared before anything is started.
    let wire = nccl_net_pinrail::transport::wire::VERSION;
    let heard = say(&host.address, &[GREETING, &hello(wire + 1)].concat());
    assert!(heard.contains("Refused") && heard.contains("install one version"), "{heard}");
}

#[test]
fn a_key_keeps_others_away() {
    let fabric = fabric();
    let hosts =
        ["a", "b"].map(|name| Responder::of(&fabric, name, &[], &["--key", "job7", "--stay"]));
    let addresses = [hosts[0].address.as_str(), &hosts[1].address];
    let report = Report::ask(&fabric, &addresses, &[]);
    assert_eq!(report.code, 2);
    assert!(report.findings("unknown")[0].contains("it refuses: the key is another one"));
    let file = plan("reach.key", "job7\n");
    let report = Report::ask(&fabric, &addresses, &["--key", &format!("@{}", file.display())]);
    assert_eq!(report.code, 0);
    // They stay, and serve the next one as well.
    assert_eq!(Report::ask(&fabric, &addresses, &["--key", "job7"]).code, 0);
}

/// Something else listens where a responder should.
#[test]
fn a_stranger_in_place_of_a_responder_is_told() {
    let fabric = fabric();
    let host = Responder::of(&fabric, "a", &[], &[]);
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let stranger = std::thread::spawn(move || {
        // As often as it comes, until it gives up.
        while let Ok((mut stream, _)) = other.accept() {
            let mut byte = [0];
            if stream.read(&mut byte).is_ok_and(|count| count == 1 && byte[0] == b'!') {
                return;
            }
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let report = Report::ask(&fabric, &[&host.address, &address], &["--wait", "1"]);
    assert_eq!(report.code, 2);
    let unknown = report.findings("unknown");
    assert!(unknown[0].contains(&format!("{address} does not answer")), "{unknown:?}");
    TcpStream::connect(&address).unwrap().write_all(b"!").unwrap();
    stranger.join().unwrap();
}

/// A conversation frame by frame.
struct Conversation(TcpStream);

impl Conversation {
    fn begin(address: &str) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        let wire = nccl_net_pinrail::transport::wire::VERSION;
        stream.write_all(&[GREETING, &hello(wire)].concat()).unwrap();
        let mut conversation = Self(stream);
        assert!(conversation.hear().contains("Welcome"));
        conversation
    }

    fn say(&mut self, question: &str) {
        self.0.write_all(&frame(question)).unwrap();
    }

    fn hear(&mut self) -> String {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).unwrap();
        let mut text = vec![0; u32::from_le_bytes(length) as usize];
        self.0.read_exact(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }
}

const RECEIVE: &str = r#"{"Receive":{"rail":0,"messages":{"sizes":[1],"key":0},"seconds":300}}"#;

/// A responder whose plugin's process dies lives on, says so, and starts another one.
#[test]
fn a_plugin_that_dies_is_a_failed_transfer() {
    let fabric = fabric();
    let host = Responder::of(&fabric, "a", &[], &[]);
    let pid = host.child.id();
    assert_eq!(children(pid), [] as [u32; 0], "no process of the plugin while nobody asks");
    let mut conversation = Conversation::begin(&host.address);
    conversation.say(RECEIVE);
    assert!(conversation.hear().contains("Listening"));
    let workers = children(pid);
    assert_eq!(workers.len(), 1);
    let killed = Command::new("kill").args(["-9", &workers[0].to_string()]).status().unwrap();
    assert!(killed.success());
    let heard = conversation.hear();
    assert!(heard.contains("process was killed by signal 9 during receiving"), "{heard}");
    conversation.say(RECEIVE);
    assert!(conversation.hear().contains("Listening"));
    assert_ne!(children(pid), workers);
    // The other end failed.
    conversation.say("\"Abandon\"");
    let heard = conversation.hear();
    assert!(heard.contains("given up, because the other end failed"), "{heard}");
    conversation.say("\"Bye\"");
    assert_eq!(host.end(), Some(0));
}

/// Who asks and goes away leaves nothing behind, and one at a time is served.
#[test]
fn one_who_vanishes_leaves_nothing_behind() {
    let fabric = fabric();
    let host = Responder::of(&fabric, "a", &[], &[]);
    let mut conversation = Conversation::begin(&host.address);
    conversation.say(RECEIVE);
    assert!(conversation.hear().contains("Listening"));
    let wire = nccl_net_pinrail::transport::wire::VERSION;
    let heard = say(&host.address, &[GREETING, &hello(wire)].concat());
    assert!(heard.contains("Busy"), "{heard}");
    let workers = children(host.child.id());
    drop(conversation);
    assert_eq!(host.end(), Some(1));
    assert_eq!(workers.len(), 1);
    assert!(!std::path::Path::new(&format!("/proc/{}", workers[0])).exists());
}

/// The children of all threads of a process.
fn children(parent: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).expect("a process");
    let of = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("children")).ok()
    };
    let texts: Vec<_> = tasks.filter_map(of).collect();
    texts
        .iter()
        .flat_map(|text| text.split_whitespace())
        .filter_map(|pid| pid.parse().ok())
        .collect()
}
