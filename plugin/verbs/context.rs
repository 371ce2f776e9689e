//! An open device and what can be asked of it.

use super::errno;
use super::library::Verbs;
use super::log_destroy;
use super::sys::{
    PortAttrEx, ibv_context, ibv_device, ibv_device_attr, ibv_gid, ibv_port_attr, verbs_context,
};
use crate::error::{Error, Result};
use crate::host::descriptors::Held;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The kernel's list of devices, as the library gives it. Devices must be opened before it is dropped.
#[derive(Debug)]
pub struct DeviceList {
    raw: NonNull<*mut ibv_device>,
    len: usize,
    verbs: Arc<Verbs>,
}

impl DeviceList {
    /// Asks the library for the devices of this host.
    ///
    /// # Errors
    /// The library refuses, for instance because the kernel has no RDMA support.
    pub fn get(verbs: &Arc<Verbs>) -> Result<Self> {
        let mut len = 0;
        // SAFETY: the out-pointer is valid; the list belongs to us until freed in Drop.
        let raw = unsafe { (verbs.get_device_list)(&mut len) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| Error::verb("ibv_get_device_list", verbs.path().display(), errno()))?;
        Ok(Self { raw, len: usize::try_from(len).unwrap_or(0), verbs: Arc::clone(verbs) })
    }

    /// Number of devices.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn device(&self, index: usize) -> *mut ibv_device {
        assert!(index < self.len);
        // SAFETY: the library gave `len` entries and the index is below it.
        unsafe { *self.raw.as_ptr().add(index) }
    }

    /// The kernel name of device `index`, which is below [`Self::len`].
    pub fn name(&self, index: usize) -> String {
        // SAFETY: the entry is a device of this live list; its name is a NUL-terminated string inside it.
        unsafe {
            let name = (self.verbs.get_device_name)(self.device(index));
            if name.is_null() {
                String::new()
            } else {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            }
        }
    }

    /// Opens device `index`, which is below [`Self::len`].
    ///
    /// # Errors
    /// The device cannot be opened: errno says why (permission, no such node in this container, …).
    pub fn open(&self, index: usize) -> Result<Arc<Context>> {
        let name = self.name(index);
        // SAFETY: the entry is a device of this live list.
        let raw = unsafe { (self.verbs.open_device)(self.device(index)) };
        let raw =
            NonNull::new(raw).ok_or_else(|| Error::verb("ibv_open_device", &name, errno()))?;
        Ok(Arc::new(Context {
            raw,
            name,
            verbs: Arc::clone(&self.verbs),
            objects: Objects::default(),
            // For commands and for events.
            _descriptors: Held::new(2),
        }))
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from get_device_list and is freed once.
        unsafe { (self.verbs.free_device_list)(self.raw.as_ptr()) };
    }
}

/// An open device. Closed when the last object made from it is gone.
pub struct Context {
    raw: NonNull<ibv_context>,
    name: String,
    verbs: Arc<Verbs>,
    objects: Objects,
    _descriptors: Held,
}

/// How many objects of each kind exist on an open device.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "named for what they count")]
pub struct Objects {
    pub pds: AtomicU32,
    pub cqs: AtomicU32,
    pub qps: AtomicU32,
    pub mrs: AtomicU32,
}

/// One more of them exists.
pub(super) fn add(count: &AtomicU32) {
    count.fetch_add(1, Ordering::Relaxed);
}

/// One of them is gone.
pub(super) fn sub(count: &AtomicU32) {
    count.fetch_sub(1, Ordering::Relaxed);
}

// SAFETY: libibverbs contexts may be used from several threads at once; the library locks where it has to.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

type QueryPort = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;

/// What the plugin uses of `ibv_port_attr`.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named as in ibv_query_port(3)")]
pub struct PortAttr {
    pub state: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: i32,
    pub pkey_tbl_len: u16,
    pub max_msg_sz: u32,
    pub lid: u16,
    pub active_width: u8,
    pub active_speed: u32,
    pub link_layer: u8,
    /// `IBV_QPF_GRH_REQUIRED` is bit 0.
    pub flags: u8,
}

impl Context {
    /// The kernel name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The library this device was opened with.
    pub fn verbs(&self) -> &Arc<Verbs> {
        &self.verbs
    }

    /// What exists on it.
    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    pub(super) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    /// Device attributes.
    ///
    /// # Errors
    /// The verb fails.
    pub fn query_device(&self) -> Result<ibv_device_attr> {
        let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: the context is open and the out-pointer valid; the struct is plain integers, so zeroes are a value.
        let rc = unsafe { (self.verbs.query_device)(self.raw(), attr.as_mut_ptr()) };
        if rc != 0 {
            return Err(Error::verb("ibv_query_device", &self.name, rc.abs()));
        }
        // SAFETY: zeroed plain integers, then filled by the library.
        Ok(unsafe { attr.assume_init() })
    }

