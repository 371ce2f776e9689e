//! Connections and the data path: state machines over verbs objects. No FFI, and no unsafe code outside the one file
//! that holds remotely written memory.

pub mod address;
pub mod channel;
pub mod comm;
pub mod connect;
pub mod connection;
pub mod credits;
pub mod device;
pub mod events;
#[allow(unsafe_code, reason = "holds memory that a peer writes")]
pub mod fifo;
pub mod flush;
pub mod lane;
pub mod listener;
pub mod pump;
pub mod receives;
pub mod recv;
pub mod request;
pub mod send;
pub mod slot;
pub mod stripe;
pub mod wire;

use crate::config::{RelaxedOrdering, Settings};
use crate::cuda::driver::{Driver, MemoryKind};
use crate::error::{Error, Result};
use crate::host::sysfs::Sysfs;
use crate::memory::region::Regions;
use crate::memory::registry::{Registered, Registry};
use crate::memory::{Gate, GateState, Region, RegionKind};
use crate::verbs::Verbs;
use crate::verbs::mr::Access;
use address::PortAddress;
use channel::Channel;
use device::{Devices, Rail};
use events::{Events, Watch};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
}

impl Transport {
    /// Loads the verbs library and finds the devices.
    ///
    /// # Errors
    /// The library cannot be used, or cannot list devices.
    pub fn start(settings: Settings) -> Result<Arc<Self>> {
        if let Err(e) = crate::host::limits::raise_nofile() {
            tracing::info!("RLIMIT_NOFILE stays as it is: {e}");
        }
        let verbs = Verbs::load(settings.verbs_lib.as_deref())?;
        verbs.prepare_for_fork();
        let ports =
            if settings.disabled() { Vec::new() } else { device::discover(&verbs, &settings)? };
        let names: Vec<_> =
            ports.iter().map(|p| format!("{} {} Mb/s", p.port.label, p.speed)).collect();
        if settings.disabled() {
            tracing::warn!(
                "NCCL_IB_DISABLE=1 turns pinrail off too; NCCL_NET=pinrail would override it"
            );
        } else if names.is_empty() {
            tracing::info!("no usable RDMA port on this host ({})", verbs.path().display());
        } else {
            tracing::info!("using {} through {}", names.join(", "), verbs.path().display());
        }
        let events = Events::new(settings.return_async_events);
        Ok(Arc::new(Self { settings, verbs, devices: Mutex::new(Devices::new(ports)), events }))
    }

    /// Whether the kernel has RDMA devices, whatever the library says: then a library that fails is worth a warning.
    pub fn kernel_has_devices(settings: &Settings) -> bool {
        !Sysfs::from_settings(settings).devices().is_empty()
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
        let ports = {
            let devices = self.devices();
            devices.ports(devices.get(index)?)
        };
        ports
            .into_iter()
            .map(|device| {
                let open = device.open(&self.verbs)?;
                let address = PortAddress::of(&open.context, &device.port, &self.settings)?;
                Ok(Rail { device, open, address })
            })
            .collect()
    }

    fn bulk_access(&self) -> Result<Access> {
        match (self.settings.relaxed_ordering, self.verbs.has_optional_access()) {
            (RelaxedOrdering::Off, _) | (RelaxedOrdering::Auto, false) => Ok(Access::BULK),
            (_, true) => Ok(Access::BULK.relaxed()),
            (RelaxedOrdering::Required, false) => Err(Error::usage(format!(
                "NCCL_IB_PCI_RELAXED_ORDERING=1, but {} has no ibv_reg_mr_iova2",
                self.verbs.path().display()
            ))),
        }
    }
}

/// What both threads of a communicator use: the Service thread registers memory while the Progress thread moves data.
#[derive(Debug)]
pub struct CommShared {
    // Dropped first: the peer hears goodbye after the queue pairs are gone, see Comm.
    _watch: Watch,
    regions: Regions,
    gate: Gate,
    rails: Vec<Rail>,
    transport: Arc<Transport>,
}

impl CommShared {
    fn new(
        transport: &Arc<Transport>,
        rails: Vec<Rail>,
        channel: Channel,
        gate: &Gate,
    ) -> Result<Self> {
        let devices: Vec<_> = rails.iter().map(|r| Arc::clone(&r.open)).collect();
        let watch = transport.events.watch(channel, gate, &devices)?;
        Ok(Self {
            _watch: watch,
            regions: Regions::default(),
            gate: gate.clone(),
            rails,
            transport: Arc::clone(transport),
        })
    }

    fn refuse_in_child(&self) -> Result<()> {
        if self.gate.state() == GateState::Forked {
            return Err(Error::usage(
                "called in a forked child: connections belong to the process that made them",
            ));
        }
        Ok(())
    }

    /// Registers on every rail, with relaxed ordering if that is to be had.
    fn on_all_rails(
        &self,
        register: impl Fn(&Arc<Registry>, Access) -> Result<Arc<Registered>>,
    ) -> Result<Vec<Arc<Registered>>> {
        let access = self.transport.bulk_access()?;
        let all = |access| self.rails.iter().map(|r| register(&r.open.registry, access)).collect();
        let first: Result<Vec<_>> = all(access);
        first.or_else(|e| {
            // A device may refuse optional access bits; only where the operator did not demand them.
            let required = self.transport.settings.relaxed_ordering == RelaxedOrdering::Required;
            if e.errno() != Some(libc::EINVAL) || !access.is_relaxed() || required {
                return Err(e);
            }
            tracing::info!("{e}; trying without relaxed ordering");
            all(Access::BULK)
        })
    }

    /// Registers `len` bytes at `addr` on every rail. Safe against the data path of the same communicator.
    ///
    /// # Errors
    /// A verb fails; range, kind and what the CUDA driver says of the address are told.
    pub fn register(&self, addr: usize, len: usize, kind: RegionKind) -> Result<Region> {
        self.refuse_in_child()?;
        if kind == RegionKind::Cuda && self.rails.iter().any(|r| !r.device.peer_memory) {
            return Err(Error::usage(format!(
                "regMr of {len} bytes of CUDA memory at {addr:#x}: no peer-memory kernel module \
                 (nvidia_peermem) is loaded; load it, or let NCCL use DMA-BUF"
            )));
        }
        let registered = self.on_all_rails(|registry, access| registry.register(addr, len, access));
        let registered = registered.map_err(|e| {
            let memory = Driver::loaded().map_or(MemoryKind::Unknown, |d| d.kind(addr as u64));
            e.context(format_args!(
                "regMr of {len} bytes at {addr:#x} ({kind:?}; the CUDA driver says {memory:?})"
            ))
        })?;
        Ok(self.regions.add(addr, len, kind, registered))
    }

    /// Registers `len` bytes from `offset` of a DMA-BUF on every rail, addressed as `addr`. The descriptor is not kept.
    ///
    /// # Errors
    /// A verb fails.
    pub fn register_dmabuf(
        &self,
        addr: usize,
        len: usize,
        offset: u64,
        fd: BorrowedFd<'_>,
    ) -> Result<Region> {
        self.refuse_in_child()?;
        let registered = self
            .on_all_rails(|registry, access| {
                registry.register_dmabuf(addr, len, fd, offset, access)
            })
            .map_err(|e| e.context(format_args!("regMrDmaBuf of {len} bytes at {addr:#x}")))?;
        Ok(self.regions.add(addr, len, RegionKind::DmaBuf, registered))
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
