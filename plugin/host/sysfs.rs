//! What sysfs says about RDMA devices.
//!
//! The root is a value, not a constant: tests and `PINRAIL_SYSFS` point it at a tree of plain
//! files. Absence is normal everywhere here (containers hide files, software devices have none), so
//! most answers are options; an error is what the caller should know about.

use std::fs;
use std::io;
use std::net::Ipv6Addr;
use std::path::{Component, Path, PathBuf};

use rustix::io::Errno;

use super::gid::{GidEntry, NetDev};
use super::inside::Bounds;
use super::plain;
use super::procfs::text;
use crate::config::Settings;

/// Where sysfs is mounted.
const SYSTEM_ROOT: &str = "/sys";

/// The kernel modules that let a device reach GPU memory without a DMA-BUF: names and version
/// files.
const PEERMEM: [(&str, &str); 4] = [
    ("nv_mem", "kernel/mm/memory_peers/nv_mem/version"),
    ("nv_mem_nc", "kernel/mm/memory_peers/nv_mem_nc/version"),
    ("nvidia_peermem", "module/nvidia_peermem/version"),
    ("nv_peer_mem", "module/nv_peer_mem/version"),
];

/// A sysfs tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sysfs {
    root: PathBuf,
    bounds: Bounds,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self::at(SYSTEM_ROOT)
    }
}

