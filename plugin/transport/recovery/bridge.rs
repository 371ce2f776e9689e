//! Two rails that failed for each other, on their way back: which step of an attempt comes next.

use super::means::{Made, Means, Probe};
use crate::error::{Error, Result};
use crate::transport::failover::{Failover, Fresh};
use crate::transport::way::OTHER;
use crate::transport::wire::{Message, Offer, Step};
use std::time::{Duration, Instant};

/// The longest pause between attempts, unless the first one is longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A rail that fails again within this time of its return was not well.
const SOUND: Duration = Duration::from_secs(60);

/// Two rails and the lanes between them.
#[derive(Debug)]
pub(super) struct Bridge {
    sends: bool,
    /// This end's, and the other's.
    rails: (usize, usize),
    places: Vec<usize>,
    stage: Stage,
    /// The sender's number of the last attempt.
    attempt: u32,
    /// Attempts in a row that failed.
    failures: u32,
    /// Of a sender: the receiver has nothing left of the lost lanes.
    willing: bool,
    /// When it came back.
    used: Option<Instant>,
}

#[derive(Debug)]
enum Stage {
    /// The lanes are in use, as far as is known here.
    InUse,
    /// Nothing is done before this time.
    Resting(Instant),
    /// Receiver: the sender may begin, or has begun.
    Willing(Option<Probe>),
    /// Sender: the receiver was told of a probe, and answers by then.
    Asked(Probe, Instant),
    /// Sender: the probe is under way, since when.
    Trying(Probe, Instant),
    /// Sender: the receiver was told of new queue pairs.
    Offered(Vec<Made>),
    /// Receiver: lanes are ready, and their other ends are not yet known to be.
    Confirming,
    /// Sender: enough attempts failed.
    GivenUp,
}

impl Bridge {
    pub(super) fn new(rails: (usize, usize), place: usize, sends: bool) -> Self {
        Self {
            sends,
            rails,
            places: vec![place],
            stage: Stage::InUse,
            attempt: 0,
            failures: 0,
            willing: false,
            used: None,
        }
    }

    /// Another lane between the same rails.
    pub(super) fn add(&mut self, place: usize) {
        self.places.push(place);
    }

    /// This end's rail, and the other's.
    pub(super) fn rails(&self) -> (usize, usize) {
        self.rails
    }

    /// The sender's rail, and the receiver's.
    pub(super) fn wire_rails(&self) -> (usize, usize) {
        let (ours, theirs) = self.rails;
        if self.sends { (ours, theirs) } else { (theirs, ours) }
    }

    fn say(&self, failover: &Failover, step: Step) {
        let (senders, receivers) = self.wire_rails();
        let rails = (senders as u8, receivers as u8);
        failover.mail().post(Message::Recovery { rails, attempt: self.attempt, step });
    }

    fn name(&self, failover: &Failover, means: &Means) -> String {
        format!(
            "{}: {} to rail {} of the peer",
            failover.peer(),
            means.label(self.rails.0),
            self.rails.1
        )
    }

    fn is_drained(&self, failover: &Failover) -> bool {
        self.places.iter().all(|place| failover.is_drained(failover.number(*place)))
            && failover.is_flush_drained(self.rails.0)
    }

    /// The numbers that new lanes would have.
    fn next_numbers(&self, failover: &Failover) -> Vec<usize> {
        self.places.iter().map(|place| failover.number(*place) ^ OTHER).collect()
    }

    /// Notices that lanes were stopped.
    fn notice(&mut self, failover: &Failover, means: &Means, now: Instant) {
        let mut numbers = self.places.iter().map(|place| failover.number(*place));
        let stopped = numbers.any(|number| failover.is_stopped(number));
        if !stopped || !matches!(self.stage, Stage::InUse | Stage::Confirming) {
            return;
        }
        let soon = self.used.is_some_and(|used| now.duration_since(used) < SOUND);
        self.failures = if soon { self.failures + 1 } else { 0 };
        // A receiver only waits until it has nothing left.
        self.stage = Stage::Resting(if self.sends { now + self.pause(means) } else { now });
        if self.sends && self.failures >= means.settings().recovery_attempts {
            self.give_up(failover, means, "it failed again soon after it came back");
        }
    }

