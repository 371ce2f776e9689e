//! The thread of a process that makes progress: in the inline engine with requests that wait for the other side while
//! the application does not poll, in the threaded engine with all requests.
//!
//! It exists only once there was something for it to do, sleeps on a futex that posts and the other side wake, and is
//! joined when the last context is closed. The stepped engine never has one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::env::{Engine, settings};
use crate::faults::timers;
use crate::objects::QPS;
use crate::process::Process;
use crate::shm::region::Region;
use crate::sync::lock;

/// Upper bound of a nap while something waits: time limits and dead peers are noticed at this grain.
const NAP: Duration = Duration::from_millis(1);
/// Upper bound of a nap otherwise; waking is by futex.
const LONG_NAP: Duration = Duration::from_secs(3600);

/// The thread, if it was needed.
#[derive(Debug)]
pub struct Assist {
    thread: Mutex<Option<JoinHandle<()>>>,
    running: AtomicBool,
    /// Whether the thread is in a long nap.
    asleep: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
}

impl Default for Assist {
    /// No thread yet.
    fn default() -> Self {
        Self {
            thread: Mutex::new(None),
            running: AtomicBool::new(false),
            asleep: Arc::new(AtomicBool::new(false)),
            stop: Arc::new(AtomicBool::new(false)),
        }
    }
}

impl Assist {
    /// Something waits: make sure that the thread looks after it.
    pub fn wake(&self, process: &Process) {
        if settings().engine == Engine::Stepped {
            return;
        }
        if self.running.load(Ordering::Acquire) {
            // Pairs with the SeqCst store before the thread's last look at the queues.
            if self.asleep.load(Ordering::SeqCst) {
                process.region.kick();
            }
            return;
        }
        let mut thread = lock(&self.thread);
        if thread.is_some() || self.stop.load(Ordering::Acquire) {
            return;
        }
        let (region, asleep, stop) =
            (Arc::clone(&process.region), Arc::clone(&self.asleep), Arc::clone(&self.stop));
        // Signals belong to the application's threads.
        let spawned = without_signals(|| {
            std::thread::Builder::new()
                .name("softrnic-assist".into())
                .stack_size(256 << 10)
                .spawn(move || run(&region, &asleep, &stop))
        });
        match spawned {
            Ok(handle) => {
                *thread = Some(handle);
                self.running.store(true, Ordering::Release);
            }
            // Polling still drives the requests; only sleeping applications depend on the thread.
            Err(error) => eprintln!("softrnic: WARN cannot start the assisting thread: {error}"),
        }
    }

    /// Stops and joins the thread.
    pub fn stop(&self, region: &Region) {
        self.stop.store(true, Ordering::Release);
        let handle = lock(&self.thread).take();
        if let Some(handle) = handle {
            region.kick();
            // A panic of the thread was already reported by the panic hook.
            let _ = handle.join();
        }
    }
}

fn without_signals<T>(f: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initialises `all`; `pthread_sigmask` initialises `old`.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let result = f();
    // SAFETY: `old` was initialised above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    result
}

fn run(region: &Region, asleep: &AtomicBool, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        let seen = region.header().kick.load(Ordering::Acquire);
        asleep.store(false, Ordering::SeqCst);
        match look() {
            Left::More => continue,
            Left::Waits => {
                region.wait_kick(seen, NAP);
                continue;
            }
            Left::Nothing => {}
        }
        asleep.store(true, Ordering::SeqCst);
        // Whoever parks a request after this look sees `asleep` and bumps the word.
        if look() == Left::Nothing && !stop.load(Ordering::Acquire) {
            region.wait_kick(seen, LONG_NAP);
        }
    }
}

/// What a look leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Left {
    /// Nothing that could go on by itself.
    Nothing,
    /// Something that waits for the other side or for a time.
    Waits,
    /// Something that can go on at once.
    More,
}

/// Drives pending requests: all as far as they go, or in the threaded engine one step of each queue pair, so that they
/// interleave as on a NIC.
fn look() -> Left {
    let mut left = Left::Nothing;
    for qp in QPS.all() {
        if !qp.pending.load(Ordering::SeqCst) {
            continue;
        }
        if qp.engine == Engine::Thread {
            let mut sq = lock(&qp.sq);
            if qp.advance(&mut sq) {
                left = Left::More;
            }
            qp.settle_pending(&sq);
        } else {
            qp.progress();
        }
        if lock(&qp.sq).wait.is_some() {
            left = left.max(Left::Waits);
        }
    }
    timers::run_due();
    if timers::pending() { left.max(Left::Waits) } else { left }
}
