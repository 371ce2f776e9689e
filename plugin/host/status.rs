//! `/proc/self/status`: what the kernel has counted for this process, and its capabilities.

use super::meminfo::kilobytes;
use super::procfs::Proc;

/// The bit of CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

/// Amounts in bytes; `None` where the kernel does not report one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Status {
    /// Memory pinned for devices. The kernel compares this with the memory lock limit when memory is
    /// registered.
    pub pinned: Option<u64>,
    /// Memory locked with `mlock`. Does not count for registrations.
    pub locked: Option<u64>,
    /// Memory present.
    pub resident: Option<u64>,
    /// Memory present in huge pages of the pool.
    pub hugetlb: Option<u64>,
    /// Effective capabilities.
    pub capabilities: Option<u64>,
}

impl Status {
    /// Reads the text of the file. Lines that are not understood are skipped.
    pub fn parse(text: &str) -> Self {
        let mut status = Self::default();
        for line in text.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            match name {
                "VmPin" => status.pinned = kilobytes(value),
                "VmLck" => status.locked = kilobytes(value),
                "HugetlbPages" => status.hugetlb = kilobytes(value),
                "VmRSS" => status.resident = kilobytes(value),
                "CapEff" => status.capabilities = u64::from_str_radix(value.trim(), 16).ok(),
                _ => {}
            }
        }
        status
    }

    /// The state of this process.
    pub fn read(proc: &Proc) -> Self {
        proc.text("self/status").map_or_else(Self::default, |text| Self::parse(&text))
    }

    /// Whether CAP_IPC_LOCK is among the effective capabilities.
    pub fn ipc_lock(&self) -> Option<bool> {
        Some(self.capabilities? >> IPC_LOCK & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn amounts_and_capabilities() {
        let root = Status::parse(
            "Name:\tx\nVmLck:\t       4 kB\nVmPin:\t   65536 kB\nVmRSS:\t 100 kB\nCapEff:\t000001fffeffffff\n",
        );
        assert_eq!((root.pinned, root.locked), (Some(64 << 20), Some(4096)));
        assert_eq!((root.resident, root.ipc_lock()), (Some(102_400), Some(true)));
        let user = Status::parse("CapEff:\t0000000000000000\nVmPin: many kB\n");
        assert_eq!((user.ipc_lock(), user.pinned), (Some(false), None));
        assert_eq!(Status::parse("HugetlbPages:\t 2048 kB\n").hugetlb, Some(2 << 20));
        assert_eq!(Status::parse("CapEff: 4000").ipc_lock(), Some(true));
        assert_eq!(Status::parse("CapEff: zz").ipc_lock(), None);
    }

    #[test]
    fn this_process_is_resident() {
        let status = Status::read(&Proc::default());
        assert!(status.resident.unwrap() > 0 && status.pinned.is_some());
        assert_eq!(Status::read(&Proc::at("/no/such/folder")), Status::default());
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>(), value in "\\PC{0,30}") {
            let _ = Status::parse(&text);
            let _ = Status::parse(&format!("VmPin:{value}\nCapEff:{value}\n")).ipc_lock();
        }
    }
}
