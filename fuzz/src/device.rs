//! softrnic as the plugin under test sees it: chosen by settings, asked through its own calls.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// The settings of a target, before the plugin reads any; `library` is a path below the root of the repository.
pub fn settle(library: &str, settings: &[(&str, &str)]) {
    let path = super::home().join("..").join(library);
    assert!(path.exists(), "{} is missing: run `make`", path.display());
    let common = [
        ("SOFTRNIC_FABRIC", format!("fuzz-{}", std::process::id())),
        ("NCCL_IBVERBS_LIB", path.to_str().expect("a path of text").to_owned()),
        ("NCCL_SOCKET_IFNAME", "lo".into()),
        ("PINRAIL_LOG", std::env::var("FUZZ_LOG").unwrap_or_else(|_| "ERROR".into())),
        ("PINRAIL_INVENTORY", "off".into()),
        ("PINRAIL_CONNECT_TIMEOUT", "2".into()),
        ("SOFTRNIC_RETRY_MS", "1".into()),
    ];
    let own = settings.iter().map(|(name, value)| (*name, (*value).to_owned()));
    for (name, value) in common.into_iter().chain(own) {
        // SAFETY: the fuzzer has no other thread yet.
        unsafe { std::env::set_var(name, value) };
    }
}

/// A function of the library that the plugin has opened, or of what it stands on.
///
/// # Safety
/// `F` is its type.
unsafe fn function<F: Copy>(name: &str) -> F {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        let path =
            CString::new(std::env::var("NCCL_IBVERBS_LIB").expect("set before")).expect("a path");
        // SAFETY: a path that ends; the library is kept.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) }.addr()
    });
    let name = CString::new(name).expect("a name");
    // SAFETY: the handle is open and the name ends.
    let found = unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) };
    assert!(!found.is_null(), "the device has no {name:?}");
    // SAFETY: a function of this type by the caller's promise.
    unsafe { std::mem::transmute_copy(&found) }
}

/// What softrnic counts under a name.
pub fn counter(name: &str) -> u64 {
    static READ: OnceLock<unsafe extern "C" fn(*const c_char) -> u64> = OnceLock::new();
    // SAFETY: the type in softrnic.h.
    let read = READ.get_or_init(|| unsafe { function("softrnic_counter") });
    let name = CString::new(name).expect("a name");
    // SAFETY: the name ends.
    unsafe { read(name.as_ptr()) }
}

/// Replaces the fault plan.
pub fn faults(plan: &str) {
    let plan = CString::new(plan).expect("a plan");
    // SAFETY: the type in softrnic.h, and a text that ends.
    let rc = unsafe {
        function::<unsafe extern "C" fn(*const c_char) -> c_int>("softrnic_faults")(plan.as_ptr())
    };
    assert_eq!(rc, 0, "{plan:?}");
}

/// Takes the port of a device down or up, if the device is open.
pub fn port(device: usize, up: bool) {
    let name = CString::new(format!("softrnic{device}")).expect("a name");
    type Port = unsafe extern "C" fn(*const c_char, c_int, c_int) -> c_int;
    // SAFETY: the type in softrnic.h, and a text that ends.
    unsafe { function::<Port>("softrnic_port")(name.as_ptr(), 1, c_int::from(up)) };
}

/// Breaks the live queue pair of this number, counted from the oldest.
pub fn kill_queue_pair(which: usize) {
    let mut numbers = [0_u32; 64];
    // SAFETY: the types in softrnic.h; the array has room for what is asked for.
    unsafe {
        let list = function::<unsafe extern "C" fn(*mut u32, c_int) -> c_int>("softrnic_qps");
        let kill = function::<unsafe extern "C" fn(u32) -> c_int>("softrnic_kill_qp");
        let count = list(numbers.as_mut_ptr(), 64);
        let count = usize::try_from(count).unwrap_or(0).min(64);
        if count > 0 {
            kill(numbers[which % count]);
        }
    }
}

/// Pins memory for short, so that no registration of it succeeds, or ends that.
pub fn hold(memory: &mut [u8], hold: bool) {
    let (start, len) = (memory.as_mut_ptr().cast::<c_void>(), memory.len());
    // SAFETY: the types in softrnic.h; it looks at addresses only.
    unsafe {
        if hold {
            function::<unsafe extern "C" fn(*mut c_void, usize) -> c_int>("softrnic_forget")(
                start, len,
            );
            function::<unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int>("softrnic_pin")(
                start, len, 0,
            );
        } else {
            function::<unsafe extern "C" fn(*mut c_void, usize) -> c_int>("softrnic_unpin")(
                start, len,
            );
        }
    }
}

/// What polls go through: the real one, and what it would have been called with.
pub type Poll = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;
/// See [`Poll`].
pub type Script = unsafe extern "C" fn(Poll, *mut c_void, c_int, *mut c_void) -> c_int;

/// Lets polls go through a function; the library is the provider of this folder.
pub fn script(script: Option<Script>) {
    // SAFETY: the type in provider.c.
    unsafe { function::<unsafe extern "C" fn(Option<Script>)>("provider_script")(script) };
}

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

/// Threads and descriptors of this process.
pub fn census() -> (usize, usize) {
    (entries("/proc/self/task"), entries("/proc/self/fd"))
}

/// Nothing of the device is alive, and the process has what it had.
pub fn expect_nothing_left(before: (usize, usize)) {
    for name in ["qps_live", "cqs_live", "mrs_live", "pds_live", "contexts_live"] {
        assert_eq!(counter(name), 0, "{name}");
    }
    // A thread that was joined may be in the list for a moment.
    for _ in 0..1000 {
        if census().0 == before.0 {
            break;
        }
        std::thread::yield_now();
    }
    assert_eq!(census(), before, "threads and descriptors");
}
