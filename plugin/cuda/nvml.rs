//! How full the window (BAR1) is through which other devices reach a GPU's memory, asked of NVML where the process has
//! loaded and initialised it. NCCL does both.

use super::loaded;
use std::ffi::{CString, c_char, c_uint, c_void};
use std::ptr;

type DeviceGetCount = unsafe extern "C" fn(*mut c_uint) -> c_uint;
type DeviceByIndex = unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_uint;
type DeviceByPci = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_uint;
type DeviceBar1 = unsafe extern "C" fn(*mut c_void, *mut RawBar1) -> c_uint;

const SUCCESS: c_uint = 0;
/// GPUs of one host that are asked.
const MOST_GPUS: c_uint = 64;

/// `nvmlBAR1Memory_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct RawBar1 {
    total: u64,
    free: u64,
    used: u64,
}

/// The window of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bar1 {
    /// PCI address or number of the GPU.
    pub gpu: String,
    /// Size in bytes.
    pub total: u64,
    /// Bytes in use.
    pub used: u64,
}

impl Bar1 {
    /// Bytes that are left.
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.used)
    }
}

/// NVML as the process has loaded it.
#[derive(Debug)]
pub struct Nvml {
    count: DeviceGetCount,
    by_index: DeviceByIndex,
    by_pci: DeviceByPci,
    bar1: DeviceBar1,
}

impl Nvml {
    /// NVML, if the process has loaded it already.
    pub fn loaded() -> Option<Self> {
        let library = loaded::NVML.loaded()?;
        // SAFETY: NVML's functions of these names have these signatures since their version 2, BAR1's since its first.
        unsafe {
            Some(Self {
                count: library.function(c"nvmlDeviceGetCount_v2")?,
                by_index: library.function(c"nvmlDeviceGetHandleByIndex_v2")?,
                by_pci: library.function(c"nvmlDeviceGetHandleByPciBusId_v2")?,
                bar1: library.function(c"nvmlDeviceGetBAR1MemoryInfo")?,
            })
        }
    }

    /// The window of the GPU at a PCI address, or of every GPU. Empty where NVML does not answer: it is not
    /// initialised, or the GPU has no such window.
    pub fn bar1(&self, pci_bus_id: Option<&str>) -> Vec<Bar1> {
        let mut device = ptr::null_mut();
        if let Some(bus_id) = pci_bus_id {
            let Ok(text) = CString::new(bus_id) else { return Vec::new() };
            // SAFETY: a NUL-terminated text and an out-pointer of a handle.
            let rc = unsafe { (self.by_pci)(text.as_ptr(), &raw mut device) };
            let window = (rc == SUCCESS).then(|| self.of_device(device, bus_id.to_owned()));
            return window.flatten().into_iter().collect();
        }
        let mut count = 0;
        // SAFETY: an out-pointer of a number.
        if unsafe { (self.count)(&raw mut count) } != SUCCESS {
            return Vec::new();
        }
        let windows = (0..count.min(MOST_GPUS)).filter_map(|index| {
            // SAFETY: NVML checks the index and fills the out-pointer.
            let rc = unsafe { (self.by_index)(index, &raw mut device) };
            (rc == SUCCESS).then(|| self.of_device(device, index.to_string())).flatten()
        });
        windows.collect()
    }

    fn of_device(&self, device: *mut c_void, gpu: String) -> Option<Bar1> {
        let mut raw = RawBar1::default();
        // SAFETY: a handle that NVML just gave out, and a struct of its layout.
        let rc = unsafe { (self.bar1)(device, &raw mut raw) };
        (rc == SUCCESS).then_some(Bar1 { gpu, total: raw.total, used: raw.used })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn no_nvml_is_no_error() {
        // Nothing in this test process loads it.
        assert!(Nvml::loaded().is_none());
    }

    unsafe extern "C" fn count(out: *mut c_uint) -> c_uint {
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(3) };
        SUCCESS
    }

    unsafe extern "C" fn by_index(index: c_uint, out: *mut *mut c_void) -> c_uint {
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(ptr::without_provenance_mut(index as usize + 1)) };
        // NVML_ERROR_NO_PERMISSION for one of them.
        if index == 1 { 4 } else { SUCCESS }
    }

    unsafe extern "C" fn by_pci(text: *const c_char, out: *mut *mut c_void) -> c_uint {
        // SAFETY: the caller's text and out-pointer.
        unsafe {
            out.write(ptr::without_provenance_mut(1));
            if CStr::from_ptr(text) == c"0000:3B:00.0" { SUCCESS } else { 6 }
        }
    }

    unsafe extern "C" fn bar1(device: *mut c_void, out: *mut RawBar1) -> c_uint {
        // SAFETY: the caller's out-pointer.
        unsafe {
            out.write(RawBar1 { total: 1 << 30, free: 1 << 20, used: (1 << 30) - (1 << 20) });
        };
        // NVML_ERROR_NOT_SUPPORTED for the third.
        if device.addr() == 3 { 3 } else { SUCCESS }
    }

    unsafe extern "C" fn uninitialised(_: *mut c_uint) -> c_uint {
        1
    }

    #[test]
    fn windows_of_one_gpu_and_of_all() {
        let nvml = Nvml { count, by_index, by_pci, bar1 };
        let all = nvml.bar1(None);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].gpu.as_str(), all[0].free()), ("0", 1 << 20));
        assert_eq!(nvml.bar1(Some("0000:3B:00.0"))[0].gpu, "0000:3B:00.0");
        assert_eq!(nvml.bar1(Some("0000:00:00.0")), []);
        assert_eq!(nvml.bar1(Some("\0")), []);
        assert_eq!(Nvml { count: uninitialised, ..nvml }.bar1(None), []);
    }
}
