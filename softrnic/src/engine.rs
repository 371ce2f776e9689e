//! The requester: runs one send request to its end, or says why it has to wait.

use std::time::Duration;

use crate::abi::*;
use crate::mover::{Direction, Fault, Segs};
use crate::mr::{self, key_index};
use crate::qp::{Connection, Qp, Sq};
use crate::responder::{Message, Place, Scatter, Target};
use crate::shm::layout::QpSlot;
use crate::stats::{self, Counter};
use crate::wqe::Wqe;
use std::sync::atomic::Ordering;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Done.
    Done,
    /// Failed with this completion status.
    Failed(u32),
    /// The receiver has no receive posted; retry within this time (`None`: for ever).
    Rnr(Option<Duration>),
    /// The path does not answer at the moment.
    Silent,
    /// It may not go on yet, for as long as that takes.
    Later,
    /// A part is done, the next attempt does more.
    More,
}

use Verdict::{Done, Failed, Rnr, Silent};

/// What an attempt is to do of a request.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// All that is left after so many bytes of a WRITE, which are in place already.
    Rest(u64),
    /// Only the copy of this part of a WRITE.
    Piece {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// The receiver breaks over it with this status, and completes the receive with that.
    Refusal {
        /// Status of the receive.
        status: u32,
        /// Its vendor code.
        vendor: u32,
    },
}

impl Part {
    /// A piece.
    pub fn of(at: u64, len: u64) -> Self {
        Self::Piece { at, len }
    }

    /// All but the first bytes.
    pub fn from(moved: u64) -> Self {
        Self::Rest(moved)
    }
}

/// Packets of a message: also what it adds to the packet number.
fn packets(len: u64, mtu_code: u32) -> u32 {
    let shift = mtu_code.clamp(1, 5) + 7;
    u32::try_from((len + (1 << shift) - 1) >> shift).unwrap_or(u32::MAX).max(1)
}

impl Qp {
    /// Resolves local scatter/gather entries to addresses.
    fn local(&self, wqe: &Wqe, write: bool) -> Option<Segs> {
        let mut segs = Segs::default();
        if wqe.is_inline() {
            match wqe.inline_copy() {
                Some(bytes) => segs.push(bytes.as_ptr().expose_provenance() as u64, bytes.len()),
                None => wqe.sges().iter().for_each(|s| segs.push(s.addr, s.length as usize)),
            }
            return Some(segs);
        }
        let process = self.process();
        let need = if write { ACCESS_LOCAL_WRITE } else { 0 };
        for sge in wqe.sges().iter().filter(|s| s.length > 0) {
            if sge.lkey >> 24 != process.slot() {
                return None;
            }
            let slot = process.local_mr(key_index(sge.lkey))?;
            let piece =
                mr::check(slot, sge.lkey, self.pd.id, sge.addr, u64::from(sge.length), need)?;
            segs.push(piece.va, sge.length as usize);
        }
        Some(segs)
    }

    /// Runs the request at the head of the send queue. The caller holds the send-queue lock.
    pub fn run(&self, sq: &mut Sq, wqe: &mut Wqe) -> Verdict {
        if wqe.len > u64::from(crate::env::settings().max_msg_sz()) {
            return Failed(WC_LOC_LEN_ERR);
        }
        let atomic = matches!(wqe.opcode, WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD);
        if atomic && wqe.len != 8 {
            return Failed(WC_LOC_LEN_ERR);
        }
        let reads = atomic || wqe.opcode == WR_RDMA_READ;
        if reads && sq.attr.max_rd_atomic == 0 {
            return Failed(WC_LOC_QP_OP_ERR);
        }
        let Some(mut local) = self.local(wqe, reads) else { return Failed(WC_LOC_PROT_ERR) };
        // Taken out for the duration, so that the queue stays mutable without counting references.
        let connection = match sq.connection.take() {
            Some(connection) => connection,
            None => match self.connect(sq) {
                Ok(connection) => connection,
                Err(verdict) => return verdict,
            },
        };
        let verdict = self.run_on(sq, wqe, &mut local, &connection);
        sq.connection = Some(connection);
        verdict
    }

