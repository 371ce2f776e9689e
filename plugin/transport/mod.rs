//! Connections and the data path: state machines over verbs objects. No FFI, and no unsafe code outside the one file
//! that holds remotely written memory.

pub mod address;
pub mod channel;
pub mod comm;
pub mod connect;
pub mod connection;
pub(crate) mod copies;
pub mod credits;
pub mod device;
pub mod events;
mod exhaustion;
pub mod failover;
pub mod failure;
#[allow(unsafe_code, reason = "holds memory that a peer writes")]
pub mod fifo;
pub mod flush;
pub mod fork;
pub mod fusion;
pub mod host_memory;
pub mod idle;
pub mod lane;
pub mod listener;
pub mod mail;
pub mod pace;
pub mod profile;
pub mod pump;
pub mod receives;
pub mod recovery;
pub mod recv;
pub mod registration;
#[allow(unsafe_code, reason = "says that a request may be all zeroes")]
pub mod request;
pub mod send;
pub mod settling;
pub mod slot;
pub mod stripe;
pub mod subnet;
pub mod way;
pub mod wire;

use crate::config::{RegFallback, Settings};
use crate::error::{Error, Result};
use crate::host;
use crate::host::sysfs::Sysfs;
use crate::memory::Gate;
use crate::memory::arena::Arena;
use crate::memory::bounce::Chunks;
use crate::memory::contract::Claim;
use crate::memory::diagnosis::{Direction, Machine, Reporter};
use crate::memory::inventory;
use crate::memory::region::Regions;
use crate::memory::status;
use crate::verbs::Verbs;
use channel::Channel;
use comm::Peer;
use copies::Spare;
use device::{Devices, Rail};
use events::{Events, Links, Watch};
use failover::Failover;
use failure::Failures;
use fork::{Fork, Moment};
use profile::{Origin, Profile};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes that are set aside on a machine at risk, within the limit: the host buffers of some thirty connections.
const AHEAD: usize = 256 << 20;

/// Everything of this process that connections share: settings, the verbs library, devices, the event watcher.
///
/// Holds no descriptor and no thread by itself; devices are open and the watcher runs while something uses them.
#[derive(Debug)]
pub struct Transport {
    /// The settings, read once.
    pub settings: Settings,
    verbs: Arc<Verbs>,
    devices: Mutex<Devices>,
    events: Arc<Events>,
    /// Memory that was pinned first.
    arena: Arc<Arena>,
    /// Where a diagnosis looks, and whom it tells.
    machine: Machine,
    reporter: Reporter,
    failures: Arc<Failures>,
    /// Why this machine may refuse to pin memory that CUDA pinned before, if it may.
    risk: Option<String>,
    /// Whether memory was set aside since something began to use the plugin, or that was tried.
    prepared: AtomicBool,
    /// How CUDA pins host memory, once somebody asked.
    cuda_contract: OnceLock<Claim>,
    /// What forked children keep.
    pub fork: Fork,
}

impl Transport {
    /// Loads the verbs library and finds the devices.
    ///
    /// # Errors
    /// The settings turn the plugin off, the library cannot be used, or it cannot list devices.
    pub fn start(settings: Settings) -> Result<Arc<Self>> {
        if settings.disabled() {
            return Err(Error::usage(
                "NCCL_IB_DISABLE=1 turns pinrail off too; NCCL_NET=pinrail would override it",
            ));
        }
        if let Err(e) = host::limits::raise_nofile() {
            tracing::info!("RLIMIT_NOFILE stays as it is: {e}");
        }
        inventory::configure(&settings.inventory);
        status::configure(settings.status);
        let verbs = Verbs::load(settings.verbs_lib.as_deref())?;
        let fork = Fork::prepare(&verbs, &settings);
        let ports = device::discover(&verbs, &settings)?;
        let failures = Failures::from_settings(&settings);
        let machine = Machine::from_settings(&settings);
        let Machine { proc, sysfs } = machine.clone();
        let arena = Arena::new(settings.bounce_bytes, move || host::headroom(&proc, sysfs.root()));
        let events = Events::new(events::Policy {
            return_fatal: settings.return_async_events,
            patience: failures.patience(),
            failover: settings.port_failover,
            signal: settings.status_signal,
            failures: Arc::clone(&failures),
            arena: Some(Arc::clone(&arena)),
        });
        let transport = Arc::new(Self {
            arena,
            reporter: Reporter::from_settings(&settings),
            failures,
            risk: host::placement_risk(&machine.proc),
            prepared: AtomicBool::new(false),
            cuda_contract: OnceLock::new(),
            fork,
            machine,
            settings,
            verbs,
            devices: Mutex::new(Devices::new(ports)),
            events,
        });
        transport.announce();
        Ok(transport)
    }

