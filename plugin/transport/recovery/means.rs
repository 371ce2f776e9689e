//! What an end needs to make queue pairs while its connection lives: new lanes, and probes that try a path before.

use crate::config::Settings;
use crate::error::{Error, Result};
use crate::transport::Transport;
use crate::transport::address::place;
use crate::transport::connection::{MIN_RNR_TIMER, Sizes, random};
use crate::transport::device::{OpenDevice, Rail};
use crate::transport::flush;
use crate::transport::receives::receives;
use crate::transport::wire::{Offer, WireLane, WireRail};
use crate::verbs::cq::{Completions, Poller, status_name};
use crate::verbs::qp::{Caps, Ece};
use crate::verbs::sys::access::REMOTE_WRITE;
use crate::verbs::wr::{Flags, Local, Remote, SendChain};
use crate::verbs::{CompletionQueue, QueuePair};
use std::sync::Arc;
use std::time::Duration;

/// What an end keeps of the time when it was connected.
#[derive(Debug)]
pub struct Means {
    /// Settings.
    pub transport: Arc<Transport>,
    /// Its rails, with the addresses that they had last.
    pub rails: Vec<Rail>,
    /// Its completion queues in rail order.
    pub cqs: Vec<Arc<CompletionQueue>>,
    /// Sizes of a lane's queues, with the inline room that every lane has.
    pub sizes: Sizes,
    /// Traffic class of what it sends.
    pub traffic_class: u8,
    /// Service level.
    pub sl: u8,
}

/// A queue pair with the number of its first packet.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) qp: QueuePair,
    psn: u32,
}

/// A queue pair that tries a path, and the completion queue of its own.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) made: Made,
    poller: Poller,
    awaited: u32,
}

impl Means {
    pub(super) fn settings(&self) -> &Settings {
        &self.transport.settings
    }

    /// How a rail is called.
    pub(super) fn label(&self, rail: usize) -> &str {
        &self.rails[rail].device.port.label
    }

    /// Whether a rail is this port.
    pub(super) fn is_port(&self, rail: usize, open: &Arc<OpenDevice>, port: u8) -> bool {
        let rail = &self.rails[rail];
        Arc::ptr_eq(&rail.open, open) && rail.device.port.number == port
    }

    /// Asks for the address that a rail has now.
    ///
    /// # Errors
    /// Its port is not active or has no usable address.
    pub(super) fn refresh(&mut self, rail: usize) -> Result<()> {
        let now = &self.rails[rail];
        if now.open.registry.is_broken() {
            return Err(Error::system(format!("{}: the device failed", now.device.port.label)));
        }
        self.rails[rail] = now.device.use_over(Arc::clone(&now.open), self.settings())?;
        Ok(())
    }

    fn make(&self, rail: usize, cq: &Arc<CompletionQueue>, caps: Caps) -> Result<Made> {
        let rail = &self.rails[rail];
        let qp = QueuePair::new(&rail.open.pd, cq, caps)?;
        qp.to_init(rail.address.port, rail.address.pkey_index, REMOTE_WRITE)?;
        Ok(Made { qp, psn: random() as u32 & 0xff_ffff })
    }

    /// A queue pair for a lane.
    ///
    /// # Errors
    /// A verb fails, or the device grants less inline room than before.
    pub(super) fn lane(&self, rail: usize) -> Result<Made> {
        let Sizes { send, recv, inline, .. } = self.sizes;
        let caps = Caps { max_send_wr: send, max_recv_wr: recv, max_inline_data: inline };
        let made = self.make(rail, &self.cqs[rail], caps)?;
        if made.qp.max_inline() < inline {
            let (label, granted) = (self.label(rail), made.qp.max_inline());
            return Err(Error::system(format!(
                "{label}: {granted} bytes inline instead of {inline}"
            )));
        }
        Ok(made)
    }

    /// Posts the receives of a lane.
    ///
    /// # Errors
    /// The verb fails.
    pub(super) fn post_receives(&self, rail: usize, made: &Made, number: usize) -> Result<()> {
        let mut batch = receives(number, self.sizes.batch);
        for _ in 0..self.sizes.recv / self.sizes.batch {
            let posted = made.qp.post_recv(&mut batch);
            posted.map_err(|errno| Error::verb("ibv_post_recv", self.label(rail), errno))?;
        }
        Ok(())
    }

    /// A queue pair for flushes.
    ///
    /// # Errors
    /// A verb fails.
    pub(super) fn flush(&self, rail: usize) -> Result<QueuePair> {
        flush::queue_pair(&self.rails[rail], &self.cqs[rail], self.settings(), self.sizes.extra)
    }

    /// A queue pair to try the path with.
    ///
    /// # Errors
    /// A verb fails.
    pub(super) fn probe(&self, rail: usize) -> Result<Probe> {
        let depth = self.settings().recovery_sequence;
        let cq = CompletionQueue::new(&self.rails[rail].open.context, depth)?;
        let caps = Caps { max_send_wr: depth, max_recv_wr: 0, max_inline_data: 0 };
        let made = self.make(rail, &cq, caps)?;
        Ok(Probe { made, poller: Poller::new(cq), awaited: 0 })
    }

