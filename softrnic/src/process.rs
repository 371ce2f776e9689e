//! What one process has once: its place in the fabric, its region, its peers and its index pools.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::assist::Assist;
use crate::env::{Engine, settings};
use crate::faults::table::STEPPED;
use crate::faults::timers;
use crate::index::IndexPool;
use crate::shm::fabric::Fabric;
use crate::shm::heap::Heap;
use crate::shm::layout::{self, MrSlot, REGION_MAGIC, REGION_VERSION};
use crate::shm::mapping::Mapping;
use crate::shm::peer::{Peer, Unreachable};
use crate::shm::region::Region;
use crate::sync::lock;

/// The process's membership and tables. Alive from the first open to the last close.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    /// The directory.
    pub fabric: Fabric,
    /// Our region.
    pub region: Arc<Region>,
    /// Ring allocator in our region.
    pub heap: Heap,
    /// The private copy of the MR table: local keys are never looked up in memory that peers can write.
    mrs: Mapping,
    /// QP indices.
    pub qps: IndexPool,
    /// CQ indices.
    pub cqs: IndexPool,
    /// SRQ indices.
    pub srqs: IndexPool,
    /// MR indices.
    pub mr_indices: IndexPool,
    /// PD numbers.
    pub pds: IndexPool,
    /// Context indices.
    pub contexts: IndexPool,
    /// Channel indices.
    pub channels: IndexPool,
    /// Variant byte of the next key.
    pub key_variant: AtomicU32,
    /// The thread that resumes parked requests.
    pub assist: Assist,
    own: Arc<Peer>,
    peers: Mutex<HashMap<u32, Arc<Peer>>>,
    region_fd: Mutex<Option<OwnedFd>>,
    /// Holds the nonce; peers read it to prove that they can read us.
    _probe: Box<AtomicU64>,
}

static CURRENT: Mutex<Option<(Arc<Process>, usize)>> = Mutex::new(None);

fn nonce() -> u64 {
    let mut bytes = [0_u8; 8];
    // SAFETY: the buffer is 8 bytes long.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), 8, 0) };
    let time = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(1, |d| d.as_nanos());
    let mixed = u64::from_ne_bytes(bytes)
        ^ if n == 8 { 0 } else { u64::try_from(time & u128::from(u64::MAX)).unwrap_or(1) };
    mixed.max(1)
}

