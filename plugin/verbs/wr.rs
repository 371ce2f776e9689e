//! Work requests, built in place so that posting copies nothing.

use super::sys::{
    SEND_INLINE, SEND_SIGNALED, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, ibv_recv_wr,
    ibv_send_wr, ibv_sge, imm_data_invalidated_rkey_union_t, rdma_t,
};
use std::ptr;

/// A local range by address and key.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// Address in this process.
    pub addr: u64,
    /// Bytes; 0 makes a work request without payload.
    pub len: u32,
    /// Local key; unused for inline payload.
    pub lkey: u32,
}

/// A peer's memory by address and key.
#[derive(Clone, Copy, Debug)]
pub struct Remote {
    /// Address in the peer.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
}

/// How a send-side work request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(u32);

impl Flags {
    /// No completion; its slot is free when a later signalled one completes.
    pub const SILENT: Self = Self(0);
    /// Makes a completion.
    pub const SIGNALED: Self = Self(SEND_SIGNALED);

    /// Signalled if `signaled`, else unchanged.
    #[must_use]
    #[inline(always)]
    pub fn signaled_if(self, signaled: bool) -> Self {
        Self(self.0 | (u32::from(signaled) * SEND_SIGNALED))
    }

    /// The payload is copied while posting. Only up to the queue pair's inline limit.
    #[must_use]
    #[inline]
    pub fn inline(self) -> Self {
        Self(self.0 | SEND_INLINE)
    }
}

#[repr(C)]
struct Slot {
    wr: ibv_send_wr,
    sge: ibv_sge,
}

/// A fixed array of send-side work requests, linked in order.
#[expect(missing_debug_implementations, reason = "raw work requests")]
pub struct SendChain {
    // Boxed: `next` and `sg_list` point into the array, which must not move.
    slots: Box<[Slot]>,
}

// SAFETY: the pointers inside lead only into the owned array.
unsafe impl Send for SendChain {}

impl SendChain {
    /// A chain of at most `capacity` work requests, at least one.
    pub fn new(capacity: usize) -> Self {
        // SAFETY: work requests and SGEs are integers, raw pointers and unions of these: all-zero is a value.
        let empty = || unsafe { std::mem::zeroed::<Slot>() };
        let mut slots: Box<[Slot]> = std::iter::repeat_with(empty).take(capacity.max(1)).collect();
        let mut next: *mut ibv_send_wr = ptr::null_mut();
        for slot in slots.iter_mut().rev() {
            slot.wr.next = next;
            slot.wr.sg_list = &raw mut slot.sge;
            next = &raw mut slot.wr;
        }
        Self { slots }
    }

    /// Number of work requests that fit.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    fn fill(
        &mut self,
        index: usize,
        id: u64,
        opcode: u32,
        local: Local,
        remote: Remote,
        flags: Flags,
    ) -> &mut ibv_send_wr {
        let Slot { wr, sge } = &mut self.slots[index];
        sge.addr = local.addr;
        sge.length = local.len;
        sge.lkey = local.lkey;
        wr.wr_id = id;
        wr.num_sge = i32::from(local.len != 0);
        wr.opcode = opcode;
        wr.send_flags = flags.0;
        wr.wr.rdma = rdma_t { remote_addr: remote.addr, rkey: remote.rkey };
        wr
    }

    /// Makes entry `index` an RDMA write.
    #[inline]
    pub fn write(&mut self, index: usize, id: u64, local: Local, remote: Remote, flags: Flags) {
        self.fill(index, id, WR_RDMA_WRITE, local, remote, flags);
    }

    /// Makes entry `index` an RDMA write with immediate (little-endian on the wire), which consumes a receive at the peer.
    #[inline]
    pub fn write_imm(
        &mut self,
        index: usize,
        id: u64,
        local: Local,
        remote: Remote,
        imm: u32,
        flags: Flags,
    ) {
        let wr = self.fill(index, id, WR_RDMA_WRITE_WITH_IMM, local, remote, flags);
        wr.imm_data_invalidated_rkey_union =
            imm_data_invalidated_rkey_union_t { imm_data: imm.to_le() };
    }

    /// Makes entry `index` an RDMA read into `local`.
    #[inline]
    pub fn read(&mut self, index: usize, id: u64, local: Local, remote: Remote, flags: Flags) {
        self.fill(index, id, WR_RDMA_READ, local, remote, flags);
    }

    /// Runs `post` on the first `count` entries as one NULL-terminated list.
    #[inline]
    pub(super) fn with_list<R>(
        &mut self,
        count: usize,
        post: impl FnOnce(*mut ibv_send_wr) -> R,
    ) -> R {
        let last = &mut self.slots[count - 1].wr;
        let saved = std::mem::replace(&mut last.next, ptr::null_mut());
        let result = post(&raw mut self.slots[0].wr);
        self.slots[count - 1].wr.next = saved;
        result
    }
}

/// What the entries of a [`Prepared`] table are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// RDMA writes.
    Write,
    /// RDMA writes with immediate.
    WriteImm,
    /// RDMA reads.
    Read,
}

impl Operation {
    fn opcode(self) -> u32 {
        match self {
            Self::Write => WR_RDMA_WRITE,
            Self::WriteImm => WR_RDMA_WRITE_WITH_IMM,
            Self::Read => WR_RDMA_READ,
        }
    }
}

