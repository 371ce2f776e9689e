//! The sweep over message sizes: checked first, then timed, every plugin (and perftest) in turns within each round, so
//! that a disturbance of the machine meets all of them.

mod perftest;
mod report;
mod session;

use crate::bounce::{Bounce, Placement};
use crate::cli::Sweep;
use crate::failure::{Failure, Result};
use crate::host::{self, Fabric};
use crate::link::{CheckPlan, Command, Reply, StreamPlan};
use crate::progress::Progress;
use crate::rank::check::stride;
use crate::size;
use crate::stats::median;
use perftest::Perftest;
use report::{BOUNCE_GOAL_FROM, Columns, Figures, Row};
use session::{Plan, Session};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most memory of one rank for the messages of the checked pass.
const CHECK_MEMORY: usize = 64 << 20;
/// Bytes and messages that a checked pass sends per size, whichever comes first.
const CHECK_BYTES: usize = 64 << 20;
const CHECK_MESSAGES: u64 = 512;
const CHECK_AT_LEAST: u64 = 4;
/// Bytes sent before the clock starts, at most a window.
const WARMUP_BYTES: usize = 16 << 20;

/// Receives of a timed pass at least.
const MIN_COUNT: u64 = 8;

/// The verbs library of a plugin that is told of no other.
const SYSTEM_LIBRARY: &str = "libibverbs.so.1";

/// One plugin with its two ranks.
#[derive(Debug)]
pub struct Subject {
    letter: char,
    /// Whose message buffers it must reach through copies.
    bounce: Option<Bounce>,
    /// Pages of its buffers that are proved to be reached so.
    bounced_pages: u64,
    path: PathBuf,
    session: Session,
}

impl Subject {
    /// Name for messages.
    fn who(&self) -> String {
        let kind = if self.bounce.is_some() { " (bounced)" } else { "" };
        format!("{}{kind}", self.session.name)
    }
}

/// Name of the plugin at `index` in an A/B table.
fn letter(index: usize) -> char {
    char::from(b'A' + (index % 26) as u8)
}

/// Runs the whole sweep.
pub fn run(options: &Sweep) -> Result<()> {
    let sizes = sizes(options)?;
    let fabric = Fabric::choose(options.verbs_lib.as_deref(), options.device.as_deref())?;
    let plugins = if options.plugins.is_empty() {
        vec![host::plugin(None)?]
    } else {
        options.plugins.iter().map(|path| host::plugin(Some(path))).collect::<Result<_>>()?
    };
    println!("# pinrail-bench {}: on {}", env!("CARGO_PKG_VERSION"), fabric.describe());
    let mut subjects = open(options, &fabric, plugins)?;
    report::print_subjects(&subjects);
    if options.list {
        return list(subjects);
    }
    let buffer = sizes.iter().map(|&size| buffer_size(options, size)).max().unwrap_or(0);
    for subject in &mut subjects {
        let most = subject.session.device.max_recvs;
        if i64::from(most) < options.recvs as i64 {
            return Err(Failure::usage(format!("--recvs: the device takes {most} at most")));
        }
        connect(options, &fabric, subject, buffer)?;
    }
    let wrong =
        if options.no_check { None } else { Some(check_all(options, &mut subjects, &sizes)?) };
    let rows = measure_all(options, &fabric, &mut subjects, &sizes, wrong.as_deref())?;
    if let Some(path) = &options.json {
        report::write_json(path, &fabric, &subjects, &rows, options)?;
    }
    for subject in subjects {
        subject.session.close()?;
    }
    match wrong.iter().flatten().flatten().sum::<u64>() {
        0 => Ok(()),
        count => Err(Failure::new("check", format!("{count} messages were wrong"))),
    }
}

fn sizes(options: &Sweep) -> Result<Vec<usize>> {
    if options.begin > options.end {
        return Err(Failure::usage("the smallest size (-b) is above the largest (-e)"));
    }
    if options.end > i32::MAX as usize {
        return Err(Failure::usage("a message of the interface is at most 2147483647 bytes"));
    }
    let factor = options.factor as usize;
    let next = |&size: &usize| size.max(1).checked_mul(if size == 0 { 1 } else { factor });
    Ok(std::iter::successors(Some(options.begin), next)
        .take_while(|&size| size <= options.end)
        .collect())
}

fn open(options: &Sweep, fabric: &Fabric, plugins: Vec<PathBuf>) -> Result<Vec<Subject>> {
    let ranks = if options.list { 1 } else { 2 };
    plugins
        .into_iter()
        .enumerate()
        .flat_map(|(index, path)| {
            // Direct before bounced: the latter's figures are shown as a share of the former's.
            let bounced = options.bounce.filter(|_| !options.list).map(Some);
            std::iter::once(None).chain(bounced).map(move |bounce| (index, path.clone(), bounce))
        })
        .map(|(index, path, bounce)| {
            let plan = Plan {
                plugin: &path,
                abi: options.abi,
                fabric,
                device: options.device.as_deref(),
                qps: options.qps,
                timeout: Duration::from_secs(options.timeout),
                verbose: options.verbose,
            };
            let session = Session::open(&plan, ranks)?;
            Ok(Subject { letter: letter(index), bounce, bounced_pages: 0, path, session })
        })
        .collect()
}

