//! The life of the file. Other tests of this program may register too: each of these looks only at its own records.

use super::*;
use crate::config::Settings;
use crate::host::procfs::Proc;
use crate::host::smaps::Smaps;

/// What another process reads. The file may go with a registration of another test between two looks.
fn read() -> Option<Inventory> {
    loop {
        let mut smaps = Smaps::of_self().unwrap();
        // Tables that other tests make by hand.
        smaps.mappings.retain(|mapping| mapping.path.starts_with(FOLDER));
        match Inventory::of(&Proc::default(), std::process::id(), &smaps) {
            Ok(read) => return read,
            Err(e) => assert!(e.contains("No such file") || e.contains("taken its place"), "{e}"),
        }
    }
}

fn of(device: &str) -> Vec<Record> {
    read().map_or_else(Vec::new, |all| {
        all.records.into_iter().filter(|record| record.device == device).collect()
    })
}

fn entry(device: &str, page: usize) -> Entry {
    let range = page << 12..(page + 1) << 12;
    Entry::new(device, Kind::Host, range.clone(), range.start + 16..range.start + 20, "regMr")
}

#[test]
fn an_entry_is_there_until_it_is_dropped() {
    let first = entry("lives", 16);
    let second = entry("lives", 17);
    let listed = of("lives");
    assert_eq!(listed.len(), 2);
    assert_eq!((listed[0].kind, listed[0].range.clone()), (Kind::Host, 0x10000..0x11000));
    assert_eq!((listed[0].asked.clone(), &*listed[0].site), (0x10010..0x10014, "regMr"));
    assert!(listed[0].number < listed[1].number);
    drop(first);
    assert_eq!(of("lives"), listed[1..]);
    drop(second);
    assert_eq!(of("lives"), []);
}

#[test]
fn whoever_asks_is_noted() {
    let entry = entry("asked", 16);
    assert_eq!(of("asked")[0].requests, 0);
    entry.asked_by(Kind::Cuda, &(0x10020..0x10024), "regMr of somebody");
    let first = of("asked").remove(0);
    assert_eq!((first.kind, &*first.site), (Kind::Cuda, "regMr of somebody"));
    assert_eq!((first.requests, first.asked), (1, 0x10020..0x10024));
    entry.asked_by(Kind::Host, &(0x10000..0x10001), "another");
    entry.asked_by(Kind::Host, &(0x10030..0x10031), "a third");
    let last = of("asked").remove(0);
    assert_eq!((last.kind, &*last.site), (Kind::Cuda, "regMr of somebody"));
    assert_eq!((last.requests, last.asked), (3, 0x10000..0x10031));
}

#[test]
fn a_long_text_is_cut() {
    let entry = Entry::new("long", Kind::Own, 4096..8192, 4096..8192, "ü".repeat(300));
    assert_eq!(of("long")[0].site, "ü".repeat(Site::ROOM / 2));
    drop(entry);
}

/// A table of its own in a folder of its own.
fn table(folder: &crate::host::tree::Tree) -> Result<Table, String> {
    Table::create(folder.root())
}

fn content(number: u64) -> Content {
    Content {
        kind: Kind::Own,
        range: number << 12..(number + 1) << 12,
        asked: number << 12..(number + 1) << 12,
        requests: 1,
        number,
        device: layout::text("d"),
        site: layout::text("s"),
    }
}

fn read_at(path: &Path) -> Inventory {
    Inventory::read(&std::fs::File::open(path).unwrap()).unwrap()
}

#[test]
fn the_file_grows_and_is_used_again() {
    let folder = crate::host::tree::Tree::new(&[]);
    let mut table = table(&folder).unwrap();
    let path = folder.root().join(stale::name(std::process::id()));
    let records: Vec<_> = (1..=3000).map(|number| table.enter(&content(number))).collect();
    assert!(records.iter().all(Option::is_some));
    let listed = read_at(&path);
    assert_eq!((listed.unsteady, listed.unlisted), (0, 0));
    assert!(listed.records.iter().map(|record| record.number).eq(1..=3000));
    let size = std::fs::metadata(&path).unwrap().len();
    for record in records {
        table.strike(record);
    }
    assert!(table.is_empty() && read_at(&path).records.is_empty());
    for number in 1..=3000 {
        table.enter(&content(number));
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
    drop(table);
    assert!(!path.exists());
}

#[test]
fn what_does_not_fit_is_counted() {
    let folder = crate::host::tree::Tree::new(&[]);
    let mut table = table(&folder).unwrap();
    let path = folder.root().join(stale::name(std::process::id()));
    // Without its name the file cannot grow.
    let elsewhere = folder.root().join("elsewhere");
    std::fs::rename(&path, &elsewhere).unwrap();
    let room = (layout::FIRST - layout::HEADER) / layout::RECORD;
    let records: Vec<_> = (1..=room as u64 + 5).map(|n| table.enter(&content(n))).collect();
    assert_eq!(records.iter().flatten().count(), room);
    assert_eq!((read_at(&elsewhere).records.len(), read_at(&elsewhere).unlisted), (room, 5));
    table.strike(None);
    table.strike(records[3]);
    assert_eq!(table.enter(&content(9999)), records[3]);
    assert_eq!((read_at(&elsewhere).records.len(), read_at(&elsewhere).unlisted), (room, 4));
    // What has taken its name is not removed with it.
    std::fs::write(&path, "of somebody else").unwrap();
    drop(table);
    assert!(path.exists());
}

#[test]
fn the_file_is_made_exclusively_and_for_its_user_only() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = crate::host::tree::Tree::new(&[]);
    let path = folder.root().join(stale::name(std::process::id()));
    let first = table(&folder).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    // A second copy of the plugin in the process finds the first one's, and leaves it.
    assert!(table(&folder).unwrap_err().contains("pinrail."));
    assert!(path.exists());
    drop(first);
    // Neither a link nor a foreign file is followed, used or removed.
    let target = folder.root().join("target");
    symlink(&target, &path).unwrap();
    table(&folder).unwrap_err();
    assert!(!target.exists() && path.is_symlink());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "text that is no inventory").unwrap();
    table(&folder).unwrap_err();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "text that is no inventory");
    assert!(Table::create(Path::new("/no/such/folder")).unwrap_err().contains("/no/such/folder"));
}

