//! The receiving end of a connection.
//!
//! `done` of a receive means HostVisible: the completion queue of this end says that the data are here. For device
//! memory a flush must follow before a GPU may look; `done` of the flush means GpuVisible.

use super::comm::{Peer, Progress, Watchdog, completion_error};
use super::fifo::{Credit, CreditFifo, SLOTS, SizeRecords};
use super::flush::FlushQp;
use super::lane::{Kind, Lane, WrId};
use super::request::{Outcome, Request, RequestPool, State};
use super::stripe::Imm;
use crate::error::{Error, Fault};
use crate::memory::region::MAX_RAILS;
use crate::memory::registry::Registered;
use crate::memory::{Gate, GateState, Region};
use crate::verbs::CompletionQueue;
use crate::verbs::cq::Completions;
use crate::verbs::wr::{Flags, Local, RecvChain, Remote, SendChain};
use std::sync::Arc;

/// Requests of a receiving end: its receives and as many flushes.
const REQUESTS: u16 = 2 * SLOTS as u16;
/// Receives posted with one doorbell when as many were consumed.
pub const RECV_BATCH: u32 = SLOTS as u32;
/// Receives posted on each lane. Every advertised receive consumes at most one per lane, and at most SLOTS are
/// advertised; with up to a batch consumed and not yet replaced, SLOTS are always left.
pub const RECV_DEPTH: u32 = SLOTS as u32 + RECV_BATCH;
/// Credits of a lane between two signalled ones.
const SIGNAL_EVERY: u32 = 16;
/// Slots of a lane's send queue: all advertised receives and one stretch of unsignalled credits.
pub const CREDIT_DEPTH: u32 = SLOTS as u32 + 2 * SIGNAL_EVERY;

/// One member of a receive, as given to irecv.
#[derive(Clone, Copy, Debug)]
pub struct Posted<'a> {
    /// Address of the buffer.
    pub addr: u64,
    /// Its size: the most that may be received.
    pub len: u32,
    /// The tag that the send must have.
    pub tag: u32,
    /// Its memory handle; may be absent for an empty buffer.
    pub region: Option<&'a Region>,
}

/// What the data path needs to know about the sending end and the way there.
#[derive(Debug)]
pub struct Route {
    /// Queue pairs in lane order.
    pub lanes: Vec<Lane>,
    /// Loopback queue pairs in rail order; none when nothing needs a flush.
    pub flush: Vec<FlushQp>,
    /// Completion queues in rail order.
    pub cqs: Vec<Arc<CompletionQueue>>,
    /// Registrations of the credit copies and size records in rail order.
    pub local: Vec<Arc<Registered>>,
    /// Address of the sender's FIFO.
    pub fifo_addr: u64,
    /// Keys of the FIFO in the sender's rail order.
    pub fifo_rkeys: Vec<u32>,
    /// Bytes that may be posted inline on every lane.
    pub max_inline: u32,
}

const NO_REQUEST: u8 = u8::MAX;

/// One advertised receive.
#[derive(Clone, Copy, Debug)]
struct Slot {
    sequence: u32,
    bytes: u32,
    members: u8,
    waiting: bool,
    arrived: u8,
    /// The request that waits for it; none when it was completed early.
    request: u8,
    limit: u32,
}

/// Counters of one receiving end.
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "named for what they count")]
pub struct RecvStats {
    pub messages: u64,
    pub flushes: u64,
    /// Flush calls that had nothing to wait for.
    pub flushes_skipped: u64,
}

/// The receiving end of a connection. Driven by one thread at a time.
#[derive(Debug)]
pub struct RecvComm {
    gate: Gate,
    /// Number of the next receive.
    next: u32,
    lane: usize,
    shadow: CreditFifo,
    records: SizeRecords,
    route: Route,
    slots: [Slot; SLOTS],
    pool: RequestPool,
    scratch: Scratch,
    consumed: Vec<u32>,
    /// Rails that carried data, one bit each.
    used_rails: u32,
    stats: RecvStats,
    watchdog: Watchdog,
    peer: Peer,
    failure: Option<Fault>,
}

/// Scratch for posting and polling.
struct Scratch {
    wrs: SendChain,
    refill: Vec<RecvChain>,
    wc: Completions,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch").finish_non_exhaustive()
    }
}

