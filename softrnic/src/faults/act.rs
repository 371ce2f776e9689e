//! How a request fares that a rule concerns, or that the stepped engine takes apart.
//!
//! A request is shown to the rules once, when it first reaches the head of its queue with its connection standing. What
//! comes out of that, its fate, stays with it over all attempts.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use super::rule::{Action, Facts, Side, Stage, WRITES};
use super::table::{self, Firing, STEPPED};
use super::timers;
use crate::abi::*;
use crate::engine::{Part, Verdict};
use crate::env::Engine;
use crate::inject;
use crate::mover::{self, Segs};
use crate::qp::{Connection, Qp, Sq};
use crate::responder::Target;
use crate::rng::Rng;
use crate::trace::{self, What};
use crate::wqe::Wqe;

use Verdict::{Done, Failed, Later, More, Silent};

/// Most pieces that the stepped engine cuts a payload into.
const MOST_PIECES: u64 = 8;

/// Requests that were finished under the eyes of a plan, in the whole process.
static FINISHED: AtomicU64 = AtomicU64::new(0);

/// What becomes of a request.
#[derive(Clone, Debug, Default)]
pub struct Fate {
    /// The rule that fires, and on whose side.
    firing: Option<(Side, Firing)>,
    /// Whether the request has got as far as the rule lets it, and whether the rule has acted then.
    reached: bool,
    acted: bool,
    /// When a delay ends, and by how many finished requests.
    until: u64,
    count: u64,
    /// Bytes from the start of the payload that are in place for good.
    moved: u64,
    /// Pieces that are still to be copied, the next one last; `None` before the payload was cut.
    pieces: Option<Vec<(u64, u64)>>,
    /// A changed payload that is sent instead.
    payload: Option<Box<[u8]>>,
}

impl Fate {
    /// The rule's `vendor_err` for a request that ends with its status.
    pub fn vendor(&self, ended: u32) -> Option<u32> {
        match self.firing {
            Some((Side::Local, Firing { action: Action::Status { status, vendor }, .. }))
                if u32::from(status) == ended =>
            {
                vendor
            }
            _ => None,
        }
    }
}

/// Where a request is to go.
#[derive(Clone, Copy)]
struct Way<'a> {
    target: &'a Target<'a>,
    to: &'a Connection,
}

impl Qp {
    /// Runs a request under the eyes of the plan. The caller holds the send-queue lock.
    #[cold]
    pub(crate) fn run_watched(
        &self,
        sq: &mut Sq,
        wqe: &mut Wqe,
        local: &mut Segs,
        target: &Target<'_>,
        to: &Connection,
    ) -> Verdict {
        let way = Way { target, to };
        let mut fate = match wqe.fate.take() {
            Some(fate) => fate,
            None => Box::new(self.examine(sq, wqe, target)),
        };
        if let Some(bytes) = &fate.payload {
            *local = Segs::default();
            local.push(bytes.as_ptr().expose_provenance() as u64, bytes.len());
        }
        let verdict = self.follow(&mut fate, sq, wqe, local, way);
        if verdict == Done {
            FINISHED.fetch_add(1, Ordering::Relaxed);
        }
        wqe.fate = Some(fate);
        verdict
    }

    fn examine(&self, sq: &Sq, wqe: &Wqe, target: &Target<'_>) -> Fate {
        let process = self.process();
        let byte = |n: usize| u8::try_from(n).unwrap_or(u8::MAX);
        let facts = Facts {
            side: Side::Local,
            device: byte(self.pd.context.device.index),
            port: sq.attr.port_num,
            qpn: self.qpn(),
            ordinal: self.ordinal,
            op: 1 << wqe.opcode,
            bytes: wqe.len,
        };
        let port = target.slot.port.load(Ordering::Relaxed);
        let there = Facts {
            side: Side::Remote,
            device: byte((port >> 8) as usize),
            port: byte((port & 0xff) as usize),
            qpn: target.slot.qpn.load(Ordering::Relaxed),
            ordinal: target.slot.ordinal.load(Ordering::Relaxed),
            ..facts
        };
        // Both sides count, whatever the other says; the sender's rules come first.
        let ours = table::examine(process, &process.region, &facts, true).map(|f| (Side::Local, f));
        let theirs = table::examine(process, &target.peer.region, &there, ours.is_none())
            .map(|f| (Side::Remote, f));
        let firing = ours.or(theirs);
        if let Some((_, f)) = &firing {
            trace::add(What::Fault, self.ordinal, wqe.counter, u64::from(f.rule), f.time);
        }
        Fate { firing, ..Fate::default() }
    }

