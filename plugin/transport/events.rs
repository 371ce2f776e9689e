//! The one thread of the plugin: it watches side channels and device events, and writes gates.
//!
//! It runs only while something is watched. It never takes part in moving data, and whoever removes the last watch
//! joins it, so that no thread is left when the library is unloaded.

mod device;
mod peer;

use self::device::{DeviceWatch, User};
use self::peer::{Look, PeerWatch};
use super::channel::Channel;
use super::comm::FirstCredit;
use super::device::OpenDevice;
use super::failover::Failover;
use super::failure::Failures;
use super::idle::Idle;
use super::mail::Mail;
use super::pace::Pace;
use super::wire::Message;
use crate::clock;
use crate::error::{Error, Result};
use crate::host::descriptors::{self, Held};
use crate::memory::Gate;
use crate::memory::arena::Arena;
use crate::memory::status::{self, Board, EVERY};
use crate::signal::{self, Handler};
use crate::thread::Thread;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

const WAKE: u64 = 0;

/// The watcher. Cheap while nothing is watched.
#[derive(Debug, Default)]
pub struct Events {
    // Held while the thread is started or joined, so that the two never overlap.
    running: Mutex<Option<Running>>,
    policy: Arc<Policy>,
}

/// What events of devices come to.
#[derive(Debug, Default)]
pub struct Policy {
    /// Fatal ones end the connections of the device.
    pub return_fatal: bool,
    /// How long a port may be down before its connections fail, in words.
    pub patience: String,
    /// Connections with other rails go on over them.
    pub failover: bool,
    /// SIGUSR2 asks for the status.
    pub signal: bool,
    /// Where that is written.
    pub failures: Arc<Failures>,
    /// What is set aside for copies.
    pub arena: Option<Arc<Arena>>,
}

#[derive(Debug)]
struct Running {
    shared: Arc<Shared>,
    thread: Thread,
    // Its signal is served until the thread has ended.
    _handler: Option<Handler>,
}

#[derive(Debug)]
struct Shared {
    epoll: OwnedFd,
    wake: OwnedFd,
    _descriptors: Held,
    policy: Arc<Policy>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    stop: bool,
    peers: HashMap<u64, PeerWatch>,
    devices: HashMap<u64, DeviceWatch>,
}

/// What concerns a connection beside its gate.
#[derive(Debug)]
pub struct Links {
    /// Its queues on all devices, as events call them; without those that may be replaced, of which failover knows: by
    /// then another connection may have one under the name of one that is no more.
    pub queues: Arc<[usize]>,
    /// What it has to tell the other end.
    pub mail: Arc<Mail>,
    /// When its requests were posted.
    pub pace: Arc<Pace>,
    /// What bounds its wait for the first receive of the other end.
    pub first_credit: Option<Arc<FirstCredit>>,
    /// Looks after it while it posts nothing.
    pub idle: Option<Idle>,
    /// What is known of its lanes, where others go on when one fails.
    pub failover: Option<Arc<Failover>>,
    /// Where other processes see what it does.
    pub board: Board,
}

