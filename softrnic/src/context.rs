//! An opened device.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::abi::*;
use crate::device::Device;
use crate::events::{EventPipe, record};
use crate::objects::CONTEXTS;
use crate::process::Process;
use crate::public::{Public, zeroed};
use crate::shm::layout::DEAD;
use crate::stats::{self, Counter};

/// A context; C holds the address of `public.context`.
#[repr(C)]
#[derive(Debug)]
pub struct Context {
    public: Public<VerbsContext>,
    /// Process state.
    pub process: Arc<Process>,
    /// The device.
    pub device: &'static Device,
    /// Index in the region's context table.
    pub index: u32,
    /// Async events.
    pub events: EventPipe,
}

const OFFSET: usize = std::mem::offset_of!(VerbsContext, context);

impl Context {
    /// Opens a device.
    pub fn open(device: &'static Device) -> io::Result<Arc<Self>> {
        let process = Process::open()?;
        let built = Self::build(device, &process);
        if built.is_err() {
            process.close();
        }
        built
    }

    fn build(device: &'static Device, process: &Arc<Process>) -> io::Result<Arc<Self>> {
        let index =
            process.contexts.take().ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))?;
        let events = EventPipe::new()?;
        if let Some(slot) = process.region.context(index) {
            slot.device.store(u32::try_from(device.index).unwrap_or(0), Ordering::Relaxed);
            events.publish(slot)?;
        }
        // SAFETY: integers, pointers and a pthread mutex.
        let mut verbs: VerbsContext = unsafe { zeroed() };
        verbs.sz = size_of::<VerbsContext>();
        verbs.context.device = device.ptr();
        verbs.context.cmd_fd = -1;
        verbs.context.async_fd = events.read_fd();
        verbs.context.num_comp_vectors = 1;
        verbs.context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
        verbs.context.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
        crate::capi::fill_ops(&mut verbs);
        let context = Arc::new(Self {
            public: Public::new(verbs),
            process: Arc::clone(process),
            device,
            index,
            events,
        });
        CONTEXTS.insert(Arc::clone(&context));
        Ok(context)
    }

    /// The handle for C.
    pub fn ptr(&self) -> *mut IbvContext {
        let verbs = self.public.ptr();
        // SAFETY: takes the address of a field of a live structure.
        unsafe { &raw mut (*verbs).context }
    }

    /// The context behind a handle.
    pub fn find(handle: *mut IbvContext) -> Option<Arc<Self>> {
        CONTEXTS.get((handle as usize).wrapping_sub(OFFSET))
    }

    /// Closes it. Objects that the application left behind are destroyed, as the kernel would.
    pub fn close(self: &Arc<Self>) {
        crate::objects::destroy_all_of(self);
        CONTEXTS.remove(Arc::as_ptr(self) as usize);
        if let Some(slot) = self.process.region.context(self.index) {
            slot.fd.store(0, Ordering::Release);
        }
        self.events.close();
        self.process.contexts.give(self.index);
        self.process.close();
    }

    /// Raises an async event on this context.
    pub fn raise(&self, kind: u32, index: u32, generation: u32) {
        stats::add(Counter::AsyncEvents, 1);
        if let Some(slot) = self.process.region.context(self.index) {
            self.process.own().signal(slot, &record(kind, index, generation));
        }
    }

    /// Answers EIO once the device has died, as every call that reaches it does.
    pub fn works(&self) -> Result<(), i32> {
        let dead = self.process.region.header().dead.get(self.device.index);
        if dead.is_some_and(|d| d.load(Ordering::Relaxed) == DEAD) {
            Err(libc::EIO)
        } else {
            Ok(())
        }
    }

    /// Whether a port is up.
    pub fn port_up(&self, port: u8) -> bool {
        self.device
            .port_slot(port, self.process.region.header())
            .is_some_and(|slot| slot.state.load(Ordering::Relaxed) == PORT_ACTIVE)
    }
}
