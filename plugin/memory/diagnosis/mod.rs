//! Why a registration failed.
//!
//! The kernel has one errno for half a dozen causes. Here what was asked ([`Failure`]), what the machine says and what
//! a few registrations of other memory show are put together into one [`Verdict`] with the figures it rests on. What
//! cannot be read is unknown and stays so; a verdict that nothing supports is [`Cause::Unknown`].
//!
//! None of this is on the data path.

mod failure;
mod verdict;

pub use failure::{Attempt, DeviceLimits, Direction, Failure, Live, access_names};
pub use verdict::{Cause, Confidence, Verdict};
