//! Every verdict, provoked on made-up hosts, beside its nearest neighbour: the same failure with one figure changed.

use super::rules::{Case, judge};
use super::*;
use crate::cuda::driver::{MemoryKind, PointerFacts};
use crate::cuda::nvml::Bar1;
use crate::host::procfs::Proc;
use crate::host::sysfs::Sysfs;
use crate::host::tree::Tree;
use crate::memory::RegionKind;
use crate::memory::page::page_size;
use proptest::prelude::*;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;
use tracing::Level;

const GIB: u64 = 1 << 30;
const START: u64 = 0x7f00_0000_0000;
const BULK: u32 = 1 | 2 | 4;
const RELAXED: u32 = BULK | 1 << 20;

/// A host without any of the problems. Files in `changes` replace its own.
fn machine(changes: &[(&str, &str)]) -> (Tree, Machine) {
    let tree = Tree::new(&[
        (
            "proc/self/status",
            "VmPin:\t  65536 kB\nVmLck:\t 8000000 kB\nVmRSS:\t 10 kB\nCapEff:\t0000000000000000\n",
        ),
        (
            "proc/self/limits",
            "Max locked memory         unlimited            unlimited            bytes\n",
        ),
        ("proc/self/cgroup", "0::/user.slice\n"),
        ("proc/self/maps", "7f0000000000-7f1000000000 rw-p 00000000 00:00 0\n"),
        (
            "proc/meminfo",
            "MemTotal: 67108864 kB\nMemFree: 8388608 kB\nMemAvailable: 16777216 kB\nCmaTotal: 0 kB\nCmaFree: 0 kB\n",
        ),
        (
            "proc/zoneinfo",
            "Node 0, zone Normal\n spanned 16777216\n managed 16000000\n cma 0\n nr_free_cma 0\n start_pfn: 0\n",
        ),
        ("proc/cmdline", "quiet\n"),
        ("proc/self/fdinfo/0", "pos:\t0\n"),
        ("proc/sys/kernel/osrelease", "6.12.0-test\n"),
        ("sys/module/mlx5_core/version", "1\n"),
    ]);
    for (path, text) in changes {
        tree.write(path, text.as_bytes());
    }
    tree.link("proc/self/ns/user", "user:[4026531837]");
    let machine = Machine {
        proc: Proc::at(tree.root().join("proc")),
        sysfs: Sysfs::at(tree.root().join("sys")),
    };
    (tree, machine)
}

fn failure(errno: i32, pages: u64) -> Failure {
    Failure {
        verb: "ibv_reg_mr_iova2",
        errno,
        access: BULK,
        optional_demanded: false,
        retry: None,
        address: START,
        length: pages * page_size() as u64,
        kind: RegionKind::Host,
        fd: None,
        offset: 0,
        device: "mlx5_0:1".into(),
        limits: DeviceLimits { max_mr: Some(1000), max_mr_size: Some(1 << 40) },
        live: Live { regions: 5, bytes: 1 << 20, peak_regions: 7, peak_bytes: 2 << 20 },
        own_pinned: None,
        held: Vec::new(),
        direction: Some(Direction::Receive),
        peer: Some("node7 pid 4711\n".into()),
        comm: Some(0xabcd),
    }
}

/// The range of the failure holds these bad pages; other memory is fine.
fn bad(pages: &'static [u64]) -> impl FnMut(Candidate<'_>) -> Result<(), i32> {
    move |candidate| {
        let (addr, len) = candidate.range();
        let page = page_size() as u64;
        let hit = pages.iter().any(|index| {
            let at = START + index * page;
            (addr as u64) <= at && at < (addr + len) as u64
        });
        if hit { Err(libc::ENOMEM) } else { Ok(()) }
    }
}

/// Nothing above this many bytes registers.
fn at_most(bytes: usize) -> impl FnMut(Candidate<'_>) -> Result<(), i32> {
    move |candidate| if candidate.range().1 > bytes { Err(libc::ENOMEM) } else { Ok(()) }
}

fn never(_: Candidate<'_>) -> Result<(), i32> {
    panic!("nothing is probed for this errno")
}

/// A report from facts that a made-up host cannot show.
fn report(failure: Failure, facts: Facts, probe: Option<Probe>) -> Report {
    let verdict =
        judge(Case { failure: &failure, facts: &facts, probe: probe.as_ref(), places: &[] });
    Report { failure, facts, probe, places: Vec::new(), verdict, time: SystemTime::now() }
}

/// Checks verdict, line and record, and gives the record back.
fn check(report: &Report, cause: Cause, confidence: Confidence, telling: &[&str]) -> Value {
    let (verdict, json) = (report.verdict(), report.json());
    let line = format!("{}. Asked for: {}", report.line(), report.asked());
    assert_eq!((verdict.cause, verdict.confidence), (cause, confidence), "{line}");
    let head = format!("Verdict: {} ({}): ", cause.word().replace('_', " "), confidence.word());
    assert!(line.contains(&head) && line.contains(". Remedy: "), "{line}");
    assert!(line.contains("mlx5_0:1") && line.contains(report.failure().verb), "{line}");
    assert!(!line.contains(char::is_control), "{line:?}");
    for part in telling {
        assert!(line.contains(part), "{line:?} lacks {part:?}");
    }
    assert_eq!(json["verdict"]["cause"], cause.word());
    assert_eq!(json["verdict"]["confidence"], confidence.word());
    assert_eq!(json["verdict"]["remedy"], *verdict.remedy);
    assert_eq!(json["schema_version"], 1);
    assert!(!verdict.evidence.is_empty() && !verdict.remedy.is_empty());
    // No remedy of another verdict.
    let memlock = line.contains("ulimit");
    assert_eq!(memlock, cause == Cause::MemlockQuota, "{line}");
    json
}

const KHO: (&str, &str) = (
    "proc/meminfo",
    "MemTotal: 125829120 kB\nMemFree: 20971520 kB\nMemAvailable: 41943040 kB\nCmaTotal: 0 kB\nCmaFree: 9751756 kB\n",
);
const CACHE: &str = "anon 73000000\ninactive_file 600000000\nactive_file 400000000\n";
/// 64 MiB are pinned; so many pages more fit.
const ROOM: u64 = 16;

fn quota() -> String {
    let limit = (64 << 20) + ROOM * page_size() as u64;
    format!("Max locked memory         {limit}            {limit}            bytes\n")
}

