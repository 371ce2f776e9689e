//! The tables of some versions behind one set of calls: those whose signatures differ.

use nccl_net_pinrail::abi::{v6, v8, v9, v12};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// What C holds.
pub type Ptr = *mut c_void;

/// NCCL's handle.
pub type Handle = [u8; 128];

/// A version of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Net(u8);

/// Success, or an error code.
pub const RESULTS: std::ops::RangeInclusive<c_int> = 0..=6;

macro_rules! in_all {
    ($self:ident, $slot:ident($($argument:expr),*)) => {
        // SAFETY: the caller's arguments are what NCCL's contract demands, or what the plugin detects.
        unsafe {
            match $self.0 {
                6 => (v6::TABLE.0.$slot)($($argument),*),
                8 => (v8::TABLE.0.$slot)($($argument),*),
                9 => (v9::TABLE.0.$slot)($($argument),*),
                _ => (v12::TABLE.0.$slot)($($argument),*),
            }
        }
    };
}

/// Checks that a call answers with a result that exists.
fn known(result: c_int) -> c_int {
    assert!(RESULTS.contains(&result), "a call answered {result}");
    result
}

#[allow(clippy::missing_safety_doc, clippy::too_many_arguments)]
impl Net {
    /// One of them.
    pub fn pick(number: usize) -> Self {
        Self([6, 8, 9, 12][number % 4])
    }

    /// Whether inits give contexts.
    pub fn has_contexts(self) -> bool {
        self.0 == 12
    }

    pub fn init(self, out: *mut Ptr) -> c_int {
        // SAFETY: the out-pointer is the caller's.
        known(unsafe {
            match self.0 {
                6 => (v6::TABLE.0.init)(None),
                8 => (v8::TABLE.0.init)(None),
                9 => (v9::TABLE.0.init)(None),
                _ => (v12::TABLE.0.init)(out, 7, null_mut(), None, None),
            }
        })
    }

    pub fn finalize(self, context: Ptr) -> c_int {
        // SAFETY: looked up by the plugin.
        known(if self.0 == 12 { unsafe { (v12::TABLE.0.finalize)(context) } } else { 0 })
    }

    pub fn devices(self, out: *mut c_int) -> c_int {
        known(in_all!(self, devices(out)))
    }

    /// Properties into a buffer that is large enough for every version, or nowhere.
    pub fn properties(self, device: c_int, out: Option<&mut [u64; 32]>) -> c_int {
        let out: Ptr = out.map_or(null_mut(), |out| out.as_mut_ptr().cast());
        known(in_all!(self, get_properties(device, out.cast())))
    }

    /// Fuses devices; without the call an error.
    pub fn fuse(self, members: &[c_int], count: c_int) -> Option<c_int> {
        let mut device = -1;
        let mut devs = [0; 8];
        devs.iter_mut().zip(members).for_each(|(to, from)| *to = *from);
        // SAFETY: structures of our own.
        let result = unsafe {
            match self.0 {
                9 => {
                    let mut properties = v9::VDeviceProps {
                        ndevs: count,
                        devs: [devs[0], devs[1], devs[2], devs[3]],
                    };
                    (v9::TABLE.0.make_vdevice?)(&raw mut device, &raw mut properties)
                }
                12 => {
                    let mut properties = v12::VDeviceProps { ndevs: count, devs };
                    (v12::TABLE.0.make_vdevice?)(&raw mut device, &raw mut properties)
                }
                _ => return None,
            }
        };
        (known(result) == 0).then_some(device)
    }

    pub fn listen(self, context: Ptr, device: c_int, handle: *mut Handle, out: *mut Ptr) -> c_int {
        let handle: Ptr = handle.cast();
        // SAFETY: as for all.
        known(unsafe {
            match self.0 {
                6 => (v6::TABLE.0.listen)(device, handle, out),
                8 => (v8::TABLE.0.listen)(device, handle, out),
                9 => (v9::TABLE.0.listen)(device, handle, out),
                _ => (v12::TABLE.0.listen)(context, device, handle, out),
            }
        })
    }

    pub fn connect(self, context: Ptr, device: c_int, handle: *mut Handle, out: *mut Ptr) -> c_int {
        let handle: Ptr = handle.cast();
        // SAFETY: as for all.
        known(unsafe {
            match self.0 {
                6 => (v6::TABLE.0.connect)(device, handle, out),
                8 => (v8::TABLE.0.connect)(device, handle, out, null_mut()),
                9 => (v9::TABLE.0.connect)(device, handle, out, null_mut()),
                _ => (v12::TABLE.0.connect)(context, device, handle, out, null_mut()),
            }
        })
    }

    pub fn accept(self, listener: Ptr, out: *mut Ptr) -> c_int {
        // SAFETY: as for all.
        known(unsafe {
            match self.0 {
                6 => (v6::TABLE.0.accept)(listener, out),
                8 => (v8::TABLE.0.accept)(listener, out, null_mut()),
                9 => (v9::TABLE.0.accept)(listener, out, null_mut()),
                _ => (v12::TABLE.0.accept)(listener, out, null_mut()),
            }
        })
    }

