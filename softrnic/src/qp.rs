//! Queue pairs: creation, state changes, teardown.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, Weak};

use crate::abi::*;
use crate::cq::Cq;
use crate::device::gid_words;
use crate::engine::Verdict;
use crate::env::{Engine, settings};
use crate::events::Acks;
use crate::faults::refusal;
use crate::faults::rule::CREATE_QP;
use crate::objects::{QP_AT, QPS, RQ_DONE, SQ_DONE};
use crate::pd::Pd;
use crate::process::Process;
use crate::public::{Public, zeroed};
use crate::qp_state::{Limits, apply, check_mask, check_values};
use crate::responder::Target;
use crate::shm::layout::{QpSlot, rqe_words};
use crate::shm::peer::{Peer, Unreachable};
use crate::srq::Srq;
use crate::stats::{self, Counter};
use crate::sync::lock;
use crate::wqe::{self, Wqe};

/// A queue pair.
#[repr(C)]
#[derive(Debug)]
pub struct Qp {
    public: Public<IbvQp>,
    /// Parent.
    pub pd: Arc<Pd>,
    /// Where sends complete.
    pub send_cq: Arc<Cq>,
    /// Where receives complete.
    pub recv_cq: Arc<Cq>,
    /// Shared receive queue, if any.
    pub srq: Option<Arc<Srq>>,
    /// Ourselves, for lists that must not keep us alive.
    pub weak: Weak<Self>,
    index: u32,
    qpn: u32,
    /// Order of creation in the process, from 1.
    pub ordinal: u32,
    /// Who makes progress.
    pub engine: Engine,
    /// Granted capacities.
    pub cap: QpCap,
    /// Whether every request is signalled.
    pub sig_all: bool,
    /// Limits of send requests.
    pub limits: wqe::Limits,
    /// Send queue and attributes.
    pub sq: Mutex<Sq>,
    /// Receive tail.
    pub rq: Mutex<u32>,
    /// Whether requests are pending; read without the lock.
    pub pending: AtomicBool,
    offset: usize,
    bytes: usize,
    /// Async events.
    pub acks: Acks,
}

/// The send queue and everything that changes with the state.
#[derive(Debug)]
pub struct Sq {
    /// Owner's state; the shared slot may have moved to ERR behind it.
    pub state: u32,
    /// Attributes.
    pub attr: QpAttr,
    /// Requests posted.
    pub posted: u32,
    /// Requests that wait.
    pub waiting: VecDeque<Wqe>,
    /// Next packet number.
    pub psn: u32,
    /// The resolved other end.
    pub connection: Option<Connection>,
    /// How long the request at the head may still wait.
    pub wait: Option<Wait>,
    /// Attributes of the last change to each state.
    pub trace: [Option<(u32, QpAttr)>; 7],
    /// Negotiated extensions.
    pub ece: Ece,
    /// The newest requests, oldest first.
    pub recent: VecDeque<Recent>,
}

/// What is remembered of a posted request.
#[derive(Clone, Copy, Debug)]
pub struct Recent {
    /// The application's id.
    pub wr_id: u64,
    /// Opcode.
    pub opcode: u32,
    /// Payload bytes.
    pub len: u64,
}

/// How many posted requests a QP remembers.
pub const RECENT: usize = 128;

/// A resolved connection.
#[derive(Debug)]
pub struct Connection {
    /// The process.
    pub peer: Arc<Peer>,
    /// QP index there.
    pub index: u32,
    /// Full QP number.
    pub qpn: u32,
}

/// A bounded wait of the request at the head of the queue.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// Clock at which it fails; `None` = never.
    pub until: Option<u64>,
    /// With what status.
    pub status: u32,
}

/// Says once per process why a peer's memory is out of reach and what helps.
pub fn report_refusal(pid: i32, error: &std::io::Error) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        eprintln!(
            "softrnic: ERROR cannot access the memory of peer process {pid}: {error}. Both processes must run as one \
             user, in one pid namespace (one container), be dumpable, and ptrace must be allowed: \
             sysctl kernel.yama.ptrace_scope=0 or 1; in a container add --cap-add=SYS_PTRACE or --pid=host."
        );
    });
}

static ORDINAL: AtomicU32 = AtomicU32::new(0);

/// Counts QPs from 1 again; there are none.
pub fn restart_ordinals() {
    ORDINAL.store(0, Ordering::Relaxed);
}

