//! Memory for an application, held by every device of this host.

use super::Transport;
use crate::config::RelaxedOrdering;
use crate::error::Result;
use crate::host::nvidia::{Driver, LongTerm};
use crate::memory::Registry;
use crate::memory::contract::{Claim, PinContract};
use crate::memory::host_memory::{HostMemory, Wanted};
use crate::verbs::mr::Access;
use std::sync::Arc;

impl Transport {
    /// Memory that is registered with every device, open or not, for whatever a communicator may need of it.
    ///
    /// # Errors
    /// A device cannot be opened, or see [`HostMemory::new`].
    pub fn host_memory(&self, wanted: Wanted) -> Result<HostMemory> {
        let registries = self.registries()?;
        let access = self.bulk_access().map_err(|e| e.with_errno(libc::EOPNOTSUPP))?;
        let required = self.settings.relaxed_ordering == RelaxedOrdering::Required;
        let optional = Some(Access::BULK).filter(|_| access.is_relaxed() && !required);
        HostMemory::new(wanted, &registries, access, optional, self.cuda_contract())
    }

    /// The registries of all devices, which are opened for it.
    ///
    /// # Errors
    /// A device cannot be opened.
    pub(super) fn registries(&self) -> Result<Vec<Arc<Registry>>> {
        let mut registries: Vec<Arc<Registry>> = Vec::new();
        let ports = self.devices().all_ports().to_vec();
        for port in ports {
            let open = port.open(&self.verbs)?;
            if !registries.iter().any(|known| Arc::ptr_eq(known, &open.registry)) {
                registries.push(Arc::clone(&open.registry));
            }
        }
        Ok(registries)
    }

    /// What is known of the pin that CUDA takes: the source of some drivers says it.
    pub(super) fn cuda_contract(&self) -> Claim {
        *self.cuda_contract.get_or_init(|| {
            let driver = Driver::read(&self.machine.proc);
            match driver.map(|driver| driver.long_term(std::env::consts::ARCH)) {
                Some(LongTerm::Yes) => Claim::Assumed(PinContract::LongTermPinned),
                Some(LongTerm::No) => Claim::Assumed(PinContract::Pinned),
                Some(LongTerm::Unknown) | None => Claim::Unknown,
            }
        })
    }
}
