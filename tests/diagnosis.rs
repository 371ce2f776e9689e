//! The diagnosis of failed registrations on the software RNIC: real verbs fail for the cause that the verdict must name.
//!
//! Each case runs in a process of its own, because the software RNIC reads its settings once.

mod common;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::process::Command;
use std::sync::Arc;

use nccl_net_pinrail::host::procfs::Proc;
use nccl_net_pinrail::memory::diagnosis::{
    Cause, DeviceLimits, Failure, Live, Machine, Report, diagnose,
};
use nccl_net_pinrail::memory::ledger::Purpose;
use nccl_net_pinrail::memory::{PageOwned, RegionKind};
use nccl_net_pinrail::verbs::context::DeviceList;
use nccl_net_pinrail::verbs::mr::Access;
use nccl_net_pinrail::verbs::{MemoryRegion, ProtectionDomain, Verbs};

/// Runs this test again in a process with these variables, and there the case. True: this is that process.
fn alone(test: &str, variables: &[(&str, &str)]) -> bool {
    const MARK: &str = "PINRAIL_TEST_ALONE";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let out = Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", test, "--nocapture"])
        .env(MARK, "1")
        .envs(variables.iter().copied())
        .output()
        .expect("the test starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
    // A name that matches no test would pass as well.
    assert!(text(&out.stdout).contains("1 passed"), "{}", text(&out.stdout));
    false
}

/// A function of the software RNIC, in the instance that [`Verbs`] has loaded.
fn function(name: &CStr) -> *mut c_void {
    let path = CString::new(common::softrnic().to_str().expect("a path of text")).expect("no NUL");
    // SAFETY: NOLOAD gives the instance that is there, whose initialisers ran.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!library.is_null(), "the software RNIC is not loaded");
    // SAFETY: a live library and a NUL-terminated name.
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!symbol.is_null(), "{name:?}");
    symbol
}

fn counter(name: &CStr) -> u64 {
    // SAFETY: the signature in softrnic/include/softrnic.h.
    unsafe {
        let ask: unsafe extern "C" fn(*const c_char) -> u64 =
            std::mem::transmute(function(c"softrnic_counter"));
        ask(name.as_ptr())
    }
}

/// Pins as CUDA does.
fn pin(memory: &PageOwned, page: usize, pages: usize, long: bool) {
    let size = nccl_net_pinrail::memory::page::page_size();
    // SAFETY: the signature in softrnic/include/softrnic.h; the memory is mapped.
    let rc = unsafe {
        let pin: unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int =
            std::mem::transmute(function(c"softrnic_pin"));
        pin((memory.addr() + page * size) as *mut c_void, pages * size, long.into())
    };
    assert_eq!(rc, 0);
}

/// Where pages that nobody asked about yet lie.
fn place(map: &CStr) {
    // SAFETY: the signature in softrnic/include/softrnic.h.
    let rc = unsafe {
        let set: unsafe extern "C" fn(*const c_char) -> c_int =
            std::mem::transmute(function(c"softrnic_cma"));
        set(map.as_ptr())
    };
    assert_eq!(rc, 0);
}

fn domain() -> Arc<ProtectionDomain> {
    let verbs = Verbs::load(Some(&common::softrnic())).expect("the software RNIC loads");
    let list = DeviceList::get(&verbs).expect("devices are listed");
    let context = list.open(0).expect("the device opens");
    ProtectionDomain::new(&context).expect("a protection domain is made")
}

fn register(pd: &Arc<ProtectionDomain>, addr: usize, len: usize) -> Result<MemoryRegion, i32> {
    MemoryRegion::register(pd, addr, len, Access::BULK)
        .map_err(|error| error.errno().expect("a verb's errno"))
}

/// Registers what must fail, and explains it in full.
fn explain(
    pd: &Arc<ProtectionDomain>,
    machine: &Machine,
    addr: usize,
    len: usize,
    live: u64,
) -> Report {
    explain_as(pd, machine, addr, len, live, true)
}

fn explain_as(
    pd: &Arc<ProtectionDomain>,
    machine: &Machine,
    addr: usize,
    len: usize,
    live: u64,
    thorough: bool,
) -> Report {
    let errno = register(pd, addr, len).expect_err("this registration fails");
    let attr = pd.context().query_device().expect("the device answers");
    let failure = Failure {
        verb: "ibv_reg_mr",
        errno,
        access: Access::BULK.bits().cast_unsigned(),
        optional_demanded: false,
        retry: None,
        address: addr as u64,
        length: len as u64,
        kind: RegionKind::Host,
        fd: None,
        offset: 0,
        device: pd.context().name().to_owned(),
        limits: DeviceLimits {
            max_mr: u64::try_from(attr.max_mr).ok(),
            max_mr_size: Some(attr.max_mr_size),
        },
        live: Live { regions: live, ..Live::default() },
        own_pinned: Some(counter(c"pinned_bytes")),
        held: Vec::new(),
        direction: None,
        peer: None,
        comm: None,
    };
    let before = counter(c"mrs_live");
    let report = diagnose(machine, failure, thorough, |candidate| {
        let (addr, len) = candidate.range();
        register(pd, addr, len)
    });
    assert_eq!(counter(c"mrs_live"), before, "the probe leaves nothing behind");
    println!("{}", report.line());
    report
}