impl Qp {
    /// Creates a QP.
    pub fn create(
        pd: &Arc<Pd>,
        context: *mut std::ffi::c_void,
        cqs: [Arc<Cq>; 2],
        srq: Option<Arc<Srq>>,
        cap: QpCap,
        qp_type: u32,
        sig_all: bool,
    ) -> Result<Arc<Self>, i32> {
        let s = settings();
        if qp_type != QPT_RC {
            return Err(libc::EOPNOTSUPP);
        }
        let fits = cap.max_send_wr <= s.max_qp_wr()
            && cap.max_recv_wr <= s.max_qp_wr()
            && cap.max_send_sge <= s.max_sge()
            && cap.max_recv_sge <= s.max_sge()
            && cap.max_inline_data <= s.max_inline();
        let [send_cq, recv_cq] = cqs;
        let together = Arc::ptr_eq(&send_cq.context, &pd.context)
            && Arc::ptr_eq(&recv_cq.context, &pd.context)
            && srq.as_ref().is_none_or(|srq| Arc::ptr_eq(&srq.pd.context, &pd.context));
        if !fits || !together {
            return Err(libc::EINVAL);
        }
        pd.context.works()?;
        if QPS.count() >= s.max_qp() as usize {
            return Err(libc::ENOMEM);
        }
        let process = &pd.context.process;
        let depth = cap.max_send_wr.max(cap.max_recv_wr);
        refusal(process, pd.context.device.index, CREATE_QP, depth.into()).map_or(Ok(()), Err)?;
        let ring = if srq.is_some() { 0 } else { cap.max_recv_wr };
        let entries = ring.max(1).next_power_of_two();
        let sge = cap.max_recv_sge.max(1);
        let bytes = entries as usize * rqe_words(sge) * 8;
        let offset = process.heap.alloc(bytes).ok_or(libc::ENOMEM)?;
        let Some(index) = process.qps.take() else {
            process.heap.free(offset, bytes);
            return Err(libc::ENOMEM);
        };
        let qpn = process.slot() << 16 | index;
        let slot = process.region.qp(index).ok_or(libc::ENOMEM)?;
        slot.pd.store(pd.id, Ordering::Relaxed);
        slot.port.store(0, Ordering::Relaxed);
        slot.access.store(0, Ordering::Relaxed);
        slot.recv_cq.store(recv_cq.index, Ordering::Relaxed);
        slot.srq.store(srq.as_ref().map_or(0, |s| s.index + 1), Ordering::Relaxed);
        slot.rq_off.store(offset as u64, Ordering::Relaxed);
        slot.rq_cap.store(entries, Ordering::Relaxed);
        slot.rq_sge.store(sge, Ordering::Relaxed);
        slot.ctx.store(pd.context.index, Ordering::Relaxed);
        slot.state.store(QPS_RESET, Ordering::Relaxed);
        let ordinal = ORDINAL.fetch_add(1, Ordering::Relaxed) + 1;
        slot.ordinal.store(ordinal, Ordering::Relaxed);
        process.region.header().qp_top.fetch_max(index + 1, Ordering::Relaxed);
        slot.lock.reset();
        slot.qpn.store(qpn, Ordering::Release);
        // SAFETY: integers, pointers and pthread objects.
        let mut public: IbvQp = unsafe { zeroed() };
        public.context = pd.context.ptr();
        public.qp_context = context;
        public.pd = pd.ptr();
        public.send_cq = send_cq.ptr();
        public.recv_cq = recv_cq.ptr();
        public.srq = srq.as_ref().map_or(std::ptr::null_mut(), |s| s.ptr());
        public.handle = index;
        public.qp_num = qpn;
        public.state = QPS_RESET;
        public.qp_type = qp_type;
        public.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
        public.cond = libc::PTHREAD_COND_INITIALIZER;
        let users = [&pd.users, &send_cq.users, &recv_cq.users];
        for users in users.into_iter().chain(srq.as_ref().map(|s| &s.users)) {
            users.0.fetch_add(1, Ordering::AcqRel);
        }
        let qp = Arc::new_cyclic(|weak| Self {
            public: Public::new(public),
            pd: Arc::clone(pd),
            send_cq,
            recv_cq,
            srq,
            weak: Weak::clone(weak),
            index,
            qpn,
            ordinal,
            engine: s.engine,
            cap,
            sig_all,
            limits: wqe::Limits { max_sge: cap.max_send_sge, max_inline: cap.max_inline_data },
            sq: Mutex::new(Sq::new()),
            rq: Mutex::new(0),
            pending: AtomicBool::new(false),
            offset,
            bytes,
            acks: Acks::default(),
        });
        qp.clear_counts();
        QP_AT[index as usize].store(Arc::as_ptr(&qp).cast_mut(), Ordering::Release);
        QPS.insert(Arc::clone(&qp));
        Ok(qp)
    }

