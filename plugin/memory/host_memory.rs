//! Memory for an application, pinned in the right order: mapped and faulted in, held for the long term by every device,
//! and only then mapped for the GPU.

use super::contract::Claim;
use super::huge::{pool_page, transparent_page};
use super::inventory::{Entry, Kind};
use super::ledger::{Ender, Pin, Pinner, Purpose};
use super::page::{PageOwned, Pages};
use super::pinned::LongTermPinned;
use super::registry::Registry;
use crate::cuda::host::{API, HostDriver, Mapped};
use crate::error::{Error, Result};
use crate::host::meminfo::Meminfo;
use crate::verbs::mr::Access;
use std::sync::Arc;

/// What an application asks for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Bytes.
    pub size: usize,
    /// In huge pages, if there are any.
    pub huge: bool,
    /// Mapped for the GPU, if there is a driver.
    pub gpu: bool,
    /// Preferably on this NUMA node.
    pub node: Option<u32>,
}

/// The memory. What holds it ends with it, in the reverse order; a communicator that has registered a part keeps the
/// mapping and the registration until it lets go.
#[derive(Debug)]
pub struct HostMemory {
    addr: usize,
    len: usize,
    _held: Held,
}

#[derive(Debug)]
#[expect(dead_code, reason = "kept alive")]
enum Held {
    /// With its entry in the inventory: it has no registration that would have one, and children miss it as well.
    Plain(Arc<PageOwned>, Entry),
    ByDevices(LongTermPinned),
    ByTheGpuToo(Mapped<LongTermPinned>),
}

impl HostMemory {
    /// Maps memory and pins it with these devices; without any it stays plain. `optional`: the access to use instead
    /// where a device refuses bits that it need not know. `cuda`: what is known of the contract under which CUDA pins.
    ///
    /// # Errors
    /// There is not enough memory, a device refuses it, or CUDA does. Then nothing is left.
    pub fn new(
        wanted: Wanted,
        registries: &[Arc<Registry>],
        access: Access,
        optional: Option<Access>,
        cuda: Claim,
    ) -> Result<Self> {
        let (pages, kind) = map(wanted)?;
        let pages = Arc::new(pages);
        let (addr, len) = (pages.addr(), pages.len());
        let (held, gpu) = if registries.is_empty() {
            let range = pages.range();
            let entry = Entry::new("", Kind::Own, range.clone(), range, Purpose::Application);
            (Held::Plain(Arc::clone(&pages), entry), "no: nothing is pinned without a device")
        } else {
            let pinned = register(&pages, registries, access, optional)?;
            if wanted.gpu {
                for_gpu(pinned, cuda)?
            } else {
                (Held::ByDevices(pinned), "not asked for")
            }
        };
        // After the verbs, which may have a list of their own about forks.
        if let Err(e) = pages.keep_from_children() {
            tracing::warn!("{e}; a fork copies the {len} bytes at {addr:#x}");
        }
        let devices: Vec<&str> = registries.iter().map(|r| &**r.device()).collect();
        tracing::debug!(
            address = format_args!("{addr:#x}"),
            bytes = len,
            pages = kind,
            node = wanted.node.map(i64::from).unwrap_or(-1),
            devices = devices.join(","),
            gpu,
            "host memory for the application"
        );
        Ok(Self { addr, len, _held: held })
    }

    /// Its first address.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Bytes that are mapped: whole pages.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none; never.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The mapping, in the best pages that are to be had, and what they are called.
fn map(wanted: Wanted) -> Result<(PageOwned, &'static str)> {
    let Wanted { size, node, .. } = wanted;
    let of = |pages| PageOwned::of(pages, size, Purpose::Application, node);
    if let Some(page) = pool_page().filter(|_| wanted.huge) {
        match of(Pages::Huge(page)) {
            Ok(pages) => return Ok((pages, "hugetlb")),
            Err(e) => tracing::debug!("no huge pages from the pool: {e}"),
        }
    }
    // Asking for more than there is would not fail but make the kernel end a process.
    let available = Meminfo::read().ok().and_then(|meminfo| meminfo.available);
    if let Some(available) = available.filter(|available| size as u64 > *available) {
        return Err(Error::system(format!(
            "{size} bytes are asked for, {available} are available"
        ))
        .with_errno(libc::ENOMEM));
    }
    match transparent_page().filter(|page| wanted.huge && size >= *page) {
        Some(page) => Ok((of(Pages::Transparent(page))?, "transparent huge")),
        None => Ok((of(Pages::Small)?, "small")),
    }
}

/// With all devices under one access: registrations of a part are found by exactly that.
fn register(
    pages: &Arc<PageOwned>,
    registries: &[Arc<Registry>],
    access: Access,
    optional: Option<Access>,
) -> Result<LongTermPinned> {
    let with = |access| LongTermPinned::new(Arc::clone(pages), registries, access);
    match (with(access), optional) {
        (Err(e), Some(plain)) if e.errno() == Some(libc::EINVAL) => {
            tracing::debug!("tried again without optional access bits: {e}");
            with(plain)
        }
        (result, _) => result,
    }
}

/// The last step, and how it went.
fn for_gpu(pinned: LongTermPinned, contract: Claim) -> Result<(Held, &'static str)> {
    let Some(driver) = HostDriver::loaded() else {
        return Ok((Held::ByDevices(pinned), "no: no CUDA driver is loaded"));
    };
    let Some(context) = driver.current() else {
        return Ok((Held::ByDevices(pinned), "no: no CUDA context is current"));
    };
    let pin = Pin { by: Pinner::Cuda, api: API, contract, ends: Ender::Plugin, counts: false };
    let mapped = driver
        .map(context, pinned.admit(pin)?)
        .map_err(|e| e.context("memory is held by every device, but not mapped for the GPU"))?;
    Ok((Held::ByTheGpuToo(mapped), "mapped"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::ledger::PinLedger;

    fn plain(wanted: Wanted) -> Result<HostMemory> {
        HostMemory::new(wanted, &[], Access::BULK, None, Claim::Unknown)
    }

    const ANY: Wanted = Wanted { size: 5, huge: false, gpu: true, node: None };

    #[test]
    fn memory_without_a_device_is_plain_and_in_the_books() {
        let memory = plain(ANY).unwrap();
        let range = memory.addr()..memory.addr() + memory.len();
        let books = PinLedger::process().describe(range.clone());
        assert!(books[0].contains("application memory") && books[0].ends_with(": "), "{books:?}");
        drop(memory);
        assert!(PinLedger::process().describe(range).is_empty());
    }

    #[test]
    fn more_than_there_is_is_refused() {
        for size in [1 << 50, usize::MAX / 2, usize::MAX] {
            for huge in [false, true] {
                let error = plain(Wanted { size, huge, ..ANY }).unwrap_err();
                assert_eq!(error.errno(), Some(libc::ENOMEM), "{error}");
            }
        }
    }

    #[test]
    fn no_device_is_no_long_term_pin() {
        let pages = Arc::new(PageOwned::new(1, Purpose::Application).unwrap());
        let error = LongTermPinned::new(pages, &[], Access::BULK).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODEV));
    }
}
