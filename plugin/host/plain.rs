//! Reading files that a user named or that a captured tree holds: they may be anything.

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open as open_file};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Opens a plain file, without waiting for whatever else may be there: a FIFO without a writer, a terminal.
///
/// # Errors
/// It cannot be opened, or it is something else.
pub fn open(path: &Path) -> io::Result<File> {
    Ok(open_with(path, OFlags::empty())?.0)
}

/// The same where anybody may have put it: a link is not followed. With what the file system says about it.
///
/// # Errors
/// As [`open`], and a link.
pub fn open_unfollowed(path: &Path) -> io::Result<(File, Stat)> {
    open_with(path, OFlags::NOFOLLOW)
}

fn open_with(path: &Path, more: OFlags) -> io::Result<(File, Stat)> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | more;
    let file = open_file(path, flags, Mode::empty())?;
    let stat = fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is no plain file"));
    }
    Ok((File::from(file), stat))
}

/// Reads a plain file of at most `most` bytes.
///
/// # Errors
/// As [`open`], or the file is longer.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("it is longer than {most} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_files_are_read_and_nothing_is_waited_for() {
        let folder = std::env::temp_dir().join(format!("pinrail-plain-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (plain, fifo) = (folder.join("plain"), folder.join("fifo"));
        std::fs::write(&plain, "four").unwrap();
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, mode, 0).unwrap();
        assert_eq!(read(&plain, 4).unwrap(), b"four");
        for (path, most) in [
            (&plain, 3),
            (&fifo, 4),
            (&folder, 4),
            (&"/dev/zero".into(), 4),
            (&folder.join("none"), 4),
        ] {
            assert!(read(path, most).is_err(), "{}", path.display());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
