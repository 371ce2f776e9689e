//! Waiting by polling, with a deadline: a peer that died must not hang its partner.

use crate::failure::{Failure, Result};
use std::time::{Duration, Instant};

/// Idle rounds between two looks at the clock.
const CLOCK_EVERY: u32 = 256;

/// Time without progress.
#[derive(Debug)]
pub struct Patience {
    timeout: Duration,
    since: Option<Instant>,
    rounds: u32,
}

impl Patience {
    /// Fails after `timeout` without progress.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, since: None, rounds: 0 }
    }

    /// Something moved.
    #[inline]
    pub fn progress(&mut self) {
        self.rounds = 0;
        self.since = None;
    }

    /// Nothing moved: gives the core away, so that two ranks that share one make progress in turns, and looks at the
    /// clock now and then.
    #[inline]
    pub fn idle(&mut self, stage: &str, waiting_for: impl FnOnce() -> String) -> Result<()> {
        rustix::thread::sched_yield();
        self.rounds += 1;
        if self.rounds.is_multiple_of(CLOCK_EVERY) {
            let since = *self.since.get_or_insert_with(Instant::now);
            if since.elapsed() > self.timeout {
                let seconds = self.timeout.as_secs();
                return Err(Failure::new(
                    stage,
                    format!("no progress for {seconds} s: {}", waiting_for()),
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Patience;
    use std::time::Duration;

    #[test]
    fn gives_up_with_the_reason() {
        let mut patience = Patience::new(Duration::ZERO);
        let error = loop {
            if let Err(error) = patience.idle("test", || "a reply".into()) {
                break error;
            }
        };
        assert!(error.to_string().contains("a reply"), "{error}");
    }
}
