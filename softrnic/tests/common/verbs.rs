//! Thin wrappers of the exported calls, so that tests need no unsafe code.

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use softrnic::abi::*;
use softrnic::capi::{data, devices, events, memory, queues};

/// All remote rights and local write.
pub const ALL: u32 =
    ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;

/// Chooses the fabric of this test program; must come before any other call.
pub fn setup(env: &[(&str, &str)]) -> &'static str {
    static FABRIC: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    FABRIC.get_or_init(|| {
        let name = super::fabric("rust");
        // SAFETY: runs once, before the library or any other code of the test reads the environment.
        unsafe {
            std::env::set_var("SOFTRNIC_FABRIC", &name);
            for (key, value) in env {
                std::env::set_var(key, value);
            }
        }
        name
    })
}

/// An opened device with a PD.
#[derive(Clone, Copy)]
pub struct Device {
    /// Context.
    pub context: *mut IbvContext,
    /// Protection domain.
    pub pd: *mut IbvPd,
}

/// Memory followed by a page that cannot be touched.
pub struct Buf {
    base: *mut u8,
    len: usize,
    map: usize,
}

impl Buf {
    /// At least `len` bytes, ending right before the guard page.
    pub fn new(len: usize) -> Self {
        // SAFETY: plain system calls; the mapping is fresh.
        unsafe {
            let page = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).expect("page size");
            let map = len.next_multiple_of(page) + page;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let p = libc::mmap(null_mut(), map, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(p, libc::MAP_FAILED);
            let base: *mut u8 = p.cast();
            assert_eq!(libc::mprotect(base.add(map - page).cast(), page, libc::PROT_NONE), 0);
            Self { base: base.add(map - page - len), len, map }
        }
    }

    /// Address.
    pub fn addr(&self) -> u64 {
        self.base.expose_provenance() as u64
    }

    /// Length.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Stores bytes.
    pub fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: inside the mapping, checked above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(at), bytes.len()) };
    }

    /// Loads bytes.
    pub fn get(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: inside the mapping, checked above.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(at), bytes.as_mut_ptr(), len) };
        bytes
    }

    /// Loads a 64-bit word.
    pub fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.get(at, 8).try_into().expect("8 bytes"))
    }

    /// Makes the memory read-only.
    pub fn protect(&self) {
        let page = 4096;
        let start = self.base as usize & !(page - 1);
        let start: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: only the protection of our own mapping changes.
        let done =
            unsafe { libc::mprotect(start, self.len.next_multiple_of(page), libc::PROT_READ) };
        assert_eq!(done, 0);
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let page = self.base as usize + self.len + 4096 - self.map;
        // SAFETY: the mapping of `new`.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(page), self.map) };
    }
}

/// The calling thread's errno.
pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

impl Device {
    /// Opens the first device.
    pub fn open() -> Self {
        // SAFETY: the list is used before it is freed; handles stay valid.
        unsafe {
            let mut n = 0;
            let list = devices::ibv_get_device_list(&raw mut n);
            assert!(!list.is_null() && n > 0);
            let context = devices::ibv_open_device(*list);
            devices::ibv_free_device_list(list);
            assert!(!context.is_null(), "open: errno {}", errno());
            let pd = memory::ibv_alloc_pd(context);
            assert!(!pd.is_null());
            Self { context, pd }
        }
    }

    /// Another PD of the same context.
    pub fn pd(&self) -> *mut IbvPd {
        // SAFETY: a live handle.
        unsafe { memory::ibv_alloc_pd(self.context) }
    }

    /// A CQ.
    pub fn cq(&self, n: i32) -> *mut IbvCq {
        self.cq_on(n, null_mut())
    }

    /// A CQ on a channel.
    pub fn cq_on(&self, n: i32, channel: *mut IbvCompChannel) -> *mut IbvCq {
        // SAFETY: live handles.
        let cq = unsafe { queues::ibv_create_cq(self.context, n, null_mut(), channel, 0) };
        assert!(!cq.is_null());
        cq
    }

    /// Registers memory.
    pub fn reg(&self, buf: &Buf, access: u32) -> Region {
        let mr = self.try_reg(self.pd, buf.addr(), buf.len(), access);
        Region::of(mr.unwrap_or_else(|e| panic!("reg_mr: errno {e}")))
    }

    /// Registers memory, or says why not.
    pub fn try_reg(
        &self,
        pd: *mut IbvPd,
        addr: u64,
        len: usize,
        access: u32,
    ) -> Result<*mut IbvMr, i32> {
        let addr = std::ptr::with_exposed_provenance_mut(usize::try_from(addr).expect("address"));
        // SAFETY: any range may be asked for.
        let mr = unsafe { memory::ibv_reg_mr(pd, addr, len, access.cast_signed()) };
        if mr.is_null() { Err(errno()) } else { Ok(mr) }
    }

