//! The receiving end of a connection.
//!
//! `done` of a receive means HostVisible: the completion queue of this end says that the data are here. For device
//! memory a flush must follow before a GPU may look; `done` of the flush means GpuVisible.

use super::comm::{Peer, Progress, Watchdog, completion_error};
use super::fifo::{Credit, CreditFifo, SLOTS, SizeRecords};
use super::flush::FlushQp;
use super::lane::{Kind, Lane, WrId};
use super::pump::Pump;
use super::request::{Outcome, Request, RequestPool, Start};
use super::stripe::Imm;
use crate::error::{Error, Fault};
use crate::memory::region::MAX_RAILS;
use crate::memory::registry::Registered;
use crate::memory::{Gate, GateState, Region};
use crate::verbs::CompletionQueue;
use crate::verbs::wr::{Flags, Local, RecvChain, Remote, SendChain, SingleWrite};
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
    /// Registrations of the credit copies and size records in rail order.
    pub local: Vec<Arc<Registered>>,
    /// Address of the sender's FIFO.
    pub fifo_addr: u64,
    /// Keys of the FIFO in the sender's rail order.
    pub fifo_rkeys: Vec<u32>,
    /// Bytes that may be posted inline on every lane.
    pub max_inline: u32,
}

/// A lane with its receives and what its credits always carry.
struct RecvLane {
    lane: Lane,
    /// Receives consumed and not yet replaced.
    consumed: u32,
    refill: RecvChain,
    /// Key of the local copy.
    lkey: u32,
    /// Key of the sender's FIFO.
    fifo_rkey: u32,
    /// The rail as a bit.
    rail_bit: u32,
}

impl std::fmt::Debug for RecvLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvLane").field("lane", &self.lane).finish_non_exhaustive()
    }
}

/// Stands for the request of a receive that was completed early.
const NO_REQUEST: u16 = u16::MAX;
/// Set in [`Slot::awaited`] for a receive with one member.
const ONE: u64 = 1 << 32;
/// Set in [`Slot::awaited`] for a receive with several members.
const SEVERAL: u64 = 2 << 32;

/// One advertised receive.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The immediate of the usual answer (one part, no record) with [`ONE`] or [`SEVERAL`] set; 0 when idle.
    awaited: u64,
    /// Bytes advertised for the only member.
    limit: u32,
    /// The request that waits for it.
    request: u16,
    /// Number of members, where there are several.
    members: u8,
    /// Parts that came in so far; 0 when idle.
    arrived: u8,
    /// Their bytes; 0 when idle.
    bytes: u32,
}

const IDLE: Slot =
    Slot { awaited: 0, limit: 0, request: NO_REQUEST, members: 0, arrived: 0, bytes: 0 };

impl Slot {
    /// Starts waiting for the usual answer to a receive with one member.
    #[inline(always)]
    fn await_one(&mut self, sequence: u32, limit: u32, request: u16) {
        self.awaited = u64::from(Imm::new(sequence, 1, false).0) | ONE;
        self.limit = limit;
        self.request = request;
    }

    /// Starts waiting for the answer to a receive with `members` members.
    fn await_several(&mut self, sequence: u32, members: u8, request: u16) {
        self.awaited = u64::from(Imm::new(sequence, 1, false).0) | SEVERAL;
        self.members = members;
        self.request = request;
    }

    /// Whether `imm` ends a part of the receive that this slot waits for.
    fn is_answered_by(&self, imm: Imm) -> bool {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is taken on purpose")]
        let usual = self.awaited as u32;
        self.awaited != 0 && imm.matches(usual)
    }

    /// Number of members.
    fn members(&self) -> usize {
        if self.awaited & SEVERAL != 0 { self.members.into() } else { 1 }
    }
}

/// Counters of one receiving end.
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "named for what they count")]
pub struct RecvStats {
    /// Receives advertised, wrapping.
    pub receives: u32,
    pub flushes: u64,
    /// Flush calls that had nothing to wait for.
    pub flushes_skipped: u64,
}

