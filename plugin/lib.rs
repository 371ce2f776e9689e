//! pinrail: an NCCL network plugin over RDMA verbs.
