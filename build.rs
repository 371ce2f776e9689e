//! Sets the soname of the plugin.
fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-pinrail.so");
}
