//! Shared receive queues.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::*;
use crate::env::settings;
use crate::events::Acks;
use crate::objects::{SRQ_AT, SRQS, Users};
use crate::pd::Pd;
use crate::public::{Public, zeroed};
use crate::ring::{Receive, RecvRing};
use crate::shm::layout::{SrqSlot, rqe_words};
use crate::shm::region::Region;
use crate::stats::{self, Counter};
use crate::sync::lock;

/// A shared receive queue.
#[repr(C)]
#[derive(Debug)]
pub struct Srq {
    public: Public<IbvSrq>,
    /// Parent.
    pub pd: Arc<Pd>,
    /// Index in the region.
    pub index: u32,
    generation: u32,
    max_wr: u32,
    max_sge: u32,
    offset: usize,
    bytes: usize,
    tail: Mutex<u32>,
    /// Async events.
    pub acks: Acks,
    /// QPs that use it.
    pub users: Users,
}

/// Views the ring of an SRQ slot.
pub fn ring<'a>(region: &'a Region, slot: &'a SrqSlot) -> Option<RecvRing<'a>> {
    let (off, cap) = (slot.off.load(Ordering::Relaxed), slot.cap.load(Ordering::Acquire));
    RecvRing::view(region, off, cap, slot.sge.load(Ordering::Relaxed), &slot.head, &slot.tail)
}

impl Srq {
    /// Creates one.
    pub fn create(
        pd: &Arc<Pd>,
        context: *mut std::ffi::c_void,
        attr: &SrqAttr,
    ) -> Result<Arc<Self>, i32> {
        let s = settings();
        if attr.max_wr == 0 || attr.max_wr > s.max_qp_wr() || attr.max_sge > s.max_sge() {
            return Err(libc::EINVAL);
        }
        if SRQS.count() >= s.max_srq() as usize {
            return Err(libc::ENOMEM);
        }
        let process = &pd.context.process;
        let cap = attr.max_wr.next_power_of_two();
        let max_sge = attr.max_sge.max(1);
        let bytes = cap as usize * rqe_words(max_sge) * 8;
        let offset = process.heap.alloc(bytes).ok_or(libc::ENOMEM)?;
        let Some(index) = process.srqs.take() else {
            process.heap.free(offset, bytes);
            return Err(libc::ENOMEM);
        };
        let slot = process.region.srq(index).ok_or(libc::ENOMEM)?;
        let generation = slot.generation.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        slot.off.store(offset as u64, Ordering::Relaxed);
        slot.sge.store(max_sge, Ordering::Relaxed);
        slot.pd.store(pd.id, Ordering::Relaxed);
        slot.ctx.store(pd.context.index, Ordering::Relaxed);
        for word in [&slot.head, &slot.waiter, &slot.limit, &*slot.tail] {
            word.store(0, Ordering::Relaxed);
        }
        slot.lock.reset();
        slot.cap.store(cap, Ordering::Release);
        // SAFETY: integers, pointers and pthread objects.
        let mut public: IbvSrq = unsafe { zeroed() };
        public.context = pd.context.ptr();
        public.srq_context = context;
        public.pd = pd.ptr();
        public.handle = index;
        public.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
        public.cond = libc::PTHREAD_COND_INITIALIZER;
        let srq = Arc::new(Self {
            public: Public::new(public),
            pd: Arc::clone(pd),
            index,
            generation,
            max_wr: attr.max_wr,
            max_sge,
            offset,
            bytes,
            tail: Mutex::new(0),
            acks: Acks::default(),
            users: Users(AtomicU32::new(0)),
        });
        pd.users.0.fetch_add(1, Ordering::AcqRel);
        SRQ_AT[index as usize].store(Arc::as_ptr(&srq).cast_mut(), Ordering::Release);
        SRQS.insert(Arc::clone(&srq));
        Ok(srq)
    }

    /// The handle for C.
    pub fn ptr(&self) -> *mut IbvSrq {
        self.public.ptr()
    }

    /// The SRQ behind a handle.
    pub fn find(handle: *mut IbvSrq) -> Option<Arc<Self>> {
        SRQS.get(handle as usize)
    }

    /// The SRQ that an event record names.
    pub fn of_event(index: u32, generation: u32) -> Option<Arc<Self>> {
        let ptr = SRQ_AT.get(index as usize)?.load(Ordering::Acquire);
        SRQS.get(ptr as usize).filter(|s| s.index == index && s.generation == generation)
    }

    /// Attributes.
    pub fn query(&self) -> SrqAttr {
        let limit = self.slot().map_or(0, |s| s.limit.load(Ordering::Relaxed));
        SrqAttr { max_wr: self.max_wr, max_sge: self.max_sge, srq_limit: limit }
    }

    /// Sets the limit; resizing is not supported.
    pub fn modify(&self, attr: &SrqAttr, mask: u32) -> Result<(), i32> {
        if mask & !(SRQ_MAX_WR | SRQ_LIMIT) != 0 {
            return Err(libc::EINVAL);
        }
        if mask & SRQ_MAX_WR != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        if mask & SRQ_LIMIT != 0 {
            if attr.srq_limit > self.max_wr {
                return Err(libc::EINVAL);
            }
            let slot = self.slot().ok_or(libc::EINVAL)?;
            slot.limit.store(attr.srq_limit, Ordering::Release);
        }
        Ok(())
    }

    fn slot(&self) -> Option<&SrqSlot> {
        self.pd.context.process.region.srq(self.index)
    }

    /// Posts one receive.
    pub fn post(&self, wr_id: u64, sges: impl ExactSizeIterator<Item = Sge>) -> Result<(), i32> {
        if sges.len() > self.max_sge as usize {
            return Err(libc::EINVAL);
        }
        let process = &self.pd.context.process;
        let slot = self.slot().ok_or(libc::EINVAL)?;
        let ring = ring(&process.region, slot).ok_or(libc::EINVAL)?;
        let mut tail = lock(&self.tail);
        if tail.wrapping_sub(slot.head.load(Ordering::Acquire)) >= self.max_wr {
            return Err(libc::ENOMEM);
        }
        ring.push(*tail, &Receive::new(wr_id, sges));
        *tail = tail.wrapping_add(1);
        drop(tail);
        stats::add(Counter::PostSrqRecv, 1);
        if slot.waiter.load(Ordering::SeqCst) != 0 {
            process.kick(slot.waiter.swap(0, Ordering::SeqCst));
        }
        Ok(())
    }

    /// Destroys it; refused while QPs use it.
    pub fn destroy(self: &Arc<Self>, wait: bool) -> Result<(), i32> {
        if self.users.0.load(Ordering::Acquire) != 0 {
            return Err(libc::EBUSY);
        }
        if SRQS.get(Arc::as_ptr(self) as usize).is_none() {
            return Err(libc::EINVAL);
        }
        if wait {
            self.acks.drain();
        }
        SRQ_AT[self.index as usize].store(std::ptr::null_mut(), Ordering::Release);
        SRQS.remove(Arc::as_ptr(self) as usize).ok_or(libc::EINVAL)?;
        let process = &self.pd.context.process;
        if let Some(slot) = self.slot() {
            slot.cap.store(0, Ordering::SeqCst);
            slot.lock.quiesce(process.id(), |id| process.fabric.alive(id));
        }
        process.heap.free(self.offset, self.bytes);
        process.srqs.give(self.index);
        self.pd.users.0.fetch_sub(1, Ordering::AcqRel);
        Ok(())
    }
}
