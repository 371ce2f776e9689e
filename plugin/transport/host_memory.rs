//! Memory for an application, held by every device of this host.

use super::Transport;
use super::device::Device;
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
        let opened = self.opened()?;
        let registries: Vec<_> = opened.iter().map(|(_, registry)| Arc::clone(registry)).collect();
        let access = self.bulk_access().map_err(|e| e.with_errno(libc::EOPNOTSUPP))?;
        let required = self.settings.relaxed_ordering == RelaxedOrdering::Required;
        let optional = Some(Access::BULK).filter(|_| access.is_relaxed() && !required);
        let len = wanted.size;
        HostMemory::new(wanted, &registries, access, optional, self.cuda_contract()).map_err(|e| {
            let devices = opened.iter().map(|(device, registry)| (&**device, registry));
            self.explain_own(e, devices, len, "the program gets no memory")
        })
    }

    /// All devices, opened: the first port of each, and its registry.
    ///
    /// # Errors
    /// A device cannot be opened.
    pub(super) fn opened(&self) -> Result<Vec<(Arc<Device>, Arc<Registry>)>> {
        let mut opened: Vec<(Arc<Device>, Arc<Registry>)> = Vec::new();
        let ports = self.devices().all_ports().to_vec();
        for port in ports {
            let registry = Arc::clone(&port.open(&self.verbs, &self.machine)?.registry);
            if !opened.iter().any(|(_, known)| Arc::ptr_eq(known, &registry)) {
                opened.push((port, registry));
            }
        }
        Ok(opened)
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