    fn follow(
        &self,
        fate: &mut Fate,
        sq: &mut Sq,
        wqe: &Wqe,
        local: &mut Segs,
        way: Way<'_>,
    ) -> Verdict {
        let Some((side, firing)) = fate.firing else {
            return self.carry(fate, sq, wqe, local, way);
        };
        // What breaks a completion queue of the sender has to let the request happen first.
        let own_cq = firing.action == Action::CqOverrun && side == Side::Local;
        let stage = if own_cq { Stage::End } else { firing.stage };
        if !fate.reached {
            let verdict = match stage {
                Stage::Start => Done,
                Stage::Half => self.first(fate, wqe.len / 2, sq, wqe, local, way),
                Stage::Payload => self.first(fate, wqe.len, sq, wqe, local, way),
                Stage::End => self.carry(fate, sq, wqe, local, way),
            };
            if verdict != Done {
                return verdict;
            }
            fate.reached = true;
        }
        if !fate.acted {
            fate.acted = true;
            self.act(fate, side, firing, wqe, local, way);
        }
        match (firing.action, side) {
            (Action::Status { status, .. }, Side::Local) => return Failed(u32::from(status)),
            (Action::Status { status, vendor }, Side::Remote) if stage != Stage::End => {
                let vendor = vendor.unwrap_or(0x100 | u32::from(status));
                return self.answer(u32::from(status), vendor, sq, wqe, way);
            }
            (Action::Drop, _) => return Silent,
            (Action::KillQp | Action::DeviceFatal, Side::Local) => return Failed(WC_WR_FLUSH_ERR),
            (Action::Delay { .. }, _) if crate::clock::now() < fate.until => return Later,
            (Action::Behind { .. }, _)
                if crate::clock::now() < fate.until
                    && FINISHED.load(Ordering::Relaxed) < fate.count =>
            {
                return Later;
            }
            _ => {}
        }
        if stage == Stage::End {
            return Done;
        }
        let kept = local.clone();
        let verdict = self.carry(fate, sq, wqe, local, way);
        if let (Action::Corrupt { bytes }, WR_RDMA_READ, Done) =
            (firing.action, wqe.opcode, verdict)
        {
            let mut payload = mover::gather(&kept);
            corrupt(&mut payload, bytes, firing.rng);
            mover::store(&payload, kept);
        }
        verdict
    }

    /// What a rule does once, besides deciding how the request ends.
    fn act(
        &self,
        fate: &mut Fate,
        side: Side,
        firing: Firing,
        wqe: &Wqe,
        local: &mut Segs,
        way: Way<'_>,
    ) {
        let process = self.process();
        let slot = way.target.slot;
        let there = slot.port.load(Ordering::Relaxed);
        let (peer, device, port, qpn) = match side {
            Side::Local => {
                let port = u32::from(self.slot_port());
                (process.own(), self.pd.context.device.index, port, self.qpn())
            }
            Side::Remote => (&way.to.peer, (there >> 8) as usize, there & 0xff, way.to.qpn),
        };
        let port = u8::try_from(port).unwrap_or(0);
        let now = crate::clock::now();
        // Nothing below can fail but for an object that is just going: then there is nothing left to break.
        match firing.action {
            Action::Delay { ns } => fate.until = now.saturating_add(ns),
            Action::Behind { count, ns } => {
                fate.until = now.saturating_add(ns);
                fate.count = FINISHED.load(Ordering::Relaxed) + u64::from(count);
            }
            Action::Corrupt { bytes } if wqe.opcode != WR_RDMA_READ => {
                let mut payload = mover::gather(local);
                corrupt(&mut payload, bytes, firing.rng);
                let payload = fate.payload.insert(payload.into_boxed_slice());
                *local = Segs::default();
                local.push(payload.as_ptr().expose_provenance() as u64, payload.len());
            }
            Action::KillQp if side == Side::Local => {
                self.pd.context.raise(EVENT_QP_FATAL, qpn, 0);
            }
            Action::KillQp => {
                let _ = inject::kill_qp(process, peer, qpn);
            }
            Action::CqOverrun => {
                let there = slot.recv_cq.load(Ordering::Relaxed);
                inject::break_cq(
                    peer,
                    if side == Side::Local { self.send_cq.index } else { there },
                );
            }
            Action::PortDown { ns } => {
                let _ = inject::port(peer, device, port, false);
                if let Some(ns) = ns {
                    timers::port_up(now.saturating_add(ns), peer, device, port);
                    self.process().assist.wake(self.process());
                }
            }
            Action::Gid { index, gid } => {
                let _ = inject::gid(peer, device, port, index, Gid { raw: gid });
            }
            Action::DeviceFatal => {
                let _ = inject::device_fatal(process, peer, device);
            }
            Action::Status { .. } if side == Side::Remote && firing.stage == Stage::End => {
                let _ = inject::kill_qp(process, peer, qpn);
            }
            _ => {}
        }
    }

