//! The driver calls that the plugin uses, looked up in the library that the process has loaded.
//!
//! cudarc gives types and constants; its functions are not called, because they panic where the driver or a symbol is
//! missing. Result codes stay integers: a newer driver may return values that an enum does not have.

use super::loaded;
use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

type PointerGetAttribute = unsafe extern "C" fn(*mut c_void, c_uint, u64) -> c_uint;
type DeviceGet = unsafe extern "C" fn(*mut c_int, c_int) -> c_uint;
type DeviceGetPciBusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_uint;

const SUCCESS: c_uint = 0;

/// The CUDA driver of this process.
#[derive(Debug)]
pub struct Driver {
    pointer_get_attribute: PointerGetAttribute,
    device_get: Option<DeviceGet>,
    device_get_pci_bus_id: Option<DeviceGetPciBusId>,
}

/// What kind of memory an address belongs to, as the driver tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Host memory that the driver knows.
    Host,
    /// Device memory.
    Device,
    /// Anything else: memory the driver does not know, or a kind this version has no name for.
    Unknown,
}

impl MemoryKind {
    /// The word for it in logs and records.
    pub fn word(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
            Self::Unknown => "unknown",
        }
    }
}

/// What the driver knows about an address; `None`: it does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PointerFacts {
    /// The kind of memory.
    pub kind: MemoryKind,
    /// Managed memory, which may move between host and device.
    pub managed: Option<bool>,
    /// Memory of the classic allocator. Memory that was mapped piece by piece, such as expandable segments, and pools
    /// are none.
    pub classic: Option<bool>,
    /// The allocation, as (address, bytes).
    pub allocation: Option<(u64, u64)>,
    /// The PCI address of the device.
    pub pci_bus_id: Option<String>,
}

impl Driver {
    /// The driver, if the process has loaded it already. Never loads it: a plugin does not decide that.
    pub fn loaded() -> Option<Self> {
        let library = loaded::CUDA.loaded()?;
        // SAFETY: the driver's functions of these names have had these signatures since CUDA 4.1.
        unsafe {
            Some(Self {
                pointer_get_attribute: library.function(c"cuPointerGetAttribute")?,
                device_get: library.function(c"cuDeviceGet"),
                device_get_pci_bus_id: library.function(c"cuDeviceGetPCIBusId"),
            })
        }
    }

    /// One attribute of an address.
    fn attribute(&self, attribute: CUpointer_attribute, addr: u64) -> Option<u64> {
        let mut value: u64 = 0;
        // SAFETY: no attribute asked for here is wider than the out-pointer; a narrower one fills its low bytes, as the
        // driver exists for little-endian machines only. The address is only looked up.
        let rc = unsafe {
            (self.pointer_get_attribute)((&raw mut value).cast(), attribute as c_uint, addr)
        };
        (rc == SUCCESS).then_some(value)
    }

    /// What kind of memory `addr` is.
    pub fn kind(&self, addr: u64) -> MemoryKind {
        match self.attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, addr) {
            Some(k) if k == CUmemorytype::CU_MEMORYTYPE_HOST as u64 => MemoryKind::Host,
            Some(k) if k == CUmemorytype::CU_MEMORYTYPE_DEVICE as u64 => MemoryKind::Device,
            _ => MemoryKind::Unknown,
        }
    }

    /// All that is known about `addr`.
    pub fn facts(&self, addr: u64) -> PointerFacts {
        use CUpointer_attribute as Attribute;
        let get = |attribute| self.attribute(attribute, addr);
        let start = get(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
        let size = get(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE);
        let ordinal = get(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
        PointerFacts {
            kind: self.kind(addr),
            managed: get(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED).map(|value| value != 0),
            classic: get(Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
                .map(|value| value != 0),
            allocation: start.zip(size).filter(|(_, size)| *size > 0),
            pci_bus_id: ordinal.and_then(|value| self.pci_bus_id(c_int::try_from(value).ok()?)),
        }
    }

    /// The PCI address of a device by its number in this process.
    fn pci_bus_id(&self, ordinal: c_int) -> Option<String> {
        let mut device: c_int = 0;
        // SAFETY: the out-pointer is a device number; the driver checks the ordinal.
        let rc = unsafe { self.device_get?(&raw mut device, ordinal) };
        let mut text: [c_char; 32] = [0; 32];
        let room = c_int::try_from(text.len() - 1).ok()?;
        if rc != SUCCESS {
            return None;
        }
        // SAFETY: the buffer has one byte more than is said, so that it ends in NUL whatever is written.
        let rc = unsafe { self.device_get_pci_bus_id?(text.as_mut_ptr(), room, device) };
        // SAFETY: the last byte of the buffer is NUL.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        (rc == SUCCESS).then(|| text.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_driver_is_no_error() {
        // Nothing in this test process loads the driver.
        assert!(Driver::loaded().is_none());
    }

    const DEVICE_MEMORY: u64 = 0x7f00_0000_0000;
    const PINNED_HOST: u64 = 0x7e00_0000_0000;

    unsafe extern "C" fn attribute(out: *mut c_void, attribute: c_uint, addr: u64) -> c_uint {
        let device = match addr {
            DEVICE_MEMORY => true,
            PINNED_HOST => false,
            // CUDA_ERROR_INVALID_VALUE
            _ => return 1,
        };
        // SAFETY: the caller's out-pointer has the size of each attribute.
        unsafe {
            match attribute {
                2 => out.cast::<c_uint>().write(if device { 2 } else { 1 }),
                8 => out.cast::<u8>().write(0),
                9 => out.cast::<c_int>().write(if device { 3 } else { -2 }),
                10 => out.cast::<u8>().write(u8::from(!device)),
                11 => out.cast::<u64>().write(addr),
                12 if device => out.cast::<u64>().write(2 << 20),
                _ => return 1,
            }
        }
        SUCCESS
    }

    unsafe extern "C" fn get(out: *mut c_int, ordinal: c_int) -> c_uint {
        // SAFETY: the caller's out-pointer.
        unsafe { out.write(ordinal + 10) };
        u32::from(ordinal < 0)
    }

    unsafe extern "C" fn bus_id(out: *mut c_char, room: c_int, device: c_int) -> c_uint {
        assert_eq!((device, room), (13, 31));
        for (at, byte) in b"0000:3B:00.0\0".iter().enumerate() {
            // SAFETY: shorter than the room.
            unsafe { out.add(at).write(*byte as c_char) };
        }
        SUCCESS
    }

    #[test]
    fn addresses_are_described() {
        let driver = Driver {
            pointer_get_attribute: attribute,
            device_get: Some(get),
            device_get_pci_bus_id: Some(bus_id),
        };
        let facts = driver.facts(DEVICE_MEMORY);
        assert_eq!((facts.kind, facts.managed), (MemoryKind::Device, Some(false)));
        assert_eq!(facts.allocation, Some((DEVICE_MEMORY, 2 << 20)));
        assert_eq!(
            (facts.classic, facts.pci_bus_id.as_deref()),
            (Some(false), Some("0000:3B:00.0"))
        );
        let facts = driver.facts(PINNED_HOST);
        assert_eq!((facts.kind, facts.classic), (MemoryKind::Host, Some(true)));
        assert_eq!((facts.allocation, facts.pci_bus_id), (None, None));
        let facts = driver.facts(1);
        assert_eq!((facts.kind, facts.managed, facts.classic), (MemoryKind::Unknown, None, None));
        let old = Driver { device_get: None, device_get_pci_bus_id: None, ..driver };
        assert_eq!(old.facts(DEVICE_MEMORY).pci_bus_id, None);
    }
}
