//! Message buffers that cannot be pinned where they lie, so that a plugin must reach them through copies.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// Which of a connection's two ends has such buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Bounce {
    /// What is sent lies in them.
    Send,
    /// What is received goes into them.
    Recv,
    /// Both.
    Both,
}

impl Bounce {
    /// Whether what is sent lies in such a buffer.
    pub fn outgoing(self) -> bool {
        self != Self::Recv
    }

    /// Whether what is received goes into one.
    pub fn incoming(self) -> bool {
        self != Self::Send
    }
}

impl fmt::Display for Bounce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "the sending ends'",
            Self::Recv => "the receiving ends'",
            Self::Both => "both ends'",
        })
    }
}

/// Where a rank's buffers lie in a run that compares.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Placement {
    /// The verbs library, which simulates it.
    pub library: PathBuf,
    /// Whose buffers cannot be pinned; `None`: all can, and that is proved as well.
    pub bounce: Option<Bounce>,
}
