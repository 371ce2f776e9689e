//! Memory that an application asked for: which allocations there are, and what each keeps alive.

use super::net::Use;
use super::objects;
use crate::error::{Error, Result};
use crate::library::Library;
use crate::memory::contract::Claim;
use crate::memory::host_memory::{HostMemory, Wanted};
use crate::verbs::mr::Access;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One allocation. Fields drop in order: the memory before what it was made with.
#[derive(Debug)]
struct Allocation {
    memory: HostMemory,
    _state: Use,
    /// This code stays mapped, even if the application and NCCL unload it.
    library: Option<Library>,
}

static LIVE: Mutex<BTreeMap<usize, Allocation>> = Mutex::new(BTreeMap::new());

fn live() -> MutexGuard<'static, BTreeMap<usize, Allocation>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asked before any lock is taken, see [`objects::in_child`].
fn refuse_in_child() -> Result<()> {
    if objects::in_child() {
        return Err(Error::usage(
            "called in a forked child: memory belongs to the process that allocated it",
        )
        .with_errno(libc::EPERM));
    }
    Ok(())
}

/// What the arguments say.
fn wanted(size: usize, flags: c_uint, node: c_int) -> Result<Wanted> {
    let unknown = flags & !(crate::capi::PINRAIL_HOST_HUGE | crate::capi::PINRAIL_HOST_NO_CUDA);
    if unknown != 0 {
        return Err(Error::argument(format!("flags {unknown:#x} are not known")));
    }
    if size == 0 {
        return Err(Error::argument("a size of 0 bytes"));
    }
    let node = match node {
        -1 => None,
        _ => Some(
            u32::try_from(node)
                .map_err(|_| Error::argument(format!("NUMA node {node}; -1 stands for any")))?,
        ),
    };
    let (huge, no_cuda) = (crate::capi::PINRAIL_HOST_HUGE, crate::capi::PINRAIL_HOST_NO_CUDA);
    Ok(Wanted { size, huge: flags & huge != 0, gpu: flags & no_cuda == 0, node })
}

/// The address of new memory.
///
/// # Errors
/// The arguments are wrong, or see [`crate::transport::Transport::host_memory`].
pub fn alloc(size: usize, flags: c_uint, node: c_int) -> Result<*mut c_void> {
    refuse_in_child()?;
    let wanted = wanted(size, flags, node)?;
    let state = Use::begin();
    let memory = match state.transport() {
        Some(transport) => transport.host_memory(wanted)?,
        None => HostMemory::new(wanted, &[], Access::BULK, None, Claim::Unknown)?,
    };
    let addr = memory.addr();
    let allocation = Allocation { memory, _state: state, library: Library::own() };
    live().insert(addr, allocation);
    Ok(std::ptr::with_exposed_provenance_mut(addr))
}

/// Frees memory. The caller gives the reference on the library back, as its very last act: it may be the last one.
///
/// # Errors
/// The pointer is not what [`alloc`] gave out, or was freed before.
pub fn free(pointer: *mut c_void) -> Result<Option<Library>> {
    refuse_in_child()?;
    let mut live = live();
    let Some(mut allocation) = live.remove(&pointer.addr()) else {
        let nearest = live.range(..pointer.addr()).next_back();
        let inside = nearest.filter(|(start, a)| pointer.addr() - **start < a.memory.len());
        return Err(Error::argument(match inside {
            Some((start, _)) => {
                format!(
                    "{pointer:p} lies inside the allocation at {start:#x}; free takes its start"
                )
            }
            None => format!("{pointer:p} is not allocated, or was freed before"),
        }));
    };
    if live.is_empty() {
        // An empty table keeps no memory: it outlives the library.
        *live = BTreeMap::new();
    }
    // Verbs run below, after the lock was released.
    drop(live);
    let library = allocation.library.take();
    drop(allocation);
    Ok(library)
}
