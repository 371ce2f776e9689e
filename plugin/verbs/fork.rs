//! The library's own answer to fork: pages that it keeps from children.

use super::library::Verbs;
use std::ffi::c_int;
use std::io;

/// What `ibv_is_fork_initialized` says. A library may say it is unnecessary and mark pages all the same: it was asked to
/// by somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForkAnswer {
    /// The kernel does not copy pinned pages for a child, and pages are not kept from children.
    Disabled,
    /// The kernel does not, and pages are kept from children.
    Enabled,
    /// The kernel copies pinned pages when a process forks.
    Unneeded,
    /// Something newer.
    Other(c_int),
}

impl Verbs {
    /// What the library says about fork; `None`: it cannot be asked (before rdma-core 35).
    pub fn fork_answer(&self) -> Option<ForkAnswer> {
        // SAFETY: no arguments and no preconditions.
        self.is_fork_initialized.map(|ask| match unsafe { ask() } {
            0 => ForkAnswer::Disabled,
            1 => ForkAnswer::Enabled,
            2 => ForkAnswer::Unneeded,
            other => ForkAnswer::Other(other),
        })
    }

    /// Asks the library to keep the pages of what is registered from now on from children. Must come before any other
    /// verb: once something is registered it refuses.
    ///
    /// # Errors
    /// Something was registered before (EINVAL), or the kernel cannot.
    pub fn arm_fork(&self) -> io::Result<()> {
        // SAFETY: no arguments and no preconditions.
        match unsafe { (self.fork_init)() } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno.abs())),
        }
    }
}
