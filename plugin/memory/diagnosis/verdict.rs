//! What a failed registration is put down to, and the rules that say so.

/// Why a registration failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// The process may not lock that much memory.
    MemlockQuota,
    /// The pages lie where a long-term pin is refused, and cannot be moved because somebody pinned them before.
    Placement,
    /// The device, or the limit that a group of processes has on it, is exhausted.
    DeviceLimit,
    /// The kernel has too little memory.
    KernelMemory,
    /// The range is not memory that a device may use.
    BadAddress,
    /// What lets a network device reach GPU memory is missing or does not cover this memory.
    PeerMemoryMissing,
    /// The device does not know an access flag.
    AccessFlags,
    /// None of these is supported by what could be read.
    Unknown,
}

impl Cause {
    /// The word for it in logs and records.
    pub fn word(self) -> &'static str {
        match self {
            Self::MemlockQuota => "memlock_quota",
            Self::Placement => "placement",
            Self::DeviceLimit => "device_limit",
            Self::KernelMemory => "kernel_memory",
            Self::BadAddress => "bad_address",
            Self::PeerMemoryMissing => "peer_memory_missing",
            Self::AccessFlags => "access_flags",
            Self::Unknown => "unknown",
        }
    }
}

/// How far a verdict may be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confidence {
    /// It fits, and so may something else.
    Possible,
    /// What would contradict it was looked for and not found.
    Likely,
    /// The figures leave nothing else.
    Certain,
}

impl Confidence {
    /// The word for it in logs and records.
    pub fn word(self) -> &'static str {
        match self {
            Self::Possible => "possible",
            Self::Likely => "likely",
            Self::Certain => "certain",
        }
    }
}

/// A cause, how sure it is, and what it rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The cause.
    pub cause: Cause,
    /// How sure.
    pub confidence: Confidence,
    /// The figures, most telling first.
    pub evidence: Vec<String>,
    /// What an operator does about it.
    pub remedy: String,
}
