//! Forked children of a Python process that uses the plugin, as the data loaders of a training job are.

mod common;

use std::process::Command;

/// Runs the loader; what it printed. A child that touches a page it does not have is killed, and the loader says so.
fn loader(forks: &str, environment: &[(&str, &str)]) -> Result<String, String> {
    let mut python = Command::new("timeout");
    python.args(["-k", "5", "120", "python3", "ffi-tests/forked.py"]);
    python.arg(common::plugin()).arg(common::softrnic()).current_dir(common::root());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["NCCL_", "PINRAIL_", "SOFTRNIC_", "IBV_", "RDMAV_"].iter().any(|p| text.starts_with(p))
        {
            python.env_remove(&name);
        }
    }
    let fabric = format!("fork-{}-{forks}-{}", std::process::id(), environment.len());
    python
        .env("SOFTRNIC_FABRIC", fabric)
        .env("SOFTRNIC_FORK", forks)
        .env("NCCL_SOCKET_IFNAME", "lo")
        .envs(environment.iter().copied());
    let done = python.output().expect("timeout starts: apt-get install coreutils python3");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
}

#[test]
fn python_children_have_what_their_parent_built() {
    for (forks, environment) in
        [("old-kernel", &[][..]), ("old-library", &[("RDMAV_FORK_SAFE", "1")])]
    {
        let said = loader(forks, environment).unwrap_or_else(|e| panic!("{forks}: {e}"));
        let words: Vec<&str> = said.split_whitespace().collect();
        let ["marked", marked, "left", "0"] = words[..] else { panic!("{forks}: {said}") };
        assert_ne!(
            marked, "0",
            "{forks}: nothing was taken from the children, so that this shows nothing"
        );
    }
}

/// The same where the operator wants such buffers registered: this is what the copies prevent.
#[test]
fn python_children_die_where_shared_pages_are_registered() {
    let environment = [("PINRAIL_FORK_COLLATERAL", "register")];
    let end =
        loader("old-kernel", &environment).expect_err("a child met a page that it does not have");
    assert!(end.contains("do not own their pages"), "{end}");
    // What killed them: SIGSEGV.
    assert!(end.contains("children ended with [") && end.contains("-11"), "{end}");
}