#[test]
fn files_of_the_dead_are_removed_when_one_is_made() {
    let folder = crate::host::tree::Tree::new(&[]);
    let table_of_this = table(&folder).unwrap();
    let path = folder.root().join(stale::name(std::process::id()));
    let image = std::fs::read(&path).unwrap();
    drop(table_of_this);
    let with_start = |start: u64| {
        let mut image = image.clone();
        image[layout::header::START * 8..][..8].copy_from_slice(&start.to_ne_bytes());
        image
    };
    // This number with another start, and a header that was never written by a process that is gone. A header under another
    // number's name stays.
    folder.write(&stale::name(std::process::id()), &with_start(1));
    folder.write("pinrail.4000000000", b"");
    folder.write("pinrail.1", &image);
    folder.write("pinrail.2.json", b"other");
    folder.write("pinrail.3", b"something else altogether");
    let made = table(&folder).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(folder.root())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let mut expected = vec![
        stale::name(std::process::id()),
        "pinrail.1".into(),
        "pinrail.2.json".into(),
        "pinrail.3".into(),
    ];
    expected.sort();
    assert_eq!(names, expected);
    drop(made);
}

#[test]
fn a_reader_never_sees_half_a_record() {
    let folder = crate::host::tree::Tree::new(&[]);
    let mut table = table(&folder).unwrap();
    let path = folder.root().join(stale::name(std::process::id()));
    let kept = table.enter(&content(1 << 30)).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..20_000_u64 {
                let words = |word: u64| vec![word; 16];
                let mut changed =
                    vec![(record::START, number << 12), (record::END, (number + 1) << 12)];
                changed.extend([
                    (record::ASKED, number << 12),
                    (record::ASKED_END, (number + 1) << 12),
                ]);
                changed.push((record::NUMBER, number));
                let digit = u64::from_ne_bytes([b'0' + (number % 10) as u8; 8]);
                changed.extend(record::SITE.zip(words(digit)));
                table.change(kept, &changed);
            }
            stop.store(true, Ordering::Relaxed);
        });
        let mut seen = 0;
        while !stop.load(Ordering::Relaxed) || seen == 0 {
            for record in read_at(&path).records {
                assert_eq!(record.range, record.asked);
                if record.number != 1 << 30 {
                    assert_eq!(record.range.start, record.number << 12);
                    let digit = char::from(b'0' + (record.number % 10) as u8);
                    assert!(record.site.chars().all(|c| c == digit), "{}", record.site);
                }
                seen += 1;
            }
        }
    });
    drop(table);
}

#[test]
fn the_settings_can_turn_it_off() {
    let off = Settings::parse([("PINRAIL_INVENTORY".to_owned(), "off".to_owned())]).0;
    assert_eq!(off.inventory.path(), None);
    assert_eq!(Settings::default().inventory.path(), Some(Path::new(FOLDER)));
    let mut state = State { place: Place::Off, table: None, number: 0, failed: false };
    let (entry, failure) = state.enter(|_| unreachable!("nothing is written"));
    assert!(entry.0.is_none() && failure.is_none() && state.table.is_none());
    // A failure is told once.
    state.place = Place::Other("/no/such/folder".into());
    assert!(state.enter(content).1.is_some());
    assert!(state.enter(content).1.is_none());
}

#[test]
#[allow(unsafe_code, reason = "a test forks")]
fn a_forked_child_leaves_the_parents_file_alone() {
    let entry = entry("parent", 16);
    let before = of("parent");
    // SAFETY: the child drops one value, which takes no lock in a child, and leaves through _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let more = Entry::new("child", Kind::Own, 4096..8192, 4096..8192, "");
        let code = i32::from(more.0.is_some());
        drop((entry, more));
        // SAFETY: no destructor of the parent's state may run in the child.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: our own child and a valid out-pointer.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0);
    assert_eq!(of("parent"), before);
    assert_eq!(of("child"), []);
}

/// The kernel would end a process that makes a file longer than it may.
#[test]
#[allow(unsafe_code, reason = "a test forks")]
fn a_limit_on_files_is_an_error_and_no_signal() {
    let folder = crate::host::tree::Tree::new(&[]);
    // SAFETY: the child uses memory and files only, which fork leaves in order, and leaves through _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
        // SAFETY: a valid structure.
        let limited = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) } == 0;
        let refused = table(&folder).is_err_and(|reason| reason.contains("too large"));
        // SAFETY: no destructor of the parent's state may run in the child.
        unsafe { libc::_exit(i32::from(!(limited && refused))) };
    }
    let mut status = 0;
    // SAFETY: our own child and a valid out-pointer.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0);
    assert_eq!(std::fs::read_dir(folder.root()).unwrap().count(), 0);
}