impl Sysfs {
    /// A tree with this root.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), bounds: Bounds::default() }
    }

    /// That of a captured tree, whose links do not lead out of it.
    pub fn captured(tree: &Path) -> Self {
        Self { root: tree.join("sys"), bounds: Bounds::of(tree) }
    }

    /// The tree the settings ask for.
    pub fn from_settings(settings: &Settings) -> Self {
        settings.sysfs_root.as_ref().map_or_else(Self::default, Self::at)
    }

    /// The root of the tree.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A path below the root. A name from outside that is not a plain file name leads nowhere.
    fn path(&self, folder: &str, name: &str, rest: &str) -> PathBuf {
        let mut parts = Path::new(name).components();
        let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        let mut path = self.root.join(folder);
        path.push(if plain { name } else { "no-such-name" });
        path.push(rest);
        self.bounds.follow(&path)
    }

    /// A path below the root that is known beforehand.
    fn below(&self, path: &str) -> PathBuf {
        self.bounds.follow(&self.root.join(path))
    }

    fn device_file(&self, device: &str, rest: &str) -> PathBuf {
        self.path("class/infiniband", device, rest)
    }

    /// The kernel's RDMA devices, sorted. Empty where there are none.
    pub fn devices(&self) -> Vec<String> {
        names_in(&self.below("class/infiniband"))
    }

    /// The ports of a device, sorted.
    pub fn ports(&self, device: &str) -> Vec<u8> {
        let names = names_in(&self.device_file(device, "ports"));
        let mut ports: Vec<u8> = names.iter().filter_map(|name| name.parse().ok()).collect();
        ports.sort_unstable();
        ports
    }

    /// The text of a file of a device, without surrounding blanks.
    pub fn device_text(&self, device: &str, file: &str) -> Option<String> {
        Some(text(&self.device_file(device, file))?.trim().to_owned())
    }

    /// The text of a file of a network interface, without surrounding blanks.
    pub fn netdev_text(&self, interface: &str, file: &str) -> Option<String> {
        Some(text(&self.path("class/net", interface, file))?.trim().to_owned())
    }

    /// The partition keys of a port with their indices, those that cannot be read left out.
    pub fn pkey_table(&self, device: &str, port: u8) -> Vec<(u16, u16)> {
        let folder = format!("ports/{port}/pkeys");
        let key = |name: String| {
            let text = self.device_text(device, &format!("{folder}/{name}"))?;
            Some((name.parse().ok()?, u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()?))
        };
        let mut keys: Vec<_> =
            names_in(&self.device_file(device, &folder)).into_iter().filter_map(key).collect();
        keys.sort_unstable();
        keys
    }

    /// The path of a device in the device tree, `/sys/devices/…` whatever the root is; `None` for
    /// software devices.
    pub fn pci_path(&self, device: &str) -> Option<String> {
        let real = fs::canonicalize(self.device_file(device, "device")).ok()?;
        let root = fs::canonicalize(&self.root).ok()?;
        let path = real
            .strip_prefix(&root)
            .map_or_else(|_| real.clone(), |below| Path::new(SYSTEM_ROOT).join(below));
        path.into_os_string().into_string().ok()
    }

    /// The kernel driver of the device's PCI function, such as `mlx5_core`.
    pub fn driver(&self, device: &str) -> Option<String> {
        let function = self.device_file(device, "device");
        let link = fs::read_link(function.join("driver")).ok()?;
        link.file_name()?.to_str().map(str::to_owned)
    }

    /// The NUMA node a device is attached to.
    pub fn numa_node(&self, device: &str) -> Option<u32> {
        let text = text(&self.device_file(device, "device/numa_node"))?;
        text.trim().parse().ok()
    }

    /// The name of the node in `/dev/infiniband` through which programs use a device.
    pub fn verbs_node(&self, device: &str) -> Option<String> {
        names_in(&self.device_file(device, "device/infiniband_verbs")).into_iter().next()
    }

    /// The network interfaces of the device's PCI function.
    pub fn netdevs(&self, device: &str) -> Vec<String> {
        names_in(&self.device_file(device, "device/net"))
    }

    /// Whether an interface exists in the network namespace of this process.
    pub fn netdev_is_here(&self, name: &str) -> bool {
        if self.root == Path::new(SYSTEM_ROOT) {
            // A mounted sysfs shows the namespace of whoever mounted it; the socket layer shows
            // ours.
            super::netif::index_of(name).is_ok()
        } else {
            self.path("class/net", name, "").exists()
        }
    }

    /// Links behind a network interface: those of the bond that it is, or that it is a VLAN of; else 1.
    pub fn links(&self, netdev: &str) -> u8 {
        let links = |name: &str| {
            let text = text(&self.path("class/net", name, "bonding/slaves"))?;
            u8::try_from(text.split_whitespace().count()).ok().filter(|links| *links > 0)
        };
        let below = || {
            let names = names_in(&self.path("class/net", netdev, ""));
            names.iter().filter_map(|name| links(name.strip_prefix("lower_")?)).max()
        };
        links(netdev).or_else(below).unwrap_or(1)
    }

    fn gid_attribute(
        &self,
        device: &str,
        port: u8,
        attribute: &str,
        index: u32,
    ) -> io::Result<Option<String>> {
        let rest = format!("ports/{port}/gid_attrs/{attribute}/{index}");
        match plain::read(&self.device_file(device, &rest), 1 << 16) {
            Ok(text) => Ok(Some(String::from_utf8_lossy(&text).trim().to_owned())),
            Err(error) if is_empty_slot(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The RoCE version of a GID table entry; `None` where the slot is empty or the kernel does not
    /// say. An empty slot reads as EINVAL, which is no error.
    pub fn gid_version(&self, device: &str, port: u8, index: u32) -> io::Result<Option<u8>> {
        let text = self.gid_attribute(device, port, "types", index)?;
        Ok(text.as_deref().and_then(roce_version))
    }

    /// The network interface of a GID table entry.
    pub fn gid_netdev(&self, device: &str, port: u8, index: u32) -> NetDev {
        match self.gid_attribute(device, port, "ndevs", index) {
            Ok(Some(name)) if !name.is_empty() => {
                if self.netdev_is_here(&name) {
                    NetDev::Here(name)
                } else {
                    NetDev::Elsewhere(name)
                }
            }
            Ok(_) | Err(_) => NetDev::Unknown,
        }
    }

    /// The GID in a slot; `None` where the slot cannot be read.
    pub fn gid(&self, device: &str, port: u8, index: u32) -> Option<[u8; 16]> {
        let rest = format!("ports/{port}/gids/{index}");
        let text = text(&self.device_file(device, &rest))?;
        text.trim().parse::<Ipv6Addr>().ok().map(|gid| gid.octets())
    }

    /// A GID known from elsewhere, completed with what sysfs says about its slot.
    pub fn gid_entry(&self, device: &str, port: u8, index: u32, gid: [u8; 16]) -> GidEntry {
        GidEntry {
            index,
            gid,
            version: self.gid_version(device, port, index).unwrap_or(None),
            netdev: self.gid_netdev(device, port, index),
        }
    }

    /// The whole GID table of a port as sysfs shows it, slots that cannot be read left out.
    pub fn gid_table(&self, device: &str, port: u8) -> Vec<GidEntry> {
        let mut slots: Vec<u32> =
            names_in(&self.device_file(device, &format!("ports/{port}/gids")))
                .iter()
                .filter_map(|name| name.parse().ok())
                .collect();
        slots.sort_unstable();
        slots
            .into_iter()
            .filter_map(|index| {
                let gid = self.gid(device, port, index)?;
                Some(self.gid_entry(device, port, index, gid))
            })
            .collect()
    }

    /// The files whose presence [`Self::peermem`] asks for, with the modules' names.
    pub fn peermem_probes(&self) -> impl Iterator<Item = (&'static str, PathBuf)> {
        PEERMEM.iter().map(|(name, file)| (*name, self.below(file)))
    }

    /// The loaded kernel module that lets devices reach GPU memory without a DMA-BUF.
    pub fn peermem(&self) -> Option<&'static str> {
        let loaded = |(_, file): &&(&str, &str)| self.below(file).exists();
        PEERMEM.iter().find(loaded).map(|(name, _)| *name)
    }
}

/// Whether a read failed because there is nothing in the slot, or no such file.
fn is_empty_slot(error: &io::Error) -> bool {
    let absent = [Errno::INVAL, Errno::NODATA, Errno::NOENT, Errno::NOTDIR, Errno::NODEV];
    Errno::from_io_error(error).is_some_and(|errno| absent.contains(&errno))
}

/// The version in the text of a `gid_attrs/types` file.
fn roce_version(text: &str) -> Option<u8> {
    match text {
        _ if text.starts_with("RoCE v2") => Some(2),
        _ if text.starts_with("IB/RoCE v1") || text.starts_with("RoCE v1") => Some(1),
        _ => None,
    }
}

/// The names in a folder, sorted; empty where it cannot be read.
fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;

    fn sysfs(tree: &Tree) -> Sysfs {
        Sysfs::at(tree.root())
    }

    const DEVICE: &str = "devices/pci0000:3a/0000:3b:00.1";

    fn adapter() -> Tree {
        let tree = Tree::new(&[
            ("devices/pci0000:3a/0000:3b:00.1/numa_node", "1\n"),
            ("devices/pci0000:3a/0000:3b:00.1/net/eth4/mtu", "9000\n"),
            ("devices/pci0000:3a/0000:3b:00.1/infiniband_verbs/uverbs4/abi_version", "1\n"),
            ("class/infiniband/mlx5_1/ports/1/gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001\n"),
            ("class/infiniband/mlx5_1/ports/1/gids/1", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
            (
                "class/infiniband/mlx5_1/ports/1/gids/10",
                "0000:0000:0000:0000:0000:ffff:0a00:0001\n",
            ),
            ("class/infiniband/mlx5_1/ports/1/gids/2", "nonsense\n"),
            ("class/infiniband/mlx5_1/ports/1/gid_attrs/types/0", "IB/RoCE v1\n"),
            ("class/infiniband/mlx5_1/ports/1/gid_attrs/types/10", "RoCE v2\n"),
            ("class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0", "eth4\n"),
            ("class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/10", "eth9\n"),
            ("class/net/eth4/mtu", "9000\n"),
            ("class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n"),
        ]);
        let device = tree.root().join(DEVICE);
        tree.link("class/infiniband/mlx5_1/device", device.to_str().unwrap());
        tree
    }

    #[test]
    fn links_are_those_of_a_bond() {
        let tree = Tree::new(&[
            ("class/net/bond0/bonding/slaves", "eth0 eth1 eth2\n"),
            ("class/net/bond1/bonding/slaves", "\n"),
            ("class/net/bond0.7/lower_bond0/mtu", "9000\n"),
            ("class/net/eth0.7/lower_eth0/mtu", "9000\n"),
            ("class/net/eth0/mtu", "9000\n"),
        ]);
        let rows =
            [("bond0", 3), ("bond1", 1), ("bond0.7", 3), ("eth0.7", 1), ("eth0", 1), ("no", 1)];
        for (name, links) in rows {
            assert_eq!(sysfs(&tree).links(name), links, "{name}");
        }
        assert_eq!(sysfs(&tree).links("../net/bond0"), 1);
    }

    #[test]
    fn a_device_is_described() {
        let tree = adapter();
        let sysfs = sysfs(&tree);
        assert_eq!(sysfs.devices(), ["mlx5_1", "rxe0"]);
        assert_eq!(
            sysfs.pci_path("mlx5_1").as_deref(),
            Some("/sys/devices/pci0000:3a/0000:3b:00.1")
        );
        assert_eq!(sysfs.numa_node("mlx5_1"), Some(1));
        assert_eq!(sysfs.netdevs("mlx5_1"), ["eth4"]);
        assert_eq!(sysfs.verbs_node("mlx5_1").as_deref(), Some("uverbs4"));
        assert_eq!(sysfs.verbs_node("rxe0"), None);
        assert_eq!((sysfs.pci_path("rxe0"), sysfs.numa_node("rxe0")), (None, None));
        assert_eq!(sysfs.pci_path("absent"), None);
    }

    #[test]
    fn a_sparse_gid_table_is_read() {
        let tree = adapter();
        let table = sysfs(&tree).gid_table("mlx5_1", 1);
        let rows: Vec<_> = table.iter().map(|e| (e.index, e.version, e.netdev.clone())).collect();
        let expected = [
            (0, Some(1), NetDev::Here("eth4".into())),
            (1, None, NetDev::Unknown),
            (10, Some(2), NetDev::Elsewhere("eth9".into())),
        ];
        assert_eq!(rows, expected);
        assert_eq!(table[2].gid[10..], [0xff, 0xff, 10, 0, 0, 1]);
    }

    #[test]
    fn names_from_outside_cannot_leave_the_tree() {
        let tree = adapter();
        let sysfs = sysfs(&tree);
        for name in ["..", "../../devices", "/etc", "", "a/b", "."] {
            assert_eq!(sysfs.pci_path(name), None, "{name}");
            assert!(!sysfs.netdev_is_here(name), "{name}");
            assert_eq!(sysfs.gid_table(name, 1), []);
        }
    }

    #[test]
    fn an_empty_slot_is_no_error() {
        let kinds = [Errno::INVAL, Errno::NODATA, Errno::NOENT].map(io::Error::from);
        assert!(kinds.iter().all(is_empty_slot));
        assert!(!is_empty_slot(&Errno::ACCESS.into()));
        assert_eq!(sysfs(&adapter()).gid_version("mlx5_1", 1, 99).unwrap(), None);
    }

    #[test]
    fn every_peer_memory_module_counts() {
        for (name, file) in PEERMEM {
            let tree = Tree::new(&[(file, "1.0\n")]);
            assert_eq!(sysfs(&tree).peermem(), Some(name));
        }
        assert_eq!(sysfs(&adapter()).peermem(), None);
    }

    #[test]
    fn a_tree_that_is_not_there_is_empty() {
        let sysfs = Sysfs::at("/no/such/folder");
        assert!(sysfs.devices().is_empty() && sysfs.peermem().is_none());
        assert_eq!(sysfs.gid_table("mlx5_0", 1), []);
    }
}
