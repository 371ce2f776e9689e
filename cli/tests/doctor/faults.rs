//! Hosts with one fault each: the doctor names that fault, with its figures and its remedy, and no other.

use crate::host::{Adapter, FIRST, Host, SECOND};

/// A host where one thing is wrong.
struct Fault {
    name: &'static str,
    make: fn(&Host),
    check: &'static str,
    what: &'static str,
    /// All of these are in the evidence.
    evidence: &'static [&'static str],
    remedy: &'static str,
}

const PORT_1: &str = "sys/class/infiniband/mlx5_1/ports/1";

fn empty_second_gid(host: &Host) {
    host.remove(&format!("{PORT_1}/gids/3"));
    host.remove(&format!("{PORT_1}/gid_attrs/types/3"));
    host.remove(&format!("{PORT_1}/gid_attrs/ndevs/3"));
}

fn bond(host: &Host, mode: &str, hash: &str, states: [&str; 2]) {
    for (adapter, state) in [FIRST, SECOND].into_iter().zip(states) {
        let interface = format!("{}/net/{}", Host::path_of(adapter), adapter.interface);
        host.link(&format!("{interface}/master"), "../../../../../virtual/net/bond0");
        host.files(&[(&format!("{interface}/operstate"), state)]);
    }
    host.files(&[
        ("sys/devices/virtual/net/bond0/bonding/mode", mode),
        ("sys/devices/virtual/net/bond0/bonding/xmit_hash_policy", hash),
        ("sys/devices/virtual/net/bond0/bonding/slaves", "eth0 eth1\n"),
    ]);
    host.link("sys/class/net/bond0", "../../devices/virtual/net/bond0");
}

