//! A protection domain.

use super::sys::ibv_pd;
use super::{Context, errno, log_destroy};
use crate::error::{Error, Result};
use std::ptr::NonNull;
use std::sync::Arc;

/// A protection domain: memory regions and queue pairs work together only inside one.
#[derive(Debug)]
pub struct ProtectionDomain {
    raw: NonNull<ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: a protection domain is an identifier in the library; verbs that take one may be called from any thread.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// Makes one on an open device.
    ///
    /// # Errors
    /// The verb fails.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.verbs().alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| Error::verb("ibv_alloc_pd", context.name(), errno()))?;
        super::context::add(&context.objects().pds);
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        super::context::sub(&self.context.objects().pds);
        // SAFETY: memory regions and queue pairs hold an Arc of their domain, so none is left.
        let rc = unsafe { (self.context.verbs().dealloc_pd)(self.raw()) };
        log_destroy("ibv_dealloc_pd", &self.context.name(), rc);
    }
}
