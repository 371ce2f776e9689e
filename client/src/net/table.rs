//! One plugin's function table: found in an open library as NCCL finds it, read slot by slot for its version.

use super::abi::{Accept, Connect, Init, Irecv, Isend, Listen, RegMr, VERSIONS, common, slot};
use super::library::Library;
use crate::failure::Failure;
use std::ffi::{CStr, c_char, c_void};

/// The functions of one table version, typed.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Table {
    slots: Slots,
    pub version: u8,
    pub name: String,
    pub init: Init,
    pub devices: common::Devices,
    pub get_properties: common::GetProperties,
    pub listen: Listen,
    pub connect: Connect,
    pub accept: Accept,
    pub reg_mr: RegMr,
    pub dereg_mr: common::DeregMr,
    pub isend: Isend,
    pub irecv: Irecv,
    pub iflush: common::Iflush,
    pub test: common::Test,
    pub close_send: common::Close,
    pub close_recv: common::Close,
    pub close_listen: common::Close,
    pub finalize: Option<common::Close>,
    pub set_net_attr: Option<common::SetNetAttr>,
}

/// Reads one slot as a function pointer of the type the field wants.
///
/// # Safety
/// `$table` points at a table that has slot `$index`, and the slot has the signature of the target type.
macro_rules! function {
    ($table:expr, $index:expr, $what:literal) => {{
        let slot = $table.get($index);
        if slot.is_null() {
            return Err(Failure::new(
                "load",
                concat!("the table's ", $what, " is NULL, and NCCL calls it without asking"),
            ));
        }
        std::mem::transmute(slot)
    }};
}

/// The slots of a table.
#[derive(Clone, Copy, Debug)]
struct Slots {
    first: *const *const c_void,
    version: u8,
}

impl Slots {
    /// # Safety
    /// The table is one of this version and is alive, and the version has the slot.
    unsafe fn get(self, index: usize) -> *const c_void {
        let earlier = usize::from(self.version == 5 && index > slot::REG_MR_DMA_BUF);
        // SAFETY: the caller's contract; v5 lacks one slot.
        unsafe { *self.first.add(index - earlier) }
    }
}

// The target types are the fields' own, and spelling each signature a second time would only add places to be wrong.
#[allow(clippy::missing_transmute_annotations)]
impl Table {
    /// The newest version the library exports, or the one asked for.
    pub fn find(library: &Library, wanted: Option<u8>) -> Result<Self, Failure> {
        for version in VERSIONS {
            if wanted.is_some_and(|wanted| wanted != version) {
                continue;
            }
            if let Some(symbol) = library.symbol(&format!("ncclNetPlugin_v{version}")) {
                // SAFETY: a symbol of this name is, by NCCL's plugin contract, the data of a `ncclNet_vN_t` that stays
                // valid while the library is open.
                return unsafe { Self::read(symbol.as_ptr().cast_const().cast(), version) };
            }
        }
        let names = match wanted {
            Some(version) => format!("ncclNetPlugin_v{version}"),
            None => "ncclNetPlugin_v12 … v5".into(),
        };
        Err(Failure::new(
            "load",
            format!("{} is not an NCCL network plugin: it exports no {names}", library.path()),
        ))
    }

    /// The name, as the table has it now; empty for NULL.
    pub fn current_name(&self) -> String {
        // SAFETY: the table outlives `self`, and a name that is not NULL is NUL-terminated.
        unsafe {
            let name: *const c_char = self.slots.get(slot::NAME).cast();
            if name.is_null() {
                return String::new();
            }
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }

    /// Reads a table.
    ///
    /// # Safety
    /// `first` is the `ncclNet_vN_t` of that version and outlives the result.
    pub unsafe fn read(first: *const *const c_void, version: u8) -> Result<Self, Failure> {
        let table = Slots { first, version };
        // SAFETY: every index is inside the struct of this version (spec offsets; finalize only from v11 on), and each
        // slot is transmuted to the signature that this version documents for it.
        unsafe {
            let name: *const c_char = table.get(slot::NAME).cast();
            if name.is_null() {
                return Err(Failure::new("load", "the table's name is NULL"));
            }
            Ok(Self {
                slots: table,
                version,
                name: CStr::from_ptr(name).to_string_lossy().into_owned(),
                init: match version {
                    5..=9 => Init::V6(function!(table, slot::INIT, "init")),
                    10 => Init::V10(function!(table, slot::INIT, "init")),
                    _ => Init::V11(function!(table, slot::INIT, "init")),
                },
                devices: function!(table, slot::DEVICES, "devices"),
                get_properties: function!(table, slot::GET_PROPERTIES, "getProperties"),
                listen: match version {
                    5..=10 => Listen::V6(function!(table, slot::LISTEN, "listen")),
                    _ => Listen::V11(function!(table, slot::LISTEN, "listen")),
                },
                connect: match version {
                    5 | 6 => Connect::V6(function!(table, slot::CONNECT, "connect")),
                    7..=9 => Connect::V7(function!(table, slot::CONNECT, "connect")),
                    10 => Connect::V10(function!(table, slot::CONNECT, "connect")),
                    _ => Connect::V11(function!(table, slot::CONNECT, "connect")),
                },
                accept: match version {
                    5 | 6 => Accept::V6(function!(table, slot::ACCEPT, "accept")),
                    _ => Accept::V7(function!(table, slot::ACCEPT, "accept")),
                },
                reg_mr: match version {
                    5..=7 => RegMr::V6(function!(table, slot::REG_MR, "regMr")),
                    _ => RegMr::V8(function!(table, slot::REG_MR, "regMr")),
                },
                dereg_mr: function!(table, slot::DEREG_MR, "deregMr"),
                isend: match version {
                    5..=8 => Isend::V6(function!(table, slot::ISEND, "isend")),
                    9 => Isend::V9(function!(table, slot::ISEND, "isend")),
                    _ => Isend::V10(function!(table, slot::ISEND, "isend")),
                },
                irecv: match version {
                    5..=8 => Irecv::V6(function!(table, slot::IRECV, "irecv")),
                    9 => Irecv::V9(function!(table, slot::IRECV, "irecv")),
                    _ => Irecv::V10(function!(table, slot::IRECV, "irecv")),
                },
                iflush: function!(table, slot::IFLUSH, "iflush"),
                test: function!(table, slot::TEST, "test"),
                close_send: function!(table, slot::CLOSE_SEND, "closeSend"),
                close_recv: function!(table, slot::CLOSE_RECV, "closeRecv"),
                close_listen: function!(table, slot::CLOSE_LISTEN, "closeListen"),
                finalize: match version {
                    11.. => Some(function!(table, slot::FINALIZE, "finalize")),
                    _ => None,
                },
                set_net_attr: match version {
                    11.. => std::mem::transmute(table.get(slot::SET_NET_ATTR)),
                    _ => None,
                },
            })
        }
    }
}
