//! The kernel: its release and what its command line says about where memory may lie.

use super::procfs::Proc;

/// Parameters of the command line that decide about placement; `None`: not given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cmdline {
    /// Size of the contiguous area (CMA).
    pub cma: Option<String>,
    /// Contiguous area for huge pages.
    pub hugetlb_cma: Option<String>,
    /// Kexec handover, which lends what it keeps for the next kernel like a contiguous area.
    pub kho: Option<String>,
    /// Size of the zone for memory that must stay movable.
    pub movablecore: Option<String>,
    /// The rest of memory goes to that zone.
    pub kernelcore: Option<String>,
}

impl Cmdline {
    /// Reads the text of `/proc/cmdline`. The last of several equal names counts, as in the kernel.
    pub fn parse(text: &str) -> Self {
        let mut line = Self::default();
        for word in text.split_whitespace() {
            // What follows is for init.
            if word == "--" {
                break;
            }
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let field = match name {
                "cma" => &mut line.cma,
                "hugetlb_cma" => &mut line.hugetlb_cma,
                "kho" => &mut line.kho,
                "movablecore" => &mut line.movablecore,
                "kernelcore" => &mut line.kernelcore,
                _ => continue,
            };
            *field = Some(value.to_owned());
        }
        line
    }

    /// The command line of this kernel; `None` where it cannot be read.
    pub fn read(proc: &Proc) -> Option<Self> {
        proc.text("cmdline").map(|text| Self::parse(&text))
    }

    /// The parameters that make room where a long-term pin is refused, as they were given.
    pub fn risky(&self) -> Vec<String> {
        let sizes = [("cma", &self.cma), ("hugetlb_cma", &self.hugetlb_cma)];
        let mut found: Vec<String> = sizes
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_deref()?)))
            .filter(|(_, value)| asks_for_memory(value))
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        if let Some(value) = self.kho.as_deref().filter(|value| is_on(value)) {
            found.push(format!("kho={value}"));
        }
        found
    }

    /// All parameters that were given.
    pub fn given(&self) -> Vec<(&'static str, &str)> {
        let all = [
            ("cma", &self.cma),
            ("hugetlb_cma", &self.hugetlb_cma),
            ("kho", &self.kho),
            ("movablecore", &self.movablecore),
            ("kernelcore", &self.kernelcore),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?))).collect()
    }
}

/// Whether one of the sizes in `64M@0-4G` or `0:1G,1:0` is not zero.
fn asks_for_memory(value: &str) -> bool {
    value.split(',').any(|part| {
        let part = part.split('@').next().unwrap_or_default();
        let size = part.rsplit(':').next().unwrap_or_default();
        size.bytes().any(|b| b.is_ascii_digit() && b != b'0')
    })
}

/// What the kernel takes for yes.
fn is_on(value: &str) -> bool {
    let lower = value.to_ascii_lowercase();
    lower.starts_with(['1', 'y', 't']) || lower.starts_with("on")
}

/// The release of this kernel, such as `6.17.0-1014-nvidia`.
pub fn release(proc: &Proc) -> Option<String> {
    let text = proc.text("sys/kernel/osrelease")?;
    let release = text.trim();
    (!release.is_empty()).then(|| release.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_makes_the_machine_risky() {
        for (text, expected) in [
            ("quiet cma=64M@0-4G ro", &["cma=64M@0-4G"][..]),
            ("cma=0 hugetlb_cma=0 kho=off", &[]),
            ("hugetlb_cma=0:1G,1:0 kho=on", &["hugetlb_cma=0:1G,1:0", "kho=on"]),
            ("hugetlb_cma=0:0,1:0", &[]),
            ("kho=on kho=0", &[]),
            ("kho=y", &["kho=y"]),
            ("kho -- cma=1G", &[]),
            ("xcma=1G cma", &[]),
        ] {
            assert_eq!(Cmdline::parse(text).risky(), expected, "{text}");
        }
    }

    #[test]
    fn everything_given_is_kept() {
        let line = Cmdline::parse("movablecore=512M kernelcore=mirror cma=0 root=/dev/x");
        let given = [("cma", "0"), ("movablecore", "512M"), ("kernelcore", "mirror")];
        assert_eq!(line.given(), given);
    }

    #[test]
    fn this_kernel_has_a_release() {
        assert!(release(&Proc::default()).unwrap().contains('.'));
        assert!(Cmdline::read(&Proc::default()).is_some());
        let nowhere = Proc::at("/no/such/folder");
        assert_eq!((release(&nowhere), Cmdline::read(&nowhere)), (None, None));
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>(), value in "\\PC{0,30}") {
            let _ = Cmdline::parse(&text).risky();
            let _ = Cmdline::parse(&format!("cma={value} kho={value} hugetlb_cma={value}")).risky();
        }
    }
}
