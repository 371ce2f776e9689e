//! Memory that the plugin owns, and registrations of everybody's.

pub mod gate;
pub mod page;
mod ranges;
pub mod region;
pub mod registry;

pub use gate::{Gate, GateState};
pub use page::PageOwned;
pub use region::{Region, RegionKind};
pub use registry::Registry;
