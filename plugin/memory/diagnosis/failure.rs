//! What was asked of the verbs library when a registration failed. Filled in by whoever asked.

use crate::memory::RegionKind;
use crate::memory::page::page_size;
use std::os::fd::RawFd;

/// `IBV_ACCESS_*` bits and their names.
const ACCESS: [(u32, &str); 8] = [
    (1, "local write"),
    (1 << 1, "remote write"),
    (1 << 2, "remote read"),
    (1 << 3, "remote atomic"),
    (1 << 4, "memory window"),
    (1 << 5, "zero based"),
    (1 << 6, "on demand"),
    (1 << 20, "relaxed ordering"),
];

/// Bits that a device may ignore when it does not know them (`IBV_ACCESS_OPTIONAL_RANGE`).
const OPTIONAL: u32 = 0x3ff0_0000;

/// One registration that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The verb that failed first.
    pub verb: &'static str,
    /// Its errno.
    pub errno: i32,
    /// The `IBV_ACCESS_*` bits of that call.
    pub access: u32,
    /// A setting demands the optional bits, so that leaving them out was not tried.
    pub optional_demanded: bool,
    /// The second attempt, without the optional bits, if there was one.
    pub retry: Option<Attempt>,
    /// Address, as the caller gave it. For a DMA-BUF the one it answers to.
    pub address: u64,
    /// Bytes, as the caller gave them.
    pub length: u64,
    /// What kind of pointer it is said to be.
    pub kind: RegionKind,
    /// The DMA-BUF.
    pub fd: Option<RawFd>,
    /// Offset into the DMA-BUF.
    pub offset: u64,
    /// The device, as the log names it.
    pub device: String,
    /// What the device says it can.
    pub limits: DeviceLimits,
    /// What this process has registered on the device.
    pub live: Live,
    /// Bytes of host memory that this process holds pinned for devices, in whole pages of each registration. For a kernel
    /// or library that does not count them in `VmPin`. GPU memory is pinned by its own driver and does not count.
    pub own_pinned: Option<u64>,
    /// What the ledger says about any part of the range: who holds it, and how.
    pub held: Vec<String>,
    /// Which way data would flow.
    pub direction: Option<Direction>,
    /// The peer of the communicator.
    pub peer: Option<String>,
    /// NCCL's identifier of the communicator, from table version 11 on.
    pub comm: Option<u64>,
}

/// One call of a registration verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The verb.
    pub verb: &'static str,
    /// The `IBV_ACCESS_*` bits.
    pub access: u32,
    /// Its errno; `None`: it worked.
    pub errno: Option<i32>,
}

/// The device's own limits; `None`: not asked or not told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Memory regions.
    pub max_mr: Option<u64>,
    /// Bytes of one memory region.
    pub max_mr_size: Option<u64>,
}

/// Registrations of this process on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Live now.
    pub regions: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The most that were live at once.
    pub peak_regions: u64,
    /// The most bytes at once.
    pub peak_bytes: u64,
}

/// Which way data flow on a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the peer.
    Send,
    /// From the peer.
    Receive,
}

impl Direction {
    /// The word of it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }
}

impl Failure {
    /// The whole pages of the range, as (first address, one past the last). The end saturates at the end of the
    /// address space.
    pub fn pages_range(&self) -> (u64, u64) {
        let page = page_size() as u64;
        let start = self.address - self.address % page;
        let end = self.address.saturating_add(self.length.max(1));
        (start, end.checked_next_multiple_of(page).unwrap_or(u64::MAX - (page - 1)))
    }

    /// How many pages the kernel counts for it.
    pub fn pages(&self) -> u64 {
        let (start, end) = self.pages_range();
        end.saturating_sub(start) / page_size() as u64
    }

    /// Whether the call asked for bits that it could do without.
    pub fn asked_optional(&self) -> bool {
        self.access & OPTIONAL != 0
    }

    /// Whether the attempt without optional bits worked.
    pub fn retry_worked(&self) -> bool {
        self.retry.is_some_and(|retry| retry.errno.is_none())
    }

    /// The word for the kind of pointer.
    pub fn kind_word(&self) -> &'static str {
        match self.kind {
            RegionKind::Host => "host",
            RegionKind::Cuda => "cuda",
            RegionKind::DmaBuf => "dmabuf",
        }
    }
}

/// The names of access bits; what has no name is shown as a number.
pub fn access_names(bits: u32) -> String {
    let mut names: Vec<String> =
        ACCESS.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| (*name).into()).collect();
    let known = ACCESS.iter().fold(0, |all, (bit, _)| all | bit);
    if bits & !known != 0 {
        names.push(format!("{:#x}", bits & !known));
    }
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
