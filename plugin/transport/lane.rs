//! A lane: one queue pair of a connection with the accounting of its send queue.
//!
//! A slot of a send queue is free again only when a signalled work request posted after it has completed. So every
//! signalled request carries its position, counted since the lane was made, and its completion frees everything up to
//! there. A post is made only when there is room; the device's own "queue full" is never provoked.
//!
//! Work requests that belong to one of the receives in flight need no counting: there is at most one per receive, and
//! the queue has slots set aside for all of them.

use crate::verbs::QueuePair;
use crate::verbs::qp::Fuse;
use crate::verbs::wr::SendChain;

/// The part of a lane's number that is its place among the lanes of its connection, see [`super::failover`].
pub const PLACE: usize = 0x7f;

/// What a completion is about, packed into a work request identifier.
///
/// Bits 0–31 the position on its lane, 32–39 a slot or request, 40–47 the number of the lane, 48–55 the chunk that it
/// empties and one, or 0, 56–63 the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrId(pub u64);

/// Kinds of completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The only work request of a one-member send; the slot is that of its receive.
    Single,
    /// The last work request of one part of a send.
    Part,
    /// Only frees send queue slots.
    Progress,
    /// A receive was consumed.
    Receive,
    /// A flush read.
    Flush,
    /// The only read of a flush on one rail; the slot is its number.
    UsualFlush,
    /// A credit, where rails may fail.
    Credit,
}

impl WrId {
    /// Packs an identifier.
    #[inline(always)]
    pub fn new(kind: Kind, lane: usize, slot: usize, position: u32) -> Self {
        let kind = match kind {
            Kind::Part => 1,
            Kind::Progress => 2,
            Kind::Receive => 3,
            Kind::Flush => 4,
            Kind::Single => 5,
            Kind::UsualFlush => 6,
            Kind::Credit => 7,
        };
        Self(
            kind << 56
                | (lane as u64 & 0xff) << 40
                | (slot as u64 & 0xff) << 32
                | u64::from(position),
        )
    }

    /// The same, for a work request that sends from chunk number `chunk` of the copies.
    pub fn with_chunk(self, chunk: usize) -> Self {
        Self(self.0 | ((chunk as u64 + 1) & 0xff) << 48)
    }

    /// The chunk that is free again.
    pub fn chunk(self) -> Option<usize> {
        ((self.0 >> 48 & 0xff) as usize).checked_sub(1)
    }

    /// Whether it is of this kind.
    #[inline(always)]
    pub fn is(self, kind: Kind) -> bool {
        self.0 >> 56 == Self::new(kind, 0, 0, 0).0 >> 56
    }

    /// 0 if it is of this kind.
    #[inline(always)]
    pub fn unlike(self, kind: Kind) -> u32 {
        (self.0 >> 56) as u32 ^ (Self::new(kind, 0, 0, 0).0 >> 56) as u32
    }

    /// The kind; `None` for an identifier that this plugin did not make.
    #[inline(always)]
    pub fn kind(self) -> Option<Kind> {
        match self.0 >> 56 {
            1 => Some(Kind::Part),
            2 => Some(Kind::Progress),
            3 => Some(Kind::Receive),
            4 => Some(Kind::Flush),
            5 => Some(Kind::Single),
            6 => Some(Kind::UsualFlush),
            7 => Some(Kind::Credit),
            _ => None,
        }
    }

    /// The number of the lane.
    #[inline(always)]
    pub fn lane(self) -> usize {
        (self.0 >> 40 & 0xff) as usize
    }

    /// The place of the lane.
    #[inline(always)]
    pub fn place(self) -> usize {
        self.lane() & PLACE
    }

    /// The slot or request.
    #[inline(always)]
    pub fn slot(self) -> usize {
        (self.0 >> 32 & 0xff) as usize
    }

    /// The position.
    #[inline(always)]
    pub fn position(self) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is taken on purpose")]
        let low = self.0 as u32;
        low
    }
}

/// One queue pair of a connection.
#[derive(Debug)]
pub struct Lane {
    qp: QueuePair,
    /// Index of the local rail.
    pub rail: usize,
    /// Index of the peer's rail at the other end.
    pub remote_rail: usize,
    posted: u32,
    completed: u32,
    depth: u32,
}

impl Lane {
    /// A lane over a connected or connecting queue pair with `depth` counted slots of its send queue.
    pub fn new(qp: QueuePair, rail: usize, remote_rail: usize, depth: u32) -> Self {
        Self { qp, rail, remote_rail, posted: 0, completed: 0, depth }
    }

    /// The queue pair.
    #[inline(always)]
    pub fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// What ends the queue pair from another thread.
    pub fn fuse(&mut self) -> Fuse {
        self.qp.fuse()
    }

    /// Goes on with another queue pair, which nothing was posted on; gives the one before, whose work is all done.
    pub fn renew(&mut self, qp: QueuePair) -> QueuePair {
        (self.posted, self.completed) = (0, 0);
        std::mem::replace(&mut self.qp, qp)
    }

    /// Whether all that was posted and counted has completed.
    pub fn is_idle(&self) -> bool {
        self.posted == self.completed
    }

    /// Send queue slots that are free.
    #[inline(always)]
    pub fn room(&self) -> u32 {
        self.depth - self.posted.wrapping_sub(self.completed)
    }

    /// The position of the `ahead`-th work request posted from now on, from 0.
    #[inline(always)]
    pub fn position(&self, ahead: usize) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "chains are far shorter than 2^32")]
        let ahead = ahead as u32;
        self.posted.wrapping_add(ahead).wrapping_add(1)
    }

    /// Posts the first `count` entries of `chain`; the caller saw that there is room.
    ///
    /// # Errors
    /// The errno of ibv_post_send.
    #[inline(always)]
    pub fn post(&mut self, chain: &mut SendChain, count: usize) -> Result<(), i32> {
        self.qp.post_send(chain, count)?;
        #[expect(clippy::cast_possible_truncation, reason = "chains are far shorter than 2^32")]
        let count = count as u32;
        self.posted = self.posted.wrapping_add(count);
        Ok(())
    }

    /// Whether the send queue is full.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.posted.wrapping_sub(self.completed) == self.depth
    }

    /// The position of the next work request.
    #[inline(always)]
    pub fn next_position(&self) -> u32 {
        self.posted.wrapping_add(1)
    }

    /// The work request at `position` completed, and with it all before.
    #[inline(always)]
    pub fn complete(&mut self, position: u32) {
        self.completed = position;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_round_trip() {
        let kinds =
            [Kind::Single, Kind::Part, Kind::Progress, Kind::Receive, Kind::Flush, Kind::Credit];
        for kind in kinds {
            for (lane, slot, position) in [(0, 0, 0), (127, 31, u32::MAX), (255, 255, 7)] {
                let id = WrId::new(kind, lane, slot, position);
                assert_eq!(
                    (id.kind(), id.lane(), id.slot(), id.position()),
                    (Some(kind), lane, slot, position)
                );
            }
        }
        let id = WrId::new(Kind::Part, 5, 6, 7);
        assert_eq!(id.chunk(), None);
        assert_eq!((id.with_chunk(15).chunk(), id.with_chunk(0).chunk()), (Some(15), Some(0)));
        assert_eq!((id.with_chunk(15).kind(), id.with_chunk(15).lane()), (Some(Kind::Part), 5));
        assert_eq!((id.unlike(Kind::Part), WrId(0).kind()), (0, None));
        assert_ne!(id.unlike(Kind::Single), 0);
        assert!(id.is(Kind::Part) && !id.is(Kind::Single));
        assert_eq!(WrId(u64::MAX).kind(), None);
    }
}
