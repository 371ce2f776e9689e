//! The client side of an NCCL network plugin: what NCCL's core does with a plugin, for any table version.
//!
//! Out-pointers are filled with garbage before each call, as NCCL's own are; a plugin that forgets to write one is
//! reported instead of followed.

pub mod abi;
mod library;
pub mod log;
pub mod softrnic;
mod table;
mod transfer;

pub use transfer::Member;

use crate::failure::{Failure, Result};
use abi::{
    Accept, Code, CommConfig, Connect, HANDLE_BYTES, Init, Listen, PropertiesRoom, PropertiesV6,
    PropertiesV8, PropertiesV9, Ptr,
};
use library::Library;
use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use table::Table;

/// What an unwritten out-pointer reads as. Not 0x1, which is NCCL's marker for optional receive completions.
const GARBAGE: usize = 0xbad0_bad0;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name(NonNull<std::ffi::c_void>);
    )*};
}
opaque! {
    /// A listening comm.
    Listener,
    /// The sending end of a connection.
    SendComm,
    /// The receiving end of a connection.
    RecvComm,
    /// A registration of memory with one comm.
    Registration,
    /// A send, receive or flush in flight.
    Request
}

/// The bytes NCCL carries from listener to connector.
pub type Handle = [u8; HANDLE_BYTES];

/// What the bench shows of a device.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Device {
    /// Index in the plugin's list.
    pub index: i32,
    /// Name, also for `--device`.
    pub name: String,
    /// Speed in Mb/s.
    pub speed: i32,
    /// Port number.
    pub port: i32,
    /// Most members of a grouped receive.
    pub max_recvs: i32,
    /// PCI path, where known.
    pub pci_path: Option<String>,
}

/// A loaded and initialised plugin.
#[derive(Debug)]
pub struct Net {
    library: Library,
    table: Table,
    context: Ptr,
}

impl Net {
    /// Loads the plugin and initialises it, with the newest table it has or exactly `version`.
    pub fn open(path: &Path, version: Option<u8>) -> Result<Self> {
        let library = Library::open(path)?;
        let table = Table::find(&library, version)?;
        let mut net = Self { library, table, context: null_mut() };
        net.init()?;
        Ok(net)
    }

    /// The table version in use.
    pub fn version(&self) -> u8 {
        self.table.version
    }

    /// The plugin's name for itself.
    pub fn name(&self) -> &str {
        &self.table.name
    }

    fn init(&mut self) -> Result<()> {
        let logger: log::Logger = log::pinrail_bench_logger;
        let config = CommConfig { traffic_class: -1 };
        // SAFETY: the signature is the table version's; logger and config outlive the call, and a NULL profiler callback
        // means that there is none.
        let code = unsafe {
            match self.table.init {
                Init::V6(init) => init(logger),
                Init::V10(init) => init(logger, null_mut()),
                Init::V11(init) => {
                    init(&mut self.context, 0x6265_6e63_6831, &config, logger, null_mut())
                }
            }
        };
        check("init", code)
    }

