//! Limits of the process and of whoever started it, and those of control groups.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use nccl_net_pinrail::host::amount::amount;
use nccl_net_pinrail::host::cgroup::Cgroup;
use nccl_net_pinrail::host::limits::{Limit, MEMLOCK, NOFILE, in_text};
use nccl_net_pinrail::host::meminfo::Meminfo;
use nccl_net_pinrail::host::status::Status;

const MEMORY: &str = "memlock";
const FILES: &str = "nofile";
const GROUP: &str = "cgroup";

/// Host memory that NCCL registers for one connection, about.
const PER_CONNECTION: u64 = 10 << 20;
/// Connections that a job of a few hosts has in one process, a few channels each.
const CONNECTIONS: u64 = 100;
/// Descriptors that such a job needs: a connection has a socket and shares of devices, and the program its files.
const DESCRIPTORS: u64 = 4096;

/// Looks at all limits.
pub fn check(machine: &Machine) -> Vec<Finding> {
    let text = |who: &str| machine.proc.text(&format!("{who}/limits"));
    let Some(own) = text("self") else {
        return vec![Finding::unknown(
            MEMORY,
            "the limits of the process cannot be told",
            format!("{} cannot be read", machine.proc.path("self/limits").display()),
            "mount procfs, or capture it whole",
        )];
    };
    let parents: Vec<(String, String)> =
        parents(machine).into_iter().filter_map(|(pid, who)| Some((who, text(&pid)?))).collect();
    let mut found: Vec<_> = in_text(&own, MEMLOCK)
        .map(|limit| memlock(machine, limit, &parents))
        .into_iter()
        .chain(in_text(&own, NOFILE).map(|limit| nofile(machine, limit, &parents)))
        .collect();
    found.extend(groups(machine));
    found
}

/// Processes whose limits this one inherited: number, and who that is.
fn parents(machine: &Machine) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let status = machine.proc.text("self/status").unwrap_or_default();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).map(str::trim);
    if let Some(pid) = parent.filter(|pid| !matches!(*pid, "0" | "1")) {
        found.push((pid.to_owned(), format!("its parent (pid {pid})")));
    }
    let who = if machine.contained() { "pid 1 of the container" } else { "pid 1" };
    found.push(("1".to_owned(), who.to_owned()));
    found
}

/// What those who started the process have.
fn inherited(parents: &[(String, String)], line: &str, shown: impl Fn(Limit) -> String) -> String {
    let one =
        |(who, text): &(String, String)| Some(format!("; {who}: {}", shown(in_text(text, line)?)));
    parents.iter().filter_map(one).collect()
}

/// A limit in bytes as people read it.
fn in_bytes(limit: Limit) -> String {
    let side = |side: Option<u64>| side.map_or_else(|| "unlimited".into(), amount);
    format!("soft {}, hard {}", side(limit.soft), side(limit.hard))
}

/// Where a limit is raised: where it was lowered.
fn place(
    machine: &Machine,
    parents: &[(String, String)],
    line: &str,
    enough: impl Fn(Limit) -> bool,
) -> String {
    let generous = |(_, text): &&(String, String)| in_text(text, line).is_some_and(&enough);
    if let Some((who, _)) = parents.iter().find(generous) {
        return format!(
            "{who} has enough, so that something between it and this process lowers it: look for ulimit in \
                        launch scripts and for the launcher's daemon"
        );
    }
    let (name, docker, unit) = if line == MEMLOCK {
        ("memlock", "memlock=-1", "LimitMEMLOCK=infinity")
    } else {
        ("nofile", "nofile=1048576", "LimitNOFILE=1048576")
    };
    if machine.contained() {
        return format!(
            "it comes from the container's daemon, not from limits.conf: start the container with --ulimit {docker}, or \
             raise the daemon's (systemd: {unit})"
        );
    }
    format!(
        "raise it where the job is started: {name} in limits.conf for logins, {unit} in the unit of a daemon such as \
         slurmd or sshd, then start that daemon again"
    )
}

fn memlock(machine: &Machine, limit: Limit, parents: &[(String, String)]) -> Finding {
    let status = Status::read(&machine.proc);
    let mut evidence = in_bytes(limit);
    if let Some(pinned) = status.pinned {
        evidence += &format!(", {} pinned now", amount(pinned));
    }
    evidence += &inherited(parents, MEMLOCK, in_bytes);
    let Some(soft) = limit.soft else {
        return Finding::fine(MEMORY, "any amount of memory may be registered", evidence);
    };
    let exempt =
        status.ipc_lock() == Some(true) && machine.container.own_user_namespace != Some(true);
    if exempt {
        evidence += "; CAP_IPC_LOCK";
        return Finding::fine(MEMORY, "the memory lock limit does not apply", evidence);
    }
    let memory = machine.proc.text("meminfo").map(|text| Meminfo::parse(&text).total);
    if memory.flatten().is_some_and(|total| soft >= total) {
        return Finding::fine(MEMORY, "all memory may be registered", evidence);
    }
    let enough = |limit: Limit| limit.allows(CONNECTIONS * PER_CONNECTION);
    let remedy = place(machine, parents, MEMLOCK, enough);
    let what = format!("no more than {} can be registered", amount(soft));
    evidence += &format!(
        "; NCCL registers about {} of host memory for a connection",
        amount(PER_CONNECTION)
    );
    if enough(limit) {
        Finding::advice(MEMORY, what, evidence, remedy)
    } else {
        Finding::problem(MEMORY, what, evidence, remedy)
    }
}

fn nofile(machine: &Machine, limit: Limit, parents: &[(String, String)]) -> Finding {
    let evidence = format!(
        "{limit}; pinrail raises the soft limit to the hard one{}",
        inherited(parents, NOFILE, |limit| limit.to_string())
    );
    let enough = |limit: Limit| limit.hard.is_none_or(|hard| hard >= DESCRIPTORS);
    if enough(limit) {
        return Finding::fine(FILES, "enough files may be open", evidence);
    }
    let hard = limit.hard.unwrap_or(0);
    Finding::problem(
        FILES,
        format!("no more than {hard} files may be open, and each connection has a socket"),
        evidence,
        place(machine, parents, NOFILE, enough),
    )
}

fn groups(machine: &Machine) -> Vec<Finding> {
    let groups = Cgroup::read(&machine.proc, machine.sysfs.root());
    let mut found = Vec::new();
    let lost = machine.unread(&["self/cgroup"]).or_else(|| {
        let lost = Cgroup::withheld(&machine.proc, machine.sysfs.root())?;
        Some(format!("{} cannot be read", lost.display()))
    });
    if let Some(lost) = lost {
        let what = "whether a control group limits RDMA devices cannot be told";
        found.push(Finding::unknown(GROUP, what, lost, "mount procfs, or capture it whole"));
    }
    for item in &groups.rdma {
        let (Some(current), Some(max)) = (item.current, item.max) else { continue };
        let evidence =
            format!("group {}: {} {} = {current} of {max}", item.group, item.device, item.resource);
        let remedy = "raise rdma.max of that group (in a container: in the group of the pod or of the daemon), or end \
                      what uses the device up";
        found.push(if current >= max {
            let what =
                format!("the control group grants no more {} of {}", item.resource, item.device);
            Finding::problem(GROUP, what, evidence, remedy)
        } else {
            let what = format!("the control group limits {} of {}", item.resource, item.device);
            Finding::advice(GROUP, what, evidence, "nothing, if the job fits into what is left")
        });
    }
    if found.is_empty() {
        found.push(Finding::fine(GROUP, "no control group limits RDMA devices", "rdma.max"));
    }
    found
}
