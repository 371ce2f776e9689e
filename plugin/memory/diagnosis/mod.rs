//! Why a registration failed.
//!
//! The kernel has one errno for half a dozen causes. Here what was asked ([`Failure`]), what the machine says
//! ([`Facts`]) and what a few registrations of other memory show ([`Probe`]) are put together into one [`Verdict`] with
//! the figures it rests on. What cannot be read is unknown and stays so; a verdict that nothing supports is
//! [`Cause::Unknown`].
//!
//! None of this is on the data path.

mod address;
mod facts;
mod failure;
mod probe;
mod record;
mod remedy;
mod report;
mod reporter;
mod rules;
mod scarcity;
mod verdict;

pub use facts::{Facts, Machine, Quota, RangeFacts};
pub use failure::{Attempt, DeviceLimits, Direction, Failure, Live, access_names};
pub use probe::{BadPages, Bounds, Candidate, Probe, Trial, probe};
pub use report::{Report, diagnose};
pub use reporter::{Outcome, Reporter};
pub use verdict::{Cause, Confidence, Verdict};

#[cfg(test)]
mod tests;
