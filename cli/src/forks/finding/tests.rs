//! The conclusions, from text as the kernel writes it and records as the plugin does.

use super::*;
use crate::forks::json;
use crate::forks::place::{Place, Sight};
use crate::forks::target::Known;
use crate::forks::text;
use crate::output::Colour;
use nccl_net_pinrail::memory::inventory::Inventory;
use proptest::prelude::*;

/// A heap page with four registered bytes; one page of the plugin between its guards; a page of a stack that another
/// library took; a doorbell; gates; a DMA-BUF's reservation.
const SMAPS: &str = "\
10000000-10001000 rw-p 00000000 00:00 0                          [heap]
KernelPageSize:        4 kB
VmFlags: rd wr mr mw me ac
10001000-10002000 rw-p 00000000 00:00 0                          [heap]
KernelPageSize:        4 kB
VmFlags: rd wr mr mw me dc ac
10002000-10021000 rw-p 00000000 00:00 0                          [heap]
KernelPageSize:        4 kB
VmFlags: rd wr mr mw me ac
20000000-20001000 ---p 00000000 00:00 0
VmFlags: mr mw me
20001000-20002000 rw-p 00000000 00:00 0
KernelPageSize:        4 kB
VmFlags: rd wr mr mw me dc
20002000-20003000 ---p 00000000 00:00 0
VmFlags: mr mw me
30000000-30001000 rw-s 00003000 00:06 77                         /dev/infiniband/uverbs0
VmFlags: wr sh mr mw me ms pf io dc de dd
40000000-40001000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me wf
7ffd00000000-7ffd00010000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me gd ac
7ffd00010000-7ffd00012000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me dc gd ac
7ffd00012000-7ffd00021000 rw-p 00000000 00:00 0                  [stack]
VmFlags: rd wr mr mw me gd ac
";

fn record(number: u64, kind: Kind, range: Range<u64>, asked: Range<u64>, site: &str) -> Record {
    Record { number, kind, range, asked, requests: 1, device: "mlx5_0".into(), site: site.into() }
}

fn records() -> Vec<Record> {
    let own = 0x2000_1000..0x2000_2000;
    vec![
        record(1, Kind::Own, own.clone(), own, "flush scratch"),
        record(
            2,
            Kind::Host,
            0x1000_1000..0x1000_2000,
            0x1000_1010..0x1000_1014,
            "regMr: sends to host7 pid 4",
        ),
        // Would cover the stack if its addresses were any.
        record(
            3,
            Kind::DmaBuf,
            0x7ffd_0000_0000..0x7ffd_0002_0000,
            0x7ffd_0000_0000..0x7ffd_0002_0000,
            "regMrDmaBuf",
        ),
    ]
}

fn target(smaps: &str, known: Known) -> Target {
    Target { pid: 42, name: "train".into(), smaps: Smaps::parse(smaps), known }
}

fn read(records: Vec<Record>) -> Known {
    Known::Read(Inventory { path: "/dev/shm/pinrail.42".into(), records, unsteady: 0, unlisted: 0 })
}

fn owners(target: &Target) -> Vec<Owner> {
    Finding::of(target).withheld.iter().map(|one| one.owner).collect()
}

#[test]
fn whose_each_mapping_is() {
    let known = target(SMAPS, read(records()));
    assert_eq!(owners(&known), [Owner::Given, Owner::Pinrail, Owner::Device, Owner::Unknown]);
    let unknown = target(SMAPS, Known::Absent);
    assert_eq!(owners(&unknown), [Owner::Unknown, Owner::Unknown, Owner::Device, Owner::Unknown]);
    assert!(Finding::of(&known).is_harmful() && Finding::of(&unknown).is_harmful());
}

#[test]
fn every_byte_is_accounted_for() {
    let target = target(SMAPS, read(records()));
    let finding = Finding::of(&target);
    assert_eq!(
        finding.totals,
        Totals { withheld: 4 * 4096, own: 4096, asked: 4, collateral: 4092, unexplained: 2 * 4096 }
    );
    let heap = &finding.withheld[0];
    assert_eq!((heap.asked, heap.collateral(), heap.unexplained()), (4, 4092, 0));
    assert_eq!(heap.records[0].number, 2);
    assert_eq!(finding.wiped.len(), 1);
}

#[test]
fn what_a_page_was_cut_out_of() {
    let target = target(SMAPS, Known::Absent);
    let finding = Finding::of(&target);
    let origins: Vec<_> = finding.withheld.iter().map(|one| one.origin.clone()).collect();
    let origin = |name: &str, range| Some(Origin { name: name.into(), range });
    assert_eq!(
        origins,
        [
            origin("[heap]", 0x1000_0000..0x1002_1000),
            None,
            None,
            origin("[stack]", 0x7ffd_0000_0000..0x7ffd_0002_1000),
        ]
    );
}