/// Keeps one connection watched; dropping it says goodbye to the peer and ends the watch.
#[derive(Debug)]
pub struct Watch {
    events: Arc<Events>,
    key: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Events {
    /// A watcher.
    pub fn new(policy: Policy) -> Arc<Self> {
        Arc::new(Self { running: Mutex::new(None), policy: Arc::new(policy) })
    }

    /// Whether a connection can be watched now: the thread takes descriptors of its own.
    ///
    /// # Errors
    /// The process has none left.
    pub(super) fn can_watch(&self) -> Result<()> {
        if lock(&self.running).is_some() {
            return Ok(());
        }
        descriptors::spare(2).map_err(|e| Error::io("starting the event thread", &e))
    }

    /// Watches the side channel of a connection, the devices it uses, and its queues on them, and sends its mail.
    ///
    /// # Errors
    /// No descriptor or thread can be had.
    pub fn watch(
        self: &Arc<Self>,
        channel: Channel,
        gate: &Gate,
        devices: &[Arc<OpenDevice>],
        links: Links,
    ) -> Result<Watch> {
        let mut running = lock(&self.running);
        let shared = match &*running {
            Some(r) => Arc::clone(&r.shared),
            None => {
                let new = Running::start(Arc::clone(&self.policy))?;
                let shared = Arc::clone(&new.shared);
                *running = Some(new);
                shared
            }
        };
        let key = shared.add(channel, gate, devices, links);
        match key {
            Ok(key) => Ok(Watch { events: Arc::clone(self), key }),
            Err(e) => {
                Self::stop_if_idle(&mut running);
                Err(e)
            }
        }
    }

    fn stop_if_idle(running: &mut Option<Running>) {
        let idle = running.as_ref().is_some_and(|r| lock(&r.shared.table).peers.is_empty());
        if idle && let Some(Running { shared, thread, _handler }) = running.take() {
            lock(&shared.table).stop = true;
            shared.wake();
            thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut running = lock(&self.events.running);
        if let Some(r) = &*running {
            r.shared.remove(self.key);
        }
        Events::stop_if_idle(&mut running);
    }
}

impl Running {
    fn start(policy: Arc<Policy>) -> Result<Self> {
        let fail = |what: &'static str| move |e: rustix::io::Errno| Error::io(what, &e.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(fail("epoll_create1"))?;
        let wake =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(fail("eventfd"))?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)
            .map_err(fail("epoll_ctl"))?;
        let table = Mutex::new(Table { next: WAKE + 1, ..Table::default() });
        let handler = if policy.signal { take_signal() } else { None };
        let shared = Arc::new(Shared { epoll, wake, _descriptors: Held::new(2), policy, table });
        let for_thread = Arc::clone(&shared);
        let thread = Thread::spawn(c"pinrail-events", move || for_thread.run())?;
        Ok(Self { shared, thread, _handler: handler })
    }
}

impl Shared {
    fn wake(&self) {
        // The counter cannot overflow by one; a failure would mean a closed descriptor, which we own.
        if let Err(e) = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            tracing::warn!("waking the event thread failed: {e}");
        }
    }

