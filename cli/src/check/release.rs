//! What each NCCL release looks for: which tables in which order, and under which names it opens a library.

use std::fmt;

/// Bytes of a name that NCCL keeps.
const LONGEST_NAME: usize = 254;
/// Plugins of a list that NCCL takes.
const MOST_PLUGINS: usize = 14;
/// What is opened where nothing is named.
const DEFAULT: &str = "libnccl-net.so";
/// A name that begins so, or is the beginning of this, means the program itself.
const STATIC: &str = "STATIC_PLUGIN";

/// A release number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 2.MINOR.
    pub minor: u16,
    /// 2.minor.PATCH.
    pub patch: u16,
}

impl Version {
    const fn new(minor: u16, patch: u16) -> Self {
        Self { minor, patch }
    }

    /// `2.27` or `2.27.3`; without the last number the newest of that line is meant.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mistake = || format!("{text:?} is no NCCL release such as 2.27 or 2.27.3");
        let mut parts = text.split('.');
        let number = |part: &str| {
            let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| part.parse::<u16>().ok()).flatten().ok_or_else(mistake)
        };
        if parts.next() != Some("2") {
            return Err(mistake());
        }
        let minor = number(parts.next().ok_or_else(mistake)?)?;
        let patch = parts.next().map_or(Ok(u16::MAX), number)?;
        if parts.next().is_some() {
            return Err(mistake());
        }
        let version = Self { minor, patch };
        if version < RELEASES[0].first {
            return Err(format!(
                "NCCL {text} has no network plugins; {} is the first",
                RELEASES[0].first
            ));
        }
        Ok(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.patch {
            u16::MAX => write!(f, "2.{}", self.minor),
            patch => write!(f, "2.{}.{patch}", self.minor),
        }
    }
}

/// Under which names a value of `NCCL_NET_PLUGIN` is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Naming {
    /// There is no such variable.
    Fixed,
    /// As `libnccl-net-VALUE.so` only.
    Inserted,
    /// As it is, and if that fails inserted.
    Both,
    /// The same, but what is a path or already `lib….so` is not inserted. Lists are understood.
    List,
    /// The same, and `none` means no plugin.
    ListOrNone,
}

/// Releases that behave alike.
#[derive(Debug)]
pub struct Release {
    /// The first of them.
    pub first: Version,
    /// The last that was looked at.
    pub last: Version,
    /// Table versions, in the order in which they are looked for.
    pub tables: &'static [u8],
    /// How the library is named.
    pub naming: Naming,
}

const fn release(
    first: (u16, u16),
    last: (u16, u16),
    tables: &'static [u8],
    naming: Naming,
) -> Release {
    Release {
        first: Version::new(first.0, first.1),
        last: Version::new(last.0, last.1),
        tables,
        naming,
    }
}

/// All releases with network plugins, oldest first.
pub const RELEASES: [Release; 14] = [
    release((4, 2), (5, 7), &[2], Naming::Fixed),
    release((6, 4), (7, 8), &[3], Naming::Fixed),
    release((8, 3), (10, 3), &[4], Naming::Fixed),
    release((11, 4), (11, 4), &[4], Naming::Inserted),
    release((12, 7), (12, 12), &[5, 4], Naming::Inserted),
    release((13, 4), (18, 6), &[6, 5, 4], Naming::Inserted),
    release((19, 1), (19, 4), &[7, 6, 5], Naming::Inserted),
    release((20, 3), (20, 5), &[8, 7, 6, 5], Naming::Inserted),
    release((21, 5), (23, 4), &[8, 7, 6, 5], Naming::Both),
    release((24, 3), (25, 1), &[9, 8, 7, 6, 5], Naming::Both),
    release((26, 2), (27, 3), &[10, 9, 8, 7, 6], Naming::Both),
    release((27, 5), (27, 7), &[10, 9, 8, 7, 6], Naming::List),
    release((28, 3), (29, 7), &[11, 10, 9, 8, 7, 6], Naming::ListOrNone),
    release((30, 3), (32, 3), &[12, 11, 10, 9, 8, 7, 6], Naming::ListOrNone),
];

