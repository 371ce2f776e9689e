//! The figures: their names in the record, their budgets, and what the known peers cost.

use super::memory::Memory;
use super::phases::{Kind, Phase};
use crate::failure::{Failure, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Peers that were measured the same way: the stock transport of two NCCL releases and the rdma-sharp plugin.
pub const PEERS: [&str; 3] = ["stock 2.30.7", "stock 2.21.5", "rdma-sharp"];

const MESSAGE: Reference = Reference { budget: Some(400.0), peers: [1198.0, 829.0, 1181.0] };
const IDLE: Reference = Reference { budget: Some(25.0), peers: [96.0, 53.0, 82.0] };
const FLUSH: Reference = Reference { budget: Some(150.0), peers: [346.0, 231.0, 344.0] };
const POSTS: Reference = Reference { budget: Some(3.0), peers: [3.0, 3.0, 3.0] };
const NONE: Reference = Reference { budget: None, peers: [0.0; 3] };
const STOCK_SENDER: f64 = 259_488.0;
const STOCK_RECEIVER: f64 = 277_344.0;

/// What a figure is compared with; a peer of 0 was not measured.
#[derive(Debug, Clone, Copy)]
struct Reference {
    budget: Option<f64>,
    peers: [f64; 3],
}

/// One measured number.
#[derive(Debug, Clone)]
pub struct Figure {
    /// Name in the record and in the table.
    pub name: String,
    /// The value.
    pub value: f64,
    reference: Reference,
}

impl Figure {
    /// Whether it is over its budget.
    pub fn over_budget(&self) -> bool {
        self.reference.budget.is_some_and(|budget| self.value > budget)
    }
}

/// The figures of one connection shape, from its phases and the instructions counted in both runs.
pub fn of_phases(qps: u64, phases: &[Phase], whole: &[u64], probed: &[u64]) -> Vec<Figure> {
    let mut figures = Vec::new();
    let qp = if qps == 1 { "1 QP".to_owned() } else { format!("{qps} QPs") };
    for ((phase, &whole), &probed) in phases.iter().zip(whole).zip(probed) {
        if phase.count == 0 {
            continue;
        }
        let size = crate::size::show(phase.size);
        let each = |instructions: u64| instructions as f64 / phase.count as f64;
        let mut figure = |what: &str, value: f64, reference: Reference| {
            figures.push(Figure { name: format!("{what}, {size}, {qp}"), value, reference });
        };
        match phase.kind {
            Kind::Message => {
                figure("message", each(whole), MESSAGE);
                figure("message: work requests", phase.work_requests, POSTS);
                figure("message: doorbells", phase.doorbells, POSTS);
                figure("message: polls of a CQ", phase.polls, NONE);
                figure("message: tests in vain", phase.vain_tests, NONE);
            }
            Kind::SendHalf => figure("isend + test", each(probed), NONE),
            Kind::ReceiveHalf => figure("irecv + test", each(probed), NONE),
            Kind::Window => figure("message, 16 in flight", each(whole), MESSAGE),
            Kind::IdleSend => figure("test of a pending send", each(whole), IDLE),
            Kind::IdleReceive => figure("test of a pending receive", each(whole), IDLE),
            Kind::Flush => {
                figure("iflush + test", each(whole), FLUSH);
                figure("iflush: tests in vain", phase.vain_tests, NONE);
            }
        }
    }
    figures
}

/// The figures of a connection's memory.
pub fn of_memory(qps: u64, memory: &Memory) -> Vec<Figure> {
    let qp = if qps == 1 { "1 QP".to_owned() } else { format!("{qps} QPs") };
    let stock = |bytes: f64| Reference { budget: Some(bytes / 4.0), peers: [bytes, 0.0, 0.0] };
    [
        ("bytes per send comm", memory.send_heap + memory.send_mapped, stock(STOCK_SENDER)),
        ("  of these in the heap", memory.send_heap, NONE),
        ("bytes per receive comm", memory.recv_heap + memory.recv_mapped, stock(STOCK_RECEIVER)),
        ("  of these in the heap (receive)", memory.recv_heap, NONE),
        ("bytes kept after close", memory.kept, Reference { budget: Some(0.0), ..NONE }),
        ("registered bytes per connection", memory.mr_bytes, NONE),
        ("MRs per connection", memory.mrs, NONE),
        ("QPs per connection", memory.qps, NONE),
        ("CQs per connection", memory.cqs, NONE),
        ("file descriptors per connection", memory.fds, NONE),
    ]
    .into_iter()
    .map(|(what, value, reference)| Figure { name: format!("{what}, {qp}"), value, reference })
    .collect()
}

/// The checked-in record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// The plugin's name.
    pub plugin: String,
    /// The table version.
    pub abi: u8,
    /// The compiler the bench (and, built together, the plugin) was compiled with: another one counts differently.
    pub rustc: String,
    /// Value by name.
    pub figures: BTreeMap<String, f64>,
}