/// Connects the ranks of a plugin, and in a run that compares proves how their buffers are reached.
fn connect(options: &Sweep, fabric: &Fabric, subject: &mut Subject, buffer: usize) -> Result<()> {
    let placement = options.bounce.is_some().then(|| Placement {
        library: fabric.library().unwrap_or(Path::new(SYSTEM_LIBRARY)).to_owned(),
        bounce: subject.bounce,
    });
    subject.bounced_pages = subject.session.connect(buffer, placement.as_ref())?;
    if let Some(bounce) = subject.bounce {
        println!(
            "# {}: {bounce} buffers, {} pages in simulated CMA that another driver holds: none is in a memory region",
            subject.who(),
            subject.bounced_pages
        );
    }
    Ok(())
}

fn list(subjects: Vec<Subject>) -> Result<()> {
    for subject in subjects {
        for device in &subject.session.devices {
            let path = device.pci_path.as_deref().unwrap_or("no PCI path");
            println!(
                "{:3} {:<24} port {} {:>7} Mb/s, receives of up to {}, {path}",
                device.index, device.name, device.port, device.speed, device.max_recvs
            );
        }
        subject.session.close()?;
    }
    Ok(())
}

fn slots(options: &Sweep, size: usize) -> usize {
    let group = stride(size) * options.recvs as usize;
    (CHECK_MEMORY / group).max(2).min(options.window as usize)
}

fn buffer_size(options: &Sweep, size: usize) -> usize {
    let checked = slots(options, size) * stride(size) * options.recvs as usize;
    // How many receives a plugin can have in flight on a bounced buffer may depend on the buffer's size, and that must
    // not depend on whether messages are checked.
    if options.no_check && options.bounce.is_none() { size.max(1) } else { checked }
}

/// The checked pass. Wrong messages by plugin and size.
fn check_all(options: &Sweep, subjects: &mut [Subject], sizes: &[usize]) -> Result<Vec<Vec<u64>>> {
    let mut progress = Progress::new(subjects.len() * sizes.len());
    let mut all = Vec::new();
    for subject in subjects {
        let mut counts = Vec::new();
        let (mut messages, mut bytes) = (0, 0);
        for &size in sizes {
            progress.step(&format!("checking {}", size::show(size)));
            let by_bytes = (CHECK_BYTES / size.max(1)) as u64;
            let wanted = by_bytes.clamp(CHECK_AT_LEAST, CHECK_MESSAGES);
            let plan = CheckPlan {
                size,
                groups: wanted.div_ceil(options.recvs).max(CHECK_AT_LEAST),
                members: options.recvs as usize,
                slots: slots(options, size),
            };
            let replies = subject.session.all(&Command::Check(plan))?;
            for reply in replies.into_iter().skip(1) {
                if let Reply::Checked { messages: m, bytes: b, wrong_messages, wrong } = reply {
                    messages += m;
                    bytes += b;
                    counts.push(wrong_messages);
                    if let Some(text) = wrong {
                        progress.clear();
                        eprintln!("{}: {}: {text}", subject.who(), size::show(size));
                    }
                }
            }
        }
        progress.clear();
        let wrong: u64 = counts.iter().sum();
        println!(
            "# checked {}: {messages} messages, {bytes} bytes, guards and sizes: {}",
            subject.who(),
            if wrong == 0 { "all right".into() } else { format!("{wrong} messages WRONG") }
        );
        all.push(counts);
    }
    Ok(all)
}

fn measure_all(
    options: &Sweep,
    fabric: &Fabric,
    subjects: &mut [Subject],
    sizes: &[usize],
    wrong: Option<&[Vec<u64>]>,
) -> Result<Vec<Row>> {
    let columns = Columns {
        several: options.plugins.len() > 1,
        bounced: options.bounce.is_some(),
        perftest: options.perftest,
    };
    let device = match fabric {
        Fabric::System { device } => Some(device.clone()),
        _ => options.device.clone(),
    };
    let perftest = Perftest {
        fabric,
        device,
        depth: options.window as usize,
        timeout: Duration::from_secs(options.timeout + 60),
    };
    println!(
        "# {} receives in flight, {} per receive, {} rounds, median; GB = 10^9 bytes",
        options.window,
        options.recvs,
        options.rounds()
    );
    report::print_head(columns);
    let mut progress = Progress::new(sizes.len() * options.rounds() as usize);
    let mut rows = Vec::new();
    for (at, &size) in sizes.iter().enumerate() {
        let reference = (options.perftest && size >= options.perftest_from).then_some(&perftest);
        let (mut all, perftest) = measure(options, subjects, size, reference, &mut progress)?;
        for (index, figures) in all.iter_mut().enumerate() {
            figures.wrong = wrong.and_then(|wrong| wrong.get(index)?.get(at).copied());
        }
        let of = |bounced| {
            let pairs = all.iter().zip(&*subjects);
            let wanted = pairs.filter(|(_, subject)| subject.bounce.is_some() == bounced);
            wanted.map(|(figures, _)| figures.clone()).collect()
        };
        let row = Row::new(of(false), of(true), perftest);
        progress.clear();
        report::print_row(columns, &row);
        rows.push(row);
    }
    report::print_foot(&rows, subjects);
    Ok(rows)
}

