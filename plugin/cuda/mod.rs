//! The CUDA driver, where the process has one: a second seam of the same form as the verbs library.

pub mod driver;
