//! The C-visible part of an object.

use std::cell::UnsafeCell;

/// A public structure that C code reads and that we update through its pointer.
#[repr(transparent)]
#[derive(Debug)]
pub struct Public<T>(UnsafeCell<T>);

// SAFETY: the structure is only accessed through raw pointers, field by field, as the C library's contract has it:
// constant fields are written before the handle is published, the rest only by the verbs call that owns the field.
unsafe impl<T> Send for Public<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Public<T> {}

impl<T> Public<T> {
    /// Wraps the initial content.
    pub const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// The pointer that is handed to C.
    pub fn ptr(&self) -> *mut T {
        self.0.get()
    }
}

/// An all-zero C structure.
///
/// # Safety
/// `T` must be a C structure for which all-zero bytes are valid (integers, nullable pointers, pthread objects).
pub unsafe fn zeroed<T>() -> T {
    // SAFETY: promised by the caller.
    unsafe { std::mem::zeroed() }
}
