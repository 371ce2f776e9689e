//! The responder's half of an operation, performed by the requester on the target's tables.
//!
//! Everything here runs under the target QP's responder lock, in the requester's process. It checks what the
//! target's device would check, consumes receives, delivers completions and raises the target's events.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::abi::*;
use crate::cq::{complete, signal_async};
use crate::mover::{Direction, Fault, Segs, fetch_update, transfer};
use crate::mr::{self, key_index};
use crate::process::Process;
use crate::ring::{Cqe, KIND_RECV, Receive, RecvRing};
use crate::shm::layout::{QpSlot, SrqSlot};
use crate::shm::mapping::Mapping;
use crate::shm::peer::Peer;

/// A negative answer: status for the requester.
pub type Nak = u32;

/// The QP at the other end.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// Our process.
    pub process: &'a Process,
    /// The process of the target.
    pub peer: &'a Peer,
    /// Index of the QP there.
    pub index: u32,
    /// Its slot.
    pub slot: &'a QpSlot,
}

/// Where payload lies, from our point of view.
#[derive(Debug)]
pub struct Place {
    /// Pieces.
    pub segs: Segs,
    /// Process in which they lie; `None` = ours.
    pub pid: Option<i32>,
    /// Keeps a mapping of the target's dma-buf during the copy.
    _windows: Vec<Arc<Mapping>>,
}

/// Receive-side facts of a message.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// Completion opcode at the receiver.
    pub opcode: u32,
    /// Whole length.
    pub len: u32,
    /// Immediate, if any.
    pub imm: Option<u32>,
    /// Sender's QP number.
    pub src_qp: u32,
    /// Solicited event wanted.
    pub solicited: bool,
}

impl<'a> Target<'a> {
    fn own_pid(&self) -> Option<i32> {
        if self.peer.local { None } else { Some(self.peer.pid) }
    }

    /// Checks a remote range and says where it lies.
    fn resolve(&self, place: &mut Place, key: u32, addr: u64, len: u64, need: u32) -> Option<()> {
        if key >> 24 != self.peer.id & 0xff {
            return None;
        }
        // Within the process the private table decides: an address from shared memory must never be dereferenced here.
        let slot = match self.peer.local {
            true => self.process.local_mr(key_index(key))?,
            false => self.peer.region.mr(key_index(key))?,
        };
        let piece = mr::check(slot, key, self.slot.pd.load(Ordering::Relaxed), addr, len, need)?;
        let len = usize::try_from(len).ok()?;
        if piece.fd == 0 || self.peer.local {
            place.segs.push(piece.va, len);
            return Some(());
        }
        // A dma-buf whose pages the kernel does not hand out: map it here. The whole MR, so that later operations reuse it.
        let start = slot.fd_off.load(Ordering::Relaxed);
        let whole = usize::try_from(slot.len.load(Ordering::Relaxed)).ok()?;
        let write =
            slot.access.load(Ordering::Relaxed) & (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE) != 0;
        let aligned = start & !0xffff;
        let extent = whole.checked_add(usize::try_from(start - aligned).ok()?)?;
        let map = self.peer.window(key, piece.fd, aligned, extent, write).ok()?;
        // The numbers were read one by one from memory that the peer writes: check against the mapping itself.
        let at = usize::try_from(piece.fd_off.checked_sub(aligned)?).ok()?;
        if at.checked_add(len)? > map.len() {
            return None;
        }
        place.segs.push((map.addr() + at) as u64, len);
        place.pid = None;
        place._windows.push(map);
        Some(())
    }

    fn place(&self) -> Place {
        Place { segs: Segs::default(), pid: self.own_pid(), _windows: Vec::new() }
    }

    /// Remote range of an RDMA operation; zero length needs no key. An operation that the queue pair does not serve is an
    /// invalid request, whatever its key.
    pub fn rdma(&self, key: u32, addr: u64, len: u64, need: u32) -> Result<Place, Nak> {
        if self.slot.access.load(Ordering::Relaxed) & need != need {
            return Err(WC_REM_INV_REQ_ERR);
        }
        let mut place = self.place();
        if len > 0 {
            self.resolve(&mut place, key, addr, len, need).ok_or(WC_REM_ACCESS_ERR)?;
        }
        Ok(place)
    }

    /// Scatter list of a receive.
    pub fn scatter(&self, receive: &Receive, len: u64) -> Result<Place, Scatter> {
        let mut place = self.place();
        let room: u64 = receive.sges().iter().map(|s| u64::from(s.length)).sum();
        if room < len {
            return Err(Scatter::TooLong);
        }
        let mut left = len;
        for sge in receive.sges() {
            let take = left.min(u64::from(sge.length));
            if take > 0 {
                self.resolve(&mut place, sge.lkey, sge.addr, take, ACCESS_LOCAL_WRITE)
                    .ok_or(Scatter::BadKey)?;
            }
            left -= take;
        }
        Ok(place)
    }

    fn srq(&self) -> Option<(u32, &'a SrqSlot)> {
        let index = self.slot.srq.load(Ordering::Relaxed).checked_sub(1)?;
        Some((index, self.peer.region.srq(index)?))
    }

