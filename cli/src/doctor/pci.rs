//! What a PCI function's configuration space says. It is read by us, since sysfs has no file for these bits.

/// Where the extended capabilities begin. Users other than root are shown less.
const EXTENDED: usize = 0x100;
/// No chain of capabilities is longer.
const LONGEST: usize = 96;
const EXPRESS: u8 = 0x10;
const ACCESS_CONTROL: u16 = 0x000d;

/// Access control sends requests and answers between functions below a bridge up to the root first.
const REDIRECT: u16 = 1 << 2 | 1 << 3;
/// The function may ask for relaxed ordering.
const RELAXED: u16 = 1 << 4;

/// The bytes of a configuration space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Space(pub Vec<u8>);

impl Space {
    fn half(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes([*self.0.get(at)?, *self.0.get(at + 1)?]))
    }

    /// Everything can be seen, not only what any user may.
    pub fn is_whole(&self) -> bool {
        self.0.len() > EXTENDED
    }

    /// The control word of access control (ACS); `None`: it has none, or it is hidden.
    pub fn access_control(&self) -> Option<u16> {
        let mut at = EXTENDED;
        for _ in 0..LONGEST {
            let (id, next) = (self.half(at)?, usize::from(self.half(at + 2)? >> 4));
            if id == ACCESS_CONTROL {
                return self.half(at + 6);
            }
            if next < EXTENDED {
                return None;
            }
            at = next;
        }
        None
    }

    /// Access control redirects traffic between functions.
    pub fn redirects(&self) -> bool {
        self.access_control().is_some_and(|control| control & REDIRECT != 0)
    }

    /// Whether the function may ask for relaxed ordering; `None`: it is hidden.
    pub fn relaxed_ordering(&self) -> Option<bool> {
        let mut at = usize::from(*self.0.get(0x34)?);
        for _ in 0..LONGEST {
            if at < 0x40 {
                return None;
            }
            if *self.0.get(at)? == EXPRESS {
                return Some(self.half(at + 8)? & RELAXED != 0);
            }
            at = usize::from(*self.0.get(at + 1)?);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn space() -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        bytes[0x34] = 0x40;
        bytes[0x40..0x42].copy_from_slice(&[0x01, 0x60]);
        bytes[0x60] = EXPRESS;
        bytes[0x68] = 0x10;
        bytes[0x100..0x104].copy_from_slice(&(0x2000_0001_u32 | 1 << 16).to_le_bytes());
        bytes[0x200..0x204].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
        bytes[0x206] = 0x1d;
        bytes
    }

    #[test]
    fn capabilities_are_found_by_their_chains() {
        let mut whole = Space(space());
        assert!(whole.is_whole() && whole.redirects());
        assert_eq!((whole.access_control(), whole.relaxed_ordering()), (Some(0x1d), Some(true)));
        whole.0[0x206] = 0x10;
        whole.0[0x68] = 0;
        assert!(!whole.redirects());
        assert_eq!(whole.relaxed_ordering(), Some(false));
        let hidden = Space(space()[..64].to_vec());
        assert!(!hidden.is_whole());
        assert_eq!((hidden.access_control(), hidden.relaxed_ordering()), (None, None));
        let mut round = Space(space());
        round.0[0x61] = 0x40;
        round.0[0x60] = 5;
        assert_eq!(round.relaxed_ordering(), None, "a chain that leads back to itself ends");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let space = Space(bytes);
            let _ = (space.redirects(), space.relaxed_ordering());
        }
    }
}
