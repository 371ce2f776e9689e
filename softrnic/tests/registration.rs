//! What a registration meets besides its pages: quota, mappings, limits and settings. Each case is a process of its own,
//! because settings are read once and limits and capabilities belong to the process.

mod common;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::{Guarded, client, compile, fabric, finish};
use softrnic::ledger::pages::page_size;

/// Runs `tests/c/register.c` with settings; returns what it printed.
fn run(settings: &[(&str, &str)], words: &str) -> String {
    static PROGRAM: OnceLock<std::path::PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| compile("register"));
    let mut command = client(program.to_str().expect("UTF-8 path"), &fabric("register"));
    command.envs(settings.iter().copied()).args(words.split_whitespace());
    let child = Guarded(command.spawn().expect("starts"));
    let (ok, text) = finish(child, Instant::now() + Duration::from_secs(60));
    assert!(ok, "{words}: {text}");
    text
}

/// As [`run`], in one line.
fn line(settings: &[(&str, &str)], words: &str) -> String {
    run(settings, words).lines().collect::<Vec<_>>().join(", ")
}

#[test]
fn without_a_quota_everything_may_be_registered() {
    let words = "lose limit:1 map:8 reg:0:8 reg:0:8 pinned dereg pinned";
    assert_eq!(line(&[], words), "reg ok, reg ok, pinned 16, pinned 8");
}

#[test]
fn a_quota_in_bytes_counts_each_region_in_whole_pages() {
    let bytes = (4 * page_size() + page_size() - 1).to_string();
    let settings = [("SOFTRNIC_MEMLOCK", bytes.as_str())];
    assert_eq!(line(&settings, "map:8 reg:0:5 pinned reg:0:4 pinned"), {
        "reg ENOMEM, pinned 0, reg ok, pinned 4"
    });
    assert_eq!(
        line(&settings, "map:8 reg:0:2 reg:0:2 reg:0:1 pinned dereg reg:5:1 pinned"),
        "reg ok, reg ok, reg ENOMEM, pinned 4, reg ok, pinned 3",
        "two regions of one page count twice, and what is given back can be used again"
    );
    assert_eq!(
        line(&settings, "map:8 pin:0:8 reg:0:4 unpin:0:8"),
        "pin ok, reg ok, unpin ok",
        "pins of other drivers do not count"
    );
    let nothing = [("SOFTRNIC_MEMLOCK", "0")];
    assert_eq!(line(&nothing, "map:1 reg:0:1 pinned"), "reg EPERM, pinned 0");
}

#[test]
fn the_resource_limit_holds_without_the_capability() {
    let settings = [("SOFTRNIC_MEMLOCK", "rlimit")];
    assert_eq!(
        line(&settings, "lose limit:2:100 map:8 reg:0:3 reg:0:2 reg:0:1 limit:3 reg:0:1 pinned"),
        "reg ENOMEM, reg ok, reg ENOMEM, reg ok, pinned 3",
        "read at each registration"
    );
    assert_eq!(line(&settings, "lose limit:0 map:1 reg:0:1"), "reg EPERM");
    let text = line(&settings, "gain limit:2 map:8 reg:0:8 pinned limit:0 reg:0:1");
    match text.strip_prefix("capable 1, ") {
        Some(rest) => assert_eq!(rest, "reg ok, pinned 8, reg ok"),
        None => {
            eprintln!("CAP_IPC_LOCK cannot be had here, not even in a user namespace");
            assert_eq!(text, "capable 0, reg ENOMEM, pinned 0, reg EPERM");
        }
    }
}

#[test]
fn a_forked_child_has_a_quota_and_pages_of_its_own() {
    let bytes = (4 * page_size()).to_string();
    let settings = [("SOFTRNIC_MEMLOCK", bytes.as_str()), ("SOFTRNIC_CMA", "all")];
    assert_eq!(
        line(&settings, "map:4 pin:3:1 reg:0:3 reg:0:4 child kinds reg:0:4 pinned"),
        "pin ok, reg ok, reg ENOMEM, kinds 4444, reg ok, pinned 4"
    );
}

