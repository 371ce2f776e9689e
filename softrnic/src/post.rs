//! Posting, and driving requests that had to wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::abi::*;
use crate::clock;
use crate::control;
use crate::cq::complete;
use crate::engine::Verdict;
use crate::env::{Engine, settings};
use crate::qp::{Qp, RECENT, Recent, Sq, Wait};
use crate::ring::{Cqe, KIND_SEND, Receive, RecvRing};
use crate::stats::{self, Counter};
use crate::sync::lock;
use crate::trace::{self, What};
use crate::wqe::Wqe;

/// Position of the next request among all of the process.
static ORDER: AtomicU64 = AtomicU64::new(0);

impl Qp {
    /// Posts a chain of send requests. On failure the request that was refused is stored in `bad`.
    ///
    /// # Safety
    /// The chain is readable, as the verbs contract demands; `bad` is NULL or writable.
    pub unsafe fn post_send(&self, wr: *mut SendWr, bad: *mut *mut SendWr) -> i32 {
        let mut sq = lock(&self.sq);
        stats::add(Counter::Doorbells, 1);
        let mut at = wr;
        while !at.is_null() {
            // SAFETY: the caller's chain is readable.
            if let Err(errno) = unsafe { self.post_one(&mut sq, at) } {
                if !bad.is_null() {
                    // SAFETY: promised by the caller.
                    unsafe { bad.write(at) };
                }
                return errno;
            }
            // SAFETY: the caller's chain is readable.
            at = unsafe { (&raw const (*at).next).read() };
        }
        0
    }

    unsafe fn post_one(&self, sq: &mut Sq, wr: *const SendWr) -> Result<(), i32> {
        let state = self.state(sq);
        if !matches!(state, QPS_RTS | QPS_SQD | QPS_ERR) {
            return Err(libc::EINVAL);
        }
        if self.sq_used(sq) >= self.cap.max_send_wr {
            stats::add(Counter::SqFull, 1);
            return Err(libc::ENOMEM);
        }
        // SAFETY: the caller's request is readable.
        let mut wqe = unsafe { Wqe::read(wr, &self.limits)? };
        if sq.recent.len() == RECENT {
            sq.recent.pop_front();
        }
        sq.recent.push_back(Recent { wr_id: wqe.wr_id, opcode: wqe.opcode, len: wqe.len });
        sq.posted = sq.posted.wrapping_add(1);
        wqe.counter = sq.posted;
        wqe.order = ORDER.fetch_add(1, Ordering::Relaxed);
        if let Some(counter) = stats::of_opcode(wqe.opcode) {
            stats::add(counter, 1);
        }
        if wqe.is_inline() {
            stats::add(Counter::Inline, 1);
        }
        let signaled = wqe.signaled(self.sig_all);
        stats::add(if signaled { Counter::Signaled } else { Counter::Unsignaled }, 1);
        if state == QPS_ERR {
            self.drain(sq);
            self.complete_send(&wqe, WC_WR_FLUSH_ERR);
            return Ok(());
        }
        let held = control::held();
        let here = self.engine == Engine::Inline;
        if here && sq.waiting.is_empty() && !held && state == QPS_RTS {
            let verdict = self.run(sq, &mut wqe);
            if self.settle(sq, &wqe, verdict) {
                return Ok(());
            }
        } else if held {
            stats::add(Counter::Held, 1);
        }
        if self.engine == Engine::Stepped {
            trace::add(What::Post, self.ordinal, wqe.counter, u64::from(wqe.opcode), wqe.len);
        }
        // SAFETY: the post call has not returned yet, so inline buffers are readable.
        unsafe { wqe.detach() };
        sq.waiting.push_back(wqe);
        self.settle_pending(sq);
        Ok(())
    }

