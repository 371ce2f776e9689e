//! What a sending end does when one of several rails fails, see [`crate::transport::failover`].

use super::group::{Cursor, Forming};
use super::{SLOTS, SendComm};
use crate::error::Fault;
use crate::memory::bounce::CHUNKS;
use crate::memory::status::layout::board;
use crate::transport::comm::Ending;
use crate::transport::failover::{Failover, is_survivable};
use crate::transport::lane::{Kind, PLACE, WrId};
use crate::transport::settling::{Settling, ahead};
use std::collections::VecDeque;
use std::sync::Arc;

/// What is kept to send it again.
#[derive(Debug)]
pub(super) struct Reroute {
    pub(super) shared: Arc<Failover>,
    /// For the lane in each place the parts whose ends were posted there and not acknowledged, in order.
    under_way: Box<[VecDeque<Part>]>,
    /// Answers that are not complete.
    kept: [Option<Box<Forming>>; SLOTS],
    #[expect(clippy::vec_box, reason = "boxes change places, with nothing copied")]
    spare: Vec<Box<Forming>>,
    again: VecDeque<(Part, Cursor)>,
    settling: Settling,
    pub(super) resent: u64,
}

/// One part of the answer in a slot.
#[derive(Clone, Copy, Debug)]
struct Part {
    slot: u8,
    number: u8,
}

impl Reroute {
    pub(super) fn new(shared: Arc<Failover>, lanes: usize) -> Self {
        let under_way = || VecDeque::with_capacity(2 * SLOTS);
        Self {
            shared,
            under_way: std::iter::repeat_with(under_way).take(lanes).collect(),
            kept: Default::default(),
            spare: std::iter::repeat_with(Box::default).take(SLOTS).collect(),
            again: VecDeque::with_capacity(SLOTS),
            settling: Settling::new(lanes),
            resent: 0,
        }
    }

    /// Something outside the data path happened.
    pub(super) fn look(&mut self) {
        self.settling.busy = true;
    }

    /// The place for a part that would go on `nominal`; `cursor` says how far it is, and on which lane. `None`: none now.
    /// A part of which pieces are on a lane that was stopped begins anew, and not before both ends have told: until then
    /// they may still arrive, and its receive must not be complete by then.
    pub(super) fn place(&self, cursor: &mut Cursor, nominal: usize) -> Option<usize> {
        let begun = cursor.member != 0 || cursor.offset != 0;
        // A lane that is no more was settled before another took its place.
        if let Some(place) = self.settling.place(cursor.lane).filter(|_| begun) {
            if !self.shared.is_stopped(cursor.lane) {
                return Some(place);
            }
            if !self.settling.is_settled(place) {
                return None;
            }
        }
        (cursor.member, cursor.offset) = (0, 0);
        let place = self.settling.pick(&self.shared, nominal)?;
        cursor.lane = self.settling.number(place);
        Some(place)
    }

    /// The number of the lane in a place.
    pub(super) fn number(&self, place: usize) -> usize {
        self.settling.number(place)
    }

    /// The end of a part was posted on the lane in a place.
    pub(super) fn posted(&mut self, place: usize, slot: usize, number: u32) {
        self.under_way[place].push_back(Part { slot: slot as u8, number: number as u8 });
    }

    /// Keeps an answer that was posted whole, until it is complete; gives an empty one for the next.
    pub(super) fn keep(&mut self, slot: usize, answer: &mut Box<Forming>) {
        let empty = self.spare.pop().unwrap_or_default();
        self.kept[slot] = Some(std::mem::replace(answer, empty));
    }

    /// The answer in a slot is complete.
    pub(super) fn complete(&mut self, slot: usize) {
        if let Some(mut answer) = self.kept[slot].take() {
            answer.clear();
            self.spare.push(answer);
        }
    }
}

