//! `/proc/self/fdinfo/<n>` of a DMA-BUF: who exported it.

use std::fs;
use std::os::fd::RawFd;

use super::procfs::Proc;

/// What the kernel says about a DMA-BUF.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DmaBufInfo {
    /// The driver that exported it. Every DMA-BUF has one.
    pub exporter: Option<String>,
    /// Its size in bytes.
    pub size: Option<u64>,
}

impl DmaBufInfo {
    /// Reads the text of the file. Lines that are not understood are skipped.
    pub fn parse(text: &str) -> Self {
        let mut info = Self::default();
        for line in text.lines() {
            match line.split_once(':') {
                Some(("exp_name", name)) => info.exporter = Some(name.trim().to_owned()),
                Some(("size", size)) => info.size = size.trim().parse().ok(),
                _ => {}
            }
        }
        info
    }

    /// What is known about a descriptor of this process; `None`: no such descriptor, or it cannot be read.
    pub fn read(proc: &Proc, fd: RawFd) -> Option<Self> {
        Some(Self::parse(&proc.text(&format!("self/fdinfo/{fd}"))?))
    }
}

/// Whether a descriptor of this process is open; `None`: the kernel does not show its descriptors here.
pub fn is_open(proc: &Proc, fd: RawFd) -> Option<bool> {
    match proc.path(&format!("self/fdinfo/{fd}")).try_exists() {
        Ok(true) => Some(true),
        // Reading the folder takes a descriptor, so that there is one to be seen where any can be.
        Ok(false) => fs::read_dir(proc.path("self/fdinfo")).ok()?.next()?.ok().map(|_| false),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;
    use proptest::prelude::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_dma_buf_names_its_exporter() {
        let text = "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t1033\nsize:\t2097152\ncount:\t2\nexp_name:\tnvidia\n";
        let info = DmaBufInfo::parse(text);
        assert_eq!((info.exporter.as_deref(), info.size), (Some("nvidia"), Some(2 << 20)));
    }

    #[test]
    fn an_ordinary_file_has_no_exporter() {
        let file = fs::File::open("/proc/self/status").unwrap();
        let info = DmaBufInfo::read(&Proc::default(), file.as_raw_fd()).unwrap();
        assert_eq!(info.exporter, None);
        assert_eq!(DmaBufInfo::read(&Proc::default(), -1), None);
    }

    #[test]
    fn what_is_not_shown_is_unknown() {
        let file = fs::File::open("/proc/self/status").unwrap();
        let here = Proc::default();
        assert_eq!(is_open(&here, file.as_raw_fd()), Some(true));
        assert_eq!((is_open(&here, -1), is_open(&here, i32::MAX)), (Some(false), Some(false)));
        let tree = Tree::new(&[("self/fdinfo/7", ""), ("none/x", ""), ("damaged/self", "")]);
        let at = |root: &str| Proc::at(tree.root().join(root));
        assert_eq!((is_open(&at(""), 7), is_open(&at(""), 8)), (Some(true), Some(false)));
        assert_eq!(
            (is_open(&at("none"), 7), is_open(&at("damaged"), 7), is_open(&at("absent"), 7)),
            (None, None, None)
        );
        // Mounted, but nothing of this process is to be seen.
        fs::create_dir_all(tree.root().join("none/self/fdinfo")).unwrap();
        assert_eq!(is_open(&at("none"), 7), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>()) {
            let _ = DmaBufInfo::parse(&text);
            let _ = DmaBufInfo::parse(&format!("size:{text}\nexp_name:{text}"));
        }
    }
}
