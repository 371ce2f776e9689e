//! GID tables: what a slot holds, and which slot a port uses.

mod choice;
mod entry;

pub use choice::{Choice, NoGid, Wanted, choose_infiniband, choose_roce};
pub(super) use entry::is_link_local;
pub use entry::{GidEntry, NetDev, same_subnet};
