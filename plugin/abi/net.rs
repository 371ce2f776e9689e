//! The canonical operations on the process-wide state, to which every ABI version adapts.
//!
//! v11 and later give every communicator a context that is finalized; the last one takes the state with it. Earlier
//! versions have no finalize: for them the state is replaced by the next init, and what could disturb anybody
//! (descriptors, threads, registrations) lives only as long as a listener, communicator or memory handle. Memory of an
//! application keeps the state too, and makes it where there is none: a device must be the same for whoever registers a
//! part of that memory later.

use super::objects::{self, Context, Hold};
use super::types::{PTR_CUDA, PTR_DMABUF, PTR_HOST, Properties};
use super::{calls, logger};
use crate::config::{Settings, Severity};
use crate::error::{Blame, Error, Result};
use crate::host::{descriptors, limits};
use crate::memory::{gate, status, wiped};
use crate::profiler::Profiler;
use crate::transport::Transport;
use crate::transport::device::Device;
use crate::transport::fusion;
use crate::transport::profile::Origin;
use std::ffi::{CString, c_char, c_int};
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The state of this process.
#[derive(Debug)]
struct State {
    /// `None`: memory of an application is in use where nothing of RDMA is.
    transport: Option<Arc<Transport>>,
    /// Made by an init that no finalize follows.
    lasting: bool,
    /// NCCL was told which settings and devices it has.
    told: bool,
    /// From an init whose version has no context.
    profiler: Option<Profiler>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn state() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads settings and finds devices, unless somebody is using the plugin already; then calls `with`, before anybody else
/// can take the state away again. `lasting`: the caller's version has no finalize.
///
/// # Errors
/// The verbs library or the devices cannot be used: NCCL then moves on to its next network.
pub fn init<R>(lasting: bool, with: impl FnOnce(&Arc<Transport>) -> R) -> Result<R> {
    let mut state = state();
    if let Some(State { transport: Some(transport), lasting: stays, told, .. }) = &mut *state
        // Somebody may be about to open something and not have it yet.
        && (objects::users() > 0 || Arc::strong_count(transport) > 1)
    {
        *stays |= lasting;
        if !std::mem::replace(told, true) {
            tell(&transport.settings);
            tracing::info!("these settings and devices are in use already, for pinrail_host_alloc");
            transport.announce();
        }
        return Ok(with(transport));
    }
    let transport = start()?;
    let result = with(&transport);
    *state = Some(State { transport: Some(transport), lasting, told: true, profiler: None });
    Ok(result)
}

fn tell(settings: &Settings) {
    tracing::info!("pinrail {} {}", env!("CARGO_PKG_VERSION"), settings.summary());
}

fn start() -> Result<Arc<Transport>> {
    // Before anything is read: what cannot be opened would pass for what is not there. Starting tells where the limit
    // cannot be raised.
    let _ = limits::raise_nofile();
    let count = descriptors::FOR_A_DEVICE;
    descriptors::spare(count).map_err(|e| {
        Error::io(format_args!("starting, which takes {count} descriptors at a time,"), &e)
    })?;
    let (settings, notices) = Settings::from_process();
    crate::log::set_level(&settings);
    tell(&settings);
    for notice in &notices {
        match notice.severity() {
            Severity::Warn => tracing::warn!("{notice}"),
            Severity::Info => tracing::info!("{notice}"),
        }
    }
    let important = settings.disabled()
        || settings.asked_for_by_name()
        || Transport::kernel_has_devices(&settings);
    Transport::start(settings).map_err(|e| {
        // On a host without RDMA this is how things are; otherwise somebody is about to get a slow job.
        if important {
            return e;
        }
        tracing::info!("not used: {e}");
        e.repeated()
    })
}

/// Memory of an application that is in use: keeps the state as it is. Dropping the last one leaves nothing behind.
#[derive(Debug)]
pub struct Use {
    transport: Option<Arc<Transport>>,
    hold: Option<Hold>,
}

impl Use {
    /// The state of this process, or a new one; without one where nothing of RDMA is.
    pub fn begin() -> Self {
        let mut state = state();
        let hold = Some(Hold::take());
        let transport = state.get_or_insert_with(|| {
            // Lines go somewhere even if NCCL never gives a logger.
            logger::set(None);
            let transport = start().map_err(|e| {
                if !e.is_reported() {
                    tracing::warn!("memory for the application is not pinned: {e}");
                }
            });
            State { transport: transport.ok(), lasting: false, told: false, profiler: None }
        });
        Self { transport: transport.transport.clone(), hold }
    }