    /// Says which devices it has.
    pub fn announce(&self) {
        let names: Vec<_> = self
            .devices()
            .all_ports()
            .iter()
            .map(|p| format!("{} {} Mb/s", p.port.label, p.speed))
            .collect();
        let library = self.verbs.path().display();
        if names.is_empty() {
            tracing::info!("no usable RDMA port on this host ({library})");
        } else {
            tracing::info!("using {} through {library}", names.join(", "));
        }
        if !names.is_empty() {
            tracing::info!("GPU memory: {}", self.gpu_memory());
        }
        if self.settings.port_recovery && !self.settings.port_failover {
            tracing::warn!(
                "NCCL_IB_RESILIENCY_PORT_RECOVERY=1 has no effect without NCCL_IB_RESILIENCY_PORT_FAILOVER=1: a connection \
                 that ends with its first failed rail has none to bring back"
            );
        }
        let memlock = host::limits::memlock();
        if !names.is_empty() && memlock.soft.is_some() {
            tracing::info!(
                "memory lock limit in bytes: {memlock}; each registration counts against it"
            );
        }
    }

    /// How devices reach GPU memory.
    fn gpu_memory(&self) -> String {
        let devices = self.devices();
        let ports = devices.all_ports();
        let takers: Vec<_> = ports.iter().filter(|p| p.dmabuf).map(|p| &*p.port.label).collect();
        let dmabuf = match takers.len() {
            0 => "no device takes DMA-BUFs".to_owned(),
            all if all == ports.len() => "all devices take DMA-BUFs".to_owned(),
            _ => format!("DMA-BUFs on {} only", takers.join(", ")),
        };
        match Sysfs::from_settings(&self.settings).peermem() {
            Some(module) => format!("{dmabuf}; by address through {module}"),
            None => format!("{dmabuf}; not by address, as no peer-memory module is loaded"),
        }
    }

    /// Whether the kernel has RDMA devices, whatever the library says: then a library that fails is worth a warning.
    pub fn kernel_has_devices(settings: &Settings) -> bool {
        !Sysfs::from_settings(settings).devices().is_empty()
    }

    /// The machine it runs on.
    fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The devices.
    pub fn devices(&self) -> MutexGuard<'_, Devices> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rails of device `index`, opened.
    ///
    /// # Errors
    /// There is no such device, or a member cannot be opened or addressed.
    pub fn rails(&self, index: i32) -> Result<Vec<Rail>> {
        self.prepare();
        let ports = {
            let devices = self.devices();
            devices.ports(devices.get(index)?)
        };
        ports
            .into_iter()
            .map(|device| {
                let open = device.open(&self.verbs, &self.machine)?;
                device.use_over(open, &self.settings)
            })
            .collect()
    }

    /// What NCCL's profiler is told of the transfers of an end over these rails.
    fn profile(&self, origin: Origin, rails: &[Rail]) -> Option<Box<Profile>> {
        let number = |rail: &Rail| {
            let at = self.devices().all_ports().iter().position(|p| Arc::ptr_eq(p, &rail.device));
            at.and_then(|at| c_int::try_from(at).ok()).unwrap_or(-1)
        };
        let devices = rails.iter().map(number).collect();
        Profile::new(origin.profiler, self.settings.profiler, devices).map(Box::new)
    }

    /// Where the plugin's own memory may come from if it cannot be pinned.
    pub(crate) fn fallback(&self) -> Option<&Arc<Arena>> {
        (self.settings.reg_fallback == RegFallback::Bounce).then_some(&self.arena)
    }

    /// Sets memory for copies aside with every device, where the machine shows that later registrations may fail.
    /// Called when the plugin starts or is about to be used; a failure is told and is not fatal.
    pub fn prepare(&self) {
        let Some(risk) = self.risk.as_ref().filter(|_| self.fallback().is_some()) else { return };
        if self.prepared.swap(true, Ordering::Relaxed) {
            return;
        }
        let opened = match self.opened() {
            Ok(opened) if opened.is_empty() => return,
            Ok(opened) => opened,
            Err(e) => {
                tracing::warn!("no memory is pinned ahead, although {risk}: {e}");
                return;
            }
        };
        let (len, held_back) = self.spare_memory(opened.len());
        if len == 0 {
            tracing::info!("no memory is pinned ahead, although {risk}: {held_back}");
            return;
        }
        let registries: Vec<_> = opened.iter().map(|(_, registry)| Arc::clone(registry)).collect();
        match self.arena.set_aside(len, &registries) {
            Ok(()) => tracing::info!(
                "{} bytes are pinned ahead for buffers that cannot be pinned later: {risk}",
                self.arena.bytes()
            ),
            Err(e) => {
                let devices = opened.iter().map(|(device, registry)| (&**device, registry));
                let e = self.explain_own(e, devices, len, "no memory is pinned ahead");
                if !e.is_reported() {
                    tracing::warn!("no memory is pinned ahead, although {risk}: {e}");
                }
            }
        }
    }

