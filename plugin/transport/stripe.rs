//! How one message is cut into parts, one part per lane, and parts into work requests.
//!
//! A message goes over `width` lanes at most: one per rail, or all lanes when splitting is asked for. Each member is
//! cut into chunks of a multiple of 128 bytes, so that small messages use one lane. Where lanes are alike, chunks are
//! equal, as in stock; where the ports behind them differ in speed, each is as long as its lane is fast, so that all end
//! at the same time. The receiver is told the number of parts in every immediate and need not know the rule.

use std::fmt;

/// Chunks are a multiple of this many bytes: keeps LL128 lines whole.
pub const CHUNK: u32 = 128;

/// Bytes per part for a member of `len` bytes over `width` lanes that are alike.
#[inline]
pub fn chunk(len: u32, width: u32) -> u32 {
    len.div_ceil(width).checked_next_multiple_of(CHUNK).unwrap_or(u32::MAX)
}

/// Parts of `chunk` bytes that a member of `len` bytes needs; at least one.
#[inline]
pub fn parts(len: u32, chunk: u32) -> u32 {
    if len <= CHUNK { 1 } else { len.div_ceil(chunk) }
}

/// The range of a member of `len` bytes that goes in part `part` of `chunk` bytes: (offset, bytes), zero bytes when
/// nothing is left.
#[inline]
pub fn range(len: u32, chunk: u32, part: u32) -> (u32, u32) {
    match part.checked_mul(chunk) {
        Some(offset) if offset < len => (offset, chunk.min(len - offset)),
        _ => (len, 0),
    }
}

/// How the messages of one connection are cut.
///
/// Messages go over groups of `width` lanes in turn. Lane *i* joins port *i* modulo the number of ports at either end,
/// so with unequal numbers of them two groups need not have the same speeds.
#[derive(Clone, Debug)]
pub struct Stripes {
    width: u32,
    lanes: u32,
    /// For each lane the weight of its group up to and with it; nothing where all lanes of all groups are alike.
    upto: Option<Box<[u32]>>,
}

impl Stripes {
    /// Cuts for messages over `width` of `lanes` lanes between ports of these speeds. Lanes beyond a multiple of `width`,
    /// which there are where a listener has fewer ports than it promised, stay without data.
    ///
    /// A lane is as fast as the slower of its shares in the two ports that it joins: the speed of a port is divided
    /// among those lanes of a group that use it.
    pub fn new(width: usize, lanes: usize, local: &[u32], remote: &[u32]) -> Self {
        let whole = |width: usize, lanes: usize, upto| Self {
            width: u32::try_from(width).unwrap_or(1),
            lanes: u32::try_from(lanes).unwrap_or(1),
            upto,
        };
        let width = width.clamp(1, lanes.max(1));
        let lanes = lanes.max(1) - lanes.max(1) % width;
        if local.is_empty() || remote.is_empty() {
            return whole(width, lanes, None);
        }
        let mut upto = Vec::with_capacity(lanes);
        let mut alike = true;
        for first in (0..lanes).step_by(width) {
            let share = |speeds: &[u32], lane: usize| {
                let port = lane % speeds.len();
                let users = (first..first + width).filter(|l| l % speeds.len() == port).count();
                // A speed of 0 says nothing. The factor keeps fractions.
                let speed = if speeds[port] == 0 { u32::MAX } else { speeds[port] };
                (u64::from(speed) << 8) / users.max(1) as u64
            };
            let weights: Vec<_> = (first..first + width)
                .map(|lane| share(local, lane).min(share(remote, lane)).max(1))
                .collect();
            alike &= weights.iter().all(|weight| *weight == weights[0]);
            // Totals fit 32 bits, so that a product with a length fits 64.
            let total: u64 = weights.iter().sum();
            let excess = (u64::BITS - total.leading_zeros()).saturating_sub(31);
            let mut sum = 0;
            for weight in weights {
                sum += u32::try_from((weight >> excess).max(1)).unwrap_or(1);
                upto.push(sum);
            }
        }
        whole(width, lanes, (!alike).then(|| upto.into()))
    }

    /// Lanes that one message may use.
    #[inline]
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Lanes that messages use in all.
    #[inline]
    pub fn lanes(&self) -> usize {
        self.lanes as usize
    }

    /// Whether the speeds of lanes differ.
    pub fn is_weighted(&self) -> bool {
        self.upto.is_some()
    }

    /// Bytes of each part of a member of `len` bytes but the last, which the calls below want; 0 where lanes differ.
    #[inline]
    pub fn chunk(&self, len: u32) -> u32 {
        if self.upto.is_none() { chunk(len, self.width).max(CHUNK) } else { 0 }
    }

    /// Parts that a member of `len` bytes needs over the group of lanes that begins at lane `first`; at least one.
    #[inline]
    pub fn parts(&self, len: u32, chunk: u32, first: usize) -> u32 {
        if chunk != 0 { parts(len, chunk) } else { self.weighted_parts(len, first) }
    }

