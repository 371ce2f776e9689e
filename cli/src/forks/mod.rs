//! `pinrail forks`: which pages of a process its forked children do not have, and why.
//!
//! [`target`] reads the process, [`finding`] and [`place`] draw the conclusions from what was read, [`text`] and [`json`]
//! show them. Everything that is read may be of a hostile or dying process.

mod cover;
mod finding;
mod json;
mod place;
mod target;
mod text;

use crate::args::Forks;
use crate::output::{self, Colour};
use finding::Finding;
use place::Place;
use std::process::ExitCode;
use target::Target;

/// Everything that is withheld belongs to the plugin or to a device, or the address is not withheld.
const HARMLESS: u8 = 0;
/// Something is withheld that somebody else may need, or the address is.
const WITHHELD: u8 = 1;
/// It could not be told.
const UNKNOWN: u8 = 2;

/// Runs the command.
pub fn run(options: &Forks) -> ExitCode {
    let removed = target::sweep();
    let colour = Colour::of_stdout();
    let target = match Target::read(options.pid) {
        Ok(target) => target,
        Err(reason) => {
            if options.json {
                output::print(&json::failure(options.pid, &reason, UNKNOWN));
            }
            eprintln!("pinrail forks: {reason}");
            return ExitCode::from(UNKNOWN);
        }
    };
    let finding = Finding::of(&target);
    let place = options.core_address.map(|address| Place::of(&target, &finding, address));
    let code = match &place {
        Some(place) if place.is_withheld() => WITHHELD,
        Some(_) => HARMLESS,
        None if finding.is_harmful() => WITHHELD,
        None => HARMLESS,
    };
    let shown = if options.json {
        json::document(&target, &finding, place.as_ref(), &removed, code)
    } else {
        text::report(&target, &finding, place.as_ref(), &removed, colour)
    };
    output::print(&shown);
    ExitCode::from(code)
}
