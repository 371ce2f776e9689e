//! How one message is cut into parts, one part per lane, and parts into work requests.
//!
//! A message goes over `width` lanes at most: one per rail, or all lanes when splitting is asked for. Each member is
//! cut into chunks of a multiple of 128 bytes, so that small messages use one lane. The receiver is told the number of
//! parts in every immediate and need not know the rule.

/// Chunks are a multiple of this many bytes: keeps LL128 lines whole.
pub const CHUNK: u32 = 128;

/// Bytes per part for a member of `len` bytes over `width` lanes.
#[inline]
pub fn chunk(len: u32, width: u32) -> u32 {
    len.div_ceil(width).checked_next_multiple_of(CHUNK).unwrap_or(u32::MAX)
}

/// Parts that a member of `len` bytes needs over `width` lanes; at least one.
#[inline]
pub fn parts(len: u32, width: u32) -> u32 {
    if len <= CHUNK { 1 } else { len.div_ceil(chunk(len, width)) }
}

/// The range of a member of `len` bytes that goes in part `part`: (offset, bytes), zero bytes when nothing is left.
#[inline]
pub fn range(len: u32, width: u32, part: u32) -> (u32, u32) {
    let chunk = chunk(len, width);
    match part.checked_mul(chunk) {
        Some(offset) if offset < len => (offset, chunk.min(len - offset)),
        _ => (len, 0),
    }
}

/// The immediate that ends a part.
///
/// Bits 0–23 the low bits of the sequence, 24–30 the number of parts less one, 31 whether a size record was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Imm(pub u32);

/// Parts that an immediate can count, and so lanes of a connection.
pub const MAX_PARTS: usize = 128;

impl Imm {
    /// Packs an immediate.
    #[inline(always)]
    pub fn new(sequence: u32, parts: u32, record: bool) -> Self {
        Self((sequence & 0xff_ffff) | (((parts - 1) & 0x7f) << 24) | (u32::from(record) << 31))
    }

    /// Whether it belongs to the receive with this sequence.
    #[inline(always)]
    pub fn matches(self, sequence: u32) -> bool {
        (self.0 ^ sequence) & 0xff_ffff == 0
    }

    /// Everything but the sequence: the number of parts and whether there is a record.
    #[inline(always)]
    pub fn shape(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// The low bits of the sequence.
    #[inline(always)]
    pub fn sequence(self) -> u32 {
        self.0 & 0xff_ffff
    }

    /// Number of parts.
    #[inline(always)]
    pub fn parts(self) -> u32 {
        ((self.0 >> 24) & 0x7f) + 1
    }

    /// Whether this is the immediate `plain`, of an answer without a record, with a record.
    #[inline(always)]
    pub fn is_with_record(self, plain: u32) -> bool {
        self.0 == plain | 1 << 31 && plain >> 31 == 0
    }

    /// Whether sizes are in the record.
    #[inline(always)]
    pub fn has_record(self) -> bool {
        self.0 >> 31 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_tile_the_member(len in 0..=i32::MAX as u32, width in 1..=MAX_PARTS as u32) {
            let count = parts(len, width);
            prop_assert!(count >= 1 && count <= width);
            let mut next = 0;
            for part in 0..count {
                let (offset, bytes) = range(len, width, part);
                prop_assert_eq!(offset, next);
                prop_assert!(bytes > 0 || len == 0);
                prop_assert!(part + 1 == count || bytes % CHUNK == 0);
                next += bytes;
            }
            prop_assert_eq!(next, len);
            prop_assert_eq!(range(len, width, count).1, 0);
        }

        #[test]
        fn immediates_round_trip(sequence: u32, parts in 1..=MAX_PARTS as u32, record: bool) {
            let imm = Imm::new(sequence, parts, record);
            prop_assert!(imm.matches(sequence));
            prop_assert!(!imm.matches(sequence.wrapping_add(1)));
            prop_assert_eq!(imm.parts(), parts);
            prop_assert_eq!(imm.has_record(), record);
        }
    }
}