/// The receiving end of a connection. Driven by one thread at a time.
#[repr(C)]
#[derive(Debug)]
pub struct RecvComm {
    pump: Pump,
    /// Number of the next receive.
    next: u32,
    /// Lane of the next credit.
    lane: usize,
    lanes: Vec<RecvLane>,
    shadow: CreditFifo,
    shadow_addr: u64,
    fifo_addr: u64,
    /// Whether entries are one half long, as the usual case needs.
    is_short: bool,
    /// Flags of an unsignalled one-member credit.
    one_flags: Flags,
    max_inline: u32,
    /// Rails that carried data, one bit each.
    used_rails: u32,
    credit: Credits,
    pool: RequestPool,
    slots: [Slot; SLOTS],
    records: SizeRecords,
    flush: Vec<FlushQp>,
    flush_wrs: FlushWrs,
    flushes: u64,
    flushes_skipped: u64,
    watchdog: Watchdog,
    peer: Peer,
    failure: Option<Fault>,
    /// Why the last [`Self::try_irecv`] could not post.
    post_errno: i32,
    // Dropped after the queue pairs.
    _local: Vec<Arc<Registered>>,
}

/// Scratch for posting credits.
struct Credits(SingleWrite);

/// Scratch for posting flushes.
struct FlushWrs(SendChain);

impl std::fmt::Debug for Credits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credits").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for FlushWrs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlushWrs").finish_non_exhaustive()
    }
}

impl RecvComm {
    /// Where the pump is: first, so that a request's owner leads to it whatever its kind.
    pub const PUMP_OFFSET: usize = std::mem::offset_of!(Self, pump);

    /// A receiving end over a connected route whose lanes have [`RECV_DEPTH`] receives posted and whose completion
    /// queues are `cqs`, in rail order.
    pub fn new(
        gate: Gate,
        cqs: Vec<Arc<CompletionQueue>>,
        shadow: CreditFifo,
        records: SizeRecords,
        route: Route,
        peer: Peer,
    ) -> Self {
        let pump = Pump::new(gate, cqs);
        let lanes = route
            .lanes
            .into_iter()
            .enumerate()
            .map(|(index, lane)| RecvLane {
                consumed: 0,
                refill: receives(index),
                lkey: route.local[lane.rail].lkey(),
                fifo_rkey: route.fifo_rkeys[lane.remote_rail],
                rail_bit: 1 << (lane.rail % MAX_RAILS),
                lane,
            })
            .collect();
        Self {
            pool: RequestPool::new(REQUESTS, pump.rails()),
            pump,
            next: 0,
            lane: 0,
            lanes,
            shadow_addr: shadow.addr(0, 0),
            is_short: shadow.is_short(),
            one_flags: credit_flags(CreditFifo::SHORT, route.max_inline),
            shadow,
            fifo_addr: route.fifo_addr,
            max_inline: route.max_inline,
            used_rails: 0,
            credit: Credits(SingleWrite::new(false)),
            slots: [IDLE; SLOTS],
            records,
            flush: route.flush,
            flush_wrs: FlushWrs(SendChain::new(1)),
            flushes: 0,
            flushes_skipped: 0,
            watchdog: Watchdog::default(),
            peer,
            failure: None,
            post_errno: 0,
            _local: route.local,
        }
    }

    /// Tells the requests whom they belong to.
    pub fn set_owner(&mut self, owner: usize) {
        self.pool.set_owner(owner);
    }

    /// Counters.
    pub fn stats(&self) -> RecvStats {
        RecvStats {
            receives: self.next,
            flushes: self.flushes,
            flushes_skipped: self.flushes_skipped,
        }
    }