    pub fn reg_mr(
        self,
        comm: Ptr,
        data: *mut u8,
        size: usize,
        kind: c_int,
        out: *mut Ptr,
    ) -> c_int {
        let data: Ptr = data.cast();
        // SAFETY: as for all.
        known(unsafe {
            match self.0 {
                6 => (v6::TABLE.0.reg_mr)(comm, data, size as c_int, kind, out),
                8 => (v8::TABLE.0.reg_mr)(comm, data, size, kind, out),
                9 => (v9::TABLE.0.reg_mr)(comm, data, size, kind, out),
                _ => (v12::TABLE.0.reg_mr)(comm, data, size, kind, out),
            }
        })
    }

    pub fn reg_dmabuf(
        self,
        comm: Ptr,
        data: *mut u8,
        size: usize,
        kind: c_int,
        offset: u64,
        fd: c_int,
        out: *mut Ptr,
    ) -> c_int {
        known(in_all!(self, reg_mr_dmabuf(comm, data.cast(), size, kind, offset, fd, out)))
    }

    pub fn dereg_mr(self, comm: Ptr, handle: Ptr) -> c_int {
        known(in_all!(self, dereg_mr(comm, handle)))
    }

    pub fn isend(
        self,
        comm: Ptr,
        data: *mut u8,
        size: usize,
        tag: c_int,
        handle: Ptr,
        out: *mut Ptr,
    ) -> c_int {
        let data: Ptr = data.cast();
        // SAFETY: as for all.
        known(unsafe {
            match self.0 {
                6 => (v6::TABLE.0.isend)(comm, data, size as c_int, tag, handle, out),
                8 => (v8::TABLE.0.isend)(comm, data, size as c_int, tag, handle, out),
                9 => (v9::TABLE.0.isend)(comm, data, size, tag, handle, out),
                _ => (v12::TABLE.0.isend)(comm, data, size, tag, handle, null_mut(), out),
            }
        })
    }

    /// The slices are as long as `count` says, or the count is one that is refused.
    pub fn irecv(
        self,
        comm: Ptr,
        count: c_int,
        data: &mut [Ptr],
        sizes: &mut [usize],
        tags: &mut [c_int],
        handles: &mut [Ptr],
        out: *mut Ptr,
    ) -> c_int {
        let mut short: Vec<c_int> = sizes.iter().map(|size| *size as c_int).collect();
        let (data, tags, handles) = (data.as_mut_ptr(), tags.as_mut_ptr(), handles.as_mut_ptr());
        // SAFETY: as for all.
        known(unsafe {
            match self.0 {
                6 => (v6::TABLE.0.irecv)(comm, count, data, short.as_mut_ptr(), tags, handles, out),
                8 => (v8::TABLE.0.irecv)(comm, count, data, short.as_mut_ptr(), tags, handles, out),
                9 => (v9::TABLE.0.irecv)(comm, count, data, sizes.as_mut_ptr(), tags, handles, out),
                _ => (v12::TABLE.0.irecv)(
                    comm,
                    count,
                    data,
                    sizes.as_mut_ptr(),
                    tags,
                    handles,
                    null_mut(),
                    out,
                ),
            }
        })
    }

    pub fn iflush(
        self,
        comm: Ptr,
        count: c_int,
        data: &mut [Ptr],
        sizes: &mut [c_int],
        handles: &mut [Ptr],
        out: *mut Ptr,
    ) -> c_int {
        known(in_all!(
            self,
            iflush(comm, count, data.as_mut_ptr(), sizes.as_mut_ptr(), handles.as_mut_ptr(), out)
        ))
    }

    pub fn test(self, request: Ptr, done: *mut c_int, sizes: *mut c_int) -> c_int {
        known(in_all!(self, test(request, done, sizes)))
    }

    pub fn close_send(self, comm: Ptr) -> c_int {
        known(in_all!(self, close_send(comm)))
    }

    pub fn close_recv(self, comm: Ptr) -> c_int {
        known(in_all!(self, close_recv(comm)))
    }

    pub fn close_listen(self, comm: Ptr) -> c_int {
        known(in_all!(self, close_listen(comm)))
    }

    /// Both ends of a connection of a device, driven by turns.
    pub fn pair(self, context: Ptr, device: c_int) -> Result<(Ptr, Ptr), c_int> {
        let (mut handle, mut listener) = ([0; 128], null_mut());
        let result = self.listen(context, device, &raw mut handle, &raw mut listener);
        if result != 0 {
            return Err(result);
        }
        let (mut send, mut recv): (Ptr, Ptr) = (null_mut(), null_mut());
        let mut result = 0;
        while result == 0 && (send.is_null() || recv.is_null()) {
            if send.is_null() {
                result = self.connect(context, device, &raw mut handle, &raw mut send);
            }
            if result == 0 && recv.is_null() {
                result = self.accept(listener, &raw mut recv);
            }
        }
        assert_eq!(self.close_listen(listener), 0);
        if result == 0 {
            return Ok((send, recv));
        }
        if !send.is_null() {
            assert_eq!(self.close_send(send), 0);
        }
        if !recv.is_null() {
            assert_eq!(self.close_recv(recv), 0);
        }
        Err(result)
    }
}
