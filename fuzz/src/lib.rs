//! What the fuzz targets share: where seeds go, bytes taken one after another, and for those that call the plugin its
//! tables and the device below them.

pub mod bytes;
pub mod device;
pub mod net;

use std::path::{Path, PathBuf};

/// The folder of the fuzz targets.
fn home() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Puts seeds into the corpus of a target, before the fuzzer reads it. Seeds are made by the code under test, so that
/// they never fall behind the format.
pub fn plant(target: &str, seeds: impl IntoIterator<Item = Vec<u8>>) {
    let folder: PathBuf = home().join("corpus").join(target);
    std::fs::create_dir_all(&folder).expect("the corpus folder can be made");
    for (number, seed) in seeds.into_iter().enumerate() {
        std::fs::write(folder.join(format!("seed-{number:03}")), seed)
            .expect("a seed can be written");
    }
}
