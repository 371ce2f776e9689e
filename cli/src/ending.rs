//! How commands that start processes end.

use crate::doctor::json;
use crate::output;
use pinrail_client::failure::Result;
use std::process::ExitCode;

/// It could not be told.
pub const UNKNOWN: u8 = 2;

/// A command that could tell nothing, and why.
pub fn failure(command: &str, as_json: bool, reason: &str) -> ExitCode {
    if as_json {
        output::print(&json::failure(reason, UNKNOWN));
    }
    eprintln!("pinrail {command}: {reason}");
    ExitCode::from(UNKNOWN)
}

/// A process of a command, which said all it had to say.
pub fn process(command: &str, outcome: Result<()>) -> ExitCode {
    outcome.map_or_else(|error| failure(command, false, &error.to_string()), |()| ExitCode::SUCCESS)
}
