//! Two hosts in network namespaces of their own, joined by a cable.

use super::{Report, Responder, fabric, pinrail};
use std::process::{Child, Command, Stdio};

/// A network namespace that lives as long as this.
struct Namespace(Child);

impl Namespace {
    fn new() -> Self {
        // It holds the namespace and waits to be killed.
        let mut child = Command::new("unshare")
            .args(["--net", "--", "sh", "-c", "echo ready; exec sleep infinity"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare of util-linux");
        let mut ready = [0; 6];
        std::io::Read::read_exact(child.stdout.as_mut().expect("its output"), &mut ready)
            .expect("a namespace: this needs root");
        Self(child)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// A command inside.
    fn enter(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &self.pid(), "--"]);
        command
    }

    fn ip(&self, words: &str) {
        let status = self.enter().arg("ip").args(words.split_whitespace()).status();
        assert!(status.expect("nsenter and iproute2").success(), "ip {words}");
    }
}

impl Namespace {
    /// Until the other end of the cable is up as well.
    fn wait_until_running(&self) {
        loop {
            let output = self.enter().args(["ip", "-o", "link", "show", "wire"]).output();
            let output = output.expect("nsenter and iproute2").stdout;
            if String::from_utf8_lossy(&output).contains("state UP") {
                return;
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The command under another program.
fn inside(namespace: &Namespace, command: &Command) -> Command {
    let mut outer = namespace.enter();
    outer.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    outer
}

#[test]
fn hosts_in_namespaces_of_their_own_reach_each_other() {
    let (one, other) = (Namespace::new(), Namespace::new());
    one.ip(&format!("link add name wire type veth peer name wire netns {}", other.pid()));
    for (namespace, address) in [(&one, "10.9.7.1/24"), (&other, "10.9.7.2/24")] {
        namespace.ip("link set lo up");
        namespace.ip(&format!("addr add {address} dev wire"));
        namespace.ip("link set wire up");
    }
    one.wait_until_running();
    other.wait_until_running();
    let fabric = fabric();
    let serve = |namespace: &Namespace, name: &str, address: &str| {
        let mut command = pinrail(&fabric);
        command.args(["--serve", "--bind", address, "--port", "0"]);
        command.env("SOFTRNIC_NAME", name).env("NCCL_SOCKET_IFNAME", "=wire");
        Responder::start(inside(namespace, &command))
    };
    let hosts = [serve(&one, "a", "10.9.7.1"), serve(&other, "b", "10.9.7.2")];
    let mut command = pinrail(&fabric);
    command.args([&hosts[0].address, &hosts[1].address]).arg("--json");
    let output = inside(&one, &command).output().expect("runs");
    let report = Report {
        code: output.status.code().expect("a status"),
        document: serde_json::from_slice(&output.stdout).expect("JSON"),
    };
    assert_eq!(report.code, 0, "{:?}", report.findings("problem"));
    assert_eq!(report.transfers("reached").len(), 8);
    // Without the cable nothing is left of it, and it ends in time.
    let hosts = [serve(&one, "a", "10.9.7.1"), serve(&other, "b", "10.9.7.2")];
    other.ip("link set wire down");
    let mut command = pinrail(&fabric);
    command.args([&hosts[0].address, &hosts[1].address]).args(["--json", "--wait", "2"]);
    let output = inside(&one, &command).output().expect("runs");
    assert_eq!(output.status.code(), Some(2));
}
