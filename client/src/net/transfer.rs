//! Registration and the data path: regMr, isend, irecv, iflush, test.

use super::abi::{Irecv, Isend, PTR_HOST, Ptr, RegMr, TEST_SIZES};
use super::{GARBAGE, Net, RecvComm, Registration, Request, SendComm, check, written};
use crate::failure::{Failure, Result};
use std::ffi::c_int;
use std::ptr::{NonNull, null_mut};

/// Most members of a receive.
pub const ONE_RECEIVE: usize = 8;

/// NCCL's marker: whoever receives finds out by itself when the data are there.
const OPTIONAL_COMPLETION: usize = 0x1;

/// One member of a receive.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Start of the memory.
    pub data: *mut u8,
    /// Most bytes that fit.
    pub size: usize,
    /// Matches the sender's tag.
    pub tag: i32,
    /// Registration that covers the memory.
    pub registration: Registration,
}

// SAFETY: nothing here looks behind the address; the plugin does, from whichever thread NCCL uses.
unsafe impl Send for Member {}
// SAFETY: as above.
unsafe impl Sync for Member {}

impl Net {
    /// Registers host memory with a sending comm.
    ///
    /// # Safety
    /// The range stays mapped until it is deregistered.
    pub unsafe fn register_send(
        &self,
        comm: SendComm,
        data: *mut u8,
        size: usize,
    ) -> Result<Registration> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.register(comm.0.as_ptr(), data, size) }
    }

    /// Registers host memory with a receiving comm.
    ///
    /// # Safety
    /// The range stays mapped until it is deregistered.
    pub unsafe fn register_recv(
        &self,
        comm: RecvComm,
        data: *mut u8,
        size: usize,
    ) -> Result<Registration> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.register(comm.0.as_ptr(), data, size) }
    }

    /// # Safety
    /// `comm` is open and the range stays mapped until it is deregistered.
    unsafe fn register(&self, comm: Ptr, data: *mut u8, size: usize) -> Result<Registration> {
        let mut registration = GARBAGE as Ptr;
        // SAFETY: the comm is open, the memory is mapped, the out-pointer is valid.
        let code = unsafe {
            match self.table.reg_mr {
                RegMr::V6(reg_mr) => {
                    let size = int_size("regMr", size)?;
                    reg_mr(comm, data.cast(), size, PTR_HOST, &mut registration)
                }
                RegMr::V8(reg_mr) => reg_mr(comm, data.cast(), size, PTR_HOST, &mut registration),
            }
        };
        check("regMr", code)?;
        written("regMr", registration)?
            .map(Registration)
            .ok_or_else(|| Failure::new("regMr", "the plugin returned no handle"))
    }

    /// Ends a registration with a sending comm.
    pub fn deregister_send(&self, comm: SendComm, registration: Registration) -> Result<()> {
        // SAFETY: both came from this plugin and are still open.
        let code = unsafe { (self.table.dereg_mr)(comm.0.as_ptr(), registration.0.as_ptr()) };
        check("deregMr", code)
    }

    /// Ends a registration with a receiving comm.
    pub fn deregister_recv(&self, comm: RecvComm, registration: Registration) -> Result<()> {
        // SAFETY: both came from this plugin and are still open.
        let code = unsafe { (self.table.dereg_mr)(comm.0.as_ptr(), registration.0.as_ptr()) };
        check("deregMr", code)
    }

    /// Ends a registration that was never made, as NCCL does when it cleans up after a failure.
    pub fn deregister_nothing(&self, comm: SendComm) -> Result<()> {
        // SAFETY: the comm is open; NULL is what NCCL passes as well.
        check("deregMr(NULL)", unsafe { (self.table.dereg_mr)(comm.0.as_ptr(), null_mut()) })
    }

    /// Starts a send. `None`: it would block, try again.
    ///
    /// # Safety
    /// The member's memory is registered with this comm and stays untouched until the request is done.
    #[inline]
    pub unsafe fn isend(&self, comm: SendComm, member: Member) -> Result<Option<Request>> {
        let mut request = GARBAGE as Ptr;
        let Member { data, size, tag, registration } = member;
        let (comm, data, mr) = (comm.0.as_ptr(), data.cast(), registration.0.as_ptr());
        // SAFETY: the comm is open, the caller vouches for the memory, the out-pointer is valid.
        let code = unsafe {
            match self.table.isend {
                Isend::V6(isend) => {
                    isend(comm, data, int_size("isend", size)?, tag, mr, &mut request)
                }
                Isend::V9(isend) => isend(comm, data, size, tag, mr, &mut request),
                Isend::V10(isend) => isend(comm, data, size, tag, mr, null_mut(), &mut request),
            }
        };
        check("isend", code)?;
        Ok(written("isend", request)?.map(Request))
    }

    /// Starts a receive of 1 to 8 members. `None`: it would block, try again.
    ///
    /// # Safety
    /// The members' memory is registered with this comm and belongs to the plugin until the request is done.
    #[inline]
    pub unsafe fn irecv(&self, comm: RecvComm, members: &[Member]) -> Result<Option<Request>> {
        // SAFETY: the caller's contract.
        unsafe { self.receive(comm, members, GARBAGE) }
    }

    /// A receive of one member whose completion NCCL does not need. The request is to be tested all the same.
    ///
    /// # Safety
    /// As [`Self::irecv`].
    pub unsafe fn irecv_optional(&self, comm: RecvComm, member: Member) -> Result<Option<Request>> {
        // SAFETY: the caller's contract.
        let request = unsafe { self.receive(comm, &[member], OPTIONAL_COMPLETION)? };
        if request.is_some_and(|request| request.0.as_ptr() as usize == OPTIONAL_COMPLETION) {
            return Err(Failure::new(
                "irecv",
                "the plugin left NCCL's marker 0x1 in place of a request",
            ));
        }
        Ok(request)
    }

    /// # Safety
    /// As [`Self::irecv`].
    #[inline]
    unsafe fn receive(
        &self,
        comm: RecvComm,
        members: &[Member],
        before: usize,
    ) -> Result<Option<Request>> {
        const MOST: usize = ONE_RECEIVE;
        let mut request: Ptr = before as Ptr;
        let mut data: [Ptr; MOST] = [null_mut(); MOST];
        let mut sizes = [0usize; MOST];
        let mut int_sizes: [c_int; MOST] = [0; MOST];
        let mut tags: [c_int; MOST] = [0; MOST];
        let mut mrs: [Ptr; MOST] = [null_mut(); MOST];
        let mut profiler: [Ptr; MOST] = [null_mut(); MOST];
        let count = members.len() as c_int;
        for (index, member) in members.iter().enumerate() {
            data[index] = member.data.cast();
            sizes[index] = member.size;
            tags[index] = member.tag;
            mrs[index] = member.registration.0.as_ptr();
        }
        let (comm, data, tags, mrs) =
            (comm.0.as_ptr(), data.as_mut_ptr(), tags.as_mut_ptr(), mrs.as_mut_ptr());
        // SAFETY: the comm is open, the arrays have `count` entries, the caller vouches for the memory.
        let code = unsafe {
            match self.table.irecv {
                Irecv::V6(irecv) => {
                    for (index, member) in members.iter().enumerate() {
                        int_sizes[index] = int_size("irecv", member.size)?;
                    }
                    irecv(comm, count, data, int_sizes.as_mut_ptr(), tags, mrs, &mut request)
                }
                Irecv::V9(irecv) => {
                    irecv(comm, count, data, sizes.as_mut_ptr(), tags, mrs, &mut request)
                }
                Irecv::V10(irecv) => irecv(
                    comm,
                    count,
                    data,
                    sizes.as_mut_ptr(),
                    tags,
                    mrs,
                    profiler.as_mut_ptr(),
                    &mut request,
                ),
            }
        };
        check("irecv", code)?;
        Ok(written("irecv", request)?.map(Request))
    }

    /// Starts a flush of the data of one receive. `None`: nothing to wait for.
    ///
    /// # Safety
    /// The members' memory is registered with this comm.
    #[inline]
    pub unsafe fn iflush(&self, comm: RecvComm, members: &[Member]) -> Result<Option<Request>> {
        let mut request: Ptr = null_mut();
        let mut data: [Ptr; ONE_RECEIVE] = [null_mut(); ONE_RECEIVE];
        let mut sizes: [c_int; ONE_RECEIVE] = [0; ONE_RECEIVE];
        let mut mrs: [Ptr; ONE_RECEIVE] = [null_mut(); ONE_RECEIVE];
        for (index, member) in members.iter().enumerate() {
            data[index] = member.data.cast();
            sizes[index] = int_size("iflush", member.size)?;
            mrs[index] = member.registration.0.as_ptr();
        }
        let (count, comm) = (members.len() as c_int, comm.0.as_ptr());
        let (data, sizes, mrs) = (data.as_mut_ptr(), sizes.as_mut_ptr(), mrs.as_mut_ptr());
        // SAFETY: the comm is open, the three arrays have `count` entries, the out-pointer is valid.
        let code = unsafe { (self.table.iflush)(comm, count, data, sizes, mrs, &mut request) };
        check("iflush", code)?;
        Ok(NonNull::new(request).map(Request))
    }

    /// Asks whether a request is done; its sizes are in `sizes` then. A done request is gone.
    #[inline]
    pub fn test(&self, request: Request, sizes: &mut [c_int; TEST_SIZES]) -> Result<bool> {
        self.ask(request, sizes.as_mut_ptr())
    }

    /// As [`Self::test`], without asking for sizes.
    pub fn test_without_sizes(&self, request: Request) -> Result<bool> {
        self.ask(request, null_mut())
    }

    /// `sizes`: NULL, or 64 entries.
    #[inline]
    fn ask(&self, request: Request, sizes: *mut c_int) -> Result<bool> {
        let mut done: c_int = GARBAGE as c_int;
        // SAFETY: the request is in flight, and the array has the 64 entries NCCL gives, or is not asked for.
        let code = unsafe { (self.table.test)(request.0.as_ptr(), &mut done, sizes) };
        check("test", code)?;
        match done {
            0 => Ok(false),
            done if done == GARBAGE as c_int => {
                Err(Failure::new("test", "the plugin left `done` unwritten"))
            }
            _ => Ok(true),
        }
    }
}

#[inline]
fn int_size(operation: &str, size: usize) -> Result<c_int> {
    c_int::try_from(size)
        .map_err(|_| Failure::new(operation, format!("{size} bytes do not fit this version's int")))
}
