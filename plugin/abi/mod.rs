//! The C ABI: one table per NCCL network plugin version, all over the same operations.
//!
//! A version's file holds its struct layouts with their sizes and offsets asserted, the adapters for signatures that
//! the version introduced, and its exported table. [`boundary`] is the only way from C into the plugin.

pub mod boundary;
pub mod calls;
pub mod completion;
pub mod host_memory;
pub mod logger;
pub mod net;
pub mod objects;
pub mod transfer;
pub mod types;

pub mod v10;
pub mod v11;
pub mod v12;
pub mod v6;
pub mod v7;
pub mod v8;
pub mod v9;
