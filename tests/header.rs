//! `include/pinrail.h`: it is what `plugin/capi.rs` says, and C and C++ programs can use it.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

fn checked_in() -> PathBuf {
    common::root().join("include/pinrail.h")
}

#[test]
fn the_header_is_the_generated_one() {
    let generated = std::fs::read_to_string(Path::new(env!("OUT_DIR")).join("pinrail.h"))
        .expect("build.rs writes the header");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(checked_in(), &generated).expect("the header can be written");
    }
    let here = std::fs::read_to_string(checked_in()).unwrap_or_default();
    assert!(here == generated, "include/pinrail.h is not what plugin/capi.rs gives: make header");
}

/// Opens the shipped library with types that come from the header alone.
const PROGRAM: &str = r#"
#include <pinrail.h>
#include <pinrail.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    void *symbol = library ? dlsym(library, "pinrail_version") : NULL;
    __typeof__(&pinrail_version) version;

    if (!symbol) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    memcpy(&version, &symbol, sizeof version);
    puts(version());
    return 0;
}
"#;

fn compiled_and_run(name: &str, compiler: &str, package: &str, standard: &str) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = folder.join(format!("{name}.{}", if compiler == "c++" { "cc" } else { "c" }));
    let program = folder.join(name);
    std::fs::write(&source, PROGRAM).expect("the source can be written");
    let include = common::root().join("include");
    let text = |path: &Path| path.to_str().expect("a path of text").to_owned();
    let (include, source, program) = (text(&include), text(&source), text(&program));
    let flags = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-I", &include, "-o", &program];
    let mut arguments = vec![standard];
    arguments.extend(flags);
    arguments.extend([source.as_str(), "-ldl"]);
    common::tool(compiler, package, &arguments);
    let done = Command::new(&program).arg(common::plugin()).output().expect("the program starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let version = concat!(env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(String::from_utf8_lossy(&done.stdout), version);
}

#[test]
fn c_programs_can_use_it() {
    compiled_and_run("header-c99", "cc", "gcc", "-std=c99");
}

#[test]
fn cxx_programs_can_use_it() {
    compiled_and_run("header-cxx", "c++", "g++", "-std=c++11");
}

/// The example of docs/host-memory.md, on a software RNIC that lets the process pin `limit` bytes.
fn example(limit: &str) -> std::process::Output {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let program = folder.join(format!("host-memory-{limit}"));
    let text = |path: &Path| path.to_str().expect("a path of text").to_owned();
    let (include, plugin) = (text(&common::root().join("include")), text(&common::plugin()));
    let (out, rpath) =
        (text(&program), format!("-Wl,-rpath,{}", text(&common::root().join("dist"))));
    let flags =
        ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I", &include, "-o", &out];
    let files = ["docs/examples/host_memory.c", plugin.as_str(), rpath.as_str()];
    common::tool("cc", "gcc", &[flags.as_slice(), &files].concat());
    Command::new(&program)
        .env("NCCL_IBVERBS_LIB", common::softrnic())
        .env("SOFTRNIC_FABRIC", format!("example-{}-{limit}", std::process::id()))
        .env("SOFTRNIC_MEMLOCK", limit)
        .output()
        .expect("the program starts")
}

#[test]
fn the_example_gets_memory() {
    let done = example("16777216");
    let (text, errors) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{errors}");
    assert!(text.starts_with("8388608 bytes at 0x"), "{text}");
    assert_eq!(errors, "", "nothing to warn about");
}

#[test]
fn the_example_says_why_not() {
    let done = example("4096");
    let errors = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{errors}");
    let lines: Vec<&str> = errors.lines().collect();
    let [told, said] = lines[..] else { panic!("{errors}") };
    // Without a logger the plugin's own line goes to stderr too.
    assert!(told.starts_with("NET/pinrail: ibv_reg_mr") && told.contains("Verdict: "), "{told}");
    assert!(told.contains("Meanwhile: the program gets no memory"), "{told}");
    assert_eq!(said, "pinrail_host_alloc: Cannot allocate memory");
}
