//! The receiving end of a connection.
//!
//! `done` of a receive means HostVisible: the completion queue of this end says that the data are here. For device
//! memory a flush must follow before a GPU may look; `done` of the flush means GpuVisible.

mod reroute;

use self::reroute::Reroute;
use super::comm::{Ending, Peer, Shared, Watchdog};
use super::connection::Sizes;
use super::copies::{Copies, Spare, Step};
use super::credits::Credits;
use super::failover::Failover;
use super::failure::Work;
use super::fifo::{Credit, CreditFifo, MEMBERS, SLOTS, SizeRecords};
use super::flush::{FlushQp, Flushes};
use super::lane::{Kind, Lane, WrId};
use super::profile::Profile;
use super::pump::Pump;
use super::receives::RecvLane;
use super::request::{Request, RequestPool, Start, State};
use super::slot::{IDLE, NO_REQUEST, NOTHING, Slot, last_in};
use super::stripe::Imm;
use crate::error::{Error, Fault};
use crate::hint::plain;
use crate::memory::region::MAX_RAILS;
use crate::memory::registry::Registered;
use crate::memory::status::layout::board;
use crate::memory::status::{Board, is_sampled};
use crate::memory::{Gate, GateState, Region, RegionKind};
use crate::profiler::Parent;
use crate::verbs::CompletionQueue;
use crate::verbs::cq::At;
use crate::verbs::sys::WR_RDMA_WRITE;
use crate::verbs::wr::{Flags, Remote, SendChain};
use std::sync::Arc;

/// Requests of a receiving end beside the usual ones: its receives and as many flushes.
const REQUESTS: u16 = 2 * SLOTS as u16;
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
    /// What events for a profiler belong to.
    pub parent: Parent,
}

/// What the data path needs to know about the sending end and the way there.
#[derive(Debug)]
pub struct Route {
    /// Queue pairs in lane order.
    pub lanes: Vec<Lane>,
    /// Loopback queue pairs in rail order; none when nothing needs a flush.
    pub flush: Vec<FlushQp>,
    /// How data become visible to a GPU.
    pub flushes: Flushes,
    /// Registrations of the credit copies and size records in rail order.
    pub local: Vec<Arc<Registered>>,
    /// Address of the sender's FIFO.
    pub fifo_addr: u64,
    /// Keys of the FIFO in the sender's rail order.
    pub fifo_rkeys: Vec<u32>,
    /// Bytes that may be posted inline on every lane.
    pub max_inline: u32,
    /// Where the table of copies comes from, should any buffer need them.
    pub(super) spare: Spare,
    /// The communicator's number, by which handles of copied buffers know it.
    pub owner: u64,
    /// Sizes of the lanes' queues.
    pub sizes: Sizes,
    /// What is known of lanes, where the others go on when one fails.
    pub failover: Option<Arc<Failover>>,
    /// What NCCL's profiler is told, if there may be one.
    pub profile: Option<Box<Profile>>,
}

/// The receiving end of a connection. Driven by one thread at a time.
#[repr(C)]
#[derive(Debug)]
pub struct RecvComm {
    pump: Pump,
    /// Number of the next receive.
    next: u32,
    credits: Credits,
    lanes: Vec<RecvLane>,
    pool: RequestPool,
    slots: [Slot; SLOTS],
    /// Bytes advertised for each member, where there are several.
    limits: Box<[[u32; MEMBERS]; SLOTS]>,
    flush: Vec<FlushQp>,
    flush_wrs: FlushWrs,
    flushes: Flushes,
    copied: u64,
    spare: Spare,
    owner: u64,
    fifo_addr: u64,
    fifo_rkeys: Vec<u32>,
    depth: u32,
    reroute: Option<Box<Reroute>>,
    profile: Option<Box<Profile>>,
    board: Board,
    watchdog: Watchdog,
    peer: Peer,
    failure: Option<Fault>,
    /// Why the last [`Self::try_irecv`] could not post.
    post_errno: i32,
    // Dropped after the queue pairs: until then a peer may write to landing places.
    copies: Option<Box<Copies>>,
    // Dropped after the queue pairs, and the memory after its registrations: its address may be mapped again at once,
    // and must not be found registered then.
    local: Vec<Arc<Registered>>,
    shadow: CreditFifo,
    records: SizeRecords,
}

