//! Memory that NCCL hands to a communicator: registered with the devices of its rails, or explained, and where that can
//! help reached through copies.

use super::device::{Device, Rail};
use super::fork::Moment;
use super::{CommShared, Transport, Whose};
use crate::config::RelaxedOrdering;
use crate::cuda::driver::{Driver, MemoryKind};
use crate::error::{Error, Result};
use crate::host;
use crate::memory::arena::Arena;
use crate::memory::bounce::{Bounced, Chunks, Landing, copy_rate};
use crate::memory::diagnosis::{
    Attempt, Candidate, DeviceLimits, Direction, Failure, Live, Outcome, Report, diagnose,
};
use crate::memory::ledger::{Ender, Pin, PinLedger, PinRecord, Pinner, Purpose};
use crate::memory::region::Records;
use crate::memory::registry::{Registered, Registry};
use crate::memory::{Extent, GateState, Given, PageOwned, Region, RegionKind};
use crate::verbs::mr::Access;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

/// What is to be registered.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    addr: usize,
    len: usize,
    kind: RegionKind,
    /// Descriptor and offset of a DMA-BUF.
    dmabuf: Option<(i32, u64)>,
    /// The whole pages; none of a DMA-BUF.
    extent: Option<Extent>,
}

/// Where the copies of a buffer go.
#[derive(Debug)]
pub(super) enum Room {
    Send(Arc<Chunks>),
    Receive(Landing),
}

/// A registration that failed: with which device and access, and how the second attempt ended.
struct Refused<'a> {
    device: &'a Device,
    registry: &'a Arc<Registry>,
    access: Access,
    error: Error,
    retry: Option<Attempt>,
}

impl<'a> Refused<'a> {
    fn of(rail: &'a Rail, access: Access, error: Error) -> Self {
        Self { device: &rail.device, registry: &rail.open.registry, access, error, retry: None }
    }
}

type Registrations = Vec<Arc<Registered>>;

/// Who asks for a registration, in the inventory: which end of which communicator, and whose peer.
impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = match self.direction {
            Direction::Send => "sends to",
            Direction::Receive => "receives from",
        };
        write!(f, "regMr: {end} {} pid {}", self.peer.host, self.peer.pid)?;
        self.comm_id.map_or(Ok(()), |id| write!(f, ", communicator {id:#x}"))
    }
}

