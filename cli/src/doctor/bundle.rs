//! One archive for a bug report: the files that the verdicts rest on, so that `--root` judges them alike elsewhere.
//!
//! Secrets stay out: of variables and configuration files only names that concern RDMA are kept, of the kernel's command
//! line only parameters about memory and IOMMU, of libraries and device nodes only the names.

use super::machine::{Machine, names, read};
use super::verbs;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use tar::{Builder, EntryType, Header};

/// Files below sysfs. A star stands for every name in a folder.
const SYS: [&str; 28] = [
    "class/infiniband/*/sys_image_guid",
    "class/infiniband/*/fw_ver",
    "class/infiniband/*/hca_type",
    "class/infiniband/*/board_id",
    "class/infiniband/*/ports/*/state",
    "class/infiniband/*/ports/*/phys_state",
    "class/infiniband/*/ports/*/rate",
    "class/infiniband/*/ports/*/link_layer",
    "class/infiniband/*/ports/*/lid",
    "class/infiniband/*/ports/*/pkeys/*",
    "class/infiniband/*/ports/*/gids/*",
    "class/infiniband/*/ports/*/gid_attrs/types/*",
    "class/infiniband/*/ports/*/gid_attrs/ndevs/*",
    "class/infiniband/*/ports/*/counters/*",
    "class/infiniband/*/ports/*/hw_counters/*",
    "class/infiniband/*/tc/*/traffic_class",
    "class/infiniband/*/device/numa_node",
    "class/infiniband/*/device/current_link_*",
    "class/infiniband/*/device/max_link_*",
    "class/infiniband/*/device/net/*/mtu",
    "class/infiniband_verbs/*/ibdev",
    "class/net/*/mtu",
    "class/net/*/operstate",
    "class/net/*/bonding/mode",
    "class/net/*/bonding/slaves",
    "class/net/*/bonding/xmit_hash_policy",
    "kernel/mm/memory_peers/*/version",
    "module/nvidia_peermem/version",
];

/// Links below sysfs whose targets say something by their names.
const SYS_LINKS: [&str; 2] = ["class/infiniband/*/device/driver", "class/net/*/master"];

/// Files of PCI functions: adapters, bridges and GPUs.
const PCI: [&str; 5] = ["class", "vendor", "device", "config", "iommu_group/type"];
/// Beginnings of their classes.
const PCI_CLASSES: [&str; 4] = ["0x02", "0x03", "0x0604", "0x12"];

/// Files below procfs.
const PROC: [&str; 11] = [
    "self/limits",
    "self/status",
    "self/cgroup",
    "1/limits",
    "meminfo",
    "zoneinfo",
    "sys/kernel/osrelease",
    "sys/kernel/arch",
    "driver/nvidia/version",
    "version",
    "net/bonding/*",
];
const NAMESPACES: [&str; 4] = ["cgroup", "pid", "user", "net"];

/// Files of a control group.
const GROUP: [&str; 7] = [
    "rdma.max",
    "rdma.current",
    "memory.max",
    "memory.current",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.stat",
];

/// Variables that are kept, by the beginnings of their names.
const VARIABLES: [&str; 8] = [
    "NCCL_",
    "PINRAIL_",
    "RDMAV_",
    "IBV_",
    "MLX5_",
    "MLX4_",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
];
/// Words in a name that say that its value is nobody else's business.
const SECRETS: [&str; 19] = [
    "KEY",
    "KEYS",
    "APIKEY",
    "TOKEN",
    "TOKENS",
    "SECRET",
    "SECRETS",
    "PASS",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "PWD",
    "PIN",
    "PKI",
    "CRED",
    "CREDENTIAL",
    "CREDENTIALS",
    "AUTH",
    "BEARER",
];
/// Parameters of the kernel that are kept.
const PARAMETERS: [&str; 14] = [
    "cma",
    "hugetlb_cma",
    "kho",
    "kho_scratch",
    "movablecore",
    "kernelcore",
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "iommu.passthrough",
    "pci",
    "hugepages",
    "hugepagesz",
    "transparent_hugepage",
];