#[test]
fn a_file_is_one_mapping_only_where_its_offsets_go_on() {
    let text = "1000-2000 rw-p 00000000 00:1 7 /a\n2000-3000 rw-p 00001000 00:1 7 /a\nVmFlags: rd dc\n\
                3000-4000 rw-p 00007000 00:1 7 /a\n4000-5000 rw-p 00000000 00:1 8 /b\n";
    let target = target(text, Known::Absent);
    let finding = Finding::of(&target);
    let origin = finding.withheld[0].origin.clone().unwrap();
    assert_eq!((origin.name.as_str(), origin.range), ("/a", 0x1000..0x3000));
}

#[test]
fn the_plugins_own_pages_are_no_harm() {
    let text: Vec<&str> = SMAPS.split_inclusive('\n').skip(9).take(14).collect();
    let target = target(&text.concat(), read(records()));
    assert_eq!(owners(&target), [Owner::Pinrail, Owner::Device]);
    assert!(!Finding::of(&target).is_harmful());
}

#[test]
fn a_mapping_may_be_explained_in_part() {
    let text = "1000-4000 rw-p 00000000 00:00 0\nKernelPageSize: 4 kB\nVmFlags: rd wr dc\n";
    let one = || vec![record(1, Kind::Host, 0x1000..0x2000, 0x1ffc..0x2000, "regMr")];
    let target = target(text, read(one()));
    let finding = Finding::of(&target);
    let mixed = &finding.withheld[0];
    assert_eq!(mixed.owner, Owner::Partly);
    assert_eq!((mixed.asked, mixed.collateral(), mixed.unexplained()), (4, 4092, 8192));
}

/// With RDMAV_HUGEPAGES_SAFE a huge page goes as a whole, whatever was asked for.
#[test]
fn the_page_of_the_mapping_counts() {
    let text = "200000-400000 rw-p 00000000 00:0f 9 /anon_hugepage (deleted)\nKernelPageSize: 2048 kB\n\
                VmFlags: rd wr ht dc\n";
    let one = vec![record(1, Kind::Host, 0x20_1000..0x20_2000, 0x20_1000..0x20_1008, "regMr")];
    let target = target(text, read(one));
    let finding = Finding::of(&target);
    assert_eq!(finding.withheld[0].owner, Owner::Given);
    assert_eq!(finding.totals.collateral, (2 << 20) - 8);
    assert_eq!(Place::of(&target, &finding, 0x3f_ffff).records.len(), 1);
}

#[test]
fn what_a_child_finds_at_an_address() {
    let target = target(SMAPS, read(records()));
    let finding = Finding::of(&target);
    for (address, state, registrations, says) in [
        (
            0x1000_1ff0,
            "withheld",
            1,
            "4 bytes asked for at 0x10001010 by regMr: sends to host7 pid 4, mlx5_0",
        ),
        (0x1000_0ff0, "inherited", 0, "not withheld"),
        (0x2000_1000, "withheld", 1, "flush scratch"),
        (0x2000_0000, "not-readable", 0, "without permission to read"),
        (0x4000_0008, "zero-filled", 0, "MADV_WIPEONFORK"),
        (0x5000_0000, "not-mapped", 0, "not mapped in the parent either"),
        (0x7ffd_0001_0000, "withheld", 0, "cut out of [stack]"),
        (u64::MAX, "not-mapped", 0, "look elsewhere"),
    ] {
        let place = Place::of(&target, &finding, address);
        assert_eq!((place.name(), place.records.len()), (state, registrations), "{address:#x}");
        assert_eq!(place.is_withheld(), state == "withheld");
        let shown = text::report(&target, &finding, Some(&place), &[], Colour::none());
        assert!(shown.contains(says), "{address:#x}: {shown}");
        let elsewhere = shown.contains("look elsewhere");
        assert_eq!(elsewhere, !place.is_withheld(), "{shown}");
    }
    let place = Place::of(&target, &finding, 0x1000_1014);
    let shown = text::report(&target, &finding, Some(&place), &[], Colour::none());
    assert!(
        shown.contains("4 bytes asked for, 4096 bytes withheld: 4092 bytes of collateral"),
        "{shown}"
    );
    assert!(matches!(place.sight, Sight::Withheld(one) if one.owner == Owner::Given));
}

#[test]
fn a_registration_without_the_flag_is_named() {
    let text = SMAPS.replace(" dc", "");
    let target = target(&text, read(records()));
    let finding = Finding::of(&target);
    assert!(finding.withheld.is_empty() && !finding.is_harmful());
    let place = Place::of(&target, &finding, 0x1000_1010);
    assert_eq!((place.name(), place.records.len()), ("inherited", 1));
    let shown = text::report(&target, &finding, Some(&place), &[], Colour::none());
    assert!(shown.contains("copies such pages on fork"), "{shown}");
}