    /// The range of a member of `len` bytes that goes in part `part`: (offset, bytes), zero bytes when it gets none.
    #[inline]
    pub fn range(&self, len: u32, chunk: u32, first: usize, part: u32) -> (u32, u32) {
        if chunk != 0 { range(len, chunk, part) } else { self.weighted_range(len, first, part) }
    }

    /// Bytes of the longest part of a member of `len` bytes.
    #[inline]
    pub fn longest(&self, len: u32, chunk: u32, first: usize) -> u32 {
        if chunk != 0 { chunk.min(len) } else { self.weighted_longest(len, first) }
    }

    #[inline(never)]
    fn weighted_parts(&self, len: u32, first: usize) -> u32 {
        if len <= CHUNK {
            return 1;
        }
        let upto = self.group(first);
        let before = upto.iter().take_while(|sum| cut(len, **sum, upto) < len).count();
        u32::try_from(before + 1).unwrap_or(self.width).min(self.width)
    }

    #[inline(never)]
    fn weighted_range(&self, len: u32, first: usize, part: u32) -> (u32, u32) {
        // A short member goes whole in the first part.
        if len <= CHUNK {
            return if part == 0 { (0, len) } else { (len, 0) };
        }
        let (upto, part) = (self.group(first), part as usize);
        let end = |part: usize| upto.get(part).map_or(len, |sum| cut(len, *sum, upto));
        let from = part.checked_sub(1).map_or(0, end);
        (from, end(part) - from)
    }

    #[inline(never)]
    fn weighted_longest(&self, len: u32, first: usize) -> u32 {
        (0..self.width).map(|part| self.weighted_range(len, first, part).1).max().unwrap_or(len)
    }

    /// The weights of the group of lanes that begins at lane `first`.
    fn group(&self, first: usize) -> &[u32] {
        let group = first..first + self.width as usize;
        self.upto.as_ref().and_then(|upto| upto.get(group)).unwrap_or_default()
    }
}

impl fmt::Display for Stripes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chunk = self.chunk(SHOWN);
        let share =
            |part| f64::from(self.range(SHOWN, chunk, 0, part).1) / f64::from(SHOWN) * 100.0;
        let shares: Vec<_> = (0..self.width).map(|part| format!("{:.0}%", share(part))).collect();
        write!(f, "messages are cut {}", shares.join("/"))
    }
}

/// The length of which the log tells the shares.
const SHOWN: u32 = 1 << 30;

