//! One archive for a bug report: the files that the verdicts rest on, so that `--root` judges them alike elsewhere.
//!
//! Secrets stay out: of variables and configuration files only names that concern RDMA are kept, of the kernel's command
//! line only parameters about memory and IOMMU, of libraries and device nodes only the names.

use super::machine::Machine;
use super::verbs;
use nccl_net_pinrail::config::{UNREADABLE, odd_lines};
use nccl_net_pinrail::host::plain;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
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
    Folder,
}

/// No configuration file is longer.
const LONGEST: u64 = 1 << 20;

struct Bundle<'a> {
    machine: &'a Machine,
    entries: BTreeMap<PathBuf, Entry>,
    /// The home folder, without a slash at its end.
    home: Option<String>,
}

/// Writes the archive. It must not exist.
pub fn write(path: &Path, machine: &Machine, report: &str) -> io::Result<()> {
    let home = home_of(machine.variables());
    let mut bundle = Bundle { machine, entries: BTreeMap::new(), home };
    bundle.sysfs();
    bundle.procfs();
    bundle.configuration();
    bundle.libraries();
    bundle.text("pinrail/report.json", without_secrets(report, machine.variables()).into_bytes());
    if let Some(facts) = &machine.verbs {
        let text = format!("{:#}\n", facts.document());
        bundle.text(verbs::FILE, without_secrets(&text, machine.variables()).into_bytes());
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
            Entry::Folder => {
                header.set_entry_type(EntryType::Directory);
                header.set_mode(0o755);
                header.set_size(0);
                archive.append_data(&mut header, path, io::empty())?;
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
    }
    match home_of(variables) {
        Some(home) => renamed(&report, &quoted(&home)),
        None => report,
    }
}

/// The home folder, without a slash at its end; `None` where it says nothing.
fn home_of(variables: &[(OsString, OsString)]) -> Option<String> {
    let (_, home) = variables.iter().find(|(name, _)| name == "HOME")?;
    let home = home.to_string_lossy();
    let home = home.trim_end_matches('/');
    (home.starts_with('/') && home != HOME).then(|| home.to_owned())
}

/// A text in which the home folder has the name that it has in every bundle. Only whole names are meant: `/root` is not in
/// `/rootfs`, nor in `/srv/root`.
fn renamed(text: &str, home: &str) -> String {
    let part = |c: char| c.is_alphanumeric() || "._-".contains(c);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(home) {
        let (before, after) = (&rest[..at], &rest[at + home.len()..]);
        let begins = !before.ends_with(|c| part(c) || c == '/');
        let ends = !after.starts_with(part);
        out.push_str(before);
        out.push_str(if begins && ends { HOME } else { home });
        rest = after;
    }
    out + rest
}

/// A configuration file with the lines that may be kept. Others leave a comment or an odd line in their places, so that the
/// numbers of lines stay and say the same.
fn kept_lines(bytes: &[u8], renamed: impl Fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let odd = odd_lines(bytes);
    let lines = bytes.split(|byte| *byte == b'\n').enumerate().map(|(at, line)| {
        let name = line.split(|byte| *byte == b'=').next().unwrap_or_default();
        if is_kept(name) {
            renamed(line)
        } else if odd.contains(&(at + 1)) {
            b"?".to_vec()
        } else {
            b"#".to_vec()
        }
    });
    lines.collect::<Vec<_>>().join(&b'\n')
}

/// Every path that a pattern stands for, below a folder.
fn expand(machine: &Machine, root: &Path, pattern: &str) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for part in pattern.split('/') {
        let Some((begin, end)) = part.split_once('*') else {
            found.iter_mut().for_each(|path| path.push(part));
            continue;
        };
        found = found
            .iter()
            .flat_map(|path| {
                let all = machine.names(&root.join(path)).into_iter();
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
            for path in expand(self.machine, &root, pattern) {
                self.follow(&root, &path);
            }
        }
        for pattern in SYS_LINKS {
            for path in expand(self.machine, &root, pattern) {
                let Some(target) = self.machine.sys_link(&path.to_string_lossy()) else { continue };
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
        // Empty ones say that somebody looked.
        for folder in ["bus/pci/devices", "module"] {
            let mounted = self.machine.live && self.machine.sys("class").is_dir();
            if mounted || self.machine.sys(folder).is_dir() {
                self.entries.insert(Path::new("sys").join(folder), Entry::Folder);
            }
        }
        for name in self.machine.names(&root.join(functions)) {
            let function = functions.join(name);
            let class = self.machine.read(&root.join(&function).join("class")).unwrap_or_default();
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
        if let Some(bytes) = self.machine.read(&root.join(path))
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
            for path in expand(machine, &root, pattern) {
                if let Some(bytes) = machine.read(&root.join(&path)) {
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
        // What cannot be read stays away, so that nobody takes it for empty.
        let Some(line) = machine.proc.text("cmdline") else { return };
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
            let value = self.renamed(value.as_bytes());
            environ.extend([name.as_bytes(), b"=", value.as_slice(), b"\0"].concat());
        }
        if machine.knows_environment {
            self.text("proc/self/environ", environ);
        }
        let own = machine.variable("NCCL_CONF_FILE").filter(|path| !path.is_empty());
        let user = match (own, machine.variable("HOME")) {
            (Some(path), _) => Some(PathBuf::from(path)),
            (None, Some(home)) => Some(Path::new(home).join(".nccl.conf")),
            (None, None) => None,
        };
        let mut lost = Vec::new();
        if !machine.live {
            // A bundle of a bundle.
            lost.extend(machine.read(&machine.path(UNREADABLE)).unwrap_or_default());
        }
        for path in user.into_iter().chain([PathBuf::from("/etc/nccl.conf")]) {
            let Ok(below) = path.strip_prefix("/") else { continue };
            let to = self.renamed_path(&path);
            match plain::read(&machine.path(&below.to_string_lossy()), LONGEST) {
                Ok(bytes) => {
                    let kept = kept_lines(&bytes, |bytes| self.renamed(bytes));
                    if let Ok(to) = to.strip_prefix("/") {
                        self.text(to, kept);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => lost.extend(format!("{}\t{error}\n", to.display()).into_bytes()),
            }
        }
        if !lost.is_empty() {
            self.text(UNREADABLE, lost);
        }
    }

    /// Bytes without the name of the home folder.
    fn renamed(&self, bytes: &[u8]) -> Vec<u8> {
        match (&self.home, std::str::from_utf8(bytes)) {
            (Some(home), Ok(text)) => renamed(text, home).into_bytes(),
            // Nothing that is not text can be a name of interest.
            (Some(_), Err(_)) => Vec::new(),
            (None, _) => bytes.to_vec(),
        }
    }

    fn renamed_path(&self, path: &Path) -> PathBuf {
        OsString::from_vec(self.renamed(path.as_os_str().as_bytes())).into()
    }

    /// Names of libraries, providers and device nodes, as empty files.
    fn libraries(&mut self) {
        let machine = self.machine;
        let folder = Path::new("etc/libibverbs.d");
        for name in machine.names(&machine.root.join(folder)) {
            let path = folder.join(name);
            if let Some(bytes) = machine.read(&machine.root.join(&path)) {
                self.text(path, bytes);
            }
        }
        for folder in super::check::library::folders(machine) {
            let Ok(below) = folder.strip_prefix(&machine.root).map(Path::to_owned) else {
                continue;
            };
            let below = self.renamed_path(&Path::new("/").join(below));
            let Ok(below) = below.strip_prefix("/").map(Path::to_owned) else { continue };
            let all = machine.names(&folder).into_iter();
            let libraries = all.filter(|name| name.starts_with("libibverbs.so"));
            let providers = machine.names(&folder.join("libibverbs")).into_iter();
            let providers = providers.map(|name| format!("libibverbs/{name}"));
            for name in libraries.chain(providers) {
                self.text(below.join(name), Vec::new());
            }
        }
        let nodes = Path::new("dev/infiniband");
        for name in machine.names(&machine.root.join(nodes)) {
            self.text(nodes.join(name), Vec::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{is_kept, kept_lines, renamed, without_secrets};

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
    fn lines_of_a_file_keep_their_numbers_and_nothing_else() {
        let text = b"# hunter2\nNCCL_IB_TC=1\nWANDB_API_KEY=hunter2\nhunter2\n\nexport X=hunter2\nNCCL_X=/u/a/b";
        let kept =
            kept_lines(text, |line| renamed(&String::from_utf8_lossy(line), "/u/a").into_bytes());
        assert_eq!(kept, b"#\nNCCL_IB_TC=1\n#\n?\n#\n?\nNCCL_X=/home/b");
        assert_eq!(super::odd_lines(&kept), super::odd_lines(text));
    }

    #[test]
    fn only_whole_names_of_the_home_folder_are_replaced() {
        for (text, shown) in [
            ("/root/.nccl.conf", "/home/.nccl.conf"),
            ("A=/root:/root/lib", "A=/home:/home/lib"),
            ("/rootfs /root-x /srv/root /root", "/rootfs /root-x /srv/root /home"),
            ("\"/root\"", "\"/home\""),
        ] {
            assert_eq!(renamed(text, "/root"), shown);
        }
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
