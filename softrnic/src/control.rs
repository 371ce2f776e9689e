//! Faults and modes that tests set: holding, failing registrations, killed QPs, ports, injected events.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use crate::abi::*;
use crate::device::Device;
use crate::env::{parse_gid, settings};
use crate::inject;
use crate::objects::{CHANNELS, CONTEXTS, CQS, MRS, PDS, QPS, SRQS};
use crate::process::Process;
use crate::sync::lock;

fn hold() -> &'static AtomicBool {
    static HOLD: OnceLock<AtomicBool> = OnceLock::new();
    HOLD.get_or_init(|| AtomicBool::new(settings().hold))
}

/// Whether send requests are held.
pub fn held() -> bool {
    hold().load(Ordering::Relaxed)
}

/// Starts or ends holding; ending it runs what is held.
pub fn set_hold(on: bool) {
    hold().store(on, Ordering::SeqCst);
    if !on {
        crate::post::drain_all();
    }
}

fn fail_at() -> &'static AtomicU64 {
    static AT: OnceLock<AtomicU64> = OnceLock::new();
    AT.get_or_init(|| AtomicU64::new(settings().fail_reg_mr()))
}

/// The first of the registrations that all fail, 0 = none.
static FAIL_FROM: AtomicU64 = AtomicU64::new(0);

/// What a registration that was made to fail answers.
static FAIL_ERRNO: AtomicI32 = AtomicI32::new(libc::ENOMEM);

/// The errno with which a test makes the `n`-th registration of the process fail.
pub fn injected_failure(n: u64) -> Option<i32> {
    let from = FAIL_FROM.load(Ordering::Relaxed);
    let fails = n == fail_at().load(Ordering::Relaxed) || from != 0 && n >= from;
    fails.then(|| FAIL_ERRNO.load(Ordering::Relaxed))
}

/// The number of the `n`-th registration from now; 0 = none.
fn from_now(n: u64) -> u64 {
    if n == 0 { 0 } else { crate::mr::Mr::registrations().saturating_add(n) }
}

/// Makes the `n`-th registration from now fail; 0 = none.
pub fn fail_registration(n: u64) {
    fail_at().store(from_now(n), Ordering::Relaxed);
}

/// Makes every registration fail, beginning with the `n`-th from now; 0 = none.
pub fn fail_registrations_from(n: u64) {
    FAIL_FROM.store(from_now(n), Ordering::Relaxed);
}

/// Where a registration that a test pauses is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pause {
    Off,
    /// The next one waits.
    Armed,
    /// One waits.
    Waiting,
}

static PAUSE: (Mutex<Pause>, Condvar) = (Mutex::new(Pause::Off), Condvar::new());

/// Makes the next registration of the process wait, or ends that.
pub fn pause_registration(on: bool) {
    *lock(&PAUSE.0) = if on { Pause::Armed } else { Pause::Off };
    PAUSE.1.notify_all();
}

/// Whether one waits.
pub fn is_registration_paused() -> bool {
    *lock(&PAUSE.0) == Pause::Waiting
}

/// Waits if a test wants this registration to.
pub fn wait_if_paused() {
    let mut pause = lock(&PAUSE.0);
    if *pause == Pause::Armed {
        *pause = Pause::Waiting;
        while *pause == Pause::Waiting {
            pause = PAUSE.1.wait(pause).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Chooses the errno of those; 0 = ENOMEM again.
pub fn set_failure(errno: i32) -> Result<(), i32> {
    match errno {
        0 => FAIL_ERRNO.store(libc::ENOMEM, Ordering::Relaxed),
        1..=4095 => FAIL_ERRNO.store(errno, Ordering::Relaxed),
        _ => return Err(libc::EINVAL),
    }
    Ok(())
}

/// The changes of state that fail: which state, how many of them, with what errno.
static FAIL_MODIFY: Mutex<(u32, u64, i32)> = Mutex::new((0, 0, 0));

/// Makes the next `count` changes to `state` fail.
pub fn fail_modify(state: u32, count: u64, errno: i32) -> Result<(), i32> {
    if !(1..=4095).contains(&errno) {
        return Err(libc::EINVAL);
    }
    *lock(&FAIL_MODIFY) = (state, count, errno);
    Ok(())
}

/// The errno with which a test makes a change to `state` fail.
pub fn injected_modify_failure(state: u32) -> Option<i32> {
    let mut fail = lock(&FAIL_MODIFY);
    if fail.0 != state || fail.1 == 0 {
        return None;
    }
    fail.1 -= 1;
    Some(fail.2)
}

/// Replaces an entry of a port's GID table by the text of `SOFTRNIC_GIDS`, and raises the event where the device is open.
pub fn set_gid_entry(device: &Device, port: u8, index: u8, entry: &str) -> Result<(), i32> {
    let to = parse_gid(entry, device.link(port)).ok_or(libc::EINVAL)?;
    device.set_gid(port, index.into(), to).ok_or(libc::EINVAL)?;
    match open_device(device.index) {
        Ok(process) => inject::gid(process.own(), device.index, port, index, to.gid),
        Err(_) => Ok(()),
    }
}

/// This process as a peer, if the device is open here.
fn open_device(device: usize) -> Result<Arc<Process>, i32> {
    let context = CONTEXTS.all().into_iter().find(|c| c.device.index == device);
    context.map(|c| Arc::clone(&c.process)).ok_or(libc::ENODEV)
}

/// Takes a port of a device of this process down or up and raises the event on its contexts.
pub fn set_port(device: usize, port: u8, up: bool) -> Result<(), i32> {
    inject::port(open_device(device)?.own(), device, port, up)?;
    if up {
        crate::post::drain_all();
    }
    Ok(())
}

/// Lets a device of this process die.
pub fn device_fatal(device: usize) -> Result<(), i32> {
    let process = open_device(device)?;
    inject::device_fatal(&process, process.own(), device)?;
    crate::post::drain_all();
    Ok(())
}

/// Moves a QP to the error state with a fatal event, as a device error does.
pub fn kill_qp(qpn: u32) -> Result<(), i32> {
    let qp = crate::qp::Qp::by_number(qpn).ok_or(libc::EINVAL)?;
    let mut sq = lock(&qp.sq);
    qp.fail(&mut sq);
    drop(sq);
    qp.pd.context.raise(EVENT_QP_FATAL, qpn, 0);
    Ok(())
}

/// Live objects: contexts, PDs, MRs, channels, CQs, SRQs, QPs.
pub fn live() -> [(&'static str, usize); 7] {
    [
        ("contexts", CONTEXTS.count()),
        ("pds", PDS.count()),
        ("mrs", MRS.count()),
        ("channels", CHANNELS.count()),
        ("cqs", CQS.count()),
        ("srqs", SRQS.count()),
        ("qps", QPS.count()),
    ]
}
