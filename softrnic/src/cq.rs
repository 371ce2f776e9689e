//! Completion queues: the consumer's side.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};

use crate::abi::*;
use crate::channel::Channel;
use crate::context::Context;
use crate::env::{Engine, settings};
use crate::events::{Acks, record};
use crate::faults::refusal;
use crate::faults::rule::CREATE_CQ;
use crate::objects::{CQ_AT, CQS, RQ_DONE, SQ_DONE, Users};
use crate::public::{Public, zeroed};
use crate::qp::Qp;
use crate::ring::{CqRing, Cqe, KIND_SEND, KIND_VOID, Pushed};
use crate::shm::layout::{CQE_WORDS, CqSlot};
use crate::shm::peer::Peer;
use crate::stats::{self, Counter};
use crate::sync::lock;

/// A completion queue.
#[repr(C)]
#[derive(Debug)]
pub struct Cq {
    public: Public<IbvCq>,
    /// Parent.
    pub context: Arc<Context>,
    /// Channel, if any.
    pub channel: Option<Arc<Channel>>,
    /// Index in the region.
    pub index: u32,
    generation: u32,
    offset: usize,
    bytes: usize,
    /// Copy of the consumer index that an empty poll compares without a lock.
    head: AtomicU32,
    consumer: Mutex<()>,
    empty: AtomicU32,
    yield_every: u32,
    /// Steps of the stepped engine that a poll makes.
    steps: u32,
    /// Number of QPs in `parked`.
    parked_count: AtomicU32,
    parked: Mutex<Vec<Weak<Qp>>>,
    /// Events of the channel.
    pub comp_acks: Acks,
    /// Async events.
    pub async_acks: Acks,
    /// QPs that use it.
    pub users: Users,
}

impl Cq {
    /// Creates one with room for at least `cqe` completions.
    pub fn create(
        context: &Arc<Context>,
        cqe: i32,
        cq_context: *mut std::ffi::c_void,
        channel: Option<Arc<Channel>>,
        vector: i32,
    ) -> Result<Arc<Self>, i32> {
        let wanted = u32::try_from(cqe).map_err(|_| libc::EINVAL)?;
        if wanted == 0 || wanted > settings().max_cqe() || vector != 0 {
            return Err(libc::EINVAL);
        }
        context.works()?;
        if CQS.count() >= settings().max_cq() as usize {
            return Err(libc::ENOMEM);
        }
        let process = &context.process;
        refusal(process, context.device.index, CREATE_CQ, wanted.into()).map_or(Ok(()), Err)?;
        let cap = wanted.next_power_of_two();
        let bytes = cap as usize * CQE_WORDS * 8;
        let offset = process.heap.alloc(bytes).ok_or(libc::ENOMEM)?;
        let Some(index) = process.cqs.take() else {
            process.heap.free(offset, bytes);
            return Err(libc::ENOMEM);
        };
        let slot = process.region.cq(index).ok_or(libc::ENOMEM)?;
        let generation = slot.generation.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        slot.off.store(offset as u64, Ordering::Relaxed);
        slot.channel.store(channel.as_ref().map_or(0, |c| c.index + 1), Ordering::Relaxed);
        slot.ctx.store(context.index, Ordering::Relaxed);
        for word in [&slot.tail, &slot.armed, &slot.overrun, &*slot.head] {
            word.store(0, Ordering::Relaxed);
        }
        slot.lock.reset();
        slot.cap.store(cap, Ordering::Release);
        // SAFETY: integers, pointers and pthread objects.
        let mut public: IbvCq = unsafe { zeroed() };
        public.context = context.ptr();
        public.channel = channel.as_ref().map_or(std::ptr::null_mut(), |c| c.ptr());
        public.cq_context = cq_context;
        public.handle = index;
        public.cqe = i32::try_from(cap).unwrap_or(i32::MAX);
        public.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
        public.cond = libc::PTHREAD_COND_INITIALIZER;
        if let Some(channel) = &channel {
            channel.users.0.fetch_add(1, Ordering::AcqRel);
        }
        let cq = Arc::new(Self {
            public: Public::new(public),
            context: Arc::clone(context),
            channel,
            index,
            generation,
            offset,
            bytes,
            head: AtomicU32::new(0),
            consumer: Mutex::new(()),
            empty: AtomicU32::new(0),
            yield_every: settings().yield_every(),
            steps: if settings().engine == Engine::Stepped { settings().steps() } else { 0 },
            parked_count: AtomicU32::new(0),
            parked: Mutex::new(Vec::new()),
            comp_acks: Acks::default(),
            async_acks: Acks::default(),
            users: Users(AtomicU32::new(0)),
        });
        CQ_AT[index as usize].store(Arc::as_ptr(&cq).cast_mut(), Ordering::Release);
        CQS.insert(Arc::clone(&cq));
        Ok(cq)
    }

