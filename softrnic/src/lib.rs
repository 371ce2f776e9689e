//! A software RNIC behind the libibverbs C ABI.
//!
//! Processes of one user that name the same fabric reach each other's registered memory without a kernel driver:
//! the initiator of an operation performs both halves itself, on tables in shared memory and with the kernel's
//! cross-process copy. The crate is linked with a version map into `libibverbs.so.1` (see `link.sh`); the rlib
//! serves tests. Start reading at [`engine`] and [`responder`].

pub mod abi;
mod abi_consts;
pub mod assist;
pub mod capi;
pub mod channel;
pub mod clock;
pub mod command;
pub mod context;
pub mod control;
pub mod cq;
pub mod device;
pub mod engine;
pub mod env;
pub mod events;
pub mod faults;
pub mod fork;
pub mod index;
pub mod inject;
pub mod ledger;
pub mod list;
pub mod mover;
pub mod mr;
pub mod objects;
pub mod pd;
pub mod post;
pub mod process;
pub mod public;
pub mod qp;
pub mod qp_state;
pub mod responder;
pub mod ring;
pub mod rng;
pub mod shm;
pub mod srq;
pub mod stats;
pub mod stepped;
pub mod sync;
pub mod trace;
pub mod wqe;
