//! Reads the inventory of another process, which may be of any version, may end at any time, and may lie.

use super::layout::{self, HEADER, LARGEST, RECORD, Record, Slot};
use super::stale;
use crate::host::plain;
use crate::host::process::inner_pid;
use crate::host::procfs::Proc;
use crate::host::smaps::{Mapping, Smaps};
use crate::sync::{Ordering, fence};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How often records that were being written are looked at again.
const LOOKS: usize = 8;

/// What an inventory says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The file.
    pub path: PathBuf,
    /// Live registrations by their number.
    pub records: Vec<Record>,
    /// Records that could not be read: they were being written, or make no sense.
    pub unsteady: usize,
    /// Registrations that are live and found no room in the file.
    pub unlisted: u64,
}

/// The name of the file of a mapping.
fn file_name(mapping: &Mapping) -> Option<&str> {
    let path = mapping.path.strip_suffix(" (deleted)").unwrap_or(&mapping.path);
    Path::new(path).file_name()?.to_str()
}

impl Inventory {
    /// That of a process with these mappings. `None`: it has none. Its own mapping of the file says where it is and that
    /// it is its own, whatever PID and mount namespaces it lives in.
    ///
    /// # Errors
    /// In words: there is one, but it cannot be read.
    pub fn of(proc: &Proc, pid: u32, smaps: &Smaps) -> Result<Option<Self>, String> {
        let name = stale::name(inner_pid(proc, pid).unwrap_or(pid));
        let Some(mapping) = smaps.mappings.iter().find(|m| Self::is_file_of(m, &name)) else {
            return Ok(None);
        };
        let path = PathBuf::from(&mapping.path);
        let wrong = |reason: &dyn std::fmt::Display| format!("{}: {reason}", path.display());
        let open = |path: &Path| match plain::open_unfollowed(path) {
            Ok((file, stat)) if stat.st_ino == mapping.inode => Ok(file),
            Ok(_) => Err("another file has taken its place".to_owned()),
            Err(e) => Err(e.to_string()),
        };
        // As the process sees it, from the root of the process.
        let seen = proc.path(&format!("{pid}/root/{}", mapping.path.trim_start_matches('/')));
        let file = open(&seen).map_err(|e| wrong(&e))?;
        let mut read = Self::read(&file).map_err(|e| wrong(&e))?;
        read.path = path;
        Ok(Some(read))
    }

    fn is_file_of(mapping: &Mapping, name: &str) -> bool {
        mapping.inode != 0 && mapping.permissions == "rw-s" && file_name(mapping) == Some(name)
    }

    /// Whether a mapping shows the inventory of some process.
    pub fn is_mapping(mapping: &Mapping) -> bool {
        file_name(mapping)
            .is_some_and(|name| Self::is_file_of(mapping, name) && stale::pid(name).is_some())
    }

    /// Reads a file.
    ///
    /// # Errors
    /// In words: it cannot be read, or is no inventory.
    pub fn read(file: &File) -> Result<Self, String> {
        let mut inventory = Self::default();
        let mut unsteady = Vec::new();
        let (first, second) = (copy(file)?, copy(file)?);
        let (_, unlisted) = layout::head(&second).map_err(|e| e.to_string())?;
        inventory.unlisted = unlisted;
        let places = |bytes: &[u8]| bytes.len().saturating_sub(HEADER) / RECORD;
        let record = |bytes: &[u8], index: usize| {
            let start = HEADER + index * RECORD;
            bytes.get(start..start + RECORD).unwrap_or_default().to_vec()
        };
        for index in 0..places(&first).min(places(&second)) {
            match Slot::decode(&record(&first, index), &record(&second, index)) {
                Slot::Free => {}
                Slot::Live(record) => inventory.records.push(record),
                Slot::Unsteady => unsteady.push(index),
            }
        }
        for index in unsteady {
            match again(file, index) {
                Slot::Free => {}
                Slot::Live(record) => inventory.records.push(record),
                Slot::Unsteady => inventory.unsteady += 1,
            }
        }
        inventory.records.sort_by_key(|record| record.number);
        Ok(inventory)
    }
}