/// An empty slot of a GID table.
const NO_GID: &[u8] = b"0000:0000:0000:0000:0000:0000:0000:0000";

/// Where the user's configuration file stands in a bundle, whose name of the home folder is nobody's business.
const HOME: &str = "/home";

/// What the archive will hold, by path.
#[derive(Debug)]
enum Entry {
    Text(Vec<u8>),
    Link(PathBuf),
}

struct Bundle<'a> {
    machine: &'a Machine,
    entries: BTreeMap<PathBuf, Entry>,
}

/// Writes the archive. It must not exist.
pub fn write(path: &Path, machine: &Machine, report: &str) -> io::Result<()> {
    let mut bundle = Bundle { machine, entries: BTreeMap::new() };
    bundle.sysfs();
    bundle.procfs();
    bundle.configuration();
    bundle.libraries();
    bundle.text("pinrail/report.json", without_secrets(report, machine.variables()).into_bytes());
    if let Some(facts) = &machine.verbs {
        bundle.text(verbs::FILE, format!("{:#}\n", facts.document()).into_bytes());
    }
    let mut archive = Builder::new(File::create_new(path)?);
    for (path, entry) in &bundle.entries {
        let mut header = Header::new_gnu();
        header.set_mode(0o644);
        match entry {
            Entry::Text(bytes) => {
                header.set_size(bytes.len() as u64);
                archive.append_data(&mut header, path, bytes.as_slice())?;
            }
            Entry::Link(target) => {
                header.set_entry_type(EntryType::Symlink);
                header.set_size(0);
                archive.append_link(&mut header, path, target)?;
            }
        }
    }
    archive.into_inner()?.sync_all()
}

/// Whether a variable's name says that its value is nobody else's business.
fn is_secret(name: &str) -> bool {
    name.split('_').any(|word| SECRETS.contains(&word.to_ascii_uppercase().as_str()))
}

/// Whether a variable may be kept.
fn is_kept(name: &[u8]) -> bool {
    let Ok(name) = std::str::from_utf8(name) else { return false };
    VARIABLES.iter().any(|begin| name.starts_with(begin)) && !is_secret(name)
}

/// A report without the values of secret variables, which it may tell because their names are unknown, and without the
/// name of the home folder.
fn without_secrets(report: &str, variables: &[(OsString, OsString)]) -> String {
    let quoted = |text: &str| {
        let quoted = serde_json::Value::from(text).to_string();
        quoted[1..quoted.len() - 1].to_owned()
    };
    let mut report = report.to_owned();
    for (name, value) in variables {
        let (name, value) = (name.to_string_lossy(), value.to_string_lossy());
        if is_secret(&name) && !value.is_empty() {
            let told = format!("{}={}", quoted(&name), quoted(&value));
            report = report.replace(&told, &format!("{}=(left out)", quoted(&name)));
        }
        if name == "HOME" && value.len() > 1 {
            report = report.replace(&quoted(&value), HOME);
        }
    }
    report
}

/// Every path that a pattern stands for, below a folder.
fn expand(root: &Path, pattern: &str) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for part in pattern.split('/') {
        let Some((begin, end)) = part.split_once('*') else {
            found.iter_mut().for_each(|path| path.push(part));
            continue;
        };
        found = found
            .iter()
            .flat_map(|path| {
                let all = names(&root.join(path)).into_iter();
                all.filter(|name| name.starts_with(begin) && name.ends_with(end))
                    .map(|name| path.join(name))
                    .collect::<Vec<_>>()
            })
            .collect();
    }
    found
}

