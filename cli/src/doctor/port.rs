//! The ports of the host, with what the plugin's own choices make of them.

use super::machine::Machine;
use nccl_net_pinrail::config::{Decision, Reason};
use nccl_net_pinrail::host::gid::{
    Choice, GidEntry, NetDev, NoGid, Wanted, choose_infiniband, choose_roce,
};
use nccl_net_pinrail::host::pci::PciAddress;
use nccl_net_pinrail::host::pkey::{self, NoKey};

/// The state in which a port carries data.
const ACTIVE: u32 = 4;

/// What RoCE v2 adds to the payload of a packet at most, as the kernel counts it when it derives the MTU of a port from
/// that of its interface: a header of 40 bytes for addresses, 8 for UDP, 12, 4 and 28 for the transport, 4 for the
/// checksum.
const OVERHEAD: u64 = 40 + 8 + 12 + 4 + 28 + 4;

/// One port.
#[derive(Debug, Clone)]
pub struct Port {
    /// Name of the device.
    pub device: String,
    /// Number, from 1.
    pub number: u8,
    /// `device:number`.
    pub label: String,
    /// The kernel's number and word for its state.
    pub state: Option<(u32, String)>,
    /// The same of the link below.
    pub physical: Option<String>,
    /// Mb/s.
    pub speed: Option<u64>,
    /// The speed as the kernel words it.
    pub rate: String,
    /// RoCE.
    pub ethernet: bool,
    /// Network interfaces.
    pub netdevs: Vec<String>,
    /// MTU of the first of them, in bytes.
    pub netdev_mtu: Option<u64>,
    /// GIDs that are set.
    pub gids: Vec<GidEntry>,
    /// The one that the plugin takes.
    pub gid: Result<Choice, NoGid>,
    /// Partition keys.
    pub pkeys: Vec<(u16, u16)>,
    /// The index of the key that the plugin takes.
    pub pkey: Result<u16, NoKey>,
    /// What `NCCL_IB_HCA` says.
    pub decision: Decision,
    /// Path in the device tree.
    pub pci_path: Option<String>,
    /// What all functions of one adapter have in common.
    pub adapter: Option<String>,
}

impl Port {
    /// It carries data.
    pub fn is_active(&self) -> bool {
        self.state.as_ref().is_some_and(|(code, _)| *code == ACTIVE)
    }

    /// The filter lets it through.
    pub fn is_selected(&self) -> bool {
        self.decision.selected
    }

    /// Connections could use it if the filter let them.
    pub fn is_usable(&self) -> bool {
        self.is_active() && self.gid.is_ok() && self.pkey.is_ok()
    }

    /// Connections use it.
    pub fn is_used(&self) -> bool {
        self.is_usable() && self.is_selected()
    }

    /// A list names its device in full, so that somebody counts on it.
    pub fn is_asked_for(&self) -> bool {
        let Reason::Listed(token) = &self.decision.reason else { return false };
        self.is_selected() && token.split(':').next() == Some(self.device.as_str())
    }

    /// Its state in words.
    pub fn state_text(&self) -> String {
        let state = self.state.as_ref().map_or("unknown", |(_, word)| word);
        self.physical
            .as_ref()
            .map_or_else(|| state.to_owned(), |link| format!("{state}, link {link}"))
    }

    /// Largest payload of a packet that the interface leaves room for, on RoCE.
    pub fn mtu(&self) -> Option<u64> {
        if !self.ethernet {
            return None;
        }
        let room = self.netdev_mtu?.saturating_sub(OVERHEAD);
        [4096, 2048, 1024, 512, 256].into_iter().find(|size| *size <= room)
    }

    /// Its place on the PCI bus.
    pub fn pci(&self) -> Option<PciAddress> {
        PciAddress::of_path(self.pci_path.as_deref()?)
    }

    /// GIDs that connections could use, as they are listed to a person.
    pub fn usable_gids(&self) -> impl Iterator<Item = &GidEntry> {
        self.gids.iter().filter(|entry| !matches!(entry.netdev, NetDev::Elsewhere(_)))
    }

    fn read(machine: &Machine, device: &str, number: u8) -> Self {
        let (sysfs, settings) = (&machine.sysfs, &machine.settings);
        let text = |file: &str| sysfs.device_text(device, &format!("ports/{number}/{file}"));
        let coded = |text: String| {
            let (code, word) = text.split_once(':')?;
            Some((code.trim().parse::<u32>().ok()?, word.trim().to_owned()))
        };
        let table = sysfs.gid_table(device, number);
        let ethernet = text("link_layer").as_deref() == Some("Ethernet");
        let wanted = Wanted::for_device(settings, device);
        let gid = if ethernet {
            choose_roce(&table, &wanted)
        } else {
            Ok(choose_infiniband(&table, &wanted))
        };
        let gids: Vec<_> = table.into_iter().filter(GidEntry::is_configured).collect();
        let mut netdevs: Vec<String> = Vec::new();
        for entry in &gids {
            if let NetDev::Here(name) = &entry.netdev
                && !netdevs.contains(name)
            {
                netdevs.push(name.clone());
            }
        }
        if netdevs.is_empty() {
            netdevs = sysfs.netdevs(device);
        }
        let mtu = |name: &String| sysfs.netdev_text(name, "mtu")?.parse().ok();
        let rate = text("rate").unwrap_or_default();
        let pkeys = sysfs.pkey_table(device, number);
        Self {
            device: device.to_owned(),
            number,
            label: format!("{device}:{number}"),
            state: text("state").and_then(coded),
            physical: text("phys_state").and_then(coded).map(|(_, word)| word),
            speed: megabits(&rate),
            rate,
            ethernet,
            netdev_mtu: netdevs.first().and_then(mtu),
            netdevs,
            gids,
            gid,
            pkey: pkey::choose(&pkeys, settings),
            pkeys,
            decision: settings.hca.matches(device, number),
            pci_path: sysfs.pci_path(device),
            adapter: sysfs
                .device_text(device, "sys_image_guid")
                .filter(|guid| guid.bytes().any(|b| b != b'0' && b != b':')),
        }
    }
}

/// All ports of the host, by device and number.
pub fn ports(machine: &Machine) -> Vec<Port> {
    let sysfs = &machine.sysfs;
    let of = |device: String| {
        let numbers = sysfs.ports(&device).into_iter();
        numbers.map(move |number| Port::read(machine, &device, number)).collect::<Vec<_>>()
    };
    sysfs.devices().into_iter().flat_map(of).collect()
}

/// Reads `100 Gb/sec (4X EDR)` and `2.5 Gb/sec (1X SDR)`.
fn megabits(rate: &str) -> Option<u64> {
    let number = rate.split_once(" Gb/sec")?.0;
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let tenths: u64 = tenths.get(..1)?.parse().ok()?;
    whole.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(tenths * 100)
}

/// The labels of ports for a sentence.
pub fn labels<'a>(ports: impl IntoIterator<Item = &'a Port>) -> String {
    let labels: Vec<_> = ports.into_iter().map(|port| port.label.as_str()).collect();
    if labels.is_empty() { "none".to_owned() } else { labels.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates() {
        assert_eq!(megabits("100 Gb/sec (4X EDR)"), Some(100_000));
        assert_eq!(megabits("2.5 Gb/sec (1X SDR)"), Some(2500));
        for bad in ["", "100", "x Gb/sec", "1. Gb/sec", "99999999999999999999 Gb/sec"] {
            assert_eq!(megabits(bad), None, "{bad}");
        }
    }
}
