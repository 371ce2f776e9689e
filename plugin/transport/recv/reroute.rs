//! What a receiving end does when one of several rails fails, see [`crate::transport::failover`].

use super::{RecvComm, SLOTS};
use crate::error::Fault;
use crate::memory::region::MAX_RAILS;
use crate::memory::status::layout::board;
use crate::transport::comm::Ending;
use crate::transport::failover::{Failover, Fresh, is_survivable};
use crate::transport::lane::{Kind, PLACE, WrId};
use crate::transport::settling::{Settling, ahead};
use crate::transport::stripe::Imm;
use std::collections::VecDeque;
use std::sync::Arc;

/// What is known of lanes that were stopped.
#[derive(Debug)]
pub(super) struct Reroute {
    pub(super) shared: Arc<Failover>,
    /// For the lane in each place.
    lanes: Box<[Late]>,
    settling: Settling,
}

/// What came over a lane after it was stopped here, and what is still to come.
#[derive(Debug, Default)]
struct Late {
    /// Receives that came back, filled or not.
    back: u32,
    /// Credits that did not.
    credits: u32,
    /// Ends of parts, until the other end tells which of them it takes for delivered.
    held: VecDeque<(Imm, u32)>,
    /// Ends that it takes for delivered and that are still to come out of the completion queue.
    owed: usize,
}

impl Reroute {
    pub(super) fn new(shared: Arc<Failover>, lanes: usize) -> Self {
        let settling = Settling::new(lanes);
        let lanes = std::iter::repeat_with(Late::default).take(lanes).collect();
        Self { shared, lanes, settling }
    }

    /// Something outside the data path happened.
    pub(super) fn look(&mut self) {
        self.settling.busy = true;
    }

    /// A credit was posted on the lane in a place.
    pub(super) fn credited(&mut self, place: usize) {
        self.lanes[place].credits += 1;
    }

    /// Takes note of a receive or a credit that came back from the lane in a place.
    fn came_back(&mut self, place: usize, kind: Kind) {
        let late = &mut self.lanes[place];
        if kind == Kind::Receive {
            late.back = late.back.wrapping_add(1);
        } else {
            late.credits = late.credits.saturating_sub(1);
        }
        // The last one is what a new queue pair waits for.
        self.settling.busy |= self.shared.is_stopped(self.settling.number(place));
    }
}

impl RecvComm {
    /// Whether the lane in a place was stopped: nothing is posted on it.
    pub(super) fn is_stopped(&self, place: usize) -> bool {
        let stopped = |reroute: &Reroute| reroute.shared.is_stopped(reroute.settling.number(place));
        self.reroute.as_deref().is_some_and(stopped)
    }

    /// Whether all lanes of a local rail were stopped. What they brought is visible: telling the other end took longer
    /// than any write stays under way in this host.
    pub(super) fn is_rail_stopped(&self, rail: usize) -> bool {
        let mut lanes = self.lanes.iter().enumerate().filter(|(_, lane)| lane.lane.rail == rail);
        self.reroute.is_some() && lanes.all(|(place, _)| self.is_stopped(place))
    }

    /// The place of the lane with this number, which may be one that is still to be taken. `None`: it is no more.
    fn place(&mut self, number: usize) -> Option<usize> {
        let place = self.reroute.as_ref()?.settling.place(number);
        if place.is_some() {
            return place;
        }
        self.take_fresh();
        self.reroute.as_ref()?.settling.place(number)
    }

    /// Takes new queue pairs in place of some of which nothing is left.
    fn take_fresh(&mut self) {
        let Some(reroute) = &mut self.reroute else { return };
        for Fresh { lanes, flush } in reroute.shared.take_fresh() {
            for (number, qp) in lanes {
                let place = number & PLACE;
                let Some(lane) = self.lanes.get_mut(place) else { continue };
                reroute.shared.discard(lane.renew(number, qp));
                reroute.lanes[place] = Late::default();
                reroute.settling.renew(number);
            }
            if let Some((rail, qp)) = flush
                && let Some(flush) = self.flush.iter_mut().find(|flush| flush.lane.rail == rail)
            {
                reroute.shared.discard(flush.lane.renew(qp));
            }
        }
    }

    /// Gives the credit of a slot back to the lane that it had at first, if that may be posted on again.
    pub(super) fn bring_home(&mut self, slot: usize) {
        let home = slot % self.lanes.len();
        let Some(reroute) = &self.reroute else { return };
        if self.credits.lane(slot) == home || self.credits.is_blocked(slot) {
            return;
        }
        let number = reroute.settling.number(home);
        if !self.slots[slot].is_waiting() && reroute.shared.is_usable(number) {
            self.credits.move_to(slot, home, number);
            self.shape_credit(slot, 1);
        }
    }

