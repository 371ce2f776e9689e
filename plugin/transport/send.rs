//! The sending end of a connection.
//!
//! `done` of a send means SenderCompleted: the sender's completion queue says that the data left and was acknowledged,
//! so the buffer may be reused. It says nothing about when the receiver sees them.

mod group;
mod reroute;

use self::group::{CHAIN, Forming, Group};
use self::reroute::Reroute;
use super::comm::{Ending, Peer, Shared, Watchdog};
use super::connection::Sizes;
use super::failover::Failover;
use super::failure::Work;
use super::fifo::{CreditFifo, Front, MEMBERS, SLOTS, SizeRecords};
use super::lane::{Kind, Lane, WrId};
use super::profile::Profile;
use super::pump::Pump;
use super::request::{Request, RequestPool, Start, State};
use super::slot::last_in;
use super::stripe::{Imm, Stripes};
use crate::error::{Error, Fault};
use crate::memory::bounce::{CHUNKS, Chunks};
use crate::memory::region::MAX_RAILS;
use crate::memory::registry::Registered;
use crate::memory::status::layout::board;
use crate::memory::status::{Board, is_sampled};
use crate::memory::{Gate, Region};
use crate::profiler::Parent;
use crate::verbs::CompletionQueue;
use crate::verbs::cq::At;
use crate::verbs::wr::{Flags, Local, Operation, Prepared, Remote, SendChain};
use std::sync::Arc;

/// Sends in flight beside the usual ones: 32 receives of 8 members.
const REQUESTS: u16 = (SLOTS * MEMBERS) as u16;
/// Bytes of inline payload a sender can use: a size record of eight members.
const INLINE: u32 = 32;

/// Slots of a lane's send queue: first those set aside for the usual answer to each receive in flight, which need no
/// counting, then those for groups, which are posted in portions as slots come free. Two are set aside for each receive,
/// or one where data and notice never are apart, or none: then every answer is counted. A device is asked for the first
/// and gets less where it refuses.
const DEPTHS: [(u32, u32); 5] = [(2, 64), (2, 32), (2, 16), (1, 16), (0, 16)];

/// Sizes of the queues of a sending end, the best first.
pub fn sizes() -> Vec<Sizes> {
    let sizes = |(set_aside, counted)| Sizes {
        send: set_aside * SLOTS as u32 + counted,
        counted,
        recv: 0,
        batch: 1,
        extra: 0,
        inline: INLINE,
    };
    DEPTHS.map(sizes).into()
}

/// What the data path needs to know about the receiving end and the way there.
#[derive(Debug)]
pub struct Route {
    /// Queue pairs in lane order.
    pub lanes: Vec<Lane>,
    /// Local keys of the FIFO mapping in rail order.
    pub local: Vec<Arc<Registered>>,
    /// Address of the receiver's size records.
    pub record_addr: u64,
    /// Keys of the size records in the receiver's rail order.
    pub record_rkeys: Vec<u32>,
    /// How messages are cut over the lanes.
    pub stripes: Stripes,
    /// Largest payload of one work request, over all rails.
    pub max_message: u32,
    /// Bytes that may be posted inline on every lane.
    pub max_inline: u32,
    /// Slots of each lane that are set aside for each receive in flight.
    pub set_aside: u32,
    /// The communicator's number, by which handles of copied buffers know it.
    pub owner: u64,
    /// What NCCL's profiler is told, if there may be one.
    pub profile: Option<Box<Profile>>,
    /// Size above which data and immediate are separate work requests, where adaptive routing may reorder packets.
    pub adaptive_threshold: Option<u32>,
    /// What is known of lanes, where the others go on when one fails.
    pub failover: Option<Arc<Failover>>,
}

/// The sending end of a connection. Driven by one thread at a time.
#[repr(C)]
#[derive(Debug)]
pub struct SendComm {
    pump: Pump,
    fifo: CreditFifo,
    /// Number of the receive at the head of the FIFO.
    next: u32,
    /// Lane on which the next group begins.
    lane: usize,
    /// One-member messages up to this size take one work request and go the short way; 0 while a larger group is under
    /// way, so that order is kept.
    simple_limit: u32,
    singles: Singles,
    /// Where data and notice are separate above a size: the pairs, and the largest message that one pair can carry.
    pairs: Option<(Box<Pairs>, u32)>,
    /// The lane of the usual answer to each receive.
    lane_of: [u8; SLOTS],
    pool: RequestPool,
    route: Route,
    groups: [Group; SLOTS],
    chain: Chain,
    forming: Box<Forming>,
    records: SizeRecords,
    reroute: Option<Box<Reroute>>,
    /// What bounced buffers are sent from, and a bit for each chunk that a device reads.
    chunks: Option<Arc<Chunks>>,
    chunks_used: u32,
    watchdog: Watchdog,
    profile: Option<Box<Profile>>,
    board: Board,
    peer: Peer,
    failure: Option<Fault>,
    /// Why the last [`Self::try_isend`] could not post.
    post_errno: i32,
}

