//! Send requests, read from the application's memory.
//!
//! A work request is read field by field at its offset and only as far as its opcode needs: callers allocate
//! shorter structures than the current header's, and may place them at the end of a page.

use crate::abi::*;
use crate::env::{MAX_INLINE, MAX_SGE};
use crate::faults::act::Fate;
use crate::list::List;

/// A copied send request.
#[derive(Clone, Debug)]
pub struct Wqe {
    /// The application's id.
    pub wr_id: u64,
    /// Opcode.
    pub opcode: u32,
    /// Flags.
    pub flags: u32,
    /// Immediate.
    pub imm: u32,
    /// Remote address.
    pub remote: u64,
    /// Remote key.
    pub rkey: u32,
    /// Compare or add operand.
    pub compare: u64,
    /// Swap operand.
    pub swap: u64,
    /// Payload bytes.
    pub len: u64,
    /// Send queue counter after this request.
    pub counter: u32,
    /// Order among all requests of the process, for release in held mode.
    pub order: u64,
    /// Whether a held request may run.
    pub released: bool,
    /// What the fault plan or the stepped engine has in mind with it.
    pub fate: Option<Box<Fate>>,
    sges: List<Sge, 4>,
    /// Inline payload once the request outlives its post call.
    inline: Option<Box<[u8]>>,
}

/// Limits of the queue a request is posted to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most scatter/gather entries.
    pub max_sge: u32,
    /// Most inline bytes.
    pub max_inline: u32,
}

impl Wqe {
    /// Reads a request.
    ///
    /// # Safety
    /// `wr` and its scatter/gather list are readable, as the verbs contract demands of the caller.
    pub unsafe fn read(wr: *const SendWr, limits: &Limits) -> Result<Self, i32> {
        // SAFETY: reads single fields of the caller's request; the first 40 bytes exist for every opcode.
        let (wr_id, list, num_sge, opcode, flags) = unsafe {
            (
                (&raw const (*wr).wr_id).read(),
                (&raw const (*wr).sg_list).read(),
                (&raw const (*wr).num_sge).read(),
                (&raw const (*wr).opcode).read(),
                (&raw const (*wr).send_flags).read(),
            )
        };
        let n = usize::try_from(num_sge).map_err(|_| libc::EINVAL)?;
        let known = SEND_FENCE | SEND_SIGNALED | SEND_SOLICITED | SEND_INLINE;
        if opcode > WR_ATOMIC_FETCH_AND_ADD || flags & !known != 0 || n > 0 && list.is_null() {
            return Err(libc::EINVAL);
        }
        if n > (limits.max_sge as usize).min(MAX_SGE) {
            // What libmlx5 answers.
            return Err(libc::ENOMEM);
        }
        let mut wqe = Self {
            wr_id,
            opcode,
            flags,
            imm: 0,
            remote: 0,
            rkey: 0,
            compare: 0,
            swap: 0,
            len: 0,
            counter: 0,
            order: 0,
            released: false,
            fate: None,
            sges: List::default(),
            inline: None,
        };
        for i in 0..n {
            // SAFETY: the caller's list has `num_sge` entries.
            let sge = unsafe { list.add(i).read() };
            wqe.len += u64::from(sge.length);
            wqe.sges.push(sge);
        }
        let atomic = matches!(opcode, WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD);
        if matches!(opcode, WR_RDMA_WRITE_WITH_IMM | WR_SEND_WITH_IMM) {
            // SAFETY: inside the first 40 bytes.
            wqe.imm = unsafe { (&raw const (*wr).imm_data).read() };
        }
        if atomic {
            // SAFETY: an atomic request carries these fields.
            unsafe {
                wqe.remote = (&raw const (*wr).remote_addr).read();
                wqe.compare = (&raw const (*wr).rkey_or_compare).read();
                wqe.swap = (&raw const (*wr).swap).read();
                wqe.rkey = (&raw const (*wr).atomic_rkey).read();
            }
        } else if !matches!(opcode, WR_SEND | WR_SEND_WITH_IMM) {
            // SAFETY: an RDMA request carries these fields; the key is the low half in memory order.
            unsafe {
                wqe.remote = (&raw const (*wr).remote_addr).read();
                wqe.rkey = (&raw const (*wr).rkey_or_compare).cast::<u32>().read();
            }
        }
        if wqe.is_inline() {
            let max = u64::from(limits.max_inline).min(MAX_INLINE as u64);
            if atomic || opcode == WR_RDMA_READ {
                return Err(libc::EINVAL);
            }
            if wqe.len > max {
                return Err(libc::ENOMEM);
            }
        }
        Ok(wqe)
    }

    /// Whether the payload is taken at post time, without a key.
    pub fn is_inline(&self) -> bool {
        self.flags & SEND_INLINE != 0
    }

    /// Whether success produces a completion.
    pub fn signaled(&self, all: bool) -> bool {
        all || self.flags & SEND_SIGNALED != 0
    }

    /// The scatter/gather list.
    pub fn sges(&self) -> &[Sge] {
        self.sges.as_slice()
    }

    /// Inline payload that was copied by `detach`.
    pub fn inline_copy(&self) -> Option<&[u8]> {
        self.inline.as_deref()
    }

    /// Copies inline payload, so that the request may outlive its post call.
    ///
    /// # Safety
    /// The inline buffers are readable; true until the post call returns.
    pub unsafe fn detach(&mut self) {
        if !self.is_inline() || self.inline.is_some() {
            return;
        }
        let mut bytes = vec![0_u8; usize::try_from(self.len).unwrap_or(0)];
        let mut at = 0;
        for sge in self.sges() {
            let len = sge.length as usize;
            let from: *const u8 =
                std::ptr::with_exposed_provenance(usize::try_from(sge.addr).unwrap_or(0));
            if len > 0 && at + len <= bytes.len() {
                // SAFETY: promised by the caller; the destination has room by the check.
                unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr().add(at), len) };
                at += len;
            }
        }
        self.inline = Some(bytes.into_boxed_slice());
    }

    /// Completion opcode.
    pub fn wc_opcode(&self) -> u32 {
        match self.opcode {
            WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM => WC_RDMA_WRITE,
            WR_RDMA_READ => WC_RDMA_READ,
            WR_ATOMIC_CMP_AND_SWP => WC_COMP_SWAP,
            WR_ATOMIC_FETCH_AND_ADD => WC_FETCH_ADD,
            _ => WC_SEND,
        }
    }
}
