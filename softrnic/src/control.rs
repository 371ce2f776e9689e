//! Faults and modes that tests set: holding, failing registrations, killed QPs, ports, injected events.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::abi::*;
use crate::env::settings;
use crate::objects::{CHANNELS, CONTEXTS, CQS, MRS, PDS, QPS, SRQS};

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

/// Number of the registration that fails, 0 = none.
pub fn failing_registration() -> u64 {
    fail_at().load(Ordering::Relaxed)
}

/// Makes the `n`-th registration from now fail; 0 = none.
pub fn fail_registration(n: u64) {
    let at = if n == 0 { 0 } else { crate::mr::Mr::registrations() + n };
    fail_at().store(at, Ordering::Relaxed);
}

/// Takes a port of a device of this process down or up and raises the event on its contexts.
pub fn set_port(device: usize, port: u8, up: bool) -> Result<(), i32> {
    let contexts: Vec<_> =
        CONTEXTS.all().into_iter().filter(|c| c.device.index == device).collect();
    let first = contexts.first().ok_or(libc::ENODEV)?;
    let slot = first.device.port_slot(port, first.process.region.header()).ok_or(libc::EINVAL)?;
    let state = if up { PORT_ACTIVE } else { PORT_DOWN };
    if slot.state.swap(state, Ordering::SeqCst) == state {
        return Ok(());
    }
    let event = if up { EVENT_PORT_ACTIVE } else { EVENT_PORT_ERR };
    for context in &contexts {
        context.raise(event, u32::from(port), 0);
    }
    if up {
        crate::post::drain_all();
    }
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
