//! RC semantics in the inline engine.

mod common;
mod semantics;

/// The engine that every test of `semantics` runs in.
const ENGINE: &str = "inline";
