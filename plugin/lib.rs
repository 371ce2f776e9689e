//! pinrail: an NCCL network plugin over RDMA verbs.

pub mod config;
pub mod host;