    /// The state, if there is one.
    pub fn transport(&self) -> Option<&Arc<Transport>> {
        self.transport.as_ref()
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.transport = None;
        self.hold = None;
        release(false);
    }
}

/// The state that init made.
///
/// # Errors
/// No init succeeded.
pub fn current() -> Result<Arc<Transport>> {
    let transport = state().as_ref().and_then(|state| state.transport.clone());
    transport.ok_or_else(|| Error::usage("called before a successful init"))
}

/// The state of a context, or of the process where versions have no context.
///
/// # Errors
/// The context is not one of ours, or no init succeeded.
pub fn transport(context: Option<&Context>) -> Result<Arc<Transport>> {
    context.map_or_else(current, |c| Ok(Arc::clone(&c.transport)))
}

/// What connections are told of the communicator that they are made for.
pub fn origin(context: Option<&Context>) -> Origin {
    let profiler = || state().as_ref().and_then(|state| state.profiler);
    context.map_or_else(|| Origin { id: None, profiler: profiler() }, |c| c.origin)
}

/// Sets what connections without a context tell of their transfers, after an init.
pub fn set_profiler(profiler: Option<Profiler>) {
    if let Some(state) = &mut *state() {
        state.profiler = profiler;
    }
}

/// Called when a context, listener, communicator or memory of an application is gone: the last one leaves nothing behind.
pub fn release(was_context: bool) {
    let mut state = state();
    if objects::opened() > 0 || calls::is_connecting() {
        return;
    }
    if let Some(transport) = state.as_ref().and_then(|state| state.transport.as_ref()) {
        transport.idle();
    }
    if objects::users() > 0 {
        // The application's memory may outlast NCCL and its logger.
        if was_context {
            logger::forget();
        }
    } else if was_context || state.as_ref().is_some_and(|state| !state.lasting) {
        *state = None;
        objects::drop_stray_regions();
    }
    gate::release_pages();
    wiped::release_pages();
    status::release();
}

/// Number of devices.
///
/// # Errors
/// No init succeeded.
pub fn devices() -> Result<c_int> {
    c_int::try_from(current()?.devices().len())
        .map_err(|_| Error::new(Blame::Internal, "too many devices"))
}

/// Properties of device `index`.
///
/// # Errors
/// No init succeeded, or there is no such device.
pub fn properties(index: c_int) -> Result<Properties> {
    let transport = current()?;
    let devices = transport.devices();
    let device = devices.get(index)?;
    let ports = devices.ports(device);
    let first =
        ports.first().ok_or_else(|| Error::new(Blame::Internal, "a device without a port"))?;
    let all = |f: fn(&Device) -> bool| ports.iter().all(|p| f(p));
    let mut ptr_support = PTR_HOST;
    if all(|p| p.peer_memory) {
        ptr_support |= PTR_CUDA;
    }
    if all(|p| p.dmabuf) {
        ptr_support |= PTR_DMABUF;
    }
    let id = |id: Option<i32>| id.and_then(|id| i16::try_from(id).ok()).unwrap_or(-1);
    let rail = first.rail.filter(|_| ports.iter().all(|p| p.rail == first.rail));
    let planes: Vec<_> = ports.iter().map(|p| p.plane).collect();
    let plane = fusion::plane(&planes, devices.all_ports().iter().map(|p| p.plane));
    let sum: u64 = ports.iter().map(|p| u64::from(p.speed)).sum();
    let least_qp = ports.iter().map(|p| p.max_qp).min().unwrap_or(0);
    Ok(Properties {
        name: kept(&device.name),
        pci_path: first.pci_path.as_deref().map_or(std::ptr::null(), kept),
        guid: first.guid,
        ptr_support,
        force_flush: transport.settings.forces_flush().into(),
        speed: c_int::try_from(sum).unwrap_or(c_int::MAX),
        port: c_int::try_from(first.reported_port).unwrap_or(1),
        latency: 0.0,
        max_comms: c_int::try_from(least_qp).unwrap_or(c_int::MAX),
        members: device.members.iter().filter_map(|m| c_int::try_from(*m).ok()).collect(),
        rail_id: id(rail),
        plane_id: id(plane),
    })
}

/// Makes one device of several; returns its index.
///
/// # Errors
/// See [`crate::transport::device::Devices::fuse`].
pub fn fuse(members: &[c_int]) -> Result<c_int> {
    let transport = current()?;
    if members.len() > 1 && !transport.settings.merge_nics {
        return Err(Error::usage("devices are not fused: NCCL_IB_MERGE_NICS=0"));
    }
    let mut devices = transport.devices();
    devices.fuse(members)
}

/// Bytes of strings that NCCL may keep: names and paths of some hundred devices.
const ROOM: usize = 16 << 10;
/// Those strings, each with its end. They live as long as the library, like the name in its table, and leave no heap behind.
static TEXT: [AtomicU8; ROOM] = [const { AtomicU8::new(0) }; ROOM];
/// How much of it is used.
static USED: Mutex<usize> = Mutex::new(0);

/// A string that NCCL may keep while the library is loaded, made once.
fn kept(text: &str) -> *const c_char {
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    let bytes = text.as_bytes_with_nul();
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    let same = |at: &[AtomicU8]| at.iter().zip(bytes).all(|(a, b)| a.load(Relaxed) == *b);
    let mut at = 0;
    while at < *used {
        if same(&TEXT[at..]) {
            return TEXT[at].as_ptr().cast();
        }
        at += 1 + TEXT[at..*used].iter().take_while(|byte| byte.load(Relaxed) != 0).count();
    }
    let Some(room) = TEXT.get(at..at + bytes.len()) else { return text.into_raw() };
    room.iter().zip(bytes).for_each(|(place, byte)| place.store(*byte, Relaxed));
    *used = at + bytes.len();
    room[0].as_ptr().cast()
}

#[cfg(test)]
#[allow(unsafe_code, reason = "reads what C reads")]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn read(text: *const c_char) -> &'static str {
        // SAFETY: ends with a NUL and stays.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap()
    }

    #[test]
    fn a_string_is_kept_once_and_stays() {
        let texts = ["mlx5_0", "mlx5", "", "mlx5_0+mlx5_1", "/sys/devices/pci0000:00", "_0"];
        let first = texts.map(kept);
        let again = texts.map(kept);
        assert_eq!(first, again);
        assert_eq!(first.map(read), texts);
        assert_eq!(read(kept("a\0b")), "a?b");
        let long = "x".repeat(ROOM);
        assert_eq!(read(kept(&long)), long);
        assert_eq!(first.map(read), texts);
    }
}
