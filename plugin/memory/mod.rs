//! Memory that the plugin owns, and registrations of everybody's.

#[deny(unsafe_code)]
pub mod arena;
#[deny(unsafe_code)]
pub mod bounce;
pub mod child;
#[deny(unsafe_code)]
pub mod collateral;
#[deny(unsafe_code)]
pub mod contract;
#[deny(unsafe_code)]
pub mod diagnosis;
#[deny(unsafe_code)]
pub mod extent;
#[deny(unsafe_code)]
pub mod forkcheck;
#[deny(unsafe_code)]
pub mod gate;
pub mod given;
#[deny(unsafe_code)]
pub mod host_memory;
#[deny(unsafe_code)]
mod huge;
pub mod inventory;
#[deny(unsafe_code)]
pub mod ledger;
#[deny(unsafe_code)]
pub mod marks;
pub mod page;
#[deny(unsafe_code)]
pub mod piece;
#[deny(unsafe_code)]
pub mod pinned;
mod ranges;
#[deny(unsafe_code)]
pub mod region;
#[deny(unsafe_code)]
pub mod registry;
pub mod status;
pub mod wiped;

pub use extent::Extent;
pub use gate::{Gate, GateState};
pub use given::Given;
pub use page::PageOwned;
pub use region::{Region, RegionKind};
pub use registry::Registry;
pub use wiped::{Blank, Wiped};
