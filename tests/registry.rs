//! The registry on the software RNIC: threads that register and drop at once leave nothing behind.

mod common;

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;
use std::thread;

use nccl_net_pinrail::memory::ledger::Purpose;
use nccl_net_pinrail::memory::{Extent, PageOwned, Registry};
use nccl_net_pinrail::verbs::context::DeviceList;
use nccl_net_pinrail::verbs::mr::Access;
use nccl_net_pinrail::verbs::{ProtectionDomain, Verbs};

const THREADS: usize = 4;
const ROUNDS: usize = 2000;
const PAGES: usize = 16;

/// A counter of the software RNIC in this process, in the library that [`Verbs`] has loaded.
fn counter(name: &str) -> u64 {
    let path = CString::new(common::softrnic().to_str().expect("a path of text"))
        .expect("a path without NUL");
    // SAFETY: NOLOAD gives the instance that is there, whose initialisers ran.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!library.is_null(), "the software RNIC is not loaded");
    // SAFETY: a live library and a NUL-terminated name.
    let symbol = unsafe { libc::dlsym(library, c"softrnic_counter".as_ptr()) };
    assert!(!symbol.is_null());
    // SAFETY: the signature in softrnic/include/softrnic.h.
    let ask = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(symbol)
    };
    let name = CString::new(name).expect("a name without NUL");
    // SAFETY: a NUL-terminated name.
    unsafe { ask(name.as_ptr()) }
}

#[test]
fn registering_from_four_threads_leaves_nothing() {
    let verbs = Verbs::load(Some(&common::softrnic())).expect("the software RNIC loads");
    let list = DeviceList::get(&verbs).expect("devices are listed");
    let context = list.open(0).expect("the device opens");
    let pd = ProtectionDomain::new(&context).expect("a protection domain is made");
    let registry = Registry::new(&pd);
    let memory = Arc::new(PageOwned::new(PAGES * 4096, Purpose::Probe).expect("memory is mapped"));
    let page = memory.len() / PAGES;

    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (registry, memory) = (Arc::clone(&registry), Arc::clone(&memory));
            scope.spawn(move || {
                // A different walk in each thread, all over the same few pages: equal, contained, overlapping.
                let mut state = thread * 7919 + 1;
                let mut next = |limit: usize| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 33) % limit
                };
                let mut held = Vec::new();
                for _ in 0..ROUNDS {
                    let first = next(PAGES);
                    let len = (1 + next(PAGES - first)) * page - next(page / 2);
                    let access = if next(2) == 0 { Access::BULK } else { Access::BULK.relaxed() };
                    let part = Extent::of_own(&memory).part(memory.addr() + first * page, len);
                    let got = registry
                        .register(part.expect("a part of the memory"), access)
                        .expect("memory of our own registers");
                    assert_ne!(got.lkey(), 0);
                    held.push(got);
                    if held.len() > 8 {
                        held.swap_remove(next(held.len()));
                    }
                }
            });
        }
    });

    let (made, shared) = registry.counts();
    assert_eq!(made + shared, (THREADS * ROUNDS) as u64);
    assert!(shared > 0, "nothing was shared");
    assert_eq!(registry.live(), 0);
    assert_eq!(counter("mrs_live"), 0);
    assert_eq!(counter("reg_mr"), counter("dereg_mr"));
    // A registration that lost a race was made and dropped again; it is in the device's count, not in the registry's.
    assert!(counter("reg_mr") >= made);
}