    fn run_on(
        &self,
        sq: &mut Sq,
        wqe: &mut Wqe,
        local: &mut Segs,
        connection: &Connection,
    ) -> Verdict {
        if connection.peer.known_dead() {
            return Failed(WC_RETRY_EXC_ERR);
        }
        let Some(slot) = connection.peer.region.qp(connection.index) else {
            return Failed(WC_RETRY_EXC_ERR);
        };
        let target = Target {
            process: self.process(),
            peer: &connection.peer,
            index: connection.index,
            slot,
        };
        let gates = self.process().region.header().gate.load(Ordering::Relaxed)
            | connection.peer.region.header().gate.load(Ordering::Relaxed);
        if gates != 0 || wqe.fate.is_some() {
            return self.run_watched(sq, wqe, local, &target, connection);
        }
        self.perform(sq, wqe, local, &target, connection, Part::Rest(0))
    }

    /// Performs a part of the request, if the path is open.
    #[cold]
    #[inline(never)]
    pub(crate) fn attempt(
        &self,
        sq: &mut Sq,
        wqe: &Wqe,
        local: &mut Segs,
        target: &Target<'_>,
        to: &Connection,
        part: Part,
    ) -> Verdict {
        self.perform(sq, wqe, local, target, to, part)
    }

    /// The code of `attempt`, once for it and once for whole requests, where all about parts folds away.
    #[inline(always)]
    fn perform(
        &self,
        sq: &mut Sq,
        wqe: &Wqe,
        local: &mut Segs,
        target: &Target<'_>,
        to: &Connection,
        part: Part,
    ) -> Verdict {
        if !self.pd.context.port_up(sq.attr.port_num) || !port_up(target) {
            return Silent;
        }
        // Without payload no system call tells that the target is gone.
        if local.as_slice().is_empty() && !to.peer.runs() {
            return Failed(WC_RETRY_EXC_ERR);
        }
        let process = self.process();
        let guard = target.slot.lock.lock(process.id(), |id| process.fabric.alive(id));
        let verdict = self.serve(sq, wqe, local, target, to, part);
        drop(guard);
        verdict
    }

    /// The target's part, under its responder lock.
    #[inline(always)]
    fn serve(
        &self,
        sq: &mut Sq,
        wqe: &Wqe,
        local: &mut Segs,
        target: &Target<'_>,
        to: &Connection,
        part: Part,
    ) -> Verdict {
        let slot = target.slot;
        if slot.qpn.load(Ordering::Acquire) != to.qpn {
            return Failed(WC_RETRY_EXC_ERR);
        }
        match slot.state.load(Ordering::Acquire) {
            QPS_RTR | QPS_RTS | QPS_SQD => {}
            QPS_RESET | QPS_INIT => return Silent,
            _ => return Failed(WC_RETRY_EXC_ERR),
        }
        if slot.dest_qpn.load(Ordering::Relaxed) != self.qpn()
            || slot.epsn.load(Ordering::Relaxed) != sq.psn
        {
            // Packets for another connection or out of sequence are dropped or refused until the retries are used up.
            return Failed(WC_RETRY_EXC_ERR);
        }
        if slot.comm_est.load(Ordering::Relaxed) == 0 {
            slot.comm_est.store(1, Ordering::Relaxed);
            if slot.state.load(Ordering::Relaxed) == QPS_RTR {
                target.event(EVENT_COMM_EST);
            }
        }
        let count = packets(wqe.len, sq.attr.path_mtu);
        if count > 1 && sq.attr.path_mtu > slot.mtu.load(Ordering::Relaxed) {
            return refuse(target, WC_REM_INV_REQ_ERR);
        }
        let moved = match part {
            Part::Rest(moved) => moved,
            Part::Piece { at, len } => return self.piece(wqe, local, target, at, len),
            Part::Refusal { status, vendor } => {
                return self.refusal(sq, wqe, target, status, vendor);
            }
        };
        let verdict = match wqe.opcode {
            WR_RDMA_WRITE => self.write(wqe, local, target, moved),
            WR_RDMA_WRITE_WITH_IMM => self.write_imm(sq, wqe, local, target, moved),
            WR_SEND | WR_SEND_WITH_IMM => self.send(sq, wqe, local, target),
            WR_RDMA_READ => self.read(wqe, local, target),
            _ => self.atomic(wqe, local, target),
        };
        if verdict == Done {
            sq.psn = sq.psn.wrapping_add(count) & 0x00ff_ffff;
            slot.epsn.store(sq.psn, Ordering::Relaxed);
        }
        verdict
    }