#[test]
fn memlock_beside_placement() {
    let (_tree, machine_) = machine(&[("proc/self/limits", &quota()), KHO]);
    let report = diagnose(
        &machine_,
        failure(libc::ENOMEM, ROOM + 1),
        true,
        at_most(ROOM as usize * page_size()),
    );
    let telling =
        ["pinned before 64 MiB (VmPin)", "against a memory lock limit of 64.1 MiB", "LimitMEMLOCK"];
    let json = check(&report, Cause::MemlockQuota, Confidence::Certain, &telling);
    assert_eq!(json["memlock"]["refuses"], true);
    assert_eq!(json["memlock"]["soft"], (64 << 20) + ROOM * page_size() as u64);
    assert_eq!(json["probe"]["fresh_page"]["worked"], true);
    assert_eq!(json["probe"]["fresh_range"]["errno"], libc::ENOMEM);
    assert!(!report.bounce_may_help(false));

    // One page less: the quota allows it, and other memory registers.
    let report = diagnose(&machine_, failure(libc::ENOMEM, ROOM), true, bad(&[3, 7]));
    let telling = [
        "2 of 16 pages fail",
        "CmaTotal 0 bytes, CmaFree 9.3 GiB",
        "boot with kho=off",
        "kernel 6.12.0-test",
    ];
    let json = check(&report, Cause::Placement, Confidence::Likely, &telling);
    assert_eq!(json["memlock"]["refuses"], false);
    assert_eq!(json["probe"]["failing_pages"], 2);
    assert_eq!(
        json["probe"]["first_failing_page"],
        format!("{:#x}", START + 3 * page_size() as u64)
    );
    assert_eq!(
        json["probe"]["last_failing_page"],
        format!("{:#x}", START + 7 * page_size() as u64)
    );
    assert!(report.bounce_may_help(false) && !report.transient());
}

#[test]
fn a_small_limit_is_not_blamed_where_the_rule_does_not_say_so() {
    let root = ("proc/self/status", "VmPin:\t  65536 kB\nCapEff:\t000001ffffffffff\n");
    // CAP_IPC_LOCK exempts.
    let (_tree, exempt) = machine(&[("proc/self/limits", &quota()), root]);
    let report = diagnose(&exempt, failure(libc::ENOMEM, 1000), true, bad(&[0]));
    check(&report, Cause::Placement, Confidence::Possible, &["1 of 1000 pages fail"]);
    // A limit of 0 has an errno of its own.
    let none = ("proc/self/limits", "Max locked memory 0 0 bytes\n");
    let (_tree, nothing) = machine(&[none]);
    let report = diagnose(&nothing, failure(libc::EPERM, 1), true, never);
    check(&report, Cause::MemlockQuota, Confidence::Certain, &["lock limit of 0 bytes"]);
    let (_tree, nothing) = machine(&[none, root]);
    let report = diagnose(&nothing, failure(libc::EPERM, 1), true, never);
    check(&report, Cause::Unknown, Confidence::Possible, &["CAP_IPC_LOCK exempts the process"]);
    // In a user namespace of one's own it does not.
    let (tree, nested) = machine(&[("proc/self/limits", &quota()), root]);
    fs::remove_file(tree.root().join("proc/self/ns/user")).unwrap();
    tree.link("proc/self/ns/user", "user:[4026532999]");
    let report =
        diagnose(&nested, failure(libc::ENOMEM, 1000), true, at_most(ROOM as usize * page_size()));
    check(&report, Cause::MemlockQuota, Confidence::Certain, &[]);
    // The rule allows a page and the kernel did not: it was something else.
    let (_tree, small) = machine(&[("proc/self/limits", &quota())]);
    let report = diagnose(&small, failure(libc::ENOMEM, 1000), true, at_most(0));
    check(
        &report,
        Cause::DeviceLimit,
        Confidence::Likely,
        &["one page of fresh memory does not register"],
    );
    // What is locked with mlock (8 GB on this host) does not count, and GPU memory neither.
    let gpu = Failure { kind: RegionKind::Cuda, ..failure(libc::ENOMEM, 1000) };
    let report = diagnose(&small, gpu, true, at_most(page_size()));
    assert_ne!(report.verdict().cause, Cause::MemlockQuota);
}

#[test]
fn only_host_memory_counts_towards_the_quota() {
    // The limit is passed already, and for each kind fresh memory works or fails by it.
    let over = ("proc/self/status", "VmPin:\t  99999 kB\nCapEff:\t0000000000000000\n");
    let changes = [("proc/self/limits", &*quota()), over];
    let works = |failure: &Failure| probe(failure.length, None, Bounds::default(), |_| Ok(()));
    let fails =
        |failure: &Failure| probe(failure.length, None, Bounds::default(), at_most(page_size()));
    let plain = |kind| Failure { kind, ..failure(libc::ENOMEM, 1000) };
    let of = |kind| Some(PointerFacts { ..pointer(kind) });
    for (failure, pointer) in [
        (plain(RegionKind::Cuda), None),
        (plain(RegionKind::Cuda), of(MemoryKind::Device)),
        (Failure { fd: Some(33), ..plain(RegionKind::DmaBuf) }, None),
        // A GPU's whatever it was said to be.
        (plain(RegionKind::Host), of(MemoryKind::Device)),
    ] {
        for found in [None, Some(works(&failure)), Some(fails(&failure))] {
            let facts = Facts { pointer: pointer.clone(), ..facts(&changes, &failure) };
            let report = report(failure.clone(), facts, found);
            let line = report.line();
            let cause = report.verdict().cause;
            assert!(![Cause::MemlockQuota, Cause::Placement].contains(&cause), "{line}");
            assert!(
                ![false, true].iter().any(|aside| report.bounce_may_help(*aside))
                    && !line.contains("this request 3.9 MiB"),
                "{line}"
            );
            let json = report.json();
            assert_eq!(json["memlock"]["request_bytes"], 0);
            assert_eq!(json["memlock"]["refuses"], false);
        }
    }
    let host = plain(RegionKind::Host);
    for pointer in [None, of(MemoryKind::Host), of(MemoryKind::Unknown)] {
        let facts = Facts { pointer, ..facts(&changes, &host) };
        check(&report(host.clone(), facts, None), Cause::MemlockQuota, Confidence::Certain, &[]);
    }
}

#[test]
fn figures_of_ones_own_count_where_the_kernel_counts_less() {
    let (_tree, machine) = machine(&[("proc/self/limits", &quota())]);
    let limit = (64 << 20) + ROOM * page_size() as u64;
    let more = Failure { own_pinned: Some(limit), ..failure(libc::ENOMEM, 1) };
    let report = diagnose(&machine, more, true, at_most(0));
    let telling = ["(registered by this process)"];
    let json = check(&report, Cause::MemlockQuota, Confidence::Likely, &telling);
    assert_eq!(json["memlock"]["used_source"], "own");
    // More is held already than the limit allows: it is not the one that the kernel applies.
    let beyond = Failure { own_pinned: Some(1 << 30), ..failure(libc::ENOMEM, 1) };
    let report = diagnose(&machine, beyond, true, at_most(0));
    assert_ne!(report.verdict().cause, Cause::MemlockQuota, "{}", report.line());
    let less = Failure { own_pinned: Some(1 << 20), ..failure(libc::ENOMEM, 1) };
    let report = diagnose(&machine, less, true, bad(&[0]));
    assert_eq!(report.json()["memlock"]["used_source"], "vm_pin");
}

