//! Compiles the variadic log callback, which stable Rust cannot define.

fn main() {
    println!("cargo:rerun-if-changed=src/net/logger.c");
    cc::Build::new().file("src/net/logger.c").warnings(true).compile("pinrail_client_logger");
}