    /// All devices with their properties.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let mut count: c_int = -1;
        // SAFETY: `count` is valid for the call.
        check("devices", unsafe { (self.table.devices)(&mut count) })?;
        if count <= 0 {
            return Err(Failure::new("devices", "the plugin found no device"));
        }
        (0..count).map(|index| self.properties(index)).collect()
    }

    fn properties(&self, index: c_int) -> Result<Device> {
        const FILL: u8 = 0xa5;
        let mut room = PropertiesRoom { bytes: [FILL; 256] };
        let to: *mut PropertiesRoom = &mut room;
        // SAFETY: the room is larger and as aligned as the properties of any version.
        check("getProperties", unsafe { (self.table.get_properties)(index, to.cast()) })?;
        let size = abi::properties_size(self.table.version);
        if room.bytes[size..].iter().any(|&byte| byte != FILL) {
            return Err(Failure::new("getProperties", "the plugin wrote behind the struct"));
        }
        // SAFETY: the plugin filled the struct of its version, whose leading fields are the ones read here.
        let (name, pci, speed, port, max_recvs) = unsafe {
            match self.table.version {
                6 | 7 => {
                    let p = &*to.cast::<PropertiesV6>();
                    (p.name, p.pci_path, p.speed, p.port, p.max_recvs)
                }
                8 => {
                    let p = &*to.cast::<PropertiesV8>();
                    (p.name, p.pci_path, p.speed, p.port, p.max_recvs)
                }
                _ => {
                    let p = &*to.cast::<PropertiesV9>();
                    (p.name, p.pci_path, p.speed, p.port, p.max_recvs)
                }
            }
        };
        Ok(Device {
            index,
            name: text(name).unwrap_or_else(|| "(unnamed)".into()),
            speed,
            port,
            max_recvs,
            pci_path: text(pci),
        })
    }

    /// Starts listening on a device.
    pub fn listen(&self, device: i32) -> Result<(Listener, Handle)> {
        let mut handle = [0u8; HANDLE_BYTES];
        let mut comm = GARBAGE as Ptr;
        let bytes = handle.as_mut_ptr().cast();
        // SAFETY: the handle has the 128 bytes the interface promises, the out-pointer is valid.
        let code = unsafe {
            match self.table.listen {
                Listen::V6(listen) => listen(device, bytes, &mut comm),
                Listen::V11(listen) => listen(self.context, device, bytes, &mut comm),
            }
        };
        check("listen", code)?;
        let comm = written("listen", comm)?
            .ok_or_else(|| Failure::new("listen", "the plugin returned no listener"))?;
        Ok((Listener(comm), handle))
    }

    /// One step of connecting; the handle keeps the plugin's state between steps.
    pub fn connect(&self, device: i32, handle: &mut Handle) -> Result<Option<SendComm>> {
        let mut comm: Ptr = null_mut();
        let mut device_handle: Ptr = null_mut();
        let config = CommConfig { traffic_class: -1 };
        let bytes = handle.as_mut_ptr().cast();
        // SAFETY: the handle has 128 bytes and stays at its address between steps; out-pointers are valid.
        let code = unsafe {
            match self.table.connect {
                Connect::V6(connect) => connect(device, bytes, &mut comm),
                Connect::V7(connect) => connect(device, bytes, &mut comm, &mut device_handle),
                Connect::V10(connect) => {
                    connect(device, &config, bytes, &mut comm, &mut device_handle)
                }
                Connect::V11(connect) => {
                    connect(self.context, device, bytes, &mut comm, &mut device_handle)
                }
            }
        };
        check("connect", code)?;
        Ok(NonNull::new(comm).map(SendComm))
    }

    /// One step of accepting.
    pub fn accept(&self, listener: Listener) -> Result<Option<RecvComm>> {
        let mut comm: Ptr = null_mut();
        let mut device_handle: Ptr = null_mut();
        // SAFETY: the listener came from `listen` and is open; out-pointers are valid.
        let code = unsafe {
            match self.table.accept {
                Accept::V6(accept) => accept(listener.0.as_ptr(), &mut comm),
                Accept::V7(accept) => accept(listener.0.as_ptr(), &mut comm, &mut device_handle),
            }
        };
        check("accept", code)?;
        Ok(NonNull::new(comm).map(RecvComm))
    }

    /// Closes a sending comm.
    pub fn close_send(&self, comm: SendComm) -> Result<()> {
        // SAFETY: the comm is open; it is not used afterwards.
        check("closeSend", unsafe { (self.table.close_send)(comm.0.as_ptr()) })
    }

    /// Closes a receiving comm.
    pub fn close_recv(&self, comm: RecvComm) -> Result<()> {
        // SAFETY: the comm is open; it is not used afterwards.
        check("closeRecv", unsafe { (self.table.close_recv)(comm.0.as_ptr()) })
    }

    /// Closes a listener.
    pub fn close_listener(&self, listener: Listener) -> Result<()> {
        // SAFETY: the listener is open; it is not used afterwards.
        check("closeListen", unsafe { (self.table.close_listen)(listener.0.as_ptr()) })
    }

    /// Finalizes and unloads the plugin. All comms are closed by then.
    pub fn close(self) -> Result<()> {
        if let Some(finalize) = self.table.finalize {
            // SAFETY: the context is the one `init` wrote.
            check("finalize", unsafe { finalize(self.context) })?;
        }
        // SAFETY: `self` is consumed, so neither the table nor a comm can be used again.
        unsafe { self.library.close() };
        Ok(())
    }
}

#[cold]
fn failed(operation: &str, code: Code) -> Failure {
    let mut text = format!("{} ({code})", abi::code_name(code));
    if let Some(warning) = log::take_warning() {
        text = format!("{text}; the plugin says: {warning}");
    }
    Failure::new(operation, text)
}

#[inline]
fn check(operation: &str, code: Code) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(failed(operation, code)) }
}

/// An out-pointer the plugin must have written: NULL or a value.
#[inline]
fn written(operation: &str, out: Ptr) -> Result<Option<NonNull<std::ffi::c_void>>> {
    if out as usize == GARBAGE {
        return Err(Failure::new(operation, "the plugin left its out-pointer unwritten"));
    }
    Ok(NonNull::new(out))
}

fn text(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: names in the properties are NUL-terminated and outlive the call.
    Some(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}
