//! Compiles the null provider, a shared object that the bench carries inside itself and writes out when it counts
//! instructions.
use std::path::PathBuf;
use std::process::Command;

const NULL_SOURCES: [&str; 4] = ["null/data.c", "null/device.c", "null/memory.c", "null/objects.c"];

fn main() {
    for path in NULL_SOURCES.iter().chain(&["null/null.h", "null/null.map"]) {
        println!("cargo:rerun-if-changed={path}");
    }
    build_null_provider();
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().map(|output| output.stdout);
    let version = version.ok().and_then(|text| String::from_utf8(text).ok()).unwrap_or_default();
    println!("cargo:rustc-env=BENCH_RUSTC_VERSION={}", version.trim());
}

fn build_null_provider() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // Cargo has this folder searched for libraries when it runs a test: under its own name nobody takes it for the system's.
    let library = out.join("null_provider.so");
    let mut command = cc::Build::new().opt_level(2).get_compiler().to_command();
    command.args(["-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-shared"]);
    command.args(["-Wl,-soname,libibverbs.so.1", "-Wl,--version-script=null/null.map"]);
    command.args(NULL_SOURCES).arg("-lpthread").arg("-o").arg(&library);
    let status = command.status().expect("the C compiler can be started");
    assert!(
        status.success(),
        "the null provider does not compile; it needs the headers of libibverbs-dev"
    );
}