/// A work request for the usual answer to each receive.
struct Singles(Prepared<SLOTS>);

/// For each receive, the data at an even place and the notice with its size record behind it.
struct Pairs(Prepared<{ 2 * SLOTS }>);

impl std::fmt::Debug for Pairs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pairs").finish_non_exhaustive()
    }
}

/// Scratch for posting several.
struct Chain(SendChain);

impl std::fmt::Debug for Singles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Singles").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chain").finish_non_exhaustive()
    }
}

impl SendComm {
    /// Where the pump is: first, so that a request's owner leads to it whatever its kind.
    pub const PUMP_OFFSET: usize = std::mem::offset_of!(Self, pump);

    /// A sending end over a connected route whose completion queues are `cqs`, in rail order.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        gate: Gate,
        cqs: Vec<Arc<CompletionQueue>>,
        fifo: CreditFifo,
        records: SizeRecords,
        mut route: Route,
        peer: Peer,
    ) -> Result<Self, Error> {
        let profile = route.profile.take();
        let pump = Pump::new(gate, cqs);
        let lane_of = std::array::from_fn(|slot| (slot % route.lanes.len()) as u8);
        let reroute = route.failover.clone();
        let reroute = reroute.map(|shared| Box::new(Reroute::new(shared, route.lanes.len())));
        let mut comm = Self {
            pool: RequestPool::new(REQUESTS, pump.rails())?,
            pump,
            fifo,
            next: 0,
            lane: 0,
            simple_limit: 0,
            singles: Singles(Prepared::new(Operation::WriteImm, |slot| {
                (WrId::new(Kind::Single, 0, slot, 0).0, Flags::SIGNALED)
            })),
            pairs: None,
            lane_of,
            route,
            groups: [Group::default(); SLOTS],
            chain: Chain(SendChain::new(CHAIN)),
            forming: Box::default(),
            reroute,
            records,
            chunks: None,
            chunks_used: 0,
            watchdog: Watchdog::default(),
            profile,
            board: peer.board.clone(),
            peer,
            failure: None,
            post_errno: 0,
        };
        if comm.profile.is_some() {
            Profile::direct_one(&comm.pool);
        }
        comm.simple_limit = comm.usual_limit();
        if comm.route.adaptive_threshold.is_some() && comm.route.set_aside >= 2 {
            comm.pairs =
                comm.may_be_usual().then(|| (Box::new(comm.make_pairs()), comm.route.max_message));
        }
        Ok(comm)
    }

    /// The pairs: everything but the data, its destination and the immediate is the same every time.
    fn make_pairs(&self) -> Pairs {
        let id = |place: usize| WrId::new(Kind::Single, 0, place / 2, 0).0;
        let mut pairs = Prepared::new(Operation::Write, |place| (id(place), Flags::SILENT));
        for slot in 0..SLOTS {
            let (data, notice) = (2 * slot, 2 * slot + 1);
            let lane = &self.route.lanes[usize::from(self.lane_of[slot])];
            let local = Local {
                addr: self.records.addr(slot),
                len: size_of::<u32>() as u32,
                lkey: self.route.local[lane.rail].lkey(),
            };
            let remote = Remote {
                addr: self.route.record_addr.wrapping_add(SizeRecords::offset(slot)),
                rkey: self.route.record_rkeys[lane.remote_rail],
            };
            let inline = local.len <= self.route.max_inline;
            let flags = if inline { Flags::SIGNALED.inline() } else { Flags::SIGNALED };
            pairs.set_operation(notice, Operation::WriteImm);
            pairs.prepare(notice, local, remote, flags);
            pairs.link(data, notice);
        }
        Pairs(pairs)
    }

    /// Whether the connection is one for usual messages.
    fn may_be_usual(&self) -> bool {
        self.route.stripes.width() == 1
            && self.fifo.is_short()
            && self.route.lanes.len() <= SLOTS
            && self.route.set_aside > 0
    }

    /// The largest message that takes one work request; 0 while a profiler wants to know of each, or somebody for how
    /// long the first receive is waited for.
    fn usual_limit(&self) -> u32 {
        let told = self.profile.as_ref().is_some_and(|profile| profile.is_attentive())
            || (self.next == 0 && self.peer.first_credit.is_some());
        if self.may_be_usual() && !told {
            self.route.max_message.min(self.route.adaptive_threshold.unwrap_or(u32::MAX))
        } else {
            0
        }
    }

    /// Tells the requests whom they belong to.
    pub fn set_owner(&mut self, owner: usize) {
        self.pool.set_owner(owner);
    }

    /// The other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Starts the usual send: one member, one work request, nothing in the way. Cannot fail by itself: whatever needs
    /// a decision or an error is left to [`Self::isend`], from an unchanged state.
    ///
    /// `hand_out` gets the request. All of that happens before posting, so that little is kept across the call; a
    /// failed post ends the connection, which makes the state behind it irrelevant.
    #[inline(always)]
    pub fn try_isend(
        &mut self,
        addr: u64,
        size: usize,
        tag: u32,
        region: &Region,
        hand_out: impl FnOnce(&Request),
    ) -> Start {
        if !self.pump.gate().is_open() {
            return Start::General;
        }
        if is_sampled(self.next) {
            self.board.counters().begin();
        }
        let slot = self.next as usize % SLOTS;
        let sequence = self.next.wrapping_add(1);
        let head = match self.fifo.front(slot, sequence) {
            Front::One(head) => head,
            // Without a limit the FIFO may have long entries, of which this says nothing.
            Front::Empty if self.simple_limit != 0 && size <= i32::MAX as usize => {
                self.board.set(board::BLOCKED, self.board.get(board::POSTED).wrapping_add(1));
                return Start::WouldBlock;
            }
            Front::Empty | Front::Several => return Start::General,
        };
        let (limit, wanted) = head.len_and_tag();
        // An empty message is "less one" the largest number, and so above every limit. No limit: long entries, several
        // lanes per message, or a group under way.
        let above = size.wrapping_sub(1) >= limit.min(self.simple_limit) as usize;
        if above || tag != wanted || !region.contains(addr, size as u64) {
            return Start::General;
        }
        let size = size as u32;
        let request = self.pool.own(slot);
        let lane = self.route.lanes.get(usize::from(self.lane_of[slot]));
        let (State::FREE, Some(lane)) = (request.state(), lane) else { return Start::General };
        // Early, so that little is kept for it. A failed post ends the connection anyway.
        let counters = self.board.counters();
        counters.add(board::BYTES.start + lane.rail % MAX_RAILS, size.into());
        counters.add(board::POSTED, 1);
        self.singles.0.set(
            slot,
            Local { addr, len: size, lkey: region.lkey(lane.rail) },
            Remote { addr: head.addr(), rkey: head.rkey(lane.remote_rail) },
            Imm::new(sequence, 1, false).0,
        );
        self.pool.take_own(request);
        request.set_size(0, size);
        hand_out(request);
        self.next = sequence;
        match lane.qp().post_prepared(&mut self.singles.0, slot) {
            Ok(()) => Start::Started,
            Err(errno) => {
                self.post_errno = errno;
                Start::Failed
            }
        }
    }

    /// Starts sending `size` bytes at `addr` to the oldest advertised receive with this tag. `None`: no such receive
    /// is advertised yet, or no resource is free; call again. Events for a profiler belong to `parent`.
    ///
    /// A send larger than the receive is shortened to it, and both ends report the smaller size.
    ///
    /// # Errors
    /// The connection failed, or the range is not inside the region.
    pub fn isend(
        &mut self,
        addr: u64,
        size: u32,
        tag: u32,
        region: Option<&Region>,
        parent: Parent,
    ) -> Result<Option<&Request>, Fault> {
        if !self.pump.gate().is_open() {
            self.attention(true)?;
        }
        let slot = self.next as usize % SLOTS;
        let sequence = self.next.wrapping_add(1);
        if self.may_pair(size) {
            match self.isend_pair(addr, size, tag, region)? {
                Start::Started => return Ok(Some(self.pool.own(slot))),
                Start::WouldBlock => return Ok(None),
                Start::Failed | Start::General => {}
            }
        }
        match self.fifo.read(slot, 0, sequence) {
            Some(first) => self.isend_group(addr, size, tag, (region, parent), first),
            None => {
                if let Some(first) = self.peer.first_credit.as_ref().filter(|_| self.next == 0) {
                    first.ask();
                }
                self.board.set(board::BLOCKED, self.board.get(board::POSTED).wrapping_add(1));
                Ok(None)
            }
        }
    }

    /// Whether a message of this size may go as data and notice apart, with nothing in the way.
    fn may_pair(&self, size: u32) -> bool {
        let threshold = self.route.adaptive_threshold.unwrap_or(u32::MAX);
        self.simple_limit != 0
            && size > threshold
            && self.pairs.as_ref().is_some_and(|(_, limit)| size <= *limit)
    }

    /// Sends a one-member message as data and, behind it, a notice with the size: where packets may overtake each
    /// other, only the arrival of the notice says that the data before it are whole.
    fn isend_pair(
        &mut self,
        addr: u64,
        size: u32,
        tag: u32,
        region: Option<&Region>,
    ) -> Result<Start, Fault> {
        let slot = self.next as usize % SLOTS;
        let sequence = self.next.wrapping_add(1);
        let head = match self.fifo.front(slot, sequence) {
            Front::One(head) => head,
            Front::Empty => return Ok(Start::WouldBlock),
            Front::Several => return Ok(Start::General),
        };
        let (limit, wanted) = head.len_and_tag();
        let request = self.pool.own(slot);
        let lane = self.route.lanes.get(usize::from(self.lane_of[slot]));
        let (Some(lane), Some((pairs, _)), Some(region)) = (lane, &mut self.pairs, region) else {
            return Ok(Start::General);
        };
        let fits = size <= limit && tag == wanted && region.contains(addr, size.into());
        if !fits || request.state() != State::FREE {
            return Ok(Start::General);
        }
        self.records.fill(slot, 0, size);
        let imm = Imm::new(sequence, 1, true).0;
        pairs.0.set(
            2 * slot,
            Local { addr, len: size, lkey: region.lkey(lane.rail) },
            Remote { addr: head.addr(), rkey: head.rkey(lane.remote_rail) },
            0,
        );
        pairs.0.set_imm(2 * slot + 1, imm);
        self.pool.take_own(request);
        request.set_size(0, size);
        let rail = lane.rail % MAX_RAILS;
        self.board.add(board::POSTED, 1);
        self.board.add(board::BYTES.start + rail, size.into());
        // The usual one is counted by the receive.
        self.board.add(board::POSTS.start + rail, 1);
        self.next = sequence;
        match lane.qp().post_prepared(&mut pairs.0, 2 * slot) {
            Ok(()) => Ok(Start::Started),
            Err(errno) => Err(self.post_failed(errno)),
        }
    }

    /// Takes note of a completion of the last poll if it is the usual one, of a one-member send. `false`:
    /// [`Self::completions`] must look at it and at those after it.
    ///
    /// `THOROUGH`: also if its time is being taken.
    #[inline(always)]
    pub fn settle<const THOROUGH: bool>(&mut self, place: At) -> bool {
        let wc = self.pump.wc.at(place);
        let id = WrId(wc.id());
        // A success is 0. One test for both.
        if id.unlike(Kind::Single) | wc.status() != 0 {
            return false;
        }
        let slot = id.slot() % SLOTS;
        let counters = self.board.counters();
        if slot == 0 && counters.is_timed() {
            if !THOROUGH {
                return false;
            }
            counters.arrive(true);
            counters.add(board::COMPLETED, 1);
            self.pool.own(slot).complete_timed();
            return true;
        }
        self.pool.own(slot).complete();
        counters.add(board::COMPLETED, 1);
        true
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

    /// The failure of the last [`Self::try_isend`], which ends the connection.
    #[cold]
    pub fn try_failed(&mut self) -> Fault {
        self.post_failed(self.post_errno)
    }

    #[cold]
    fn post_failed(&mut self, errno: i32) -> Fault {
        self.fail(Error::verb("ibv_post_send", format_args!("{} (send)", self.peer), errno))
    }

    #[cold]
    fn note_shortened(&mut self, size: u32, len: u32, tag: u32) {
        self.board.add(board::SHORTENED, 1);
        tracing::debug!(
            "{}: send of {size} bytes with tag {tag} shortened to the receive's {len}",
            self.peer
        );
    }
}