    fn listen(&self, fd: impl AsFd, key: u64) -> Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(key), flags)
            .map_err(|e| Error::io("epoll_ctl", &e.into()))
    }

    fn add(
        self: &Arc<Self>,
        channel: Channel,
        gate: &Gate,
        devices: &[Arc<OpenDevice>],
        links: Links,
    ) -> Result<u64> {
        let shared = Arc::downgrade(self);
        links.mail.set_waker(move || {
            if let Some(shared) = shared.upgrade() {
                shared.wake();
            }
        });
        let mut table = lock(&self.table);
        let key = table.next;
        table.next += 1;
        self.listen(channel.stream(), key)?;
        let (queues, failover) = (Arc::clone(&links.queues), links.failover.clone());
        table.peers.insert(key, PeerWatch { channel, gate: gate.clone(), links, asked: None });
        for open in devices {
            let user = User {
                key,
                gate: gate.clone(),
                queues: Arc::clone(&queues),
                failover: failover.clone(),
            };
            let known = table.devices.values_mut().find(|d| Arc::ptr_eq(&d.open, open));
            if let Some(device) = known {
                device.users.push(user);
                continue;
            }
            let device = table.next;
            table.next += 1;
            let watched =
                non_blocking(open).and_then(|()| self.listen(open.context.async_fd(), device));
            if let Err(e) = watched {
                drop(table);
                self.remove(key);
                return Err(e);
            }
            let users = vec![user];
            table.devices.insert(device, DeviceWatch { open: Arc::clone(open), users });
        }
        Ok(key)
    }

    fn remove(&self, key: u64) {
        let mut table = lock(&self.table);
        let mut gone = Vec::new();
        table.devices.retain(|_, device| {
            device.users.retain(|user| user.key != key);
            if device.users.is_empty() {
                gone.push(Arc::clone(&device.open));
            }
            !device.users.is_empty()
        });
        let peer = table.peers.remove(&key);
        for open in &gone {
            self.forget(open.context.async_fd());
        }
        drop(table);
        if let Some(mut peer) = peer {
            self.forget(peer.channel.stream());
            // Best effort: a peer that is gone does not listen.
            peer.tell();
            let counts = peer.links.failover.as_ref().map(|failover| failover.close());
            let _ = peer.channel.send(&Message::Bye(counts.unwrap_or_default()));
        }
        // The device may be closed by this drop, which is why it happens outside the lock.
        drop(gone);
    }

    fn forget(&self, fd: impl AsFd) {
        if let Err(e) = epoll::delete(&self.epoll, fd)
            && e != rustix::io::Errno::NOENT
        {
            tracing::warn!("epoll_ctl(DEL) failed: {e}");
        }
    }

    fn run(&self) {
        let (mut ready, mut heard) = (Vec::with_capacity(16), Vec::with_capacity(16));
        // When rails that failed are to be looked at, and when all connections are.
        let (mut rails, mut tick) = (None::<Instant>, Instant::now() + EVERY);
        loop {
            ready.clear();
            let due = rails.map_or(tick, |rails| rails.min(tick));
            let left = Timespec::try_from(due.saturating_duration_since(Instant::now())).ok();
            let room = rustix::buffer::spare_capacity(&mut ready);
            match epoll::wait(&self.epoll, room, left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    tracing::warn!("epoll_wait failed: {e}; peers are no longer watched");
                    return;
                }
            }
            let mut table = lock(&self.table);
            if table.stop {
                return;
            }
            let now = Instant::now();
            let in_time = now >= tick;
            if in_time {
                tick = now + EVERY;
                table.peers.values_mut().for_each(|peer| peer.tick(now));
            }
            for event in &ready {
                let key = event.data.u64();
                if key == WAKE {
                    // Read so that it wakes again; what it counts does not matter.
                    let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                    table.peers.values_mut().for_each(PeerWatch::tell);
                } else if table.peers.contains_key(&key) {
                    heard.push(key);
                } else if let Some(device) = table.devices.get(&key) {
                    device.look(&self.policy);
                    let flags = event.flags;
                    if flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP) {
                        // The descriptor stays in this state for ever: the device is gone.
                        device.lost(&self.policy);
                        self.forget(device.open.context.async_fd());
                    }
                }
            }
            if in_time || !ready.is_empty() {
                table.show(&self.policy);
            }
            drop(table);
            heard.drain(..).for_each(|key| self.hear(key));
            rails = self.recover();
            if self.policy.signal && signal::was_asked() {
                self.policy.failures.record_status();
            }
        }
    }

    /// Looks what the side channel of a connection says.
    fn hear(&self, key: u64) {
        loop {
            let mut table = lock(&self.table);
            let Some(peer) = table.peers.get_mut(&key) else { return };
            match peer.look() {
                Look::Well => return,
                Look::Over(state) => {
                    peer.gate.report(state);
                    return self.forget(peer.channel.stream());
                }
                Look::Lost(e) => {
                    // RDMA has timeouts of its own; a data network that is well must not suffer.
                    tracing::warn!(
                        "the side channel is lost ({e}); the connection goes on without"
                    );
                    return self.forget(peer.channel.stream());
                }
                // Takes its time, in which others may come and go. What it leads to is done before the next message is
                // looked at.
                Look::Recovery(failover, rails, attempt, step) => {
                    drop(table);
                    if let Some(recovery) = &failover.recovery {
                        recovery.hear(&failover, rails, attempt, step);
                    }
                }
            }
        }
    }

    /// Goes on with bringing rails back; when there is more to do.
    fn recover(&self) -> Option<Instant> {
        let roused = |peer: &PeerWatch| {
            let failover = peer.links.failover.as_ref()?;
            failover.recovery.as_ref()?.is_roused().then(|| Arc::clone(failover))
        };
        let ends: Vec<_> = lock(&self.table).peers.values().filter_map(roused).collect();
        let attend = |end: &Arc<Failover>| end.recovery.as_ref()?.attend(end);
        ends.iter().filter_map(attend).min()
    }
}

impl Table {
    /// Shows other processes how the connections are.
    fn show(&self, policy: &Policy) {
        let now = clock::nanos();
        self.peers.values().for_each(|peer| peer.show(now));
        let aside = policy.arena.as_ref().map_or(0, |arena| arena.bytes());
        status::look(now, aside as u64);
    }
}

/// Makes SIGUSR2 ask for the status, unless the program has its own use for it.
fn take_signal() -> Option<Handler> {
    match Handler::install() {
        Ok(Some(handler)) => return Some(handler),
        Ok(None) => tracing::info!(
            "PINRAIL_STATUS_SIGNAL=1, but the program has a handler for SIGUSR2, which stays; use `pinrail status`"
        ),
        Err(e) => tracing::warn!("PINRAIL_STATUS_SIGNAL=1 has no effect: sigaction failed: {e}"),
    }
    None
}

fn non_blocking(open: &OpenDevice) -> Result<()> {
    let fd = open.context.async_fd();
    fcntl_getfl(fd)
        .and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK))
        .map_err(|e| Error::io("fcntl on the device's event descriptor", &e.into()))
}
