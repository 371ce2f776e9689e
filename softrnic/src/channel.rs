//! Completion channels.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::abi::IbvCompChannel;
use crate::context::Context;
use crate::events::EventPipe;
use crate::objects::{CHANNELS, Users};
use crate::public::Public;

/// A completion channel.
#[repr(C)]
#[derive(Debug)]
pub struct Channel {
    public: Public<IbvCompChannel>,
    /// Parent.
    pub context: Arc<Context>,
    /// Index in the region's channel table.
    pub index: u32,
    /// The pipe behind `fd`.
    pub pipe: EventPipe,
    /// CQs that use it.
    pub users: Users,
}

impl Channel {
    /// Creates one.
    pub fn create(context: &Arc<Context>) -> Result<Arc<Self>, i32> {
        let errno = |e: std::io::Error| e.raw_os_error().unwrap_or(libc::EIO);
        let pipe = EventPipe::new().map_err(errno)?;
        let process = &context.process;
        let index = process.channels.take().ok_or(libc::EMFILE)?;
        pipe.publish(process.region.channel(index).ok_or(libc::EMFILE)?).map_err(errno)?;
        let public = IbvCompChannel { context: context.ptr(), fd: pipe.read_fd(), refcnt: 0 };
        let channel = Arc::new(Self {
            public: Public::new(public),
            context: Arc::clone(context),
            index,
            pipe,
            users: Users(AtomicU32::new(0)),
        });
        CHANNELS.insert(Arc::clone(&channel));
        Ok(channel)
    }

    /// The handle for C.
    pub fn ptr(&self) -> *mut IbvCompChannel {
        self.public.ptr()
    }

    /// The channel behind a handle.
    pub fn find(handle: *mut IbvCompChannel) -> Option<Arc<Self>> {
        CHANNELS.get(handle as usize)
    }

    /// Destroys it; refused while CQs use it.
    pub fn destroy(self: &Arc<Self>) -> Result<(), i32> {
        if self.users.0.load(Ordering::Acquire) != 0 {
            return Err(libc::EBUSY);
        }
        CHANNELS.remove(Arc::as_ptr(self) as usize).ok_or(libc::EINVAL)?;
        if let Some(slot) = self.context.process.region.channel(self.index) {
            slot.fd.store(0, Ordering::Release);
        }
        self.pipe.close();
        self.context.process.channels.give(self.index);
        Ok(())
    }
}
