//! Sets the soname, and writes the C header of the `pinrail_*` functions into the build folder, from where a test
//! compares it with the one in `include/`. Writes nothing into the source tree.

use std::env;
use std::path::PathBuf;

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-pinrail.so");
    println!("cargo:rerun-if-changed=build.rs");
    let target = |what: &str| env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    if (target("ENV"), target("ARCH")) == ("gnu".into(), "x86_64".into()) {
        // Where glibc before 2.34 has the names of plugin/glibc.rs.
        println!(
            "cargo:rustc-cdylib-link-arg=-Wl,--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,--pop-state"
        );
    }
    println!("cargo:rerun-if-changed=plugin/capi.rs");
    println!("cargo:rerun-if-changed=cbindgen.toml");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let config =
        cbindgen::Config::from_file("cbindgen.toml").expect("cbindgen.toml is in the repository");
    cbindgen::Builder::new()
        .with_config(config)
        .with_src("plugin/capi.rs")
        .generate()
        .expect("plugin/capi.rs is plain C-compatible code")
        .write_to_file(out.join("pinrail.h"));
}