#[test]
fn the_matrix_of_two_pins() {
    if !alone("the_matrix_of_two_pins", &[]) {
        return;
    }
    let pd = domain();
    let machine = Machine::default();
    let pages = |n: usize| {
        PageOwned::new(n * nccl_net_pinrail::memory::page::page_size(), Purpose::Probe)
            .expect("memory")
    };
    place(c"all");
    let (a, b, c) = (pages(64), pages(64), pages(64));
    // A: nobody was first. C: whoever was first said that it is for long.
    drop(register(&pd, a.addr(), a.len()).expect("case A registers"));
    pin(&c, 0, 64, true);
    drop(register(&pd, c.addr(), c.len()).expect("case C registers"));
    // B: a short pin was first, here on pages 5, 9, 10 and 40.
    for page in [5, 9, 10, 40] {
        pin(&b, page, 1, false);
    }
    let report = explain(&pd, &machine, b.addr(), b.len(), 0);
    assert_eq!(report.verdict().cause, Cause::Placement);
    assert!(report.bounce_may_help(false) && !report.transient());
    let json = report.json();
    let at = |page: usize| {
        format!("{:#x}", b.addr() + page * nccl_net_pinrail::memory::page::page_size())
    };
    assert_eq!(json["probe"]["first_failing_page"], at(5));
    assert_eq!(json["probe"]["last_failing_page"], at(40));
    assert_eq!(json["probe"]["failing_pages"], 4);
    assert_eq!(json["probe"]["failing_pages_exact"], true);
    // The short form names no page and the same cause.
    let report = explain_as(&pd, &machine, b.addr(), b.len(), 0, false);
    assert_eq!(report.verdict().cause, Cause::Placement);
    assert!(report.bounce_may_help(false) && !report.transient());
    let json = report.json();
    assert_eq!(json["probe"]["registrations"], 3);
    assert_eq!(json["probe"]["cut_short_by"], "told before");
    // D: an ordinary page.
    place(c"off");
    let d = pages(64);
    pin(&d, 0, 64, false);
    drop(register(&pd, d.addr(), d.len()).expect("case D registers"));
}

#[test]
fn a_quota_is_no_placement() {
    if !alone("a_quota_is_no_placement", &[("SOFTRNIC_MEMLOCK", "1048576")]) {
        return;
    }
    let pd = domain();
    // The process as the software RNIC treats it: with that limit and without privileges.
    let root = std::env::temp_dir().join(format!("pinrail-diagnosis-{}", std::process::id()));
    std::fs::create_dir_all(root.join("self")).expect("a folder");
    let write = |file: &str, text: &str| std::fs::write(root.join(file), text).expect("a file");
    write("self/limits", "Max locked memory 1048576 1048576 bytes\n");
    write("self/status", "VmPin: 0 kB\nCapEff: 0000000000000000\n");
    let machine = Machine { proc: Proc::at(&root), ..Machine::default() };
    let held = PageOwned::new(512 << 10, Purpose::Probe).expect("memory");
    let more = PageOwned::new(768 << 10, Purpose::Probe).expect("memory");
    let first = register(&pd, held.addr(), held.len()).expect("half of the limit registers");
    let report = explain(&pd, &machine, more.addr(), more.len(), 1);
    assert_eq!(report.verdict().cause, Cause::MemlockQuota);
    assert!(report.line().contains("pinned before 512 KiB (registered by this process)"));
    drop(first);
    // Room again: the same range registers.
    drop(register(&pd, more.addr(), more.len()).expect("three quarters of the limit register"));
    std::fs::remove_dir_all(&root).expect("the folder goes");
}

#[test]
fn a_full_device_is_no_quota() {
    if !alone("a_full_device_is_no_quota", &[("SOFTRNIC_MAX_MR", "8")]) {
        return;
    }
    let pd = domain();
    let memory = PageOwned::new(1, Purpose::Probe).expect("memory");
    let held: Vec<_> = (0..8)
        .map(|_| register(&pd, memory.addr(), memory.len()).expect("up to the limit"))
        .collect();
    let report = explain(&pd, &Machine::default(), memory.addr(), memory.len(), held.len() as u64);
    assert_eq!(report.verdict().cause, Cause::DeviceLimit);
    assert!(report.line().contains("8 registrations, the device allows 8"), "{}", report.line());
}

#[test]
fn addresses_that_cannot_be_used() {
    if !alone("addresses_that_cannot_be_used", &[]) {
        return;
    }
    let pd = domain();
    let memory = PageOwned::new(1, Purpose::Probe).expect("memory");
    // The page behind it is inaccessible, and then there is nothing.
    let report = explain(&pd, &Machine::default(), memory.addr(), memory.len() + 1, 0);
    assert_eq!(report.verdict().cause, Cause::BadAddress);
    assert!(report.line().contains("cannot be written"), "{}", report.line());
    let report = explain(&pd, &Machine::default(), 0x1000, 4096, 0);
    assert_eq!(report.verdict().cause, Cause::BadAddress);
    assert!(report.line().contains("nothing is mapped"), "{}", report.line());
}