    /// Queue pairs for the other end.
    pub(super) fn offer<'a>(&self, rail: usize, made: impl IntoIterator<Item = &'a Made>) -> Offer {
        let ece = |qp: &QueuePair| {
            let ece = if self.settings().ece_enable { qp.query_ece() } else { None };
            ece.map_or([0; 3], |ece| [ece.vendor_id, ece.options, ece.comp_mask])
        };
        let queue =
            |made: &Made| WireLane { qpn: made.qp.number(), psn: made.psn, ece: ece(&made.qp) };
        Offer {
            rail: self.rails[rail].address.wire(0),
            queues: made.into_iter().map(queue).collect(),
        }
    }

    /// Connects a lane.
    ///
    /// # Errors
    /// A verb fails, or the ports cannot talk.
    pub(super) fn connect(
        &self,
        rail: usize,
        made: &Made,
        port: &WireRail,
        queue: &WireLane,
    ) -> Result<()> {
        let Settings { timeout, retry_cnt, .. } = *self.settings();
        self.join(rail, made, port, queue, (timeout, retry_cnt))
    }

    /// Connects a probe, which asks again soon, and as often as can be.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub(super) fn connect_probe(&self, rail: usize, probe: &Probe, theirs: &Offer) -> Result<()> {
        let [queue] = &theirs.queues[..] else {
            return Err(Error::remote(format!(
                "{} queue pairs to try a path",
                theirs.queues.len()
            )));
        };
        let often = (timeout_code(self.settings().recovery_interval), 7);
        self.join(rail, &probe.made, &theirs.rail, queue, often)
    }

    fn join(
        &self,
        rail: usize,
        made: &Made,
        port: &WireRail,
        queue: &WireLane,
        (timeout, retry_cnt): (u8, u8),
    ) -> Result<()> {
        let address = &self.rails[rail].address;
        let [vendor_id, options, comp_mask] = queue.ece;
        let ece = Ece { vendor_id, options, comp_mask };
        if self.settings().ece_enable && ece != Ece::default() {
            made.qp.set_ece(ece)?;
        }
        let path = address.path(port, queue.qpn, queue.psn, self.traffic_class, self.sl)?;
        made.qp
            .to_rtr(&path, MIN_RNR_TIMER)
            .map_err(|e| e.context(self.text(rail, made, port, queue)))?;
        made.qp.to_rts(made.psn, timeout, retry_cnt)
    }

    /// Both queue pairs of a lane and their addresses.
    pub(super) fn text(
        &self,
        rail: usize,
        made: &Made,
        port: &WireRail,
        queue: &WireLane,
    ) -> String {
        let here = place(&self.rails[rail].address.wire(0), made.qp.number());
        format!("{} {here} to {}", self.label(rail), place(port, queue.qpn))
    }
}

impl Probe {
    /// Sends `count` messages without data, each of which is acknowledged by the other end's device alone.
    ///
    /// # Errors
    /// The verb fails.
    pub(super) fn send(&mut self, count: u32) -> Result<()> {
        let mut chain = SendChain::new(count as usize);
        let (nothing, nowhere) = (Local { addr: 0, len: 0, lkey: 0 }, Remote { addr: 0, rkey: 0 });
        for index in 0..count as usize {
            chain.write(index, index as u64, nothing, nowhere, Flags::SIGNALED);
        }
        self.awaited = count;
        let posted = self.made.qp.post_send(&mut chain, count as usize);
        posted.map_err(|errno| Error::verb("ibv_post_send", "a probe", errno))
    }

    /// Whether all were acknowledged.
    ///
    /// # Errors
    /// One was not, in as many attempts as there are.
    pub(super) fn look(&mut self) -> Result<bool> {
        let mut wc = Completions::new();
        loop {
            match usize::try_from(self.poller.poll(&mut wc)) {
                Ok(0) => return Ok(self.awaited == 0),
                Ok(found) => {
                    let failed = (0..found).map(|index| wc.get(index)).find(|wc| !wc.is_success());
                    if let Some(wc) = failed {
                        let status = status_name(wc.status());
                        return Err(Error::remote(format!(
                            "the path is not well: IBV_WC_{status}"
                        )));
                    }
                    self.awaited = self.awaited.saturating_sub(found as u32);
                }
                Err(_) => return Err(Error::system("ibv_poll_cq failed for a probe")),
            }
        }
    }
}

/// The longest time-out of a queue pair that is not longer than this.
fn timeout_code(interval: Duration) -> u8 {
    let of = |code: &u8| Duration::from_nanos(4096 << code);
    (1..=31).take_while(|code| of(code) <= interval).last().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_outs_are_rounded_down() {
        assert_eq!(timeout_code(Duration::from_millis(500)), 16);
        assert_eq!(timeout_code(Duration::from_millis(537)), 17);
        assert_eq!(timeout_code(Duration::ZERO), 1);
        assert_eq!(timeout_code(Duration::from_secs(1 << 20)), 31);
    }
}