/// Work requests with one SGE each, whose constant parts are filled once.
#[expect(missing_debug_implementations, reason = "raw work requests")]
pub struct Prepared<const N: usize>(Box<[Slot; N]>);

// SAFETY: the pointers inside lead only into the owned array.
unsafe impl<const N: usize> Send for Prepared<N> {}

impl<const N: usize> Prepared<N> {
    /// A table in which entry `index` has the identifier and flags that `constant` gives.
    pub fn new(operation: Operation, constant: impl Fn(usize) -> (u64, Flags)) -> Self {
        // SAFETY: work requests and SGEs are integers, raw pointers and unions of these: all-zero is a value.
        let mut slots =
            Box::new(std::array::from_fn::<_, N, _>(|_| unsafe { std::mem::zeroed::<Slot>() }));
        for (index, slot) in slots.iter_mut().enumerate() {
            let (id, flags) = constant(index);
            slot.wr.wr_id = id;
            slot.wr.send_flags = flags.0;
            slot.wr.sg_list = &raw mut slot.sge;
            slot.wr.num_sge = 1;
            slot.wr.opcode = operation.opcode();
        }
        Self(slots)
    }

    /// Fills what changes from one use of entry `index` modulo `N` to the next. `local` is not empty. The immediate is
    /// little-endian on the wire, like everything else that this plugin's peers tell each other.
    #[inline(always)]
    pub fn set(&mut self, index: usize, local: Local, remote: Remote, imm: u32) {
        let Slot { wr, sge } = &mut self.0[index % N];
        sge.addr = local.addr;
        sge.length = local.len;
        sge.lkey = local.lkey;
        wr.imm_data_invalidated_rkey_union =
            imm_data_invalidated_rkey_union_t { imm_data: imm.to_le() };
        wr.wr.rdma = rdma_t { remote_addr: remote.addr, rkey: remote.rkey };
    }

    /// What entry `index` modulo `N` was filled with last.
    pub fn entry(&self, index: usize) -> (Local, Remote) {
        let Slot { wr, sge } = &self.0[index % N];
        // SAFETY: every entry is zeroed at first and only ever filled as an RDMA operation, whose fields are integers.
        let rdma_t { remote_addr, rkey } = unsafe { wr.wr.rdma };
        let local = Local { addr: sge.addr, len: sge.length, lkey: sge.lkey };
        (local, Remote { addr: remote_addr, rkey })
    }

    /// Makes entry `second` follow entry `first` whenever that is posted. Both are below `N`.
    pub fn link(&mut self, first: usize, second: usize) {
        let next = self.list(second);
        self.0[first % N].wr.next = next;
    }

    /// Sets the operation of entry `index` modulo `N`.
    pub fn set_operation(&mut self, index: usize, operation: Operation) {
        self.0[index % N].wr.opcode = operation.opcode();
    }

    /// Sets the immediate of entry `index` modulo `N`; see [`Self::set`].
    pub fn set_imm(&mut self, index: usize, imm: u32) {
        let wr = &mut self.0[index % N].wr;
        wr.imm_data_invalidated_rkey_union =
            imm_data_invalidated_rkey_union_t { imm_data: imm.to_le() };
    }

    /// Fills the remote side of entry `index` modulo `N`.
    #[inline(always)]
    pub fn set_remote(&mut self, index: usize, remote: Remote) {
        let wr = &mut self.0[index % N].wr;
        wr.wr.rdma = rdma_t { remote_addr: remote.addr, rkey: remote.rkey };
    }

    /// The identifier of entry `index` modulo `N`.
    pub fn id(&self, index: usize) -> u64 {
        self.0[index % N].wr.wr_id
    }

    /// Sets the identifier of entry `index` modulo `N`.
    pub fn set_id(&mut self, index: usize, id: u64) {
        self.0[index % N].wr.wr_id = id;
    }

    /// Fills addresses and length of entry `index` modulo `N`, and flags.
    pub fn prepare(&mut self, index: usize, local: Local, remote: Remote, flags: Flags) {
        self.set(index, local, remote, 0);
        self.0[index % N].wr.send_flags = flags.0;
    }

    #[inline(always)]
    pub(super) fn list(&mut self, index: usize) -> *mut ibv_send_wr {
        &raw mut self.0[index % N].wr
    }
}

/// A list of identical receives without payload, posted as a whole.
#[expect(missing_debug_implementations, reason = "raw work requests")]
pub struct RecvChain {
    // Boxed: `next` points into the array, which must not move.
    wrs: Box<[ibv_recv_wr]>,
}

// SAFETY: the pointers inside lead only into the owned array.
unsafe impl Send for RecvChain {}

impl RecvChain {
    /// `count` receives, at least one, which complete with identifier `id`.
    pub fn new(count: usize, id: u64) -> Self {
        let empty = || ibv_recv_wr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        let mut wrs: Box<[ibv_recv_wr]> =
            std::iter::repeat_with(empty).take(count.max(1)).collect();
        let mut next: *mut ibv_recv_wr = ptr::null_mut();
        for wr in wrs.iter_mut().rev() {
            wr.next = next;
            next = wr;
        }
        Self { wrs }
    }

    /// Number of receives in the list.
    pub fn len(&self) -> usize {
        self.wrs.len()
    }

    /// Whether the list is empty; it never is.
    pub fn is_empty(&self) -> bool {
        self.wrs.is_empty()
    }

    pub(super) fn first(&mut self) -> *mut ibv_recv_wr {
        self.wrs.as_mut_ptr()
    }
}
