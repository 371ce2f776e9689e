//! Which pages a simulated kernel would have handed out from its contiguous memory area.

use super::pages::page_size;

/// Where pages that nobody has asked about yet are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// None in CMA.
    #[default]
    Off,
    /// All in CMA.
    All,
    /// Those whose number is a multiple of this.
    Every(u64),
    /// Those that one of these address ranges touches; the upper bound is not part of it.
    Ranges(Vec<(u64, u64)>),
}

/// What [`Placement::parse`] accepts.
pub const GRAMMAR: &str = "not off, all, every=N or a comma list of hexadecimal ranges lo-hi";

impl Placement {
    /// Reads a setting.
    pub fn parse(text: &str) -> Option<Self> {
        match text.trim() {
            "off" => return Some(Self::Off),
            "all" => return Some(Self::All),
            _ => {}
        }
        if let Some(n) = text.trim().strip_prefix("every=") {
            return n.trim().parse().ok().filter(|n| *n > 0).map(Self::Every);
        }
        text.split(',').map(range).collect::<Option<_>>().map(Self::Ranges)
    }

    /// Whether a page is in CMA.
    pub fn covers(&self, page: u64) -> bool {
        match self {
            Self::Off => false,
            Self::All => true,
            Self::Every(n) => page.is_multiple_of(*n),
            Self::Ranges(ranges) => {
                let size = page_size() as u64;
                let (start, last) = (page * size, page * size + (size - 1));
                ranges.iter().any(|(lo, hi)| *lo <= last && start < *hi)
            }
        }
    }
}

fn range(text: &str) -> Option<(u64, u64)> {
    let (lo, hi) = text.trim().split_once('-')?;
    let hex = |t: &str| {
        let digits = t.strip_prefix("0x").or_else(|| t.strip_prefix("0X")).unwrap_or(t);
        // A sign is accepted by the parser, not by us.
        let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
        u64::from_str_radix(digits, 16).ok().filter(|_| plain)
    };
    let (lo, hi) = (hex(lo.trim())?, hex(hi.trim())?);
    (lo < hi).then_some((lo, hi))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_nothing_else() {
        assert_eq!(Placement::parse("off"), Some(Placement::Off));
        assert_eq!(Placement::parse(" all "), Some(Placement::All));
        assert_eq!(Placement::parse("every=3"), Some(Placement::Every(3)));
        let ranges = Placement::Ranges(vec![(0x1000, 0x2000), (0xab_0000, 0xac_0000)]);
        assert_eq!(Placement::parse("1000-2000, 0xAB0000-0Xac0000"), Some(ranges));
        for bad in [
            "",
            "on",
            "every=0",
            "every=",
            "every=-1",
            "1000",
            "1000-",
            "-1000",
            "2000-1000",
            "5-5",
            "1000-2000,",
            "+1-+2",
            "x-y",
            "all,off",
            "1000-20000000000000000",
        ] {
            assert_eq!(Placement::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn ranges_touch_pages_with_any_byte() {
        let size = page_size() as u64;
        let one = Placement::Ranges(vec![(size + 5, 2 * size + 1)]);
        assert_eq!([0, 1, 2, 3].map(|page| one.covers(page)), [false, true, true, false]);
        let exact = Placement::Ranges(vec![(size, 2 * size)]);
        assert_eq!([0, 1, 2].map(|page| exact.covers(page)), [false, true, false]);
        assert_eq!(
            [0, 1, 2, 3].map(|page| Placement::Every(3).covers(page)),
            [true, false, false, true]
        );
        let top = Placement::Ranges(vec![(0, u64::MAX)]);
        assert!(top.covers(u64::MAX / size), "the last page does not overflow");
    }
}
