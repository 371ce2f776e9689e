//! What the test programs share: the built library, real clients with a deadline, and thin wrappers of the calls.
#![allow(dead_code)] // Each test program uses a part.

pub mod peer;
pub mod verbs;

use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The directory with `libibverbs.so.1`: SOFTRNIC_LIB_DIR, or linked here once.
pub fn lib_dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        if let Some(dir) = std::env::var_os("SOFTRNIC_LIB_DIR") {
            return PathBuf::from(dir);
        }
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
        let out =
            PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("lib-{}", std::process::id()));
        let status = Command::new(manifest.join("link.sh")).arg(profile).arg(&out).status();
        assert!(status.expect("link.sh starts").success(), "link.sh failed");
        out
    })
}

/// A fabric name that nobody else uses.
pub fn fabric(tag: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{tag}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A TCP port that was free a moment ago, outside the range that the kernel hands out by itself.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..1000 {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 12_000 + (std::process::id().wrapping_mul(37).wrapping_add(step)) % 18_000;
        let port = u16::try_from(port).expect("below 65536");
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
    panic!("no free TCP port");
}

/// A command that uses our library on a fabric.
pub fn client(program: &str, fabric: &str) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", lib_dir()).env("SOFTRNIC_FABRIC", fabric);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A child process that is killed when the test ends.
pub struct Guarded(pub Child);

impl Drop for Guarded {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for the end of a process, at most until the deadline; returns success and its output.
pub fn finish(mut child: Guarded, deadline: Instant) -> (bool, String) {
    let mut pipes = (child.0.stdout.take(), child.0.stderr.take());
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(out) = &mut pipes.0 {
            out.read_to_string(&mut text).expect("UTF-8 on stdout");
        }
        if let Some(err) = &mut pipes.1 {
            err.read_to_string(&mut text).expect("UTF-8 on stderr");
        }
        text
    });
    let status = loop {
        if let Some(status) = child.0.try_wait().expect("wait") {
            break Some(status);
        }
        if Instant::now() > deadline {
            break None;
        }
        std::thread::park_timeout(Duration::from_millis(5));
    };
    drop(child);
    let text = reader.join().expect("reader");
    (status.is_some_and(|s| s.success()), text)
}

/// Whether a TCP port is in the listening state.
fn listens(port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|path| {
        let table = std::fs::read_to_string(path).unwrap_or_default();
        table.lines().any(|line| {
            let mut fields = line.split_whitespace();
            fields.nth(1).is_some_and(|local| local.ends_with(&wanted))
                && fields.nth(1) == Some("0A")
        })
    })
}

/// Runs a client/server pair over 127.0.0.1: the client starts when the server listens. Returns both outputs.
pub fn pair(program: &str, args: &[&str], env: &[(&str, &str)]) -> (String, String) {
    let fabric = fabric(program);
    let port = free_port();
    let deadline = Instant::now() + Duration::from_secs(120);
    let command = || {
        let mut command = client(program, &fabric);
        command.args(args).arg("-p").arg(port.to_string()).envs(env.iter().copied());
        command
    };
    let mut server = Guarded(command().spawn().unwrap_or_else(|e| panic!("{program} starts: {e}")));
    while !listens(port) {
        let ended = server.0.try_wait().expect("wait");
        if ended.is_some() || Instant::now() > deadline {
            let (_, text) = finish(server, Instant::now());
            panic!("{program} server ended before listening: {text}");
        }
        std::thread::park_timeout(Duration::from_millis(2));
    }
    let client = Guarded(command().arg("127.0.0.1").spawn().expect("client starts"));
    let (client_ok, client_text) = finish(client, deadline);
    let (server_ok, server_text) = finish(server, deadline);
    assert!(
        client_ok && server_ok,
        "{program} {args:?}\nclient: {client_text}\nserver: {server_text}"
    );
    (client_text, server_text)
}

/// Compiles a C program of `tests/c` against the system's header and our library.
pub fn compile(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "{name}-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ));
    let status = Command::new("cc")
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .arg(&out)
        .arg(manifest.join("tests/c").join(format!("{name}.c")))
        .arg("-I")
        .arg(manifest.join("include"))
        .arg("-L")
        .arg(lib_dir())
        .args(["-libverbs", "-ldl", "-lpthread"])
        .status()
        .expect("cc starts");
    assert!(status.success(), "compiling {name}.c");
    out
}
