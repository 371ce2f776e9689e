//! `pinrail ab` with the bench as the command, on softrnic.

mod common;

use serde_json::Value;
use std::path::Path;
use std::process::Command;

#[test]
fn two_files_are_compared_in_turns() {
    let [pinrail, plugin, verbs] =
        ["pinrail", "libnccl-net-pinrail.so", "softrnic/libibverbs.so.1"].map(common::dist);
    let page = common::scratch("ab.html");
    let output = Command::new(pinrail)
        .args(["ab", "--json", "-n", "2", "--b-env", "NCCL_IB_USE_INLINE=0", "--html"])
        .arg(&page)
        .args([Path::new("--a"), &plugin, Path::new("--b"), &plugin, Path::new("--")])
        .arg(env!("CARGO_BIN_EXE_pinrail-bench"))
        .args(["-b", "8", "-e", "128", "-f", "16", "--rounds", "1", "--pass-ms", "5"])
        .arg("--verbs-lib")
        .arg(verbs)
        .output()
        .expect("the command runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let value: Value = serde_json::from_str(&text)
        .unwrap_or_else(|e| panic!("{e}: {text} {}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(
        (output.status.code(), value["findings"].as_array().map(Vec::len)),
        (Some(0), Some(0)),
        "{value:#}"
    );
    let shown: Vec<_> = value["points"]
        .as_array()
        .expect("points")
        .iter()
        .map(|p| (p["size"].as_u64(), p["series"].as_str(), p["ratio"]["rounds"].as_u64()))
        .collect();
    let of = |size, series| (Some(size), Some(series), Some(2));
    assert_eq!(shown, [of(8, "stream"), of(128, "stream"), of(8, "latency"), of(128, "latency")]);
    assert_eq!(value["a"]["network"], "pinrail (ncclNet v12)");
    // The bench was asked to show the plugin's lines.
    let settings = |side: &str| value[side]["settings"][0].as_str().unwrap_or_default().to_owned();
    assert!(settings("a").contains("unlike stock: NCCL_IB_USE_INLINE=1"), "{value:#}");
    assert!(settings("b").contains("NCCL_IB_USE_INLINE=0 (environment)"), "{value:#}");
    assert!(std::fs::read_to_string(page).expect("a page").contains("with NCCL_IB_USE_INLINE=0"));
}
