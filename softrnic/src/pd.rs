//! Protection domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::abi::IbvPd;
use crate::context::Context;
use crate::env::settings;
use crate::faults::refusal;
use crate::faults::rule::ALLOC_PD;
use crate::objects::{PDS, Users};
use crate::public::Public;

/// A protection domain.
#[repr(C)]
#[derive(Debug)]
pub struct Pd {
    public: Public<IbvPd>,
    /// Parent.
    pub context: Arc<Context>,
    /// Number, unique in the process.
    pub id: u32,
    /// Objects in it.
    pub users: Users,
}

impl Pd {
    /// Allocates one.
    pub fn alloc(context: &Arc<Context>) -> Result<Arc<Self>, i32> {
        if PDS.count() >= settings().max_pd() as usize {
            return Err(libc::ENOMEM);
        }
        refusal(&context.process, context.device.index, ALLOC_PD, 0).map_or(Ok(()), Err)?;
        let id = context.process.pds.take().ok_or(libc::ENOMEM)?;
        let pd = Arc::new(Self {
            public: Public::new(IbvPd { context: context.ptr(), handle: id }),
            context: Arc::clone(context),
            id,
            users: Users(AtomicU32::new(0)),
        });
        PDS.insert(Arc::clone(&pd));
        Ok(pd)
    }

    /// The handle for C.
    pub fn ptr(&self) -> *mut IbvPd {
        self.public.ptr()
    }

    /// The PD behind a handle.
    pub fn find(handle: *mut IbvPd) -> Option<Arc<Self>> {
        PDS.get(handle as usize)
    }

    /// Frees it; refused while objects are in it.
    pub fn dealloc(self: &Arc<Self>) -> Result<(), i32> {
        if self.users.0.load(Ordering::Acquire) != 0 {
            return Err(libc::EBUSY);
        }
        PDS.remove(Arc::as_ptr(self) as usize).ok_or(libc::EINVAL)?;
        self.context.process.pds.give(self.id);
        Ok(())
    }
}