    /// A QP in RESET.
    pub fn qp(&self, send: *mut IbvCq, recv: *mut IbvCq, srq: *mut IbvSrq, cap: QpCap) -> Qp {
        self.try_qp(send, recv, srq, cap).unwrap_or_else(|e| panic!("create_qp: errno {e}"))
    }

    /// A QP in RESET, or why there is none.
    pub fn try_qp(
        &self,
        send: *mut IbvCq,
        recv: *mut IbvCq,
        srq: *mut IbvSrq,
        cap: QpCap,
    ) -> Result<Qp, i32> {
        let mut attr = QpInitAttr {
            qp_context: null_mut(),
            send_cq: send,
            recv_cq: recv,
            srq,
            cap,
            qp_type: QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: live handles and our own structure.
        let qp = unsafe { queues::ibv_create_qp(self.pd, &raw mut attr) };
        if qp.is_null() { Err(errno()) } else { Ok(Qp { qp, context: self.context }) }
    }

    /// Next async event; blocks.
    pub fn event(&self) -> (u32, u64) {
        let mut event = AsyncEvent { element: 0, event_type: 0 };
        // SAFETY: a live handle and our own structure.
        unsafe {
            assert_eq!(events::ibv_get_async_event(self.context, &raw mut event), 0);
            events::ibv_ack_async_event(&raw mut event);
        }
        (event.event_type, event.element)
    }
}

/// Keys of a memory region.
#[derive(Clone, Copy)]
pub struct Region {
    /// Handle.
    pub mr: *mut IbvMr,
    /// Key.
    pub key: u32,
    /// Address.
    pub addr: u64,
}

impl Region {
    /// Reads the keys of a handle.
    pub fn of(mr: *mut IbvMr) -> Self {
        // SAFETY: a live handle.
        unsafe { Self { mr, key: (*mr).lkey, addr: (*mr).addr.expose_provenance() as u64 } }
    }

    /// An entry of a scatter/gather list.
    pub fn sge(&self, at: u64, length: u32) -> Sge {
        Sge { addr: self.addr + at, length, lkey: self.key }
    }

    /// Deregisters.
    pub fn dereg(&self) -> i32 {
        // SAFETY: any handle value may be passed.
        unsafe { memory::ibv_dereg_mr(self.mr) }
    }
}

/// Usual capacities.
pub fn cap() -> QpCap {
    QpCap {
        max_send_wr: 16,
        max_recv_wr: 16,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline_data: 64,
    }
}

/// A queue pair.
#[derive(Clone, Copy)]
pub struct Qp {
    /// Handle.
    pub qp: *mut IbvQp,
    context: *mut IbvContext,
}

/// Masks of the three connection steps.
pub const INIT: u32 = QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS;
/// To RTR.
pub const RTR: u32 = QP_STATE
    | QP_AV
    | QP_PATH_MTU
    | QP_DEST_QPN
    | QP_RQ_PSN
    | QP_MAX_DEST_RD_ATOMIC
    | QP_MIN_RNR_TIMER;
/// To RTS.
pub const RTS: u32 =
    QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC;

impl Qp {
    /// QP number.
    pub fn num(&self) -> u32 {
        // SAFETY: a live handle.
        unsafe { (*self.qp).qp_num }
    }

    /// Usual attributes towards a QP.
    pub fn attr(&self, dest: u32) -> QpAttr {
        let mut gid = Gid::default();
        // SAFETY: a live handle and our own structure.
        assert_eq!(unsafe { devices::ibv_query_gid(self.context, 1, 0, &raw mut gid) }, 0);
        let mut attr = QpAttr {
            qp_access_flags: ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC,
            port_num: 1,
            path_mtu: 5,
            dest_qp_num: dest,
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttr::default()
        };
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid = gid;
        attr.ah_attr.grh.hop_limit = 64;
        attr
    }

    /// Modifies.
    pub fn modify(&self, attr: &QpAttr, mask: u32) -> i32 {
        let mut attr = *attr;
        // SAFETY: any handle value may be passed; our own structure.
        unsafe { queues::ibv_modify_qp(self.qp, &raw mut attr, mask.cast_signed()) }
    }

    /// Moves to a state with the usual masks.
    pub fn to(&self, attr: &QpAttr, state: u32) -> i32 {
        let mask = match state {
            QPS_INIT => INIT,
            QPS_RTR => RTR,
            QPS_RTS => RTS,
            _ => QP_STATE,
        };
        self.modify(&QpAttr { qp_state: state, ..*attr }, mask)
    }

    /// RESET to RTS.
    pub fn connect(&self, attr: &QpAttr) {
        for state in [QPS_INIT, QPS_RTR, QPS_RTS] {
            assert_eq!(self.to(attr, state), 0, "to state {state}");
        }
    }

    /// RESET to RTS with the usual attributes.
    pub fn connect_to(&self, dest: u32) {
        self.connect(&self.attr(dest));
    }

