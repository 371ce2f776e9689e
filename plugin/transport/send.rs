//! The sending end of a connection.
//!
//! `done` of a send means SenderCompleted: the sender's completion queue says that the data left and was acknowledged,
//! so the buffer may be reused. It says nothing about when the receiver sees them.

use super::comm::{Peer, Progress, Watchdog, completion_error};
use super::fifo::{Credit, CreditFifo, Front, MEMBERS, SLOTS, SizeRecords};
use super::lane::{Kind, Lane, WrId};
use super::pump::Pump;
use super::request::{Outcome, Request, RequestPool, Start, State};
use super::stripe::{self, Imm};
use crate::error::{Error, Fault};
use crate::memory::region::MAX_RAILS;
use crate::memory::registry::Registered;
use crate::memory::{Gate, GateState, Region};
use crate::verbs::CompletionQueue;
use crate::verbs::wr::{Flags, Local, Operation, Prepared, Remote, SendChain};
use std::sync::Arc;

/// Sends in flight beside the usual ones: 32 receives of 8 members.
const REQUESTS: u16 = (SLOTS * MEMBERS) as u16;
/// Slots of a lane's send queue: two for the usual answer to each receive in flight, which need no counting, and
/// [`COUNTED`] more. Larger groups are posted in portions as slots come free.
pub const SEND_DEPTH: u32 = 2 * SLOTS as u32 + COUNTED;
/// Slots of a lane's send queue for groups.
pub const COUNTED: u32 = 64;
/// Work requests posted with one doorbell.
const CHAIN: usize = 16;

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
    /// Lanes that one message may use.
    pub width: u32,
    /// Largest payload of one work request, over all rails.
    pub max_message: u32,
    /// Bytes that may be posted inline on every lane.
    pub max_inline: u32,
    /// Size above which data and immediate are separate work requests, where adaptive routing may reorder packets.
    pub adaptive_threshold: Option<u32>,
}

/// One message waiting to be posted.
#[derive(Clone, Copy, Debug)]
struct Member {
    request: u16,
    addr: u64,
    len: u32,
    lkeys: [u32; MAX_RAILS],
    remote: u64,
    rkeys: [u32; MAX_RAILS],
}

const NO_MEMBER: Member =
    Member { request: 0, addr: 0, len: 0, lkeys: [0; MAX_RAILS], remote: 0, rkeys: [0; MAX_RAILS] };

/// The receive at the head of the FIFO while its members are being matched and posted.
#[derive(Debug)]
struct Forming {
    /// Members of the receive; 0 when nothing is matched yet.
    members: usize,
    matched: [bool; MEMBERS],
    left: usize,
    list: [Member; MEMBERS],
    /// The next work request to make, once all members are matched.
    cursor: Option<Cursor>,
}

#[derive(Clone, Copy, Debug)]
struct Cursor {
    parts: u32,
    record: bool,
    part: u32,
    member: usize,
    /// Bytes of the member's share of this part that were made into work requests.
    offset: u32,
}

/// A posted receive group whose completions are outstanding.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    pending: u8,
    members: u8,
    requests: [u16; MEMBERS],
}