#[test]
fn a_container_names_its_daemon() {
    let (_tree, machine) = machine(&[
        ("proc/self/limits", &quota()),
        ("proc/self/cgroup", "0::/system.slice/docker-77.scope\n"),
    ]);
    let report =
        diagnose(&machine, failure(libc::ENOMEM, 1000), true, at_most(ROOM as usize * page_size()));
    let telling = ["the daemon of Docker"];
    let json = check(&report, Cause::MemlockQuota, Confidence::Certain, &telling);
    assert_eq!(json["process"]["in_container"], true);
}

#[test]
fn device_limit_beside_kernel_memory() {
    let (_tree, ordinary) = machine(&[]);
    let full = Failure {
        live: Live { regions: 1000, peak_regions: 1000, ..Live::default() },
        ..failure(libc::ENOMEM, 4)
    };
    let report = diagnose(&ordinary, full, true, at_most(0));
    let telling = ["1000 registrations, the device allows 1000"];
    let json = check(&report, Cause::DeviceLimit, Confidence::Certain, &telling);
    assert_eq!(
        (&json["device"]["live_regions"], &json["device"]["max_mr"]),
        (&1000.into(), &1000.into())
    );

    // Others may have taken the rest.
    let report = diagnose(&ordinary, failure(libc::ENOMEM, 4), true, at_most(0));
    let telling = ["memory lock limit unlimited", "16 GiB of memory to be had", "at most 7 so far"];
    check(&report, Cause::DeviceLimit, Confidence::Likely, &telling);
    let report = diagnose(&ordinary, failure(libc::ENOMEM, 4), true, at_most(page_size()));
    check(&report, Cause::DeviceLimit, Confidence::Possible, &["the same size does not"]);

    let (_tree, short) = machine(&[(
        "proc/meminfo",
        "MemTotal: 67108864 kB\nMemFree: 20000 kB\nMemAvailable: 30000 kB\n",
    )]);
    let report = diagnose(&short, failure(libc::ENOMEM, 4), true, at_most(0));
    let json =
        check(&report, Cause::KernelMemory, Confidence::Likely, &["29.3 MiB of memory to be had"]);
    assert_eq!(json["memory"]["available_bytes"], 30_000 << 10);

    let group = [
        ("sys/fs/cgroup/user.slice/memory.max", "1073741824\n"),
        ("sys/fs/cgroup/user.slice/memory.current", "1073000000\n"),
    ];
    let (_tree, confined) = machine(&group);
    let report = diagnose(&confined, failure(libc::ENOMEM, 4), true, at_most(0));
    check(&report, Cause::KernelMemory, Confidence::Likely, &["control group /user.slice has"]);

    // The same where files fill the group: that is room, for the kernel and for the probe.
    let cached = [group[0], group[1], ("sys/fs/cgroup/user.slice/memory.stat", CACHE)];
    let (_tree, cached) = machine(&cached);
    let report = diagnose(&cached, failure(libc::ENOMEM, 4096), true, at_most(0));
    let json = check(&report, Cause::DeviceLimit, Confidence::Likely, &["954.4 MiB of memory"]);
    assert_eq!(json["control_group"]["memory"]["file_cache_bytes"], 1_000_000_000);
    let report = diagnose(&cached, failure(libc::ENOMEM, 4096), true, bad(&[1]));
    let whole = 4096 * page_size();
    assert_eq!(report.json()["probe"]["fresh_range"]["length"], whole);
}

#[test]
fn the_limit_of_a_control_group_and_of_one_region() {
    let (_tree, machine) = machine(&[
        ("sys/fs/cgroup/user.slice/rdma.max", "mlx5_0 hca_handle=max hca_object=100\n"),
        ("sys/fs/cgroup/user.slice/rdma.current", "mlx5_0 hca_handle=1 hca_object=100\n"),
    ]);
    let report = diagnose(&machine, failure(libc::EAGAIN, 4), true, never);
    let telling = [
        "hca_object of mlx5_0 in control group /user.slice: 100 of 100 in use",
        "raise hca_object in rdma.max",
    ];
    let json = check(&report, Cause::DeviceLimit, Confidence::Certain, &telling);
    assert_eq!(json["control_group"]["rdma"][0]["max"], 100);
    // Another device is not limited, and nothing else explains EAGAIN.
    let other = Failure { device: "mlx5_0:1+x".into(), ..failure(libc::EAGAIN, 4) };
    assert_eq!(diagnose(&machine, other, true, never).verdict().cause, Cause::DeviceLimit);
    let other = Failure { device: "mlx5_0:1".replace('0', "1"), ..failure(libc::EAGAIN, 4) };
    assert_eq!(diagnose(&machine, other, true, never).verdict().cause, Cause::Unknown);

    // One device is open and one may be: that says nothing about registrations.
    let (_tree, opened) = self::machine(&[
        ("sys/fs/cgroup/user.slice/rdma.max", "mlx5_0 hca_handle=1 hca_object=100\n"),
        ("sys/fs/cgroup/user.slice/rdma.current", "mlx5_0 hca_handle=1 hca_object=9\n"),
    ]);
    let report = diagnose(&opened, failure(libc::ENOMEM, 4), true, at_most(0));
    let telling = ["one page of fresh memory does not register"];
    let json = check(&report, Cause::DeviceLimit, Confidence::Likely, &telling);
    assert_eq!(json["control_group"]["rdma"][0]["resource"], "hca_handle");
    assert_eq!(
        diagnose(&opened, failure(libc::EAGAIN, 4), true, never).verdict().cause,
        Cause::Unknown
    );

    let mut large = failure(libc::EINVAL, 4);
    large.limits.max_mr_size = Some(large.length - 1);
    check(
        &diagnose(&machine, large, true, never),
        Cause::DeviceLimit,
        Confidence::Certain,
        &["NCCL_BUFFSIZE"],
    );
    let report = diagnose(&machine, failure(libc::ENOSPC, 4), true, never);
    check(&report, Cause::DeviceLimit, Confidence::Certain, &["100 of 100"]);
}