impl Record {
    /// Of a run.
    pub fn new(plugin: &str, abi: u8, figures: &[Figure]) -> Self {
        let rounded = |value: f64| (value * 100.0).round() / 100.0;
        Self {
            plugin: plugin.to_owned(),
            abi,
            rustc: env!("PINRAIL_BENCH_RUSTC").to_owned(),
            figures: figures.iter().map(|f| (f.name.trim().to_owned(), rounded(f.value))).collect(),
        }
    }

    /// Reads a record; none is there before the first `--update`.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        match std::fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text)
                .map(Some)
                .map_err(|error| Failure::new("record", format!("{}: {error}", path.display()))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Failure::io("record", &path.display().to_string(), &error)),
        }
    }

    /// Writes it.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| Failure::new("record", error.to_string()))?;
        std::fs::write(path, text + "\n")
            .map_err(|error| Failure::io("record", &path.display().to_string(), &error))
    }
}

/// Prints the table: record → now, budget, peers.
pub fn print(figures: &[Figure], record: Option<&Record>) {
    let [first, second, third] = PEERS;
    println!(
        "#{:<44} {:>11} {:>11} {:>9}  {first:>12} {second:>12} {third:>12}",
        "", "record", "now", "budget"
    );
    for figure in figures {
        let old = record.and_then(|record| record.figures.get(figure.name.trim()));
        let peer = |value: f64| if value == 0.0 { String::new() } else { number(value) };
        let [first, second, third] = figure.reference.peers.map(peer);
        let line = format!(
            " {:<44} {:>11} {:>11} {:>9}{} {first:>12} {second:>12} {third:>12}",
            figure.name,
            old.map_or_else(String::new, |&old| number(old)),
            number(figure.value),
            figure.reference.budget.map_or_else(String::new, number),
            if figure.over_budget() { "!" } else { " " },
        );
        println!("{}", line.trim_end());
    }
}

fn number(value: f64) -> String {
    if value.fract().abs() < 0.005 { format!("{value:.0}") } else { format!("{value:.2}") }
}

#[cfg(test)]
mod tests {
    use super::{Record, number, of_memory};
    use crate::cpu::memory::Memory;

    #[test]
    fn a_quarter_of_stock_is_the_memory_budget() {
        let memory = Memory { send_mapped: 64_872.0, recv_heap: 69_337.0, ..Memory::default() };
        let over: Vec<bool> =
            of_memory(1, &memory).iter().map(super::Figure::over_budget).collect();
        assert_eq!(over[..4], [false, false, true, false]);
    }

    #[test]
    fn a_record_survives_its_file() {
        let memory = Memory { send_heap: 1.25, ..Memory::default() };
        let record = Record::new("x", 12, &of_memory(4, &memory));
        let text = serde_json::to_string(&record).expect("JSON");
        let back: Record = serde_json::from_str(&text).expect("the same");
        assert_eq!(back.figures, record.figures);
        assert_eq!(number(1.25), "1.25");
        assert_eq!(number(3.0), "3");
    }
}