    fn pause(&self, means: &Means) -> Duration {
        let first = means.settings().recovery_start_delay;
        let more = first.max(Duration::from_millis(1)) * (1 << self.failures.min(16));
        if self.failures == 0 { first } else { more.min(LONGEST_PAUSE.max(first)) }
    }

    fn give_up(&mut self, failover: &Failover, means: &Means, why: &str) {
        self.stage = Stage::GivenUp;
        tracing::warn!(
            "{}: {why}; it stays unused after {} attempts in a row \
             (NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX), unless a port of it comes up",
            self.name(failover, means),
            self.failures
        );
    }

    /// Of a sender: this attempt failed.
    fn fail(&mut self, failover: &Failover, means: &Means, why: &str) {
        self.failures += 1;
        if self.failures >= means.settings().recovery_attempts {
            return self.give_up(failover, means, why);
        }
        let pause = self.pause(means);
        self.stage = Stage::Resting(Instant::now() + pause);
        tracing::info!("{}: not back yet: {why}; again in {pause:?}", self.name(failover, means));
    }

    /// A port came up here, or the other end says that it has nothing left and its port is up.
    pub(super) fn hurry(&mut self, means: &Means) {
        let soon = Instant::now() + means.settings().recovery_start_delay;
        match &mut self.stage {
            Stage::Resting(until) => *until = soon.min(*until),
            Stage::GivenUp => {
                self.failures = 0;
                self.stage = Stage::Resting(soon);
            }
            Stage::Willing(None) => self.stage = Stage::Resting(soon),
            _ => {}
        }
    }

    /// Goes on with what is due; when to look again.
    pub(super) fn go_on(
        &mut self,
        failover: &Failover,
        means: &mut Means,
        now: Instant,
    ) -> Option<Instant> {
        self.notice(failover, means, now);
        match &mut self.stage {
            Stage::Resting(until) if now < *until => Some(*until),
            Stage::Resting(_) => {
                if !self.is_drained(failover) || (self.sends && !self.willing) {
                    return None;
                }
                if let Err(e) = means.refresh(self.rails.0) {
                    // Costs no attempt: the other end was not asked for anything.
                    let until = now + self.pause(means).max(means.settings().recovery_interval);
                    tracing::debug!("{}: not back yet: {e}", self.name(failover, means));
                    self.stage = Stage::Resting(until);
                    return Some(until);
                }
                if self.sends {
                    return self.ask(failover, means, now);
                }
                self.say(failover, Step::Settled);
                self.stage = Stage::Willing(None);
                None
            }
            Stage::Asked(_, until) if now < *until => Some(*until),
            Stage::Asked(..) => {
                let why = format!("no answer in {:?}", means.settings().recovery_ack_timeout);
                self.say(failover, Step::Failed(why.clone()));
                self.fail(failover, means, &why);
                Some(now)
            }
            Stage::Trying(probe, since) => {
                let (since, limit) = (*since, means.settings().recovery_alive_timeout);
                let failed = match probe.look() {
                    Ok(true) => self.make_lanes(failover, means).err(),
                    Ok(false) if now < since + limit => {
                        let (least, most) = (Duration::from_millis(1), Duration::from_millis(50));
                        let nap = (now.duration_since(since) / 8).clamp(least, most);
                        return Some(now + nap);
                    }
                    Ok(false) => Some(Error::remote(format!("no acknowledgement in {limit:?}"))),
                    Err(e) => Some(e),
                };
                let why = failed?.to_string();
                self.say(failover, Step::Failed(why.clone()));
                self.fail(failover, means, &why);
                Some(now)
            }
            // An answer to new queue pairs comes as long as the side channel lives, and nothing may be done before: the
            // receiver may have lanes by then.
            Stage::Offered(_)
            | Stage::InUse
            | Stage::Willing(_)
            | Stage::Confirming
            | Stage::GivenUp => None,
        }
    }

