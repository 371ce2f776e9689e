//! Where a rank's two buffers lie, and the proof of it from outside the plugin.
//!
//! A buffer that lies in the contiguous memory area with another driver's pin cannot be registered: no page of it may
//! ever have a long-term pin. What arrives intact in such a buffer, or leaves it, went through other memory. The rest of
//! a run that compares must be reached directly: every page belongs to a memory region.

use crate::bounce::{Bounce, Placement};
use crate::buffer::{Buffer, page_size};
use crate::failure::{Failure, Result};
use crate::softrnic::{Page, STAGE, SoftRnic};

/// The software RNIC and what it was told about the buffers.
#[derive(Debug)]
pub struct Placed {
    rnic: SoftRnic,
    bounce: Option<Bounce>,
}

impl Placed {
    /// Looks for the software RNIC. Fails on any other verbs library.
    pub fn new(plan: &Placement) -> Result<Self> {
        Ok(Self { rnic: SoftRnic::find(&plan.library)?, bounce: plan.bounce })
    }

    fn outgoing(&self) -> bool {
        self.bounce.is_some_and(Bounce::outgoing)
    }

    fn incoming(&self) -> bool {
        self.bounce.is_some_and(Bounce::incoming)
    }

    /// Makes the buffers that cannot be registered. All of their pages were touched, and none is registered yet.
    pub fn prepare(&self, outgoing: &Buffer, incoming: &Buffer) -> Result<()> {
        for (buffer, stranded) in [(outgoing, self.outgoing()), (incoming, self.incoming())] {
            if stranded {
                self.rnic.strand(buffer.base(), buffer.size())?;
            }
        }
        Ok(())
    }

    /// Looks at every page of both registered buffers. The number of pages that no memory region may hold.
    pub fn verify(&self, outgoing: &Buffer, incoming: &Buffer) -> Result<u64> {
        let outgoing = self.verify_one("outgoing", outgoing, self.outgoing())?;
        Ok(outgoing + self.verify_one("incoming", incoming, self.incoming())?)
    }

    fn verify_one(&self, name: &str, buffer: &Buffer, stranded: bool) -> Result<u64> {
        let page = page_size();
        let mut count = 0;
        for offset in (0..buffer.size()).step_by(page) {
            let found = self.rnic.page(buffer.at(offset, page))?;
            let wrong = if stranded { not_bounced(found) } else { not_direct(found) };
            if let Some(wrong) = wrong {
                let (number, pages) = (offset / page, buffer.size() / page);
                let text = format!("page {number} of {pages} of the {name} buffer {wrong}");
                return Err(Failure::new(STAGE, text));
            }
            count += 1;
        }
        Ok(if stranded { count } else { 0 })
    }

    /// Ends the pins of [`Self::prepare`] and lets go of the library. The registrations ended before.
    pub fn release(self, outgoing: &Buffer, incoming: &Buffer) -> Result<()> {
        for (buffer, stranded) in [(outgoing, self.outgoing()), (incoming, self.incoming())] {
            if stranded {
                self.rnic.release(buffer.base(), buffer.size())?;
            }
        }
        self.rnic.close();
        Ok(())
    }
}

/// Why a page is not one that must be reached through copies.
fn not_bounced(page: Page) -> Option<String> {
    let Page { in_cma, short_pins, long_pins } = page;
    (!in_cma || short_pins == 0 || long_pins != 0).then(|| {
        let place = if in_cma { "lies" } else { "does not lie" };
        format!(
            "is reached directly, not through copies: it {place} in CMA and has {short_pins} short and {long_pins} \
             long-term pins"
        )
    })
}

/// Why a page is not one that the device reaches.
fn not_direct(page: Page) -> Option<String> {
    (page.long_pins == 0).then(|| {
        "is in no memory region, so it is not reached directly, and a comparison with it would mean nothing".into()
    })
}

#[cfg(test)]
mod tests {
    use super::{not_bounced, not_direct};
    use crate::softrnic::Page;

    #[test]
    fn only_a_stuck_page_without_a_region_is_bounced() {
        let page = Page { in_cma: true, short_pins: 1, long_pins: 0 };
        assert_eq!(not_bounced(page), None);
        assert!(not_direct(page).is_some());
        for other in [
            Page { in_cma: false, ..page },
            Page { short_pins: 0, ..page },
            Page { long_pins: 1, ..page },
        ] {
            assert!(not_bounced(other).is_some(), "{other:?}");
        }
        assert_eq!(not_direct(Page { long_pins: 1, ..page }), None);
    }
}
