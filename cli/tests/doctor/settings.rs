//! `pinrail settings` on the environment and files of a made-up host.

use crate::host::Host;
use serde_json::Value;

fn document(host: &Host, more: &[&str]) -> (i32, Value) {
    let mut arguments = vec!["settings", "--json"];
    arguments.extend(more);
    let output = host.run(&arguments);
    let document: Value = serde_json::from_slice(&output.stdout).expect("a document");
    let code = output.status.code().unwrap();
    assert_eq!(document["exit_code"], code);
    (code, document)
}

fn of<'a>(document: &'a Value, name: &str) -> &'a Value {
    let all = document["settings"].as_array().unwrap();
    all.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn each_value_has_its_origin() {
    let host = Host::healthy();
    host.environment(&[("NCCL_IB_TIMEOUT", "22"), ("NCCL_IB_HCA", "=mlx5_0")]);
    host.files(&[
        ("root/.nccl.conf", "NCCL_IB_TIMEOUT=18\nNCCL_IB_SL=3\n"),
        ("etc/nccl.conf", "NCCL_IB_SL=4\nPINRAIL_FLUSH=always\n"),
    ]);
    let (code, all) = document(&host, &[]);
    assert_eq!(code, 0);
    for (name, value, kind, path) in [
        ("NCCL_IB_TIMEOUT", "22", "environment", None),
        ("NCCL_IB_HCA", "=mlx5_0", "environment", None),
        ("NCCL_IB_SL", "3", "file", Some("/root/.nccl.conf")),
        ("PINRAIL_FLUSH", "always", "file", Some("/etc/nccl.conf")),
        ("NCCL_IB_RETRY_CNT", "7", "default", None),
    ] {
        let row = of(&all, name);
        assert_eq!(row["value"], value, "{name}");
        assert_eq!(row["origin"]["kind"], kind, "{name}");
        assert_eq!(row["origin"]["path"].as_str(), path, "{name}");
    }
    let inline = of(&all, "NCCL_IB_USE_INLINE");
    assert_eq!((&inline["stock"], &inline["value"]), (&"0".into(), &"1".into()));
    assert_eq!((&inline["unlike_stock"], &inline["changed"]), (&true.into(), &false.into()));
    assert!(of(&all, "PINRAIL_FLUSH")["stock"].is_null());
    assert_eq!(of(&all, "NCCL_IB_TIMEOUT")["accepts"], "a number from 0 to 31");

    let (_, diff) = document(&host, &["--diff"]);
    let names: Vec<_> = diff["settings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert_eq!(names.len(), 5, "{names:?}");
    assert!(!names.contains(&"NCCL_IB_RETRY_CNT") && names.contains(&"NCCL_IB_USE_INLINE"));
}

#[test]
fn a_variable_without_its_effect_is_a_problem() {
    let host = Host::healthy();
    host.environment(&[("NCCL_IB_TIMEOUT", "300"), ("NCCL_IB_RETRY_COUNT", "20")]);
    let (code, all) = document(&host, &[]);
    assert_eq!(code, 1);
    let notices = all["notices"].as_array().unwrap();
    let texts: Vec<_> = notices.iter().map(|notice| notice["text"].as_str().unwrap()).collect();
    assert!(
        texts.iter().any(|text| text.contains("NCCL_IB_TIMEOUT=300") && text.contains("using 31"))
    );
    assert!(texts.iter().any(|text| text.contains("nearest known name is NCCL_IB_RETRY_CNT")));
    let output = host.run(&["settings", "--diff"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.contains("NCCL_IB_TIMEOUT") && text.contains("PROBLEM  NCCL_IB_TIMEOUT=300"),
        "{text}"
    );
}

#[test]
fn a_folder_without_a_tree_is_no_default() {
    let (code, document) = document(&Host::empty(), &[]);
    assert_eq!(code, 2);
    assert!(document["error"].as_str().unwrap().contains("no captured tree"));
}