impl Bundle<'_> {
    fn text(&mut self, path: impl Into<PathBuf>, bytes: Vec<u8>) {
        self.entries.insert(path.into(), Entry::Text(bytes));
    }

    fn sysfs(&mut self) {
        let root = self.machine.sysfs.root().to_owned();
        for pattern in SYS {
            for path in expand(&root, pattern) {
                self.follow(&root, &path);
            }
        }
        for pattern in SYS_LINKS {
            for path in expand(&root, pattern) {
                let Ok(target) = fs::read_link(root.join(&path)) else { continue };
                let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
                    continue;
                };
                if let Some(place) = self.place(&root, folder) {
                    self.entries
                        .insert(Path::new("sys").join(place).join(name), Entry::Link(target));
                }
            }
        }
        let functions = Path::new("bus/pci/devices");
        for name in names(&root.join(functions)) {
            let function = functions.join(name);
            let class = read(&root.join(&function).join("class")).unwrap_or_default();
            if PCI_CLASSES.iter().any(|begin| class.starts_with(begin.as_bytes())) {
                for file in PCI {
                    self.follow(&root, &function.join(file));
                }
            }
        }
        let groups = self.machine.proc.text("self/cgroup").unwrap_or_default();
        for group in groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)) {
            let group = Path::new(group.trim_start_matches('/'));
            for level in group.ancestors() {
                for mount in ["", "unified", "rdma", "memory"] {
                    let folder = Path::new("fs/cgroup").join(mount).join(level);
                    for file in GROUP {
                        self.follow(&root, &folder.join(file));
                    }
                }
            }
        }
    }

    /// Where a path below sysfs really lies, with the links on the way kept; `None`: it leads out of sysfs.
    fn place(&mut self, root: &Path, path: &Path) -> Option<PathBuf> {
        let real = fs::canonicalize(root).ok()?;
        let mut place = PathBuf::new();
        for part in path.components() {
            let Component::Normal(part) = part else { return None };
            let next = place.join(part);
            if let Ok(target) = fs::read_link(real.join(&next)) {
                let end = fs::canonicalize(real.join(&next)).ok()?;
                if target.is_absolute() {
                    return None;
                }
                self.entries.insert(Path::new("sys").join(&next), Entry::Link(target));
                place = end.strip_prefix(&real).ok()?.to_owned();
            } else {
                place = next;
            }
        }
        Some(place)
    }

    /// Keeps a file below sysfs. Empty slots of GID tables are hundreds, and are missed by nobody.
    fn follow(&mut self, root: &Path, path: &Path) {
        if let Some(bytes) = read(&root.join(path))
            && bytes.trim_ascii() != NO_GID
            && let Some(place) = self.place(root, path)
        {
            self.text(Path::new("sys").join(place), bytes);
        }
    }

    fn procfs(&mut self) {
        let machine = self.machine;
        let root = machine.proc.path("");
        for pattern in PROC {
            for path in expand(&root, pattern) {
                if let Some(bytes) = read(&root.join(&path)) {
                    self.text(Path::new("proc").join(path), bytes);
                }
            }
        }
        let status = machine.proc.text("self/status").unwrap_or_default();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).map(str::trim);
        if let Some(parent) = parent.filter(|pid| pid.bytes().all(|b| b.is_ascii_digit())) {
            let file = format!("{parent}/limits");
            if let Some(text) = machine.proc.text(&file) {
                self.text(Path::new("proc").join(file), text.into_bytes());
            }
        }
        for name in NAMESPACES {
            let file = format!("self/ns/{name}");
            if let Some(target) = machine.proc.link(&file) {
                self.entries.insert(Path::new("proc").join(file), Entry::Link(target.into()));
            }
        }
        let line = machine.proc.text("cmdline").unwrap_or_default();
        let kept: Vec<_> = line
            .split_whitespace()
            .take_while(|word| *word != "--")
            .filter(|word| PARAMETERS.contains(&word.split('=').next().unwrap_or_default()))
            .collect();
        self.text("proc/cmdline", (kept.join(" ") + "\n").into_bytes());
    }

    fn configuration(&mut self) {
        let machine = self.machine;
        let mut environ: Vec<u8> = format!("HOME={HOME}\0").into_bytes();
        for (name, value) in machine.variables().iter().filter(|(name, _)| is_kept(name.as_bytes()))
        {
            let entry = [name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat();
            environ.extend(entry);
        }
        self.text("proc/self/environ", environ);
        let own = machine.variable("NCCL_CONF_FILE").filter(|path| !path.is_empty());
        let (from, to) = match (own, machine.variable("HOME")) {
            (Some(path), _) => (Some(PathBuf::from(path)), Some(PathBuf::from(path))),
            (None, Some(home)) => {
                let file = ".nccl.conf";
                (Some(Path::new(home).join(file)), Some(Path::new(HOME).join(file)))
            }
            (None, None) => (None, None),
        };
        let system = PathBuf::from("/etc/nccl.conf");
        for (from, to) in from.into_iter().zip(to).chain([(system.clone(), system)]) {
            let Ok(below) = from.strip_prefix("/") else { continue };
            let Some(bytes) = read(&machine.root.join(below)) else { continue };
            let lines = bytes.split(|byte| *byte == b'\n');
            let name = |line: &[u8]| line.split(|byte| *byte == b'=').next().map(<[u8]>::to_vec);
            let kept: Vec<&[u8]> =
                lines.filter(|line| name(line).is_some_and(|name| is_kept(&name))).collect();
            if let Ok(to) = to.strip_prefix("/") {
                self.text(to, [kept.join(&b'\n'), b"\n".to_vec()].concat());
            }
        }
    }

    /// Names of libraries, providers and device nodes, as empty files.
    fn libraries(&mut self) {
        let machine = self.machine;
        let folder = Path::new("etc/libibverbs.d");
        for name in names(&machine.root.join(folder)) {
            let path = folder.join(name);
            if let Some(bytes) = read(&machine.root.join(&path)) {
                self.text(path, bytes);
            }
        }
        for folder in super::check::library::folders(machine) {
            let Ok(below) = folder.strip_prefix(&machine.root).map(Path::to_owned) else {
                continue;
            };
            let libraries = names(&folder).into_iter().filter(|n| n.starts_with("libibverbs.so"));
            let providers = names(&folder.join("libibverbs")).into_iter();
            let providers = providers.map(|name| format!("libibverbs/{name}"));
            for name in libraries.chain(providers) {
                self.text(below.join(name), Vec::new());
            }
        }
        let nodes = Path::new("dev/infiniband");
        for name in names(&machine.root.join(nodes)) {
            self.text(nodes.join(name), Vec::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{is_kept, without_secrets};

    #[test]
    fn secrets_are_told_by_their_names() {
        for kept in ["NCCL_IB_HCA", "NCCL_IB_PKEY", "NCCL_IB_PKEY_VALUE", "RDMAV_FORK_SAFE"] {
            assert!(is_kept(kept.as_bytes()), "{kept}");
        }
        for left in
            ["HF_TOKEN", "NCCL_AUTH", "PINRAIL_API_KEY", "HOME", "AWS_SECRET_ACCESS_KEY", "nccl_x"]
        {
            assert!(!is_kept(left.as_bytes()), "{left}");
        }
        assert!(!is_kept(b"NCCL_\xff"));
    }

    #[test]
    fn a_report_tells_neither_secrets_nor_the_home_folder() {
        let variables = [
            ("NCCL_IB_PASSWD", "hunter\"3"),
            ("PINRAIL_TOKEN", "hunter2"),
            ("NCCL_IB_HCA", "mlx5"),
            ("HOME", "/u/alice"),
        ];
        let variables: Vec<_> =
            variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        let evidence = "NCCL_IB_PASSWD=hunter\"3, PINRAIL_TOKEN=hunter2, NCCL_IB_HCA=mlx5, /u/alice/.nccl.conf";
        let report = serde_json::json!({ "evidence": evidence }).to_string();
        let left = serde_json::json!({ "evidence": "NCCL_IB_PASSWD=(left out), PINRAIL_TOKEN=(left out), \
            NCCL_IB_HCA=mlx5, /home/.nccl.conf" });
        assert_eq!(without_secrets(&report, &variables), left.to_string());
    }
}