/// Where the part with the weights up to `sum` of `upto` ends.
fn cut(len: u32, sum: u32, upto: &[u32]) -> u32 {
    let total = upto.last().copied().unwrap_or(1).max(1);
    let exact = (u64::from(len) * u64::from(sum)).div_ceil(u64::from(total));
    let exact = u32::try_from(exact).unwrap_or(len);
    exact.checked_next_multiple_of(CHUNK).unwrap_or(len).min(len)
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
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_tile_the_member(len in 0..=i32::MAX as u32, width in 1..=MAX_PARTS as u32) {
            let chunk = chunk(len, width).max(CHUNK);
            let count = parts(len, chunk);
            prop_assert!(count >= 1 && count <= width);
            let mut next = 0;
            for part in 0..count {
                let (offset, bytes) = range(len, chunk, part);
                prop_assert_eq!(offset, next);
                prop_assert!(bytes > 0 || len == 0);
                prop_assert!(part + 1 == count || bytes % CHUNK == 0);
                next += bytes;
            }
            prop_assert_eq!(next, len);
            prop_assert_eq!(range(len, chunk, count).1, 0);
        }

        #[test]
        fn weighted_parts_tile_the_member_in_proportion(
            len in 0..=i32::MAX as u32,
            local in vec(1..=8_u32, 1..=8),
            remote in vec(1..=8_u32, 1..=8),
            times in 1..=4_usize,
            group: prop::sample::Index,
            all: bool,
        ) {
            let (local, remote): (Vec<_>, Vec<_>) =
                (local.iter().map(|s| s * 50_000).collect(), remote.iter().map(|s| s * 50_000).collect());
            let lanes = times * local.len().max(remote.len());
            let width = if all { lanes } else { local.len().max(remote.len()) };
            let stripes = Stripes::new(width, lanes, &local, &remote);
            prop_assert_eq!((stripes.width() as usize, stripes.lanes()), (width, lanes));
            let first = group.index(lanes / width) * width;
            let chunk = stripes.chunk(len);
            let count = stripes.parts(len, chunk, first);
            prop_assert!(count >= 1 && count as usize <= width);
            let (mut next, mut longest) = (0, 0);
            for part in 0..count {
                let (offset, bytes) = stripes.range(len, chunk, first, part);
                prop_assert_eq!(offset, next);
                prop_assert!(part + 1 == count || bytes.is_multiple_of(CHUNK));
                next += bytes;
                longest = longest.max(bytes);
            }
            prop_assert_eq!(next, len);
            prop_assert_eq!(stripes.longest(len, chunk, first), longest);
            for part in count..width as u32 {
                prop_assert_eq!(stripes.range(len, chunk, first, part), (len, 0));
            }
            if len <= CHUNK {
                return Ok(());
            }
            // Each part is what its lane can do at the same time as the others, within one unit.
            let speed = |lane: usize| {
                let share = |speeds: &[u32]| {
                    let port = lane % speeds.len();
                    let users = (first..first + width).filter(|l| l % speeds.len() == port).count();
                    f64::from(speeds[port]) / users as f64
                };
                share(&local).min(share(&remote))
            };
            let total: f64 = (first..first + width).map(speed).sum();
            for part in 0..width {
                let share = f64::from(len) * speed(first + part) / total;
                let bytes = f64::from(stripes.range(len, chunk, first, part as u32).1);
                // What is lost when weights become whole numbers, which 31 bits keep small.
                let unit = f64::from(CHUNK) + 2.0 + f64::from(len) * 1e-6;
                prop_assert!(bytes <= share + unit, "part {part}: {bytes} of {share}");
                // Where lanes are alike the last parts get less, as in stock.
                prop_assert!(!stripes.is_weighted() || bytes >= share - unit, "part {part}: {bytes} of {share}");
            }
        }

        #[test]
        fn no_speeds_make_cuts_go_wrong(
            len in 0..=i32::MAX as u32,
            local in vec(any::<u32>(), 1..=8),
            remote in vec(any::<u32>(), 1..=8),
        ) {
            let width = local.len().max(remote.len());
            let stripes = Stripes::new(width, width, &local, &remote);
            let mut next = 0;
            let chunk = stripes.chunk(len);
            for part in 0..stripes.parts(len, chunk, 0) {
                let (offset, bytes) = stripes.range(len, chunk, 0, part);
                prop_assert_eq!(offset, next);
                next += bytes;
            }
            prop_assert_eq!(next, len);
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

    const SPEEDS: [u32; 2] = [400_000, 200_000];

    fn shares(stripes: &Stripes, len: u32, first: usize) -> Vec<u32> {
        let chunk = stripes.chunk(len);
        (0..stripes.width()).map(|part| stripes.range(len, chunk, first, part).1).collect()
    }

    #[test]
    fn a_fast_port_carries_more() {
        let stripes = Stripes::new(2, 2, &SPEEDS, &SPEEDS);
        assert!(stripes.is_weighted());
        assert_eq!(shares(&stripes, 3 << 20, 0), [2 << 20, 1 << 20]);
        // The slower end decides.
        let stripes = Stripes::new(2, 2, &[400_000; 2], &SPEEDS);
        assert_eq!(shares(&stripes, 3 << 20, 0), [2 << 20, 1 << 20]);
        // One port over there shares its speed between the two here, of which one can do no more than it gets.
        let stripes = Stripes::new(2, 2, &SPEEDS, &[400_000]);
        assert_eq!(shares(&stripes, 1 << 20, 0), [1 << 19, 1 << 19]);
    }

    #[test]
    fn equal_ports_are_cut_as_ever() {
        let equal = Stripes::new(4, 8, &[100_000; 4], &[100_000; 2]);
        assert!(!equal.is_weighted());
        for len in [0, 1, 128, 129, 600, 1000, 65_537] {
            let chunk = equal.chunk(len);
            assert_eq!(chunk, len.div_ceil(4).next_multiple_of(CHUNK).max(CHUNK));
            assert_eq!(equal.parts(len, chunk, 4), len.div_ceil(chunk).max(1));
            for part in 0..4 {
                let bytes = len.saturating_sub(part * chunk).min(chunk);
                assert_eq!(equal.range(len, chunk, 4, part).1, bytes);
            }
        }
        // Nothing is known of the peer's speeds: they do not matter.
        assert!(!Stripes::new(2, 2, &[100_000; 2], &[0, 0]).is_weighted());
    }

    #[test]
    fn lanes_that_fill_no_group_stay_without_data() {
        // Four lanes for the four rails that the handle named, of which the listener uses one.
        let stripes = Stripes::new(3, 4, &[400_000, 200_000, 200_000], &[1_200_000]);
        assert_eq!((stripes.width(), stripes.lanes()), (3, 3));
        assert_eq!(shares(&stripes, 4 << 20, 0), [2 << 20, 1 << 20, 1 << 20]);
        assert_eq!(Stripes::new(8, 2, &[1; 8], &[1]).width(), 2);
    }

    #[test]
    fn the_log_tells_shares() {
        let text =
            |speeds: &[u32]| Stripes::new(speeds.len(), speeds.len(), speeds, speeds).to_string();
        assert_eq!(text(&[400_000, 200_000, 200_000]), "messages are cut 50%/25%/25%");
    }

    #[test]
    fn a_port_that_two_lanes_share_gives_each_half() {
        // Lanes join local 0, 1, 0 to remote 0, 1, 2: local port 1 has one lane, port 0 two.
        let stripes = Stripes::new(3, 6, &[100_000; 2], &[100_000; 3]);
        assert_eq!(shares(&stripes, 4 << 20, 0), [1 << 20, 2 << 20, 1 << 20]);
        // The next three lanes begin with local port 1.
        assert_eq!(shares(&stripes, 4 << 20, 3), [1 << 20, 2 << 20, 1 << 20]);
    }
}