impl Ending for SendComm {
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
        let receive = last_in(slot, self.next);
        let single = id.kind() == Some(Kind::Single);
        let lane = if single { self.lane_of[slot].into() } else { id.lane() };
        let way = match &self.reroute {
            Some(reroute) => reroute.shared.text(lane),
            None => self.peer.way(lane),
        };
        let number = Some(receive);
        if !single {
            let what = if id.kind() == Some(Kind::Part) { "the end of a part" } else { "a piece" };
            return Work { what: format!("{what} of a send"), number, way, ..Work::default() };
        }
        let size = self.pool.own(slot).size(0);
        let pair = size.cast_unsigned() > self.route.adaptive_threshold.unwrap_or(u32::MAX);
        let (local, remote) = match &self.pairs {
            Some((pairs, _)) if pair => pairs.0.entry(2 * slot),
            _ => self.singles.0.entry(slot),
        };
        let what = format!("send of {size} bytes for receive {receive}");
        Work { what, number, local: Some(local), remote: Some(remote), way }
    }

    fn completions(&mut self, first: usize, found: i32) -> Result<(), Fault> {
        self.note(first, found)?;
        if self.forming.cursor.is_some() {
            self.advance()?;
        }
        Ok(())
    }

    fn has_credit(&self) -> bool {
        self.next != 0 || self.fifo.read(0, 0, 1).is_some()
    }

    fn rerouted(&mut self) {
        if let Some(reroute) = &mut self.reroute {
            reroute.look();
        }
    }

    fn go_on(&mut self) -> Result<bool, Fault> {
        self.reroute()
    }
}

