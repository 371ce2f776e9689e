//! The verbs library and its providers against the devices that the kernel has.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use crate::doctor::port::Port;
use crate::doctor::verbs::VerbsFacts;
use std::path::PathBuf;

const CHECK: &str = "library";
const PROVIDER: &str = "provider";

/// Kernel drivers of a device's PCI function, and the provider that serves them.
const PROVIDERS: [(&str, &str); 18] = [
    ("mlx5_core", "mlx5"),
    ("mlx4_core", "mlx4"),
    ("bnxt_en", "bnxt_re"),
    ("ice", "irdma"),
    ("i40e", "irdma"),
    ("irdma", "irdma"),
    ("cxgb4", "cxgb4"),
    ("efa", "efa"),
    ("hns3", "hns"),
    ("qede", "qedr"),
    ("erdma", "erdma"),
    ("mana", "mana"),
    ("ionic", "ionic"),
    ("hfi1", "hfi1verbs"),
    ("ib_qib", "ipathverbs"),
    ("vmw_pvrdma", "vmw_pvrdma"),
    ("be2net", "ocrdma"),
    ("ib_mthca", "mthca"),
];

/// Folders that the dynamic linker searches, where distributions put libibverbs.
const FOLDERS: [&str; 10] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/local/lib",
    "usr/local/lib64",
    "usr/lib",
    "lib",
];

/// Looks at the library and at each device's provider.
pub fn check(machine: &Machine, ports: &[Port]) -> Vec<Finding> {
    let devices = machine.sysfs.devices();
    let mut found = match &machine.verbs {
        Some(facts) => by_library(machine, facts, &devices, ports),
        None => by_files(machine, &devices),
    };
    // A library of one's own choice brings what it needs.
    if machine.settings.verbs_lib.is_none() {
        found.extend(providers(machine, &devices));
    }
    found
}

fn list(names: &[impl AsRef<str>]) -> String {
    let names: Vec<_> = names.iter().map(AsRef::as_ref).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// How the image gets what it lacks.
fn install(machine: &Machine) -> &'static str {
    if machine.contained() {
        "install rdma-core in the image of the container (Debian: libibverbs1 and ibverbs-providers), not on the host"
    } else {
        "install rdma-core (Debian: libibverbs1 and ibverbs-providers)"
    }
}

fn by_library(
    machine: &Machine,
    facts: &VerbsFacts,
    devices: &[String],
    ports: &[Port],
) -> Vec<Finding> {
    let asked = &facts.asked;
    if let (Some(error), Some(file), true) = (&facts.error, &facts.file, devices.is_empty()) {
        let what = format!("{asked} is there and has nothing to list");
        return vec![Finding::fine(CHECK, what, format!("{}: {error}", file.display()))];
    }
    if let Some(error) = &facts.error {
        let evidence = format!("{error}; the kernel has {}", list(devices));
        let remedy = if machine.settings.verbs_lib.is_some() {
            "let NCCL_IBVERBS_LIB name a library that exists here, or unset it".to_owned()
        } else {
            install(machine).to_owned()
        };
        let what = format!("the verbs library {asked} cannot be used, so pinrail has no device");
        return vec![Finding::problem(CHECK, what, evidence, remedy)];
    }
    let listed: Vec<_> = facts.devices.iter().map(|device| device.name.as_str()).collect();
    let mut found = Vec::new();
    let chosen = machine.settings.verbs_lib.is_some();
    for device in devices.iter().filter(|device| !chosen && !listed.contains(&device.as_str())) {
        let what = format!("{device} is a device of the kernel, and {asked} does not list it");
        let evidence = format!("kernel: {}; library: {}", list(devices), list(&listed));
        let remedy = format!(
            "make its device node and its provider visible here: see the lines about {NODES} and {PROVIDER}; {}",
            install(machine)
        );
        found.push(Finding::problem(CHECK, what, evidence, remedy));
    }
    for (device, error) in
        facts.devices.iter().filter_map(|device| Some((&device.name, device.error.as_ref()?)))
    {
        let what = format!("{device} cannot be opened");
        let remedy = "give the process its device node with read and write permission; see the lines about nodes \
                      and limits";
        found.push(Finding::problem(CHECK, what, error, remedy));
    }
    let none = Vec::new();
    let offered = facts.offered.as_ref().unwrap_or(&none);
    let shown: Vec<_> =
        offered.iter().map(|(port, speed)| format!("{port} {speed} Mb/s")).collect();
    let opened = |port: &&Port| {
        facts.devices.iter().any(|device| device.name == port.device && device.error.is_none())
    };
    let lost = |port: &&Port| !offered.iter().any(|(label, _)| *label == port.label);
    // The library decides in the end, and the kernel's files may not know why.
    if facts.offered.is_some() && !chosen {
        for port in ports.iter().filter(|port| port.is_used()).filter(opened).filter(lost) {
            let what = format!("pinrail leaves {} out, although its files look right", port.label);
            let remedy = "start a job with NCCL_DEBUG=INFO: a line of NET/pinrail says why the port is left out";
            let evidence = format!("pinrail offers {}", list(&shown));
            found.push(Finding::problem(CHECK, what, evidence, remedy));
        }
    }
    if found.is_empty() {
        let file =
            facts.file.as_ref().map_or_else(|| asked.clone(), |file| file.display().to_string());
        let what = format!("{asked} lists every device of the kernel");
        let evidence = format!("{file}: {}; pinrail offers {}", list(&listed), list(&shown));
        found.push(Finding::fine(CHECK, what, evidence));
    }
    found
}

