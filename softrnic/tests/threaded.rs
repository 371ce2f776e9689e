//! The same semantics when another thread completes what is posted.

mod common;
mod semantics;

/// The engine that every test of `semantics` runs in.
const ENGINE: &str = "thread";