#[test]
fn placement_where_every_registration_fails() {
    // Nearly all that is free lies in contiguous areas: fresh memory cannot move either.
    let pressed = (
        "proc/meminfo",
        "MemTotal: 125829120 kB\nMemFree: 9761756 kB\nMemAvailable: 9781756 kB\nCmaTotal: 0 kB\nCmaFree: 9751756 kB\n",
    );
    let (_tree, machine_) = machine(&[pressed, ("proc/cmdline", "kho=on")]);
    let report = diagnose(&machine_, failure(libc::ENOMEM, 1), true, at_most(0));
    let telling = ["lie outside of contiguous areas", "kho=on", "boot with kho=off"];
    check(&report, Cause::Placement, Confidence::Likely, &telling);
    assert!(report.bounce_may_help(false));
    // The neighbour: as little to be had, and no such area.
    let (_tree, machine_) = machine(&[("proc/meminfo", "MemAvailable: 30000 kB\n")]);
    let report = diagnose(&machine_, failure(libc::ENOMEM, 1), true, at_most(0));
    check(&report, Cause::KernelMemory, Confidence::Likely, &[]);
    assert!(!report.bounce_may_help(false));
}

#[test]
fn placement_is_certain_where_the_kernel_shows_the_page() {
    let (tree, machine) = machine(&[(
        "proc/zoneinfo",
        "Node 0, zone Normal\n spanned 1000\n managed 900\n start_pfn: 0\nNode 0, zone Movable\n spanned 1000\n managed 900\n start_pfn: 1000\n",
    )]);
    let at = START / page_size() as u64 * 8;
    let file = fs::File::create(tree.root().join("proc/self/pagemap")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &(1u64 << 63 | 1500).to_ne_bytes(), at)
        .unwrap();
    let report = diagnose(&machine, failure(libc::ENOMEM, 1), true, bad(&[0]));
    let telling = ["is frame 0x5dc in ZONE_MOVABLE", "movablecore="];
    let json = check(&report, Cause::Placement, Confidence::Certain, &telling);
    assert_eq!(json["placement"]["pages"][0]["frame"], "0x5dc");
    assert_eq!(json["placement"]["pages"][0]["zone"], "Movable");
    assert_eq!(json["placement"]["pages"][0]["migratetype"], Value::Null);

    // A contiguous area by its name, whatever that is.
    let debug = "sys/kernel/debug/cma/zone one";
    tree.write(&format!("{debug}/base_pfn"), b"1500\n");
    tree.write(&format!("{debug}/count"), b"1\n");
    let report = diagnose(&machine, failure(libc::ENOMEM, 1), true, bad(&[0]));
    let telling = ["is frame 0x5dc in the contiguous area zone one"];
    let json = check(&report, Cause::Placement, Confidence::Certain, &telling);
    assert_eq!(json["placement"]["pages"][0]["cma_area"], "zone one");
    fs::remove_dir_all(tree.root().join(debug)).unwrap();

    // Without debugfs by the kernel's log, where there is such an area at all.
    let frame = 1500 * page_size() as u64;
    tree.write("dev/kmsg", format!("6,52,0,-;cma: Reserved 1 MiB at {frame:#x}\n").as_bytes());
    let report = diagnose(&machine, failure(libc::ENOMEM, 1), true, bad(&[0]));
    check(&report, Cause::Placement, Confidence::Certain, &["in ZONE_MOVABLE"]);
    tree.write("proc/meminfo", b"MemTotal: 67108864 kB\nCmaTotal: 1024 kB\nCmaFree: 512 kB\n");
    let report = diagnose(&machine, failure(libc::ENOMEM, 1), true, bad(&[0]));
    let area = format!("at {frame:#x}");
    let telling = format!("is frame 0x5dc in the contiguous area {area}");
    let json = check(&report, Cause::Placement, Confidence::Certain, &[&telling]);
    assert_eq!(json["placement"]["pages"][0]["cma_area"], area);
    assert_eq!(json["placement"]["pages"][0]["migratetype"], "cma");
    fs::remove_file(tree.root().join("dev/kmsg")).unwrap();
    tree.write("proc/meminfo", b"MemTotal: 67108864 kB\n");

    // In an ordinary zone the type of the page is not known, which is not worth a word in the line, unless the zone has
    // no contiguous area at all.
    for (cma, telling) in [("", "pages fail"), (" cma 0\n", "zone Normal, which has no")] {
        let zones =
            format!("Node 0, zone Normal\n spanned 2000\n managed 900\n{cma} start_pfn: 0\n");
        tree.write("proc/zoneinfo", zones.as_bytes());
        let report = diagnose(&machine, failure(libc::ENOMEM, 1), true, bad(&[0]));
        let json = check(&report, Cause::Placement, Confidence::Possible, &[telling]);
        assert_eq!(json["placement"]["pages"][0]["zone"], "Normal");
    }
}

#[test]
fn the_cuda_pin_is_described_by_branch() {
    let driver = |version: &str| {
        (
            "proc/driver/nvidia/version".to_owned(),
            format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  x\n"),
        )
    };
    for (version, expected, word) in [
        ("535.129.03", "535.129.03 (proprietary) does not declare its pins", "no"),
        ("550.54.14", "may or may not declare its pins", "unknown"),
    ] {
        let (path, text) = driver(version);
        let (_tree, machine) = machine(&[KHO, (&path, &text)]);
        let report = diagnose(&machine, failure(libc::ENOMEM, 8), true, bad(&[1]));
        let json = check(&report, Cause::Placement, Confidence::Likely, &[expected]);
        assert_eq!(json["gpu"]["driver"]["host_pin_long_term"], word);
    }
    // A branch that declares them is named only where one is known to.
    for (version, architecture, advised) in [
        ("535.129.03", "x86_64", true),
        ("525.60.13", "x86_64", true),
        ("550.54.14", "x86_64", false),
        ("580.95.05", "x86_64", false),
        ("535.129.03", "aarch64", false),
        ("535.129.03", "powerpc64", false),
    ] {
        let (path, text) = driver(version);
        let failed = failure(libc::ENOMEM, 8);
        let found = probe(failed.length, Some(failed.pages_range()), Bounds::default(), bad(&[1]));
        for changes in [&[(&*path, &*text)][..], &[KHO, (&path, &text)]] {
            let facts = Facts { architecture, ..facts(changes, &failed) };
            let report = report(failed.clone(), facts, Some(found.clone()));
            let remedy = &report.verdict().remedy;
            assert_eq!(remedy.contains("branch 555 or later"), advised, "{remedy}");
            assert_eq!(remedy.contains("find out who else"), !advised && changes.len() == 1);
            assert_eq!(report.json()["kernel"]["architecture"], architecture);
        }
    }
}

#[test]
fn a_failure_that_does_not_repeat() {
    let (_tree, machine) = machine(&[KHO]);
    let report = diagnose(&machine, failure(libc::ENOMEM, 8), true, bad(&[]));
    let telling = ["registered when it was tried again", "none if it works from now on"];
    check(&report, Cause::Placement, Confidence::Possible, &telling);
    assert!(report.transient());
}

