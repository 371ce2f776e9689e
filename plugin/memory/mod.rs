//! Memory that the plugin owns, and registrations of everybody's.

#[deny(unsafe_code)]
pub mod diagnosis;
#[deny(unsafe_code)]
pub mod gate;
pub mod page;
mod ranges;
#[deny(unsafe_code)]
pub mod region;
#[deny(unsafe_code)]
pub mod registry;

pub use gate::{Gate, GateState};
pub use page::PageOwned;
pub use region::{Region, RegionKind};
pub use registry::Registry;
