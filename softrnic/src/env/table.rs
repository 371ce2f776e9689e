//! The rows of the table: every setting with its default and its prose.

use super::{MAX_DEVICES, MAX_INLINE, MAX_PORTS, MAX_SGE};

/// One numeric setting.
#[derive(Debug)]
pub struct Number {
    /// Name without the `SOFTRNIC_` prefix.
    pub name: &'static str,
    /// Value when unset.
    pub default: u64,
    /// Smallest accepted value.
    pub min: u64,
    /// Largest accepted value.
    pub max: u64,
    /// What it does.
    pub doc: &'static str,
}

/// One textual setting.
#[derive(Debug)]
pub struct Text {
    /// Name without the `SOFTRNIC_` prefix.
    pub name: &'static str,
    /// Value when unset.
    pub default: &'static str,
    /// What it does.
    pub doc: &'static str,
}

macro_rules! numbers {
    ($($id:ident = $default:expr, $min:expr, $max:expr, $doc:expr;)+) => {
        /// Every numeric setting.
        pub const NUMBERS: &[Number] = &[$(Number { name: stringify!($id), default: $default, min: $min, max: $max, doc: $doc }),+];
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy, Debug)]
        pub(super) enum N { $($id),+ }
    };
}

numbers! {
    DEVICES = 1, 0, MAX_DEVICES as u64, "number of devices";
    PORTS = 1, 1, MAX_PORTS as u64, "ports per device";
    MTU = 4096, 256, 4096, "active and largest MTU in bytes (a power of two)";
    WIDTH = 2, 1, 16, "active_width code of each port (2 = 4X)";
    LID = 1, 1, 0xbfff, "LID of the first port (InfiniBand link layer); later ports count up";
    ETHERNET_LID = 0, 0, 0xbfff, "LID that Ethernet ports report, as some adapters do";
    GRH = 0, 0, 1, "1 sets the port flag that demands a global header";
    ECE = 3, 0, 0xffff_ffff, "options that devices offer in their vendor extensions (ECE), a bit mask";
    MAX_QP = 16384, 1, 65535, "max_qp";
    MAX_CQ = 16384, 1, 65535, "max_cq";
    MAX_MR = 65535, 1, 65535, "max_mr (also a limit on live MRs)";
    MAX_PD = 32768, 1, 65535, "max_pd";
    MAX_SRQ = 4096, 1, 16383, "max_srq";
    MAX_QP_WR = 32768, 1, 65536, "max_qp_wr";
    MAX_CQE = 4_194_303, 1, 4_194_303, "max_cqe";
    MAX_SGE = 16, 1, MAX_SGE as u64, "max_sge";
    MAX_INLINE = 256, 0, MAX_INLINE as u64, "largest max_inline_data a QP may ask for";
    MAX_MSG_SZ = 1 << 31, 1, 1 << 31, "largest message; a longer one completes with a local length error";
    MAX_RD_ATOM = 16, 1, 255, "max_qp_rd_atom and max_qp_init_rd_atom";
    YIELD = 16, 0, 1 << 20, "sched_yield on every n-th empty poll of a CQ (0 = never)";
    HEAP_MB = 512, 16, 16384, "address space for the rings of one process, in MiB (touched lazily)";
    MR_LIMIT = 0, 0, 1 << 20, "refuse registrations while this many MRs are live (0 = max_mr)";
    FAIL_REG_MR = 0, 0, 1 << 40, "fail the n-th registration of the process with ENOMEM (0 = none)";
    REG_US = 0, 0, 10_000_000, "time that every registration takes, in microseconds";
    REG_PAGE_NS = 0, 0, 1_000_000, "time that every page of a registration takes, in nanoseconds";
    SEED = 1, 0, u64::MAX, "seed of the stepped engine, and of fault plans that name none";
    STEPS = 1, 0, 1 << 20, "steps that every poll of a CQ makes in the stepped engine (0 = only softrnic_step does)";
    RETRY_MS = 0, 0, 600_000, "transport retry time in ms, instead of timeout and retry_cnt (0 = use those)";
}

/// Every textual setting.
pub const TEXTS: &[Text] = &[
    Text {
        name: "FABRIC",
        default: "default",
        doc: "fabric name; only processes of one user and one fabric reach each other",
    },
    Text {
        name: "NAME",
        default: "softrnic",
        doc: "device name prefix, or a comma list of full names",
    },
    Text {
        name: "SPEED",
        default: "32",
        doc: "active_speed code of each port (32 = EDR), or a comma list for the ports in order, of which the last counts for the rest",
    },
    Text {
        name: "LINK",
        default: "ethernet",
        doc: "link layer: ethernet or ib, or a comma list for the ports in order",
    },
    Text {
        name: "GIDS",
        default: "",
        doc: "comma list of GIDs of each port: address[/v1|/v2|/ib][@ifindex], or - for an empty slot; `;` between the tables of the first, second, … port; after the last table the last group counts up per port",
    },
    Text { name: "PKEYS", default: "0xffff", doc: "comma list of P_Keys" },
    Text {
        name: "HOLD",
        default: "none",
        doc: "none, or sq/all: send requests stay pending until released",
    },
    Text {
        name: "ENGINE",
        default: "inline",
        doc: "inline (a post runs its requests), stepped (polls and softrnic_step do, in seeded order, on a virtual clock) or thread (a thread of the process does)",
    },
    Text {
        name: "FAULTS",
        default: "",
        doc: "file with a fault plan; one that cannot be read leaves the list of devices empty",
    },
    Text {
        name: "FORK",
        default: "copy-on-fork",
        doc: "copy-on-fork (nothing is withheld from forked children), old-kernel (registered pages are, once armed) or old-library (an rdma-core before 51 on a new kernel: the same, though it says that this is not needed)",
    },
    Text {
        name: "CMA",
        default: "off",
        doc: "pages simulated as CMA: off, all, every=N (by page number) or a comma list of hexadecimal ranges lo-hi",
    },
    Text {
        name: "MEMLOCK",
        default: "off",
        doc: "memlock quota of MRs: off, rlimit (soft RLIMIT_MEMLOCK, lifted by CAP_IPC_LOCK) or bytes",
    },
    Text {
        name: "DMABUF",
        default: "yes",
        doc: "comma list for each device, the last for the rest: yes, no (EOPNOTSUPP) or unknown (EPROTONOSUPPORT), whether dma-bufs can be registered",
    },
    Text {
        name: "RELAXED_ORDERING",
        default: "yes",
        doc: "yes or no: whether registrations may ask for relaxed ordering; no answers EINVAL",
    },
];
