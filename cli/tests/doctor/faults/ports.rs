//! Faults of ports, their addresses, and what the settings make of them.

use super::Fault;
use crate::host::{Adapter, FIRST, Host, SECOND};

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
        ("sys/devices/virtual/net/bond0/mtu", "9000\n"),
        ("sys/devices/virtual/net/bond0/bonding/mode", mode),
        ("sys/devices/virtual/net/bond0/bonding/xmit_hash_policy", hash),
        ("sys/devices/virtual/net/bond0/bonding/slaves", "eth0 eth1\n"),
    ]);
    host.link("sys/class/net/bond0", "../../devices/virtual/net/bond0");
}

pub const FAULTS: &[Fault] = &[
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
            host.environment(&[("NCCL_IB_PKEY_VALUE", "0x8012"), ("NCCL_IB_HCA", "=mlx5_1")]);
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
        make: |host| {
            bond(host, "802.3ad 4\n", "layer3+4 1\n", ["up", "up"]);
            // As a device shows it that bonds its ports itself.
            for (index, ..) in FIRST.gids {
                host.port(FIRST, &[(&format!("gid_attrs/ndevs/{index}"), "bond0\n")]);
            }
        },
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
];