    fn ring(&self) -> Option<RecvRing<'a>> {
        let s = self.slot;
        let (off, cap) = (s.rq_off.load(Ordering::Relaxed), s.rq_cap.load(Ordering::Relaxed));
        RecvRing::view(
            &self.peer.region,
            off,
            cap,
            s.rq_sge.load(Ordering::Relaxed),
            &s.rq_head,
            &s.rq_tail,
        )
    }

    /// Takes the next receive. `None`: receiver not ready; the poster will wake us.
    pub fn take_receive(&self) -> Option<Receive> {
        self.try_take().or_else(|| {
            let waiter = match self.srq() {
                Some((_, srq)) => &srq.waiter,
                None => &self.slot.waiter,
            };
            // SeqCst on both sides: either we see the new entry now, or the poster sees the mark.
            waiter.store(self.process.id(), Ordering::SeqCst);
            self.try_take()
        })
    }

    fn try_take(&self) -> Option<Receive> {
        let Some((index, srq)) = self.srq() else { return self.ring()?.pop() };
        let process = self.process;
        let ring = crate::srq::ring(&self.peer.region, srq)?;
        let guard = srq.lock.lock(process.id(), |id| process.fabric.alive(id));
        let entry = ring.pop();
        let left = ring.used();
        drop(guard);
        let limit = srq.limit.load(Ordering::Relaxed);
        if entry.is_some() && limit != 0 && left < limit && srq.limit.swap(0, Ordering::AcqRel) != 0
        {
            let generation = srq.generation.load(Ordering::Relaxed);
            signal_async(
                self.peer,
                srq.ctx.load(Ordering::Relaxed),
                EVENT_SRQ_LIMIT_REACHED,
                index,
                generation,
            );
        }
        entry
    }

    /// Copies payload.
    pub fn copy(&self, dir: Direction, local: &mut Segs, remote: &mut Place) -> Result<(), Fault> {
        if local.as_slice().is_empty() {
            return Ok(());
        }
        // SAFETY: local pieces were checked against our MR table (or are inline data of the running post call), remote
        // ones against the target's; the send-queue lock and the responder lock that we hold keep deregistration waiting.
        unsafe { transfer(remote.pid, dir, local, &mut remote.segs) }
    }

    /// Performs an atomic on a checked, aligned word.
    pub fn atomic(&self, place: &Place, f: impl Fn(u64) -> u64) -> Result<u64, Fault> {
        let addr = place.segs.as_slice().first().map_or(0, |s| s.addr);
        let device = (self.slot.port.load(Ordering::Relaxed) >> 8) as usize;
        let process = self.process;
        let lock = process.fabric.atomic_lock(device).ok_or(Fault::Remote)?;
        let _guard = lock.lock(process.id(), |id| process.fabric.alive(id));
        // SAFETY: as in `copy`; alignment was checked by the caller.
        unsafe { fetch_update(place.pid, addr, f) }
    }

    fn receive_completion(&self, wr_id: u64, status: u32, vendor: u32, message: &Message) -> Cqe {
        Cqe {
            wc: Wc {
                wr_id,
                status,
                opcode: message.opcode,
                vendor_err: vendor,
                byte_len: message.len,
                imm_data: message.imm.unwrap_or(0),
                qp_num: self.slot.qpn.load(Ordering::Relaxed),
                src_qp: message.src_qp,
                wc_flags: if message.imm.is_some() { WC_FLAG_WITH_IMM } else { 0 },
                pkey_index: 0,
                slid: 0,
                sl: 0,
                dlid_path_bits: 0,
            },
            kind: KIND_RECV,
            counter: 0,
        }
    }

    /// Delivers a receive completion.
    pub fn deliver(&self, receive: &Receive, status: u32, message: &Message) -> bool {
        self.deliver_as(receive, status, 0, message)
    }

    /// Delivers a receive completion with a vendor code.
    pub fn deliver_as(
        &self,
        receive: &Receive,
        status: u32,
        vendor: u32,
        message: &Message,
    ) -> bool {
        let cqe = self.receive_completion(receive.wr_id, status, vendor, message);
        let cq = self.slot.recv_cq.load(Ordering::Relaxed);
        complete(self.process, self.peer, cq, &cqe, message.solicited)
    }

    /// Raises an event on the target QP.
    pub fn event(&self, kind: u32) {
        let qpn = self.slot.qpn.load(Ordering::Relaxed);
        signal_async(self.peer, self.slot.ctx.load(Ordering::Relaxed), kind, qpn, 0);
    }

    /// Moves the target QP to the error state and flushes its receives.
    pub fn fail(&self, event: Option<u32>) {
        if self.slot.state.swap(QPS_ERR, Ordering::SeqCst) == QPS_ERR {
            return;
        }
        if let Some(event) = event {
            self.event(event);
        }
        self.flush();
    }

    /// Completes all queued receives with a flush error. The slot is in the error state.
    pub fn flush(&self) {
        if self.srq().is_some() {
            self.event(EVENT_QP_LAST_WQE_REACHED);
            return;
        }
        let Some(ring) = self.ring() else { return };
        let message = Message { opcode: WC_RECV, len: 0, imm: None, src_qp: 0, solicited: false };
        while let Some(receive) = ring.pop() {
            self.deliver(&receive, WC_WR_FLUSH_ERR, &message);
        }
    }
}

/// Why a message does not fit a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scatter {
    /// Longer than the scatter list.
    TooLong,
    /// A key of the list does not allow it.
    BadKey,
}
