//! The client side of an NCCL network plugin: what NCCL's core does with a plugin, for any table version.
//!
//! Out-pointers are filled with garbage before each call, as NCCL's own are; a plugin that forgets to write one is
//! reported instead of followed.

pub mod abi;
pub mod library;
pub mod log;
pub mod properties;
mod table;
mod transfer;

pub use properties::Properties;
pub use transfer::{Member, ONE_RECEIVE};

use crate::failure::{Failure, Result};
use abi::{Accept, Code, CommConfig, Connect, HANDLE_BYTES, Init, Listen, NetAttr, Ptr};
use library::Library;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use table::Table;

/// What an unwritten out-pointer reads as. Not 0x1, which is NCCL's marker for optional receive completions.
const GARBAGE: usize = 0xbad0_bad0;

/// What stands for an unwritten byte of a device's properties where nobody says another.
const FILL: u8 = 0xa5;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name(NonNull<c_void>);

        // SAFETY: NCCL hands these from thread to thread, and so a plugin must expect them from any. Nothing here looks
        // behind the pointer.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
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
    Request,
    /// What `init` gives for a communicator, from v11 on.
    Context
}

/// The bytes NCCL carries from listener to connector.
pub type Handle = [u8; HANDLE_BYTES];

/// What is shown of a device.
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

/// A loaded plugin, and from [`Net::init`] on an initialised one.
#[derive(Debug)]
pub struct Net {
    library: Option<Library>,
    table: Table,
    context: Ptr,
}

// SAFETY: the table is never changed, and NCCL calls a plugin's functions from several threads; the context is an opaque
// value that it hands to all of them.
unsafe impl Send for Net {}
// SAFETY: as above.
unsafe impl Sync for Net {}

impl Net {
    /// Loads the plugin and initialises it, with the newest table it has or exactly `version`.
    pub fn open(path: &Path, version: Option<u8>) -> Result<Self> {
        let mut net = Self::load(Library::open(path)?, version)?;
        net.init()?;
        Ok(net)
    }

    /// Takes the newest table of an open library, or exactly `version`.
    pub fn load(library: Library, version: Option<u8>) -> Result<Self> {
        let table = Table::find(&library, version)?;
        Ok(Self { library: Some(library), table, context: null_mut() })
    }

    /// Takes a table that is linked into this program.
    ///
    /// # Safety
    /// It is an `ncclNet_vN_t` of this version, and a static.
    pub unsafe fn linked(table: *const c_void, version: u8) -> Result<Self> {
        // SAFETY: the caller's contract.
        let table = unsafe { Table::read(table.cast(), version)? };
        Ok(Self { library: None, table, context: null_mut() })
    }

    /// The table version in use.
    pub fn version(&self) -> u8 {
        self.table.version
    }

    /// The plugin's name for itself, as it was when it was loaded.
    pub fn name(&self) -> &str {
        &self.table.name
    }

    /// The plugin's name for itself, read again.
    pub fn current_name(&self) -> String {
        self.table.current_name()
    }

    /// Initialises the plugin, as for the first communicator.
    pub fn init(&mut self) -> Result<()> {
        self.context = self.call_init(0x6265_6e63_6831)?;
        Ok(())
    }

    /// Initialises the plugin for one more communicator. The context is the caller's to finalize; `None`: this version
    /// has none.
    pub fn init_again(&self, communicator: u64) -> Result<Option<Context>> {
        Ok(NonNull::new(self.call_init(communicator)?).map(Context))
    }

    fn call_init(&self, communicator: u64) -> Result<Ptr> {
        let logger: log::Logger = log::pinrail_client_logger;
        let config = CommConfig { traffic_class: -1 };
        let mut context = null_mut();
        // SAFETY: the signature is the table version's; logger and config outlive the call, and a NULL profiler callback
        // means that there is none.
        let code = unsafe {
            match self.table.init {
                Init::V6(init) => init(logger),
                Init::V10(init) => init(logger, null_mut()),
                Init::V11(init) => init(&mut context, communicator, &config, logger, null_mut()),
            }
        };
        check("init", code)?;
        Ok(context)
    }

    /// Finalizes a communicator's context; `None` as NCCL 2.28.3 does after an init that failed. Nothing where the version
    /// has no finalize.
    pub fn finalize(&self, context: Option<Context>) -> Result<()> {
        let Some(finalize) = self.table.finalize else { return Ok(()) };
        let context = context.map_or(null_mut(), |context| context.0.as_ptr());
        // SAFETY: the context came from init, and NULL is what NCCL passes as well.
        check("finalize", unsafe { finalize(context) })
    }

