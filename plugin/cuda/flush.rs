//! The driver's own flush: `cuFlushGPUDirectRDMAWrites` waits until what other devices wrote into a GPU's memory is visible
//! to it.
//!
//! It acts on the GPU whose context is current on the calling thread. So it can stand in for a read over the network only
//! where that is the GPU that the data are for; every other case is left to the caller, with the reason.

use super::loaded;
use cudarc::driver::sys::{
    CUdevice, CUdevice_attribute, CUflushGPUDirectRDMAWritesOptions,
    CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget, CUpointer_attribute,
};
use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;

type Flush = unsafe extern "C" fn(c_uint, c_uint) -> c_uint;
type CtxGetDevice = unsafe extern "C" fn(*mut CUdevice) -> c_uint;
type DeviceGet = unsafe extern "C" fn(*mut CUdevice, c_int) -> c_uint;
type DeviceGetAttribute = unsafe extern "C" fn(*mut c_int, c_uint, CUdevice) -> c_uint;
type PointerGetAttribute = unsafe extern "C" fn(*mut c_void, c_uint, u64) -> c_uint;

const SUCCESS: c_uint = 0;

/// The functions that a flush takes, in the driver that the process has loaded.
#[derive(Debug)]
pub struct GpuFlush {
    flush: Flush,
    current: CtxGetDevice,
    device: DeviceGet,
    device_attribute: DeviceGetAttribute,
    pointer_attribute: PointerGetAttribute,
    /// Whether the device that was asked last offers it.
    offers: Cell<Option<(CUdevice, bool)>>,
}

/// Why the driver does not flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No context is current on the thread.
    NoContext,
    /// The memory is not a GPU's, or of another one than the thread's.
    OtherMemory,
    /// The GPU or its driver does not offer it to the host.
    NotOffered,
    /// The call failed with this result.
    Failed(c_uint),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoContext => f.write_str("no CUDA context is current on NCCL's thread"),
            Self::OtherMemory => f.write_str("the memory is not of the GPU of NCCL's thread"),
            Self::NotOffered => f.write_str("the GPU does not offer cuFlushGPUDirectRDMAWrites"),
            Self::Failed(rc) => write!(f, "cuFlushGPUDirectRDMAWrites failed: CUDA error {rc}"),
        }
    }
}

impl GpuFlush {
    /// The driver's, if the process has loaded one that has it (CUDA 11.3). Never loads it.
    pub fn loaded() -> Option<Self> {
        let library = loaded::CUDA.loaded()?;
        // SAFETY: the driver's functions of these names have these signatures, the first since CUDA 11.3.
        unsafe {
            Some(Self {
                flush: library.function(c"cuFlushGPUDirectRDMAWrites")?,
                current: library.function(c"cuCtxGetDevice")?,
                device: library.function(c"cuDeviceGet")?,
                device_attribute: library.function(c"cuDeviceGetAttribute")?,
                pointer_attribute: library.function(c"cuPointerGetAttribute")?,
                offers: Cell::new(None),
            })
        }
    }

    /// Returns when writes of other devices that arrived before are visible to the GPU whose memory is at `addr`.
    ///
    /// # Errors
    /// It does not do that, and why. Then nothing was flushed.
    pub fn flush(&self, addr: u64) -> Result<(), Refusal> {
        let mut current: CUdevice = 0;
        // SAFETY: an out-pointer of a device's number.
        if unsafe { (self.current)(&raw mut current) } != SUCCESS {
            return Err(Refusal::NoContext);
        }
        if self.device_of(addr) != Some(current) {
            return Err(Refusal::OtherMemory);
        }
        if !self.is_offered(current) {
            return Err(Refusal::NotOffered);
        }
        use CUflushGPUDirectRDMAWritesScope as Scope;
        use CUflushGPUDirectRDMAWritesTarget as Target;
        let target = Target::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX as c_uint;
        let scope = Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER as c_uint;
        // SAFETY: it takes no pointers; it acts on the current context, which was there a moment ago.
        match unsafe { (self.flush)(target, scope) } {
            SUCCESS => Ok(()),
            rc => Err(Refusal::Failed(rc)),
        }
    }