    /// Current attributes.
    pub fn query(&self) -> QpAttr {
        let mut attr = QpAttr::default();
        let mut init = std::mem::MaybeUninit::<QpInitAttr>::uninit();
        // SAFETY: a live handle and our own structures.
        let done = unsafe { queues::ibv_query_qp(self.qp, &raw mut attr, 0, init.as_mut_ptr()) };
        assert_eq!(done, 0);
        attr
    }

    /// Posts a send request; on failure the index of the refused request is returned with the error.
    pub fn send(&self, wr: &mut SendWr) -> i32 {
        let mut bad = null_mut();
        // SAFETY: a live handle and our own request.
        let errno = unsafe { data::post_send(self.qp, wr, &raw mut bad) };
        assert_eq!(errno != 0, bad == &raw mut *wr, "bad_wr names the refused request");
        errno
    }

    /// Posts a receive.
    pub fn recv(&self, id: u64, sges: &mut [Sge]) -> i32 {
        let n = i32::try_from(sges.len()).expect("small");
        let mut wr = RecvWr { wr_id: id, next: null_mut(), sg_list: sges.as_mut_ptr(), num_sge: n };
        let mut bad = null_mut();
        // SAFETY: a live handle and our own request.
        unsafe { data::post_recv(self.qp, &raw mut wr, &raw mut bad) }
    }

    /// Destroys it.
    pub fn destroy(&self) -> i32 {
        // SAFETY: any handle value may be passed.
        unsafe { queues::ibv_destroy_qp(self.qp) }
    }
}

/// A send request.
pub fn wr(opcode: u32, id: u64, flags: u32, sges: &mut [Sge]) -> SendWr {
    SendWr {
        wr_id: id,
        next: null_mut(),
        sg_list: sges.as_mut_ptr(),
        num_sge: i32::try_from(sges.len()).expect("small"),
        opcode,
        send_flags: flags,
        imm_data: 0,
        remote_addr: 0,
        rkey_or_compare: 0,
        swap: 0,
        atomic_rkey: 0,
        pad: 0,
        xrc_srqn: 0,
    }
}

/// A request to a remote address.
pub fn rdma(opcode: u32, id: u64, flags: u32, sges: &mut [Sge], remote: u64, rkey: u32) -> SendWr {
    let mut key = [0xee_u8; 8];
    key[..4].copy_from_slice(&rkey.to_ne_bytes());
    SendWr {
        remote_addr: remote,
        rkey_or_compare: u64::from_ne_bytes(key),
        ..wr(opcode, id, flags, sges)
    }
}

/// Polls once.
pub fn poll(cq: *mut IbvCq) -> Option<Wc> {
    let mut wc = std::mem::MaybeUninit::<Wc>::uninit();
    // SAFETY: a live handle and room for one completion; it is initialised when one was returned.
    unsafe {
        match data::poll_cq(cq, 1, wc.as_mut_ptr()) {
            0 => None,
            1 => Some(wc.assume_init()),
            n => panic!("poll_cq returned {n}"),
        }
    }
}

/// Polls until there is a completion.
pub fn wait(cq: *mut IbvCq) -> Wc {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(wc) = poll(cq) {
            return wc;
        }
        assert!(Instant::now() < deadline, "no completion");
    }
}

/// Two connected QPs of one process, each with its own CQ.
pub struct Pair {
    /// Device.
    pub device: Device,
    /// CQ of `a`.
    pub cq_a: *mut IbvCq,
    /// CQ of `b`.
    pub cq_b: *mut IbvCq,
    /// Requester.
    pub a: Qp,
    /// Responder.
    pub b: Qp,
    /// Memory of `a`.
    pub from: Buf,
    /// Memory of `b`.
    pub to: Buf,
    /// Its registration.
    pub local: Region,
    /// Its registration.
    pub remote: Region,
}

impl Pair {
    /// Connected with the usual attributes.
    pub fn new() -> Self {
        let pair = Self::unconnected(cap());
        pair.a.connect_to(pair.b.num());
        pair.b.connect_to(pair.a.num());
        pair
    }

    /// Not connected yet.
    pub fn unconnected(cap: QpCap) -> Self {
        let device = Device::open();
        let (cq_a, cq_b) = (device.cq(64), device.cq(64));
        let a = device.qp(cq_a, cq_a, null_mut(), cap);
        let b = device.qp(cq_b, cq_b, null_mut(), cap);
        let (from, to) = (Buf::new(8192), Buf::new(8192));
        let (local, remote) = (device.reg(&from, ALL), device.reg(&to, ALL));
        Self { device, cq_a, cq_b, a, b, from, to, local, remote }
    }

    /// A signalled WRITE of the first `len` bytes and its completion status.
    pub fn write(&self, len: u32) -> u32 {
        let mut sge = [self.local.sge(0, len)];
        let mut wr =
            rdma(WR_RDMA_WRITE, 1, SEND_SIGNALED, &mut sge, self.remote.addr, self.remote.key);
        assert_eq!(self.a.send(&mut wr), 0);
        wait(self.cq_a).status
    }
}
