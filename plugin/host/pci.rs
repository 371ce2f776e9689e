//! PCI paths as NCCL's topology knows them: which ports belong to one device, and in what order
//! devices stand.
//!
//! The path a device is reported with is a key: NCCL attaches ports with equal paths to one node.
//! So the function digit is replaced by 0, and with `NCCL_IB_MERGE_VFS` the device digits too,
//! because virtual functions of one adapter spread over the device numbers of its bus.

/// A PCI address: `domain:bus:device.function`, all hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI domain.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number on the bus.
    pub device: u8,
    /// Function of the device.
    pub function: u8,
}

impl PciAddress {
    /// Reads an address such as `0000:3b:00.1`.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.split_once('.')?;
        let mut fields = rest.split(':');
        let (domain, bus, device) = (fields.next()?, fields.next()?, fields.next()?);
        let shaped =
            domain.len() >= 4 && bus.len() == 2 && device.len() == 2 && function.len() == 1;
        if !shaped || fields.next().is_some() {
            return None;
        }
        let hex = |text: &str| {
            text.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| u32::from_str_radix(text, 16))
        };
        let byte = |text: &str| u8::try_from(hex(text)?.ok()?).ok();
        Some(Self {
            domain: hex(domain)?.ok()?,
            bus: byte(bus)?,
            device: byte(device)?,
            function: byte(function)?,
        })
    }

    /// The address a sysfs path ends in.
    pub fn of_path(path: &str) -> Option<Self> {
        Self::parse(path.rsplit('/').next()?)
    }
}

/// The path under which a port is reported. Paths that do not end in a PCI address stay as they
/// are.
pub fn merged_path(path: &str, merge_vfs: bool) -> String {
    let mut merged = path.to_owned();
    if PciAddress::of_path(path).is_some() {
        // The address is ASCII, so these byte positions are characters: "…:DD.F".
        let end = merged.len();
        merged.replace_range(end - 1.., "0");
        if merge_vfs {
            merged.replace_range(end - 4..end - 2, "00");
        }
    }
    merged
}

/// For each device, in reporting order, how many earlier devices share its merged path. NCCL is
/// told the port number plus this, since every function of a modern adapter calls its port 1.
pub fn real_port_offsets<'a>(merged: impl IntoIterator<Item = Option<&'a str>>) -> Vec<u32> {
    let mut seen: Vec<&str> = Vec::new();
    let mut offsets = Vec::new();
    for path in merged {
        let earlier = path.map_or(0, |path| seen.iter().filter(|known| **known == path).count());
        offsets.push(u32::try_from(earlier).unwrap_or(u32::MAX));
        seen.extend(path);
    }
    offsets
}

/// The order in which devices are reported, as indices into `paths`: by PCI address, those without
/// one last, equal ones as they were.
pub fn pci_order<'a>(paths: impl IntoIterator<Item = Option<&'a str>>) -> Vec<usize> {
    let keys: Vec<_> = paths.into_iter().map(|path| path.and_then(PciAddress::of_path)).collect();
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by_key(|index| (keys[*index].is_none(), keys[*index]));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BRIDGE: &str = "/sys/devices/pci0000:3a/0000:3a:00.0/";

    #[test]
    fn addresses() {
        let address = PciAddress::parse("0000:3b:01.7").unwrap();
        assert_eq!(
            (address.domain, address.bus, address.device, address.function),
            (0, 0x3b, 1, 7)
        );
        assert!(PciAddress::parse("10000:01:00.0").is_some());
        for bad in ["", "3b:00.0", "0000:3b:00", "0000:3b:00.0.0", "0000:3b:+1.0", "é000:3b:00.0"]
        {
            assert_eq!(PciAddress::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn functions_merge_always_and_virtual_functions_on_request() {
        let path = format!("{BRIDGE}0000:3b:02.5");
        assert_eq!(merged_path(&path, false), format!("{BRIDGE}0000:3b:02.0"));
        assert_eq!(merged_path(&path, true), format!("{BRIDGE}0000:3b:00.0"));
        for odd in ["", "x", "/sys/devices/virtual/net/lo", "/é"] {
            assert_eq!(merged_path(odd, true), odd);
        }
    }

    #[test]
    fn ports_of_one_adapter_are_numbered() {
        let merged = [Some("a"), Some("b"), Some("a"), None, Some("a"), None];
        assert_eq!(real_port_offsets(merged), [0, 0, 1, 0, 2, 0]);
    }

    #[test]
    fn devices_stand_in_pci_order() {
        let paths = ["0000:c1:00.0", "0000:3b:00.1", "none", "0000:3b:00.0", "0001:00:00.0"];
        let order = pci_order(paths.iter().map(|path| Some(*path)).chain([None]));
        assert_eq!(order, [3, 1, 0, 4, 2, 5]);
    }

    proptest! {
        #[test]
        fn any_path_merges_to_a_path_that_stays(
            path in "\\PC{0,30}(/[0-9a-f:.]{0,13})?",
            vfs: bool,
        ) {
            let merged = merged_path(&path, vfs);
            prop_assert_eq!(merged.len(), path.len());
            prop_assert_eq!(merged_path(&merged, vfs), merged);
        }
    }
}
