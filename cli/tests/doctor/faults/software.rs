//! Faults of libraries, device nodes and variables.

use super::Fault;

pub const FAULTS: &[Fault] = &[
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
        name: "a port that only the library finds fault with",
        make: |host| {
            host.library(
                r#"{ "asked": "libibverbs.so.1", "devices": [{ "name": "mlx5_0" }, { "name": "mlx5_1" }],
                     "offered": [{ "port": "mlx5_0:1", "mbps": 400000 }] }"#,
            );
        },
        check: "library",
        what: "pinrail leaves mlx5_1:1 out, although its files look right",
        evidence: &["pinrail offers mlx5_0:1 400000 Mb/s"],
        remedy: "NCCL_DEBUG=INFO",
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
];
