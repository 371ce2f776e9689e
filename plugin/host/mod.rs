//! Facts about the machine the process runs on: what the kernel says in sysfs and procfs, limits,
//! network interfaces, and the choices that follow from them alone.
//!
//! Nothing here talks to a verbs library or to a GPU. Parsers take text, choices take values; what
//! touches the machine is a thin function beside them, so that every rule is tested on made-up
//! hosts.

pub mod amount;
pub mod bootlog;
pub mod cgroup;
pub mod container;
pub mod descriptors;
pub mod fdinfo;
pub mod fork;
pub mod gid;
pub mod headroom;
pub mod inside;
pub mod kernel;
pub mod limits;
pub mod meminfo;
pub mod mounts;
pub mod netif;
pub mod nvidia;
pub mod pagemap;
pub mod pci;
pub mod pkey;
pub mod placement;
pub mod plain;
pub mod process;
pub mod procfs;
pub mod smaps;
pub mod status;
pub mod sysfs;
#[cfg(test)]
pub(crate) mod tree;
pub mod zones;

pub use amount::amount;
pub use headroom::headroom;
pub use placement::placement_risk;
