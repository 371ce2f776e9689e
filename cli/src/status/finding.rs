//! What is wrong with the connections of a process.

use super::process::{Process, Shown};
use super::{FINE, PROBLEMS, UNKNOWN};
use nccl_net_pinrail::memory::GateState;
use nccl_net_pinrail::memory::diagnosis::Direction;
use nccl_net_pinrail::memory::status::{End, Status, Wait};

/// One process, with what was found.
#[derive(Debug)]
pub struct Finding<'a> {
    /// The process.
    pub process: &'a Process,
    /// What is wrong, each with the number of the end that it concerns.
    pub problems: Vec<(u64, String)>,
    /// Why the rest may not be the truth.
    pub doubts: Vec<String>,
}

impl<'a> Finding<'a> {
    /// Looks at everything that was read. `stalled`: seconds after which a wait is a problem.
    pub fn of(process: &'a Process, stalled: f64) -> Self {
        let (mut problems, mut doubts) = (Vec::new(), Vec::new());
        match &process.shown {
            Shown::Nothing => {}
            Shown::Unreadable(reason) => doubts.push(reason.clone()),
            Shown::Status(status) => {
                for end in &status.ends {
                    let found = of_end(status, end, stalled);
                    problems.extend(found.into_iter().map(|text| (end.number, text)));
                }
                doubts = of_status(status, process.stopped);
            }
        }
        Self { process, problems, doubts }
    }

    /// The verdict.
    pub fn code(&self) -> u8 {
        match (self.problems.is_empty(), self.doubts.is_empty()) {
            (false, _) => PROBLEMS,
            (true, false) => UNKNOWN,
            (true, true) => FINE,
        }
    }
}

fn of_status(status: &Status, stopped: bool) -> Vec<String> {
    let mut doubts = Vec::new();
    if let Some(ago) = status.overdue() {
        let why = if stopped {
            "the process is stopped"
        } else {
            "the process gets no time, or its event thread hangs"
        };
        doubts.push(format!(
            "what it waits for was looked at {} ago, not within {}: {why}. Counters are those of now",
            seconds(ago),
            seconds(status.every)
        ));
    }
    if status.left_out > 0 {
        doubts.push(format!(
            "{} more ends found no room in the file and are not shown",
            status.left_out
        ));
    }
    if status.unsteady > 0 {
        doubts.push(format!(
            "{} ends were being made, or make no sense, and are not shown",
            status.unsteady
        ));
    }
    doubts
}

fn of_end(status: &Status, end: &End, stalled: f64) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(error) = &end.error {
        problems.push(format!("failed: {}", error.message));
    } else if end.is_over() && !end.is_closed() {
        problems.push(format!("{}: {}", end.state.name(), meaning(end.state)));
    }
    for rail in end.rails.iter().filter(|rail| rail.stopped > 0) {
        problems.push(format!(
            "{} of {} queue pairs on {} were given up; the others go on",
            rail.stopped, rail.lanes, rail.name
        ));
    }
    let waited = status.waited(end).filter(|_| !end.is_over() || end.is_closed());
    if let Some(nanos) = waited.filter(|nanos| *nanos as f64 >= stalled * 1e9) {
        problems.push(format!("{} for {}, and nothing moved", waits(end), seconds(nanos)));
    }
    problems
}

/// What an end waits for, and who has to do something.
pub fn waits(end: &End) -> String {
    let receives = end.receives.saturating_sub(end.completed);
    match (end.wait, end.direction) {
        (Wait::Nothing, _) => "waits for nothing".into(),
        (Wait::Credit, _) => "waits for credit: the peer has not posted the receive".into(),
        (Wait::Completion, Direction::Send) => format!(
            "waits for completion of {}: the network or the peer's device",
            counted(receives, "send", "sends")
        ),
        (Wait::Completion, Direction::Receive) => {
            format!(
                "waits for completion of {}: the peer's data",
                counted(receives, "receive", "receives")
            )
        }
        (Wait::Flush, _) => format!(
            "waits for {}: this host's device and its way to the GPU",
            counted(end.flushes.saturating_sub(end.flushed), "flush", "flushes")
        ),
    }
}

fn meaning(state: GateState) -> &'static str {
    match state {
        GateState::PeerGone => "the peer process is gone",
        GateState::PeerFailed => "the other end failed, and said so",
        GateState::DeviceFailed => "the device reported a fatal error",
        GateState::QueueFailed(_) => "the device reported an error of a queue",
        GateState::NoCredit => "the peer posted no first receive in time",
        GateState::Forked => "its board makes no sense",
        _ => "see the process's log",
    }
}

/// A number of things.
pub fn counted(number: u64, one: &str, more: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { more })
}

/// A time for people.
pub fn seconds(nanos: u64) -> String {
    let seconds = nanos as f64 / 1e9;
    if seconds < 10.0 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") }
}
