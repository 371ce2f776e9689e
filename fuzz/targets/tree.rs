//! Whatever the files of sysfs, procfs and a captured tree hold: facts or their absence, findings and a document, no panic.
//!
//! The input is a list of files by number, each with its bytes. The reader is `pinrail doctor --root`, which uses the
//! parsers of the plugin; beside it, what the plugin asks for the devices that it finds.
#![no_main]
#![allow(dead_code, reason = "sources of the command, of which its main function uses the rest")]

use libfuzzer_sys::fuzz_target;
use nccl_net_pinrail::config::Settings;
use nccl_net_pinrail::host::{
    bootlog, cgroup, fdinfo, headroom, mounts, pci, pkey, placement_risk, smaps,
};
use nccl_net_pinrail::host::{procfs::Proc, sysfs::Sysfs};
use pinrail_fuzz::bytes::Bytes;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

mod args {
    use std::path::PathBuf;

    pub struct Doctor {
        pub root: Option<PathBuf>,
        pub bundle: Option<PathBuf>,
        pub json: bool,
    }
}
#[path = "../../cli/src/doctor/mod.rs"]
mod doctor;
#[path = "../../cli/src/output.rs"]
mod output;

/// What may be written. A name that ends with `@` is a link to the place that the bytes name by their first one.
const FILES: &[&str] = &[
    "sys/class/infiniband/mlx5_0/device@",
    "sys/class/infiniband/mlx5_0/fw_ver",
    "sys/class/infiniband/mlx5_0/hca_type",
    "sys/class/infiniband/mlx5_0/board_id",
    "sys/class/infiniband/mlx5_0/sys_image_guid",
    "sys/class/infiniband/mlx5_0/ports/1/state",
    "sys/class/infiniband/mlx5_0/ports/1/phys_state",
    "sys/class/infiniband/mlx5_0/ports/1/rate",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer",
    "sys/class/infiniband/mlx5_0/ports/1/lid",
    "sys/class/infiniband/mlx5_0/ports/1/pkeys/0",
    "sys/class/infiniband/mlx5_0/ports/1/pkeys/7",
    "sys/class/infiniband/mlx5_0/ports/1/gids/0",
    "sys/class/infiniband/mlx5_0/ports/1/gids/1",
    "sys/class/infiniband/mlx5_0/ports/1/gids/3",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1",
    "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error",
    "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed",
    "sys/class/infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence",
    "sys/class/infiniband/mlx5_0/tc/1/traffic_class",
    "sys/class/infiniband/rxe0/ports/1/state",
    "sys/class/infiniband/rxe0/ports/255/link_layer",
    "sys/class/infiniband_verbs/uverbs0/ibdev",
    "sys/devices/pci0000:3a/0000:3a:01.0/class",
    "sys/devices/pci0000:3a/0000:3a:01.0/config",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/numa_node",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/class",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/vendor",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/device",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/config",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/current_link_speed",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/current_link_width",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/max_link_speed",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/max_link_width",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/iommu_group/type",
    "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/net/eth0/mtu",
    "sys/bus/pci/devices/0000:3b:00.0@",
    "sys/bus/pci/devices/0000:3a:01.0@",
    "sys/bus/pci/devices/0000:17:00.0/class",
    "sys/bus/pci/devices/0000:17:00.0/vendor",
    "sys/class/net/eth0/mtu",
    "sys/class/net/eth0/operstate",
    "sys/class/net/bond0/bonding/slaves",
    "sys/class/net/bond0/bonding/mode",
    "sys/class/net/bond0/bonding/xmit_hash_policy",
    "sys/class/net/eth0/master@",
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/module/nvidia_peermem/version",
    "sys/fs/cgroup/rdma.max",
    "sys/fs/cgroup/rdma.current",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/job/memory.max",
    "sys/fs/cgroup/job/memory.current",
    "sys/fs/cgroup/job/memory.stat",
    "sys/fs/cgroup/job/rdma.max",
    "sys/fs/cgroup/job/rdma.current",
    "proc/self/limits",
    "proc/self/status",
    "proc/self/cgroup",
    "proc/self/environ",
    "proc/self/mountinfo",
    "proc/self/ns/net@",
    "proc/1/limits",
    "proc/cmdline",
    "proc/meminfo",
    "proc/zoneinfo",
    "proc/version",
    "proc/sys/kernel/osrelease",
    "proc/sys/kernel/arch",
    "proc/driver/nvidia/version",
    "proc/net/bonding/bond0",
    "etc/nccl.conf",
    "pinrail/verbs.json",
    "pinrail/report.json",
    "dev/infiniband/uverbs0",
    "usr/lib/x86_64-linux-gnu/libibverbs.so.1",
];

/// Where links lead.
const PLACES: &[&str] = &[
    "/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0",
    "/devices/pci0000:3a/0000:3a:01.0",
    "/class/net/bond0",
    "/class/infiniband/mlx5_0",
    "/nowhere",
    "/..",
];

/// A folder of this process, in memory.
fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| PathBuf::from(format!("/dev/shm/pinrail-fuzz-{}", std::process::id())))
}

fn write(file: &str, bytes: &[u8]) {
    let path = root().join(file.trim_end_matches('@'));
    let Some(folder) = path.parent() else { return };
    // A part of the path may be a file by now, or lead elsewhere: then there is one file less.
    if fs::create_dir_all(folder).is_err() || path.symlink_metadata().is_ok() {
        return;
    }
    let _ = if file.ends_with('@') {
        let place = PLACES[usize::from(bytes.first().copied().unwrap_or(0)) % PLACES.len()];
        symlink(format!("{}/sys{place}", root().display()), path)
    } else {
        fs::write(path, bytes)
    };
}