    /// Applies a verdict; `false` if the request has to wait.
    fn settle(&self, sq: &mut Sq, wqe: &Wqe, verdict: Verdict) -> bool {
        let (status, limit) = match verdict {
            Verdict::Done => {
                sq.wait = None;
                if wqe.signaled(self.sig_all) && !self.complete_send(wqe, WC_SUCCESS) {
                    self.pd.context.raise(EVENT_QP_FATAL, self.qpn(), 0);
                    self.fail(sq);
                }
                return true;
            }
            Verdict::Failed(status) => {
                sq.wait = None;
                self.complete_send(wqe, status);
                self.fail(sq);
                return true;
            }
            Verdict::Rnr(limit) => (WC_RNR_RETRY_EXC_ERR, limit),
            Verdict::Silent => (WC_RETRY_EXC_ERR, retry_time(sq)),
            Verdict::Later => (WC_SUCCESS, None),
            Verdict::More => {
                sq.wait = None;
                return false;
            }
        };
        let until = limit.map(|limit| clock::now().saturating_add(clock::ns(limit)));
        match sq.wait {
            Some(wait) if wait.status == status => {
                let over = wait.until.is_some_and(|until| clock::now() >= until);
                let dead = !over && sq.connection.as_ref().is_some_and(|c| !c.peer.runs());
                if over || dead {
                    let status = if dead { WC_RETRY_EXC_ERR } else { status };
                    return self.settle(sq, wqe, Verdict::Failed(status));
                }
            }
            _ => {
                stats::add(Counter::Parked, 1);
                if status == WC_RNR_RETRY_EXC_ERR {
                    stats::add(Counter::RnrParked, 1);
                }
                if self.engine == Engine::Stepped {
                    trace::add(What::Wait, self.ordinal, wqe.counter, 0, 0);
                }
                sq.wait = Some(Wait { until, status });
            }
        }
        false
    }

    fn complete_send(&self, wqe: &Wqe, status: u32) -> bool {
        let reads =
            matches!(wqe.opcode, WR_RDMA_READ | WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD);
        let wc = Wc {
            wr_id: wqe.wr_id,
            status,
            opcode: wqe.wc_opcode(),
            vendor_err: if status == WC_SUCCESS { 0 } else { vendor(wqe, status) },
            byte_len: if reads { u32::try_from(wqe.len).unwrap_or(0) } else { 0 },
            imm_data: 0,
            qp_num: self.qpn(),
            src_qp: 0,
            wc_flags: 0,
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        };
        let cqe = Cqe { wc, kind: KIND_SEND, counter: wqe.counter };
        let process = self.process();
        complete(process, process.own(), self.send_cq.index, &cqe, false)
    }

    /// Drives pending requests, unless somebody else is at it.
    pub fn progress(&self) {
        if let Ok(mut sq) = self.sq.try_lock() {
            self.drain(&mut sq);
        }
    }

    /// Drives pending requests as far as they go, or as far as the calling thread may: where another engine is in
    /// charge, only a queue that is in error is flushed.
    pub fn drain(&self, sq: &mut Sq) {
        while (self.engine == Engine::Inline || self.state(sq) == QPS_ERR) && self.advance(sq) {}
        self.settle_pending(sq);
    }

    /// Does one thing for the request at the head of the queue; whether there was anything to do.
    pub fn advance(&self, sq: &mut Sq) -> bool {
        let state = self.state(sq);
        if state != QPS_RTS && state != QPS_ERR {
            return false;
        }
        let Some(mut wqe) = sq.waiting.pop_front() else { return false };
        if state == QPS_ERR {
            sq.state = QPS_ERR;
            self.trace_end(&wqe, WC_WR_FLUSH_ERR);
            self.complete_send(&wqe, WC_WR_FLUSH_ERR);
            return true;
        }
        if control::held() && !wqe.released {
            sq.waiting.push_front(wqe);
            return false;
        }
        let verdict = self.run(sq, &mut wqe);
        match verdict {
            Verdict::Done => self.trace_end(&wqe, WC_SUCCESS),
            Verdict::Failed(status) => self.trace_end(&wqe, status),
            _ => {}
        }
        if self.settle(sq, &wqe, verdict) {
            return true;
        }
        sq.waiting.push_front(wqe);
        verdict == Verdict::More
    }

    fn trace_end(&self, wqe: &Wqe, status: u32) {
        if self.engine == Engine::Stepped {
            trace::add(What::End, self.ordinal, wqe.counter, u64::from(status), 0);
        }
    }

    /// Registers or forgets this QP with whatever drives pending requests.
    pub fn settle_pending(&self, sq: &Sq) {
        let pending = !sq.waiting.is_empty();
        let changed = self.pending.swap(pending, Ordering::SeqCst) != pending;
        match self.engine {
            Engine::Inline => {
                if changed && pending {
                    self.send_cq.park(&self.weak);
                } else if changed {
                    self.send_cq.unpark(&self.weak);
                }
                if sq.wait.is_some() && pending {
                    self.process().assist.wake(self.process());
                }
            }
            Engine::Thread if pending => self.process().assist.wake(self.process()),
            // Only steps drive them.
            Engine::Thread | Engine::Stepped => {}
        }
    }