/// The whole file, as far as one of this version can be long.
fn copy(file: &File) -> Result<Vec<u8>, String> {
    let len = file.metadata().map_err(|e| e.to_string())?.len().min(LARGEST as u64);
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], done as u64) {
            // It was made shorter meanwhile.
            Ok(0) => break,
            Ok(more) => done += more,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.to_string()),
        }
    }
    bytes.truncate(done);
    // What is copied next is newer than this.
    fence(Ordering::Acquire);
    Ok(bytes)
}

/// Looks at one record until two copies agree, or for long enough.
fn again(file: &File, index: usize) -> Slot {
    let look = || {
        let mut bytes = vec![0; RECORD];
        let read = file.read_exact_at(&mut bytes, (HEADER + index * RECORD) as u64);
        fence(Ordering::Acquire);
        read.is_ok().then_some(bytes)
    };
    for _ in 0..LOOKS {
        let (Some(first), Some(second)) = (look(), look()) else { break };
        match Slot::decode(&first, &second) {
            Slot::Unsteady => std::thread::yield_now(),
            steady => return steady,
        }
    }
    Slot::Unsteady
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::inventory::layout::{Kind, MAGIC, VERSION, header, tests::bytes};
    use proptest::prelude::*;
    use std::io::Write;

    fn file(content: &[u8]) -> File {
        let path = std::env::temp_dir().join(format!(
            "pinrail-inventory-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let mut file =
            File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.write_all(content).unwrap();
        file
    }

    fn head() -> Vec<u8> {
        let mut words = vec![0_u64; HEADER / 8];
        words[header::MAGIC] = MAGIC;
        words[header::VERSION] = VERSION;
        words[header::RECORD] = RECORD as u64;
        // Lies about both.
        words[header::CAPACITY] = u64::MAX;
        words[header::LIVE] = u64::MAX;
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn records_of_all_states() {
        let record = |number| Record {
            number,
            kind: Kind::Own,
            range: 0x1000..0x2000,
            asked: 0x1000..0x2000,
            requests: 1,
            device: "d".into(),
            site: "flush scratch".into(),
        };
        let mut content = head();
        content.extend(bytes(&record(2), 8));
        content.extend(vec![0; RECORD]);
        content.extend(bytes(&record(3), 3));
        content.extend(bytes(&record(1), 2));
        // A record that is not all there.
        content.extend(&bytes(&record(4), 2)[..100]);
        let read = Inventory::read(&file(&content)).unwrap();
        assert_eq!(read.records, [record(1), record(2)]);
        assert_eq!((read.unsteady, read.unlisted), (1, 0));
    }

    #[test]
    fn a_file_that_is_none_says_so() {
        assert!(Inventory::read(&file(b"")).unwrap_err().contains("empty"));
        assert!(Inventory::read(&file(&[b'x'; 9000])).unwrap_err().contains("no inventory"));
        let huge = file(&head());
        huge.set_len(1 << 40).unwrap();
        assert!(Inventory::read(&huge).unwrap().records.is_empty());
    }

    #[test]
    fn only_its_own_file_counts() {
        let text = "10000-20000 rw-s 00000000 00:1 7 /dev/shm/pinrail.41\n\
                    30000-40000 rw-p 00000000 00:1 7 /dev/shm/pinrail.42\n";
        let smaps = Smaps::parse(text);
        assert_eq!(Inventory::of(&Proc::at("/no/such/folder"), 42, &smaps), Ok(None));
        let error = Inventory::of(&Proc::at("/no/such/folder"), 41, &smaps).unwrap_err();
        assert!(error.starts_with("/dev/shm/pinrail.41: "), "{error}");
        assert!(Inventory::is_mapping(&smaps.mappings[0]));
        assert!(!Inventory::is_mapping(&smaps.mappings[1]));
    }

    proptest! {
        #[test]
        fn any_file_is_read(
            damage in prop::collection::vec((0..8192_usize, any::<u8>()), 0..40), len in 0..9000_usize,
        ) {
            let mut content = head();
            content.resize(len, 0x11);
            for (at, byte) in damage {
                if let Some(place) = content.get_mut(at) {
                    *place = byte;
                }
            }
            let _ = Inventory::read(&file(&content));
        }
    }
}