impl Transport {
    /// The access that bulk memory is registered with.
    ///
    /// # Errors
    /// The settings demand relaxed ordering and the library cannot.
    pub fn bulk_access(&self) -> Result<Access> {
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

impl CommShared {
    fn refuse_in_child(&self) -> Result<()> {
        if self.gate.state() == GateState::Forked {
            return Err(Error::usage(
                "called in a forked child: connections belong to the process that made them",
            ));
        }
        Ok(())
    }

    /// Registers memory on every rail, or arranges for copies where it cannot be pinned or where registering it would
    /// take other data from forked children. Safe against the data path of the same communicator.
    ///
    /// # Errors
    /// A verb fails and copies are no way out. Why was told, with a remedy.
    pub fn register(&self, given: Given, kind: RegionKind) -> Result<Region> {
        self.refuse_in_child()?;
        let region = self.register_given(given, kind)?;
        self.transport.fork.check_once(Moment::Registered);
        Ok(region)
    }

    fn register_given(&self, given: Given, kind: RegionKind) -> Result<Region> {
        let (addr, len) = (given.addr(), given.len());
        let mut records = Records::default();
        // Memory from pinrail_host_alloc, whatever kind of pointer the caller takes it for.
        if let Some(registered) = self.known(addr, len) {
            return Ok(self.regions.add(addr, len, kind, registered, records));
        }
        let extent = Extent::of_given(&given)?;
        let fork = &self.transport.fork;
        let shared = (kind == RegionKind::Host).then(|| fork.shared(addr, len)).flatten();
        if let Some(shared) = shared {
            // Where there is no room for copies, the memory is registered after all.
            let (entry, room) =
                fork.enter(shared, || self.transport.fallback().map(|arena| self.room(len, arena)));
            records.shared = Some(entry);
            if let Some(room) = room {
                return Ok(self.bounce(given, room, records));
            }
        }
        records.earlier = self.transport.earlier_pin(addr, len);
        let wanted = Wanted { addr, len, kind, dmabuf: None, extent: Some(extent) };
        let lacking = self.rails.iter().find(|r| !r.device.peer_memory);
        if let Some(rail) = lacking.filter(|_| kind == RegionKind::Cuda) {
            let error = Error::usage(
                "no peer-memory kernel module (nvidia_peermem) is loaded; load it, or let NCCL use DMA-BUF",
            )
            .with_errno(libc::EOPNOTSUPP);
            let refused = Refused::of(rail, self.transport.bulk_access()?, error);
            return Err(self.explain(wanted, refused));
        }
        let register = |registry: &Arc<Registry>, access| registry.register(extent, kind, access);
        let (refused, report) = match self.register_or_explain(wanted, register)? {
            Ok(registered) => return Ok(self.regions.add(addr, len, kind, registered, records)),
            Err(explained) => *explained,
        };
        let set_aside = self.transport.arena.is_set_aside();
        let fallback = self.transport.fallback().filter(|_| report.bounce_may_help(set_aside));
        let Some(arena) = fallback else {
            return Err(self.transport.fails(&report, "the registration fails", refused.error));
        };
        match self.room(len, arena) {
            Ok(room) => {
                self.transport.reporter.tell(&report, &Outcome::GoesOn(meanwhile()));
                // No device holds the pages, and what was known of others' pins explained the failure.
                Ok(self.bounce(given, room, Records::default()))
            }
            Err(e) => {
                let limit = host::limits::memlock_of(&self.transport.machine.proc);
                let limit = limit.soft.map_or_else(String::new, |bytes| {
                    format!(" (the memory lock limit is {bytes} bytes; raise it)")
                });
                let what =
                    format!("the registration fails, because copies cannot stand in: {e}{limit}");
                Err(self.transport.fails(&report, &what, e))
            }
        }
    }

    /// Registers on every rail, twice if the reason was gone when it was looked for; else the reason.
    fn register_or_explain(
        &self,
        wanted: Wanted,
        register: impl Fn(&Arc<Registry>, Access) -> Result<Arc<Registered>>,
    ) -> Result<std::result::Result<Registrations, Box<(Refused<'_>, Report)>>> {
        let mut first = true;
        loop {
            let refused = match self.on_all_rails(wanted, &register)? {
                Ok(registered) => return Ok(Ok(registered)),
                Err(refused) => refused,
            };
            let report = self.diagnose(wanted, &refused);
            if !(first && report.transient()) {
                return Ok(Err(Box::new((refused, report))));
            }
            tracing::info!("{}; it works when tried again", refused.error);
            first = false;
        }
    }

    /// What copies of a buffer of `len` bytes need.
    fn room(&self, len: usize, arena: &Arc<Arena>) -> Result<Room> {
        let registries: Vec<_> = self.rails.iter().map(|r| Arc::clone(&r.open.registry)).collect();
        match self.whose.direction {
            Direction::Send => self
                .chunks(|| Chunks::new(arena, &registries))
                .map(|chunks| Room::Send(Arc::clone(chunks))),
            Direction::Receive => Landing::new(arena, &registries, len).map(Room::Receive),
        }
    }

    /// A region that is reached through copies.
    fn bounce(&self, given: Given, room: Room, records: Records) -> Region {
        let (addr, len) = (given.addr(), given.len());
        let owner = self.whose.owner;
        let bounced = match room {
            Room::Send(chunks) => Bounced::send(given, owner, &chunks),
            Room::Receive(landing) => Bounced::receive(given, owner, landing),
        };
        self.whose.spare.provide();
        self.regions.add_bounced(addr, len, bounced, records)
    }

    /// The chunks that all buffers of this end are sent from.
    fn chunks(&self, make: impl FnOnce() -> Result<Arc<Chunks>>) -> Result<&Arc<Chunks>> {
        if let Some(chunks) = self.chunks.get() {
            return Ok(chunks);
        }
        let chunks = make()?;
        Ok(self.chunks.get_or_init(|| chunks))
    }

    /// Registrations of a program's memory that cover the range, with every rail.
    fn known(&self, addr: usize, len: usize) -> Option<Registrations> {
        let access = self.transport.bulk_access().ok()?;
        let find = |access| -> Option<Registrations> {
            self.rails.iter().map(|r| r.open.registry.find_kept(addr, len, access)).collect()
        };
        find(access).or_else(|| find(Access::BULK))
    }

    /// Registers `len` bytes from `offset` of a DMA-BUF on every rail, addressed as `addr`. The descriptor is not kept.
    ///
    /// # Errors
    /// A verb fails. Why was told.
    pub fn register_dmabuf(
        &self,
        addr: usize,
        len: usize,
        offset: u64,
        fd: BorrowedFd<'_>,
    ) -> Result<Region> {
        self.refuse_in_child()?;
        let kind = RegionKind::DmaBuf;
        let wanted =
            Wanted { addr, len, kind, dmabuf: Some((fd.as_raw_fd(), offset)), extent: None };
        let register = |registry: &Arc<Registry>, access| {
            registry.register_dmabuf(addr, len, fd, offset, access)
        };
        match self.on_all_rails(wanted, register)? {
            Ok(registered) => Ok(self.regions.add(addr, len, kind, registered, Records::default())),
            Err(refused) => Err(self.explain(wanted, refused)),
        }
    }

    /// Registers on every rail, with relaxed ordering if that is to be had.
    fn on_all_rails(
        &self,
        wanted: Wanted,
        register: impl Fn(&Arc<Registry>, Access) -> Result<Arc<Registered>>,
    ) -> Result<std::result::Result<Registrations, Refused<'_>>> {
        // A device may refuse optional access bits; leaving them out is tried where the operator did not demand them.
        let required = self.transport.settings.relaxed_ordering == RelaxedOrdering::Required;
        let plain_only = !required && self.rails.iter().any(|r| r.open.registry.is_plain_only());
        let access = if plain_only { Access::BULK } else { self.transport.bulk_access()? };
        let all = |access| -> std::result::Result<Registrations, (&Rail, Error)> {
            self.rails
                .iter()
                .map(|rail| {
                    let new = register(&rail.open.registry, access).map_err(|e| (rail, e))?;
                    new.asked_by(wanted.kind, wanted.addr, wanted.len, &self.whose);
                    Ok(new)
                })
                .collect()
        };
        let (rail, error) = match all(access) {
            Ok(registered) => return Ok(Ok(registered)),
            Err((_, error)) if error.errno().is_none() => return Err(error),
            Err(failed) => failed,
        };
        let mut refused = Refused::of(rail, access, error);
        let unknown_bits = matches!(refused.error.errno(), Some(libc::EINVAL | libc::EOPNOTSUPP));
        if unknown_bits && access.is_relaxed() && !required {
            let second = all(Access::BULK);
            let errno = second.as_ref().err().map(|(_, e)| e.errno().unwrap_or(libc::EIO));
            let verb = second.as_ref().err().and_then(|(_, e)| e.failed_verb());
            let verb = verb.unwrap_or("ibv_reg_mr");
            let access = Access::BULK.bits().cast_unsigned();
            refused.retry = Some(Attempt { verb, access, errno });
            if let Ok(registered) = second {
                rail.open.registry.set_plain_only();
                let report = self.diagnose(wanted, &refused);
                let outcome = Outcome::GoesOn("memory is registered without them".to_owned());
                self.transport.reporter.tell(&report, &outcome);
                return Ok(Ok(registered));
            }
        }
        Ok(Err(refused))
    }

    /// Finds out why, and tells.
    fn explain(&self, wanted: Wanted, refused: Refused<'_>) -> Error {
        let report = self.diagnose(wanted, &refused);
        self.transport.fails(&report, "the registration fails", refused.error)
    }

    fn diagnose(&self, wanted: Wanted, refused: &Refused<'_>) -> Report {
        self.transport.diagnose(wanted, refused, Some(&self.whose))
    }
}

impl Transport {
    /// Records that CUDA holds host memory that is about to be registered, if a driver is there and knows it. What
    /// others may hold nobody can tell.
    fn earlier_pin(&self, addr: usize, len: usize) -> Option<PinRecord> {
        let driver = Driver::loaded()?;
        if driver.kind(addr as u64) != MemoryKind::Host {
            return None;
        }
        let contract = self.cuda_contract();
        let pin = Pin { by: Pinner::Cuda, api: "", contract, ends: Ender::Maker, counts: false };
        PinLedger::process().pin(addr..addr.checked_add(len)?, pin, &[]).ok()
    }