/// Scratch for posting flushes.
struct FlushWrs(SendChain);

impl std::fmt::Debug for FlushWrs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlushWrs").finish_non_exhaustive()
    }
}

impl RecvComm {
    /// Where the pump is: first, so that a request's owner leads to it whatever its kind.
    pub const PUMP_OFFSET: usize = std::mem::offset_of!(Self, pump);

    /// A receiving end over a connected route whose lanes have their receives posted and whose completion
    /// queues are `cqs`, in rail order.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        gate: Gate,
        cqs: Vec<Arc<CompletionQueue>>,
        shadow: CreditFifo,
        records: SizeRecords,
        route: Route,
        peer: Peer,
    ) -> Result<Self, Error> {
        let pump = Pump::new(gate, cqs);
        let credits = Credits::new(&route, &shadow);
        let lanes_count = route.lanes.len();
        let lanes = route.lanes.into_iter().enumerate();
        let lanes =
            lanes.map(|(index, lane)| RecvLane::new(index, lane, route.sizes.batch)).collect();
        let mut comm = Self {
            pool: {
                let pool = RequestPool::new(REQUESTS, pump.rails())?;
                let counted = route.flush.iter().any(|flush| !flush.has_usual());
                let counted = counted || route.flushes.asks_driver();
                let pool = if counted { pool.without_flushes() } else { pool };
                // The usual case writes short entries over a lane that does not change; without the slots' own requests
                // it does not happen.
                let usual = shadow.is_short() && route.failover.is_none();
                if usual { pool } else { pool.without_own() }
            },
            pump,
            next: 0,
            credits,
            lanes,
            slots: [IDLE; SLOTS],
            limits: Box::new([[0; MEMBERS]; SLOTS]),
            flush: route.flush,
            flush_wrs: FlushWrs(SendChain::new(1)),
            flushes: route.flushes,
            copied: 0,
            spare: route.spare,
            owner: route.owner,
            fifo_addr: route.fifo_addr,
            fifo_rkeys: route.fifo_rkeys,
            depth: route.sizes.recv,
            reroute: route.failover.map(|shared| Box::new(Reroute::new(shared, lanes_count))),
            profile: route.profile,
            watchdog: Watchdog::default(),
            board: peer.board.clone(),
            peer,
            failure: None,
            post_errno: 0,
            copies: None,
            local: route.local,
            shadow,
            records,
        };
        comm.direct();
        Ok(comm)
    }

    /// Sees to it that receives of which a profiler is to know come the general way.
    fn direct(&mut self) {
        // Otherwise they all do.
        let usual = self.shadow.is_short() && self.reroute.is_none();
        if let Some(profile) = self.profile.as_mut().filter(|_| usual) {
            profile.direct(&self.pool);
        }
    }

    /// Tells a profiler of a receive, as of the write that advertises it: which lanes the answer will use, the sender
    /// alone knows. Whether anybody listens.
    fn tell(&mut self, index: usize, parents: &[Parent]) -> bool {
        let Some(profile) = self.profile.as_mut().filter(|p| p.asks(index)) else { return false };
        let lane = &self.lanes[self.credits.lane(index)].lane;
        let id = self.credits.id(index).0;
        let mut answered = false;
        for (parent, limit) in parents.iter().zip(&self.limits[index]) {
            answered |= profile.start((index, 0), lane, *parent, (id, WR_RDMA_WRITE, *limit));
        }
        answered
    }

    /// Tells the requests whom they belong to.
    pub fn set_owner(&mut self, owner: usize) {
        self.pool.set_owner(owner);
    }

    /// The other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Advertises the usual receive: one member with a memory handle, nothing in the way. Cannot fail by itself:
    /// whatever needs a decision or an error is left to [`Self::irecv`], from an unchanged state.
    ///
    /// `hand_out` gets the request. All of that happens before posting, so that little is kept across the call; a
    /// failed post ends the connection, which makes the state behind it irrelevant.
    #[inline(always)]
    pub fn try_irecv(
        &mut self,
        addr: u64,
        len: u32,
        tag: u32,
        region: &Region,
        optional: bool,
        hand_out: impl FnOnce(&Request),
    ) -> Start {
        let index = self.next as usize % SLOTS;
        let slot = &mut self.slots[index];
        if !self.pump.gate().is_open() || slot.is_waiting() {
            return Start::General;
        }
        let request = self.pool.own(index);
        if !region.contains(addr, len.into())
            || request.state() != State::FREE
            || self.credits.is_blocked(index)
        {
            return Start::General;
        }
        let lane = self.lanes.get(self.credits.lane(index));
        let Some(lane) = lane else { return Start::General };
        let sequence = self.next.wrapping_add(1);
        let rkeys = region.rkeys();
        self.shadow.fill_one(index, addr, len, tag, [rkeys[0], rkeys[1]], sequence);
        self.pool.take_own(request);
        if optional {
            request.set_size(0, len);
            request.complete();
        }
        hand_out(request);
        slot.await_one(sequence, len);
        let counters = self.board.counters();
        counters.add(board::POSTED, 1);
        // Late, so that little is kept for it.
        if index == 0 && is_sampled(self.next) {
            counters.begin_receive();
        }
        self.next = sequence;
        match self.credits.post(index, &lane.lane) {
            Ok(()) => Start::Started,
            Err(errno) => {
                self.post_errno = errno;
                Start::Failed
            }
        }
    }

    /// Advertises a receive of `members`, 1 to [`MEMBERS`]. `None`: as many as can be in flight are; call
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
        if self.reroute.is_some() {
            self.bring_home(index);
        }
        if !self.can_advertise(index) {
            // What is in the way may have completed without anybody asking.
            self.poll()?;
            if !self.can_advertise(index) {
                return Ok(None);
            }
        }
        let count = members.len();
        let mut limit = 0;
        let mut parents = [Parent::default(); MEMBERS];
        for (member, posted) in members.enumerate() {
            parents[member % MEMBERS] = posted.parent;
            let (addr, rkeys) = match posted.region {
                Some(region) if region.contains(posted.addr, posted.len.into()) => {
                    (posted.addr, *region.rkeys())
                }
                _ if posted.len == 0 => (posted.addr, [0; MAX_RAILS]),
                _ => match self.land(index, member, &posted)? {
                    Some(place) => place,
                    None => return Ok(None),
                },
            };
            limit = posted.len;
            self.limits[index][member % MEMBERS] = posted.len;
            self.shadow.fill(
                index,
                member,
                &Credit {
                    addr,
                    len: posted.len,
                    tag: posted.tag,
                    rkeys,
                    members: count as u32,
                    sequence,
                },
            );
        }
        let told = self.tell(index, &parents[..count]);
        if let Err(errno) = self.post_credit(index, count) {
            return Err(self.post_failed("ibv_post_send", errno));
        }
        if is_sampled(self.next) {
            self.board.counters().begin_receive();
        }
        self.next = sequence;
        self.board.add(board::POSTED, 1);
        self.board.add(board::MORE, (count as u64).saturating_sub(1));
        if self.reroute.is_some() {
            // The credit may go another way than it did at first.
            let rail = |lane: usize| self.lanes[lane % self.lanes.len()].lane.rail % MAX_RAILS;
            self.board.add(board::GENERAL.start + rail(index), 1);
            self.board.add(board::POSTS.start + rail(self.credits.lane(index)), 1);
        }
        let copied = self.copies.as_ref().is_some_and(|c| c.holds(index));
        // Cannot fail: a free request was seen above and nothing took it.
        let request =
            if copied { self.pool.take_watched(count as u8) } else { self.pool.take(count as u8) };
        let Some(request) = request else { return Ok(None) };
        let taken = request.index();
        let slot = &mut self.slots[index];
        slot.request = taken;
        if count > 1 || copied || told || self.reroute.is_some() {
            slot.await_unusual(sequence, count as u8, limit);
        } else {
            slot.await_one(sequence, limit);
        }
        // Copied data are not in the caller's memory before they are copied, whoever looks; and who has nothing to test
        // would not notice that a credit got lost with its rail.
        if optional && count == 1 && !copied && self.reroute.is_none() {
            request.set_size(0, limit);
            request.complete();
            slot.request = NO_REQUEST;
        }
        self.direct();
        Ok(self.pool.get(taken))
    }

    /// Finds a landing place for a member that is copied to where it belongs: what to advertise. `None`: there is no
    /// room now.
    #[cold]
    fn land(
        &mut self,
        index: usize,
        member: usize,
        posted: &Posted<'_>,
    ) -> Result<Option<(u64, [u32; MAX_RAILS])>, Fault> {
        if self.copies.is_none() {
            self.copies = self.spare.take();
        }
        let bounced = posted.region.and_then(|r| r.bounced(posted.addr, posted.len.into()));
        let (Some(copies), Some(bounced)) = (&mut self.copies, bounced) else {
            if let Some(copies) = &mut self.copies {
                copies.cancel(index);
            }
            return Err(out_of_region(posted));
        };
        if !bounced.belongs_to(self.owner) {
            copies.cancel(index);
            return Err(super::comm::foreign_handle("irecv"));
        }
        let place = copies.begin(index, member, Arc::clone(&bounced), posted.addr, posted.len);
        if place.is_none() {
            copies.cancel(index);
            // Room comes back with receives that are in flight. Without any, asking again would not help.
            if bounced.is_empty() {
                return Err(Box::new(Error::argument(format!(
                    "irecv whose members overlap in a buffer that is reached through copies ({} bytes at {:#x})",
                    posted.len, posted.addr
                ))));
            }
            self.poll()?;
        }
        Ok(place)
    }

    /// Whether slot `index` is free, with a credit and a request to be had.
    fn can_advertise(&self, index: usize) -> bool {
        let waiting = self.slots[index].is_waiting() || self.credits.is_blocked(index);
        !waiting && self.pool.has_free() && !self.is_stopped(self.credits.lane(index))
    }

    /// Writes the entries of slot `index` into the sender's FIFO.
    fn post_credit(&mut self, index: usize, members: usize) -> Result<(), i32> {
        let number = self.credits.lane(index);
        if members > 1 {
            self.shape_credit(index, members);
        }
        let posted = self.credits.post(index, &self.lanes[number].lane);
        if members > 1 {
            self.shape_credit(index, 1);
        }
        if let (Ok(()), Some(reroute)) = (posted, &mut self.reroute) {
            reroute.credited(number);
        }
        // Of a lane that was stopped meanwhile all credits go another way.
        if self.is_stopped(number) { Ok(()) } else { posted }
    }

    /// Makes the work request of slot `index` one for `members` members.
    fn shape_credit(&mut self, index: usize, members: usize) {
        let lane = &self.lanes[self.credits.lane(index)].lane;
        let (addr, rkeys) = (self.fifo_addr, &self.fifo_rkeys);
        self.credits.shape(index, members, lane, &self.local, addr, rkeys, &self.shadow);
    }

    /// Starts the usual flush: one rail, nothing in the way. Whatever needs a decision or an error is left to
    /// [`Self::iflush`], from an unchanged state. `hand_out` gets the request.
    #[inline(always)]
    pub fn try_iflush(
        &mut self,
        addr: u64,
        region: &Region,
        hand_out: impl FnOnce(&Request),
    ) -> Start {
        let [flush] = &mut self.flush[..] else { return Start::General };
        // First: a forked child has no counters.
        if !self.pump.gate().is_open() {
            return Start::General;
        }
        let counters = self.board.counters();
        let number = counters.get(board::FLUSHES) as usize % SLOTS;
        let request = self.pool.own_flush(number);
        if !region.holds(addr) || request.state() != State::FREE {
            return Start::General;
        }
        self.pool.take_own(request);
        hand_out(request);
        counters.add(board::FLUSHES, 1);
        match flush
            .post_usual(number, Remote { addr, rkey: region.rkeys()[flush.lane.rail % MAX_RAILS] })
        {
            Ok(()) => Start::Started,
            Err(errno) => {
                self.post_errno = errno;
                Start::Failed
            }
        }
    }

    /// Starts a flush of what was received at `addr`, one byte inside `region`, on every rail that carried data; or lets the
    /// CUDA driver do it, if that was asked for. `None`: nothing to wait for.
    ///
    /// # Errors
    /// The connection failed, the address is not inside the region, or more flushes are in flight than receives can be.
    pub fn iflush(&mut self, addr: u64, region: &Region) -> Result<Option<&Request>, Fault> {
        if !self.pump.gate().is_open() {
            self.local_attention()?;
        }
        if region.is_bounced() {
            // The copy put the data where the host and, over the bus, everybody sees them.
            self.skip_flush();
            return Ok(None);
        }
        if !region.contains(addr, 1) {
            return Err(Box::new(Error::argument(format!(
                "iflush at {addr:#x} is outside its memory handle"
            ))));
        }
        if region.kind() != RegionKind::Host && self.flushes.by_driver(addr, &self.peer) {
            self.board.add(board::DRIVER_FLUSHES, 1);
            return Ok(None);
        }
        let carried = |rail: usize| {
            let used = self.lanes.iter().any(|l| l.lane.rail == rail && l.is_used());
            used && !self.is_rail_stopped(rail)
        };
        let mut used = 0_u32;
        for flush in self.flush.iter().filter(|f| carried(f.lane.rail)) {
            used |= 1 << flush.lane.rail;
        }
        // Before anything arrived nobody knows which rails will matter.
        if used == 0 {
            let left = self.flush.iter().map(|f| f.lane.rail).filter(|r| !self.is_rail_stopped(*r));
            used = left.fold(0, |used, rail| used | 1 << rail);
        }
        let rails = self.flush.iter().filter(|f| used >> f.lane.rail & 1 != 0).count();
        if rails == 0 {
            self.skip_flush();
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
        let flushes = self.flush.iter_mut().enumerate();
        for (number, flush) in flushes.filter(|(_, f)| used >> f.lane.rail & 1 != 0) {
            let id = WrId::new(Kind::Flush, number, index.into(), flush.lane.position(0));
            let remote = Remote { addr, rkey: region.rkeys()[flush.lane.rail % MAX_RAILS] };
            self.flush_wrs.0.read(0, id.0, flush.scratch(), remote, Flags::SIGNALED);
            if let Err(errno) = flush.lane.post(&mut self.flush_wrs.0, 1) {
                return Err(self.post_failed("ibv_post_send (flush)", errno));
            }
        }
        self.flushes.read(rails);
        self.board.add(board::FLUSHES, 1);
        Ok(self.pool.get(index))
    }

    /// The queue pairs of a lane and their addresses.
    fn way(&self, number: usize) -> String {
        match &self.reroute {
            Some(reroute) => reroute.shared.text(number),
            None => self.peer.way(number),
        }
    }

    /// Counts a flush call that had nothing to do.
    pub fn skip_flush(&mut self) {
        // A forked child may come here, and has no board.
        if self.pump.gate().state() != GateState::Forked {
            self.board.add(board::SKIPPED_FLUSHES, 1);
        }
    }

    /// Takes note of a completion of the last poll if it is the usual one, of a one-member receive that came in
    /// one part. `false`: [`Self::completions`] must look at it and at those after it.
    ///
    /// `THOROUGH`: the last receive of a batch is taken note of too, and the next batch posted; and so are answers with
    /// their size beside them, and one whose time is being taken.
    #[inline(always)]
    pub fn settle<const THOROUGH: bool>(&mut self, place: At) -> bool {
        let wc = self.pump.wc.at(place);
        let id = WrId(wc.id());
        // A success is 0. One test for both.
        if id.unlike(Kind::Receive) | wc.status() != 0 {
            if !wc.is_success() {
                return false;
            }
            if id.is(Kind::UsualFlush) {
                self.board.add(board::FLUSHED, 1);
                self.pool.own_flush(id.slot()).complete();
                return true;
            }
            if id.is(Kind::Progress) {
                self.credits.complete(id.slot());
                return true;
            }
            return false;
        }
        let (imm, mut bytes) = (wc.imm(), wc.byte_len());
        // As for others; the sequence is in the lowest bits. The test for slot 0 uses what this leaves behind.
        let index = plain((imm as usize).wrapping_sub(1)) % SLOTS;
        let counters = self.board.counters();
        if !THOROUGH && index == 0 && counters.is_timed() {
            return false;
        }
        let slot = &mut self.slots[index];
        let Some(lane) = self.lanes.get_mut(id.lane()) else { return false };
        if slot.usual != imm {
            // The same answer with its size beside it, where data and notice are separate.
            if !THOROUGH || !Imm(imm).is_with_record(slot.usual) {
                return false;
            }
            bytes = self.records.read_one(index);
        }
        if bytes > slot.limit || (!THOROUGH && lane.is_batch_end()) {
            return false;
        }
        slot.usual = NOTHING;
        let own = self.pool.own(index);
        // Several rails never come this way.
        counters.add(board::COMPLETED, 1);
        counters.add(board::BYTES.start, bytes.into());
        if own.is_pending() {
            own.set_size(0, bytes);
            if THOROUGH && index == 0 && counters.is_timed() {
                counters.arrive(true);
                own.complete_timed();
            } else {
                own.complete();
            }
        } else if let Some(request) = self.pool.get(slot.request) {
            if THOROUGH && index == 0 {
                counters.arrive(false);
            }
            slot.request = NO_REQUEST;
            request.set_size(0, bytes);
            request.complete();
        }
        if !THOROUGH {
            lane.consume_early();
            return true;
        }
        if let Err(errno) = lane.consume(&self.board) {
            self.late_failure("ibv_post_recv", errno);
        }
        true
    }

    /// A flush read completed.
    fn flushed(&mut self, id: WrId) {
        let flush = self.flush.get_mut(id.lane());
        if let (Some(flush), Some(request)) = (flush, self.pool.get(id.slot() as u16)) {
            flush.lane.complete(id.position());
            request.complete_part();
            self.board.add(board::FLUSHED, (!request.is_pending()).into());
        }
    }

    /// A failure where nothing can be returned: the next call reports it.
    #[cold]
    fn late_failure(&mut self, verb: &'static str, errno: i32) {
        let error = self.post_failed(verb, errno);
        tracing::warn!("{error}");
    }

    /// A test tells that a request is complete, which an earlier one found.
    #[inline(always)]
    pub fn pick_up(&self) {
        self.board.counters().pick_up();
    }

    /// Takes a complete request of this communicator back.
    #[inline(always)]
    pub fn put(&mut self, request: &Request) {
        self.pool.put(request);
    }

    /// A part of a message arrived.
    fn arrived(&mut self, imm: Imm, bytes: u32) -> Result<(), Fault> {
        let index = imm.sequence().wrapping_sub(1) as usize % SLOTS;
        let slot = &mut self.slots[index];
        if !slot.is_answered_by(imm) {
            return Err(self.unexpected(imm));
        }
        if slot.arrived == 0 {
            slot.shape = imm.shape();
        } else if slot.shape != imm.shape() {
            return Err(self.unexpected(imm));
        }
        slot.bytes = slot.bytes.saturating_add(bytes);
        slot.arrived += 1;
        if u32::from(slot.arrived) == imm.parts() {
            let slot = std::mem::replace(slot, IDLE);
            if !imm.has_record() && slot.members == 1 {
                if slot.bytes > slot.limit {
                    return Err(self.unexpected(imm));
                }
                let mut sizes = [0; MEMBERS];
                sizes[0] = slot.bytes;
                self.all_arrived(index, slot, &sizes);
            } else {
                self.arrived_with_record(index, slot, imm)?;
            }
        }
        Ok(())
    }

    /// A receive of a lane was consumed.
    fn consumed(&mut self, lane: usize) -> Result<(), Fault> {
        let board = &self.board;
        let posted = self.lanes.get_mut(lane).map_or(Ok(()), |lane| lane.consume(board));
        match posted {
            Err(errno) if !self.is_stopped(lane) => Err(self.post_failed("ibv_post_recv", errno)),
            _ => Ok(()),
        }
    }

    /// Completes a receive whose sizes the sender wrote beside the data.
    fn arrived_with_record(&mut self, index: usize, slot: Slot, imm: Imm) -> Result<(), Fault> {
        if !imm.has_record() {
            return Err(self.unexpected(imm));
        }
        let members = usize::from(slot.members);
        let sizes = self.records.read(index, members);
        let single = [slot.limit; MEMBERS];
        let limits = if members == 1 { &single } else { &self.limits[index] };
        if sizes[..members].iter().zip(limits).any(|(size, limit)| size > limit) {
            return Err(self.unexpected(imm));
        }
        self.all_arrived(index, slot, &sizes);
        Ok(())
    }

    /// All parts of a receive are here: it is done, unless its data must be copied first.
    fn all_arrived(&mut self, index: usize, slot: Slot, sizes: &[u32; MEMBERS]) {
        if let Some(profile) = &mut self.profile {
            profile.stop(index, 0);
        }
        let copies = self.copies.as_mut().filter(|c| c.holds(index));
        let copied = copies.is_some();
        let bytes = sizes[..usize::from(slot.members)].iter().map(|size| u64::from(*size)).sum();
        self.board.add(board::BYTES.start, bytes);
        if index == 0 {
            self.board.counters().arrive(false);
        }
        if !copied {
            self.board.add(board::COMPLETED, 1);
        }
        if let Some(copies) = copies {
            self.copied += 1;
            self.board.add(board::COPIED_BYTES, copies.arrived(index, sizes));
            self.slots[index] = Slot { copying: true, ..slot };
        }
        if let Some(request) = self.waiting(index, slot) {
            for (member, size) in sizes[..usize::from(slot.members)].iter().enumerate() {
                request.set_size(member, *size);
            }
            if !copied {
                request.complete();
            }
        }
    }

    /// The request that waits for the receive of slot `index`.
    fn waiting(&self, index: usize, slot: Slot) -> Option<&Request> {
        let own = self.pool.own(index);
        if own.is_pending() { Some(own) } else { self.pool.get(slot.request) }
    }

    #[cold]
    fn unexpected(&mut self, imm: Imm) -> Fault {
        self.fail(Error::remote(format!(
            "{}: a message arrived that answers no advertised receive (immediate {:#x}, next receive {})",
            self.peer, imm.0, self.next
        )))
    }

    /// As [`Self::attention`] for work that the peer has no part in: it may be gone.
    fn local_attention(&mut self) -> Result<(), Fault> {
        match (&self.failure, self.pump.gate().state()) {
            (Some(failure), _) => Err(Box::new(failure.repeated())),
            (None, GateState::PeerClosed | GateState::PeerGone | GateState::PeerFailed) => Ok(()),
            (None, _) => self.attention(true),
        }
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

impl Ending for RecvComm {
    #[inline(always)]
    fn shared(&mut self) -> Shared<'_> {
        Shared {
            pump: &mut self.pump,
            pool: &self.pool,
            watchdog: &mut self.watchdog,
            peer: &self.peer,
            failure: &mut self.failure,
            profile: &mut self.profile,
        }
    }

    fn work(&self, id: WrId) -> Work {
        let slot = id.slot() % SLOTS;
        let flush = self.flush.get(id.lane());
        let loopback = || {
            let qp = flush.map_or(0, |flush| flush.lane.qp().number());
            format!("{} QP {qp} to itself", self.peer.local)
        };
        match id.kind() {
            Some(Kind::UsualFlush) => Work {
                what: "flush".into(),
                local: flush.map(FlushQp::scratch),
                remote: flush.map(|flush| flush.source(slot)),
                way: loopback(),
                number: None,
            },
            Some(Kind::Flush) => Work { what: "flush".into(), way: loopback(), ..Work::default() },
            Some(Kind::Receive) => Work {
                what: "a receive that waits for any message".into(),
                way: self.way(id.lane()),
                ..Work::default()
            },
            _ => {
                let (local, remote) = self.credits.entry(slot);
                Work {
                    what: format!("credit in slot {slot}"),
                    number: Some(last_in(slot, self.next)),
                    local: Some(local),
                    remote: Some(remote),
                    way: self.way(id.lane()),
                }
            }
        }
    }

    fn completions(&mut self, first: usize, found: i32) -> Result<(), Fault> {
        let Ok(found) = usize::try_from(found) else {
            return Err(self.fail(Error::system(format!("{}: ibv_poll_cq failed", self.peer))));
        };
        for index in first..found {
            if self.note_rerouted(index)? {
                continue;
            }
            let wc = self.pump.wc.get(index);
            let id = WrId(wc.id());
            if !wc.is_success() {
                return Err(self.failed(index, found));
            }
            match id.kind() {
                Some(Kind::Receive) => {
                    let (imm, bytes) = (Imm(wc.imm()), wc.byte_len());
                    self.arrived(imm, bytes)?;
                    self.consumed(id.place())?;
                }
                Some(Kind::Flush) => self.flushed(id),
                Some(Kind::Progress | Kind::Credit) => self.credits.complete(id.slot()),
                Some(Kind::UsualFlush) => {
                    self.pool.own_flush(id.slot()).complete();
                    self.board.add(board::FLUSHED, 1);
                }
                Some(Kind::Part | Kind::Single) => {}
                None => {}
            }
        }
        Ok(())
    }

    fn rerouted(&mut self) {
        if let Some(reroute) = &mut self.reroute {
            reroute.look();
        }
    }

    fn go_on(&mut self) -> Result<bool, Fault> {
        let rerouted = self.reroute()?;
        let Some(copies) = &mut self.copies else { return Ok(rerouted) };
        match copies.step(self.next as usize) {
            Step::Idle => Ok(rerouted),
            Step::More => Ok(true),
            Step::Done(index) => {
                let slot = std::mem::replace(&mut self.slots[index], IDLE);
                if let Some(request) = self.pool.get(slot.request) {
                    request.complete();
                }
                self.board.add(board::COMPLETED, 1);
                Ok(true)
            }
            Step::Gone(index) => {
                let error = Error::usage(format!(
                    "{}: the memory handle of a receive in flight was deregistered (slot {index})",
                    self.peer
                ));
                Err(self.fail(error))
            }
        }
    }
}

impl Drop for RecvComm {
    fn drop(&mut self) {
        if let Some(reroute) = &self.reroute {
            reroute.shared.end();
            let back = reroute.shared.back();
            if back > 0 {
                tracing::info!("{}: rails came back {back} times", self.peer);
            }
        }
        if let Some(summary) = self.flushes.summary(&self.board) {
            tracing::debug!("{}: {summary}", self.peer);
        }
        if self.copied > 0 {
            tracing::info!(
                "{}: {} receives of {} bytes were copied to where they belong",
                self.peer,
                self.copied,
                self.board.get(board::COPIED_BYTES)
            );
        }
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
