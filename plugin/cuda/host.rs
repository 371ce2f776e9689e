//! Host memory for the GPU: `cuMemHostRegister` pins pages where they lie and maps them.
//!
//! Whether that pin asks for a place where a page may stay depends on the driver, so it must not be the first one. What
//! is mapped here is therefore taken as a value that says that it is held already, and is kept in it until the driver
//! has let go.

use super::loaded::Loaded;
use crate::error::{Error, Result};
use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUcontext, CUresult,
};
use std::ffi::{c_uint, c_void};
use std::ops::Range;
use std::ptr::{self, NonNull};

type CtxGetCurrent = unsafe extern "C" fn(*mut CUcontext) -> c_uint;
type CtxPush = unsafe extern "C" fn(CUcontext) -> c_uint;
type CtxPop = unsafe extern "C" fn(*mut CUcontext) -> c_uint;
type MemHostRegister = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_uint;
type MemHostUnregister = unsafe extern "C" fn(*mut c_void) -> c_uint;

const SUCCESS: c_uint = 0;

/// The function that pins and maps.
pub const API: &str = "cuMemHostRegister_v2";

/// Mapped memory that every RDMA device holds for the long term, for as long as this value lives.
///
/// Memory that is merely mapped is none, so that the wrong order does not compile:
///
/// ```compile_fail,E0277
/// use nccl_net_pinrail::{cuda::host::HostDriver, memory::{PageOwned, ledger::Purpose}};
/// let driver = HostDriver::loaded().unwrap();
/// let context = driver.current().unwrap();
/// let pages = PageOwned::new(4096, Purpose::Application).unwrap();
/// driver.map(context, pages); // the trait `PinnedFirst` is not implemented for `PageOwned`
/// ```
///
/// Neither can anybody outside of this crate say so of memory of their own:
///
/// ```compile_fail,E0277
/// struct Mine;
/// impl nccl_net_pinrail::cuda::host::PinnedFirst for Mine { // the trait `Sealed` is not implemented for `Mine`
///     fn range(&self) -> std::ops::Range<usize> { 0x1000..0x2000 }
/// }
/// ```
///
/// ```compile_fail,E0603
/// struct Mine;
/// impl nccl_net_pinrail::cuda::host::sealed::Sealed for Mine {} // module `sealed` is private
/// ```
///
/// Registering it is the only way to such a value:
///
/// ```no_run
/// use nccl_net_pinrail::{cuda::host::HostDriver, memory::{PageOwned, Registry, ledger::Purpose, pinned::LongTermPinned}};
/// use nccl_net_pinrail::verbs::mr::Access;
/// use std::sync::Arc;
/// # fn on(registries: &[Arc<Registry>]) {
/// let driver = HostDriver::loaded().unwrap();
/// let context = driver.current().unwrap();
/// let pages = Arc::new(PageOwned::new(4096, Purpose::Application).unwrap());
/// let pinned = LongTermPinned::new(pages, registries, Access::BULK).unwrap();
/// driver.map(context, pinned).unwrap();
/// # }
/// ```
pub trait PinnedFirst: sealed::Sealed {
    /// The addresses.
    fn range(&self) -> Range<usize>;
}

pub(crate) mod sealed {
    //! Where it is said who may be pinned: within this crate.

    /// Whoever implements this answers for every device holding the memory for as long as the value lives.
    pub trait Sealed {}
}

/// The functions of the driver that the process has loaded.
#[derive(Clone, Copy, Debug)]
pub struct HostDriver {
    current: CtxGetCurrent,
    push: Option<CtxPush>,
    pop: Option<CtxPop>,
    register: MemHostRegister,
    unregister: MemHostUnregister,
}

/// The context that was current on a thread.
#[derive(Clone, Copy, Debug)]
pub struct Context(NonNull<c_void>);

// SAFETY: a context is a name in the driver; it may be made current on any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl HostDriver {
    /// The driver, if the process has loaded it already. Never loads it: a plugin does not decide that.
    pub fn loaded() -> Option<Self> {
        let library = Loaded::find(c"libcuda.so.1")?;
        // SAFETY: the driver's functions of these names have had these signatures since CUDA 6.5.
        unsafe {
            Some(Self {
                current: library.function(c"cuCtxGetCurrent")?,
                push: library.function(c"cuCtxPushCurrent_v2"),
                pop: library.function(c"cuCtxPopCurrent_v2"),
                register: library.function(c"cuMemHostRegister_v2")?,
                unregister: library.function(c"cuMemHostUnregister")?,
            })
        }
    }

    /// The context that is current on this thread; `None` too where the driver is not initialised.
    pub fn current(&self) -> Option<Context> {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: an out-pointer of a context.
        let rc = unsafe { (self.current)(&raw mut context) };
        NonNull::new(context.cast()).filter(|_| rc == SUCCESS).map(Context)
    }

    /// Pins and maps memory for every context.
    ///
    /// # Errors
    /// The driver refuses. Then nothing is left of it, and the memory is given back as its value is dropped.
    pub fn map<P: PinnedFirst>(self, context: Context, pinned: P) -> Result<Mapped<P>> {
        let Range { start, end } = pinned.range();
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: memory of this process, which the value keeps mapped for as long as the driver holds it.
        let rc = unsafe { (self.register)(pointer(start), end - start, flags) };
        if rc != SUCCESS {
            let exhausted = CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_uint;
            let errno = if rc == exhausted { libc::ENOMEM } else { libc::EIO };
            let text =
                format!("{API} of {} bytes at {start:#x} failed: CUDA error {rc}", end - start);
            return Err(Error::system(text).with_errno(errno));
        }
        Ok(Mapped { driver: self, context, pinned })
    }

    /// Lets go of what was mapped; with the context of that time where the thread has none.
    fn unmap(&self, context: Context, start: usize) -> c_uint {
        // SAFETY: the driver knows the address or says that it does not.
        let unregister = || unsafe { (self.unregister)(pointer(start)) };
        let rc = unregister();
        let (Some(push), Some(pop)) = (self.push, self.pop) else { return rc };
        if rc != CUresult::CUDA_ERROR_INVALID_CONTEXT as c_uint {
            return rc;
        }
        // SAFETY: the context was current once; one that is gone is refused.
        if unsafe { push(context.0.as_ptr().cast()) } != SUCCESS {
            return rc;
        }
        let rc = unregister();
        let mut popped: CUcontext = ptr::null_mut();
        // SAFETY: what was pushed just now; an out-pointer of a context.
        unsafe { pop(&raw mut popped) };
        rc
    }
}

