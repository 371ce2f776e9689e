//! The checks: each looks at one matter and says what it found, at least one line.

pub mod bond;
pub mod class;
pub mod filter;
pub mod forks;
pub mod gid;
pub mod gpu;
pub mod library;
pub mod limits;
pub mod link;
pub mod nodes;
pub mod pcie;
pub mod pkey;
pub mod placement;
pub mod sibling;
pub mod socket;
pub mod variables;
