//! The general way to send: several members, several lanes, messages above the device's limit.
//!
//! Members are matched one by one as their isends come. When the last is there, the whole receive is answered part by
//! part; what the send queues have no room for follows when completions made some.

use super::{SendComm, out_of_region};
use crate::error::{Error, Fault};
use crate::memory::Region;
use crate::memory::bounce::{Bounced, CHUNK};
use crate::memory::region::MAX_RAILS;
use crate::memory::status::layout::board;
use crate::profiler::Parent;
use crate::transport::comm::{Ending, foreign_handle};
use crate::transport::fifo::{Credit, MEMBERS, SLOTS, SizeRecords};
use crate::transport::lane::{Kind, PLACE, WrId};
use crate::transport::request::Request;
use crate::transport::stripe::Imm;
use crate::verbs::sys::{WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM};
use crate::verbs::wr::{Flags, Local, Remote};
use std::sync::Arc;

/// Work requests posted with one doorbell.
pub(super) const CHAIN: usize = 16;

/// Bytes after which a call copies no more.
const AT_ONCE: u64 = 4 << 20;

/// One message waiting to be posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) request: u16,
    pub(super) addr: u64,
    pub(super) len: u32,
    /// How it is cut, see [`crate::transport::stripe::Stripes::chunk`].
    pub(super) chunk: u32,
    pub(super) lkeys: [u32; MAX_RAILS],
    pub(super) remote: u64,
    pub(super) rkeys: [u32; MAX_RAILS],
}

pub(super) const NO_MEMBER: Member = Member {
    request: 0,
    addr: 0,
    len: 0,
    chunk: 0,
    lkeys: [0; MAX_RAILS],
    remote: 0,
    rkeys: [0; MAX_RAILS],
};

/// The receive at the head of the FIFO while its members are being matched and posted.
#[derive(Debug)]
pub(super) struct Forming {
    /// Members of the receive; 0 when nothing is matched yet.
    pub(super) members: usize,
    pub(super) matched: [bool; MEMBERS],
    pub(super) left: usize,
    pub(super) list: [Member; MEMBERS],
    /// The buffers of members that are sent from copies.
    pub(super) sources: [Option<Arc<Bounced>>; MEMBERS],
    /// What events of each member belong to.
    pub(super) parents: [Parent; MEMBERS],
    /// The next work request to make, once all members are matched.
    pub(super) cursor: Option<Cursor>,
    /// Parts that it is cut into, whether a size record goes with it, and the lane of its first part.
    parts: u32,
    record: bool,
    first: usize,
}

impl Default for Forming {
    fn default() -> Self {
        Self {
            members: 0,
            matched: [false; MEMBERS],
            left: 0,
            list: [NO_MEMBER; MEMBERS],
            sources: Default::default(),
            parents: Default::default(),
            cursor: None,
            parts: 0,
            record: false,
            first: 0,
        }
    }
}

impl Forming {
    /// Makes room for the next receive.
    pub(super) fn clear(&mut self) {
        self.members = 0;
        self.matched = [false; MEMBERS];
        self.sources = Default::default();
    }

