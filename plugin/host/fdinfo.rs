//! `/proc/self/fdinfo/<n>` of a DMA-BUF: who exported it.

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

    /// What is known about a descriptor of this process; `None`: no such descriptor.
    pub fn read(proc: &Proc, fd: RawFd) -> Option<Self> {
        Some(Self::parse(&proc.text(&format!("self/fdinfo/{fd}"))?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let info = DmaBufInfo::read(&Proc::default(), file.as_raw_fd()).unwrap();
        assert_eq!(info.exporter, None);
        assert_eq!(DmaBufInfo::read(&Proc::default(), -1), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>()) {
            let _ = DmaBufInfo::parse(&text);
            let _ = DmaBufInfo::parse(&format!("size:{text}\nexp_name:{text}"));
        }
    }
}
