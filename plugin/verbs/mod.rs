//! Verbs objects over one function table.
//!
//! One RAII type per verbs object, one file each. Ownership is a type fact: Context ← ProtectionDomain ←
//! (MemoryRegion, QueuePair), Context ← CompletionQueue; every child holds an `Arc` of its parent, so that drop order
//! is right by construction. A destroy verb that fails is logged with its errno: the object is then leaked in the
//! library, never used again here.

pub mod context;
pub mod cq;
pub mod event;
pub mod fork;
pub mod library;
pub mod mlx5;
pub mod mr;
pub mod pd;
pub mod qp;
#[allow(missing_docs, non_camel_case_types, reason = "names of the C ABI")]
pub mod sys;
pub mod wr;

pub use context::{Context, PortAttr};
pub use cq::{CompletionQueue, Completions};
pub use fork::ForkAnswer;
pub use library::Verbs;
pub use mr::MemoryRegion;
pub use pd::ProtectionDomain;
pub use qp::QueuePair;

/// The calling thread's errno, or EIO when a verb failed without setting one.
fn errno() -> i32 {
    match std::io::Error::last_os_error().raw_os_error() {
        Some(0) | None => libc::EIO,
        Some(errno) => errno,
    }
}

/// Reports a destroy verb that failed while dropping.
fn log_destroy(verb: &'static str, object: &dyn std::fmt::Display, rc: i32) {
    if rc != 0 {
        let errno = if rc > 0 { rc } else { errno() };
        let reason = std::io::Error::from_raw_os_error(errno);
        tracing::warn!("{verb} on {object} failed: {reason}; the object stays with the device");
    }
}