impl SendComm {
    /// Takes note of completions, and goes on with nothing.
    fn note(&mut self, first: usize, found: i32) -> Result<(), Fault> {
        let Ok(found) = usize::try_from(found) else {
            return Err(self.fail(Error::system(format!("{}: ibv_poll_cq failed", self.peer))));
        };
        for index in first..found {
            let wc = self.pump.wc.get(index);
            let id = WrId(wc.id());
            if self.note_rerouted(index) {
                continue;
            }
            let wc = self.pump.wc.get(index);
            if !wc.is_success() {
                return Err(self.failed(index, found));
            }
            match (id.kind(), self.route.lanes.get_mut(id.place())) {
                (Some(Kind::Single), _) => {
                    self.pool.own(id.slot()).complete();
                    self.completed(id.slot() % SLOTS);
                }
                (Some(Kind::Part), Some(lane)) => {
                    lane.complete(id.position());
                    self.chunks_used &= !id.chunk().map_or(0, |chunk| 1 << (chunk % CHUNKS));
                    if let Some(profile) = &mut self.profile {
                        profile.stop(id.slot(), id.place());
                    }
                    self.part_done(id.slot() % SLOTS);
                }
                (Some(Kind::Progress), Some(lane)) => {
                    lane.complete(id.position());
                    self.chunks_used &= !id.chunk().map_or(0, |chunk| 1 << (chunk % CHUNKS));
                }
                _ => {}
            }
        }
        if self.chunks.is_some() {
            self.board.set(board::CHUNKS, self.chunks_used.count_ones().into());
        }
        Ok(())
    }
}

