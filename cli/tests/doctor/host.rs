//! Made-up hosts: a tree of plain files below one folder, described by what differs from a host where all is well.

use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

pub const PINRAIL: &str = env!("CARGO_BIN_EXE_pinrail");

/// Where both adapters and the GPU hang.
const BRIDGE: &str = "sys/devices/pci0000:3a/0000:3a:00.0";

/// One adapter with one port.
#[derive(Clone, Copy)]
pub struct Adapter {
    pub name: &'static str,
    /// Bus and function below the bridge, such as `3b:00.0`.
    pub pci: &'static str,
    pub interface: &'static str,
    pub guid: &'static str,
    pub gids: &'static [(u32, &'static str, &'static str)],
}

pub const FIRST: Adapter = Adapter {
    name: "mlx5_0",
    pci: "0000:3b:00.0",
    interface: "eth0",
    guid: "b83f:d203:00aa:0000",
    gids: &[
        (0, "fe80:0000:0000:0000:ba3f:d2ff:fe00:0001", "IB/RoCE v1"),
        (1, "fe80:0000:0000:0000:ba3f:d2ff:fe00:0001", "RoCE v2"),
        (2, "0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1"),
        (3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
    ],
};
pub const SECOND: Adapter = Adapter {
    name: "mlx5_1",
    pci: "0000:3d:00.0",
    interface: "eth1",
    guid: "b83f:d203:00bb:0000",
    gids: &[
        (0, "fe80:0000:0000:0000:ba3f:d2ff:fe00:0002", "RoCE v2"),
        (3, "0000:0000:0000:0000:0000:ffff:0a00:0102", "RoCE v2"),
    ],
};

/// A host.
pub struct Host(PathBuf);

impl Host {
    /// A folder with nothing in it.
    pub fn empty() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let root =
            std::env::temp_dir().join(format!("pinrail-doctor-{}-{number}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }

    /// Two adapters of one port, a GPU, and nothing wrong.
    pub fn healthy() -> Self {
        let host = Self::empty();
        host.adapter(FIRST, 0);
        host.adapter(SECOND, 1);
        host.function(&format!("{BRIDGE}/0000:3c:00.0"), "0x030200", "0x10de", 0, 0x10);
        host.function(BRIDGE, "0x060400", "0x1000", 0, 0);
        host.files(&[
            ("sys/module/nvidia_peermem/version", "580.95.05\n"),
            ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"),
            ("proc/meminfo", "MemTotal: 1056763904 kB\nMemFree: 900000000 kB\n"),
            ("proc/zoneinfo", "Node 0, zone Normal\n  nr_free_cma 0\n  managed 262144000\n  cma 0\n"),
            ("proc/cmdline", "quiet iommu=pt\n"),
            ("proc/sys/kernel/osrelease", "6.8.0-60-generic\n"),
            ("proc/sys/kernel/arch", "x86_64\n"),
            ("proc/self/status", "PPid:\t77\nVmPin:\t0 kB\nCapEff:\t0000000000000000\n"),
            ("proc/self/cgroup", "0::/user.slice\n"),
            ("etc/libibverbs.d/mlx5.driver", "driver mlx5\n"),
            ("usr/lib/x86_64-linux-gnu/libibverbs.so.1", ""),
            ("usr/lib/x86_64-linux-gnu/libibverbs.so.1.15.59.0", ""),
            ("usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav59.so", ""),
        ]);
        host.namespaces(4_026_531_836);
        for process in ["self", "77", "1"] {
            host.limits(process, "unlimited", "1048576");
        }
        host.environment(&[]);
        host
    }

    pub fn root(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub fn files(&self, files: &[(&str, &str)]) {
        for (path, text) in files {
            self.write(path, text.as_bytes());
        }
    }

    pub fn remove(&self, path: &str) {
        let path = self.0.join(path);
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }

    pub fn link(&self, path: &str, to: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(to, path).unwrap();
    }

    /// The variables of the process, beside HOME.
    pub fn environment(&self, variables: &[(&str, &str)]) {
        let mut text = "HOME=/root\0".to_owned();
        for (name, value) in variables {
            text += &format!("{name}={value}\0");
        }
        self.write("proc/self/environ", text.as_bytes());
    }

    /// The limits of a process: memory in bytes or `unlimited`, and files.
    pub fn limits(&self, process: &str, memory: &str, files: &str) {
        let text = format!(
            "Limit                     Soft Limit           Hard Limit           Units\n\
             Max open files            1024                 {files}              files\n\
             Max locked memory         {memory}             {memory}             bytes\n"
        );
        self.write(&format!("proc/{process}/limits"), text.as_bytes());
    }

    /// Namespaces of the process; any number but the first one's is a container's.
    pub fn namespaces(&self, pid: u64) {
        self.link("proc/self/ns/pid", &format!("pid:[{pid}]"));
        self.link("proc/self/ns/cgroup", "cgroup:[4026531835]");
        self.link("proc/self/ns/user", "user:[4026531837]");
    }

    /// Makes the process one of a container of Docker's.
    pub fn contained(&self) {
        self.namespaces(4_026_532_999);
        self.files(&[("proc/self/cgroup", "0::/docker/0123abcd\n")]);
    }

    /// A PCI function at a path of the device tree.
    pub fn function(&self, path: &str, class: &str, vendor: &str, access_control: u8, control: u8) {
        let mut space = vec![0; 4096];
        space[0x34] = 0x60;
        space[0x60] = 0x10;
        space[0x68] = control;
        space[0x100..0x104].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
        space[0x106] = access_control;
        self.write(&format!("{path}/config"), &space);
        self.files(&[
            (&format!("{path}/class"), class),
            (&format!("{path}/vendor"), vendor),
            (&format!("{path}/iommu_group/type"), "identity\n"),
        ]);
        let (_, address) = path.rsplit_once('/').unwrap();
        let below = path.strip_prefix("sys/").unwrap();
        self.link(&format!("sys/bus/pci/devices/{address}"), &format!("../../../{below}"));
    }

    /// Where an adapter's PCI function lies.
    pub fn path_of(adapter: Adapter) -> String {
        format!("{BRIDGE}/{}", adapter.pci)
    }

    /// The bridge above everything.
    pub fn bridge() -> &'static str {
        BRIDGE
    }

    /// An adapter with all that belongs to it.
    pub fn adapter(&self, adapter: Adapter, node: u32) {
        let Adapter { name, interface, guid, gids, .. } = adapter;
        let function = Self::path_of(adapter);
        self.function(&function, "0x020000", "0x15b3", 0, 0x10);
        let device = format!("{function}/infiniband/{name}");
        let port = format!("{device}/ports/1");
        self.files(&[
            (&format!("{function}/current_link_speed"), "32.0 GT/s PCIe\n"),
            (&format!("{function}/max_link_speed"), "32.0 GT/s PCIe\n"),
            (&format!("{function}/current_link_width"), "16\n"),
            (&format!("{function}/max_link_width"), "16\n"),
            (&format!("{function}/net/{interface}/mtu"), "9000\n"),
            (&format!("{function}/net/{interface}/operstate"), "up\n"),
            (&format!("{device}/sys_image_guid"), guid),
            (&format!("{port}/state"), "4: ACTIVE\n"),
            (&format!("{port}/phys_state"), "5: LinkUp\n"),
            (&format!("{port}/rate"), "400 Gb/sec (4X NDR)\n"),
            (&format!("{port}/link_layer"), "Ethernet\n"),
            (&format!("{port}/pkeys/0"), "0xffff\n"),
            (&format!("sys/class/infiniband_verbs/uverbs{node}/ibdev"), name),
            (&format!("dev/infiniband/uverbs{node}"), ""),
        ]);
        for (index, gid, version) in gids {
            self.files(&[
                (&format!("{port}/gids/{index}"), gid),
                (&format!("{port}/gid_attrs/types/{index}"), version),
                (&format!("{port}/gid_attrs/ndevs/{index}"), interface),
            ]);
        }
        let below = function.strip_prefix("sys/").unwrap();
        self.link(&format!("{device}/device"), &format!("../../../{}", adapter.pci));
        self.link(&format!("{function}/driver"), "../../../../bus/pci/drivers/mlx5_core");
        self.link(
            &format!("sys/class/infiniband/{name}"),
            &format!("../../{below}/infiniband/{name}"),
        );
        self.link(&format!("sys/class/net/{interface}"), &format!("../../{below}/net/{interface}"));
    }

    /// Files of an adapter's port.
    pub fn port(&self, adapter: Adapter, files: &[(&str, &str)]) {
        let port = format!("{}/infiniband/{}/ports/1", Self::path_of(adapter), adapter.name);
        for (file, text) in files {
            self.files(&[(&format!("{port}/{file}"), text)]);
        }
    }

    /// Makes a port one of InfiniBand.
    pub fn infiniband(&self, adapter: Adapter) {
        self.port(adapter, &[("link_layer", "InfiniBand\n")]);
    }

    /// What the verbs library said when the tree was captured.
    pub fn library(&self, text: &str) {
        self.files(&[("pinrail/verbs.json", text)]);
    }

    /// Runs a command of pinrail on the host, with an environment of its own.
    pub fn run(&self, arguments: &[&str]) -> Output {
        Command::new(PINRAIL)
            .args(arguments)
            .arg("--root")
            .arg(&self.0)
            .env_clear()
            .output()
            .expect("the command runs")
    }

    /// What the doctor says.
    pub fn report(&self) -> Report {
        Report::of(&self.run(&["doctor", "--json"]))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What the doctor said.
pub struct Report {
    pub code: i32,
    pub document: Value,
}

impl Report {
    pub fn of(output: &Output) -> Self {
        let text = String::from_utf8(output.stdout.clone()).expect("text");
        let document: Value = serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("{e}: {text} {}", String::from_utf8_lossy(&output.stderr)));
        let code = output.status.code().expect("an exit status");
        assert_eq!(document["exit_code"], code, "{document:#}");
        Self { code, document }
    }

    /// The findings of a level: check, what, evidence, remedy.
    pub fn findings(&self, level: &str) -> Vec<[String; 4]> {
        let all = self.document["findings"].as_array().cloned().unwrap_or_default();
        all.iter()
            .filter(|finding| finding["level"] == level)
            .map(|finding| {
                ["check", "what", "evidence", "remedy"]
                    .map(|key| finding[key].as_str().expect("text").to_owned())
            })
            .collect()
    }
}