    fn write(&self, wqe: &Wqe, local: &mut Segs, target: &Target<'_>, moved: u64) -> Verdict {
        let mut place = match target.rdma(wqe.rkey, wqe.remote, wqe.len, ACCESS_REMOTE_WRITE) {
            Ok(place) => place,
            Err(nak) => return refuse(target, nak),
        };
        leave_out(moved, local, &mut place);
        if let Err(fault) = target.copy(Direction::Write, local, &mut place) {
            return self.fault(target, fault);
        }
        stats::add(Counter::BytesWritten, wqe.len - moved);
        Done
    }

    /// Copies a part of a WRITE and tells nobody.
    fn piece(&self, wqe: &Wqe, local: &Segs, target: &Target<'_>, at: u64, len: u64) -> Verdict {
        let mut place = match target.rdma(wqe.rkey, wqe.remote, wqe.len, ACCESS_REMOTE_WRITE) {
            Ok(place) => place,
            Err(nak) => return refuse(target, nak),
        };
        place.segs = place.segs.part(at, len);
        if let Err(fault) = target.copy(Direction::Write, &mut local.part(at, len), &mut place) {
            return self.fault(target, fault);
        }
        stats::add(Counter::BytesWritten, len);
        Done
    }

    /// The receiver breaks over the request.
    fn refusal(
        &self,
        sq: &Sq,
        wqe: &Wqe,
        target: &Target<'_>,
        status: u32,
        vendor: u32,
    ) -> Verdict {
        if matches!(wqe.opcode, WR_RDMA_WRITE_WITH_IMM | WR_SEND | WR_SEND_WITH_IMM) {
            let Some(receive) = target.take_receive() else { return rnr(sq, target.slot) };
            let imm = wqe.opcode == WR_RDMA_WRITE_WITH_IMM;
            let message = self.message(wqe, if imm { WC_RECV_RDMA_WITH_IMM } else { WC_RECV });
            target.deliver_as(&receive, status, vendor, &message);
        }
        target.fail(Some(EVENT_QP_FATAL));
        Failed(WC_REM_OP_ERR)
    }

    fn message(&self, wqe: &Wqe, opcode: u32) -> Message {
        let with_imm = matches!(wqe.opcode, WR_RDMA_WRITE_WITH_IMM | WR_SEND_WITH_IMM);
        Message {
            opcode,
            len: u32::try_from(wqe.len).unwrap_or(u32::MAX),
            imm: with_imm.then_some(wqe.imm),
            src_qp: self.qpn(),
            solicited: wqe.flags & SEND_SOLICITED != 0,
        }
    }

    fn write_imm(
        &self,
        sq: &Sq,
        wqe: &Wqe,
        local: &mut Segs,
        target: &Target<'_>,
        moved: u64,
    ) -> Verdict {
        let mut place = match target.rdma(wqe.rkey, wqe.remote, wqe.len, ACCESS_REMOTE_WRITE) {
            Ok(place) => place,
            Err(nak) => return refuse(target, nak),
        };
        let Some(receive) = target.take_receive() else { return rnr(sq, target.slot) };
        let message = self.message(wqe, WC_RECV_RDMA_WITH_IMM);
        leave_out(moved, local, &mut place);
        if let Err(fault) = target.copy(Direction::Write, local, &mut place) {
            target.deliver(&receive, WC_GENERAL_ERR, &message);
            return self.fault(target, fault);
        }
        stats::add(Counter::BytesWritten, wqe.len - moved);
        self.finish(target, target.deliver(&receive, WC_SUCCESS, &message))
    }

    fn send(&self, sq: &Sq, wqe: &Wqe, local: &mut Segs, target: &Target<'_>) -> Verdict {
        let Some(receive) = target.take_receive() else { return rnr(sq, target.slot) };
        let message = self.message(wqe, WC_RECV);
        let mut place = match target.scatter(&receive, wqe.len) {
            Ok(place) => place,
            Err(why) => {
                let (receiver, sender) = match why {
                    Scatter::TooLong => (WC_LOC_LEN_ERR, WC_REM_INV_REQ_ERR),
                    Scatter::BadKey => (WC_LOC_PROT_ERR, WC_REM_OP_ERR),
                };
                target.deliver(&receive, receiver, &message);
                target.fail(None);
                return Failed(sender);
            }
        };
        if let Err(fault) = target.copy(Direction::Write, local, &mut place) {
            target.deliver(&receive, WC_GENERAL_ERR, &message);
            return self.fault(target, fault);
        }
        stats::add(Counter::BytesWritten, wqe.len);
        self.finish(target, target.deliver(&receive, WC_SUCCESS, &message))
    }