#[test]
fn a_short_diagnosis_comes_to_the_same_cause() {
    let (_tree, machine_) = machine(&[("proc/self/limits", &quota()), KHO]);
    let mut tried = 0;
    let mut memory = bad(&[3, 7]);
    let report = diagnose(&machine_, failure(libc::ENOMEM, ROOM), false, |candidate| {
        tried += 1;
        memory(candidate)
    });
    assert_eq!(tried, 3);
    let telling = ["at least one of the 16 pages", "as the cause was told before"];
    let json = check(&report, Cause::Placement, Confidence::Possible, &telling);
    assert!(report.bounce_may_help(false) && !report.transient());
    let probe = &json["probe"];
    assert_eq!(probe["cut_short_by"], "told before");
    assert_eq!((&probe["registrations"], &probe["first_failing_page"]), (&3.into(), &Value::Null));
    for part in ["fresh_page", "fresh_range"] {
        assert_eq!(probe[part]["worked"], true);
    }
    assert_eq!(probe["same_range"]["errno"], libc::ENOMEM);
    assert_eq!(json["placement"]["pages"], Value::Array(Vec::new()));

    // Every other cause, and a failure that does not repeat, rest on no pages: they are the same.
    let short_of = |thorough, pages, most: usize| {
        diagnose(&machine_, failure(libc::ENOMEM, pages), thorough, at_most(most)).verdict().clone()
    };
    for (pages, most) in
        [(ROOM + 1, ROOM as usize * page_size()), (4, 0), (4, page_size()), (4, 1 << 30)]
    {
        let (short, thorough) = (short_of(false, pages, most), short_of(true, pages, most));
        assert_eq!(short, thorough, "{pages} {most}");
    }
}

#[test]
fn what_was_told_of_a_device_is_known() {
    let (_tree, machine) = machine(&[KHO]);
    let reporter = Reporter::default();
    let tell = |device: &str, errno, outcome: fn(String) -> Outcome| {
        let failed = Failure { device: device.into(), ..failure(errno, 4) };
        reporter.tell(&diagnose(&machine, failed, true, bad(&[1])), &outcome("so it is".into()));
    };
    assert!(!reporter.knows("mlx5_0:1"));
    tell("mlx5_0:1", libc::EFAULT, Outcome::Fails);
    tell("mlx5_0:1", libc::ENOSPC, Outcome::GoesOn);
    assert!(!reporter.knows("mlx5_0:1"), "another cause");
    tell("mlx5_0:1", libc::ENOMEM, Outcome::GoesOn);
    assert!(reporter.knows("mlx5_0:1") && !reporter.knows("mlx5_1:1") && !reporter.knows(""));
    tell("mlx5_1:1", libc::ENOMEM, Outcome::Fails);
    assert!(reporter.knows("mlx5_1:1") && !reporter.knows("mlx5_1:2"));
}

fn pointer(kind: MemoryKind) -> PointerFacts {
    PointerFacts {
        kind,
        managed: Some(false),
        classic: Some(true),
        allocation: None,
        pci_bus_id: None,
    }
}

fn facts(changes: &[(&str, &str)], failure: &Failure) -> Facts {
    let (_tree, machine) = machine(changes);
    Facts::gather(&machine, failure)
}

#[test]
fn bad_address_beside_peer_memory() {
    let (_tree, ordinary) = machine(&[]);
    // Host memory: nothing mapped; mapped read-only; a file; and nothing wrong to be seen.
    for (maps, confidence, telling) in [
        (
            "7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n",
            Confidence::Certain,
            "nothing is mapped at 0x7f0000001000",
        ),
        (
            "7f0000000000-7f1000000000 r--p 00000000 00:00 0\n",
            Confidence::Certain,
            "cannot be written",
        ),
        (
            "7f0000000000-7f1000000000 rw-s 00000000 08:01 77 /data/x\n",
            Confidence::Likely,
            "/data/x is mapped there and shared",
        ),
        (
            "7f0000000000-7f1000000000 rw-s 00000000 00:05 77 /dev/nvidia0\n",
            Confidence::Likely,
            "memory of a device",
        ),
        (
            "7f0000000000-7f1000000000 rw-p 00000000 00:00 0\n",
            Confidence::Possible,
            "anonymous memory mapped there, writable",
        ),
    ] {
        let (_tree, machine) = machine(&[("proc/self/maps", maps)]);
        let length = 4 * page_size() as u64;
        let report =
            diagnose(&machine, Failure { length, ..failure(libc::EFAULT, 4) }, true, never);
        check(&report, Cause::BadAddress, confidence, &[telling, "mapped writable"]);
    }
    // Memory that is shared between processes is memory like any other.
    for file in [
        "/dev/zero (deleted)",
        "/dev/shm/nccl-7Yt3Qa",
        "/memfd:nccl (deleted)",
        "/SYSV00001234 (deleted)",
        "/anon_hugepage (deleted)",
        "/dev/hugepages/pool",
        "/mnt/huge/pool",
    ] {
        let maps = format!("7f0000000000-7f1000000000 rw-s 00000000 00:1f 77 {file}\n");
        let mounts = "44 27 0:31 / /mnt/huge rw - hugetlbfs nodev rw\n";
        let mounts = if file.starts_with("/mnt") { mounts } else { "" };
        let (_tree, machine) =
            machine(&[("proc/self/maps", &maps), ("proc/self/mountinfo", mounts)]);
        let report = diagnose(&machine, failure(libc::EFAULT, 4), true, never);
        let telling = [file, "mapped there, writable, and refused by the kernel"];
        check(&report, Cause::BadAddress, Confidence::Possible, &telling);
        let demanded =
            Failure { access: RELAXED, optional_demanded: true, ..failure(libc::EINVAL, 4) };
        let report = diagnose(&machine, demanded, true, never);
        check(&report, Cause::AccessFlags, Confidence::Likely, &["RELAXED_ORDERING=2"]);
        let report = diagnose(&machine, failure(libc::EINVAL, 4), true, never);
        assert_eq!(report.verdict().cause, Cause::Unknown, "{}", report.line());
    }
    // The same errno for GPU memory without the module.
    let gpu = Failure { kind: RegionKind::Cuda, ..failure(libc::EFAULT, 4) };
    let report_ = diagnose(&ordinary, gpu.clone(), true, never);
    let telling = ["no peer-memory kernel module", "modprobe nvidia_peermem"];
    let json = check(&report_, Cause::PeerMemoryMissing, Confidence::Likely, &telling);
    assert_eq!(json["gpu"]["peer_memory_module"], "none");
    let known = Facts { pointer: Some(pointer(MemoryKind::Device)), ..facts(&[], &gpu) };
    check(
        &report(gpu.clone(), known.clone(), None),
        Cause::PeerMemoryMissing,
        Confidence::Certain,
        &[],
    );
    // GPU memory that was passed as host memory.
    let mistaken = Failure { kind: RegionKind::Host, ..gpu.clone() };
    let telling = ["passed as host memory, and the CUDA driver says it is a GPU's"];
    check(
        &report(mistaken, known.clone(), None),
        Cause::PeerMemoryMissing,
        Confidence::Certain,
        &telling,
    );

    // With the module it is the address.
    let with = Facts { peermem: Some("nvidia_peermem"), ..known };
    let stranger = Facts { pointer: Some(pointer(MemoryKind::Unknown)), ..with.clone() };
    check(
        &report(gpu.clone(), stranger, None),
        Cause::BadAddress,
        Confidence::Likely,
        &["the CUDA driver says unknown memory"],
    );
    let short = PointerFacts { allocation: Some((START, 4096)), ..pointer(MemoryKind::Device) };
    let outside = Facts { pointer: Some(short), ..with.clone() };
    check(
        &report(gpu.clone(), outside, None),
        Cause::BadAddress,
        Confidence::Likely,
        &["its allocation is 4 KiB at"],
    );
    let pool = PointerFacts { classic: Some(false), ..pointer(MemoryKind::Device) };
    let pooled = Facts { pointer: Some(pool), ..with };
    check(
        &report(gpu, pooled, None),
        Cause::PeerMemoryMissing,
        Confidence::Possible,
        &["from a pool"],
    );
}

