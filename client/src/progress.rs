//! A progress bar on standard error, on a terminal only.

use std::io::{IsTerminal as _, Write as _};

const WIDTH: usize = 30;

/// Counts steps of known number.
#[derive(Debug)]
pub struct Progress {
    shown: bool,
    done: usize,
    steps: usize,
}

impl Progress {
    /// A bar of so many steps.
    pub fn new(steps: usize) -> Self {
        Self { shown: std::io::stderr().is_terminal(), done: 0, steps: steps.max(1) }
    }

    /// Names the step that begins.
    pub fn step(&mut self, what: &str) {
        if self.shown {
            let filled = WIDTH * self.done / self.steps;
            let bar = format!("{}{}", "#".repeat(filled), ".".repeat(WIDTH - filled));
            let percent = 100 * self.done / self.steps;
            let mut out = std::io::stderr();
            // A terminal that went away is no reason to stop measuring.
            let _ = write!(out, "\r\x1b[K[{bar}] {percent:3} % {what}").and_then(|()| out.flush());
        }
        self.done += 1;
    }

    /// Takes the bar away, before a line of output.
    pub fn clear(&self) {
        if self.shown {
            let mut out = std::io::stderr();
            let _ = write!(out, "\r\x1b[K").and_then(|()| out.flush());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