    fn slot_port(&self) -> u8 {
        u8::try_from(self.slot().port.load(Ordering::Relaxed) & 0xff).unwrap_or(0)
    }

    /// Puts the first bytes of a payload in place, and nothing else. Other requests than WRITEs do not move any yet.
    fn first(
        &self,
        fate: &mut Fate,
        bytes: u64,
        sq: &mut Sq,
        wqe: &Wqe,
        local: &Segs,
        way: Way<'_>,
    ) -> Verdict {
        if !is_write(wqe) || bytes == 0 {
            return Done;
        }
        let verdict =
            self.attempt(sq, wqe, &mut local.clone(), way.target, way.to, Part::of(0, bytes));
        if verdict == Done {
            fate.moved = bytes;
        }
        verdict
    }

    /// The ordinary course of a request, in pieces if there is a reason for them.
    fn carry(
        &self,
        fate: &mut Fate,
        sq: &mut Sq,
        wqe: &Wqe,
        local: &mut Segs,
        way: Way<'_>,
    ) -> Verdict {
        if fate.pieces.is_none() {
            fate.pieces = Some(self.cut(fate, sq, wqe));
        }
        while let Some((at, len)) = fate.pieces.as_ref().and_then(|p| p.last().copied()) {
            let mut from = local.clone();
            let part = Part::of(at, len);
            let verdict = self.attempt(sq, wqe, &mut from, way.target, way.to, part);
            if verdict != Done {
                return verdict;
            }
            if self.engine == Engine::Stepped {
                trace::add(What::Piece, self.ordinal, wqe.counter, at, len);
            }
            if let Some(pieces) = &mut fate.pieces {
                pieces.pop();
                if pieces.is_empty() {
                    fate.moved = wqe.len;
                }
            }
            if self.engine != Engine::Inline {
                return More;
            }
        }
        self.attempt(sq, wqe, local, way.target, way.to, Part::from(fate.moved))
    }

    /// Cuts what is left of a payload into pieces, in the order in which they are taken off the end of the list.
    fn cut(&self, fate: &Fate, sq: &Sq, wqe: &Wqe) -> Vec<(u64, u64)> {
        let packet = 128_u64 << sq.attr.path_mtu.clamp(1, 5);
        let left = wqe.len - fate.moved;
        let stepped = self.process().region.header().gate.load(Ordering::Relaxed) & STEPPED != 0;
        let (piece, mut rng) = match fate.firing {
            Some((_, Firing { action: Action::Shuffle { piece }, rng, .. })) => {
                (if piece == 0 { packet } else { u64::from(piece) }, rng)
            }
            // A piece is a number of packets.
            _ if stepped => {
                let packets = left.div_ceil(packet).div_ceil(MOST_PIECES).max(1);
                (packets * packet, crate::stepped::draw())
            }
            _ => return Vec::new(),
        };
        if !is_write(wqe) || left <= piece {
            return Vec::new();
        }
        let cuts = (0..left.div_ceil(piece)).map(|i| i * piece);
        let mut pieces: Vec<(u64, u64)> =
            cuts.map(|at| (fate.moved + at, piece.min(left - at))).collect();
        rng.shuffle(&mut pieces);
        pieces
    }

    /// The receiver's queue pair breaks over a request: what it would have received completes with an error.
    fn answer(&self, status: u32, vendor: u32, sq: &mut Sq, wqe: &Wqe, way: Way<'_>) -> Verdict {
        self.attempt(
            sq,
            wqe,
            &mut Segs::default(),
            way.target,
            way.to,
            Part::Refusal { status, vendor },
        )
    }
}

fn is_write(wqe: &Wqe) -> bool {
    WRITES & 1_u16.checked_shl(wqe.opcode).unwrap_or(0) != 0
}

/// Changes so many bytes, or all if there are fewer.
fn corrupt(payload: &mut [u8], bytes: u32, mut rng: Rng) {
    let wanted = (bytes as usize).min(payload.len());
    let mut places = BTreeSet::new();
    if wanted == payload.len() {
        places.extend(0..wanted);
    }
    while places.len() < wanted {
        places.insert(usize::try_from(rng.below(payload.len() as u64)).unwrap_or(0));
    }
    for place in places {
        if let Some(byte) = payload.get_mut(place) {
            // Never zero, so the byte really changes.
            *byte ^= u8::try_from(1 + rng.below(255)).unwrap_or(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_so_many_bytes_change() {
        for (len, bytes, changed) in [(100, 1, 1), (100, 37, 37), (8, 8, 8), (8, 100, 8), (0, 3, 0)]
        {
            let mut payload = vec![0x5a_u8; len];
            corrupt(&mut payload, bytes, Rng::new(u64::from(bytes)));
            assert_eq!(payload.iter().filter(|b| **b != 0x5a).count(), changed);
        }
    }
}