/// The check that tells about device nodes.
const NODES: &str = super::nodes::CHECK;

/// Folders of the tree where the library can be, those of LD_LIBRARY_PATH first.
pub fn folders(machine: &Machine) -> Vec<PathBuf> {
    let path = machine.variable("LD_LIBRARY_PATH").map(|path| path.to_string_lossy().into_owned());
    let path = path.unwrap_or_default();
    let own = path.split(':').filter(|folder| folder.starts_with('/'));
    own.chain(FOLDERS).map(|folder| machine.path(folder)).collect()
}

fn by_files(machine: &Machine, devices: &[String]) -> Vec<Finding> {
    let (name, places) = match &machine.settings.verbs_lib {
        Some(path) if path.is_absolute() => {
            let text = path.to_string_lossy().into_owned();
            (text.clone(), vec![machine.path(&text)])
        }
        chosen => {
            let name = chosen.as_ref().map_or_else(
                || "libibverbs.so.1".to_owned(),
                |name| name.to_string_lossy().into_owned(),
            );
            (name.clone(), folders(machine).iter().map(|folder| folder.join(&name)).collect())
        }
    };
    // A link in a captured tree may lead to a file that was not captured.
    if let Some(place) = places.iter().find(|place| place.symlink_metadata().is_ok()) {
        let evidence = format!("{}; the library itself was not asked", place.display());
        return vec![Finding::fine(CHECK, format!("{name} is there"), evidence)];
    }
    let evidence = format!("in none of {} folders; the kernel has {}", places.len(), list(devices));
    let what = format!("there is no {name}, so pinrail has no device");
    vec![Finding::problem(CHECK, what, evidence, install(machine))]
}

/// The provider of a device by the driver of its PCI function, or by its name where it is software.
fn provider_of(machine: &Machine, device: &str) -> Option<&'static str> {
    let driver = format!("class/infiniband/{device}/device/driver");
    if let Some(link) = machine.sys_link(&driver) {
        let driver = link.file_name()?.to_str()?.to_owned();
        return PROVIDERS.iter().find(|(known, _)| *known == driver).map(|(_, name)| *name);
    }
    ["rxe", "siw"].into_iter().find(|name| device.starts_with(name))
}

fn providers(machine: &Machine, devices: &[String]) -> Vec<Finding> {
    let configuration = machine.path("etc/libibverbs.d");
    let files = machine.names(&configuration);
    let named: Vec<String> = files
        .iter()
        .filter_map(|file| machine.read(&configuration.join(file)))
        .flat_map(|bytes| {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let words = text.lines().filter_map(|line| line.trim().strip_prefix("driver "));
            words.map(|word| word.trim().to_owned()).collect::<Vec<_>>()
        })
        .collect();
    let mut wanted: Vec<(&str, Vec<&str>)> = Vec::new();
    for device in devices {
        let Some(provider) = provider_of(machine, device) else { continue };
        match wanted.iter_mut().find(|(known, _)| *known == provider) {
            Some((_, users)) => users.push(device),
            None => wanted.push((provider, vec![device])),
        }
    }
    let mut found = Vec::new();
    for (provider, users) in wanted {
        let begin = format!("lib{provider}-rdmav");
        let file = folders(machine).into_iter().find_map(|folder| {
            let folder = folder.join("libibverbs");
            let name = machine.names(&folder).into_iter().find(|name| name.starts_with(&begin))?;
            Some(folder.join(name))
        });
        let is_named =
            named.iter().any(|name| name == provider || name.ends_with(&format!("/{provider}")));
        let users = users.join(", ");
        found.push(match (file, is_named) {
            (Some(file), true) => Finding::fine(
                PROVIDER,
                format!("the provider {provider} for {users} is there"),
                file.display().to_string(),
            ),
            (None, _) => Finding::problem(
                PROVIDER,
                format!("there is no provider {provider} for {users}: libibverbs cannot drive it"),
                format!(
                    "no file {begin}*.so in a folder libibverbs/ beside the library; {} in {}",
                    if is_named { "named" } else { "not named" },
                    configuration.display()
                ),
                install(machine),
            ),
            (Some(file), false) => Finding::problem(
                PROVIDER,
                format!("libibverbs does not know the provider {provider} for {users}"),
                format!(
                    "{} is there, but none of {} files in {} names it",
                    file.display(),
                    files.len(),
                    configuration.display()
                ),
                format!("put a line `driver {provider}` into a file there; {}", install(machine)),
            ),
        });
    }
    found
}
