//! The software RNIC's own calls about pages, looked up in the very library that the plugin has loaded.

use crate::failure::{Failure, Result};
use crate::net::library::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::null_mut;

/// The stage of everything that has to do with pages.
pub const STAGE: &str = "bounce";

/// Migratetype of the contiguous memory area, with the kernel's number.
const CMA: c_int = 4;

type Cma = unsafe extern "C" fn(*const c_char) -> c_int;
type Pin = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;
type Unpin = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type Look =
    unsafe extern "C" fn(*const c_void, *mut u64, *mut c_int, *mut c_uint, *mut c_uint) -> c_int;

/// What is known about one page.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// Whether it lies in the simulated contiguous memory area.
    pub in_cma: bool,
    /// Pins of other drivers, which promised not to last.
    pub short_pins: u32,
    /// Pins that last: one of each memory region that covers the page.
    pub long_pins: u32,
}

/// The library with its calls.
#[derive(Debug)]
pub struct SoftRnic {
    library: Library,
    cma: Cma,
    pin: Pin,
    unpin: Unpin,
    look: Look,
}

/// Reads one call as a function pointer of the type the field wants.
///
/// # Safety
/// The symbol of this name has the signature of the target type.
macro_rules! call {
    ($library:expr, $name:literal) => {
        match $library.symbol($name) {
            Some(symbol) => std::mem::transmute(symbol.as_ptr()),
            None => return Err(refused($library.path(), concat!("has no ", $name))),
        }
    };
}

// The target types are the fields' own.
#[allow(clippy::missing_transmute_annotations)]
impl SoftRnic {
    /// Finds the calls in a verbs library that the plugin has loaded.
    pub fn find(path: &Path) -> Result<Self> {
        let library = Library::loaded(path)
            .ok_or_else(|| refused(&path.display().to_string(), "is not loaded by the plugin"))?;
        // SAFETY: a library that exports these names is softrnic, and the types are those of its header.
        unsafe {
            Ok(Self {
                cma: call!(library, "softrnic_cma"),
                pin: call!(library, "softrnic_pin"),
                unpin: call!(library, "softrnic_unpin"),
                look: call!(library, "softrnic_page"),
                library,
            })
        }
    }

    /// Puts a range, about whose pages nobody asked yet, into the contiguous memory area and pins it as a driver does
    /// that does not say for how long.
    pub fn strand(&self, base: *mut u8, size: usize) -> Result<()> {
        let range = format!("{:x}-{:x}", base.addr(), base.addr() + size);
        let map = CString::new(range).map_err(|error| Failure::new(STAGE, error.to_string()))?;
        // SAFETY: a NUL-terminated string.
        succeeded("softrnic_cma", unsafe { (self.cma)(map.as_ptr()) })?;
        // SAFETY: the call counts pins and touches no content.
        succeeded("softrnic_pin", unsafe { (self.pin)(base.cast(), size, 0) })
    }

    /// Ends what [`Self::strand`] began.
    pub fn release(&self, base: *mut u8, size: usize) -> Result<()> {
        // SAFETY: the call counts pins and touches no content.
        succeeded("softrnic_unpin", unsafe { (self.unpin)(base.cast(), size) })
    }

    /// Where the page at an address lies and who holds it.
    pub fn page(&self, at: *const u8) -> Result<Page> {
        let (mut migratetype, mut short_pins, mut long_pins) = (0, 0, 0);
        // SAFETY: nothing is read through the address, and the out-pointers are valid or NULL.
        let code = unsafe {
            let (short, long) = (&raw mut short_pins, &raw mut long_pins);
            (self.look)(at.cast(), null_mut(), &raw mut migratetype, short, long)
        };
        succeeded("softrnic_page", code)?;
        Ok(Page { in_cma: migratetype == CMA, short_pins, long_pins })
    }

    /// Lets go of the library, before the plugin does.
    pub fn close(self) {
        // SAFETY: `self` is consumed, so none of the calls can be made any more.
        unsafe { self.library.close() };
    }
}

fn refused(library: &str, why: &str) -> Failure {
    Failure::new(
        STAGE,
        format!(
            "{library} {why}: buffers that cannot be pinned are simulated, which only softrnic does; name its \
             softrnic/libibverbs.so.1 with --verbs-lib, or leave --bounce out"
        ),
    )
}

fn succeeded(call: &str, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        errno => Err(Failure::io(STAGE, call, &std::io::Error::from_raw_os_error(errno))),
    }
}