impl SendComm {
    /// Counts that the answer in a slot is complete, outside of the usual path.
    fn completed(&self, slot: usize) {
        self.board.add(board::COMPLETED, 1);
        if slot == 0 {
            self.board.counters().arrive(false);
        }
    }

    /// A part of the answer in a slot has arrived; the last completes its requests.
    fn part_done(&mut self, slot: usize) {
        let group = &mut self.groups[slot];
        group.pending = group.pending.saturating_sub(1);
        if group.pending == 0 {
            let requests = &group.requests[..usize::from(group.members)];
            requests.iter().filter_map(|r| self.pool.get(*r)).for_each(Request::complete);
            self.completed(slot);
            if let Some(reroute) = &mut self.reroute {
                reroute.complete(slot);
            }
        }
    }
}

impl Drop for SendComm {
    fn drop(&mut self) {
        if let Some(reroute) = &self.reroute {
            reroute.shared.end();
            let (resent, back) = (reroute.resent, reroute.shared.back());
            if resent > 0 || back > 0 {
                let peer = &self.peer;
                tracing::info!(
                    "{peer}: {resent} parts were sent again, rails came back {back} times"
                );
            }
        }
        let copied = self.board.get(board::COPIED_BYTES);
        if copied > 0 {
            tracing::info!("{}: {copied} bytes were sent from copies", self.peer);
        }
    }
}

#[cold]
fn out_of_region(addr: u64, len: u32, region: Option<&Region>) -> Fault {
    Box::new(Error::argument(match region {
        Some(region) => {
            let (start, bytes) = region.range();
            format!(
                "isend of {len} bytes at {addr:#x} is outside its memory handle ({bytes} bytes at {start:#x})"
            )
        }
        None => format!("isend of {len} bytes at {addr:#x} without a memory handle"),
    }))
}
