//! How commands write: colour only where a person looks, and an end of the reader is no failure.

use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// A style of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Something is wrong.
    Bad,
    /// Nothing is.
    Good,
    /// It may be meant so.
    Doubtful,
    /// What to look at.
    Strong,
}

/// Whether and how to use colour.
#[derive(Debug, Clone, Copy)]
pub struct Colour(bool);

impl Colour {
    /// On a terminal, unless `NO_COLOR` is set.
    pub fn of_stdout() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self(std::io::stdout().is_terminal() && !refused)
    }

    /// Never.
    #[cfg(test)]
    pub fn none() -> Self {
        Self(false)
    }

    /// Text in a style.
    pub fn paint(self, style: Style, text: &str) -> String {
        let code = match style {
            Style::Bad => "31",
            Style::Good => "32",
            Style::Doubtful => "33",
            Style::Strong => "1",
        };
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Something could not be written.
static LOST: AtomicBool = AtomicBool::new(false);

/// Writes text to the standard output. A reader that has gone away has seen enough; anything else that keeps the text from
/// being written is said, and kept for [`was_lost`].
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        LOST.store(true, Ordering::Relaxed);
        eprintln!("pinrail: the answer cannot be written: {error}");
    }
}

/// Some of the answer could not be written, so that the exit status must not stand for it.
pub fn was_lost() -> bool {
    LOST.load(Ordering::Relaxed)
}
