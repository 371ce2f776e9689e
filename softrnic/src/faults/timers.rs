//! What a fault did for a time only, and is to be taken back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::inject;
use crate::shm::peer::Peer;
use crate::sync::lock;

/// A port that is to come up again.
#[derive(Debug)]
struct Timer {
    at: u64,
    peer: Arc<Peer>,
    device: usize,
    port: u8,
}

static TIMERS: Mutex<Vec<Timer>> = Mutex::new(Vec::new());
static PENDING: AtomicBool = AtomicBool::new(false);

/// Takes a port up at this time.
pub fn port_up(at: u64, peer: &Arc<Peer>, device: usize, port: u8) {
    let mut timers = lock(&TIMERS);
    timers.push(Timer { at, peer: Arc::clone(peer), device, port });
    PENDING.store(true, Ordering::SeqCst);
}

/// Whether anything is to be taken back.
pub fn pending() -> bool {
    PENDING.load(Ordering::SeqCst)
}

/// Takes back what is due; whether there was anything.
pub fn run_due() -> bool {
    if !pending() {
        return false;
    }
    let now = crate::clock::now();
    let mut timers = lock(&TIMERS);
    // In the order of their times, so that a virtual clock that jumped shows the same order as one that ran.
    timers.sort_by_key(|t| t.at);
    let due = timers.partition_point(|t| t.at <= now);
    let rest = timers.split_off(due);
    let due = std::mem::replace(&mut *timers, rest);
    PENDING.store(!timers.is_empty(), Ordering::SeqCst);
    drop(timers);
    for timer in &due {
        // The device may be closed by now; then there is nothing to take up.
        let _ = inject::port(&timer.peer, timer.device, timer.port, true);
    }
    !due.is_empty()
}

/// Forgets everything: the last device was closed.
pub fn clear() {
    lock(&TIMERS).clear();
    PENDING.store(false, Ordering::SeqCst);
}