impl SendComm {
    /// Takes note of completion `index` of the last poll where that is not done as usual. `false`: it is.
    pub(super) fn note_rerouted(&mut self, index: usize) -> bool {
        let Some(reroute) = &mut self.reroute else { return false };
        let wc = self.pump.wc.get(index);
        let id = WrId(wc.id());
        let (number, place) = (id.lane(), id.place());
        let (Some(kind @ (Kind::Part | Kind::Progress)), Some(lane)) =
            (id.kind(), self.route.lanes.get_mut(place))
        else {
            return false;
        };
        // Nothing should be left of a lane that is no more; if there is, it says nothing about the one in its place.
        if reroute.number(place) != number {
            return true;
        }
        if wc.is_success() {
            if kind == Kind::Progress {
                return false;
            }
            if reroute.shared.count(number) {
                reroute.under_way[place].pop_front();
                return false;
            }
            // Too late: the other end decides whether it came.
        } else if !reroute.shared.is_stopped(number) {
            let status = wc.status();
            let why = || reroute.shared.failed_by(number, status);
            if !is_survivable(status) || !reroute.shared.stop_like(number, why) {
                return false;
            }
        }
        if let Some(profile) = &mut self.profile {
            profile.stop(id.slot(), place);
        }
        lane.complete(id.position());
        self.chunks_used &= !id.chunk().map_or(0, |chunk| 1 << (chunk % CHUNKS));
        reroute.settling.busy = true;
        true
    }

    /// Goes on with what rails have failed; whether that was something.
    pub(super) fn reroute(&mut self) -> Result<bool, Fault> {
        let Some(reroute) = self.reroute.as_mut().filter(|reroute| reroute.settling.busy) else {
            return Ok(false);
        };
        let Reroute { shared, settling, .. } = &mut **reroute;
        let lanes = &mut self.route.lanes;
        for (number, qp) in shared.take_fresh().into_iter().flat_map(|fresh| fresh.lanes) {
            shared.discard(lanes[number & PLACE].renew(qp));
            settling.renew(number);
        }
        let quiet = |place: usize| lanes[place].is_idle();
        let (done, waiting) = match settling.look(shared, &self.peer, quiet) {
            Ok(found) => found,
            Err(error) => return Err(self.fail(error)),
        };
        for (place, theirs) in &done {
            self.resolve(*place, *theirs)?;
        }
        if self.forming.cursor.is_some() {
            self.advance()?;
        }
        self.send_again()?;
        if let Some(reroute) = &mut self.reroute {
            reroute.settling.busy = waiting || !reroute.again.is_empty();
        }
        Ok(!done.is_empty())
    }

    /// Decides what of the stopped lane in a place is sent again: both ends told their counts, and nothing is under way.
    fn resolve(&mut self, place: usize, theirs: u32) -> Result<(), Fault> {
        let Some(reroute) = &mut self.reroute else { return Ok(()) };
        let number = reroute.number(place);
        let parts: Vec<_> = reroute.under_way[place].drain(..).collect();
        let arrived = match ahead(reroute.shared.counted(number), theirs, parts.len()) {
            Ok(arrived) => arrived,
            Err(e) => {
                let error = e.context(&self.peer);
                return Err(self.fail(error));
            }
        };
        for part in parts.iter().skip(arrived) {
            let slot = usize::from(part.slot);
            let answer = reroute.kept[slot].as_ref().unwrap_or(&self.forming);
            reroute.again.push_back((*part, answer.cursor_at(part.number.into())));
            reroute.resent += 1;
            self.board.add(board::AGAIN, 1);
        }
        reroute.shared.drained(number);
        for part in parts.iter().take(arrived) {
            self.part_done(part.slot.into());
        }
        Ok(())
    }

    /// Sends parts again, as far as the send queues have room.
    fn send_again(&mut self) -> Result<(), Fault> {
        // One answer at a time; what is being posted goes first.
        while self.forming.cursor.is_none() {
            let Some(reroute) = &mut self.reroute else { break };
            let Some((part, mut cursor)) = reroute.again.front().copied() else { break };
            let slot = usize::from(part.slot);
            let Some(answer) = reroute.kept[slot].take() else {
                // Its answer is complete, which cannot be with a part missing.
                reroute.again.pop_front();
                continue;
            };
            let sequence = self.sequence_of(slot);
            let current = std::mem::replace(&mut self.forming, answer);
            let posted = self.post_parts(&mut cursor, u32::from(part.number) + 1, slot, sequence);
            let answer = std::mem::replace(&mut self.forming, current);
            let Some(reroute) = &mut self.reroute else { break };
            reroute.kept[slot] = Some(answer);
            posted?;
            if cursor.part > part.number.into() {
                reroute.again.pop_front();
            } else {
                if let Some(first) = reroute.again.front_mut() {
                    first.1 = cursor;
                }
                break;
            }
        }
        Ok(())
    }

    /// The sequence of the receive that was answered last in a slot.
    pub(super) fn sequence_of(&self, slot: usize) -> u32 {
        let last = self.next.wrapping_sub(1);
        last.wrapping_sub(last.wrapping_sub(slot as u32) % SLOTS as u32).wrapping_add(1)
    }
}
