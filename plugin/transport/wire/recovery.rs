//! What the two ends say about bringing a rail back, see [`crate::transport::recovery`].

use super::{Reader, WireLane, WireRail, Writer};
use crate::error::{Error, Result};

/// One step of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Receiver: nothing is left of the lanes that were stopped, and its port is up.
    Settled,
    /// Sender: the queue pair that it will try the path with.
    Probe(Offer),
    /// Receiver: the other end of that, ready.
    Answer(Offer),
    /// Sender: the path is well, and these are its new queue pairs, in the order of their lanes.
    Lanes(Offer),
    /// Receiver: the other ends of those, ready, with receives posted.
    Ready(Offer),
    /// Sender: its ends are ready too.
    InUse,
    /// Either: this attempt is over, and why.
    Failed(String),
}

/// Queue pairs of one end, and the address of their port as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The port; what memory it reaches is as it was, so that the key means nothing.
    pub rail: WireRail,
    /// The queue pairs, at least one.
    pub queues: Vec<WireLane>,
}

impl Writer {
    pub(super) fn step(&mut self, step: &Step) {
        let mut offer = |kind, offer: &Offer| {
            self.u8(kind);
            self.rail(&offer.rail);
            self.lanes(&offer.queues);
        };
        match step {
            Step::Settled => self.u8(1),
            Step::Probe(o) => offer(2, o),
            Step::Answer(o) => offer(3, o),
            Step::Lanes(o) => offer(4, o),
            Step::Ready(o) => offer(5, o),
            Step::InUse => self.u8(6),
            Step::Failed(why) => {
                self.u8(7);
                self.text(why, 1024);
            }
        }
    }
}

impl Reader<'_> {
    pub(super) fn step(&mut self) -> Result<Step> {
        Ok(match self.u8()? {
            1 => Step::Settled,
            2 => Step::Probe(self.offer()?),
            3 => Step::Answer(self.offer()?),
            4 => Step::Lanes(self.offer()?),
            5 => Step::Ready(self.offer()?),
            6 => Step::InUse,
            7 => Step::Failed(self.text()?),
            other => {
                return Err(Error::remote(format!("an unknown step {other} of a recovery")));
            }
        })
    }

    fn offer(&mut self) -> Result<Offer> {
        Ok(Offer { rail: self.rail()?, queues: self.lanes()? })
    }
}