#[test]
fn dma_bufs() {
    let buffer = |errno| Failure {
        kind: RegionKind::DmaBuf,
        verb: "ibv_reg_dmabuf_mr",
        fd: Some(33),
        ..failure(errno, 4)
    };
    let info = |size: u64| format!("size:\t{size}\ncount:\t2\nexp_name:\tnvidia\n");
    let (_tree, good) = machine(&[("proc/self/fdinfo/33", &info(1 << 20))]);
    let report_ = diagnose(&good, buffer(libc::EOPNOTSUPP), true, never);
    let telling = ["cannot register DMA-BUFs", "exported by nvidia", "NCCL_DMABUF_ENABLE=0"];
    let json = check(&report_, Cause::PeerMemoryMissing, Confidence::Certain, &telling);
    assert_eq!(json["gpu"]["dmabuf"]["exporter"], "nvidia");
    assert_eq!(json["request"]["long_term"], "exporter");
    let (_tree, small) = machine(&[("proc/self/fdinfo/33", &info(4096))]);
    let mut failed = buffer(libc::EINVAL);
    failed.offset = 4096;
    check(
        &diagnose(&small, failed, true, never),
        Cause::BadAddress,
        Confidence::Certain,
        &["from offset 4096 of a DMA-BUF of 4 KiB"],
    );
    let (_tree, file) = machine(&[("proc/self/fdinfo/33", "pos:\t0\n")]);
    check(
        &diagnose(&file, buffer(libc::EINVAL), true, never),
        Cause::BadAddress,
        Confidence::Likely,
        &["is no DMA-BUF"],
    );
    let (_tree, none) = machine(&[]);
    let json = check(
        &diagnose(&none, buffer(libc::EBADF), true, never),
        Cause::BadAddress,
        Confidence::Certain,
        &["33 is not open"],
    );
    assert_eq!(json["gpu"]["descriptor_open"], false);
    check(
        &diagnose(&none, buffer(libc::EINVAL), true, never),
        Cause::BadAddress,
        Confidence::Likely,
        &["33 is not open"],
    );
    // Where descriptors cannot be read it is not said to be closed: no procfs, or one that does not show it.
    let (tree, blind) = machine(&[]);
    fs::remove_dir_all(tree.root().join("proc/self/fdinfo")).unwrap();
    let (tree, hidden) = machine(&[]);
    fs::create_dir(tree.root().join("proc/self/fdinfo/33")).unwrap();
    for (machine, open) in [(&blind, Value::Null), (&hidden, true.into())] {
        let telling = ["what descriptor 33 is cannot be read"];
        let report = diagnose(machine, buffer(libc::EINVAL), true, never);
        let json = check(&report, Cause::Unknown, Confidence::Possible, &telling);
        assert_eq!(json["gpu"]["descriptor_open"], open);
        let report = diagnose(machine, buffer(libc::EBADF), true, never);
        check(&report, Cause::BadAddress, Confidence::Possible, &telling);
        assert!(!report.line().contains("is not open"), "{}", report.line());
    }
    // Out of memory: the GPU's window, if it is known to be full.
    let probed =
        |failure: &Failure| Some(probe(failure.length, None, Bounds::default(), |_| Ok(())));
    let failed = buffer(libc::ENOMEM);
    let window = Bar1 { gpu: "0000:3B:00.0".into(), total: GIB, used: GIB - 4096 };
    let full = Facts { bar1: vec![window.clone()], ..facts(&[], &failed) };
    let telling = ["BAR1 1024.0 MiB used of 1 GiB", "resizable BAR"];
    check(
        &report(failed.clone(), full.clone(), probed(&failed)),
        Cause::DeviceLimit,
        Confidence::Likely,
        &telling,
    );
    let free = Facts { bar1: vec![Bar1 { used: 0, ..window }], ..full };
    check(
        &report(failed.clone(), free, probed(&failed)),
        Cause::Unknown,
        Confidence::Possible,
        &["host memory registers"],
    );
}

#[test]
fn access_flags_beside_bad_address() {
    let retry = |errno| Some(Attempt { verb: "ibv_reg_mr", access: BULK, errno });
    let relaxed = || Failure { access: RELAXED, ..failure(libc::EINVAL, 4) };
    let (_tree, ordinary) = machine(&[]);
    let worked = Failure { retry: retry(None), ..relaxed() };
    let telling = [
        "; ibv_reg_mr without optional flags works",
        "registers without optional flags: local write, remote write, remote read instead of",
        "none is needed",
    ];
    let json = check(
        &diagnose(&ordinary, worked, true, never),
        Cause::AccessFlags,
        Confidence::Certain,
        &telling,
    );
    assert_eq!(json["request"]["retry_without_optional_flags"]["errno"], Value::Null);
    assert_eq!(
        json["request"]["access_names"],
        "local write, remote write, remote read, relaxed ordering"
    );

    let demanded = Failure { optional_demanded: true, ..relaxed() };
    let telling = ["the settings demand the optional ones", "NCCL_IB_PCI_RELAXED_ORDERING=2"];
    check(
        &diagnose(&ordinary, demanded, true, never),
        Cause::AccessFlags,
        Confidence::Likely,
        &telling,
    );

    // It fails without them too, and the mapping shows why, or nothing does.
    let (_tree, hole) = machine(&[("proc/self/maps", "")]);
    let failed = Failure { retry: retry(Some(libc::EINVAL)), ..relaxed() };
    check(
        &diagnose(&hole, failed.clone(), true, never),
        Cause::BadAddress,
        Confidence::Certain,
        &["nothing is mapped"],
    );
    let telling = ["fails without optional access flags too"];
    let json = check(
        &diagnose(&ordinary, failed, true, never),
        Cause::Unknown,
        Confidence::Possible,
        &telling,
    );
    assert_eq!(json["request"]["retry_without_optional_flags"]["errno"], libc::EINVAL);
    // Demanded flags are what EINVAL is about, whatever is mapped there.
    let maps = "7f0000000000-7f1000000000 rw-s 00000000 08:01 77 /data/x\n";
    let (_tree, file) = machine(&[("proc/self/maps", maps)]);
    let demanded = Failure { optional_demanded: true, ..relaxed() };
    check(&diagnose(&file, demanded, true, never), Cause::AccessFlags, Confidence::Likely, &[]);
    let plain = failure(libc::EINVAL, 4);
    check(
        &diagnose(&file, plain, true, never),
        Cause::BadAddress,
        Confidence::Likely,
        &["/data/x"],
    );
    let empty = Failure { length: 0, ..failure(libc::EINVAL, 4) };
    check(
        &diagnose(&ordinary, empty, true, never),
        Cause::BadAddress,
        Confidence::Certain,
        &["empty"],
    );
    let unsupported = Failure { access: RELAXED, ..failure(libc::EOPNOTSUPP, 4) };
    check(
        &diagnose(&ordinary, unsupported, true, never),
        Cause::AccessFlags,
        Confidence::Likely,
        &[],
    );
}