fn pointer(address: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address)
}

/// Memory that is mapped for the GPU. Dropping it ends that first, then what held the memory before.
#[derive(Debug)]
pub struct Mapped<P: PinnedFirst> {
    driver: HostDriver,
    context: Context,
    pinned: P,
}

impl<P: PinnedFirst> Mapped<P> {
    /// What is mapped.
    pub fn pinned(&self) -> &P {
        &self.pinned
    }
}

impl<P: PinnedFirst> Drop for Mapped<P> {
    fn drop(&mut self) {
        let Range { start, end } = self.pinned.range();
        let rc = self.driver.unmap(self.context, start);
        // A driver that has shut down has let go of everything.
        if rc != SUCCESS && rc != CUresult::CUDA_ERROR_DEINITIALIZED as c_uint {
            tracing::warn!(
                "cuMemHostUnregister of {} bytes at {start:#x} failed: CUDA error {rc}; the GPU may still map them",
                end - start
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    thread_local! {
        static CURRENT: Cell<usize> = const { Cell::new(0) };
        static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
        static REFUSAL: Cell<c_uint> = const { Cell::new(0) };
    }

    fn note(call: String) {
        CALLS.with_borrow_mut(|calls| calls.push(call));
    }

    unsafe extern "C" fn current(out: *mut CUcontext) -> c_uint {
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(ptr::without_provenance_mut(CURRENT.get())) };
        SUCCESS
    }
    unsafe extern "C" fn push(context: CUcontext) -> c_uint {
        CURRENT.set(context.addr());
        note("push".into());
        SUCCESS
    }
    unsafe extern "C" fn pop(out: *mut CUcontext) -> c_uint {
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(ptr::without_provenance_mut(CURRENT.replace(0))) };
        note("pop".into());
        SUCCESS
    }
    unsafe extern "C" fn register(at: *mut c_void, len: usize, flags: c_uint) -> c_uint {
        note(format!("register {:#x} {len:#x} {flags}", at.addr()));
        REFUSAL.get()
    }
    unsafe extern "C" fn unregister(at: *mut c_void) -> c_uint {
        note(format!("unregister {:#x}", at.addr()));
        if CURRENT.get() == 0 { 201 } else { SUCCESS }
    }

    const DRIVER: HostDriver =
        HostDriver { current, push: Some(push), pop: Some(pop), register, unregister };

    /// Held until dropped, which is noted.
    #[derive(Debug)]
    struct Held;
    impl sealed::Sealed for Held {}
    impl PinnedFirst for Held {
        fn range(&self) -> Range<usize> {
            0x5000..0x7000
        }
    }
    impl Drop for Held {
        fn drop(&mut self) {
            note("deregister".into());
        }
    }

    fn calls() -> Vec<String> {
        CALLS.take()
    }

    #[test]
    fn no_driver_is_no_error() {
        // Nothing in this test process loads the driver.
        assert!(HostDriver::loaded().is_none());
    }

    #[test]
    fn what_held_the_memory_first_lets_go_last() {
        assert!(DRIVER.current().is_none());
        CURRENT.set(7);
        let context = DRIVER.current().unwrap();
        let mapped = DRIVER.map(context, Held).unwrap();
        assert_eq!(mapped.pinned().range(), 0x5000..0x7000);
        drop(mapped);
        assert_eq!(calls(), ["register 0x5000 0x2000 3", "unregister 0x5000", "deregister"]);
    }

    #[test]
    fn a_thread_without_a_context_borrows_it() {
        CURRENT.set(7);
        let mapped = DRIVER.map(DRIVER.current().unwrap(), Held).unwrap();
        CURRENT.set(0);
        drop(mapped);
        let expected = ["unregister 0x5000", "push", "unregister 0x5000", "pop", "deregister"];
        assert_eq!(calls()[1..], expected);
        assert_eq!(CURRENT.get(), 0);
    }

    #[test]
    fn a_refusal_names_the_code_and_gives_the_memory_back() {
        CURRENT.set(7);
        let context = DRIVER.current().unwrap();
        for (code, errno) in [(2, libc::ENOMEM), (712, libc::EIO)] {
            REFUSAL.set(code);
            let error = DRIVER.map(context, Held).unwrap_err();
            assert!(error.to_string().contains(&format!("CUDA error {code}")), "{error}");
            assert_eq!(error.errno(), Some(errno));
            assert_eq!(calls()[1..], ["deregister"]);
        }
    }
}