    /// Of a sender: begins an attempt.
    fn ask(&mut self, failover: &Failover, means: &Means, now: Instant) -> Option<Instant> {
        let (rail, until) = (self.rails.0, now + means.settings().recovery_ack_timeout);
        match means.probe(rail) {
            Ok(probe) => {
                self.attempt = self.attempt.wrapping_add(1);
                self.say(failover, Step::Probe(means.offer(rail, [&probe.made])));
                self.stage = Stage::Asked(probe, until);
                Some(until)
            }
            Err(e) => {
                self.fail(failover, means, &e.to_string());
                Some(now)
            }
        }
    }

    /// Of a sender: the path is well.
    fn make_lanes(&mut self, failover: &Failover, means: &Means) -> Result<()> {
        let rail = self.rails.0;
        let made = self.places.iter().map(|_| means.lane(rail)).collect::<Result<Vec<_>>>()?;
        self.say(failover, Step::Lanes(means.offer(rail, &made)));
        self.stage = Stage::Offered(made);
        Ok(())
    }

    /// Takes note of what the other end says; whether the lanes are in use again.
    pub(super) fn hear(
        &mut self,
        failover: &Failover,
        means: &mut Means,
        attempt: u32,
        step: Step,
    ) -> bool {
        let now = Instant::now();
        self.notice(failover, means, now);
        if self.sends {
            return match step {
                Step::Settled => {
                    self.willing = true;
                    self.hurry(means);
                    false
                }
                // What is said about an attempt that was given up comes too late.
                _ if attempt != self.attempt => false,
                Step::Failed(why) => {
                    if matches!(
                        self.stage,
                        Stage::Asked(..) | Stage::Trying(..) | Stage::Offered(_)
                    ) {
                        self.fail(failover, means, &format!("at the other end: {why}"));
                    }
                    false
                }
                Step::Answer(theirs) => {
                    self.try_path(failover, means, &theirs, now);
                    false
                }
                Step::Ready(theirs) => self.take_lanes(failover, means, &theirs, now),
                _ => false,
            };
        }
        let willing = matches!(self.stage, Stage::Willing(_));
        let failed = match step {
            Step::Probe(theirs) if willing => {
                self.attempt = attempt;
                self.answer(failover, means, &theirs).err()
            }
            Step::Lanes(theirs) if willing && attempt == self.attempt => {
                self.give_lanes(failover, means, &theirs).err()
            }
            Step::Probe(_) | Step::Lanes(_) => {
                self.attempt = attempt;
                Some(Error::usage("the lanes are in use or not settled"))
            }
            Step::InUse if attempt == self.attempt && matches!(self.stage, Stage::Confirming) => {
                self.used = Some(now);
                self.stage = Stage::InUse;
                failover.unmute(self.places.iter().map(|place| failover.number(*place)));
                self.is_back(failover, means);
                return true;
            }
            Step::Failed(_) if willing => {
                self.stage = Stage::Willing(None);
                None
            }
            _ => None,
        };
        if let Some(e) = failed {
            tracing::info!("{}: not back yet: {e}", self.name(failover, means));
            self.say(failover, Step::Failed(e.to_string()));
            if willing {
                self.stage = Stage::Willing(None);
            }
        }
        false
    }

    /// Of a receiver: makes the other end of a probe.
    fn answer(&mut self, failover: &Failover, means: &mut Means, theirs: &Offer) -> Result<()> {
        let rail = self.rails.0;
        means.refresh(rail)?;
        let probe = means.probe(rail)?;
        means.connect_probe(rail, &probe, theirs)?;
        self.say(failover, Step::Answer(means.offer(rail, [&probe.made])));
        self.stage = Stage::Willing(Some(probe));
        Ok(())
    }

