//! Whether registrations take their pages from forked children.
//!
//! What a verbs library says about itself is not enough: before rdma-core 51 it calls fork handling unnecessary and marks
//! pages all the same, once anybody in the process armed it. The kernel knows: memory of the plugin that a device holds
//! has the mark or not. One look is enough for the life of a library. It refuses to be armed once it registered
//! anything, and never disarms.

use super::ledger::PinLedger;
use crate::host::fork::Known;
use crate::host::smaps::{Smaps, VmFlags};
use std::sync::atomic::{AtomicU8, Ordering};

/// How often memory that goes away meanwhile is given up for other memory.
const TRIES: usize = 4;

/// Whether the registrations of one verbs library mark pages, found out when somebody wants to know.
#[derive(Debug, Default)]
pub struct Marks(AtomicU8);

impl Marks {
    /// Yes or no; unknown while nothing of the plugin is registered, or where the kernel does not tell.
    pub fn known(&self) -> Known {
        match self.0.load(Ordering::Relaxed) {
            1 => Known::Yes,
            2 => Known::No,
            _ => self.look(),
        }
    }

    fn look(&self) -> Known {
        let found = look(PinLedger::process());
        self.0.store(
            u8::from(found == Known::Yes) + 2 * u8::from(found == Known::No),
            Ordering::Relaxed,
        );
        found
    }
}

/// Asks the kernel about a mapping that a device holds before and after it was looked at.
fn look(ledger: &PinLedger) -> Known {
    for _ in 0..TRIES {
        // The lowest is found soonest.
        let Some((range, pin)) = ledger.registered_own().into_iter().next() else { break };
        let Ok(Some(mapping)) = Smaps::find_in_self(range.start as u64) else { continue };
        if !ledger.registered_own().contains(&(range, pin)) {
            continue;
        }
        // Every mapping has some flag: none means that this kernel does not list them.
        return match (mapping.flags.is_empty(), mapping.flags.has(VmFlags::DONTCOPY)) {
            (true, _) => Known::Unknown,
            (_, true) => Known::Yes,
            (_, false) => Known::No,
        };
    }
    Known::Unknown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PageOwned;
    use crate::memory::ledger::{Pin, Purpose};

    /// With a ledger of its own; the mapping's place in the books of the process does not matter here.
    #[test]
    fn the_kernel_says_what_a_registration_did() {
        let ledger: &'static PinLedger = Box::leak(Box::default());
        let marks = |pages: &PageOwned| {
            ledger.own(pages.range(), Purpose::Credits);
            let pin = Pin::registration(&"rail".into(), "ibv_reg_mr");
            let held = ledger.pin(pages.range(), pin, &[]).unwrap();
            assert_eq!(look(ledger), Known::Unknown, "asked for, not yet given");
            held.taken();
            let found = look(ledger);
            drop(held);
            ledger.disown(pages.addr());
            found
        };
        assert_eq!(look(ledger), Known::Unknown, "nothing is registered");
        let pages = PageOwned::new(1, Purpose::Probe).unwrap();
        assert_eq!(marks(&pages), Known::No);
        pages.keep_from_children().unwrap();
        assert_eq!(marks(&pages), Known::Yes);
    }

    /// What the plugin marks by itself says nothing about the library.
    #[test]
    fn memory_of_an_application_is_not_asked() {
        let ledger: &'static PinLedger = Box::leak(Box::default());
        let pages = PageOwned::new(1, Purpose::Probe).unwrap();
        pages.keep_from_children().unwrap();
        ledger.own(pages.range(), Purpose::Application);
        let pin = Pin::registration(&"rail".into(), "ibv_reg_mr");
        let held = ledger.pin(pages.range(), pin, &[]).unwrap();
        held.taken();
        assert_eq!(look(ledger), Known::Unknown);
        drop(held);
        ledger.disown(pages.addr());
    }
}