    /// The handle for C.
    pub fn ptr(&self) -> *mut IbvCq {
        self.public.ptr()
    }

    /// The CQ behind a handle.
    pub fn find(handle: *mut IbvCq) -> Option<Arc<Self>> {
        CQS.get(handle as usize)
    }

    /// The CQ that an event record names.
    pub fn of_event(index: u32, generation: u32) -> Option<Arc<Self>> {
        let ptr = CQ_AT.get(index as usize)?.load(Ordering::Acquire);
        CQS.get(ptr as usize).filter(|cq| cq.index == index && cq.generation == generation)
    }

    fn slot(&self) -> Option<&CqSlot> {
        self.context.process.region.cq(self.index)
    }

    /// Destroys it; refused while QPs use it. Waits for the acknowledgement of its events.
    pub fn destroy(self: &Arc<Self>, wait: bool) -> Result<(), i32> {
        if self.users.0.load(Ordering::Acquire) != 0 {
            return Err(libc::EBUSY);
        }
        if CQS.get(Arc::as_ptr(self) as usize).is_none() {
            return Err(libc::EINVAL);
        }
        if wait {
            self.comp_acks.drain();
            self.async_acks.drain();
        }
        CQ_AT[self.index as usize].store(std::ptr::null_mut(), Ordering::Release);
        CQS.remove(Arc::as_ptr(self) as usize).ok_or(libc::EINVAL)?;
        let process = &self.context.process;
        if let Some(slot) = self.slot() {
            slot.cap.store(0, Ordering::SeqCst);
            slot.lock.quiesce(process.id(), |id| process.fabric.alive(id));
        }
        process.heap.free(self.offset, self.bytes);
        process.cqs.give(self.index);
        if let Some(channel) = &self.channel {
            channel.users.0.fetch_sub(1, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Takes up to `n` completions and hands each to `put`. An empty poll costs two loads and a counter.
    pub fn poll(&self, n: usize, mut put: impl FnMut(usize, &Wc)) -> usize {
        for _ in 0..self.steps {
            crate::stepped::step();
        }
        let Some(slot) = self.slot() else { return 0 };
        if slot.tail.load(Ordering::Acquire) == self.head.load(Ordering::Relaxed) {
            self.idle();
            if self.parked_count.load(Ordering::Relaxed) == 0
                || slot.tail.load(Ordering::Acquire) == self.head.load(Ordering::Relaxed)
            {
                return 0;
            }
        }
        let _consumer = lock(&self.consumer);
        let Some(ring) = CqRing::view(&self.context.process.region, slot) else { return 0 };
        let tail = slot.tail.load(Ordering::Acquire);
        let mut head = self.head.load(Ordering::Relaxed);
        // A tail outside the ring can only be scribbled: there is nothing that could be trusted to be read.
        let mut available = tail.wrapping_sub(head);
        if available > ring.cap() {
            available = 0;
        }
        let mut taken = 0;
        while available > 0 && taken < n {
            let cqe = ring.load(head);
            head = head.wrapping_add(1);
            available -= 1;
            if cqe.kind == KIND_VOID {
                continue;
            }
            let qp = (cqe.wc.qp_num & 0xffff) as usize;
            if cqe.kind == KIND_SEND {
                // Gives the slots of this request and of all unsignalled ones before it back.
                SQ_DONE[qp].store(cqe.counter, Ordering::Release);
            } else {
                RQ_DONE[qp].fetch_add(1, Ordering::Release);
            }
            put(taken, &cqe.wc);
            taken += 1;
        }
        self.head.store(head, Ordering::Relaxed);
        // Release: producers overwrite entries only after they were read.
        slot.head.store(head, Ordering::Release);
        self.empty.store(0, Ordering::Relaxed);
        stats::add(Counter::PollCalls, 1);
        taken
    }

    fn idle(&self) {
        if self.parked_count.load(Ordering::Relaxed) != 0 {
            self.progress();
        }
        // Two pollers may share the counter; a lost count only shifts a yield.
        let empty = self.empty.load(Ordering::Relaxed).wrapping_add(1);
        self.empty.store(empty, Ordering::Relaxed);
        if self.yield_every != 0 && empty.is_multiple_of(self.yield_every) {
            std::thread::yield_now();
        }
    }

    #[cold]
    fn progress(&self) {
        let parked: Vec<_> = lock(&self.parked).iter().filter_map(Weak::upgrade).collect();
        for qp in parked {
            qp.progress();
        }
    }

    /// A QP of this CQ has pending requests: polling drives them.
    pub fn park(&self, qp: &Weak<Qp>) {
        let mut parked = lock(&self.parked);
        if !parked.iter().any(|q| q.ptr_eq(qp)) {
            parked.push(Weak::clone(qp));
            self.parked_count
                .store(u32::try_from(parked.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
        }
    }

    /// The QP has no pending requests any more.
    pub fn unpark(&self, qp: &Weak<Qp>) {
        let mut parked = lock(&self.parked);
        parked.retain(|q| !q.ptr_eq(qp));
        self.parked_count.store(u32::try_from(parked.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Asks for one event at the next (solicited) completion.
    pub fn arm(&self, solicited_only: bool) {
        let Some(slot) = self.slot() else { return };
        let wanted = if solicited_only { 1 } else { 2 };
        // "Any" wins over "solicited" until the event fired.
        slot.armed.fetch_max(wanted, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    /// Makes the completions of a QP invisible; called when the QP is destroyed or reset.
    pub fn forget(&self, qpn: u32) {
        let process = &self.context.process;
        let Some(slot) = self.slot() else { return };
        let _consumer = lock(&self.consumer);
        let _producer = slot.lock.lock(process.id(), |id| process.fabric.alive(id));
        if let Some(ring) = CqRing::view(&process.region, slot) {
            ring.void(self.head.load(Ordering::Relaxed), qpn);
        }
    }
}

/// Appends a completion to a CQ of `peer` (ourselves included) and wakes its channel. `false`: it was lost.
pub fn complete(
    process: &crate::process::Process,
    peer: &Peer,
    index: u32,
    cqe: &Cqe,
    solicited: bool,
) -> bool {
    let Some(slot) = peer.region.cq(index) else { return false };
    let Some(ring) = CqRing::view(&peer.region, slot) else { return false };
    let producer = slot.lock.lock(process.id(), |id| process.fabric.alive(id));
    let pushed = ring.push(cqe);
    drop(producer);
    if let Pushed::Overrun { first } = pushed {
        if first {
            stats::add(Counter::CqOverruns, 1);
            let generation = slot.generation.load(Ordering::Relaxed);
            signal_async(peer, slot.ctx.load(Ordering::Relaxed), EVENT_CQ_ERR, index, generation);
        }
        return false;
    }
    let counter = match (cqe.wc.status, cqe.kind) {
        (WC_SUCCESS, KIND_SEND) => Counter::SendCompletions,
        (WC_SUCCESS, _) => Counter::RecvCompletions,
        _ => Counter::ErrorCompletions,
    };
    stats::add(counter, 1);
    let channel = slot.channel.load(Ordering::Relaxed);
    if channel != 0
        && ring.fires(solicited || cqe.wc.status != WC_SUCCESS)
        && let Some(pipe) = peer.region.channel(channel - 1)
    {
        peer.signal(pipe, &record(0, index, slot.generation.load(Ordering::Relaxed)));
    }
    true
}

/// Raises an async event in a context of `peer`.
pub fn signal_async(peer: &Peer, context: u32, kind: u32, index: u32, generation: u32) {
    stats::add(Counter::AsyncEvents, 1);
    if let Some(pipe) = peer.region.context(context) {
        peer.signal(pipe, &record(kind, index, generation));
    }
}
