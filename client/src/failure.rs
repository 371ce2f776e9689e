//! The one error type: what was being done (the stage) and what went wrong, in one line.

use std::fmt;

/// A failure of a run. The stage is a word the user can look for in the table or the documentation.
#[derive(Debug, Clone)]
pub struct Failure {
    stage: String,
    text: String,
    usage: bool,
}

/// The result used throughout.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure in `stage`.
    pub fn new(stage: impl Into<String>, text: impl Into<String>) -> Self {
        Self { stage: stage.into(), text: text.into(), usage: false }
    }

    /// A mistake on the command line: exit status 2.
    pub fn usage(text: impl Into<String>) -> Self {
        Self { stage: String::new(), text: text.into(), usage: true }
    }

    /// An operating system call that failed in `stage`.
    pub fn io(stage: &str, what: &str, error: &std::io::Error) -> Self {
        Self::new(stage, format!("{what}: {error}"))
    }

    /// The process exit status that reports this.
    pub fn exit_code(&self) -> u8 {
        if self.usage { 2 } else { 1 }
    }

    /// The stage.
    pub fn stage(&self) -> &str {
        &self.stage
    }

    /// The text without its stage.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.stage.is_empty() {
            f.write_str(&self.text)
        } else {
            write!(f, "{}: {}", self.stage, self.text)
        }
    }
}

impl std::error::Error for Failure {}