#[test]
fn the_table_names_what_it_knows() {
    let target = target(SMAPS, read(records()));
    let finding = Finding::of(&target);
    let shown =
        text::report(&target, &finding, None, &["/dev/shm/pinrail.7".into()], Colour::none());
    for says in [
        "process 42 (train)",
        "registrations: 3 (/dev/shm/pinrail.42)",
        "removed /dev/shm/pinrail.7",
        "0x10001000-0x10002000  4 KiB  cut out of [heap] 0x10000000-0x10021000  registered by pinrail for its caller",
        "flush scratch, mlx5_0 (registration 1)",
        "8192 bytes withheld; not by a registration of pinrail",
        "in all: 16384 bytes withheld; 4096 of them pinrail's own; 4 bytes asked for by others, 4092 of collateral, \
         8192 not explained",
        "killed by SIGSEGV",
    ] {
        assert!(shown.contains(says), "{says}:\n{shown}");
    }
    assert!(!shown.contains('\u{1b}'));
}

#[test]
fn json_has_the_same() {
    let target = target(SMAPS, read(records()));
    let finding = Finding::of(&target);
    let place = Place::of(&target, &finding, 0x1000_1012);
    let shown = json::document(&target, &finding, Some(&place), &[], 1);
    let value: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(value["format"], 1);
    assert_eq!((&value["verdict"], &value["exit_code"]), (&"withheld".into(), &1.into()));
    assert_eq!(value["inventory"]["state"], "read");
    assert_eq!(value["address"]["registrations"][0]["asked"]["bytes"], 4);
    assert_eq!(value["withheld"][0]["owner"], "given");
    assert_eq!(value["withheld"][0]["cut_out_of"]["name"], "[heap]");
    assert_eq!(value["withheld"][0]["registrations"][0]["kind"], "host");
    assert_eq!(value["withheld"][3]["unexplained_bytes"], 8192);
    assert_eq!(value["zero_filled"][0]["start"], "0x40000000");
    assert_eq!(value["totals"]["collateral_bytes"], 4092);
    let failure: serde_json::Value = serde_json::from_str(&json::failure(7, "gone", 2)).unwrap();
    assert_eq!((&failure["verdict"], &failure["error"]), (&"unknown".into(), &"gone".into()));
}

#[test]
fn a_hostile_name_does_not_reach_the_terminal() {
    let text = "1000-2000 rw-p 00000000 00:1 7 /\u{1b}[2Jx\nVmFlags: rd dc\n";
    let target = target(text, Known::Unreadable("because".into()));
    let finding = Finding::of(&target);
    for place in [None, Some(Place::of(&target, &finding, 0x1000))] {
        let shown = text::report(&target, &finding, place.as_ref(), &[], Colour::none());
        assert!(!shown.chars().any(|c| c.is_control() && c != '\n'), "{shown:?}");
    }
}

fn any_mapping() -> impl Strategy<Value = String> {
    let edge = prop_oneof![0..16_u64, Just(u64::MAX), Just(u64::MAX - 4095), any::<u64>()];
    let flags = prop::sample::subsequence(vec!["rd", "dc", "wf", "io", "ht", "\u{e9}", "x"], 0..5);
    let path = prop_oneof![Just("[heap]"), Just(""), Just("/dev/shm/pinrail.1"), Just("/dev/x")];
    (edge.clone(), edge, any::<u64>(), 0..3_u64, path, prop_oneof![0..5_u64, any::<u64>()], flags)
        .prop_map(|(start, end, offset, inode, path, page, flags)| {
            format!(
                "{start:x}-{end:x} rw-p {offset:x} 00:0 {inode} {path}\nKernelPageSize: {page} kB\nVmFlags: {}\n",
                flags.join(" ")
            )
        })
}

fn any_record() -> impl Strategy<Value = Record> {
    let edge = || prop_oneof![0..16_u64, Just(u64::MAX), any::<u64>()];
    let kind =
        prop_oneof![Just(Kind::Own), Just(Kind::Host), Just(Kind::DmaBuf), Just(Kind::Other)];
    (edge(), edge(), edge(), edge(), kind, any::<u64>(), any::<String>()).prop_map(
        |(a, b, c, d, kind, number, site)| Record {
            requests: number,
            ..record(number, kind, a.min(b)..a.max(b), c.min(d)..c.max(d), &site)
        },
    )
}

proptest! {
    #[test]
    fn whatever_is_read_there_is_a_report(
        mappings in prop::collection::vec(any_mapping(), 0..6), records in prop::collection::vec(any_record(), 0..6),
        address in prop_oneof![0..16_u64, any::<u64>()], tail in any::<String>(),
    ) {
        let target = target(&(mappings.concat() + &tail), read(records));
        let finding = Finding::of(&target);
        for one in &finding.withheld {
            prop_assert!(one.explained <= one.bytes());
            prop_assert!(one.asked <= one.bytes());
        }
        let place = Place::of(&target, &finding, address);
        for place in [None, Some(&place)] {
            let shown = text::report(&target, &finding, place, &[], Colour::none());
            prop_assert!(!shown.chars().any(|c| c.is_control() && c != '\n'));
            let shown = json::document(&target, &finding, place, &[], 0);
            prop_assert!(serde_json::from_str::<serde_json::Value>(&shown).is_ok());
        }
    }
}
