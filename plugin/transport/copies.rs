//! Receives whose data must be copied to where they belong before they are done.
//!
//! The peer writes into a landing place. When all of a receive has come, its members are copied piece by piece, a
//! bounded number of bytes each time somebody polls, so that one large message does not keep a thread that serves many
//! connections. The receive keeps its slot until then.

use super::fifo::{MEMBERS, SLOTS};
use crate::memory::bounce::{Bounced, Run};
use crate::memory::region::MAX_RAILS;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that one poll copies.
const STEP: u32 = 512 << 10;

/// One member of a receive.
#[derive(Debug)]
struct Job {
    bounced: Arc<Bounced>,
    run: Run,
    /// Where it belongs.
    to: u64,
    /// Bytes: those advertised, then those that came.
    len: u32,
    done: u32,
}

/// The members of every receive in flight that need it.
#[derive(Debug, Default)]
pub(super) struct Copies {
    jobs: [[Option<Job>; MEMBERS]; SLOTS],
    /// A bit for each slot that waits for its data.
    waiting: u32,
    /// A bit for each slot whose data have come.
    arrived: u32,
}
const _: () = assert!(SLOTS == u32::BITS as usize);

/// What one step did.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing is to be copied.
    Idle,
    /// Something was copied, and more is left.
    More,
    /// All of this slot's receive is where it belongs.
    Done(usize),
    /// A buffer of this slot's receive is gone.
    Gone(usize),
}

/// Where the table waits, made by the thread that registers memory, until the thread that moves data needs it.
#[derive(Clone, Debug, Default)]
pub(super) struct Spare(Arc<Mutex<Option<Box<Copies>>>>);

impl Spare {
    /// Puts a table there, unless there is one.
    pub(super) fn provide(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default();
    }

