//! Two-process measurements for NCCL network plugins.
fn main() {}