impl RecvComm {
    /// A receiving end over a connected route whose lanes have [`RECV_DEPTH`] receives posted.
    pub fn new(
        gate: Gate,
        shadow: CreditFifo,
        records: SizeRecords,
        route: Route,
        peer: Peer,
    ) -> Self {
        let refill = (0..route.lanes.len()).map(receives).collect();
        Self {
            gate,
            next: 0,
            lane: 0,
            shadow,
            records,
            slots: [Slot {
                sequence: 0,
                bytes: 0,
                members: 0,
                waiting: false,
                arrived: 0,
                request: NO_REQUEST,
                limit: 0,
            }; SLOTS],
            pool: RequestPool::new(REQUESTS),
            scratch: Scratch { wrs: SendChain::new(1), refill, wc: Completions::new() },
            consumed: vec![0; route.lanes.len()],
            used_rails: 0,
            route,
            stats: RecvStats::default(),
            watchdog: Watchdog::default(),
            peer,
            failure: None,
        }
    }

    /// Tells the requests whom they belong to.
    pub fn set_owner(&mut self, owner: usize) {
        self.pool.set_owner(owner);
    }

    /// Counters.
    pub fn stats(&self) -> RecvStats {
        self.stats
    }

    /// The other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Advertises a receive of `members`, 1 to [`super::fifo::MEMBERS`]. `None`: as many as can be in flight are; call again.
    ///
    /// `optional`: the caller detects arrival in the data and accepts a request that is complete at once; only for a
    /// single member.
    ///
    /// # Errors
    /// The connection failed, or a buffer is not inside its region.
    #[inline]
    pub fn irecv<'a>(
        &mut self,
        members: impl ExactSizeIterator<Item = Posted<'a>>,
        optional: bool,
    ) -> Result<Option<&Request>, Fault> {
        if !self.gate.is_open() {
            self.attention(true)?;
        }
        let index = self.next as usize % SLOTS;
        let sequence = self.next.wrapping_add(1);
        if self.slots[index].waiting
            || self.route.lanes[self.lane].room() == 0
            || !self.pool.has_free()
        {
            self.poll()?;
            return Ok(None);
        }
        let count = members.len();
        let mut limit = 0;
        for (member, posted) in members.enumerate() {
            let rkeys = match posted.region {
                Some(region) if region.contains(posted.addr, posted.len.into()) => *region.rkeys(),
                _ if posted.len == 0 => [0; MAX_RAILS],
                _ => return Err(out_of_region(&posted)),
            };
            limit = posted.len;
            self.shadow.fill(
                index,
                member,
                &Credit {
                    addr: posted.addr,
                    len: posted.len,
                    tag: posted.tag,
                    rkeys,
                    members: count as u32,
                    sequence,
                },
            );
        }
        let lane = &mut self.route.lanes[self.lane];
        let bytes = (count * self.shadow.stride()) as u32;
        let local = Local {
            addr: self.shadow.addr(index, 0),
            len: bytes,
            lkey: self.route.local[lane.rail].lkey(),
        };
        let remote = Remote {
            addr: self.route.fifo_addr.wrapping_add(self.shadow.offset(index, 0) as u64),
            rkey: self.route.fifo_rkeys[lane.remote_rail],
        };
        let position = lane.position(0);
        let mut flags =
            if position.is_multiple_of(SIGNAL_EVERY) { Flags::SIGNALED } else { Flags::SILENT };
        if bytes <= self.route.max_inline {
            flags = flags.inline();
        }
        let id = WrId::new(Kind::Progress, self.lane, 0, position);
        self.scratch.wrs.write(0, id.0, local, remote, flags);
        if let Err(errno) = lane.post(&mut self.scratch.wrs, 1) {
            return Err(self.post_failed("ibv_post_send", errno));
        }
        self.lane += 1;
        if self.lane == self.route.lanes.len() {
            self.lane = 0;
        }
        self.next = sequence;
        // Cannot fail: a free request was seen above and nothing took it.
        let Some(request) = self.pool.take(count as u8) else { return Ok(None) };
        let request_index = request.index();
        let early = optional && count == 1;
        if early {
            request.set_size(0, limit);
            request.complete();
        }
        self.slots[index] = Slot {
            sequence,
            bytes: 0,
            members: count as u8,
            waiting: true,
            arrived: 0,
            request: if early { NO_REQUEST } else { request_index as u8 },
            limit,
        };
        Ok(Some(self.pool.get(request_index)))
    }

    /// Starts a flush of what was received at `addr`, one byte inside `region`. `Ok(None)` with `false`: nothing to
    /// wait for; with `true`: no resource is free, call again.
    ///
    /// # Errors
    /// The connection failed, or the address is not inside the region.
    pub fn iflush(&mut self, addr: u64, region: &Region) -> Result<Option<&Request>, Fault> {
        if !self.gate.is_open() {
            self.attention(true)?;
        }
        if !region.contains(addr, 1) {
            return Err(Box::new(Error::argument(format!(
                "iflush at {addr:#x} is outside its memory handle"
            ))));
        }
        // Before anything arrived nobody knows which rails will matter.
        let used = if self.used_rails == 0 { u32::MAX } else { self.used_rails };
        let rails = self.route.flush.iter().filter(|f| used >> f.lane.rail & 1 != 0).count();
        if rails == 0 {
            self.stats.flushes_skipped += 1;
            return Ok(None);
        }
        // Bounded: a flush queue pair has a slot per receive in flight, and its reads complete on their own.
        if self.route.flush.iter().any(|f| f.lane.room() == 0) || !self.pool.has_free() {
            return Err(Box::new(Error::usage(format!(
                "{}: more than {SLOTS} flushes in flight",
                self.peer
            ))));
        }
        let Some(request) = self.pool.take(0) else { return Ok(None) };
        let index = request.index();
        request.set_parts(rails as u8);
        for flush in self.route.flush.iter_mut().filter(|f| used >> f.lane.rail & 1 != 0) {
            let id = WrId::new(Kind::Flush, flush.lane.rail, index.into(), flush.lane.position(0));
            let remote = Remote { addr, rkey: region.rkeys()[flush.lane.rail % MAX_RAILS] };
            self.scratch.wrs.read(0, id.0, flush.scratch(), remote, Flags::SIGNALED);
            if let Err(errno) = flush.lane.post(&mut self.scratch.wrs, 1) {
                return Err(self.post_failed("ibv_post_send (flush)", errno));
            }
        }
        self.stats.flushes += 1;
        Ok(Some(self.pool.get(index)))
    }

    /// Counts a flush call that had nothing to do.
    pub fn skip_flush(&mut self) {
        self.stats.flushes_skipped += 1;
    }

    /// Whether request `index` is complete; a complete one goes back to the pool.
    ///
    /// # Errors
    /// The connection failed, or the request is not in flight.
    #[inline]
    pub fn test(&mut self, index: u16) -> Result<Outcome, Fault> {
        if self.pool.get(index).state() == State::Pending {
            if !self.gate.is_open() {
                self.attention(false)?;
            }
            if self.poll()? == Progress::Nothing {
                return Ok(Outcome::Pending);
            }
        }
        let request = self.pool.get(index);
        match request.state() {
            State::Done => {
                let members = request.members();
                self.pool.put(index);
                Ok(Outcome::Done(members))
            }
            State::Pending => Ok(Outcome::Pending),
            State::Free => Err(Box::new(Error::usage("test of a request that is not in flight"))),
        }
    }

    /// Request `index`; its sizes are valid until the next irecv.
    #[inline]
    pub fn request(&self, index: u16) -> &Request {
        self.pool.get(index)
    }

    #[inline]
    fn poll(&mut self) -> Result<Progress, Fault> {
        let mut progress = Progress::Nothing;
        for rail in 0..self.route.cqs.len() {
            let found = self.route.cqs[rail].poll(&mut self.scratch.wc);
            if found != 0 {
                self.completions(found)?;
                progress = Progress::Some;
            }
        }
        Ok(progress)
    }

    #[inline(never)]
    fn completions(&mut self, found: i32) -> Result<(), Fault> {
        let Ok(found) = usize::try_from(found) else {
            return Err(self.fail(Error::system(format!("{}: ibv_poll_cq failed", self.peer))));
        };
        for index in 0..found {
            let wc = self.scratch.wc.get(index);
            let id = WrId(wc.id());
            if !wc.is_success() {
                let what = match id.kind() {
                    Some(Kind::Receive) => "receive",
                    Some(Kind::Flush) => "flush",
                    _ => "credit",
                };
                let error = completion_error(wc, &self.peer, what);
                return Err(self.fail(error));
            }
            match id.kind() {
                Some(Kind::Receive) => {
                    let (imm, bytes) = (Imm(wc.imm()), wc.byte_len());
                    self.arrived(id.lane(), imm, bytes)?;
                }
                Some(Kind::Flush) => {
                    if let Some(flush) =
                        self.route.flush.iter_mut().find(|f| f.lane.rail == id.lane())
                    {
                        flush.lane.complete(id.position());
                        self.pool.get(id.slot() as u16).complete_part();
                    }
                }
                Some(Kind::Progress | Kind::Part) => {
                    if let Some(lane) = self.route.lanes.get_mut(id.lane()) {
                        lane.complete(id.position());
                    }
                }
                None => {}
            }
        }
        Ok(())
    }

    /// A part of a message arrived on `lane`.
    #[inline]
    fn arrived(&mut self, lane: usize, imm: Imm, bytes: u32) -> Result<(), Fault> {
        let index = imm.sequence().wrapping_sub(1) as usize % SLOTS;
        let slot = &mut self.slots[index];
        if !slot.waiting || !imm.matches(slot.sequence) {
            return Err(self.unexpected(imm));
        }
        slot.bytes = slot.bytes.saturating_add(bytes);
        slot.arrived += 1;
        let whole = u32::from(slot.arrived) == imm.parts();
        if whole {
            slot.waiting = false;
            let slot = *slot;
            self.stats.messages += 1;
            if !imm.has_record() && slot.members == 1 {
                if slot.bytes > slot.limit {
                    return Err(self.unexpected(imm));
                }
                if slot.request != NO_REQUEST {
                    let request = self.pool.get(slot.request.into());
                    request.set_size(0, slot.bytes);
                    request.complete();
                }
            } else {
                self.arrived_with_record(index, slot, imm)?;
            }
        }
        self.used_rails |= 1 << (self.route.lanes[lane].rail % MAX_RAILS);
        self.consumed[lane] += 1;
        if self.consumed[lane] == RECV_BATCH {
            self.consumed[lane] = 0;
            if let Err(errno) =
                self.route.lanes[lane].qp().post_recv(&mut self.scratch.refill[lane])
            {
                return Err(self.post_failed("ibv_post_recv", errno));
            }
        }
        Ok(())
    }

    /// Completes a receive whose sizes the sender wrote beside the data.
    #[inline(never)]
    fn arrived_with_record(&mut self, index: usize, slot: Slot, imm: Imm) -> Result<(), Fault> {
        if !imm.has_record() {
            return Err(self.unexpected(imm));
        }
        let members = usize::from(slot.members);
        let sizes = self.records.read(index, members);
        if sizes[..members].iter().any(|s| i32::try_from(*s).is_err()) {
            return Err(self.unexpected(imm));
        }
        if slot.request != NO_REQUEST {
            let request = self.pool.get(slot.request.into());
            for (member, size) in sizes[..members].iter().enumerate() {
                request.set_size(member, *size);
            }
            request.complete();
        }
        Ok(())
    }

    #[cold]
    fn unexpected(&mut self, imm: Imm) -> Fault {
        self.fail(Error::remote(format!(
            "{}: a message arrived that answers no advertised receive (immediate {:#x}, next receive {})",
            self.peer, imm.0, self.next
        )))
    }

    /// The gate is not open: repeats a failure, or decides what an event outside the data path means here.
    #[cold]
    #[inline(never)]
    fn attention(&mut self, starting: bool) -> Result<(), Fault> {
        if let Some(failure) = &self.failure {
            return Err(Box::new(failure.repeated()));
        }
        let state = self.gate.state();
        if state != GateState::Forked && !starting && self.poll()? == Progress::Some {
            return Ok(());
        }
        match self.watchdog.judge(state, starting, &self.peer) {
            Some(error) => Err(self.fail(error)),
            None => Ok(()),
        }
    }

    #[cold]
    fn fail(&mut self, error: Error) -> Fault {
        let error = Box::new(error);
        if self.failure.is_none() {
            self.failure = Some(error.clone());
        }
        self.gate.report(GateState::Failed);
        error
    }

    #[cold]
    fn post_failed(&mut self, verb: &'static str, errno: i32) -> Fault {
        self.fail(Error::verb(verb, format_args!("{} (receive)", self.peer), errno))
    }
}

#[cold]
fn out_of_region(posted: &Posted<'_>) -> Fault {
    let Posted { addr, len, region, .. } = posted;
    Box::new(Error::argument(match region {
        Some(region) => {
            let (start, bytes) = region.range();
            format!(
                "irecv of {len} bytes at {addr:#x} is outside its memory handle ({bytes} bytes at {start:#x})"
            )
        }
        None => format!("irecv of {len} bytes at {addr:#x} without a memory handle"),
    }))
}

/// The receives that are posted on lane `lane` in one go.
pub fn receives(lane: usize) -> RecvChain {
    RecvChain::new(RECV_BATCH as usize, WrId::new(Kind::Receive, lane, 0, 0).0)
}