    /// Finds out why memory of the plugin's own, `len` bytes, could not be registered with `devices`, and tells with
    /// `what` comes of it. Any other error, and one that is over when other memory is tried, is left as it is.
    pub(crate) fn explain_own<'a>(
        &self,
        error: Error,
        devices: impl IntoIterator<Item = (&'a Device, &'a Arc<Registry>)>,
        len: usize,
        what: &str,
    ) -> Error {
        if !error.failed_verb().is_some_and(|verb| verb.starts_with("ibv_reg_mr")) {
            return error;
        }
        let Ok(pages) = PageOwned::new(len, Purpose::Probe) else { return error };
        let (kind, access) = (RegionKind::Host, Access::REMOTE_WRITE);
        let extent = Extent::of_own(&pages);
        // Held meanwhile, as they were then: a limit may be met by all of them together.
        let mut held = Vec::new();
        for (device, registry) in devices {
            let error = match registry.register_alone(extent, access) {
                Ok(registered) => {
                    held.push(registered);
                    continue;
                }
                Err(error) => error,
            };
            let (addr, len, extent) = (pages.addr(), pages.len(), Some(extent));
            let wanted = Wanted { addr, len, kind, dmabuf: None, extent };
            let refused = Refused { device, registry, access, error, retry: None };
            let report = self.diagnose(wanted, &refused, None);
            return self.fails(&report, what, refused.error);
        }
        error
    }

