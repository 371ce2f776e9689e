//! perftest's ib_write_bw as the yardstick: same library, same message size, same number of messages, same depth.

use crate::failure::{Failure, Result};
use crate::host::Fabric;
use std::io::Read as _;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const STAGE: &str = "ib_write_bw";
const LOCAL: &str = "127.0.0.1";

/// Between two looks whether the server listens or a process ended.
const LOOK: Duration = Duration::from_millis(2);

/// How to run it.
#[derive(Debug)]
pub struct Perftest<'a> {
    /// The verbs library.
    pub fabric: &'a Fabric,
    /// Device by verbs name.
    pub device: Option<String>,
    /// Messages in flight.
    pub depth: usize,
    /// Longest time one run may take.
    pub timeout: Duration,
}

impl Perftest<'_> {
    /// Bandwidth in GB/s of `count` messages of `size` bytes.
    pub fn bandwidth(&self, size: usize, count: u64) -> Result<f64> {
        let port = free_port()?;
        let deadline = Instant::now() + self.timeout;
        let mut server = Process::start(self.command(size, count, port))?;
        server.until_listening(port, deadline)?;
        let mut command = self.command(size, count, port);
        command.arg(LOCAL);
        let mut client = Process::start(command)?;
        let output = client.finish("client", deadline)?;
        server.finish("server", deadline)?;
        parse(&output, size)
    }

    fn command(&self, size: usize, count: u64, port: u16) -> Command {
        let count = count.max(5);
        let depth = (self.depth as u64).min(count);
        let mut command = Command::new("ib_write_bw");
        command.args(["-F", "--report_gbits", "-Q", "1"]);
        command.args(["-s", &size.to_string(), "-n", &count.to_string()]);
        command.args(["-t", &depth.to_string(), "-p", &port.to_string()]);
        if let Some(device) = &self.device {
            command.args(["-d", device]);
        }
        command.envs(self.fabric.environment());
        command
    }
}

/// A child that never outlives us, with both its outputs in one pipe.
struct Process {
    child: Child,
    output: std::io::PipeReader,
}

impl Process {
    fn start(mut command: Command) -> Result<Self> {
        let (output, theirs) =
            std::io::pipe().map_err(|error| Failure::io(STAGE, "pipe", &error))?;
        let errors = theirs.try_clone().map_err(|error| Failure::io(STAGE, "pipe", &error))?;
        command.stdin(Stdio::null()).stdout(theirs).stderr(errors);
        let child = command.spawn().map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Failure::new(
                STAGE,
                "the program is not installed (Debian and Ubuntu: apt install perftest)",
            ),
            _ => Failure::io(STAGE, "start", &error),
        })?;
        Ok(Self { child, output })
    }

    /// The server prints into a buffered pipe, so that it listens is read from the kernel.
    fn until_listening(&mut self, port: u16, deadline: Instant) -> Result<()> {
        loop {
            if listens(port) {
                return Ok(());
            }
            if let Ok(Some(_)) = self.child.try_wait() {
                return self.finish("server", deadline).map(|_| ());
            }
            if Instant::now() > deadline {
                return Err(Failure::new(STAGE, "the server does not listen"));
            }
            std::thread::sleep(LOOK);
        }
    }

    fn finish(&mut self, role: &str, deadline: Instant) -> Result<String> {
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() > deadline => {
                    return Err(Failure::new(STAGE, format!("the {role} takes too long")));
                }
                Ok(None) => std::thread::sleep(LOOK),
                Err(error) => return Err(Failure::io(STAGE, role, &error)),
            }
        };
        // The report is a few hundred bytes, far below a pipe's capacity, so the child never waited for us.
        let mut text = Vec::new();
        self.output
            .read_to_end(&mut text)
            .map_err(|error| Failure::io(STAGE, "its output", &error))?;
        let text = String::from_utf8_lossy(&text).into_owned();
        if status.success() {
            return Ok(text);
        }
        let reason =
            text.lines().map(str::trim).rfind(|line| !line.is_empty() && !line.starts_with("---"));
        Err(Failure::new(STAGE, format!("the {role} failed: {}", reason.unwrap_or("no output"))))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // Gone in the meantime is as good as killed.
            let _ = self.child.kill().and_then(|()| self.child.wait());
        }
    }
}

fn free_port() -> Result<u16> {
    TcpListener::bind((LOCAL, 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|error| Failure::io(STAGE, "a free TCP port", &error))
}

/// Whether a socket of this network namespace listens on `port` (state 0A in the kernel's tables).
fn listens(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|path| {
        std::fs::read_to_string(path).is_ok_and(|table| {
            table.lines().skip(1).any(|line| {
                let mut fields = line.split_whitespace().skip(1);
                let local = fields.next().and_then(|local| local.rsplit(':').next());
                let state = fields.nth(1);
                local.and_then(|hex| u16::from_str_radix(hex, 16).ok()) == Some(port)
                    && state == Some("0A")
            })
        })
    })
}

/// The average of the row for `size`, turned from Gb/s into GB/s. The row is the one whose first number is the size and
/// which has at least four columns; everything else perftest prints around it differs between versions.
fn parse(output: &str, size: usize) -> Result<f64> {
    let row = output.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let numbers = fields.len() >= 4 && fields.iter().all(|field| field.parse::<f64>().is_ok());
        (numbers && fields[0].parse() == Ok(size)).then(|| fields[3].parse::<f64>().ok()).flatten()
    });
    match row {
        Some(gbits) if gbits > 0.0 => Ok(gbits / 8.0),
        _ => {
            Err(Failure::new(STAGE, format!("no result for {size} bytes in its output:\n{output}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    const OUTPUT: &str = "
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : softrnic0
 TX depth        : 16
 local address: LID 0000 QPN 0x0011 PSN 0x7d3e8e RKey 0x000201 VAddr 0x007f2c14a00000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    100              72.53              64.00  \t\t   0.007629
---------------------------------------------------------------------------------------
";

    #[test]
    fn finds_the_average_in_the_row_of_the_size() {
        assert_eq!(parse(OUTPUT, 1 << 20).expect("a row"), 8.0);
        assert!(parse(OUTPUT, 1 << 21).is_err());
        assert!(parse("", 8).is_err());
    }
}