    /// Where part `part` begins.
    pub(super) fn cursor_at(&self, part: u32) -> Cursor {
        Cursor { parts: self.parts, record: self.record, part, member: 0, offset: 0, lane: 0 }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor {
    pub(super) parts: u32,
    pub(super) record: bool,
    pub(super) part: u32,
    pub(super) member: usize,
    /// Bytes of the member's share of this part that were made into work requests.
    pub(super) offset: u32,
    /// The number of the lane on which this part began, where rails may fail.
    pub(super) lane: usize,
}

/// A posted receive group whose completions are outstanding.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Group {
    pub(super) pending: u8,
    pub(super) members: u8,
    pub(super) requests: [u16; MEMBERS],
}

/// The most bytes of one work request.
fn most_at_once(max_message: u32, copied: bool) -> u32 {
    if copied { max_message.min(CHUNK as u32) } else { max_message }
}

impl SendComm {
    /// The general case: several members, several lanes, messages above the device's limit.
    #[cold]
    #[inline(never)]
    pub(super) fn isend_group(
        &mut self,
        addr: u64,
        size: u32,
        tag: u32,
        (region, parent): (Option<&Region>, Parent),
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
        let bounced = region.and_then(|r| r.bounced(addr, len.into())).filter(|_| len != 0);
        if bounced.as_ref().is_some_and(|b| !b.belongs_to(self.route.owner)) {
            return Err(foreign_handle("isend"));
        }
        let lkeys = match region {
            Some(region) if region.contains(addr, len.into()) => {
                std::array::from_fn(|rail| region.lkey(rail))
            }
            _ if len == 0 => [0; MAX_RAILS],
            _ => match bounced.as_ref().and_then(|b| b.chunks()) {
                Some(chunks) => {
                    // The same for all buffers of this end.
                    let chunks = self.chunks.get_or_insert_with(|| Arc::clone(chunks));
                    std::array::from_fn(|rail| chunks.lkey(rail))
                }
                None => return Err(out_of_region(addr, len, region)),
            },
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
        forming.list[member] = Member {
            request: index,
            addr,
            len,
            chunk: self.route.stripes.chunk(len),
            lkeys,
            remote: credit.addr,
            rkeys: credit.rkeys,
        };
        forming.sources[member] = bounced;
        forming.parents[member] = parent;
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
        let (stripes, first) = (&self.route.stripes, self.lane);
        let longest = list.iter().map(|m| m.len).max().unwrap_or(0);
        let parts = list.iter().map(|m| stripes.parts(m.len, m.chunk, first)).max().unwrap_or(1);
        let share = list.iter().map(|m| stripes.longest(m.len, m.chunk, first)).max().unwrap_or(0);
        let adaptive = self.route.adaptive_threshold.is_some_and(|t| longest > t);
        let copied = forming.sources.iter().any(Option::is_some);
        let most = most_at_once(self.route.max_message, copied);
        // Of a part in several pieces the last alone would tell its size.
        let record = list.len() > 1 || adaptive || share > most;
        let group = &mut self.groups[slot];
        group.pending = u8::try_from(parts).unwrap_or(u8::MAX);
        group.members = u8::try_from(list.len()).unwrap_or(0);
        for (member, m) in list.iter().enumerate() {
            group.requests[member] = m.request;
            if record {
                self.records.fill(slot, member, m.len);
            }
        }
        (forming.parts, forming.record, forming.first) = (parts, record, first);
        forming.cursor = Some(forming.cursor_at(0));
        self.next = sequence;
        self.count(slot);
    }

    /// Counts the group whose members are all matched: its messages, and their bytes by the rails that they are meant for.
    fn count(&self, slot: usize) {
        let forming = &*self.forming;
        let lanes = &self.route.lanes;
        let rail = |lane: usize| lanes[lane % lanes.len()].rail % MAX_RAILS;
        for m in &forming.list[..forming.members] {
            for part in 0..forming.parts {
                let (_, share) = self.route.stripes.range(m.len, m.chunk, forming.first, part);
                let rail = rail(forming.first + part as usize);
                self.board.add(board::BYTES.start + rail, share.into());
            }
        }
        self.board.add(board::MORE, (forming.members as u64).saturating_sub(1));
        let usual = rail(self.lane_of[slot % SLOTS].into());
        self.board.add(board::GENERAL.start + usual, 1);
        self.board.add(board::POSTED, 1);
    }

    /// Posts what is left of the group at hand, as far as the send queues have room.
    #[cold]
    #[inline(never)]
    pub(super) fn advance(&mut self) -> Result<(), Fault> {
        let Some(mut cursor) = self.forming.cursor else { return Ok(()) };
        let sequence = self.next;
        let slot = sequence.wrapping_sub(1) as usize % SLOTS;
        let end = cursor.parts;
        self.post_parts(&mut cursor, end, slot, sequence)?;
        self.forming.cursor = Some(cursor).filter(|cursor| cursor.part < cursor.parts);
        if self.forming.cursor.is_none() {
            match &mut self.reroute {
                Some(reroute) => reroute.keep(slot, &mut self.forming),
                None => self.forming.clear(),
            }
            self.simple_limit = self.usual_limit();
            let stripes = &self.route.stripes;
            self.lane = (self.lane + stripes.width() as usize) % stripes.lanes();
        }
        Ok(())
    }

    /// Posts parts from `cursor` on up to part `end`, as far as the send queues have room.
    pub(super) fn post_parts(
        &mut self,
        cursor: &mut Cursor,
        end: u32,
        slot: usize,
        sequence: u32,
    ) -> Result<(), Fault> {
        let lanes = self.route.stripes.lanes();
        // A device that completes as fast as the host copies would keep this call for the whole message. The completion
        // of the last copy resumes here.
        let copied = self.board.get(board::COPIED_BYTES);
        while cursor.part < end {
            let mut index = (self.forming.first + cursor.part as usize) % lanes;
            if let Some(reroute) = &self.reroute {
                let before = (cursor.member != 0 || cursor.offset != 0).then_some(cursor.lane);
                let Some(place) = reroute.place(cursor, index) else { break };
                index = place;
                // The event of pieces that were left behind has no other end.
                let left = before.filter(|before| *before != cursor.lane);
                if let (Some(left), Some(profile)) = (left, &mut self.profile) {
                    profile.stop(slot, left & PLACE);
                }
            }
            if self.forming.sources.get(cursor.member).is_some_and(Option::is_some) {
                if self.board.get(board::COPIED_BYTES) - copied >= AT_ONCE {
                    break;
                }
                // A chunk that is free again is still in the cache.
                self.reclaim()?;
            }
            let room = self.route.lanes[index].room() as usize;
            let chunks = self.chunks_used;
            let (count, ended) = self.build(cursor, index, slot, sequence, room.min(CHAIN))?;
            if count == 0 {
                // Room comes with completions; the caller polls and returns here.
                break;
            }
            if let Err(errno) = self.route.lanes[index].post(&mut self.chain.0, count) {
                if self.reroute.as_ref().is_some_and(|r| r.shared.is_stopped(cursor.lane)) {
                    // Stopped meanwhile: nothing was posted, and the part begins anew on another lane.
                    self.chunks_used = chunks;
                    continue;
                }
                return Err(self.post_failed(errno));
            }
            let rail = self.route.lanes[index].rail % MAX_RAILS;
            self.board.add(board::POSTS.start + rail, count as u64);
            if ended {
                if let Some(reroute) = &mut self.reroute {
                    reroute.posted(index, slot, cursor.part);
                }
                *cursor = Cursor { part: cursor.part + 1, member: 0, offset: 0, ..*cursor };
            }
        }
        Ok(())
    }

    /// Takes note of what has completed, so that chunks come free.
    fn reclaim(&mut self) -> Result<(), Fault> {
        for rail in 0..self.pump.rails() {
            let found = self.pump.poll(rail);
            if found != 0 {
                self.note(0, found)?;
            }
        }
        Ok(())
    }

    /// Copies `len` bytes at `addr` of a member into a chunk: its number. `None`: the device reads all of them.
    fn copy(&mut self, member: usize, addr: u64, len: u32) -> Result<Option<usize>, Fault> {
        let chunk = self.chunks_used.trailing_ones() as usize;
        let source = self.forming.sources.get(member).and_then(Option::as_ref);
        let count = self.chunks.as_ref().map_or(0, |chunks| chunks.count());
        let Some(source) = source.filter(|_| chunk < count) else { return Ok(None) };
        if !source.copy_in(addr, len, chunk) {
            let peer = &self.peer;
            let error = format!("{peer}: the memory handle of a send in flight was deregistered");
            return Err(self.fail(Error::usage(error)));
        }
        self.chunks_used |= 1 << chunk;
        self.board.add(board::COPIED_BYTES, len.into());
        self.board.set(board::CHUNKS, self.chunks_used.count_ones().into());
        Ok(Some(chunk))
    }

    /// Tells a profiler of the first work request of a member on a lane, whose notice ends the event.
    fn tell(&mut self, member: usize, (slot, lane): (usize, usize), work: (u64, u32, u32)) {
        let Some(profile) = self.profile.as_mut().filter(|profile| profile.asks(slot)) else {
            return;
        };
        let parent = self.forming.parents[member % MEMBERS];
        profile.start((slot, lane), &self.route.lanes[lane], parent, work);
    }

    /// Makes up to `limit` work requests of the cursor's part; returns how many and whether the part is then complete.
    /// What is copied is posted at once, so that the device is at work while the next piece is copied.
    fn build(
        &mut self,
        cursor: &mut Cursor,
        lane: usize,
        slot: usize,
        sequence: u32,
        limit: usize,
    ) -> Result<(usize, bool), Fault> {
        let at = &self.route.lanes[lane];
        let (rail, remote_rail) = (at.rail % MAX_RAILS, at.remote_rail % MAX_RAILS);
        let first = at.position(0);
        let (max_message, begin) = (self.route.max_message, self.forming.first);
        let imm = Imm::new(sequence, cursor.parts, cursor.record).0;
        let number = self.reroute.as_ref().map_or(lane, |reroute| reroute.number(lane));
        let id =
            |kind, ahead: usize| WrId::new(kind, number, slot, first.wrapping_add(ahead as u32));
        let members = self.forming.members;
        let carries_record = cursor.record && cursor.part == 0;
        // Data may carry the immediate itself unless a record must follow or packets may overtake each other.
        let fused = !cursor.record;
        let mut count = 0;
        while count < limit {
            // The next piece of data of this part, if any is left.
            let piece = loop {
                let Some(m) = self.forming.list[..members].get(cursor.member) else { break None };
                let (base, share) = self.route.stripes.range(m.len, m.chunk, begin, cursor.part);
                if cursor.offset < share {
                    let copied = self.forming.sources[cursor.member].is_some();
                    let bytes = (share - cursor.offset).min(most_at_once(max_message, copied));
                    let from = u64::from(base + cursor.offset);
                    let addr = m.addr.wrapping_add(from);
                    let local = Local { addr, len: bytes, lkey: m.lkeys[rail] };
                    let remote =
                        Remote { addr: m.remote.wrapping_add(from), rkey: m.rkeys[remote_rail] };
                    let begun = (cursor.offset == 0).then_some(share);
                    break Some((local, remote, cursor.offset + bytes == share, copied, begun));
                }
                cursor.member += 1;
                cursor.offset = 0;
            };
            match piece {
                Some((mut local, remote, whole, copied, begun)) => {
                    let mut chunk = None;
                    if copied {
                        let Some(used) = self.copy(cursor.member, local.addr, local.len)? else {
                            break;
                        };
                        local.addr = self.chunks.as_ref().map_or(0, |c| c.addr(used));
                        chunk = Some(used);
                    }
                    let named = |id: WrId| chunk.map_or(id, |chunk| id.with_chunk(chunk)).0;
                    let last = fused && whole && cursor.member + 1 == members;
                    cursor.offset += local.len;
                    let (kind, opcode) = if last {
                        (Kind::Part, WR_RDMA_WRITE_WITH_IMM)
                    } else {
                        (Kind::Progress, WR_RDMA_WRITE)
                    };
                    let id = named(id(kind, count));
                    if let Some(share) = begun {
                        self.tell(cursor.member, (slot, lane), (id, opcode, share));
                    }
                    if last {
                        self.chain.0.write_imm(count, id, local, remote, imm, Flags::SIGNALED);
                        return Ok((count + 1, true));
                    }
                    // The last of a portion is signalled, so that its slots come free and the rest can follow.
                    let signalled = copied || count + 1 == limit;
                    let flags = if signalled { Flags::SIGNALED } else { Flags::SILENT };
                    self.chain.0.write(count, id, local, remote, flags);
                    count += 1;
                    if copied {
                        break;
                    }
                }
                None => {
                    let (route, at) = (&self.route, &self.route.lanes[lane]);
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
                    let id = id(Kind::Part, count).0;
                    // Members without data are in the notice of the first part.
                    for member in (0..members).filter(|_| cursor.part == 0) {
                        if self.forming.list[member].len == 0 {
                            self.tell(member, (slot, lane), (id, WR_RDMA_WRITE_WITH_IMM, 0));
                        }
                    }
                    self.chain.0.write_imm(count, id, local, remote, imm, flags);
                    return Ok((count + 1, true));
                }
            }
        }
        Ok((count, false))
    }
}