    /// Tells a diagnosis after which a call fails: not a second time with the error, and a cause that was told before
    /// not at all.
    fn fails(&self, report: &Report, what: &str, error: Error) -> Error {
        self.reporter.tell(report, &Outcome::Fails(what.to_owned()));
        error.repeated()
    }

    fn diagnose(&self, wanted: Wanted, refused: &Refused<'_>, whose: Option<&Whose>) -> Report {
        let Refused { device, registry, access, error, retry } = refused;
        let usage = registry.usage();
        let ((regions, bytes), (peak_regions, peak_bytes)) = (usage.live(), usage.most());
        let known = |limit: u64| Some(limit).filter(|limit| *limit != 0);
        let verb = error.failed_verb().unwrap_or(match wanted.kind {
            RegionKind::DmaBuf => "ibv_reg_dmabuf_mr",
            RegionKind::Host | RegionKind::Cuda => "ibv_reg_mr",
        });
        let failure = Failure {
            verb,
            errno: error.errno().unwrap_or(libc::EIO),
            access: access.bits().cast_unsigned(),
            optional_demanded: self.settings.relaxed_ordering == RelaxedOrdering::Required,
            retry: *retry,
            address: wanted.addr as u64,
            length: wanted.len as u64,
            kind: wanted.kind,
            fd: wanted.dmabuf.map(|(fd, _)| fd),
            offset: wanted.dmabuf.map_or(0, |(_, offset)| offset),
            device: device.port.label.clone(),
            limits: DeviceLimits {
                max_mr: known(device.max_mr),
                max_mr_size: known(device.max_mr_size),
            },
            live: Live { regions, bytes, peak_regions, peak_bytes },
            own_pinned: Some(PinLedger::process().pinned_bytes()),
            held: PinLedger::process()
                .describe(wanted.addr..wanted.addr.saturating_add(wanted.len)),
            direction: whose.map(|whose| whose.direction),
            peer: whose.map(|whose| whose.peer.to_string()),
            comm: whose.and_then(|whose| whose.comm_id),
        };
        let thorough = !self.reporter.knows(&failure.device);
        diagnose(&self.machine, failure, thorough, |candidate| {
            let extent = match candidate {
                Candidate::Fresh(pages, len) => Extent::of_own(pages).part(pages.addr(), len),
                Candidate::Part(addr, len) => wanted.extent.and_then(|whole| whole.part(addr, len)),
            };
            let extent = extent.ok_or(libc::EFAULT)?;
            registry.register_alone(extent, *access).map_err(|e| e.errno().unwrap_or(libc::EIO))
        })
    }
}

/// What a warning says about copies.
fn meanwhile() -> String {
    let rate = copy_rate()
        .map_or_else(String::new, |bytes| format!(" (at {} MB/s here)", bytes / 1_000_000));
    format!(
        "data are copied through memory that was pinned first{rate}; that tears the 128-byte lines of LL128: set \
         NCCL_PROTO=^LL128"
    )
}
