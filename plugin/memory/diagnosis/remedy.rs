//! What an operator does about a verdict: one sentence, and only what fits it.

use super::facts::Facts;
use super::failure::Failure;
use crate::host::cgroup::RdmaUse;
use crate::host::nvidia::{LongTerm, long_term_since};

pub(super) fn memlock(facts: &Facts) -> String {
    let base = "raise the memory lock limit of this process (ulimit -l unlimited)";
    if facts.container.inside() == Some(true) {
        let runtime = facts.container.runtime.unwrap_or("its runtime");
        format!(
            "{base}; in a container it comes from the daemon of {runtime} (LimitMEMLOCK=infinity of its service, or --ulimit memlock=-1), not from limits.conf"
        )
    } else {
        format!(
            "{base} where it is started: launchers and services do not read limits.conf (systemd: LimitMEMLOCK=infinity)"
        )
    }
}

pub(super) fn placement(facts: &Facts) -> String {
    let mut steps = Vec::new();
    let cmdline = facts.cmdline.clone().unwrap_or_default();
    let risky = cmdline.risky();
    let names = |name: &str| risky.iter().any(|given| given.starts_with(name));
    let risk = facts.risk.as_deref().unwrap_or_default();
    if names("kho=") || risk.contains("kexec handover") || risk.contains("page blocks") {
        steps.push("boot with kho=off");
    }
    if names("hugetlb_cma=") {
        steps.push("boot with hugetlb_cma=0");
    }
    if names("cma=") {
        steps.push("boot with cma=0 unless a device needs the area");
    }
    if risk.contains("ZONE_MOVABLE") {
        steps.push("boot without movablecore=, kernelcore= and memory that is onlined as movable");
    }
    if steps.is_empty() && risk.contains("CmaTotal") {
        steps.push("make the kernel's contiguous area (CMA) smaller or remove it");
    }
    let mut steps: Vec<String> = steps.into_iter().map(str::to_owned).collect();
    if facts.cuda_long_term() == Some(LongTerm::No) {
        steps.extend(
            long_term_since(facts.architecture)
                .map(|branch| format!("use an NVIDIA driver of branch {branch} or later")),
        );
    }
    if steps.is_empty() {
        "find out who else pins this memory, and register it before it is pinned".into()
    } else {
        steps.join(", or ")
    }
}

pub(super) fn try_again() -> String {
    "none if it works from now on; else find out who pins this memory for a short time".into()
}

pub(super) fn fewer_regions() -> String {
    "use fewer or larger buffers, fewer connections or fewer processes per device, or raise the device's limit with its vendor's tools".into()
}

pub(super) fn smaller_regions() -> String {
    "use smaller buffers (NCCL_BUFFSIZE for NCCL's own)".into()
}

pub(super) fn control_group(found: &RdmaUse) -> String {
    format!("raise {} in rdma.max of control group {}", found.resource, found.group)
}

pub(super) fn bar1() -> String {
    "register less GPU memory at once, or make the GPU's window larger (resizable BAR)".into()
}

pub(super) fn address_space() -> String {
    "raise the limit of the process's address space (ulimit -v unlimited)".into()
}

pub(super) fn kernel_memory() -> String {
    "free memory on the host, or give the control group more".into()
}

pub(super) fn bad_address() -> String {
    "the application must pass memory that it has mapped writable and still owns".into()
}

pub(super) fn peer_memory() -> String {
    "load nvidia_peermem (modprobe nvidia_peermem), or let NCCL use DMA-BUF (NCCL_DMABUF_ENABLE=1, open kernel modules), or keep GPU memory away from the network with NCCL_NET_GDR_LEVEL=LOC".into()
}

pub(super) fn dmabuf() -> String {
    "load nvidia_peermem and set NCCL_DMABUF_ENABLE=0, or update kernel, rdma-core and driver"
        .into()
}

pub(super) fn access_flags(failure: &Failure) -> String {
    if failure.optional_demanded {
        "set NCCL_IB_PCI_RELAXED_ORDERING=2, which leaves out what the device does not know".into()
    } else if failure.retry_worked() {
        "none is needed; NCCL_IB_PCI_RELAXED_ORDERING=0 avoids the first attempt".into()
    } else {
        "set NCCL_IB_PCI_RELAXED_ORDERING=0, which leaves the optional ones out".into()
    }
}

pub(super) fn unknown() -> String {
    "look at the kernel log of the same second, and report the JSON record (PINRAIL_REPORT_DIR)"
        .into()
}
