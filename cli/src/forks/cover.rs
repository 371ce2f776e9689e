//! Bytes of a range that other ranges cover, each counted once.

use std::ops::Range;

/// How many bytes of `whole` the ranges cover together.
pub fn covered(whole: &Range<u64>, parts: impl IntoIterator<Item = Range<u64>>) -> u64 {
    let mut parts: Vec<_> = parts
        .into_iter()
        .map(|part| part.start.max(whole.start)..part.end.min(whole.end))
        .filter(|part| part.start < part.end)
        .collect();
    parts.sort_by_key(|part| part.start);
    let mut bytes = 0;
    let mut behind = whole.start;
    for part in parts {
        bytes += part.end.saturating_sub(part.start.max(behind));
        behind = behind.max(part.end);
    }
    bytes
}

/// Whole pages that a range touches. A page size that cannot be is taken for the usual one.
pub fn whole_pages(range: &Range<u64>, page: u64) -> Range<u64> {
    let page = if page.is_power_of_two() { page } else { 4096 };
    let end = range.end.checked_next_multiple_of(page).unwrap_or(u64::MAX);
    range.start - range.start % page..end
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn overlaps_count_once() {
        assert_eq!(covered(&(10..20), [5..12, 11..13, 11..12, 19..30]), 4);
        assert_eq!(covered(&(10..20), [0..100, 10..20]), 10);
        assert_eq!(covered(&(10..20), [20..30, 0..10]), 0);
        assert_eq!(covered(&(0..u64::MAX), [0..u64::MAX, 5..6]), u64::MAX);
    }

    #[test]
    fn pages_are_whole() {
        assert_eq!(whole_pages(&(0x1001..0x1002), 4096), 0x1000..0x2000);
        assert_eq!(whole_pages(&(0x1000..0x2000), 4096), 0x1000..0x2000);
        assert_eq!(whole_pages(&(0x1001..0x1002), 2 << 20), 0..2 << 20);
        assert_eq!(whole_pages(&(1..2), 0), 0..4096);
        assert_eq!(whole_pages(&(5..u64::MAX), 4096), 0..u64::MAX);
    }

    proptest! {
        #[test]
        fn as_counted_byte_by_byte(
            parts in prop::collection::vec((0..70_u64, 0..30_u64), 0..8), start in 0..40_u64, len in 0..40_u64,
        ) {
            let parts: Vec<_> = parts.into_iter().map(|(start, len)| start..start + len).collect();
            let whole = start..start + len;
            let expected = whole.clone().filter(|at| parts.iter().any(|part| part.contains(at))).count();
            prop_assert_eq!(covered(&whole, parts), expected as u64);
        }
    }
}
