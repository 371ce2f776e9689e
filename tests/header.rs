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