const FAULTS: &[Fault] = &[
    Fault {
        name: "an image without libibverbs",
        make: |host| {
            host.contained();
            for file in ["libibverbs.so.1", "libibverbs.so.1.15.59.0"] {
                host.remove(&format!("usr/lib/x86_64-linux-gnu/{file}"));
            }
        },
        check: "library",
        what: "there is no libibverbs.so.1",
        evidence: &["the kernel has mlx5_0, mlx5_1", "10 folders"],
        remedy: "in the image of the container",
    },
    Fault {
        name: "a library that loses a device",
        make: |host| {
            host.library(
                r#"{ "asked": "libibverbs.so.1", "file": "/usr/lib/libibverbs.so.1.15.59.0",
                     "devices": [{ "name": "mlx5_0", "error": null }], "copies_for_children": true }"#,
            );
        },
        check: "library",
        what: "mlx5_1 is a device of the kernel, and libibverbs.so.1 does not list it",
        evidence: &["kernel: mlx5_0, mlx5_1; library: mlx5_0"],
        remedy: "provider",
    },
    Fault {
        name: "a device that may not be opened",
        make: |host| {
            host.library(
                r#"{ "asked": "libibverbs.so.1", "devices": [{ "name": "mlx5_0", "error": null },
                     { "name": "mlx5_1", "error": "ibv_open_device on mlx5_1 failed: Permission denied (os error 13)" }] }"#,
            );
        },
        check: "library",
        what: "mlx5_1 cannot be opened",
        evidence: &["Permission denied (os error 13)"],
        remedy: "read and write permission",
    },
    Fault {
        name: "a provider that is not installed",
        make: |host| host.remove("usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav59.so"),
        check: "provider",
        what: "there is no provider mlx5 for mlx5_0, mlx5_1",
        evidence: &["libmlx5-rdmav*.so", "; named in "],
        remedy: "ibverbs-providers",
    },
    Fault {
        name: "a provider that no file names",
        make: |host| host.files(&[("etc/libibverbs.d/mlx5.driver", "driver mlx4\n")]),
        check: "provider",
        what: "libibverbs does not know the provider mlx5",
        evidence: &["libmlx5-rdmav59.so is there, but none of 1 files"],
        remedy: "a line `driver mlx5`",
    },
    Fault {
        name: "a container without a device node",
        make: |host| {
            host.contained();
            host.remove("dev/infiniband/uverbs1");
        },
        check: "nodes",
        what: "mlx5_1 is in sysfs, and its device node /dev/infiniband/uverbs1 is missing",
        evidence: &["/dev/infiniband holds uverbs0; this is a container"],
        remedy: "--device=/dev/infiniband/uverbs1",
    },
    Fault {
        name: "a misspelt variable",
        make: |host| host.environment(&[("NCCL_IB_RETRY_COUNT", "20")]),
        check: "settings",
        what: "NCCL_IB_RETRY_COUNT (environment) is not known and has no effect; the nearest known name is NCCL_IB_RETRY_CNT",
        evidence: &["NCCL_IB_RETRY_COUNT=20"],
        remedy: "correct the name",
    },
    Fault {
        name: "a value out of range",
        make: |host| host.environment(&[("NCCL_IB_TIMEOUT", "300")]),
        check: "settings",
        what: "using 31",
        evidence: &["NCCL_IB_TIMEOUT=300"],
        remedy: "in the range",
    },
    Fault {
        name: "a switch that turns it off",
        make: |host| host.environment(&[("NCCL_IB_DISABLE", "1")]),
        check: "settings",
        what: "NCCL_IB_DISABLE turns pinrail off",
        evidence: &["NCCL_IB_DISABLE=1"],
        remedy: "NCCL_NET=pinrail",
    },
    Fault {
        name: "an adapter without its RDMA module",
        make: |host| host.remove("sys/class/infiniband"),
        check: "devices",
        what: "the kernel has no RDMA device",
        evidence: &["adapters on the PCI bus: 0000:3b:00.0, 0000:3d:00.0"],
        remedy: "mlx5_ib",
    },
    Fault {
        name: "a port that is asked for and down",
        make: |host| {
            host.environment(&[("NCCL_IB_HCA", "=mlx5_0,mlx5_1")]);
            host.port(SECOND, &[("state", "1: DOWN\n"), ("phys_state", "3: Disabled\n")]);
        },
        check: "port",
        what: "mlx5_1:1 is not active",
        evidence: &["state DOWN, link Disabled"],
        remedy: "connect it",
    },
    Fault {
        name: "a fabric without a subnet manager",
        make: |host| {
            host.infiniband(FIRST);
            host.infiniband(SECOND);
            host.port(SECOND, &[("state", "2: INIT\n")]);
        },
        check: "port",
        what: "mlx5_1:1 has a link and no subnet manager brought it up",
        evidence: &["state INIT, link LinkUp"],
        remedy: "opensm",
    },
    Fault {
        name: "a link at a quarter of its speed",
        make: |host| host.port(SECOND, &[("rate", "100 Gb/sec (1X NDR)\n")]),
        check: "speed",
        what: "mlx5_1:1 is slower",
        evidence: &["100 Gb/sec (1X NDR) (100000 Mb/s)", "mlx5_0:1 400000 Mb/s"],
        remedy: "negotiated width",
    },
    Fault {
        name: "an interface with the usual MTU",
        make: |host| host.files(&[("sys/class/net/eth1/mtu", "1500\n")]),
        check: "mtu",
        what: "mlx5_1:1 has a smaller MTU",
        evidence: &["eth1 mtu 1500", "RDMA MTU of 1024 bytes, not 4096; others have 4096"],
        remedy: "ip link set dev eth1 mtu 4200",
    },
    Fault {
        name: "a filter that names what is not there",
        make: |host| host.environment(&[("NCCL_IB_HCA", "mlx5_0,mlx5_1,mlx5_bond_0")]),
        check: "filter",
        what: "`mlx5_bond_0` matches no port",
        evidence: &["ports here: mlx5_0:1, mlx5_1:1"],
        remedy: "as they are called here",
    },
    Fault {
        name: "a filter that means one and selects two",
        make: |host| {
            host.environment(&[("NCCL_IB_HCA", "mlx5_1")]);
            host.adapter(
                Adapter {
                    name: "mlx5_11",
                    pci: "0000:3e:00.0",
                    interface: "eth2",
                    guid: "b83f:d203:00cc:0000",
                    ..SECOND
                },
                2,
            );
        },
        check: "filter",
        what: "`mlx5_1` also selects mlx5_11:1",
        evidence: &["NCCL_IB_HCA=mlx5_1; without `=` a name is a prefix"],
        remedy: "NCCL_IB_HCA==mlx5_1",
    },
    Fault {
        name: "one index for tables that differ",
        make: |host| {
            host.environment(&[("NCCL_IB_GID_INDEX", "3")]);
            empty_second_gid(host);
        },
        check: "gid",
        what: "mlx5_1:1 is left out: NCCL_IB_GID_INDEX 3 is an empty slot",
        evidence: &["its GID table holds 0 fe80::ba3f:d2ff:fe00:2 v2 eth1"],
        remedy: "unset NCCL_IB_GID_INDEX, which chooses on each port; indices in use here: 0",
    },
    Fault {
        name: "an index of the wrong version",
        make: |host| host.environment(&[("NCCL_IB_GID_INDEX", "mlx5_0:2")]),
        check: "gid",
        what: "mlx5_0:1 uses GID 2 10.0.0.1 v1 eth0, but it is RoCE v1, and v2 is wanted",
        evidence: &["usable: ", "3 10.0.0.1 v2 eth0"],
        remedy: "unset NCCL_IB_GID_INDEX",
    },
    Fault {
        name: "a port without an address",
        make: empty_second_gid,
        check: "gid",
        what: "mlx5_1:1 uses GID 0 fe80::ba3f:d2ff:fe00:2 v2 eth1, but its address is link-local",
        evidence: &["every better entry is link-local"],
        remedy: "give the interface eth1 a routable address",
    },
    Fault {
        name: "a container that has the device and not the interface",
        make: |host| {
            host.contained();
            host.remove("sys/class/net/eth1");
        },
        check: "gid",
        what: "mlx5_1:1 is left out: no GID belongs to an interface of this network namespace",
        evidence: &["3 10.0.1.2 v2 eth1 (not in this network namespace)"],
        remedy: "bring the interface eth1 into this network namespace",
    },
    Fault {
        name: "a partition that this host is not in",
        make: |host| {
            host.environment(&[("NCCL_IB_PKEY_VALUE", "0x8012"), ("NCCL_IB_HCA", "=mlx5_1")])
        },
        check: "pkey",
        what: "mlx5_1:1 is left out: there is no partition key for NCCL_IB_PKEY_VALUE=0x8012",
        evidence: &["its table holds 0 0xffff"],
        remedy: "subnet manager",
    },
    Fault {
        name: "a class of the host's that overrides the job's",
        make: |host| {
            host.environment(&[("NCCL_IB_TC", "106")]);
            host.files(&[(
                "sys/class/infiniband/mlx5_0/tc/1/traffic_class",
                "Global tclass=236\n",
            )]);
        },
        check: "class",
        what: "the host's traffic class overrides NCCL_IB_TC=106 on mlx5_0:1",
        evidence: &["mlx5_0/tc/1/traffic_class: 236", "asked for: NCCL_IB_TC=106"],
        remedy: "set the variables to 236",
    },
    Fault {
        name: "half an adapter left unused",
        make: |host| {
            host.environment(&[("NCCL_IB_HCA", "=mlx5_0")]);
            host.files(&[("sys/class/infiniband/mlx5_1/sys_image_guid", FIRST.guid)]);
        },
        check: "sibling",
        what: "mlx5_1:1 is a part of the same adapter as mlx5_0:1 and is left unused",
        evidence: &["b83f:d203:00aa:0000", "0000:3d:00.0", "NCCL_IB_HCA does not list it"],
        remedy: "NCCL_IB_HCA==mlx5_0,mlx5_1",
    },
    Fault {
        name: "a bond whose mode RDMA does not follow",
        make: |host| bond(host, "balance-rr 0\n", "layer2 0\n", ["up", "up"]),
        check: "bond",
        what: "bond0 has a mode in which the adapter does not bond RDMA",
        evidence: &["mode balance-rr", "eth0, eth1"],
        remedy: "802.3ad",
    },
    Fault {
        name: "a bond and one queue pair",
        make: |host| bond(host, "802.3ad 4\n", "layer3+4 1\n", ["up", "up"]),
        check: "bond",
        what: "fewer queue pairs than bond0 has interfaces",
        evidence: &["mode 802.3ad, hash layer3+4", "NCCL_IB_QPS_PER_CONNECTION=1"],
        remedy: "NCCL_IB_QPS_PER_CONNECTION=2",
    },
    Fault {
        name: "a bond with one leg",
        make: |host| bond(host, "active-backup 1\n", "layer2 0\n", ["up", "down"]),
        check: "bond",
        what: "eth1, a part of bond0, is down",
        evidence: &["mode active-backup"],
        remedy: "cable",
    },
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
        name: "fork handling that nobody needs",
        make: |host| {
            host.environment(&[("RDMAV_FORK_SAFE", "1")]);
            host.remove("usr/lib/x86_64-linux-gnu/libibverbs.so.1.15.59.0");
            host.files(&[("usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0", "")]);
        },
        check: "fork",
        what: "registered pages are taken from forked children without need",
        evidence: &[
            "rdma-core 44.0",
            "RDMAV_FORK_SAFE set, heeded: yes",
            "copies pinned pages for a child: yes",
        ],
        remedy: "unset RDMAV_FORK_SAFE",
    },
    Fault {
        name: "an old kernel and no fork handling",
        make: |host| {
            host.environment(&[("PINRAIL_FORK", "never")]);
            host.files(&[("proc/sys/kernel/osrelease", "5.4.0\n")]);
        },
        check: "fork",
        what: "after a fork a device's write can change what the child sees",
        evidence: &["kernel 5.4.0 copies pinned pages for a child: no", "PINRAIL_FORK=never"],
        remedy: "PINRAIL_FORK=auto",
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

#[test]
fn each_fault_is_named_alone_with_figures_and_remedy() {
    let mut wrong = Vec::new();
    for fault in FAULTS {
        let host = Host::healthy();
        (fault.make)(&host);
        let report = host.report();
        let problems = report.findings("problem");
        let [[check, what, evidence, remedy]] = problems.as_slice() else {
            wrong.push(format!("{}: not one problem: {problems:#?}", fault.name));
            continue;
        };
        let told = report.code == 1
            && check == fault.check
            && what.contains(fault.what)
            && fault.evidence.iter().all(|part| evidence.contains(part))
            && remedy.contains(fault.remedy);
        if !told {
            wrong.push(format!("{}: {}: {problems:#?}", fault.name, report.code));
        }
    }
    assert!(wrong.is_empty(), "{} of {}: {}", wrong.len(), FAULTS.len(), wrong.join("\n"));
}

/// What is no fault and deserves a line: the exit status stays 0.
const NOTES: &[Fault] = &[
    Fault {
        name: "a second port without a cable",
        make: |host| host.port(SECOND, &[("state", "1: DOWN\n"), ("phys_state", "3: Disabled\n")]),
        check: "port",
        what: "mlx5_1:1 is not active",
        evidence: &["state DOWN"],
        remedy: "nothing",
    },
    Fault {
        name: "the usual MTU everywhere",
        make: |host| {
            host.files(&[
                ("sys/class/net/eth0/mtu", "1500\n"),
                ("sys/class/net/eth1/mtu", "9000\n"),
            ]);
            host.environment(&[("NCCL_IB_HCA", "=mlx5_0")]);
        },
        check: "mtu",
        what: "mlx5_0:1 sends packets of at most 1024 bytes",
        evidence: &["eth0 mtu 1500"],
        remedy: "eth0",
    },
    Fault {
        name: "a class with unusual ECN bits",
        make: |host| host.environment(&[("NCCL_IB_TC", "41")]),
        check: "class",
        what: "NCCL_IB_TC=41 sets the ECN bits",
        evidence: &["DSCP 10, ECN bits 1"],
        remedy: "42 for this DSCP",
    },
    Fault {
        name: "a limited member",
        make: |host| host.port(FIRST, &[("pkeys/0", "0x7fff\n")]),
        check: "pkey",
        what: "mlx5_0:1 is a limited member",
        evidence: &["index 0: 0x7fff"],
        remedy: "full membership",
    },
    Fault {
        name: "configuration space that only root sees",
        make: |host| {
            let config = format!("{}/config", Host::bridge());
            host.write(&config, &[0; 64]);
        },
        check: "acs",
        what: "is hidden",
        evidence: &["1 of 1 bridges"],
        remedy: "as root",
    },
    Fault {
        name: "a driver that moves what it pins",
        make: |host| host.files(&[("proc/cmdline", "cma=64M\n")]),
        check: "placement",
        what: "this driver moves it",
        evidence: &["cma=64M", "pins declared long-term: yes"],
        remedy: "unless registrations fail",
    },
];

#[test]
fn what_may_be_meant_is_a_note_and_no_problem() {
    for note in NOTES {
        let host = Host::healthy();
        (note.make)(&host);
        let report = host.report();
        assert_eq!(report.code, 0, "{}: {:#?}", note.name, report.findings("problem"));
        let advice = report.findings("advice");
        let [[check, what, evidence, remedy]] = advice.as_slice() else {
            panic!("{}: not one note: {advice:#?}", note.name);
        };
        assert_eq!(check, note.check, "{}", note.name);
        assert!(what.contains(note.what), "{}: {what}", note.name);
        assert!(
            note.evidence.iter().all(|part| evidence.contains(part)),
            "{}: {evidence}",
            note.name
        );
        assert!(remedy.contains(note.remedy), "{}: {remedy}", note.name);
    }
}

/// A limit that does not apply, and privileges that only look like it.
#[test]
fn a_privilege_counts_in_the_first_user_namespace_only() {
    let host = Host::healthy();
    host.limits("self", "8388608", "1048576");
    host.files(&[("proc/self/status", "PPid:\t77\nCapEff:\t000001ffffffffff\n")]);
    assert_eq!(host.report().code, 0);
    host.link("proc/self/ns/user", "user:[4026533000]");
    let problems = host.report().findings("problem");
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!(problems[0][0], "memlock");
}
