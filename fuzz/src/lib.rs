//! What the fuzz targets share: where seeds go.

use std::path::PathBuf;

/// Puts seeds into the corpus of a target, before the fuzzer reads it. Seeds are made by the code under test, so that
/// they never fall behind the format.
pub fn plant(target: &str, seeds: impl IntoIterator<Item = Vec<u8>>) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    std::fs::create_dir_all(&folder).expect("the corpus folder can be made");
    for (number, seed) in seeds.into_iter().enumerate() {
        std::fs::write(folder.join(format!("seed-{number:03}")), seed)
            .expect("a seed can be written");
    }
}
