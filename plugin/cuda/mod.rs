//! The CUDA driver and NVML, where the process has them: seams of the same form as the verbs library.

pub mod driver;
pub mod flush;
pub mod host;
mod loaded;
pub mod nvml;
