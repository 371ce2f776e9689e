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

// TEMPORARY
#[allow(missing_docs, missing_debug_implementations)]
mod stub {
    use super::*;
    #[derive(Debug, Clone)]
    pub struct Machine {
        pub proc: crate::host::procfs::Proc,
    }
    impl Machine {
        pub fn from_settings(_: &crate::config::Settings) -> Self {
            Self { proc: crate::host::procfs::Proc::default() }
        }
    }
    #[derive(Debug)]
    pub struct Reporter;
    impl Reporter {
        pub fn from_settings(_: &crate::config::Settings) -> Self {
            Self
        }
        pub fn tell(&self, r: &Report, m: &str) {
            tracing::warn!("{:?} {m}", r.0);
        }
    }
    #[derive(Debug)]
    pub struct Report(pub Failure);
    impl Report {
        pub fn transient(&self) -> bool {
            false
        }
        pub fn bounce_may_help(&self) -> bool {
            self.0.errno == 12 && self.0.kind == crate::memory::RegionKind::Host
        }
    }
    pub fn diagnose<G>(
        _: &Machine,
        f: Failure,
        _: impl FnMut(usize, usize) -> Result<G, i32>,
    ) -> Report {
        Report(f)
    }
}
pub use stub::*;