fn seed(files: &[(&str, &str)]) -> Vec<u8> {
    let mut seed = Vec::new();
    for (file, text) in files {
        let number = FILES.iter().position(|known| known == file).expect("a file of the list");
        seed.push(number as u8);
        seed.extend((text.len() as u16).to_le_bytes());
        seed.extend(text.as_bytes());
    }
    seed
}

fn seeds() -> Vec<Vec<u8>> {
    let live = |file: &str| {
        fs::read_to_string(file).unwrap_or_default().chars().take(3000).collect::<String>()
    };
    let texts = [
        ("proc/self/limits", live("/proc/self/limits")),
        ("proc/self/status", live("/proc/self/status")),
        ("proc/self/cgroup", "0::/job\n".to_owned()),
        ("proc/self/environ", "NCCL_IB_HCA=mlx5\0PINRAIL_FORK=never\0HOME=/root\0".to_owned()),
        ("proc/self/mountinfo", live("/proc/self/mountinfo")),
        (
            "proc/cmdline",
            "root=/dev/vda cma=512M@4G movablecore=10% iommu=pt intel_iommu=on".to_owned(),
        ),
        ("proc/meminfo", live("/proc/meminfo") + "CmaTotal: 65536 kB\nCmaFree: 1024 kB\n"),
        ("proc/zoneinfo", live("/proc/zoneinfo")),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module  570.86.10\n".to_owned(),
        ),
        (
            "sys/fs/cgroup/job/rdma.max",
            "mlx5_0 hca_handle=2 hca_object=2000\nrxe0 hca_handle=max\n".to_owned(),
        ),
        ("sys/fs/cgroup/job/rdma.current", "mlx5_0 hca_handle=2 hca_object=1999\n".to_owned()),
        ("sys/fs/cgroup/job/memory.max", "1073741824\n".to_owned()),
        ("sys/fs/cgroup/job/memory.current", "1073740000\n".to_owned()),
        ("etc/nccl.conf", "NCCL_IB_TIMEOUT=22\n# a word\nNCCL_DEBUG=INFO\n".to_owned()),
    ];
    let device = [
        ("sys/class/infiniband/mlx5_0/device@", "\0"),
        ("sys/class/infiniband/mlx5_0/fw_ver", "28.41.1000\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/phys_state", "5: LinkUp\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/pkeys/0", "0xffff\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0", "RoCE v2\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "eth0\n"),
        (
            "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/config",
            "\u{10}\u{1}\0\0\u{10}\u{1}\0\0",
        ),
        ("sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/class", "0x020700\n"),
        ("sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/max_link_speed", "32.0 GT/s PCIe\n"),
        ("sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/current_link_speed", "16.0 GT/s PCIe\n"),
        ("sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0/net/eth0/mtu", "9000\n"),
        ("sys/class/net/bond0/bonding/slaves", "eth0 eth1\n"),
        ("sys/class/net/eth0/mtu", "1500\n"),
        ("pinrail/verbs.json", "{\"library\": {\"path\": \"libibverbs.so.1\"}, \"devices\": []}"),
    ];
    let texts: Vec<_> = texts.iter().map(|(file, text)| (*file, text.as_str())).collect();
    let all: Vec<_> = texts.iter().chain(&device).copied().collect();
    let mut seeds: Vec<_> = all.iter().map(|file| seed(&[*file])).collect();
    seeds.push(seed(&device));
    seeds.push(seed(&all));
    seeds
}

/// What the plugin asks beside the doctor.
fn ask(data: &[u8]) {
    let (sysfs, proc) = (Sysfs::at(root().join("sys")), Proc::at(root().join("proc")));
    let settings = Settings::from_variables([]).0;
    for device in sysfs.devices() {
        let paths = [sysfs.pci_path(&device)];
        let paths = paths.iter().map(Option::as_deref);
        pci::real_port_offsets(paths.clone());
        pci::pci_order(paths.clone());
        paths.flatten().for_each(|path| {
            pci::merged_path(path, true);
        });
        for port in sysfs.ports(&device) {
            let _ = pkey::choose(&sysfs.pkey_table(&device, port), &settings);
            sysfs.gid_table(&device, port);
        }
        let _ = (sysfs.driver(&device), sysfs.numa_node(&device), sysfs.verbs_node(&device));
        sysfs.netdevs(&device).iter().for_each(|name| assert!(sysfs.links(name) > 0));
    }
    let _ = (placement_risk(&proc), headroom(&proc, sysfs.root()), sysfs.peermem());
    let _ = cgroup::Cgroup::read(&proc, sysfs.root());
    let text = String::from_utf8_lossy(data);
    let maps = smaps::Smaps::parse(&text);
    maps.at(0x1000);
    maps.overlapping(0..u64::MAX).for_each(|mapping| {
        mapping.is_shared_memory(None);
    });
    let _ = (
        bootlog::areas(&text),
        mounts::filesystem(&text, (0, 1)),
        fdinfo::DmaBufInfo::parse(&text),
    );
}

fuzz_target!(
    init: pinrail_fuzz::plant("tree", seeds()),
    |data: &[u8]| {
        for folder in ["proc/self", "sys"] {
            fs::create_dir_all(root().join(folder)).expect("a folder in memory");
        }
        let mut bytes = Bytes::new(data);
        while !bytes.is_empty() {
            let file = FILES[bytes.below(FILES.len())];
            let len = bytes.number(2) as usize;
            write(file, bytes.take(len));
        }
        let bundle = root().join("bundle.tar");
        for (json, bundle) in [(false, None), (true, Some(bundle))] {
            doctor::run(&args::Doctor { root: Some(root().to_owned()), bundle, json });
        }
        ask(data);
        fs::remove_dir_all(root()).expect("a folder of our own");
    }
);
