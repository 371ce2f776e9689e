//! What somebody who holds a page has been promised about it, as a ladder.
//!
//! Two callers can both say "pinned" and still disagree about how long and where. Only the top rung makes the kernel
//! ask whether the page may stay where it lies, and move it first if not.

use std::fmt;

/// A promise about a page, from the weakest to the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PinContract {
    /// It has memory behind it at present; it may be moved, swapped or replaced.
    Resident,
    /// It is not swapped out; it may still be moved.
    Mlocked,
    /// A kernel reference keeps the page object alive (GUP without a pin); the kernel may not know that a device uses
    /// it.
    Referenced,
    /// A device uses it (`FOLL_PIN`): it stays where it is, wherever that may be.
    Pinned,
    /// A device uses it for as long as it likes (`FOLL_LONGTERM`): the kernel has checked its place, and moved it first
    /// where it could not have stayed.
    LongTermPinned,
}

impl fmt::Display for PinContract {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resident => "resident",
            Self::Mlocked => "mlocked",
            Self::Referenced => "referenced",
            Self::Pinned => "pinned",
            Self::LongTermPinned => "long-term pinned",
        })
    }
}

/// What is known of a contract that somebody else made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Claim {
    /// It was asked for through an interface that says so.
    Known(PinContract),
    /// It follows from something that usually goes with it, such as the version of a driver.
    Assumed(PinContract),
    /// Nobody can tell.
    Unknown,
}

impl Claim {
    /// Whether it is known, not merely assumed, to be the strongest.
    pub fn is_long_term(self) -> bool {
        self == Self::Known(PinContract::LongTermPinned)
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(contract) => contract.fmt(f),
            Self::Assumed(contract) => write!(f, "assumed {contract}"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_goes_up() {
        let ladder = [
            PinContract::Resident,
            PinContract::Mlocked,
            PinContract::Referenced,
            PinContract::Pinned,
            PinContract::LongTermPinned,
        ];
        assert!(ladder.is_sorted_by(|weaker, stronger| weaker < stronger));
    }

    #[test]
    fn an_assumption_is_not_knowledge() {
        assert!(Claim::Known(PinContract::LongTermPinned).is_long_term());
        assert!(!Claim::Assumed(PinContract::LongTermPinned).is_long_term());
        assert!(!Claim::Unknown.is_long_term());
        assert_eq!(Claim::Assumed(PinContract::Pinned).to_string(), "assumed pinned");
    }
}