    /// The GPU whose memory is at `addr`.
    fn device_of(&self, addr: u64) -> Option<CUdevice> {
        let (mut ordinal, mut device): (c_int, CUdevice) = (-1, -1);
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as c_uint;
        // SAFETY: an out-pointer of this attribute's type; the address is only looked up.
        let rc = unsafe { (self.pointer_attribute)((&raw mut ordinal).cast(), attribute, addr) };
        // SAFETY: an out-pointer of a device's number; the driver checks the ordinal.
        let known = rc == SUCCESS && unsafe { (self.device)(&raw mut device, ordinal) } == SUCCESS;
        known.then_some(device)
    }

    fn is_offered(&self, device: CUdevice) -> bool {
        if let Some((_, offers)) = self.offers.get().filter(|(asked, _)| *asked == device) {
            return offers;
        }
        use CUflushGPUDirectRDMAWritesOptions as Options;
        let attribute =
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS;
        let mut options: c_int = 0;
        // SAFETY: an out-pointer of an attribute.
        let rc = unsafe { (self.device_attribute)(&raw mut options, attribute as c_uint, device) };
        let host = Options::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as c_int;
        let offers = rc == SUCCESS && options & host != 0;
        self.offers.set(Some((device, offers)));
        offers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const MINE: u64 = 0x7f00_0000_0000;
    const OTHERS: u64 = 0x7e00_0000_0000;

    thread_local! {
        /// What the driver of these tests has: the current device, the options of a device, what a flush answers.
        static DRIVER: Cell<(Option<CUdevice>, c_int, c_uint)> = const { Cell::new((None, 0, 0)) };
        static ASKED: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    }

    unsafe extern "C" fn flush(target: c_uint, scope: c_uint) -> c_uint {
        assert_eq!((target, scope), (0, 100));
        ASKED.with_borrow_mut(|asked| asked.push("flush"));
        DRIVER.get().2
    }
    unsafe extern "C" fn current(out: *mut CUdevice) -> c_uint {
        let Some(device) = DRIVER.get().0 else { return 201 };
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(device) };
        SUCCESS
    }
    unsafe extern "C" fn get(out: *mut CUdevice, ordinal: c_int) -> c_uint {
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(ordinal + 10) };
        u32::from(ordinal < 0)
    }
    unsafe extern "C" fn option(out: *mut c_int, attribute: c_uint, _device: CUdevice) -> c_uint {
        assert_eq!(attribute, 117);
        ASKED.with_borrow_mut(|asked| asked.push("options"));
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(DRIVER.get().1) };
        SUCCESS
    }
    unsafe extern "C" fn pointer(out: *mut c_void, attribute: c_uint, addr: u64) -> c_uint {
        assert_eq!(attribute, 9);
        let ordinal = match addr {
            MINE => 3,
            OTHERS => 4,
            _ => return 1,
        };
        // SAFETY: the caller's out-pointer.
        unsafe { out.cast::<c_int>().write(ordinal) };
        SUCCESS
    }

    #[test]
    fn only_the_gpu_of_the_thread_is_flushed_and_only_if_it_offers_that() {
        let new = || GpuFlush {
            flush,
            current,
            device: get,
            device_attribute: option,
            pointer_attribute: pointer,
            offers: Cell::new(None),
        };
        for (driver, addr, wanted) in [
            ((None, 1, 0), MINE, Err(Refusal::NoContext)),
            ((Some(13), 1, 0), OTHERS, Err(Refusal::OtherMemory)),
            ((Some(13), 1, 0), 4096, Err(Refusal::OtherMemory)),
            // Offered to streams, not to the host.
            ((Some(13), 2, 0), MINE, Err(Refusal::NotOffered)),
            ((Some(13), 1, 709), MINE, Err(Refusal::Failed(709))),
            ((Some(13), 3, 0), MINE, Ok(())),
            ((Some(14), 1, 0), OTHERS, Ok(())),
        ] {
            DRIVER.set(driver);
            ASKED.take();
            assert_eq!(new().flush(addr), wanted, "{driver:?} {addr:#x}");
            let flushed = matches!(wanted, Ok(()) | Err(Refusal::Failed(_)));
            assert_eq!(ASKED.take().contains(&"flush"), flushed, "{driver:?} {addr:#x}");
        }
        DRIVER.set((Some(13), 1, 0));
        let flusher = new();
        ASKED.take();
        assert_eq!([flusher.flush(MINE), flusher.flush(MINE)], [Ok(()), Ok(())]);
        assert_eq!(ASKED.take(), ["options", "flush", "flush"], "a device is asked once");
    }

    #[test]
    fn no_driver_is_no_error() {
        // Nothing in this test process loads the driver.
        assert!(GpuFlush::loaded().is_none());
    }
}
