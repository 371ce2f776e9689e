//! The same semantics when only polling makes progress, one thing at a time, on a virtual clock.

mod common;
mod semantics;

/// The engine that every test of `semantics` runs in.
const ENGINE: &str = "stepped";
