//! What registering many distinct ranges costs: time per range, for more and more of them, on the provider that costs
//! nothing. A registry that searches or sorts a list shows at once, because the time per range then grows with their
//! number. Times depend on the machine, so they are printed and nothing is asserted.

use crate::cli::{Register, RegisterLoop};
use crate::cpu::provider::{Provider, ProviderFile};
use crate::failure::{Failure, Result};
use crate::host;
use crate::net::{Net, RecvComm, Registration, log};
use crate::rank::endpoint::pair;
use serde::{Deserialize, Serialize};
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes from one range to the next: no range shares a page with another on any page size.
const STRIDE: usize = 128 << 10;
/// Bytes of each.
const BYTES: usize = 64 << 10;

/// Nanoseconds per range.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Times {
    abi: u8,
    /// The first registration of a range.
    new: f64,
    /// One that exists already.
    again: f64,
    /// The end of one of two.
    less: f64,
    /// The last end.
    end: f64,
}

/// Measures in a process for each number of ranges, and prints.
pub fn run(options: &Register) -> Result<()> {
    let plugin = host::plugin(options.plugin.as_deref())?;
    let provider = ProviderFile::new()?;
    println!(
        "# {}: distinct ranges of {} KiB in no order, on a provider that costs nothing; ns per range, best of {}",
        plugin.display(),
        BYTES >> 10,
        options.rounds
    );
    println!(
        "# {:>8} {:>9} {:>9} {:>9} {:>9} {:>15}",
        "ranges", "new", "again", "one less", "end", "new/log2 ranges"
    );
    for &count in &options.counts {
        let mut best: Option<Times> = None;
        for _ in 0..options.rounds {
            let exe = std::env::current_exe()
                .map_err(|error| Failure::io("register", "the path of this program", &error))?;
            let mut program = Command::new(exe);
            program.arg("register-loop").arg("--plugin").arg(&plugin);
            program.arg("--provider").arg(provider.path()).arg("--count").arg(count.to_string());
            program.args(options.abi.map(|abi| format!("--abi={abi}")));
            program.env("NCCL_IBVERBS_LIB", provider.path());
            program.env("LD_LIBRARY_PATH", provider.folder()).stderr(Stdio::inherit());
            let output =
                program.output().map_err(|error| Failure::io("register", "the program", &error))?;
            if !output.status.success() {
                return Err(Failure::new("register", format!("{count} ranges: {}", output.status)));
            }
            let times: Times = crate::cpu::parse(&String::from_utf8_lossy(&output.stdout))?;
            best = Some(best.map_or(times, |best| Times {
                abi: times.abi,
                new: best.new.min(times.new),
                again: best.again.min(times.again),
                less: best.less.min(times.less),
                end: best.end.min(times.end),
            }));
        }
        let Some(Times { new, again, less, end, .. }) = best else { continue };
        let share = new / (count as f64).log2().max(1.0);
        println!("  {count:>8} {new:>9.0} {again:>9.0} {less:>9.0} {end:>9.0} {share:>15.1}");
    }
    Ok(())
}

/// The measured program: prints JSON.
pub fn run_loop(options: &RegisterLoop) -> Result<()> {
    log::configure("", false);
    let provider = Provider::open(&options.provider)?;
    let net = Net::open(&options.plugin, options.abi)?;
    let device = net.devices()?.first().map_or(0, |device| device.index);
    let (listener, handle) = net.listen(device)?;
    let (send, recv) = pair(&net, device, listener, handle, TIMEOUT)?;
    let ranges = Ranges::new(options.count)?;
    let before = provider.counters().live_mrs;

    let started = Instant::now();
    let first = ranges.register(&net, recv)?;
    let new = started.elapsed();
    let live = provider.counters().live_mrs - before;
    if live != options.count as u64 {
        return Err(Failure::new(
            "register",
            format!("{} ranges became {live} memory regions", options.count),
        ));
    }
    let started = Instant::now();
    let second = ranges.register(&net, recv)?;
    let again = started.elapsed();
    let end = |all: Vec<Registration>| -> Result<Duration> {
        let started = Instant::now();
        all.into_iter().try_for_each(|one| net.deregister_recv(recv, one))?;
        Ok(started.elapsed())
    };
    let (less, end) = (end(second)?, end(first)?);
    net.close_send(send)?;
    net.close_recv(recv)?;
    let abi = net.version();
    net.close()?;

    let each = |time: Duration| time.as_secs_f64() * 1e9 / options.count.max(1) as f64;
    let times = Times { abi, new: each(new), again: each(again), less: each(less), end: each(end) };
    let text = serde_json::to_string(&times)
        .map_err(|error| Failure::new("register", error.to_string()))?;
    println!("{text}");
    Ok(())
}

/// Address space for ranges that are never touched, and an order in which they come.
struct Ranges {
    base: NonNull<u8>,
    order: Vec<usize>,
}

impl Ranges {
    fn new(count: usize) -> Result<Self> {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: a mapping of our own, where the kernel likes.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), count.max(1) * STRIDE, protection, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(Failure::io("register", "mmap", &std::io::Error::last_os_error()));
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| Failure::new("register", "mmap"))?;
        // An order that is nobody's favourite and always the same.
        let mut order: Vec<usize> = (0..count).collect();
        let mut state = 1_u64;
        for last in (1..count).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            order.swap(last, (state >> 33) as usize % (last + 1));
        }
        Ok(Self { base, order })
    }

    fn register(&self, net: &Net, comm: RecvComm) -> Result<Vec<Registration>> {
        self.order
            .iter()
            .map(|index| {
                // SAFETY: inside the mapping, which stays until the process ends.
                unsafe {
                    let start = self.base.as_ptr().add(index * STRIDE);
                    net.register_recv(comm, start, BYTES)
                }
            })
            .collect()
    }
}