    /// The handle for C.
    pub fn ptr(&self) -> *mut IbvQp {
        self.public.ptr()
    }

    /// The QP behind a handle.
    pub fn find(handle: *mut IbvQp) -> Option<Arc<Self>> {
        QPS.get(handle as usize)
    }

    /// The QP with a number.
    pub fn by_number(qpn: u32) -> Option<Arc<Self>> {
        let ptr = QP_AT.get((qpn & 0xffff) as usize)?.load(Ordering::Acquire);
        QPS.get(ptr as usize).filter(|qp| qp.qpn == qpn)
    }

    /// QP number.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Process state.
    pub fn process(&self) -> &Arc<Process> {
        &self.pd.context.process
    }

    /// Our slot.
    pub fn slot(&self) -> &QpSlot {
        // The index came from the pool whose size is the table's.
        self.process()
            .region
            .qp(self.index)
            .unwrap_or_else(|| unreachable!("QP index outside its table"))
    }

    /// Our own slot as a responder.
    pub fn own_target(&self) -> Target<'_> {
        Target {
            process: self.process(),
            peer: self.process().own(),
            index: self.index,
            slot: self.slot(),
        }
    }

    /// Current state: a requester or an error may have moved the slot to ERR.
    pub fn state(&self, sq: &Sq) -> u32 {
        if self.slot().state.load(Ordering::SeqCst) == QPS_ERR { QPS_ERR } else { sq.state }
    }

    /// Waits until no copy of this QP, in either direction, is running that started before the call.
    pub fn quiesce(&self) {
        drop(lock(&self.sq));
        let process = self.process();
        self.slot().lock.quiesce(process.id(), |id| process.fabric.alive(id));
    }

    fn clear_counts(&self) {
        SQ_DONE[self.index as usize].store(0, Ordering::Release);
        RQ_DONE[self.index as usize].store(0, Ordering::Release);
        let slot = self.slot();
        for word in [&slot.rq_head, &slot.waiter, &slot.epsn, &slot.comm_est, &*slot.rq_tail] {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Finds the other end. The peer's process may be gone, or not yet ready to answer.
    pub fn connect(&self, sq: &Sq) -> Result<Connection, Verdict> {
        let qpn = sq.attr.dest_qp_num;
        let peer = self.process().peer(qpn >> 16).map_err(|why| {
            if let Unreachable::Refused(error) = why {
                report_refusal(i32::try_from(qpn >> 16).unwrap_or(0), &error);
            }
            Verdict::Failed(WC_RETRY_EXC_ERR)
        })?;
        let index = qpn & 0xffff;
        let slot = peer.region.qp(index).ok_or(Verdict::Failed(WC_RETRY_EXC_ERR))?;
        if slot.qpn.load(Ordering::Acquire) != qpn {
            return Err(Verdict::Failed(WC_RETRY_EXC_ERR));
        }
        let port = slot.port.load(Ordering::Relaxed);
        if port == 0 {
            return Err(Verdict::Silent);
        }
        let header = peer.region.header();
        let ports = header.ports.get((port >> 8) as usize);
        let there = ports.and_then(|p| p.get((port & 0xff).wrapping_sub(1) as usize));
        let there = there.ok_or(Verdict::Failed(WC_RETRY_EXC_ERR))?;
        let ah = &sq.attr.ah_attr;
        let own = self.pd.context.device.link(sq.attr.port_num);
        let ethernet = own == LINK_ETHERNET;
        let link = there.link.load(Ordering::Relaxed);
        let lid_ok = ethernet || there.lid.load(Ordering::Relaxed) == u32::from(ah.dlid);
        let words = gid_words(&ah.grh.dgid);
        let known = (there.gids.load(Ordering::Relaxed) as usize).min(there.gid.len());
        let gid_ok = ah.is_global == 0
            || there.gid[..known].iter().any(|g| {
                g[0].load(Ordering::Relaxed) == words[0] && g[1].load(Ordering::Relaxed) == words[1]
            });
        if link != own || !lid_ok || !gid_ok {
            // The address leads nowhere: packets are lost.
            return Err(Verdict::Failed(WC_RETRY_EXC_ERR));
        }
        Ok(Connection { peer, index, qpn })
    }

    /// Changes the state or attributes.
    pub fn modify(&self, attr: &QpAttr, mask: u32) -> Result<(), i32> {
        let mut sq = lock(&self.sq);
        stats::add(Counter::ModifyQp, 1);
        let now = self.state(&sq);
        if mask & QP_CUR_STATE != 0 && attr.cur_qp_state != now {
            return Err(libc::EINVAL);
        }
        let next = if mask & QP_STATE != 0 { attr.qp_state } else { now };
        check_mask(now, next, mask)?;
        if !matches!(next, QPS_RESET | QPS_ERR) {
            self.pd.context.works()?;
        }
        let s = settings();
        let device = self.pd.context.device;
        let port = if mask & QP_PORT != 0 { attr.port_num } else { sq.attr.port_num };
        let header = self.pd.context.process.region.header();
        let gids = device.gids(port, header).unwrap_or_default();
        let limits = Limits {
            ports: s.ports(),
            pkeys: s.pkeys.len(),
            gids: gids.len(),
            mtu: s.mtu_code(),
            rd_atom: s.max_rd_atom(),
            ethernet: device.link(port) == LINK_ETHERNET,
        };
        check_values(attr, mask, &limits)?;
        let ah = &attr.ah_attr;
        let source = gids.get(usize::from(ah.grh.sgid_index)).map(|entry| entry.gid);
        if mask & QP_AV != 0 && ah.is_global != 0 && source == Some(Gid::default()) {
            // An empty slot of the table is no source address.
            return Err(libc::EINVAL);
        }
        if let Some(errno) = crate::control::injected_modify_failure(next) {
            return Err(errno);
        }
        if next == QPS_RTR {
            // A kernel that refuses access is better reported here than by a timeout later.
            if let Err(Unreachable::Refused(error)) = self.process().peer(attr.dest_qp_num >> 16) {
                report_refusal(i32::try_from(attr.dest_qp_num >> 16).unwrap_or(0), &error);
                return Err(error.raw_os_error().unwrap_or(libc::EACCES));
            }
        }
        apply(&mut sq.attr, attr, mask);
        if let Some(trace) = sq.trace.get_mut(next as usize) {
            *trace = Some((mask, *attr));
        }
        match next {
            QPS_RESET => self.reset(&mut sq),
            QPS_ERR => self.fail(&mut sq),
            _ => self.enter(&mut sq, now, next),
        }
        // SAFETY: `state` is the library's field of the public structure; only modify and query write it.
        unsafe { (&raw mut (*self.ptr()).state).write(next) };
        Ok(())
    }

    fn enter(&self, sq: &mut Sq, now: u32, next: u32) {
        let slot = self.slot();
        let process = self.process();
        let guard = slot.lock.lock(process.id(), |id| process.fabric.alive(id));
        let attr = &sq.attr;
        let device = u32::try_from(self.pd.context.device.index).unwrap_or(0);
        slot.port.store(device << 8 | u32::from(attr.port_num), Ordering::Relaxed);
        slot.access.store(attr.qp_access_flags, Ordering::Relaxed);
        slot.rnr_timer.store(u32::from(attr.min_rnr_timer), Ordering::Relaxed);
        slot.max_dest_rd.store(u32::from(attr.max_dest_rd_atomic), Ordering::Relaxed);
        if now == QPS_INIT && next == QPS_RTR {
            slot.dest_qpn.store(attr.dest_qp_num, Ordering::Relaxed);
            slot.mtu.store(attr.path_mtu, Ordering::Relaxed);
            slot.epsn.store(attr.rq_psn, Ordering::Relaxed);
            slot.comm_est.store(0, Ordering::Relaxed);
        }
        if now == QPS_RTR && next == QPS_RTS {
            sq.psn = sq.attr.sq_psn;
        }
        sq.state = next;
        // Not if somebody moved it to ERR meanwhile: that state is only left through RESET.
        let _ = slot.state.compare_exchange(now, next, Ordering::SeqCst, Ordering::Relaxed);
        drop(guard);
        if next == QPS_SQD && sq.attr.en_sqd_async_notify != 0 {
            self.pd.context.raise(EVENT_SQ_DRAINED, self.qpn, 0);
        }
        if next == QPS_RTS {
            self.drain(sq);
        }
    }

    fn reset(&self, sq: &mut Sq) {
        let slot = self.slot();
        let process = self.process();
        let mut tail = lock(&self.rq);
        let guard = slot.lock.lock(process.id(), |id| process.fabric.alive(id));
        slot.state.store(QPS_RESET, Ordering::SeqCst);
        slot.port.store(0, Ordering::Relaxed);
        self.send_cq.forget(self.qpn);
        self.recv_cq.forget(self.qpn);
        self.clear_counts();
        *tail = 0;
        drop(guard);
        drop(tail);
        let trace = sq.trace;
        *sq = Sq { trace, ..Sq::new() };
        self.settle_pending(sq);
    }

    /// Moves to the error state and flushes both queues. The caller holds the send-queue lock.
    pub fn fail(&self, sq: &mut Sq) {
        sq.state = QPS_ERR;
        let process = self.process();
        let slot = self.slot();
        let guard = slot.lock.lock(process.id(), |id| process.fabric.alive(id));
        let target = self.own_target();
        if slot.state.swap(QPS_ERR, Ordering::SeqCst) != QPS_ERR {
            target.flush();
        }
        drop(guard);
        self.drain(sq);
    }

    /// Attributes and the initial ones.
    pub fn query(&self) -> QpAttr {
        let sq = lock(&self.sq);
        let mut attr = sq.attr;
        attr.qp_state = self.state(&sq);
        attr.cur_qp_state = attr.qp_state;
        attr.cap = self.cap;
        if attr.qp_state >= QPS_RTR {
            attr.rq_psn = self.slot().epsn.load(Ordering::Relaxed);
        }
        if attr.qp_state >= QPS_RTS {
            attr.sq_psn = sq.psn;
        }
        // SAFETY: as in `modify`.
        unsafe { (&raw mut (*self.ptr()).state).write(attr.qp_state) };
        attr
    }

    /// Destroys it. When this returns, no copy from or to it is running.
    pub fn destroy(self: &Arc<Self>, wait: bool) -> Result<(), i32> {
        if QPS.get(Arc::as_ptr(self) as usize).is_none() {
            return Err(libc::EINVAL);
        }
        if wait {
            self.acks.drain();
        }
        QP_AT[self.index as usize].store(std::ptr::null_mut(), Ordering::Release);
        QPS.remove(Arc::as_ptr(self) as usize).ok_or(libc::EINVAL)?;
        let process = self.process();
        let mut sq = lock(&self.sq);
        let slot = self.slot();
        let guard = slot.lock.lock(process.id(), |id| process.fabric.alive(id));
        slot.qpn.store(0, Ordering::SeqCst);
        slot.state.store(QPS_RESET, Ordering::SeqCst);
        drop(guard);
        self.send_cq.forget(self.qpn);
        self.recv_cq.forget(self.qpn);
        *sq = Sq::new();
        self.settle_pending(&sq);
        drop(sq);
        process.heap.free(self.offset, self.bytes);
        process.qps.give(self.index);
        let users = [&self.pd.users, &self.send_cq.users, &self.recv_cq.users];
        for users in users.into_iter().chain(self.srq.as_ref().map(|s| &s.users)) {
            users.0.fetch_sub(1, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Posts that still occupy send-queue slots.
    pub fn sq_used(&self, sq: &Sq) -> u32 {
        sq.posted.wrapping_sub(SQ_DONE[self.index as usize].load(Ordering::Acquire))
    }

    /// Receives that still occupy slots, given the tail.
    pub fn rq_used(&self, tail: u32) -> u32 {
        tail.wrapping_sub(RQ_DONE[self.index as usize].load(Ordering::Acquire))
    }
}

impl Sq {
    fn new() -> Self {
        Self {
            state: QPS_RESET,
            attr: QpAttr::default(),
            posted: 0,
            waiting: VecDeque::new(),
            psn: 0,
            connection: None,
            wait: None,
            trace: [None; 7],
            ece: Ece::default(),
            recent: VecDeque::new(),
        }
    }
}