    /// The other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Advertises the usual receive: one member with a memory handle, nothing in the way. Cannot fail by itself:
    /// whatever needs a decision or an error is left to [`Self::irecv`], from an unchanged state.
    #[inline(always)]
    pub fn try_irecv(
        &mut self,
        addr: u64,
        len: u32,
        tag: u32,
        region: &Region,
        optional: bool,
    ) -> Start<'_> {
        let index = self.next as usize % SLOTS;
        if !self.pump.gate().is_open() || self.slots[index].awaited != 0 || !self.is_short {
            return Start::General;
        }
        if !region.contains(addr, len.into()) {
            return Start::General;
        }
        let Some(lane) = self.lanes.get_mut(self.lane) else { return Start::General };
        if lane.lane.is_full() {
            return Start::General;
        }
        let Some(request) = self.pool.next() else { return Start::General };
        let sequence = self.next.wrapping_add(1);
        let rkeys = region.rkeys();
        self.shadow.fill_one(index, addr, len, tag, [rkeys[0], rkeys[1]], sequence);
        let offset = CreditFifo::short_offset(index);
        let id = lane.lane.progress_id();
        let local = Local {
            addr: self.shadow_addr.wrapping_add(offset),
            len: CreditFifo::SHORT,
            lkey: lane.lkey,
        };
        let remote = Remote { addr: self.fifo_addr.wrapping_add(offset), rkey: lane.fifo_rkey };
        self.credit.0.set_plain(id.0, local, remote, self.one_flags.signaled_if(is_signalled(id)));
        if let Err(errno) = lane.lane.post_single(&mut self.credit.0) {
            self.post_errno = errno;
            return Start::Failed;
        }
        self.pool.commit(request, 1);
        let mut waiting = request.index();
        if optional {
            request.set_size(0, len);
            request.complete();
            waiting = NO_REQUEST;
        }
        self.slots[index].await_one(sequence, len, waiting);
        self.next = sequence;
        self.lane += 1;
        if self.lane == self.lanes.len() {
            self.lane = 0;
        }
        Start::Started(request)
    }

    /// Advertises a receive of `members`, 1 to [`super::fifo::MEMBERS`]. `None`: as many as can be in flight are; call
    /// again.
    ///
    /// `optional`: the caller detects arrival in the data and accepts a request that is complete at once; only for a
    /// single member.
    ///
    /// # Errors
    /// The connection failed, or a buffer is not inside its region.
    pub fn irecv<'a>(
        &mut self,
        members: impl ExactSizeIterator<Item = Posted<'a>>,
        optional: bool,
    ) -> Result<Option<&Request>, Fault> {
        if !self.pump.gate().is_open() {
            self.attention(true)?;
        }
        let index = self.next as usize % SLOTS;
        let sequence = self.next.wrapping_add(1);
        let full = self.lanes[self.lane].lane.is_full();
        if self.slots[index].awaited != 0 || full || !self.pool.has_free() {
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
        let lane = &mut self.lanes[self.lane];
        let bytes = (count * self.shadow.stride()) as u32;
        let id = lane.lane.progress_id();
        let local = Local { addr: self.shadow.addr(index, 0), len: bytes, lkey: lane.lkey };
        let remote = Remote {
            addr: self.fifo_addr.wrapping_add(self.shadow.offset(index, 0) as u64),
            rkey: lane.fifo_rkey,
        };
        let flags = credit_flags(bytes, self.max_inline).signaled_if(is_signalled(id));
        self.credit.0.set_plain(id.0, local, remote, flags);
        if let Err(errno) = lane.lane.post_single(&mut self.credit.0) {
            return Err(self.post_failed("ibv_post_send", errno));
        }
        self.lane = (self.lane + 1) % self.lanes.len();
        self.next = sequence;
        // Cannot fail: a free request was seen above and nothing took it.
        let Some(request) = self.pool.take(count as u8) else { return Ok(None) };
        let taken = request.index();
        if count > 1 {
            self.slots[index].await_several(sequence, count as u8, taken);
        } else if optional {
            request.set_size(0, limit);
            request.complete();
            self.slots[index].await_one(sequence, limit, NO_REQUEST);
        } else {
            self.slots[index].await_one(sequence, limit, taken);
        }
        Ok(self.pool.get(taken.into()))
    }

    /// Starts a flush of what was received at `addr`, one byte inside `region`. `Ok(None)` with `false`: nothing to
    /// wait for; with `true`: no resource is free, call again.
    ///
    /// # Errors
    /// The connection failed, or the address is not inside the region.
    pub fn iflush(&mut self, addr: u64, region: &Region) -> Result<Option<&Request>, Fault> {
        if !self.pump.gate().is_open() {
            self.attention(true)?;
        }
        if !region.contains(addr, 1) {
            return Err(Box::new(Error::argument(format!(
                "iflush at {addr:#x} is outside its memory handle"
            ))));
        }
        // Before anything arrived nobody knows which rails will matter.
        let used = if self.used_rails == 0 { u32::MAX } else { self.used_rails };
        let rails = self.flush.iter().filter(|f| used >> f.lane.rail & 1 != 0).count();
        if rails == 0 {
            self.flushes_skipped += 1;
            return Ok(None);
        }
        // Bounded: a flush queue pair has a slot per receive in flight, and its reads complete on their own.
        if self.flush.iter().any(|f| f.lane.is_full()) || !self.pool.has_free() {
            return Err(Box::new(Error::usage(format!(
                "{}: more than {SLOTS} flushes in flight",
                self.peer
            ))));
        }
        let Some(request) = self.pool.take(0) else { return Ok(None) };
        let index = request.index();
        request.set_parts(rails as u8);
        for flush in self.flush.iter_mut().filter(|f| used >> f.lane.rail & 1 != 0) {
            let id = WrId::new(Kind::Flush, flush.lane.rail, index.into(), flush.lane.position(0));
            let remote = Remote { addr, rkey: region.rkeys()[flush.lane.rail % MAX_RAILS] };
            self.flush_wrs.0.read(0, id.0, flush.scratch(), remote, Flags::SIGNALED);
            if let Err(errno) = flush.lane.post(&mut self.flush_wrs.0, 1) {
                return Err(self.post_failed("ibv_post_send (flush)", errno));
            }
        }
        self.flushes += 1;
        Ok(self.pool.get(index.into()))
    }

    /// Counts a flush call that had nothing to do.
    pub fn skip_flush(&mut self) {
        self.flushes_skipped += 1;
    }

    /// Takes note of the usual poll result: completions of one-member receives that came in one part. Returns how many
    /// it took note of, from the first; [`Self::completions`] must look at the rest.
    #[inline(always)]
    pub fn settle(&mut self, found: i32) -> usize {
        let mut settled = 0;
        for wc in self.pump.wc.iter(found) {
            let id = WrId(wc.id());
            if !wc.is_success() || id.kind() != Some(Kind::Receive) {
                break;
            }
            let (imm, bytes) = (wc.imm(), wc.byte_len());
            let slot = &mut self.slots[Imm(imm).sequence().wrapping_sub(1) as usize % SLOTS];
            let Some(lane) = self.lanes.get_mut(id.lane()) else { break };
            // The last receive of a batch is left to the general case, which posts the next batch.
            if slot.awaited != u64::from(imm) | ONE
                || bytes > slot.limit
                || lane.consumed + 1 == RECV_BATCH
            {
                break;
            }
            slot.awaited = 0;
            if let Some(request) = self.pool.get(slot.request.into()) {
                request.set_size(0, bytes);
                request.complete();
            }
            lane.consumed += 1;
            self.used_rails |= lane.rail_bit;
            settled += 1;
        }
        settled
    }

    /// Takes a complete request of this communicator back.
    #[inline(always)]
    pub fn put(&mut self, request: &Request) {
        self.pool.put(request);
    }

    /// Whether request `index` is complete; a complete one goes back to the pool.
    ///
    /// # Errors
    /// The connection failed, or the request is not in flight.
    pub fn test(&mut self, index: u16) -> Result<(Outcome, Option<&Request>), Fault> {
        if self.pool.get(index.into()).is_some_and(Request::is_pending) {
            if !self.pump.gate().is_open() {
                self.attention(false)?;
            }
            self.poll()?;
        }
        let outcome = self.pool.finish(index);
        let outcome = outcome
            .ok_or_else(|| Box::new(Error::usage("test of a request that is not in flight")))?;
        Ok((outcome, self.pool.get(index.into())))
    }

    fn poll(&mut self) -> Result<Progress, Fault> {
        let mut progress = Progress::Nothing;
        for rail in 0..self.pump.rails() {
            let found = self.pump.poll(rail);
            if found != 0 {
                self.completions(0, found)?;
                progress = Progress::Some;
            }
        }
        Ok(progress)
    }

    /// Takes note of the `found` completions of the last poll, from number `first`.
    ///
    /// # Errors
    /// One of them failed, and with it the connection.
    pub fn completions(&mut self, first: usize, found: i32) -> Result<(), Fault> {
        let Ok(found) = usize::try_from(found) else {
            return Err(self.fail(Error::system(format!("{}: ibv_poll_cq failed", self.peer))));
        };
        for index in first..found {
            let wc = self.pump.wc.get(index);
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
                    if let Some(flush) = self.flush.iter_mut().find(|f| f.lane.rail == id.lane()) {
                        flush.lane.complete(id.position());
                        if let Some(request) = self.pool.get(id.slot()) {
                            request.complete_part();
                        }
                    }
                }
                Some(Kind::Progress | Kind::Part | Kind::Single) => {
                    if let Some(lane) = self.lanes.get_mut(id.lane()) {
                        lane.lane.complete(id.position());
                    }
                }
                None => {}
            }
        }
        Ok(())
    }

    /// A part of a message arrived on lane `lane`.
    fn arrived(&mut self, lane: usize, imm: Imm, bytes: u32) -> Result<(), Fault> {
        let index = imm.sequence().wrapping_sub(1) as usize % SLOTS;
        let slot = &mut self.slots[index];
        if !slot.is_answered_by(imm) {
            return Err(self.unexpected(imm));
        }
        slot.bytes = slot.bytes.saturating_add(bytes);
        slot.arrived += 1;
        if u32::from(slot.arrived) == imm.parts() {
            let slot = std::mem::replace(slot, IDLE);
            if !imm.has_record() && slot.members() == 1 {
                if slot.bytes > slot.limit {
                    return Err(self.unexpected(imm));
                }
                if let Some(request) = self.pool.get(slot.request.into()) {
                    request.set_size(0, slot.bytes);
                    request.complete();
                }
            } else {
                self.arrived_with_record(index, slot, imm)?;
            }
        }
        let Some(at) = self.lanes.get_mut(lane) else { return Err(self.unexpected(imm)) };
        self.used_rails |= at.rail_bit;
        at.consumed += 1;
        if at.consumed == RECV_BATCH {
            at.consumed = 0;
            if let Err(errno) = at.lane.qp().post_recv(&mut at.refill) {
                return Err(self.post_failed("ibv_post_recv", errno));
            }
        }
        Ok(())
    }

    /// Completes a receive whose sizes the sender wrote beside the data.
    fn arrived_with_record(&mut self, index: usize, slot: Slot, imm: Imm) -> Result<(), Fault> {
        if !imm.has_record() {
            return Err(self.unexpected(imm));
        }
        let members = slot.members();
        let sizes = self.records.read(index, members);
        if sizes[..members].iter().any(|s| i32::try_from(*s).is_err()) {
            return Err(self.unexpected(imm));
        }
        if let Some(request) = self.pool.get(slot.request.into()) {
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
        let state = self.pump.gate().state();
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
        self.pump.gate().report(GateState::Failed);
        error
    }

    /// The failure of the last [`Self::try_irecv`], which ends the connection.
    #[cold]
    pub fn try_failed(&mut self) -> Fault {
        self.post_failed("ibv_post_send", self.post_errno)
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

/// Whether the credit with this identifier makes a completion, which frees its lane's slots.
#[inline(always)]
fn is_signalled(id: WrId) -> bool {
    id.position().is_multiple_of(SIGNAL_EVERY)
}

/// Flags of an unsignalled credit of `bytes`.
fn credit_flags(bytes: u32, max_inline: u32) -> Flags {
    if bytes <= max_inline { Flags::SILENT.inline() } else { Flags::SILENT }
}

/// The receives that are posted on lane `lane` in one go.
pub fn receives(lane: usize) -> RecvChain {
    RecvChain::new(RECV_BATCH as usize, WrId::new(Kind::Receive, lane, 0, 0).0)
}