fn measure(
    options: &Sweep,
    subjects: &mut [Subject],
    size: usize,
    reference: Option<&Perftest<'_>>,
    progress: &mut Progress,
) -> Result<(Vec<Figures>, Vec<f64>)> {
    let window = options.window;
    let members = options.recvs as usize;
    let warmup = ((WARMUP_BYTES / size.max(1)) as u64).clamp(2, window);
    let plan = |warmup, count| {
        Command::Stream(StreamPlan { size, warmup, count, members, window: window as usize })
    };
    let goal = options.bounce.is_some() && size >= BOUNCE_GOAL_FROM;
    let pass = options.pass_seconds(reference.is_some() || goal);
    let count = match (options.iters, subjects.first_mut()) {
        (Some(count), _) => count,
        (None, Some(first)) => {
            // The fastest of three trials: one that another program disturbed would make all passes too short. A
            // trial too short to be told from noise is repeated with more.
            let mut trial = ((4 << 20) / size.max(1) as u64).clamp(MIN_COUNT, 4 * window);
            let mut rate: f64 = 0.0;
            let mut long_enough = 0;
            while long_enough < 3 {
                let seconds = first.session.seconds(&plan(warmup, trial))?.max(1e-9);
                rate = rate.max(trial as f64 / seconds);
                if seconds < pass / 10.0 && trial < 1_000_000 {
                    trial *= 4;
                } else {
                    long_enough += 1;
                }
            }
            ((pass * rate) as u64).clamp(MIN_COUNT, 10_000_000)
        }
        (None, None) => 0,
    };
    let mut bandwidths = vec![Vec::new(); subjects.len()];
    let mut perftest_gbs = Vec::new();
    let group_bytes = (size * members) as f64;
    for round in 0..options.rounds() as usize {
        progress.step(&format!(
            "{}, round {} of {}",
            size::show(size),
            round + 1,
            options.rounds()
        ));
        for turn in 0..subjects.len() {
            // Each round begins with another plugin.
            let index = (turn + round) % subjects.len();
            let seconds = subjects[index].session.seconds(&plan(warmup, count))?;
            bandwidths[index].push(group_bytes * count as f64 / seconds.max(1e-9) / 1e9);
        }
        if let Some(reference) = reference {
            perftest_gbs.push(reference.bandwidth(size, count * options.recvs)?);
        }
    }
    let mut all = Vec::new();
    for (subject, bandwidth_gbs) in subjects.iter_mut().zip(bandwidths) {
        let rate = median(&bandwidth_gbs) * 1e9 / size.max(1) as f64;
        let rounds = ((rate * pass / 4.0) as u64).clamp(5, 5_000);
        let replies = subject
            .session
            .all(&Command::PingPong { size, count: options.iters.unwrap_or(rounds) })?;
        let latency = replies.iter().find_map(|reply| match reply {
            Reply::Latency { p50, p99, .. } => Some((p50 / 1e3, p99 / 1e3)),
            _ => None,
        });
        let (latency_us, latency_p99_us) = latency.unwrap_or_default();
        all.push(Figures {
            size,
            count,
            latency_us,
            latency_p99_us,
            messages_mps: rate / 1e6,
            bandwidth_gbs,
            wrong: None,
        });
    }
    Ok((all, perftest_gbs))
}

#[cfg(test)]
mod tests {
    use super::sizes;
    use crate::cli::Cli;
    use clap::Parser as _;

    fn of(arguments: &[&str]) -> Vec<usize> {
        let arguments = std::iter::once("pinrail-bench").chain(arguments.iter().copied());
        let cli = Cli::try_parse_from(arguments).expect("valid arguments");
        sizes(&cli.sweep).expect("valid sizes")
    }

    #[test]
    fn sizes_from_begin_to_end() {
        assert_eq!(of(&["-b", "8", "-e", "32"]), [8, 16, 32]);
        assert_eq!(of(&["-b", "0", "-e", "3"]), [0, 1, 2]);
        assert_eq!(of(&["-b", "1k", "-e", "20k", "-f", "4"]), [1024, 4096, 16384]);
        assert_eq!(of(&[]).len(), 24);
    }
}