#[test]
fn nothing_is_guessed() {
    let nowhere =
        Machine { proc: Proc::at("/no/such/folder"), sysfs: Sysfs::at("/no/such/folder") };
    for errno in [libc::EPERM, libc::EIO, libc::EAGAIN, libc::EINVAL] {
        let report = diagnose(&nowhere, failure(errno, 4), true, never);
        assert_eq!(report.verdict().cause, Cause::Unknown, "{}", report.line());
    }
    // The limit of this process is known in any case.
    let mut bare = failure(libc::EIO, 4);
    (bare.direction, bare.peer, bare.comm) = (None, None, None);
    let json = diagnose(&nowhere, bare, true, never).json();
    for (section, keys) in [
        ("request", &["direction", "peer", "comm", "protocol", "fd"][..]),
        ("memory", &["free_bytes", "cma_total_bytes"]),
        ("kernel", &["release", "command_line"]),
        ("placement", &["risk", "zone_movable_bytes", "zone_cma_bytes", "cma_page_block_bytes"]),
        ("process", &["vm_lck_bytes", "cap_ipc_lock", "in_container"]),
        ("gpu", &["driver", "pointer", "peer_memory_module", "dmabuf"]),
        ("memlock", &["vm_pin_bytes", "used_source", "exempt"]),
    ] {
        for key in keys {
            assert_eq!(json[section].get(key), Some(&Value::Null), "{section}.{key}");
        }
    }
    assert_eq!(json["probe"], Value::Null);
}

/// Words in backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[test]
fn the_manual_lists_every_key() {
    let page = include_str!("../../../docs/registration.md");
    let (_tree, machine) = machine(&[KHO]);
    let json = diagnose(&machine, failure(libc::ENOMEM, 16), true, bad(&[3])).json();
    let record = page.split("## The record").nth(1).unwrap();
    let mut sections = 0;
    for (name, section) in json.as_object().unwrap() {
        let Some(section) = section.as_object() else {
            assert!(quoted(record).contains(&name.as_str()), "{name} is not described");
            continue;
        };
        let row = record.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        let mut listed = quoted(row.unwrap_or_else(|| panic!("no row for {name}")));
        assert_eq!(listed.remove(0), name);
        listed.sort_unstable();
        assert_eq!(listed, section.keys().collect::<Vec<_>>(), "{name}");
        sections += 1;
    }
    assert_eq!(record.lines().filter(|line| line.starts_with("| `")).count(), sections);
    for cause in [
        Cause::MemlockQuota,
        Cause::Placement,
        Cause::DeviceLimit,
        Cause::KernelMemory,
        Cause::BadAddress,
        Cause::PeerMemoryMissing,
        Cause::AccessFlags,
        Cause::Unknown,
    ] {
        let word = cause.word();
        assert!(quoted(record).contains(&word), "{word} is not listed");
        let title = format!("### {}", word.replace('_', " "));
        assert!(page.lines().any(|line| line.to_lowercase() == title), "no section {title}");
    }
}

#[test]
fn the_line_says_what_failed() {
    let (_tree, machine) = machine(&[KHO]);
    let report = diagnose(&machine, failure(libc::ENOMEM, 16), true, bad(&[3]));
    let head = "ibv_reg_mr_iova2 on mlx5_0:1 failed: Cannot allocate memory (os error 12). Verdict: placement (likely): ";
    assert!(report.line().starts_with(head), "{}", report.line());
    let expected = "64 KiB (16 pages) at 0x7f0000000000, host memory, access local write, remote write, remote read, for \
                    receive, node7 pid 4711\\n";
    let expected = expected.replace("64 KiB", &crate::host::amount(16 * page_size() as u64));
    assert_eq!(report.asked(), expected);
}

/// Files of a folder by name, hidden ones too.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn reporter(folder: &Path) -> Reporter {
    let settings = crate::config::Settings {
        report_dir: Some(folder.to_owned()),
        ..crate::config::Settings::default()
    };
    Reporter::from_settings(&settings)
}

fn name(number: u32) -> String {
    format!(
        "pinrail-registration-{}-{}-{number}.json",
        crate::records::hostname(),
        std::process::id()
    )
}

#[test]
fn a_cause_is_told_once_for_a_device_and_recorded_each_time() {
    let (tree, machine) = machine(&[KHO]);
    let folder = tree.root().join("reports");
    fs::create_dir(&folder).unwrap();
    let reporter = reporter(&folder);
    let tell = |device: &str, errno, outcome: fn(String) -> Outcome| {
        let failed = Failure { device: device.into(), ..failure(errno, 4) };
        let report = diagnose(&machine, failed, true, bad(&[1]));
        reporter.tell(&report, &outcome("so it is".to_owned()))
    };
    let told = |device, errno| tell(device, errno, Outcome::GoesOn);
    assert!(told("mlx5_0:1", libc::ENOMEM));
    assert!(!told("mlx5_0:1", libc::ENOMEM));
    assert!(told("mlx5_1:1", libc::ENOMEM));
    assert!(told("mlx5_0:1", libc::EFAULT));
    assert_eq!(names(&folder), (0..4).map(name).collect::<Vec<_>>());
    for number in 0..4 {
        let path = folder.join(name(number));
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.permissions().mode() & 0o7777, meta.nlink()), (0o600, 1));
        let json: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(json["schema"], "pinrail-registration");
    }
    // What happens for ever writes a bounded number, and what happens then is still recorded.
    let many = |errno, outcome| {
        for _ in 0..100 {
            tell("mlx5_0:1", errno, outcome);
        }
        names(&folder).len()
    };
    assert_eq!(many(libc::ENOMEM, Outcome::GoesOn), 16 + 1);
    assert_eq!(many(libc::ENOMEM, Outcome::Fails), 32 + 1);
    assert_eq!(many(libc::EFAULT, Outcome::GoesOn), 48);
    told("mlx5_0:1", libc::ENOSPC);
    assert_eq!(names(&folder).len(), 49);
    assert_eq!(many(libc::EIO, Outcome::GoesOn), 64);
    told("mlx5_0:1", libc::ENOSPC);
    assert_eq!(names(&folder), sorted((0..64).map(name)));
}

