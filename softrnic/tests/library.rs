//! The shared object as such: its symbols, its layouts against the system's header, and its manners under abuse.

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::mem::offset_of;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{Guarded, client, compile, fabric, finish, lib_dir};
use softrnic::abi::*;

fn output(name: &str, args: &[&str], input: &str) -> (bool, String) {
    let program = compile(name);
    let mut command = client(program.to_str().expect("UTF-8 path"), &fabric(name));
    let mut child = Guarded(command.args(args).stdin(Stdio::piped()).spawn().expect("starts"));
    child.0.stdin.take().expect("stdin").write_all(input.as_bytes()).expect("program reads");
    finish(child, Instant::now() + Duration::from_secs(120))
}

#[test]
fn every_listed_symbol_is_found_under_its_version() {
    let list = include_str!("../symbols.txt");
    let wanted: Vec<&str> =
        list.lines().filter(|l| !l.starts_with('#') && l.contains(' ')).collect();
    assert!(wanted.len() > 200, "{}", wanted.len());
    // What NCCL and the plugin look up.
    for line in [
        "IBVERBS_1.1 ibv_open_device",
        "IBVERBS_1.8 ibv_reg_mr_iova2",
        "IBVERBS_1.10 ibv_query_ece",
        "IBVERBS_1.12 ibv_reg_dmabuf_mr",
        "IBVERBS_1.16 ibv_query_port_speed",
        "SOFTRNIC_1 softrnic_hold",
    ] {
        assert!(wanted.contains(&line), "{line} is not in the list");
    }
    for library in ["libibverbs.so.1", "libibverbs.so"] {
        let path = lib_dir().join(library);
        let (ok, text) =
            output("symbols", &[path.to_str().expect("UTF-8 path")], &wanted.join("\n"));
        assert!(ok, "{text}");
    }
    let (ok, text) =
        output("symbols", &[], "IBVERBS_1.1 ibv_no_such_call\nIBVERBS_1.1 ibv_reg_mr_iova2\n");
    assert!(
        !ok && text.lines().count() == 2,
        "an absent name and a wrong version are noticed: {text}"
    );
}

#[test]
fn nothing_else_is_exported() {
    let out = std::process::Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(lib_dir().join("libibverbs.so.1"))
        .output()
        .expect("nm starts");
    let text = String::from_utf8(out.stdout).expect("UTF-8");
    let stray: Vec<&str> = text
        .lines()
        .filter_map(|l| l.split_whitespace().last())
        .filter(|name| !name.contains("@IBVERBS_") && !name.contains("@SOFTRNIC_1"))
        .filter(|name| !name.starts_with("IBVERBS_") && !name.starts_with("SOFTRNIC_"))
        .collect();
    assert!(stray.is_empty(), "{stray:?}");
}