    /// How much may be pinned ahead with so many devices without taking it from what the job itself will need, and what
    /// bounds it.
    fn spare_memory(&self, devices: usize) -> (usize, &'static str) {
        let Machine { proc, sysfs } = &self.machine;
        let share = |left: u64, of: u64| usize::try_from(left / of).unwrap_or(usize::MAX);
        let memory = host::headroom(proc, sysfs.root()).map_or(usize::MAX, |left| share(left, 8));
        let status = host::status::Status::read(proc);
        let limit = host::limits::memlock_of(proc).soft;
        let quota = match (limit, status.ipc_lock()) {
            (Some(limit), Some(false)) => {
                share(limit.saturating_sub(status.pinned.unwrap_or(0)), 4 * devices as u64)
            }
            _ => usize::MAX,
        };
        let len = AHEAD.min(memory).min(quota);
        let why = if quota < memory { "the memory lock limit is low" } else { "memory is short" };
        // Less would not serve a single connection.
        if len < 8 << 20 { (0, why) } else { (len, why) }
    }

    /// Gives back what nothing uses any more. Called when the last communicator is gone.
    pub fn idle(&self) {
        self.arena.let_go();
        self.prepared.store(false, Ordering::Relaxed);
        self.fork.check_once(Moment::Idle);
    }
}

/// What registrations of a communicator need to know about it.
#[derive(Debug)]
struct Whose {
    direction: Direction,
    peer: Peer,
    /// NCCL's identifier of the communicator, where the table version tells it.
    comm_id: Option<u64>,
    /// Where a receiving end finds its table of copies.
    spare: Spare,
    /// Its number, unique in this process.
    owner: u64,
}

/// A number for a communicator.
fn next_owner() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What both threads of a communicator use: the Service thread registers memory while the Progress thread moves data.
#[derive(Debug)]
pub struct CommShared {
    // Dropped first: the peer hears goodbye after the queue pairs are gone, see Comm.
    _watch: Watch,
    regions: Regions,
    gate: Gate,
    /// What buffers of a sending end are copied through, once one has to be.
    chunks: OnceLock<Arc<Chunks>>,
    whose: Whose,
    rails: Vec<Rail>,
    transport: Arc<Transport>,
}

impl CommShared {
    fn new(
        transport: &Arc<Transport>,
        rails: Vec<Rail>,
        channel: Channel,
        gate: &Gate,
        whose: Whose,
        queues: Vec<usize>,
        failover: Option<Arc<Failover>>,
    ) -> Result<Self> {
        let devices: Vec<_> = rails.iter().map(|r| Arc::clone(&r.open)).collect();
        let queues = match &failover {
            Some(failover) => failover.kept(queues),
            None => queues,
        };
        let watch = {
            let Peer { mail, pace, first_credit, idle, board, .. } = &whose.peer;
            let links = Links {
                queues: queues.into(),
                mail: Arc::clone(mail),
                pace: Arc::clone(pace),
                first_credit: first_credit.clone(),
                idle: idle.clone(),
                failover,
                board: board.clone(),
            };
            transport.events.watch(channel, gate, &devices, links)?
        };
        Ok(Self {
            _watch: watch,
            regions: Regions::new(whose.peer.board.clone()),
            gate: gate.clone(),
            chunks: OnceLock::new(),
            whose,
            rails,
            transport: Arc::clone(transport),
        })
    }
}

impl Drop for CommShared {
    /// Before the registrations end with the fields.
    fn drop(&mut self) {
        self.transport.fork.check_once(Moment::Closing);
    }
}

/// One end of a connection. `data` belongs to the thread that moves data, `shared` to everybody.
///
/// Fields drop in order: queue pairs are destroyed, so that no device touches memory any more, before the peer hears
/// goodbye and before devices can be closed.
#[derive(Debug)]
pub struct Comm<T> {
    /// The data path.
    pub data: T,
    /// The rest.
    pub shared: CommShared,
}

impl<T> Comm<T> {
    fn new(shared: CommShared, data: T) -> Box<Self> {
        Box::new(Self { data, shared })
    }
}