fn sorted(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Keeps the events of this thread as level and text, message and fields in their order.
#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<(Level, String)>>>);

impl tracing::Subscriber for Captured {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push((*event.metadata().level(), text.0));
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn one_event_tells_it_all() {
    let (tree, machine) = machine(&[KHO]);
    let report = diagnose(&machine, failure(libc::ENOMEM, 4), true, bad(&[1]));
    let captured = Captured::default();
    tracing::subscriber::with_default(captured.clone(), || {
        let here = reporter(tree.root());
        let goes_on = Outcome::GoesOn("copied through an arena".to_owned());
        here.tell(&report, &goes_on);
        here.tell(&report, &goes_on);
        // The same cause, but now something fails: that is not hidden behind the warning that all is well.
        here.tell(&report, &Outcome::Fails("no room".to_owned()));
        let nowhere = reporter(&tree.root().join("absent"));
        nowhere.tell(&report, &goes_on);
        nowhere.tell(&report, &goes_on);
    });
    let events = captured.0.lock().unwrap();
    let levels: Vec<Level> = events.iter().map(|(level, _)| *level).collect();
    assert_eq!(
        levels,
        [Level::WARN, Level::DEBUG, Level::WARN, Level::WARN, Level::WARN, Level::DEBUG]
    );
    let record = tree.root().join(name(0));
    let fields = format!(
        "message={}. Meanwhile: copied through an arena. Asked for: {} cause=\"placement\" confidence=\"likely\" errno=12 record={} ",
        report.line(),
        report.asked(),
        record.display()
    );
    assert_eq!(events[0].1, fields);
    assert!(events[3].1.contains("(PINRAIL_REPORT_DIR): No such file"), "{}", events[3].1);
    assert!(events[4].1.contains("record=none"), "{}", events[4].1);
}

#[test]
fn no_file_is_followed_or_replaced() {
    let (tree, machine) = machine(&[]);
    let folder = tree.root().join("reports");
    fs::create_dir(&folder).unwrap();
    let victim = tree.root().join("victim");
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, folder.join(name(0))).unwrap();
    symlink(&victim, folder.join(format!(".{}.tmp", name(0)))).unwrap();
    fs::write(folder.join(name(1)), "older").unwrap();
    let report = diagnose(&machine, failure(libc::EIO, 4), true, never);
    reporter(&folder).tell(&report, &Outcome::GoesOn("the test goes on".to_owned()));
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert_eq!(fs::read_to_string(folder.join(name(1))).unwrap(), "older");
    let json: Value =
        serde_json::from_str(&fs::read_to_string(folder.join(name(2))).unwrap()).unwrap();
    assert_eq!(json["verdict"]["cause"], "unknown");
    assert_eq!(names(&folder).len(), 4);
}

#[test]
fn a_folder_that_is_not_there_is_no_error() {
    let (tree, machine) = machine(&[]);
    let report = diagnose(&machine, failure(libc::EIO, 4), true, never);
    let reporter = reporter(&tree.root().join("absent"));
    let goes_on = Outcome::GoesOn("the test goes on".to_owned());
    assert!(reporter.tell(&report, &goes_on));
    assert!(!reporter.tell(&report, &goes_on));
    assert!(Reporter::default().tell(&report, &goes_on));
}

#[test]
fn this_machine_is_read() {
    let memory = crate::memory::PageOwned::new(1, crate::memory::ledger::Purpose::Probe).unwrap();
    let failed = Failure { address: memory.addr() as u64, ..failure(libc::EFAULT, 1) };
    let report = diagnose(&Machine::default(), failed, true, never);
    let json = report.json();
    assert_eq!(json["range"]["permissions"], "rw-p");
    assert_eq!(json["range"]["unmapped_at"], Value::Null);
    assert!(json["memory"]["total_bytes"].as_u64().unwrap() > 0);
    assert!(json["kernel"]["release"].is_string());
}

proptest! {
    #[test]
    fn hostile_files_never_panic(
        text in "(\\PC{0,30}[:= \n\t]{0,3}){0,20}",
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        errno in prop::sample::select(vec![libc::ENOMEM, libc::EFAULT, libc::EINVAL, libc::EAGAIN, libc::EBADF, -1, 0]),
        (address, length, offset) in (any::<u64>(), any::<u64>(), any::<u64>()),
        kind in prop::sample::select(vec![RegionKind::Host, RegionKind::Cuda, RegionKind::DmaBuf]),
        number in "[0-9]{1,21}",
    ) {
        let (tree, machine) = machine(&[
            ("proc/cmdline", &text),
            ("proc/driver/nvidia/version", &format!("NVRM version: {text} {number}.{number}")),
            ("proc/self/fdinfo/33", &format!("size: {number}\nexp_name:{text}")),
            ("proc/self/cgroup", &format!("0::/{text}\n{number}:rdma:/{number}")),
            ("proc/meminfo", &format!("MemAvailable: {number} kB\nCmaTotal: {number} kB\nCmaFree: {number} kB\n{text}")),
            ("proc/zoneinfo", &format!("Node 0, zone Movable\n managed {number}\n cma {number}\n nr_free_cma {number}\n")),
            ("proc/self/status", &format!("VmPin: {number} kB\n{text}")),
            ("proc/self/limits", &format!("Max locked memory {number} {number} bytes\n{text}")),
            ("sys/fs/cgroup/rdma.max", &format!("mlx5_0 hca_object={number}\n{text}")),
            ("sys/fs/cgroup/memory.max", &number),
            ("sys/fs/cgroup/memory.current", &text),
            ("sys/fs/cgroup/memory.stat", &format!("inactive_file {number}\nactive_file {text}")),
        ]);
        tree.write("proc/self/maps", &bytes);
        tree.write("proc/self/mountinfo", &bytes);
        tree.write("proc/pagetypeinfo", &bytes);
        tree.write("proc/self/pagemap", &bytes);
        let failed = Failure { address, length, offset, kind, fd: Some(33), own_pinned: Some(offset), ..failure(errno, 1) };
        // Small fresh memory only: what is probed is not the point here.
        let report = diagnose(&machine, failed, true, at_most(0));
        prop_assert!(!report.line().contains(char::is_control));
        prop_assert!(report.json().is_object());
    }
}
