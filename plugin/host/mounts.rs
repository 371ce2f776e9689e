//! `/proc/self/mountinfo`: which file system a device number stands for.

/// The type of the file system, such as `tmpfs`, that has this device number; `None`: no mount that this process sees.
pub fn filesystem(mountinfo: &str, device: (u32, u32)) -> Option<&str> {
    mountinfo.lines().find_map(|line| {
        // `36 35 98:0 /root /mount/point options optional:fields - type source options`, spaces in names escaped.
        let (mount, filesystem) = line.split_once(" - ")?;
        let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
        let found = (major.parse().ok()?, minor.parse().ok()?);
        filesystem.split(' ').next().filter(|name| found == device && !name.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "\
22 27 0:20 / /proc rw,nosuid - proc proc rw
27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
31 25 0:26 / /dev/shm rw,nosuid,nodev shared:4 master:2 - tmpfs tmpfs rw
damaged
40 27 0:x / /mnt rw - tmpfs tmpfs rw
44 27 0:255 / /mnt/huge\\040pages rw - hugetlbfs nodev rw,pagesize=2M
45 27 0:99 / /mnt/none rw -
";

    #[test]
    fn a_number_stands_for_a_file_system() {
        for (device, expected) in [
            ((8, 1), Some("ext4")),
            ((0, 26), Some("tmpfs")),
            ((0, 255), Some("hugetlbfs")),
            ((0, 99), None),
            ((0, 0), None),
        ] {
            assert_eq!(filesystem(TEXT, device), expected, "{device:?}");
        }
        assert_eq!(filesystem("", (8, 1)), None);
    }

    #[test]
    fn the_numbers_of_this_process_are_found() {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let proc = std::fs::metadata("/proc/self/mountinfo").unwrap();
        let device = std::os::unix::fs::MetadataExt::dev(&proc);
        let device = (libc::major(device), libc::minor(device));
        assert_eq!(filesystem(&mounts, device), Some("proc"));
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>(), a in any::<u32>(), b in "[0-9]{0,11}") {
            let _ = filesystem(&text, (a, 0));
            let line = format!("1 2 {a}:{b} {text} - tmpfs");
            let _ = filesystem(&line, (a, a));
        }
    }
}