    /// Attributes of `port`, counted from 1.
    ///
    /// # Errors
    /// The verb fails, for instance because there is no such port.
    pub fn query_port(&self, port: u8) -> Result<PortAttr> {
        let mut attr = MaybeUninit::<PortAttrEx>::zeroed();
        let rc = match self.extended_query_port() {
            // SAFETY: the context is open, and the library fills as many bytes as it is told are there.
            Some(query) => unsafe {
                query(self.raw(), port, attr.as_mut_ptr().cast(), size_of::<PortAttrEx>())
            },
            // SAFETY: the context is open. The exported symbol writes the short (48-byte) form, which this struct begins
            // with; the zeroes behind it are valid values.
            None => unsafe { (self.verbs.query_port)(self.raw(), port, attr.as_mut_ptr().cast()) },
        };
        if rc != 0 {
            return Err(Error::verb(
                "ibv_query_port",
                format_args!("{}:{port}", self.name),
                rc.abs(),
            ));
        }
        // SAFETY: plain integers, zeroed and then filled.
        let PortAttrEx { base: attr, active_speed_ex } = unsafe { attr.assume_init() };
        Ok(PortAttr {
            state: attr.state,
            active_mtu: attr.active_mtu,
            gid_tbl_len: attr.gid_tbl_len,
            pkey_tbl_len: attr.pkey_tbl_len,
            max_msg_sz: attr.max_msg_sz,
            lid: attr.lid,
            active_width: attr.active_width,
            active_speed: if active_speed_ex == 0 {
                attr.active_speed.into()
            } else {
                active_speed_ex
            },
            link_layer: attr.link_layer,
            flags: attr.flags,
        })
    }

    /// The variant of `ibv_query_port` that knows the length of its structure, where the library put one into its context.
    fn extended_query_port(&self) -> Option<QueryPort> {
        let offset = std::mem::offset_of!(verbs_context, context);
        // SAFETY: an open context of the library, which says with this word that it is the end of a `verbs_context`.
        let outer = unsafe {
            if (*self.raw()).abi_compat.addr() != usize::MAX {
                return None;
            }
            self.raw().cast::<u8>().sub(offset).cast::<verbs_context>()
        };
        // Members are added in front, and `sz` says how many bytes there are.
        // SAFETY: `sz` lies directly before the context in every version; `query_port` is there if `sz` reaches it.
        unsafe {
            if (*outer).sz
                < size_of::<verbs_context>() - std::mem::offset_of!(verbs_context, query_port)
            {
                return None;
            }
            (*outer).query_port
        }
    }

    /// Entry `index` of the GID table of `port`, in network order.
    ///
    /// # Errors
    /// The verb fails, for instance because the entry is unused on some devices.
    pub fn query_gid(&self, port: u8, index: i32) -> Result<[u8; 16]> {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open and the out-pointer valid.
        let rc = unsafe { (self.verbs.query_gid)(self.raw(), port, index, &mut gid) };
        if rc != 0 {
            let object = format_args!("{}:{port} index {index}", self.name);
            return Err(Error::verb("ibv_query_gid", object, errno()));
        }
        // SAFETY: both members of the union are sixteen plain bytes.
        Ok(unsafe { gid.raw })
    }

    /// Entry `index` of the partition key table of `port`, in host order.
    ///
    /// # Errors
    /// The verb fails, for instance because the index is beyond the table.
    pub fn query_pkey(&self, port: u8, index: u16) -> Result<u16> {
        let mut pkey = 0;
        // SAFETY: the context is open and the out-pointer valid.
        let rc = unsafe { (self.verbs.query_pkey)(self.raw(), port, index.into(), &mut pkey) };
        if rc != 0 {
            let object = format_args!("{}:{port} index {index}", self.name);
            return Err(Error::verb("ibv_query_pkey", object, errno()));
        }
        Ok(u16::from_be(pkey))
    }

    /// The port's speed in Mb/s, where library and device can tell.
    pub fn query_port_speed(&self, port: u8) -> Option<u64> {
        let query = self.verbs.query_port_speed?;
        let mut hundreds = 0;
        // SAFETY: the context is open and the out-pointer valid.
        let rc = unsafe { query(self.raw(), port.into(), &mut hundreds) };
        (rc == 0 && hundreds > 0).then(|| hundreds.saturating_mul(100))
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: every object made from this context held an Arc of it, so none is left.
        let rc = unsafe { (self.verbs.close_device)(self.raw()) };
        log_destroy("ibv_close_device", &self.name, rc);
    }
}