    /// Takes it; once per communicator.
    pub(super) fn take(&self) -> Option<Box<Copies>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Copies {
    /// Finds room for member `member` of the receive in `slot`: the address and keys to advertise. `None`: there is
    /// none now.
    pub(super) fn begin(
        &mut self,
        slot: usize,
        member: usize,
        bounced: Arc<Bounced>,
        to: u64,
        len: u32,
    ) -> Option<(u64, [u32; MAX_RAILS])> {
        let run = bounced.take(to, len, self.holds(slot))?;
        let place = (bounced.landing_addr(run), bounced.landing_rkeys());
        self.jobs[slot % SLOTS][member % MEMBERS] = Some(Job { bounced, run, to, len, done: 0 });
        self.waiting |= 1 << (slot % SLOTS);
        Some(place)
    }

    /// Whether the receive in `slot` has members to copy.
    pub(super) fn holds(&self, slot: usize) -> bool {
        (self.waiting | self.arrived) >> (slot % SLOTS) & 1 != 0
    }

    /// Takes back what [`Self::begin`] did for a receive that is not advertised.
    pub(super) fn cancel(&mut self, slot: usize) {
        self.jobs[slot % SLOTS]
            .iter_mut()
            .filter_map(Option::take)
            .for_each(|j| j.bounced.give(j.run));
        self.waiting &= !(1 << (slot % SLOTS));
    }

    /// All data of the receive in `slot` have come, so many bytes of each member.
    pub(super) fn arrived(&mut self, slot: usize, sizes: &[u32; MEMBERS]) {
        let bit = 1 << (slot % SLOTS);
        self.waiting &= !bit;
        self.arrived |= bit;
        for (job, size) in self.jobs[slot % SLOTS].iter_mut().zip(sizes) {
            if let Some(job) = job {
                job.len = job.len.min(*size);
            }
        }
    }

    /// Copies a little, for the receive that comes first counted from slot `oldest`.
    pub(super) fn step(&mut self, oldest: usize) -> Step {
        if self.arrived == 0 {
            return Step::Idle;
        }
        let oldest = oldest % SLOTS;
        let ahead = self.arrived.rotate_right(oldest as u32).trailing_zeros() as usize;
        let slot = (oldest + ahead) % SLOTS;
        let mut budget = STEP;
        for place in &mut self.jobs[slot] {
            let Some(job) = place else { continue };
            let bytes = (job.len - job.done).min(budget);
            if bytes > 0
                && !job.bounced.copy_out(job.run, job.done, job.to + u64::from(job.done), bytes)
            {
                return Step::Gone(slot);
            }
            job.done += bytes;
            budget -= bytes;
            if job.done < job.len {
                return Step::More;
            }
            job.bounced.give(job.run);
            *place = None;
        }
        self.arrived &= !(1 << slot);
        Step::Done(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Given;
    use crate::memory::arena::Arena;
    use crate::memory::bounce::Landing;
    use proptest::prelude::*;

    /// A buffer of a receiving end over memory that the test owns.
    fn bounced(bytes: &mut [u8]) -> Arc<Bounced> {
        // SAFETY: the slice outlives the value in these tests.
        #[allow(unsafe_code, reason = "stands in for a caller's promise")]
        let given = unsafe { Given::new(bytes.as_mut_ptr().cast(), bytes.len()) }.unwrap();
        let landing = Landing::new(&Arena::new(64 << 20), &[], given.len()).unwrap();
        Arc::new(Bounced::receive(given, landing))
    }

    proptest! {
        /// Every receive is done once, in order of age, after at most one step per portion and member; all room comes
        /// back.
        #[test]
        fn every_receive_is_done_once(
            sizes in prop::collection::vec(0..2 * STEP, 1..5), oldest in 0..SLOTS,
        ) {
            let mut memory = vec![0_u8; 2 * STEP as usize];
            let buffer = bounced(&mut memory);
            let addr = memory.as_ptr() as u64;
            let mut copies = Copies::default();
            for ahead in 0..sizes.len() {
                let slot = (oldest + ahead) % SLOTS;
                prop_assert!(copies.begin(slot, 2, Arc::clone(&buffer), addr, STEP / 64).is_some());
                prop_assert!(copies.holds(slot));
            }
            for (ahead, size) in sizes.iter().enumerate().rev() {
                let mut came = [0; MEMBERS];
                came[2] = *size;
                copies.arrived((oldest + ahead) % SLOTS, &came);
            }
            for ahead in 0..sizes.len() {
                prop_assert_eq!(copies.step(oldest), Step::Done((oldest + ahead) % SLOTS));
            }
            prop_assert_eq!(copies.step(oldest), Step::Idle);
            prop_assert!(buffer.is_empty());
        }
    }

    #[test]
    fn a_large_receive_takes_several_steps() {
        let mut memory = vec![0_u8; 3 * STEP as usize];
        let buffer = bounced(&mut memory);
        let mut copies = Copies::default();
        let all = 3 * STEP;
        copies.begin(5, 0, Arc::clone(&buffer), memory.as_ptr() as u64, all).unwrap();
        copies.arrived(5, &[all; MEMBERS]);
        assert_eq!([(); 3].map(|()| copies.step(0)), [Step::More, Step::More, Step::Done(5)]);
        assert!(!copies.holds(5) && buffer.is_empty());
    }

    #[test]
    fn room_comes_back_when_a_receive_is_not_advertised() {
        let mut memory = vec![0_u8; 1000];
        let buffer = bounced(&mut memory);
        let addr = memory.as_ptr() as u64;
        let mut copies = Copies::default();
        let mut begun = 0;
        while copies.begin(0, begun, Arc::clone(&buffer), addr, 500).is_some() {
            begun += 1;
        }
        assert!(begun >= 1 && !buffer.is_empty());
        copies.cancel(0);
        assert!(buffer.is_empty() && !copies.holds(0));
    }

    #[test]
    fn a_buffer_that_is_gone_is_told() {
        let mut memory = vec![0_u8; 1000];
        let buffer = bounced(&mut memory);
        let mut copies = Copies::default();
        copies.begin(7, 0, Arc::clone(&buffer), memory.as_ptr() as u64, 10).unwrap();
        copies.arrived(7, &[10; MEMBERS]);
        buffer.close();
        assert_eq!(copies.step(0), Step::Gone(7));
    }
}