impl Release {
    /// The newest that is known.
    pub fn newest() -> &'static Self {
        &RELEASES[RELEASES.len() - 1]
    }

    /// The one that a release number belongs to: what came after the last known one is taken to be like it.
    pub fn of(version: Version) -> &'static Self {
        let index = RELEASES.partition_point(|release| release.first <= version);
        &RELEASES[index.saturating_sub(1)]
    }

    /// The table that it takes from a library with these; `None`: it falls back.
    pub fn takes(&self, tables: &[u8]) -> Option<u8> {
        self.tables.iter().copied().find(|version| tables.contains(version))
    }

    /// The plugins that a value of `NCCL_NET_PLUGIN` names, in order; empty: no plugin is loaded. `None`: not set.
    pub fn plugins(&self, value: Option<&str>) -> Vec<String> {
        let Some(value) = value.filter(|_| self.naming != Naming::Fixed) else {
            return vec![DEFAULT.to_owned()];
        };
        if self.naming == Naming::ListOrNone && value.eq_ignore_ascii_case("none") {
            return Vec::new();
        }
        // 2.27.3 reads lists already and inserts as before; one row serves both, for a name with a comma opens nothing
        // before that.
        let listed = self.naming >= Naming::Both && self.last >= Version::new(27, 3);
        let whole = [value];
        let parts: Vec<&str> = if listed { value.split(',').collect() } else { whole.to_vec() };
        parts
            .into_iter()
            .filter(|part| !part.is_empty() && part.len() <= LONGEST_NAME)
            .take(if listed { MOST_PLUGINS } else { 1 })
            .map(str::to_owned)
            .collect()
    }

    /// The names under which a plugin is opened, in order.
    pub fn names(&self, plugin: &str) -> Vec<String> {
        let inserted = || {
            let mut name = format!("libnccl-net-{plugin}.so");
            while name.len() > LONGEST_NAME {
                name.pop();
            }
            name
        };
        let as_it_is = || plugin.to_owned();
        if plugin == DEFAULT {
            return vec![as_it_is()];
        }
        let complete =
            plugin.contains('/') || (plugin.starts_with("lib") && plugin.ends_with(".so"));
        match self.naming {
            Naming::Fixed => vec![DEFAULT.to_owned()],
            Naming::Inserted => vec![inserted()],
            Naming::Both => vec![as_it_is(), inserted()],
            Naming::List | Naming::ListOrNone if complete => vec![as_it_is()],
            Naming::List | Naming::ListOrNone => vec![as_it_is(), inserted()],
        }
    }
}

/// Whether a name means symbols of the program itself instead of a library.
pub fn is_the_program(plugin: &str) -> bool {
    let bytes = plugin.as_bytes();
    bytes.len() <= STATIC.len() && bytes.eq_ignore_ascii_case(&STATIC.as_bytes()[..bytes.len()])
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{} - {}", self.first, self.last)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> &'static Release {
        Release::of(Version::parse(text).unwrap())
    }

    #[test]
    fn releases_are_in_order_and_take_the_newest_table() {
        for pair in RELEASES.windows(2) {
            assert!(pair[0].first <= pair[0].last && pair[0].last < pair[1].first);
        }
        for release in &RELEASES {
            assert!(release.tables.windows(2).all(|pair| pair[0] > pair[1]), "{release}");
        }
        assert_eq!(of("2.32").takes(&[6, 12, 11]), Some(12));
        assert_eq!(of("2.18.6").takes(&[12, 6]), Some(6));
        assert_eq!(of("2.12").takes(&[12, 6]), None);
        assert_eq!(of("2.26.2").takes(&[5]), None);
        assert_eq!(of("2.25.1").takes(&[5]), Some(5));
        assert_eq!(of("2.99").tables[0], 12);
    }

    #[test]
    fn numbers_are_whole_releases() {
        assert_eq!(Version::parse("2.27.3"), Ok(Version::new(27, 3)));
        assert_eq!(Version::parse("2.27").unwrap().to_string(), "2.27");
        for bad in ["", "2", "3.1", "2.", "2.x", "2.27.3.1", "2.-1", "2.99999", "2.3"] {
            assert!(Version::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_are_tried_as_each_release_tries_them() {
        assert_eq!(of("2.10").names("pinrail"), ["libnccl-net.so"]);
        assert_eq!(of("2.20").names("pinrail"), ["libnccl-net-pinrail.so"]);
        assert_eq!(of("2.20").names("/a/b.so"), ["libnccl-net-/a/b.so.so"]);
        assert_eq!(of("2.27.3").names("/a/b.so"), ["/a/b.so", "libnccl-net-/a/b.so.so"]);
        assert_eq!(of("2.32").names("/a/b.so"), ["/a/b.so"]);
        assert_eq!(of("2.32").names("libx.so"), ["libx.so"]);
        assert_eq!(of("2.32").names("pinrail"), ["pinrail", "libnccl-net-pinrail.so"]);
        assert!(of("2.32").names(&"é".repeat(200)).iter().all(|name| name.len() <= 400));
    }

    #[test]
    fn values_are_lists_where_the_release_knows_lists() {
        let newest = Release::newest();
        assert_eq!(newest.plugins(None), ["libnccl-net.so"]);
        assert_eq!(newest.plugins(Some("a,,b")), ["a", "b"]);
        assert_eq!(newest.plugins(Some("")), [] as [&str; 0]);
        assert_eq!(newest.plugins(Some("NoNe")), [] as [&str; 0]);
        assert_eq!(of("2.27").plugins(Some("none")), ["none"]);
        assert_eq!(of("2.25").plugins(Some("a,b")), ["a,b"]);
        assert_eq!(of("2.10").plugins(Some("a")), ["libnccl-net.so"]);
        assert_eq!(newest.plugins(Some(&"x,".repeat(20))).len(), 14);
        assert_eq!(newest.plugins(Some(&"x".repeat(255))), [] as [&str; 0]);
    }

    #[test]
    fn a_word_that_begins_static_plugin_is_the_program() {
        assert!(is_the_program("s") && is_the_program("STATIC_plugin"));
        assert!(!is_the_program("sx") && !is_the_program("STATIC_PLUGINS"));
    }
}
