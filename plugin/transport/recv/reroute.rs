//! What a receiving end does when one of several rails fails, see [`crate::transport::failover`].

use super::{RecvComm, SLOTS};
use crate::error::Fault;
use crate::transport::comm::Ending;
use crate::transport::failover::{Failover, Settling, ahead, failed_by, is_survivable};
use crate::transport::lane::{Kind, WrId};
use crate::transport::stripe::Imm;
use std::collections::VecDeque;
use std::sync::Arc;

/// What is known of lanes that were stopped.
#[derive(Debug)]
pub(super) struct Reroute {
    pub(super) shared: Arc<Failover>,
    lanes: Box<[Late]>,
    settling: Settling,
}

/// What came over a lane after it was stopped here.
#[derive(Debug, Default)]
struct Late {
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
}

impl RecvComm {
    /// Whether a lane was stopped: nothing is posted on it.
    pub(super) fn is_stopped(&self, lane: usize) -> bool {
        self.reroute.as_ref().is_some_and(|reroute| reroute.shared.is_stopped(lane))
    }

    /// Whether all lanes of a local rail were stopped. What they brought is visible: telling the other end took longer
    /// than any write stays under way in this host.
    pub(super) fn is_rail_stopped(&self, rail: usize) -> bool {
        self.reroute.as_ref().is_some_and(|reroute| reroute.shared.is_rail_stopped(rail))
    }

    /// Takes note of completion `index` of the last poll where that is not done as usual. `false`: it is.
    ///
    /// # Errors
    /// What came answers no receive.
    pub(super) fn note_rerouted(&mut self, index: usize) -> Result<bool, Fault> {
        let Some(reroute) = &mut self.reroute else { return Ok(false) };
        let wc = self.pump.wc.get(index);
        let id = WrId(wc.id());
        let lane = id.lane();
        match id.kind() {
            Some(Kind::Receive) if wc.is_success() => {
                if reroute.shared.count(lane) {
                    return Ok(false);
                }
                let end = (Imm(wc.imm()), wc.byte_len());
                // A device may say anything: there need not be such a lane.
                let Some(late) = reroute.lanes.get_mut(lane) else { return Ok(false) };
                if late.owed > 0 {
                    late.owed -= 1;
                    self.arrived(end.0, end.1)?;
                } else if !reroute.settling.is_settled(lane) {
                    late.held.push_back(end);
                    reroute.settling.busy = true;
                }
                // Else it is sent again.
                Ok(true)
            }
            // The credit went another way meanwhile, whose completion counts.
            Some(Kind::Progress) if wc.is_success() => Ok(self.credits.lane(id.slot()) != lane),
            Some(Kind::Receive | Kind::Progress) => {
                let status = wc.status();
                let why = || failed_by(&self.peer, lane, status);
                let stopped = reroute.shared.is_stopped(lane)
                    || (is_survivable(status) && reroute.shared.stop_like(lane, why));
                reroute.settling.busy |= stopped;
                Ok(stopped)
            }
            Some(Kind::Flush) if !wc.is_success() => {
                let status = wc.status();
                let Some(rail) = self.flush.get(lane).map(|flush| flush.lane.rail) else {
                    return Ok(false);
                };
                let why =
                    || format!("{}: flush: {}", self.peer, crate::verbs::cq::status_name(status));
                let stopped = reroute.shared.is_rail_stopped(rail)
                    || (is_survivable(status) && reroute.shared.stop_rail(rail, why));
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
        let Reroute { shared, settling, .. } = &mut **reroute;
        let (done, waiting) = match settling.look(shared, &self.peer, |_| true) {
            Ok(found) => found,
            Err(error) => return Err(self.fail(error)),
        };
        settling.busy = waiting;
        for (lane, theirs) in &done {
            self.resolve(*lane, *theirs)?;
        }
        Ok(!done.is_empty())
    }

    /// Takes what the other end takes for delivered over a stopped lane, and sends its credits another way.
    fn resolve(&mut self, lane: usize, theirs: u32) -> Result<(), Fault> {
        let Some(reroute) = &mut self.reroute else { return Ok(()) };
        let late = &mut reroute.lanes[lane];
        let mut held = std::mem::take(&mut late.held);
        let taken = match ahead(reroute.shared.counted(lane), theirs, self.depth as usize) {
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
        for slot in (0..SLOTS).filter(|slot| self.credits.lane(*slot) == lane).collect::<Vec<_>>() {
            let other = self.reroute.as_ref().and_then(|reroute| reroute.shared.pick(lane));
            let Some(other) = other else { break };
            self.credits.move_to(slot, other);
            let members = usize::from(self.slots[slot].members);
            let awaits = self.slots[slot].is_waiting() && !self.slots[slot].copying;
            self.shape_credit(slot, 1);
            if awaits && let Err(errno) = self.post_credit(slot, members) {
                return Err(self.post_failed("ibv_post_send", errno));
            }
        }
        Ok(())
    }
}