#[test]
fn layouts_match_the_header() {
    let (ok, text) = output("layout", &[], "");
    assert!(ok, "{text}");
    let header: BTreeMap<&str, usize> = text
        .lines()
        .filter_map(|l| l.split_once(' '))
        .map(|(name, n)| (name, n.parse().expect("number")))
        .collect();
    let mut checked = 0;
    let mut check = |name: &str, ours: usize| {
        assert_eq!(header.get(name).copied(), Some(ours), "{name}");
        checked += 1;
    };
    macro_rules! sizes { ($($name:literal $t:ty),+) => { $(check($name, size_of::<$t>());)+ } }
    sizes!(
        "ibv_device" IbvDevice, "ibv_context" IbvContext, "verbs_context" VerbsContext, "ibv_pd" IbvPd,
        "ibv_mr" IbvMr, "ibv_cq" IbvCq, "ibv_qp" IbvQp, "ibv_srq" IbvSrq, "ibv_wc" Wc, "ibv_sge" Sge,
        "ibv_recv_wr" RecvWr, "ibv_qp_init_attr" QpInitAttr, "ibv_ah_attr" AhAttr, "ibv_device_attr" DeviceAttr,
        "ibv_gid_entry" GidEntry, "ibv_comp_channel" IbvCompChannel, "ibv_async_event" AsyncEvent, "ibv_ece" Ece,
        "ibv_srq_init_attr" SrqInitAttr
    );
    macro_rules! offsets { ($($name:literal $t:ty, $f:ident);+) => { $(check($name, offset_of!($t, $f));)+ } }
    offsets!(
        "ibv_context.ops" IbvContext, ops; "ibv_context.async_fd" IbvContext, async_fd;
        "ibv_context.abi_compat" IbvContext, abi_compat; "verbs_context.sz" VerbsContext, sz;
        "verbs_context.context" VerbsContext, context; "ibv_qp.qp_num" IbvQp, qp_num; "ibv_qp.state" IbvQp, state;
        "ibv_cq.handle" IbvCq, handle; "ibv_srq.handle" IbvSrq, handle; "ibv_send_wr.opcode" SendWr, opcode;
        "ibv_send_wr.imm_data" SendWr, imm_data; "ibv_send_wr.wr.rdma.remote_addr" SendWr, remote_addr;
        "ibv_send_wr.wr.rdma.rkey" SendWr, rkey_or_compare; "ibv_send_wr.wr.atomic.compare_add" SendWr, rkey_or_compare;
        "ibv_send_wr.wr.atomic.swap" SendWr, swap; "ibv_send_wr.wr.atomic.rkey" SendWr, atomic_rkey;
        "ibv_qp_attr.qp_access_flags" QpAttr, qp_access_flags; "ibv_qp_attr.cap" QpAttr, cap;
        "ibv_qp_attr.ah_attr" QpAttr, ah_attr; "ibv_qp_attr.pkey_index" QpAttr, pkey_index;
        "ibv_qp_attr.max_rd_atomic" QpAttr, max_rd_atomic; "ibv_qp_attr.port_num" QpAttr, port_num;
        "ibv_qp_attr.timeout" QpAttr, timeout; "ibv_qp_attr.alt_timeout" QpAttr, alt_timeout;
        "ibv_ah_attr.dlid" AhAttr, dlid; "ibv_ah_attr.is_global" AhAttr, is_global;
        "ibv_ah_attr.port_num" AhAttr, port_num; "ibv_device_attr.max_qp" DeviceAttr, max_qp;
        "ibv_device_attr.atomic_cap" DeviceAttr, atomic_cap; "ibv_device_attr.phys_port_cnt" DeviceAttr, phys_port_cnt;
        "ibv_port_attr.gid_tbl_len" PortAttr, gid_tbl_len; "ibv_port_attr.lid" PortAttr, lid;
        "ibv_port_attr.link_layer" PortAttr, link_layer; "ibv_wc.wc_flags" Wc, wc_flags
    );
    let ops = offset_of!(IbvContext, ops);
    for (name, index) in [
        ("poll_cq", OP_POLL_CQ),
        ("req_notify_cq", OP_REQ_NOTIFY_CQ),
        ("post_srq_recv", OP_POST_SRQ_RECV),
        ("post_send", OP_POST_SEND),
        ("post_recv", OP_POST_RECV),
    ] {
        check(&format!("ibv_context.ops.{name}"), ops + 8 * index);
    }
    for (name, index) in [
        ("query_port", EXT_QUERY_PORT),
        ("query_device_ex", EXT_QUERY_DEVICE_EX),
        ("create_qp_ex", EXT_CREATE_QP_EX),
        ("get_srq_num", EXT_GET_SRQ_NUM),
        ("create_srq_ex", EXT_CREATE_SRQ_EX),
    ] {
        check(&format!("verbs_context.{name}"), 8 * index);
    }
    assert_eq!(checked, header.len(), "every line of the C program is compared");
}

#[test]
fn a_hostile_application_gets_errors() {
    let (ok, text) = output("garbage", &[], "");
    assert!(ok && text.ends_with("survived\n"), "{text}");
}

