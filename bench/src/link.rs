//! What the sweep and its two ranks say to each other: one JSON value per line over a socket pair.
//!
//! The sweep is the only one that talks to both ranks. It carries the connection handles between them, as NCCL's
//! bootstrap does, and notices at once when one of them is gone.

use crate::bounce::Placement;
use crate::net::Device;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// From the sweep to a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Command {
    /// Load the plugin. Answer: [`Reply::Opened`].
    Open { plugin: PathBuf, abi: Option<u8>, timeout_s: u64, verbose: bool },
    /// Listen on a device. Answer: [`Reply::Listening`].
    Listen { device: i32 },
    /// Connect to the peer's handle, accept the peer, register buffers of so many bytes. Answer: [`Reply::Connected`].
    Connect { handle: Vec<u8>, buffer: usize, placement: Option<Placement> },
    /// Rank 0 sends, rank 1 checks. Answer: [`Reply::Checked`].
    Check(CheckPlan),
    /// Rank 0 sends, rank 1 receives, against the clock. Answer: [`Reply::Timed`].
    Stream(StreamPlan),
    /// Both take turns. Answer: [`Reply::Latency`].
    PingPong { size: usize, count: u64 },
    /// Close everything and unload. Answer: [`Reply::Done`].
    Close,
}

impl Command {
    /// The stage, for messages about a rank that never answered.
    pub fn stage(&self) -> String {
        match self {
            Self::Open { .. } => "load".into(),
            Self::Listen { .. } => "listen".into(),
            Self::Connect { .. } => "connect".into(),
            Self::Check(plan) => format!("check of {}", crate::size::show(plan.size)),
            Self::Stream(plan) => format!("bandwidth of {}", crate::size::show(plan.size)),
            Self::PingPong { size, .. } => format!("latency of {}", crate::size::show(*size)),
            Self::Close => "close".into(),
        }
    }
}

/// A checked pass over one size.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct CheckPlan {
    /// Bytes of each receive.
    pub size: usize,
    /// Receives.
    pub groups: u64,
    /// Members per receive.
    pub members: usize,
    /// Receives in flight, each with memory of its own.
    pub slots: usize,
}

/// A timed pass over one size.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct StreamPlan {
    /// Bytes of each message.
    pub size: usize,
    /// Receives before the clock starts.
    pub warmup: u64,
    /// Receives against the clock.
    pub count: u64,
    /// Members per receive.
    pub members: usize,
    /// Receives in flight.
    pub window: usize,
}

/// From a rank to the sweep.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Reply {
    /// The plugin is loaded and initialised.
    Opened { name: String, version: u8, devices: Vec<Device> },
    /// The handle for the peer.
    Listening { handle: Vec<u8> },
    /// The connection stands. So many pages of the buffers cannot be registered where they lie.
    Connected { bounced_pages: u64 },
    /// Nothing to report.
    Done,
    /// The checked pass is over; `wrong` describes the first wrong message.
    Checked { messages: u64, bytes: u64, wrong_messages: u64, wrong: Option<String> },
    /// Time of the counted receives.
    Timed { seconds: f64 },
    /// Half round trips in nanoseconds.
    Latency { p50: f64, p99: f64, min: f64 },
    /// The command failed.
    Failed { stage: String, text: String },
}
