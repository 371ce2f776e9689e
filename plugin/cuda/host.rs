//! Host memory for the GPU: `cuMemHostRegister` pins pages where they lie and maps them.
//!
//! Whether that pin asks for a place where a page may stay depends on the driver, so it must not be the first one. What
//! is mapped here is therefore taken as a value that says that it is held already, and is kept in it until the driver
//! has let go.

use super::loaded;
use crate::error::{Error, Result};
use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUcontext, CUdevice, CUresult,
};
use std::ffi::{c_uint, c_void};
use std::ops::Range;
use std::ptr;

type CtxGetDevice = unsafe extern "C" fn(*mut CUdevice) -> c_uint;
type CtxPush = unsafe extern "C" fn(CUcontext) -> c_uint;
type CtxPop = unsafe extern "C" fn(*mut CUcontext) -> c_uint;
type PrimaryRetain = unsafe extern "C" fn(*mut CUcontext, CUdevice) -> c_uint;
type PrimaryRelease = unsafe extern "C" fn(CUdevice) -> c_uint;
type MemHostRegister = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_uint;
type MemHostUnregister = unsafe extern "C" fn(*mut c_void) -> c_uint;

const SUCCESS: c_uint = 0;
const DEINITIALIZED: c_uint = CUresult::CUDA_ERROR_DEINITIALIZED as c_uint;
const INVALID_CONTEXT: c_uint = CUresult::CUDA_ERROR_INVALID_CONTEXT as c_uint;
const DESTROYED: c_uint = CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED as c_uint;
const NOT_REGISTERED: c_uint = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED as c_uint;

/// The function that pins and maps.
pub const API: &str = "cuMemHostRegister_v2";

/// Mapped memory that every RDMA device holds for the long term, for as long as this value lives.
///
/// Memory that is merely mapped is none, so that the wrong order does not compile:
///
/// ```compile_fail,E0277
/// use nccl_net_pinrail::{cuda::host::HostDriver, memory::{PageOwned, ledger::Purpose}};
/// let driver = HostDriver::loaded().unwrap();
/// let device = driver.current().unwrap();
/// let pages = PageOwned::new(4096, Purpose::Application).unwrap();
/// driver.map(device, pages); // the trait `PinnedFirst` is not implemented for `PageOwned`
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
/// let device = driver.current().unwrap();
/// let pages = Arc::new(PageOwned::new(4096, Purpose::Application).unwrap());
/// let pinned = LongTermPinned::new(pages, registries, Access::BULK).unwrap();
/// driver.map(device, pinned).unwrap();
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
    device: CtxGetDevice,
    lend: Option<Lend>,
    register: MemHostRegister,
    unregister: MemHostUnregister,
}

/// What lends a thread the context that a device has of its own.
#[derive(Clone, Copy, Debug)]
struct Lend {
    retain: PrimaryRetain,
    release: PrimaryRelease,
    push: CtxPush,
    pop: CtxPop,
}

/// The GPU whose context was current on a thread. The context itself is not kept: whoever made it may destroy it at any
/// time, and the driver need not recognise one that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device(CUdevice);

/// A function of the driver that failed, and its result.
type Refusal = (&'static str, c_uint);

impl HostDriver {
    /// The driver, if the process has loaded it already. Never loads it: a plugin does not decide that.
    pub fn loaded() -> Option<Self> {
        let library = loaded::CUDA.loaded()?;
        // SAFETY: the driver's functions of these names have had these signatures since CUDA 7.0, and the release of a
        // device's context since 11.0.
        unsafe {
            let lend = || {
                Some(Lend {
                    retain: library.function(c"cuDevicePrimaryCtxRetain")?,
                    release: library.function(c"cuDevicePrimaryCtxRelease_v2")?,
                    push: library.function(c"cuCtxPushCurrent_v2")?,
                    pop: library.function(c"cuCtxPopCurrent_v2")?,
                })
            };
            Some(Self {
                device: library.function(c"cuCtxGetDevice")?,
                lend: lend(),
                register: library.function(c"cuMemHostRegister_v2")?,
                unregister: library.function(c"cuMemHostUnregister")?,
            })
        }
    }

    /// The device of the context that is current on this thread; `None` where there is none, or no initialised driver.
    pub fn current(&self) -> Option<Device> {
        let mut device: CUdevice = 0;
        // SAFETY: an out-pointer of a device's number.
        let rc = unsafe { (self.device)(&raw mut device) };
        (rc == SUCCESS).then_some(Device(device))
    }

    /// Pins and maps memory for every context.
    ///
    /// # Errors
    /// The driver refuses. Then nothing is left of it, and the memory is given back as its value is dropped.
    pub fn map<P: PinnedFirst>(self, device: Device, pinned: P) -> Result<Mapped<P>> {
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
        Ok(Mapped { driver: self, device, pinned })
    }

    /// Lets go of what was mapped, in the context of this thread. Where it has none, or one that is gone, the device
    /// lends its own.
    fn unmap(&self, device: Device, start: usize) -> std::result::Result<(), Refusal> {
        let unregister = || {
            // SAFETY: the driver knows the address or says that it does not.
            let rc = unsafe { (self.unregister)(pointer(start)) };
            if rc == SUCCESS { Ok(()) } else { Err(("cuMemHostUnregister", rc)) }
        };
        match (unregister(), &self.lend) {
            (Err((_, INVALID_CONTEXT | DESTROYED)), Some(lend)) => lend.with(device, unregister)?,
            (result, _) => result,
        }
    }
}

impl Lend {
    /// Runs something with the device's own context current, and leaves the thread as it was.
    fn with<T>(&self, device: Device, run: impl FnOnce() -> T) -> std::result::Result<T, Refusal> {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: an out-pointer of a context; the driver checks the number of the device.
        let rc = unsafe { (self.retain)(&raw mut context, device.0) };
        if rc != SUCCESS {
            return Err(("cuDevicePrimaryCtxRetain", rc));
        }
        // SAFETY: the reference that was taken just now keeps the context alive.
        let rc = unsafe { (self.push)(context) };
        let result = if rc == SUCCESS {
            let result = run();
            // SAFETY: takes off what was pushed just now; an out-pointer of a context.
            unsafe { (self.pop)(&raw mut context) };
            Ok(result)
        } else {
            Err(("cuCtxPushCurrent_v2", rc))
        };
        // SAFETY: gives back the reference that was taken above. What it answers changes nothing.
        unsafe { (self.release)(device.0) };
        result
    }
}

fn pointer(address: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address)
}

