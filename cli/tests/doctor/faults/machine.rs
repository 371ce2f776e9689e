//! Faults of limits, memory, GPUs and the PCI bus.

use super::Fault;
use crate::host::{FIRST, Host, SECOND};

pub const FAULTS: &[Fault] = &[
    Fault {
        name: "a container with its daemon's memory limit",
        make: |host| {
            host.contained();
            for process in ["self", "77", "1"] {
                host.limits(process, "67108864", "1048576");
            }
        },
        check: "memlock",
        what: "no more than 64 MiB can be registered",
        evidence: &["soft 64 MiB, hard 64 MiB", "pid 1 of the container: soft 64 MiB", "10 MiB"],
        remedy: "--ulimit memlock=-1",
    },
    Fault {
        name: "a launcher that lowers the memory limit",
        make: |host| {
            host.limits("self", "8388608", "1048576");
            host.limits("77", "8388608", "1048576");
        },
        check: "memlock",
        what: "no more than 8 MiB can be registered",
        evidence: &["its parent (pid 77): soft 8 MiB", "pid 1: soft unlimited"],
        remedy: "pid 1 has enough, so that something between it and this process lowers it",
    },
    Fault {
        name: "few files",
        make: |host| {
            for process in ["self", "77", "1"] {
                host.limits(process, "unlimited", "1024");
            }
        },
        check: "nofile",
        what: "no more than 1024 files may be open",
        evidence: &["hard 1024"],
        remedy: "LimitNOFILE",
    },
    Fault {
        name: "a control group that is used up",
        make: |host| {
            host.files(&[
                ("sys/fs/cgroup/user.slice/rdma.max", "mlx5_0 hca_handle=max hca_object=2000\n"),
                ("sys/fs/cgroup/user.slice/rdma.current", "mlx5_0 hca_handle=1 hca_object=2000\n"),
            ]);
        },
        check: "cgroup",
        what: "the control group grants no more hca_object of mlx5_0",
        evidence: &["group /user.slice: mlx5_0 hca_object = 2000 of 2000"],
        remedy: "rdma.max",
    },
    Fault {
        name: "memory of kexec handover",
        make: |host| {
            host.files(&[
                ("proc/sys/kernel/arch", "aarch64\n"),
                ("proc/sys/kernel/osrelease", "7.0.0-1009-nvidia\n"),
                ("proc/meminfo", "MemTotal: 125000000 kB\nCmaTotal: 0 kB\nCmaFree: 9751756 kB\n"),
            ]);
        },
        check: "placement",
        what: "may lie where they cannot be registered afterwards",
        evidence: &[
            "CmaFree 9.3 GiB",
            "kexec handover",
            "kernel 7.0.0-1009-nvidia on aarch64",
            "driver 580.95.05",
        ],
        remedy: "kho=off",
    },
    Fault {
        name: "an area for huge pages and a driver that does not say how long it pins",
        make: |host| {
            host.environment(&[("PINRAIL_REG_FALLBACK", "fail")]);
            host.files(&[
                ("proc/cmdline", "hugetlb_cma=6G\n"),
                (
                    "proc/driver/nvidia/version",
                    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu\n",
                ),
            ]);
        },
        check: "placement",
        what: "may lie where they cannot be registered afterwards",
        evidence: &[
            "kernel command line hugetlb_cma=6G",
            "535.129.03 (proprietary), pins declared long-term: no",
        ],
        remedy: "a driver of branch 555 or later; until then jobs end, because PINRAIL_REG_FALLBACK=fail",
    },
    Fault {
        name: "GPUs that no adapter reaches",
        make: |host| {
            host.remove("sys/module/nvidia_peermem");
            host.files(&[(
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Thu\n",
            )]);
        },
        check: "gpu",
        what: "no device can reach memory of GPUs",
        evidence: &["nvidia_peermem absent", "driver 570.86.10 (proprietary)"],
        remedy: "modprobe nvidia_peermem",
    },
    Fault {
        name: "bridges that redirect",
        make: |host| host.function(Host::bridge(), "0x060400", "0x1000", 0x1d, 0),
        check: "acs",
        what: "PCI bridges send traffic between devices and GPUs up to the root",
        evidence: &["1 of 1 bridges redirect: 0000:3a:00.0 ACSCtl 0x001d", "GPUs: 1"],
        remedy: "ECAP_ACS+6.w=0",
    },
    Fault {
        name: "an IOMMU that translates",
        make: |host| {
            let group = format!("{}/iommu_group/type", Host::path_of(FIRST));
            host.files(&[(&group, "DMA-FQ\n")]);
        },
        check: "iommu",
        what: "the IOMMU translates addresses of RDMA devices",
        evidence: &["mlx5_0 DMA-FQ"],
        remedy: "iommu=pt",
    },
    Fault {
        name: "relaxed ordering demanded and not allowed",
        make: |host| {
            host.environment(&[("NCCL_IB_PCI_RELAXED_ORDERING", "1")]);
            host.function(&Host::path_of(SECOND), "0x020000", "0x15b3", 0, 0);
        },
        check: "ordering",
        what: "mlx5_1 may not use relaxed ordering",
        evidence: &["NCCL_IB_PCI_RELAXED_ORDERING=1", "mlx5_0 allowed, mlx5_1 not allowed"],
        remedy: "PCI_WR_ORDERING",
    },
    Fault {
        name: "an adapter in a narrow slot",
        make: |host| {
            let width = format!("{}/current_link_width", Host::path_of(SECOND));
            host.files(&[(&width, "8\n")]);
        },
        check: "pcie",
        what: "the PCI link of mlx5_1 came up with less width",
        evidence: &["width 8 lanes of 16 lanes"],
        remedy: "slot",
    },
];