    /// Takes note of completion `index` of the last poll where that is not done as usual. `false`: it is.
    ///
    /// # Errors
    /// What came answers no receive.
    pub(super) fn note_rerouted(&mut self, index: usize) -> Result<bool, Fault> {
        let id = WrId(self.pump.wc.get(index).id());
        let number = id.lane();
        if self.reroute.is_none() {
            return Ok(false);
        }
        match id.kind() {
            Some(kind @ (Kind::Receive | Kind::Credit)) => {
                // Nothing should be left of a lane that is no more; if there is, it says nothing.
                let Some(place) = self.place(number) else { return Ok(true) };
                let Some(reroute) = &mut self.reroute else { return Ok(false) };
                reroute.came_back(place, kind);
                let wc = self.pump.wc.get(index);
                if !wc.is_success() {
                    let status = wc.status();
                    let why = || reroute.shared.failed_by(number, status);
                    let stopped = reroute.shared.is_stopped(number)
                        || (is_survivable(status) && reroute.shared.stop_like(number, why));
                    reroute.settling.busy |= stopped;
                    return Ok(stopped);
                }
                if kind == Kind::Credit {
                    // It may have gone another way meanwhile, whose completion counts.
                    return Ok(self.credits.lane(id.slot()) != place);
                }
                if reroute.shared.count(number) {
                    return Ok(false);
                }
                let end = (Imm(wc.imm()), wc.byte_len());
                // A device may say anything: there need not be such a lane.
                let Some(late) = reroute.lanes.get_mut(place) else { return Ok(false) };
                if late.owed > 0 {
                    late.owed -= 1;
                    self.arrived(end.0, end.1)?;
                } else if !reroute.settling.is_settled(place) {
                    late.held.push_back(end);
                    reroute.settling.busy = true;
                }
                // Else it is sent again.
                Ok(true)
            }
            Some(Kind::Flush) if !self.pump.wc.get(index).is_success() => {
                let status = self.pump.wc.get(index).status();
                let Some(rail) = self.flush.get(number).map(|flush| flush.lane.rail) else {
                    return Ok(false);
                };
                let survives = is_survivable(status) || self.is_rail_stopped(rail);
                let Some(reroute) = &mut self.reroute else { return Ok(false) };
                let why =
                    || format!("{}: flush: {}", self.peer, crate::verbs::cq::status_name(status));
                let stopped = survives && reroute.shared.stop_flush(rail, why);
                reroute.settling.busy |= stopped;
                if stopped {
                    self.flushed(id);
                }
                Ok(stopped)
            }
            _ => Ok(false),
        }
    }

    /// Goes on with what rails have failed; whether that was something.
    pub(super) fn reroute(&mut self) -> Result<bool, Fault> {
        let Some(reroute) = self.reroute.as_mut().filter(|reroute| reroute.settling.busy) else {
            return Ok(false);
        };
        let fresh = reroute.shared.has_fresh();
        if fresh {
            self.take_fresh();
        }
        let Some(reroute) = &mut self.reroute else { return Ok(false) };
        let Reroute { shared, settling, .. } = &mut **reroute;
        let (done, waiting) = match settling.look(shared, &self.peer, |_| true) {
            Ok(found) => found,
            Err(error) => return Err(self.fail(error)),
        };
        settling.busy = waiting;
        for (place, theirs) in &done {
            self.resolve(*place, *theirs)?;
        }
        self.tell_drained();
        Ok(!done.is_empty())
    }

    /// Tells which lanes nothing is left of, so that others may take their places.
    fn tell_drained(&self) {
        let Some(reroute) =
            self.reroute.as_ref().filter(|reroute| reroute.shared.recovery.is_some())
        else {
            return;
        };
        let shared = &reroute.shared;
        for (place, (late, lane)) in reroute.lanes.iter().zip(&self.lanes).enumerate() {
            let number = reroute.settling.number(place);
            let all = self.depth.wrapping_add(lane.replaced());
            let out = all.wrapping_sub(late.back);
            if reroute.settling.is_settled(place)
                && (late.owed, late.credits, out) == (0, 0, 0)
                && !shared.is_drained(number)
            {
                shared.drained(number);
            }
        }
        for flush in self.flush.iter().filter(|flush| flush.lane.is_idle()) {
            if !shared.is_flush_drained(flush.lane.rail) {
                shared.flush_drained(flush.lane.rail);
            }
        }
    }

    /// Takes what the other end takes for delivered over the stopped lane in a place, and sends its credits another way.
    fn resolve(&mut self, place: usize, theirs: u32) -> Result<(), Fault> {
        let Some(reroute) = &mut self.reroute else { return Ok(()) };
        let late = &mut reroute.lanes[place];
        let mut held = std::mem::take(&mut late.held);
        let number = reroute.settling.number(place);
        let taken = match ahead(reroute.shared.counted(number), theirs, self.depth as usize) {
            Ok(taken) => taken,
            Err(e) => {
                let error = e.context(&self.peer);
                return Err(self.fail(error));
            }
        };
        held.truncate(taken);
        late.owed = taken - held.len();
        for (imm, bytes) in held {
            self.arrived(imm, bytes)?;
        }
        for slot in (0..SLOTS).filter(|slot| self.credits.lane(*slot) == place).collect::<Vec<_>>()
        {
            let Some(reroute) = &self.reroute else { break };
            let Some(other) = reroute.settling.pick(&reroute.shared, place) else { break };
            let number = reroute.settling.number(other);
            self.credits.move_to(slot, other, number);
            let members = usize::from(self.slots[slot].members);
            let awaits = self.slots[slot].is_waiting() && !self.slots[slot].copying;
            self.shape_credit(slot, 1);
            if awaits && let Err(errno) = self.post_credit(slot, members) {
                return Err(self.post_failed("ibv_post_send", errno));
            }
            if awaits {
                let rail = self.lanes[self.credits.lane(slot)].lane.rail % MAX_RAILS;
                self.board.add(board::AGAIN, 1);
                self.board.add(board::POSTS.start + rail, 1);
            }
        }
        Ok(())
    }
}
