//! Shared memory: the fabric directory, one region per process, and what is laid out in them.
//!
//! Everything a peer can write is untrusted. The whole layout consists of atomics, so that a reference into a
//! mapping is valid whatever a peer stores; values are re-validated where they are used.

pub mod fabric;
pub mod heap;
pub mod layout;
pub mod lock;
pub mod mapping;
pub mod peer;
pub mod region;
