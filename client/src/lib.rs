//! The client side of NCCL network plugins, for whatever drives one as NCCL does: the bench and the `pinrail` command.
//!
//! [`net`] opens a plugin file and makes NCCL's calls in any table version; [`worker`] starts the processes that do so,
//! because a plugin may crash or never return; [`buffer`] holds messages whose every byte is checked; [`failure`] is what
//! all of them end with.

pub mod buffer;
pub mod failure;
pub mod net;
pub mod patience;
pub mod progress;
pub mod worker;