#[test]
fn what_cannot_be_registered_says_so_in_the_kernels_order() {
    let two = (2 * page_size()).to_string();
    let quota = [("SOFTRNIC_MEMLOCK", two.as_str())];
    assert_eq!(
        line(&quota, "map:3 hole:1 reg:0:3 reg:0:2 reg:1:1 pinned"),
        "reg ENOMEM, reg EFAULT, reg EFAULT, pinned 0",
        "the quota comes before the pages"
    );
    let cma = [("SOFTRNIC_CMA", "all")];
    assert_eq!(
        line(&cma, "map:4 pin:0:1 hole:2 reg:0:4 reg:0:2 kinds"),
        "pin ok, reg EFAULT, reg ENOMEM, kinds 40-4",
        "the mappings come before the places"
    );
    let limit = [("SOFTRNIC_MR_LIMIT", "2"), ("SOFTRNIC_CMA", "all")];
    assert_eq!(
        line(&limit, "map:4 hole:3 reg:0:1 reg:0:1 reg:2:2 reg:1:1 kinds pinned dereg reg:1:1"),
        "reg ok, reg ok, reg EFAULT, reg ENOMEM, kinds 004-, pinned 2, reg ok",
        "the pages come before the device"
    );
    let most = [("SOFTRNIC_MAX_MR", "1")];
    assert_eq!(line(&most, "map:1 reg:0:1 reg:0:1"), "reg ok, reg ENOMEM");
}

#[test]
fn mappings_must_allow_the_access() {
    // PROT_READ is 1; access 1 writes, 4 only lets others read.
    assert_eq!(
        line(&[], "map:3 protect:1:1 reg:0:3 reg:1:1 reg:0:1 access:4 reg:0:3"),
        "reg EFAULT, reg EFAULT, reg ok, reg ok"
    );
    assert_eq!(
        line(&[], "map:3 protect:1:0 access:4 reg:0:3 reg:2:1"),
        "reg EFAULT, reg ok",
        "what cannot be read cannot be pinned"
    );
}

#[test]
fn a_device_may_refuse_relaxed_ordering() {
    let words = "map:1 access:0x100001 reg:0:1 access:1 reg:0:1";
    assert_eq!(line(&[], words), "reg ok, reg ok");
    assert_eq!(line(&[("SOFTRNIC_RELAXED_ORDERING", "no")], words), "reg EINVAL, reg ok");
    let others = "map:1 access:0x200001 reg:0:1";
    assert_eq!(line(&[("SOFTRNIC_RELAXED_ORDERING", "no")], others), "reg ok", "that bit alone");
}

#[test]
fn registrations_take_the_time_that_is_set() {
    let settings = [("SOFTRNIC_REG_US", "30"), ("SOFTRNIC_REG_PAGE_NS", "500")];
    assert_eq!(
        line(&settings, "map:8 delay reg:0:1 delay reg:0:8 delay"),
        "delay 0, reg ok, delay 30500, reg ok, delay 64500"
    );
    assert_eq!(line(&[], "map:1 reg:0:1 delay"), "reg ok, delay 0");
}

#[test]
fn bad_settings_are_reported_and_replaced() {
    let settings = [
        ("SOFTRNIC_CMA", "some"),
        ("SOFTRNIC_MEMLOCK", "much"),
        ("SOFTRNIC_RELAXED_ORDERING", "maybe"),
        ("SOFTRNIC_REG_US", "99999999999"),
        ("SOFTRNIC_REG_PAGE_NS", "-1"),
    ];
    let text = run(&settings, "map:1 kinds");
    for wanted in [
        "SOFTRNIC_CMA=some: not off, all, every=N or a comma list of hexadecimal ranges lo-hi; using off",
        "SOFTRNIC_MEMLOCK=much: not off, rlimit or a number of bytes; using off",
        "SOFTRNIC_RELAXED_ORDERING=maybe: not one of the choices; using yes",
        "SOFTRNIC_REG_US=99999999999: outside 0..=10000000; using 10000000",
        "SOFTRNIC_REG_PAGE_NS=-1: not a number; using 0",
        "kinds 1\n",
    ] {
        assert!(text.contains(wanted), "{wanted:?} missing in\n{text}");
    }
}
