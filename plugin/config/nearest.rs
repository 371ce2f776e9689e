//! The known name that a misspelt one was probably meant to be.

/// Longer texts are not names anybody misspelt, and the comparison is quadratic.
const MAX_LENGTH: usize = 96;

/// Edits (insert, delete, replace, swap neighbours) that turn one text into the other.
pub fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.iter().enumerate() {
        let mut row = Vec::with_capacity(b.len() + 1);
        row.push(i + 1);
        for (j, cb) in b.iter().enumerate() {
            let replace = last[j] + usize::from(ca != cb);
            let mut best = replace.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *ca == b[j - 1] && a[i - 1] == *cb {
                best = best.min(before[j - 1] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

/// The known name nearest to `name`, if it is near enough to be worth naming: at most half of what
/// follows the prefix may differ.
pub fn nearest<'a>(
    name: &str,
    prefix: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    if name.len() > MAX_LENGTH {
        return None;
    }
    let limit = name.len().saturating_sub(prefix.len()).div_ceil(2);
    known
        .into_iter()
        .map(|candidate| (distance(name, candidate), candidate))
        .min()
        .filter(|(distance, _)| *distance <= limit)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn distances() {
        for (a, b, expected) in [
            ("", "", 0),
            ("abc", "", 3),
            ("abc", "abd", 1),
            ("abc", "acb", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
        }
    }

    #[test]
    fn only_near_names_are_offered() {
        let known = ["NCCL_IB_TIMEOUT", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"];
        let near = |name| nearest(name, "NCCL_IB_", known);
        assert_eq!(near("NCCL_IB_TIMOUT"), Some("NCCL_IB_TIMEOUT"));
        assert_eq!(near("NCCL_IB_HCAS"), Some("NCCL_IB_HCA"));
        assert_eq!(near("NCCL_IB_SOCKET_IFNAME"), Some("NCCL_SOCKET_IFNAME"));
        assert_eq!(near("NCCL_IB_CUDA_SUPPORT"), None);
        assert_eq!(near(&"NCCL_IB_".repeat(1000)), None);
    }

    proptest! {
        #[test]
        fn distance_is_a_symmetric_bound(a in "[A-Z_]{0,12}", b in "[A-Z_]{0,12}") {
            let d = distance(&a, &b);
            prop_assert_eq!(d, distance(&b, &a));
            prop_assert!(d <= a.len().max(b.len()) && d >= a.len().abs_diff(b.len()));
            prop_assert_eq!(d == 0, a == b);
        }
    }
}
