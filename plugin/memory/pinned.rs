//! Memory of the plugin's own that devices hold for the long term: the state in which others may pin it too.

use super::ledger::{OrderError, Pin, PinLedger, PinRecord};
use super::page::PageOwned;
use super::registry::{Registered, Registry};
use crate::cuda::host::{PinnedFirst, sealed::Sealed};
use crate::error::{Error, Result};
use crate::verbs::mr::Access;
use std::ops::Range;
use std::sync::Arc;

/// A mapping that is registered with every device it was meant for. There is no other way to make one.
///
/// ```compile_fail,E0451
/// use nccl_net_pinrail::memory::{PageOwned, ledger::Purpose, pinned::LongTermPinned};
/// let pages = std::sync::Arc::new(PageOwned::new(4096, Purpose::Application).unwrap());
/// LongTermPinned { pages, registered: Vec::new(), registries: Vec::new(), weaker: Vec::new() };
/// ```
#[derive(Debug)]
pub struct LongTermPinned {
    // In the order in which they end: weaker pins, registrations, their devices, the mapping.
    weaker: Vec<PinRecord>,
    registered: Vec<Arc<Registered>>,
    registries: Vec<Arc<Registry>>,
    pages: Arc<PageOwned>,
}

impl LongTermPinned {
    /// Registers a mapping with these devices: its first pins, and the strongest.
    ///
    /// # Errors
    /// There is no device, or a verb fails. Then none of them holds it.
    pub fn new(
        pages: Arc<PageOwned>,
        registries: &[Arc<Registry>],
        access: Access,
    ) -> Result<Self> {
        if registries.is_empty() {
            return Err(Error::usage(
                "there is no device that could hold memory for the long term",
            )
            .with_errno(libc::ENODEV));
        }
        let registered = registries
            .iter()
            .map(|registry| registry.register_kept(&pages, access))
            .collect::<Result<_>>()?;
        Ok(Self { weaker: Vec::new(), registered, registries: registries.to_vec(), pages })
    }

    /// Enters a pin that somebody else is about to take, which ends before the devices let go.
    ///
    /// # Errors
    /// The ledger knows better: the order would be wrong.
    pub fn admit(mut self, pin: Pin) -> std::result::Result<Self, OrderError> {
        let rails: Vec<_> = self.registries.iter().map(|r| Arc::clone(r.device())).collect();
        let record = PinLedger::process().pin(self.range(), pin, &rails)?;
        self.weaker.push(record);
        Ok(self)
    }

    /// The devices.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<str>> {
        self.registries.iter().map(|registry| registry.device())
    }

    /// Its registrations, in the order of the devices.
    pub fn registered(&self) -> &[Arc<Registered>] {
        &self.registered
    }
}

impl Sealed for LongTermPinned {}

impl PinnedFirst for LongTermPinned {
    fn range(&self) -> Range<usize> {
        self.pages.range()
    }
}