/// Counters of one sending end.
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "named for what they count")]
pub struct SendStats {
    /// Advertised receives that were answered, wrapping.
    pub receives: u32,
    pub bytes: u64,
    /// Sends that were longer than the advertised receive.
    pub shortened: u64,
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
    bytes: u64,
    route: Route,
    groups: [Group; SLOTS],
    chain: Chain,
    forming: Box<Forming>,
    records: SizeRecords,
    shortened: u64,
    watchdog: Watchdog,
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
    pub fn new(
        gate: Gate,
        cqs: Vec<Arc<CompletionQueue>>,
        fifo: CreditFifo,
        records: SizeRecords,
        route: Route,
        peer: Peer,
    ) -> Self {
        let pump = Pump::new(gate, cqs);
        let lane_of = std::array::from_fn(|slot| (slot % route.lanes.len()) as u8);
        let mut comm = Self {
            pool: RequestPool::new(REQUESTS, pump.rails()),
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
            bytes: 0,
            route,
            groups: [Group::default(); SLOTS],
            chain: Chain(SendChain::new(CHAIN)),
            forming: Box::new(Forming {
                members: 0,
                matched: [false; MEMBERS],
                left: 0,
                list: [NO_MEMBER; MEMBERS],
                cursor: None,
            }),
            records,
            shortened: 0,
            watchdog: Watchdog::default(),
            peer,
            failure: None,
            post_errno: 0,
        };
        comm.simple_limit = comm.usual_limit();
        if comm.simple_limit != 0 && comm.route.adaptive_threshold.is_some() {
            comm.pairs = Some((Box::new(comm.make_pairs()), comm.route.max_message));
        }
        comm
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

    /// The largest message that takes one work request.
    fn usual_limit(&self) -> u32 {
        let few_lanes = self.route.lanes.len() <= SLOTS;
        if self.route.width == 1 && self.fifo.is_short() && few_lanes {
            self.route.max_message.min(self.route.adaptive_threshold.unwrap_or(u32::MAX))
        } else {
            0
        }
    }

    /// Tells the requests whom they belong to.
    pub fn set_owner(&mut self, owner: usize) {
        self.pool.set_owner(owner);
    }

    /// Counters.
    pub fn stats(&self) -> SendStats {
        SendStats { receives: self.next, bytes: self.bytes, shortened: self.shortened }
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
        let slot = self.next as usize % SLOTS;
        let sequence = self.next.wrapping_add(1);
        let head = match self.fifo.front(slot, sequence) {
            Front::One(head) => head,
            // Without a limit the FIFO may have long entries, of which this says nothing.
            Front::Empty if self.simple_limit != 0 && size <= i32::MAX as usize => {
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
        self.bytes += u64::from(size);
        match lane.qp().post_prepared(&mut self.singles.0, slot) {
            Ok(()) => Start::Started,
            Err(errno) => {
                self.post_errno = errno;
                Start::Failed
            }
        }
    }

    /// Starts sending `size` bytes at `addr` to the oldest advertised receive with this tag. `None`: no such receive
    /// is advertised yet, or no resource is free; call again.
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
            Some(first) => self.isend_group(addr, size, tag, region, first),
            None => Ok(None),
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
        self.next = sequence;
        self.bytes += u64::from(size);
        match lane.qp().post_prepared(&mut pairs.0, 2 * slot) {
            Ok(()) => Ok(Start::Started),
            Err(errno) => Err(self.post_failed(errno)),
        }
    }

    /// The general case: several members, several lanes, messages above the device's limit.
    #[cold]
    #[inline(never)]
    fn isend_group(
        &mut self,
        addr: u64,
        size: u32,
        tag: u32,
        region: Option<&Region>,
        first: Credit,
    ) -> Result<Option<&Request>, Fault> {
        if self.forming.cursor.is_some() {
            // All members of this receive are matched; the rest of their work requests waits for room, which comes
            // with completions.
            self.poll()?;
            self.advance()?;
            return Ok(None);
        }
        let slot = self.next as usize % SLOTS;
        let sequence = self.next.wrapping_add(1);
        if self.groups[slot].pending != 0 {
            self.poll()?;
            return Ok(None);
        }
        let members = first.members as usize;
        if members == 0 || members > MEMBERS {
            return Err(self.fail(Error::remote(format!(
                "{}: a receive with {members} members was advertised; the limit is {MEMBERS}",
                self.peer
            ))));
        }
        if self.forming.members != 0 && self.forming.members != members {
            return Err(self.fail(Error::remote(format!(
                "{}: an advertised receive changed from {} to {members} members",
                self.peer, self.forming.members
            ))));
        }
        let mut found = None;
        for member in 0..members {
            // Entries of one receive are written together, but the head may become visible first.
            let Some(credit) = self.fifo.read(slot, member, sequence) else {
                return Ok(None);
            };
            if found.is_none() && credit.tag == tag && !self.forming.matched[member] {
                found = Some((member, credit));
            }
        }
        let Some((member, credit)) = found else {
            return Ok(None);
        };
        let len = size.min(credit.len);
        let lkeys = match region {
            Some(region) if region.contains(addr, len.into()) => {
                std::array::from_fn(|rail| region.lkey(rail))
            }
            _ if len == 0 => [0; MAX_RAILS],
            _ => return Err(out_of_region(addr, len, region)),
        };
        let Some(request) = self.pool.take(1) else {
            self.poll()?;
            return Ok(None);
        };
        request.set_size(0, len);
        let index = request.index();
        if len != size {
            self.note_shortened(size, len, tag);
        }
        let forming = &mut *self.forming;
        if forming.members == 0 {
            forming.members = members;
            forming.left = members;
        }
        forming.matched[member] = true;
        forming.left -= 1;
        forming.list[member] =
            Member { request: index, addr, len, lkeys, remote: credit.addr, rkeys: credit.rkeys };
        self.bytes += u64::from(len);
        self.simple_limit = 0;
        if forming.left == 0 {
            self.begin_posting(slot, sequence);
            self.advance()?;
        }
        Ok(self.pool.get(index))
    }

    fn begin_posting(&mut self, slot: usize, sequence: u32) {
        let forming = &mut *self.forming;
        let list = &forming.list[..forming.members];
        let width = self.route.width;
        let longest = list.iter().map(|m| m.len).max().unwrap_or(0);
        let parts = list.iter().map(|m| stripe::parts(m.len, width)).max().unwrap_or(1);
        let share = stripe::range(longest, width, 0).1;
        let adaptive = self.route.adaptive_threshold.is_some_and(|t| longest > t);
        let record = list.len() > 1 || adaptive || share > self.route.max_message;
        let group = &mut self.groups[slot];
        group.pending = u8::try_from(parts).unwrap_or(u8::MAX);
        group.members = u8::try_from(list.len()).unwrap_or(0);
        for (member, m) in list.iter().enumerate() {
            group.requests[member] = m.request;
            if record {
                self.records.fill(slot, member, m.len);
            }
        }
        forming.cursor = Some(Cursor { parts, record, part: 0, member: 0, offset: 0 });
        self.next = sequence;
    }

    /// Posts what is left of the group at hand, as far as the send queues have room.
    #[cold]
    #[inline(never)]
    fn advance(&mut self) -> Result<(), Fault> {
        let Some(mut cursor) = self.forming.cursor else { return Ok(()) };
        let sequence = self.next;
        let slot = sequence.wrapping_sub(1) as usize % SLOTS;
        let lanes = self.route.lanes.len();
        while cursor.part < cursor.parts {
            let index = (self.lane + cursor.part as usize) % lanes;
            let room = self.route.lanes[index].room() as usize;
            let (count, ended) = self.build(&mut cursor, index, slot, sequence, room.min(CHAIN));
            if count == 0 {
                // Room comes with completions; the caller polls and returns here.
                break;
            }
            if let Err(errno) = self.route.lanes[index].post(&mut self.chain.0, count) {
                return Err(self.post_failed(errno));
            }
            if ended {
                cursor = Cursor { part: cursor.part + 1, member: 0, offset: 0, ..cursor };
            }
        }
        if cursor.part == cursor.parts {
            self.forming.cursor = None;
            self.forming.members = 0;
            self.forming.matched = [false; MEMBERS];
            self.simple_limit = self.usual_limit();
            self.lane = (self.lane + self.route.width as usize) % lanes;
        } else {
            self.forming.cursor = Some(cursor);
        }
        Ok(())
    }

    /// Makes up to `limit` work requests of the cursor's part; returns how many and whether the part is then complete.
    fn build(
        &mut self,
        cursor: &mut Cursor,
        lane: usize,
        slot: usize,
        sequence: u32,
        limit: usize,
    ) -> (usize, bool) {
        let route = &self.route;
        let at = &route.lanes[lane];
        let remote_rail = at.remote_rail % MAX_RAILS;
        let imm = Imm::new(sequence, cursor.parts, cursor.record).0;
        let id = |kind, ahead| WrId::new(kind, lane, slot, at.position(ahead)).0;
        let members = self.forming.members;
        let carries_record = cursor.record && cursor.part == 0;
        // Data may carry the immediate itself unless a record must follow or packets may overtake each other.
        let fused = !cursor.record;
        let mut count = 0;
        while count < limit {
            // The next piece of data of this part, if any is left.
            let piece = loop {
                let Some(m) = self.forming.list[..members].get(cursor.member) else { break None };
                let (base, share) = stripe::range(m.len, route.width, cursor.part);
                if cursor.offset < share {
                    let bytes = (share - cursor.offset).min(route.max_message);
                    let from = u64::from(base + cursor.offset);
                    break Some((
                        Local {
                            addr: m.addr.wrapping_add(from),
                            len: bytes,
                            lkey: m.lkeys[at.rail % MAX_RAILS],
                        },
                        Remote { addr: m.remote.wrapping_add(from), rkey: m.rkeys[remote_rail] },
                        cursor.offset + bytes == share,
                    ));
                }
                cursor.member += 1;
                cursor.offset = 0;
            };
            match piece {
                Some((local, remote, whole)) => {
                    let last = fused && whole && cursor.member + 1 == members;
                    cursor.offset += local.len;
                    if last {
                        self.chain.0.write_imm(
                            count,
                            id(Kind::Part, count),
                            local,
                            remote,
                            imm,
                            Flags::SIGNALED,
                        );
                        return (count + 1, true);
                    }
                    // The last of a portion is signalled, so that its slots come free and the rest can follow.
                    let (kind, flags) = if count + 1 == limit {
                        (Kind::Progress, Flags::SIGNALED)
                    } else {
                        (Kind::Progress, Flags::SILENT)
                    };
                    self.chain.0.write(count, id(kind, count), local, remote, flags);
                    count += 1;
                }
                None => {
                    let (local, remote, flags) = if carries_record {
                        let local = Local {
                            addr: self.records.addr(slot),
                            len: (members * size_of::<u32>()) as u32,
                            lkey: route.local[at.rail].lkey(),
                        };
                        let remote = Remote {
                            addr: route.record_addr.wrapping_add(SizeRecords::offset(slot)),
                            rkey: route.record_rkeys[at.remote_rail],
                        };
                        let inline = local.len <= route.max_inline;
                        (
                            local,
                            remote,
                            if inline { Flags::SIGNALED.inline() } else { Flags::SIGNALED },
                        )
                    } else {
                        (
                            Local { addr: 0, len: 0, lkey: 0 },
                            Remote { addr: 0, rkey: 0 },
                            Flags::SIGNALED,
                        )
                    };
                    self.chain.0.write_imm(count, id(Kind::Part, count), local, remote, imm, flags);
                    return (count + 1, true);
                }
            }
        }
        (count, false)
    }

    /// Takes note of completion `index` of the last poll if it is the usual one, of a one-member send. `false`:
    /// [`Self::completions`] must look at it and at those after it.
    #[inline(always)]
    pub fn settle(&mut self, index: usize) -> bool {
        let wc = self.pump.wc.get(index);
        let id = WrId(wc.id());
        if !wc.is_success() || id.kind() != Some(Kind::Single) {
            return false;
        }
        self.pool.own(id.slot()).complete();
        true
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
        if self.pool.get(index).is_some_and(Request::is_pending) {
            if !self.pump.gate().is_open() {
                self.attention(false)?;
            }
            self.poll()?;
        }
        let outcome = self.pool.finish(index);
        let outcome = outcome
            .ok_or_else(|| Box::new(Error::usage("test of a request that is not in flight")))?;
        Ok((outcome, self.pool.get(index)))
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
                let error = completion_error(wc, &self.peer, "send");
                return Err(self.fail(error));
            }
            match (id.kind(), self.route.lanes.get_mut(id.lane())) {
                (Some(Kind::Single), _) => self.pool.own(id.slot()).complete(),
                (Some(Kind::Part), Some(lane)) => {
                    lane.complete(id.position());
                    let group = &mut self.groups[id.slot() % SLOTS];
                    group.pending = group.pending.saturating_sub(1);
                    if group.pending == 0 {
                        let requests = &group.requests[..usize::from(group.members)];
                        requests
                            .iter()
                            .filter_map(|r| self.pool.get(*r))
                            .for_each(Request::complete);
                    }
                }
                (Some(Kind::Progress), Some(lane)) => lane.complete(id.position()),
                _ => {}
            }
        }
        if self.forming.cursor.is_some() {
            self.advance()?;
        }
        Ok(())
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
        // A forked child must not close the parent's connection, and sees its own gate only.
        if self.failure.is_none() {
            self.failure = Some(error.clone());
        }
        self.pump.gate().report(GateState::Failed);
        error
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
        self.shortened += 1;
        tracing::debug!(
            "{}: send of {size} bytes with tag {tag} shortened to the receive's {len}",
            self.peer
        );
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