    /// Posts a chain of receives.
    ///
    /// # Safety
    /// As [`Qp::post_send`].
    pub unsafe fn post_recv(&self, wr: *mut RecvWr, bad: *mut *mut RecvWr) -> i32 {
        let mut at = wr;
        while !at.is_null() {
            // SAFETY: the caller's chain is readable.
            if let Err(errno) = unsafe { self.post_one_recv(at) } {
                if !bad.is_null() {
                    // SAFETY: promised by the caller.
                    unsafe { bad.write(at) };
                }
                return errno;
            }
            // SAFETY: the caller's chain is readable.
            at = unsafe { (&raw const (*at).next).read() };
        }
        0
    }

    unsafe fn post_one_recv(&self, wr: *const RecvWr) -> Result<(), i32> {
        let slot = self.slot();
        if self.srq.is_some() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller's request is readable.
        let receive = unsafe { read_receive(wr, self.cap.max_recv_sge)? };
        let mut tail = lock(&self.rq);
        if slot.state.load(Ordering::Relaxed) == QPS_RESET {
            return Err(libc::EINVAL);
        }
        if self.rq_used(*tail) >= self.cap.max_recv_wr {
            return Err(libc::ENOMEM);
        }
        let (off, cap) = (slot.rq_off.load(Ordering::Relaxed), slot.rq_cap.load(Ordering::Relaxed));
        let sge = slot.rq_sge.load(Ordering::Relaxed);
        let process = self.process();
        let ring = RecvRing::view(&process.region, off, cap, sge, &slot.rq_head, &slot.rq_tail);
        ring.ok_or(libc::EINVAL)?.push(*tail, &receive);
        *tail = tail.wrapping_add(1);
        drop(tail);
        stats::add(Counter::PostRecv, 1);
        // After the entry is visible: a requester that breaks the QP flushes it, or we see the state here.
        if slot.state.load(Ordering::SeqCst) == QPS_ERR {
            let _guard = slot.lock.lock(process.id(), |id| process.fabric.alive(id));
            self.own_target().flush();
        }
        if slot.waiter.load(Ordering::SeqCst) != 0 {
            process.kick(slot.waiter.swap(0, Ordering::SeqCst));
        }
        Ok(())
    }
}

/// Reads a receive request.
///
/// # Safety
/// `wr` and its list are readable.
pub unsafe fn read_receive(wr: *const RecvWr, max_sge: u32) -> Result<Receive, i32> {
    // SAFETY: single fields of the caller's request.
    let (wr_id, list, n) = unsafe {
        (
            (&raw const (*wr).wr_id).read(),
            (&raw const (*wr).sg_list).read(),
            (&raw const (*wr).num_sge).read(),
        )
    };
    let n = usize::try_from(n).map_err(|_| libc::EINVAL)?;
    if n > max_sge as usize || n > 0 && list.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's list has `n` entries.
    Ok(Receive::new(wr_id, (0..n).map(|i| unsafe { list.add(i).read() })))
}

fn vendor(wqe: &Wqe, status: u32) -> u32 {
    wqe.fate.as_ref().and_then(|f| f.vendor(status)).unwrap_or(0x100 | status)
}

/// How long a silent path is retried.
fn retry_time(sq: &Sq) -> Option<Duration> {
    if let Some(time) = settings().retry_override() {
        return Some(time);
    }
    if sq.attr.timeout == 0 {
        return None;
    }
    let once = Duration::from_nanos(4096 << sq.attr.timeout.min(31));
    Some(once * (u32::from(sq.attr.retry_cnt) + 1))
}

/// Lets up to `n` held requests of the process run, oldest first; returns how many.
pub fn release(n: u64) -> u64 {
    let mut released = 0;
    let qps = crate::objects::QPS.all();
    while released < n {
        // The oldest unreleased request over all QPs.
        let oldest = qps
            .iter()
            .filter_map(|qp| {
                let sq = lock(&qp.sq);
                sq.waiting.iter().find(|w| !w.released).map(|w| (w.order, qp))
            })
            .min_by_key(|(order, _)| *order);
        let Some((order, qp)) = oldest else { break };
        let mut sq = lock(&qp.sq);
        if let Some(wqe) = sq.waiting.iter_mut().find(|w| w.order == order) {
            wqe.released = true;
            released += 1;
            stats::add(Counter::Released, 1);
        }
        qp.drain(&mut sq);
    }
    released
}

/// Drives all QPs after holding ended.
pub fn drain_all() {
    for qp in crate::objects::QPS.all() {
        let qp: Arc<Qp> = qp;
        qp.drain(&mut lock(&qp.sq));
    }
}