    fn read(&self, wqe: &Wqe, local: &mut Segs, target: &Target<'_>) -> Verdict {
        if target.slot.max_dest_rd.load(Ordering::Relaxed) == 0 {
            return refuse(target, WC_REM_INV_REQ_ERR);
        }
        let mut place = match target.rdma(wqe.rkey, wqe.remote, wqe.len, ACCESS_REMOTE_READ) {
            Ok(place) => place,
            Err(nak) => return refuse(target, nak),
        };
        if let Err(fault) = target.copy(Direction::Read, local, &mut place) {
            return self.fault(target, fault);
        }
        stats::add(Counter::BytesRead, wqe.len);
        Done
    }

    fn atomic(&self, wqe: &Wqe, local: &mut Segs, target: &Target<'_>) -> Verdict {
        if target.slot.max_dest_rd.load(Ordering::Relaxed) == 0 || !wqe.remote.is_multiple_of(8) {
            return refuse(target, WC_REM_INV_REQ_ERR);
        }
        let place = match target.rdma(wqe.rkey, wqe.remote, 8, ACCESS_REMOTE_ATOMIC) {
            Ok(place) => place,
            Err(nak) => return refuse(target, nak),
        };
        let swap = wqe.opcode == WR_ATOMIC_CMP_AND_SWP;
        let operation = |old: u64| match swap {
            true if old == wqe.compare => wqe.swap,
            true => old,
            false => old.wrapping_add(wqe.compare),
        };
        match target.atomic(&place, operation) {
            Ok(old) => {
                crate::mover::store_word(local, old);
                Done
            }
            Err(fault) => self.fault(target, fault),
        }
    }

    /// A lost receive completion breaks the target QP, as an overrun CQ does.
    fn finish(&self, target: &Target<'_>, delivered: bool) -> Verdict {
        if delivered {
            return Done;
        }
        target.fail(Some(EVENT_QP_FATAL));
        Failed(WC_REM_OP_ERR)
    }

    fn fault(&self, target: &Target<'_>, fault: Fault) -> Verdict {
        match fault {
            Fault::Local => Failed(WC_LOC_PROT_ERR),
            Fault::Remote => {
                target.fail(Some(EVENT_QP_ACCESS_ERR));
                Failed(WC_REM_OP_ERR)
            }
            Fault::Gone => {
                target.peer.mark_dead();
                Failed(WC_RETRY_EXC_ERR)
            }
            Fault::Refused(errno) => {
                crate::qp::report_refusal(
                    target.peer.pid,
                    &std::io::Error::from_raw_os_error(errno),
                );
                Failed(WC_RETRY_EXC_ERR)
            }
        }
    }
}

/// Leaves out what is in place already.
#[inline]
fn leave_out(moved: u64, local: &mut Segs, place: &mut Place) {
    if moved != 0 {
        let moved = usize::try_from(moved).unwrap_or(usize::MAX);
        local.advance(moved);
        place.segs.advance(moved);
    }
}

/// A negative acknowledgement that also breaks the responder.
fn refuse(target: &Target<'_>, status: u32) -> Verdict {
    target.fail(Some(if status == WC_REM_ACCESS_ERR {
        EVENT_QP_ACCESS_ERR
    } else {
        EVENT_QP_REQ_ERR
    }));
    Failed(status)
}

/// Receiver not ready: how long the retries last.
fn rnr(sq: &Sq, slot: &QpSlot) -> Verdict {
    let delay = crate::qp_state::rnr_delay_us(slot.rnr_timer.load(Ordering::Relaxed));
    match sq.attr.rnr_retry {
        7.. => Rnr(None),
        0 => Failed(WC_RNR_RETRY_EXC_ERR),
        n => Rnr(Some(Duration::from_micros(delay * u64::from(n)))),
    }
}

fn port_up(target: &Target<'_>) -> bool {
    let port = target.slot.port.load(Ordering::Relaxed);
    let ports = target.peer.region.header().ports.get((port >> 8) as usize);
    let index = (port & 0xff).wrapping_sub(1) as usize;
    ports.and_then(|p| p.get(index)).is_some_and(|p| p.state.load(Ordering::Relaxed) == PORT_ACTIVE)
}

#[cfg(test)]
mod tests {
    use super::packets;

    #[test]
    fn packet_counts() {
        assert_eq!(packets(0, 5), 1);
        assert_eq!(packets(4096, 5), 1);
        assert_eq!(packets(4097, 5), 2);
        assert_eq!(packets(1 << 31, 1), 1 << 23);
    }
}