/// Leaves the fabric when the program exits (or unloads the library) without having closed its devices, so that no
/// empty directory stays behind. Nothing else is torn down: other threads may still be running.
extern "C" fn at_exit() {
    crate::capi::guard((), || {
        // A thread that is killed by exit may hold the lock; then the next process sweeps the slot.
        if let Ok(current) = CURRENT.try_lock()
            && let Some((process, _)) = current.as_ref()
            && process.pid == std::process::id()
        {
            process.fabric.leave();
        }
    });
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

impl Process {
    fn create() -> io::Result<Arc<Self>> {
        // Yama lets only descendants attach unless the target opts in. Without Yama this fails, which is fine.
        // SAFETY: a plain system call.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
        let heap_bytes = settings().heap_bytes();
        let (region, fd) = Region::create(heap_bytes)?;
        let nonce = nonce();
        let probe = Box::new(AtomicU64::new(nonce));
        let header = region.header();
        header.version.store(REGION_VERSION, Ordering::Relaxed);
        header.pid.store(std::process::id(), Ordering::Relaxed);
        header.nonce.store(nonce, Ordering::Relaxed);
        header.probe.store((&raw const *probe).expose_provenance() as u64, Ordering::Relaxed);
        crate::device::publish(header);
        let (counters, len) = crate::stats::place();
        header.stats.store(counters, Ordering::Relaxed);
        header.stats_len.store(len, Ordering::Relaxed);
        if settings().engine == Engine::Stepped {
            header.gate.store(STEPPED, Ordering::Relaxed);
        }
        header.magic.store(REGION_MAGIC, Ordering::Release);
        let region = Arc::new(region);
        let fabric = Fabric::join(&settings().fabric, fd.as_raw_fd().cast_unsigned(), nonce)?;
        let own = Arc::new(Peer::own(fabric.id, Arc::clone(&region)));
        Ok(Arc::new(Self {
            pid: std::process::id(),
            heap: Heap::new(layout::HEAP_OFF, layout::HEAP_OFF + heap_bytes),
            mrs: Mapping::anonymous(layout::MRS * size_of::<MrSlot>())?,
            qps: IndexPool::new(layout::QPS),
            cqs: IndexPool::new(layout::CQS),
            srqs: IndexPool::new(layout::SRQS),
            mr_indices: IndexPool::new(layout::MRS),
            pds: IndexPool::new(1 << 20),
            contexts: IndexPool::new(layout::CONTEXTS),
            channels: IndexPool::new(layout::CHANNELS),
            key_variant: AtomicU32::new(u32::try_from(nonce & 0xff).unwrap_or(0)),
            assist: Assist::default(),
            own,
            peers: Mutex::new(HashMap::new()),
            region_fd: Mutex::new(Some(fd)),
            _probe: probe,
            region,
            fabric,
        }))
    }

    /// Takes a reference on the process's state, creating it on first use.
    pub fn open() -> io::Result<Arc<Self>> {
        let mut current = lock(&CURRENT);
        if let Some((process, users)) = current.as_mut() {
            if process.pid == std::process::id() {
                *users += 1;
                return Ok(Arc::clone(process));
            }
            // A forked child: what it inherited belongs to its parent and must not be torn down here.
            std::mem::forget(current.take());
            crate::objects::abandon();
        }
        let process = Self::create()?;
        crate::faults::publish(&process);
        *current = Some((Arc::clone(&process), 1));
        Ok(process)
    }

    /// The process's state, while any device is open.
    pub fn current() -> Option<Arc<Self>> {
        let current = lock(&CURRENT);
        let (process, _) = current.as_ref()?;
        (process.pid == std::process::id()).then(|| Arc::clone(process))
    }

    /// Gives a reference back; the last one leaves the fabric and stops the assisting thread.
    pub fn close(self: &Arc<Self>) {
        let mut current = lock(&CURRENT);
        let Some((process, users)) = current.as_mut() else { return };
        if !Arc::ptr_eq(process, self) {
            return;
        }
        *users -= 1;
        if *users == 0 {
            *current = None;
            drop(current);
            self.assist.stop(&self.region);
            timers::clear();
            self.fabric.leave();
            lock(&self.peers).clear();
            self.own.forget();
            drop(lock(&self.region_fd).take());
            crate::objects::purge();
        }
    }

    /// Our identity in locks and waiter words.
    pub fn id(&self) -> u32 {
        self.fabric.id
    }

    /// Our slot: the upper bits of our QP numbers and keys.
    pub fn slot(&self) -> u32 {
        self.fabric.id & 0xff
    }

    /// The private MR table.
    pub fn local_mr(&self, index: u32) -> Option<&MrSlot> {
        if index as usize >= layout::MRS {
            return None;
        }
        self.mrs.view(index as usize * size_of::<MrSlot>())
    }

    /// The process in a directory slot.
    pub fn peer(&self, slot: u32) -> Result<Arc<Peer>, Unreachable> {
        if slot == self.slot() {
            return Ok(Arc::clone(&self.own));
        }
        let record = self.fabric.record(slot as usize).ok_or(Unreachable::Gone)?;
        let mut peers = lock(&self.peers);
        if let Some(peer) = peers.get(&slot) {
            if peer.id == record.id && !peer.known_dead() {
                return Ok(Arc::clone(peer));
            }
            peers.remove(&slot);
        }
        let peer = Arc::new(Peer::attach(&self.fabric, slot)?);
        peers.insert(slot, Arc::clone(&peer));
        Ok(peer)
    }

    /// Ourselves as a peer.
    pub fn own(&self) -> &Arc<Peer> {
        &self.own
    }

    /// Wakes the process that waits for a receive.
    pub fn kick(&self, id: u32) {
        if let Ok(peer) = self.peer(id & 0xff)
            && peer.id == id
        {
            peer.region.kick();
        }
    }
}