#[test]
fn scribbled_shared_memory_does_not_take_the_process_down() {
    let (garbage, scribble) = (compile("garbage"), compile("scribble"));
    let fabric = fabric("scribble");
    let command =
        |program: &std::path::Path| client(program.to_str().expect("UTF-8 path"), &fabric);
    let victim = Guarded(command(&garbage).spawn().expect("victim starts"));
    let mut attacker = command(&scribble);
    let attacker =
        Guarded(attacker.arg(victim.0.id().to_string()).spawn().expect("attacker starts"));
    let (ok, text) = finish(victim, Instant::now() + Duration::from_secs(240));
    assert!(ok && text.ends_with("survived\n"), "{text}");
    let (_, text) = finish(attacker, Instant::now() + Duration::from_secs(60));
    assert_eq!(text, "scribbling\n", "the attack took place");
}

#[test]
fn twenty_loads_leave_nothing_and_a_forked_child_starts_afresh() {
    let path = lib_dir().join("libibverbs.so.1");
    let program = compile("lifecycle");
    let mut command = client(program.to_str().expect("UTF-8 path"), &fabric("lifecycle"));
    // Linked against nothing of ours at run time: the program decides when the library comes and goes.
    let child = Guarded(command.env_remove("LD_LIBRARY_PATH").arg(&path).spawn().expect("starts"));
    let (ok, text) = finish(child, Instant::now() + Duration::from_secs(120));
    assert!(ok, "{text}");
    assert_eq!(text, "threads 1 fds 0 mappings 0\nchild 0\n");
}

#[test]
fn bad_settings_are_reported_and_replaced() {
    let mut command = client("ibv_devinfo", &fabric("settings"));
    command.arg("-v").envs([
        ("SOFTRNIC_MAX_QP", "0"),
        ("SOFTRNIC_MTU", "many"),
        ("SOFTRNIC_GIDS", "10.0.0.7,nonsense"),
        ("SOFTRNIC_LINK", "token-ring"),
        ("SOFTRNIC_SPEED", "64,fast"),
        ("SOFTRNIC_COLOUR", "red"),
    ]);
    let (ok, text) =
        finish(Guarded(command.spawn().expect("starts")), Instant::now() + Duration::from_secs(60));
    assert!(ok, "{text}");
    for wanted in [
        "SOFTRNIC_MAX_QP=0: outside 1..=65535; using 1",
        "SOFTRNIC_MTU=many: not a number; using 4096",
        "SOFTRNIC_GIDS=nonsense",
        "SOFTRNIC_LINK=token-ring: not ethernet or ib",
        "SOFTRNIC_SPEED=64,fast: not a code from 1 to 1024, or a comma list of them; using 32",
        "unknown setting SOFTRNIC_COLOUR",
        "max_qp:\t\t\t\t1\n",
        "::ffff:10.0.0.7",
    ] {
        assert!(text.contains(wanted), "{wanted:?} missing in\n{text}");
    }
}

#[test]
fn the_readme_lists_every_setting() {
    use softrnic::env::{NUMBERS, TEXTS};
    let readme = include_str!("../README.md");
    let rows: Vec<&str> = readme.lines().filter(|l| l.starts_with("| `SOFTRNIC_")).collect();
    let docs = NUMBERS.iter().map(|n| (n.name, n.doc)).chain(TEXTS.iter().map(|t| (t.name, t.doc)));
    let mut listed = 0;
    for (name, doc) in docs {
        let wanted = doc.replace('|', "\\|");
        let row = rows.iter().find(|r| r.starts_with(&format!("| `SOFTRNIC_{name}` |")));
        assert!(row.is_some_and(|r| r.ends_with(&format!("| {wanted} |"))), "{name}: {row:?}");
        listed += 1;
    }
    assert_eq!(rows.len(), listed, "no row without a setting");
    for one in NUMBERS {
        let wanted =
            format!("| `SOFTRNIC_{}` | `{}`, {} to {} |", one.name, one.default, one.min, one.max);
        assert!(rows.iter().any(|row| row.starts_with(&wanted)), "README.md lacks {wanted}");
    }
}