    /// Of a sender: tries the path.
    fn try_path(&mut self, failover: &Failover, means: &Means, theirs: &Offer, now: Instant) {
        if !matches!(self.stage, Stage::Asked(..)) {
            return;
        }
        let Stage::Asked(mut probe, _) = std::mem::replace(&mut self.stage, Stage::GivenUp) else {
            return;
        };
        let sent = means
            .connect_probe(self.rails.0, &probe, theirs)
            .and_then(|()| probe.send(means.settings().recovery_sequence));
        match sent {
            Ok(()) => self.stage = Stage::Trying(probe, now),
            Err(e) => {
                let why = e.to_string();
                self.say(failover, Step::Failed(why.clone()));
                self.fail(failover, means, &why);
            }
        }
    }

    /// Of a receiver: makes new lanes, over which data may come from here on.
    fn give_lanes(&mut self, failover: &Failover, means: &Means, theirs: &Offer) -> Result<()> {
        let (rail, count) = (self.rails.0, self.places.len());
        if theirs.queues.len() != count {
            return Err(Error::remote(format!("{} queue pairs for {count}", theirs.queues.len())));
        }
        if !self.is_drained(failover) {
            return Err(Error::usage("the lanes are not settled"));
        }
        let numbers = self.next_numbers(failover);
        let (mut all, mut texts) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (number, queue) in numbers.iter().zip(&theirs.queues) {
            let made = means.lane(rail)?;
            means.connect(rail, &made, &theirs.rail, queue)?;
            means.post_receives(rail, &made, *number)?;
            texts.push(means.text(rail, &made, &theirs.rail, queue));
            all.push(made);
        }
        let flush = failover.is_flush_failed(rail).then(|| means.flush(rail)).transpose()?;
        let flush = flush.map(|qp| (rail, qp));
        // Before the lanes can be stopped, which is to be told after this.
        self.say(failover, Step::Ready(means.offer(rail, &all)));
        let lanes = numbers.into_iter().zip(all.into_iter().map(|made| made.qp)).collect();
        failover.renew(Fresh { lanes, flush }, texts, true);
        self.stage = Stage::Confirming;
        Ok(())
    }

    /// Of a sender: takes new lanes into use, whose other ends are ready; whether they are.
    fn take_lanes(
        &mut self,
        failover: &Failover,
        means: &Means,
        theirs: &Offer,
        now: Instant,
    ) -> bool {
        if !matches!(self.stage, Stage::Offered(_)) {
            return false;
        }
        let Stage::Offered(made) = std::mem::replace(&mut self.stage, Stage::InUse) else {
            return false;
        };
        let rail = self.rails.0;
        let mut joined = if made.len() == theirs.queues.len() {
            Ok(())
        } else {
            Err(Error::remote(format!("{} queue pairs for {}", theirs.queues.len(), made.len())))
        };
        let mut texts = Vec::with_capacity(made.len());
        for (made, queue) in made.iter().zip(&theirs.queues) {
            joined = joined.and_then(|()| means.connect(rail, made, &theirs.rail, queue));
            texts.push(means.text(rail, made, &theirs.rail, queue));
        }
        texts.resize(made.len(), String::new());
        let numbers = self.next_numbers(failover);
        let lanes = numbers.iter().copied().zip(made.into_iter().map(|made| made.qp)).collect();
        (self.willing, self.used) = (false, Some(now));
        // The receiver has these lanes. If they are of no use, they are stopped as any others.
        failover.renew(Fresh { lanes, flush: None }, texts, joined.is_err());
        match joined {
            Ok(()) => {
                self.say(failover, Step::InUse);
                self.is_back(failover, means);
                true
            }
            Err(e) => {
                tracing::info!("{}: not back yet: {e}", self.name(failover, means));
                failover.stop(numbers.into_iter());
                false
            }
        }
    }

    fn is_back(&self, failover: &Failover, means: &Means) {
        let (used, all) = failover.in_use();
        tracing::warn!(
            "{}: is used again, by {} new queue pairs; {used} of {all} go on",
            self.name(failover, means),
            self.places.len()
        );
        failover.forget_why();
    }
}
