//! pinrail: an NCCL network plugin over RDMA verbs.
//!
//! NCCL loads the shared object built from this crate and finds one table of functions per ABI version in it
//! ([`abi`]). Everything else is reached from there: the canonical operations ([`abi::net`]), the connection state
//! machines ([`transport`]), RAII objects over a verbs library chosen at run time ([`verbs`]), memory and its
//! registrations ([`memory`]), and facts about the machine ([`host`]).

#[cfg(panic = "abort")]
compile_error!("panics are contained at the C boundary, which needs panic = \"unwind\"");

pub mod abi;
pub mod capi;
pub mod clock;
#[deny(unsafe_code)]
pub mod config;
pub mod cuda;
#[deny(unsafe_code)]
pub mod error;

mod glibc;
pub mod hint;
#[deny(unsafe_code)]
pub mod host;
pub mod library;
#[deny(unsafe_code)]
pub mod log;
pub mod memory;
pub mod profiler;
#[deny(unsafe_code)]
pub mod records;
pub mod signal;
pub mod sync;
pub mod thread;
#[deny(unsafe_code)]
pub mod transport;
pub mod verbs;