/// Memory that is mapped for the GPU. Dropping it ends that first, then what held the memory before.
#[derive(Debug)]
pub struct Mapped<P: PinnedFirst> {
    driver: HostDriver,
    device: Device,
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
        let bytes = end - start;
        let (api, rc) = match self.driver.unmap(self.device, start) {
            // A driver that has shut down has let go of everything.
            Ok(()) | Err((_, DEINITIALIZED)) => return,
            Err(refusal) => refusal,
        };
        let failed =
            format!("{api} to unmap {bytes} bytes at {start:#x} failed: CUDA error {rc}; the ");
        match rc {
            NOT_REGISTERED => {
                tracing::info!(
                    "{failed}driver has let go of them before, as a reset of the device does"
                );
            }
            INVALID_CONTEXT | DESTROYED => tracing::warn!(
                "{failed}thread has no context, and the GPU maps them until the one of the allocation ends"
            ),
            _ => tracing::warn!("{failed}GPU may still map them"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    /// The device's own context, while there is one.
    const PRIMARY: usize = 70;

    thread_local! {
        static CURRENT: Cell<usize> = const { Cell::new(0) };
        static RETAINED: Cell<u32> = const { Cell::new(0) };
        static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
        static REFUSALS: RefCell<Vec<(&'static str, c_uint)>> = const { RefCell::new(Vec::new()) };
        static LOG: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    fn note(call: String) {
        CALLS.with_borrow_mut(|calls| calls.push(call));
    }

    /// Notes a call and says how it ends.
    fn answer(name: &str, details: &str) -> c_uint {
        note(format!("{name}{details}"));
        let refused = |refusals: &Vec<_>| refusals.iter().find(|(n, _)| *n == name).map(|r| r.1);
        REFUSALS.with_borrow(refused).unwrap_or(SUCCESS)
    }

    unsafe extern "C" fn device(out: *mut CUdevice) -> c_uint {
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(3) };
        if CURRENT.get() == 0 { INVALID_CONTEXT } else { SUCCESS }
    }
    unsafe extern "C" fn retain(out: *mut CUcontext, device: CUdevice) -> c_uint {
        let rc = answer("retain", &format!(" {device}"));
        if rc == SUCCESS {
            RETAINED.set(RETAINED.get() + 1);
            // SAFETY: the caller's out-pointer.
            unsafe { out.write(ptr::without_provenance_mut(PRIMARY)) };
        }
        rc
    }
    unsafe extern "C" fn release(device: CUdevice) -> c_uint {
        RETAINED.set(RETAINED.get() - 1);
        answer("release", &format!(" {device}"))
    }
    unsafe extern "C" fn push(context: CUcontext) -> c_uint {
        assert_eq!((context.addr(), RETAINED.get()), (PRIMARY, 1), "this context may be gone");
        let rc = answer("push", "");
        if rc == SUCCESS {
            CURRENT.set(PRIMARY);
        }
        rc
    }
    unsafe extern "C" fn pop(out: *mut CUcontext) -> c_uint {
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(ptr::without_provenance_mut(CURRENT.replace(0))) };
        answer("pop", "")
    }
    unsafe extern "C" fn register(at: *mut c_void, len: usize, flags: c_uint) -> c_uint {
        answer("register", &format!(" {:#x} {len:#x} {flags}", at.addr()))
    }
    unsafe extern "C" fn unregister(at: *mut c_void) -> c_uint {
        let rc = answer("unregister", &format!(" {:#x}", at.addr()));
        if CURRENT.get() == 0 { INVALID_CONTEXT } else { rc }
    }

    const DRIVER: HostDriver = HostDriver {
        device,
        lend: Some(Lend { retain, release, push, pop }),
        register,
        unregister,
    };

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

    fn refuse(name: &'static str, rc: c_uint) {
        REFUSALS.set(vec![(name, rc)]);
    }

    /// Keeps level and text of what is logged.
    struct Log;
    impl tracing::Subscriber for Log {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn event(&self, event: &tracing::Event<'_>) {
            struct Text(String);
            impl tracing::field::Visit for Text {
                fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                    self.0 = format!("{} {value:?}", self.0);
                }
            }
            let mut text = Text(event.metadata().level().to_string());
            event.record(&mut text);
            LOG.with_borrow_mut(|log| log.push(text.0));
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    /// Maps with a context and unmaps on a thread that has this one; what was logged, and what was called after the map.
    fn unmapped(driver: HostDriver, context: usize) -> (Vec<String>, Vec<String>) {
        CURRENT.set(7);
        let mapped = driver.map(driver.current().unwrap(), Held).unwrap();
        CURRENT.set(context);
        tracing::subscriber::with_default(Log, || drop(mapped));
        assert_eq!(RETAINED.get(), 0, "the device's context is given back");
        REFUSALS.take();
        let calls = calls().split_off(1);
        assert_eq!(calls.last().unwrap(), "deregister");
        (LOG.take(), calls)
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
        let device = DRIVER.current().unwrap();
        assert_eq!(device, Device(3));
        let mapped = DRIVER.map(device, Held).unwrap();
        assert_eq!(mapped.pinned().range(), 0x5000..0x7000);
        drop(mapped);
        assert_eq!(calls(), ["register 0x5000 0x2000 3", "unregister 0x5000", "deregister"]);
    }

    #[test]
    fn a_thread_without_a_context_borrows_the_devices_own() {
        let (log, calls) = unmapped(DRIVER, 0);
        assert_eq!(log, [""; 0]);
        let first = ["unregister 0x5000", "retain 3", "push", "unregister 0x5000", "pop"];
        assert_eq!(calls, [&first[..], &["release 3", "deregister"]].concat());
        assert_eq!(CURRENT.get(), 0);
    }

    #[test]
    fn where_none_can_be_lent_it_is_left() {
        let without = HostDriver { lend: None, ..DRIVER };
        let (log, calls) = unmapped(without, 0);
        assert!(log[0].starts_with("WARN cuMemHostUnregister to unmap 8192 bytes at 0x5000"));
        assert!(log[0].contains("CUDA error 201") && log[0].contains("has no context"), "{log:?}");
        assert_eq!(calls, ["unregister 0x5000", "deregister"]);
        refuse("retain", 2);
        let (log, calls) = unmapped(DRIVER, 0);
        assert!(log[0].starts_with("WARN cuDevicePrimaryCtxRetain to unmap"), "{log:?}");
        assert!(log[0].ends_with("CUDA error 2; the GPU may still map them"), "{log:?}");
        assert_eq!(calls, ["unregister 0x5000", "retain 3", "deregister"]);
        refuse("push", 999);
        let (log, calls) = unmapped(DRIVER, 0);
        assert!(log[0].starts_with("WARN cuCtxPushCurrent_v2 to unmap"), "{log:?}");
        assert_eq!(calls[1..], ["retain 3", "push", "release 3", "deregister"]);
    }

    #[test]
    fn what_is_left_is_told_by_the_result() {
        for (code, telling) in [
            (4, None),
            (713, Some("INFO cuMemHostUnregister")),
            (709, Some("WARN cuMemHostUnregister")),
            (700, Some("WARN cuMemHostUnregister")),
            (1, Some("WARN cuMemHostUnregister")),
        ] {
            // Both where the thread has a context and where one was lent.
            for context in [7, 0] {
                refuse("unregister", code);
                let (log, _) = unmapped(DRIVER, context);
                assert_eq!(log.len(), usize::from(telling.is_some()), "{log:?}");
                let Some(telling) = telling else { continue };
                assert!(log[0].starts_with(telling), "{log:?}");
                let maps = !["has let go", "maps them until"].iter().any(|t| log[0].contains(t));
                assert_eq!(log[0].contains("may still map"), maps, "{log:?}");
                assert_eq!(maps, ![709, 713].contains(&code), "{log:?}");
            }
        }
    }

    #[test]
    fn a_refusal_names_the_code_and_gives_the_memory_back() {
        CURRENT.set(7);
        let device = DRIVER.current().unwrap();
        for (code, errno) in [(2, libc::ENOMEM), (712, libc::EIO)] {
            refuse("register", code);
            let error = DRIVER.map(device, Held).unwrap_err();
            assert!(error.to_string().contains(&format!("CUDA error {code}")), "{error}");
            assert_eq!(error.errno(), Some(errno));
            assert_eq!(calls()[1..], ["deregister"]);
        }
    }
}
