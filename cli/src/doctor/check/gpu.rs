//! Whether devices can reach memory of GPUs.

use super::forks::release_of;
use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use nccl_net_pinrail::host::kernel;
use nccl_net_pinrail::host::nvidia::{Driver, FILE as DRIVER};

const CHECK: &str = "gpu";

/// The kernel since which memory of a GPU can be registered as a DMA-BUF.
const KERNEL: (u32, u32) = (5, 12);

/// Looks at the driver, at the modules, and at what DMA-BUF needs.
pub fn check(machine: &Machine) -> Vec<Finding> {
    let gpus = machine.gpus();
    let unknown = |what: &str, evidence: String| {
        vec![Finding::unknown(
            CHECK,
            what,
            evidence,
            "mount procfs and sysfs, or capture them whole",
        )]
    };
    if machine.withholds(DRIVER) {
        let evidence = format!("/proc/{DRIVER} cannot be read");
        return unknown("the NVIDIA driver cannot be told", evidence);
    }
    let driver = Driver::read(&machine.proc);
    // A host may have no such bus. A captured tree without it is not whole.
    let bus = machine.sys("bus/pci/devices");
    let lost = if machine.live { !machine.sys("").is_dir() } else { !bus.is_dir() };
    if driver.is_none() && lost {
        let evidence = format!("{} cannot be read, and there is no /proc/{DRIVER}", bus.display());
        return unknown("whether there are NVIDIA GPUs cannot be told", evidence);
    }
    let Some(driver) = driver else {
        return vec![if gpus.is_empty() {
            Finding::fine(CHECK, "there is no NVIDIA GPU", "PCI bus and /proc/driver/nvidia")
        } else {
            Finding::advice(
                CHECK,
                "there are NVIDIA GPUs and no driver",
                format!("on the PCI bus: {}; no /proc/driver/nvidia/version", gpus.join(", ")),
                "load the driver; in a container use the NVIDIA container toolkit",
            )
        }];
    };
    let peermem = machine.sysfs.peermem();
    let probes: Vec<_> = machine
        .sysfs
        .peermem_probes()
        .map(|(name, file)| {
            let there = if file.exists() { "there" } else { "absent" };
            format!("{name} {there}")
        })
        .collect();
    let release = kernel::release(&machine.proc).unwrap_or_else(|| "unknown".into());
    let new_enough = release_of(&release).is_some_and(|release| release >= KERNEL);
    let refused = machine.variable("NCCL_DMABUF_ENABLE").is_some_and(|value| value == "0");
    let dmabuf = driver.open && new_enough && !refused;
    let evidence = format!(
        "peer memory: {}; DMA-BUF: driver {} ({}), kernel {release}{}",
        probes.join(", "),
        driver.version,
        driver.flavour(),
        if refused { ", NCCL_DMABUF_ENABLE=0" } else { "" }
    );
    let may_be = driver.open && !refused && release_of(&release).is_none();
    if peermem.is_none() && !dmabuf && (may_be || !machine.sys("module").is_dir()) {
        return unknown("whether devices can reach memory of GPUs cannot be told", evidence);
    }
    vec![match (peermem, dmabuf) {
        (_, true) => Finding::fine(CHECK, "GPU memory can be registered as a DMA-BUF", evidence),
        (Some(name), false) => {
            let what = format!("GPU memory can be registered by address ({name})");
            Finding::fine(CHECK, what, evidence)
        }
        (None, false) => {
            let remedy = if refused && driver.open && new_enough {
                "unset NCCL_DMABUF_ENABLE, or load nvidia_peermem on the host"
            } else {
                "load nvidia_peermem on the host (modprobe nvidia_peermem), or use the open kernel modules of the driver on \
                 Linux 5.12 or later. Where neither is there all data go through host memory"
            };
            Finding::problem(CHECK, "no device can reach memory of GPUs", evidence, remedy)
        }
    }]
}
