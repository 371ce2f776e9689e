//! Faults and modes that tests set: holding, failing registrations, killed QPs, ports, injected events.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::abi::*;
use crate::env::settings;
use crate::inject;
use crate::objects::{CHANNELS, CONTEXTS, CQS, MRS, PDS, QPS, SRQS};
use crate::process::Process;

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

/// Chooses the errno of those; 0 = ENOMEM again.
pub fn set_failure(errno: i32) -> Result<(), i32> {
    match errno {
        0 => FAIL_ERRNO.store(libc::ENOMEM, Ordering::Relaxed),
        1..=4095 => FAIL_ERRNO.store(errno, Ordering::Relaxed),
        _ => return Err(libc::EINVAL),
    }
    Ok(())
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

/// Changes an entry of a GID table and raises the event.
pub fn set_gid(device: usize, port: u8, index: u8, gid: Gid) -> Result<(), i32> {
    inject::gid(open_device(device)?.own(), device, port, index, gid)
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
    let mut sq = crate::sync::lock(&qp.sq);
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