    /// Tells the plugin what the network is about to be used for. `false`: it does not want to know.
    pub fn set_net_attr(&self, mut attr: NetAttr) -> Result<bool> {
        let Some(set) = self.table.set_net_attr else { return Ok(false) };
        // SAFETY: the context came from init, the struct outlives the call.
        check("setNetAttr", unsafe { set(self.context, &mut attr) })?;
        Ok(true)
    }

    /// The number of devices.
    pub fn device_count(&self) -> Result<i32> {
        let mut count: c_int = -1;
        // SAFETY: `count` is valid for the call.
        check("devices", unsafe { (self.table.devices)(&mut count) })?;
        Ok(count)
    }

    /// All devices with the most important of their properties.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let count = self.device_count()?;
        if count <= 0 {
            return Err(Failure::new("devices", "the plugin found no device"));
        }
        let device = |index| {
            let p = self.properties(index)?;
            Ok(Device {
                index,
                name: p.name.unwrap_or_else(|| "(unnamed)".into()),
                speed: p.speed,
                port: p.port,
                max_recvs: p.max_recvs,
                pci_path: p.pci_path,
            })
        };
        (0..count).map(device).collect()
    }

    /// All properties of a device.
    pub fn properties(&self, index: i32) -> Result<Properties> {
        let bytes = self.property_bytes(index, FILL)?;
        // SAFETY: the plugin filled the struct of its version.
        Ok(unsafe { Properties::read(self.table.version, &bytes) })
    }

    /// The bytes of a device's properties, in a room that was filled with `fill`.
    pub fn property_bytes(&self, index: i32, fill: u8) -> Result<[u8; properties::ROOM]> {
        /// As aligned as any version's struct.
        #[repr(C, align(8))]
        struct Room([u8; properties::ROOM]);
        let mut room = Room([fill; properties::ROOM]);
        let to: *mut Room = &mut room;
        // SAFETY: the room is larger and as aligned as the properties of any version.
        check("getProperties", unsafe { (self.table.get_properties)(index, to.cast()) })?;
        let behind = &room.0[properties::size(self.table.version)..];
        if behind.iter().any(|&byte| byte != fill) {
            return Err(Failure::new("getProperties", "the plugin wrote behind the struct"));
        }
        Ok(room.0)
    }

    /// Starts listening on a device.
    pub fn listen(&self, device: i32) -> Result<(Listener, Handle)> {
        let mut handle = [0u8; HANDLE_BYTES];
        let listener = self.listen_into(device, &mut handle)?;
        Ok((listener, handle))
    }

    /// Starts listening on a device, with the handle at the beginning of `room`.
    pub fn listen_into(&self, device: i32, room: &mut [u8]) -> Result<Listener> {
        assert!(room.len() >= HANDLE_BYTES, "room for a handle");
        let mut comm = GARBAGE as Ptr;
        let bytes = room.as_mut_ptr().cast();
        // SAFETY: the handle has the 128 bytes the interface promises, the out-pointer is valid.
        let code = unsafe {
            match self.table.listen {
                Listen::V6(listen) => listen(device, bytes, &mut comm),
                Listen::V11(listen) => listen(self.context, device, bytes, &mut comm),
            }
        };
        check("listen", code)?;
        written("listen", comm)?
            .map(Listener)
            .ok_or_else(|| Failure::new("listen", "the plugin returned no listener"))
    }

    /// One step of connecting; the handle keeps the plugin's state between steps.
    pub fn connect(&self, device: i32, handle: &mut [u8]) -> Result<Option<SendComm>> {
        assert!(handle.len() >= HANDLE_BYTES, "a whole handle");
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
        self.finalize(NonNull::new(self.context).map(Context))?;
        if let Some(library) = self.library {
            // SAFETY: `self` is consumed, so neither the table nor a comm can be used again.
            unsafe { library.close() };
        }
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
fn written(operation: &str, out: Ptr) -> Result<Option<NonNull<c_void>>> {
    if out as usize == GARBAGE {
        return Err(Failure::new(operation, "the plugin left its out-pointer unwritten"));
    }
    Ok(NonNull::new(out))
}
