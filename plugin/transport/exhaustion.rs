//! Which limit was met when a device makes nothing more: what it can have, what this process has of it, and the limits
//! of the process and of its control group. A verb says no more than "Cannot allocate memory" or "Invalid argument".

use crate::error::Error;
use crate::host::cgroup::{Cgroup, RdmaUse};
use crate::host::limits::{self, Limit};
use crate::host::status::Status;
use crate::memory::diagnosis::Machine;
use crate::verbs::Context;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes that a slot of a queue takes, about; a process that may not lock as much more has met that limit.
const SLOT_BYTES: u64 = 64;

/// What a call wanted to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Device,
    Domain,
    Completions,
    Pair,
}

impl Kind {
    fn of(verb: Option<&'static str>) -> Option<Self> {
        match verb? {
            "ibv_open_device" => Some(Self::Device),
            "ibv_alloc_pd" => Some(Self::Domain),
            "ibv_create_cq" => Some(Self::Completions),
            "ibv_create_qp" => Some(Self::Pair),
            _ => None,
        }
    }

    /// What a control group counts it as.
    fn resource(self) -> &'static str {
        if self == Self::Device { "hca_handle" } else { "hca_object" }
    }
}

/// Objects of one kind: the name of the device's limit, what this process has on the device, and the limit, 0 where the
/// device does not say.
#[derive(Clone, Copy, Debug)]
struct Count {
    name: &'static str,
    held: u32,
    most: u32,
}

/// What is known when a call was refused.
#[derive(Clone, Debug, Default)]
struct Facts {
    /// Domains, completion queues, queue pairs, memory regions.
    counts: Vec<Count>,
    /// The deepest queue and the largest completion queue that the device has.
    deepest: (u32, u32),
    /// Slots of the deepest queue that was asked for.
    asked: u32,
    /// The control group that grants no more.
    group: Option<RdmaUse>,
    memlock: Limit,
    pinned: u64,
    /// CAP_IPC_LOCK lifts the memory lock limit.
    unbounded: bool,
}

/// Whether fewer or smaller objects may be granted where these were not.
pub(super) fn is_scarcity(e: &Error) -> bool {
    Kind::of(e.failed_verb()).is_some()
        && matches!(
            e.errno(),
            Some(libc::ENOMEM | libc::EINVAL | libc::ENOSPC | libc::EAGAIN | libc::EOVERFLOW)
        )
}

/// The same error with the limit that was met. `asked`: slots of the deepest queue. Any other error is left as it is.
pub(super) fn explain(
    e: Error,
    device: &str,
    context: Option<&Context>,
    asked: u32,
    machine: &Machine,
) -> Error {
    let Some(kind) = Kind::of(e.failed_verb()).filter(|_| is_scarcity(&e)) else { return e };
    let facts = Facts::gather(kind, device, context, asked, machine);
    let why = facts.verdict(kind, e.errno());
    e.followed_by(format_args!(": {why}"))
}

impl Facts {
    fn gather(
        kind: Kind,
        device: &str,
        context: Option<&Context>,
        asked: u32,
        machine: &Machine,
    ) -> Self {
        let status = Status::read(&machine.proc);
        let groups = Cgroup::read(&machine.proc, machine.sysfs.root());
        let mut facts = Self {
            group: groups.refuses(device, kind.resource()).cloned(),
            memlock: limits::memlock_of(&machine.proc),
            pinned: status.pinned.unwrap_or(0),
            unbounded: status.ipc_lock() == Some(true),
            asked,
            ..Self::default()
        };
        let Some(context) = context else { return facts };
        if let Ok(attr) = context.query_device() {
            let at_most = |most: i32| u32::try_from(most).unwrap_or(0);
            let objects = context.objects();
            let count = |name, held: &AtomicU32, most| Count {
                name,
                held: held.load(Ordering::Relaxed),
                most: at_most(most),
            };
            facts.counts = vec![
                count("max_pd", &objects.pds, attr.max_pd),
                count("max_cq", &objects.cqs, attr.max_cq),
                count("max_qp", &objects.qps, attr.max_qp),
                count("max_mr", &objects.mrs, attr.max_mr),
            ];
            facts.deepest = (at_most(attr.max_qp_wr), at_most(attr.max_cqe));
        }
        facts
    }

    fn count(&self, kind: Kind) -> Option<Count> {
        let name = match kind {
            Kind::Device => return None,
            Kind::Domain => "max_pd",
            Kind::Completions => "max_cq",
            Kind::Pair => "max_qp",
        };
        self.counts.iter().find(|count| count.name == name).copied()
    }

    /// The limit, the counts, and what helps.
    fn verdict(&self, kind: Kind, errno: Option<i32>) -> String {
        let mut text = self.limit(kind, errno);
        if !self.counts.is_empty() {
            let counts = self.counts.iter().map(|Count { name, held, most }| {
                let what = name.trim_start_matches("max_").to_uppercase();
                format!("{held} {what}s of {name} {most}")
            });
            let counts = counts.collect::<Vec<_>>().join(", ");
            let (slots, entries) = self.deepest;
            text += &format!(
                ". pinrail has {counts} in this process; max_qp_wr {slots}, max_cqe {entries}"
            );
        }
        text
    }

    fn limit(&self, kind: Kind, errno: Option<i32>) -> String {
        if let Some(RdmaUse { resource, max, group, .. }) = &self.group {
            let max = max.map_or_else(String::new, |max| format!(" {max}"));
            return format!(
                "control group {group} grants no more (rdma.max: {resource}{max}); raise it there"
            );
        }
        let (slots, entries) = self.deepest;
        if kind == Kind::Pair && slots != 0 && self.asked > slots {
            return format!(
                "the device's queues have {slots} slots (max_qp_wr) and a connection needs {}: no setting makes it need \
                 less, so leave the device out (NCCL_IB_HCA)",
                self.asked
            );
        }
        if kind == Kind::Completions && entries != 0 && self.asked > entries {
            return format!(
                "the device's completion queues have {entries} entries (max_cqe) and a connection needs {}; lower \
                 NCCL_IB_QPS_PER_CONNECTION",
                self.asked
            );
        }
        let fewer = "have fewer connections on it (NCCL_IB_QPS_PER_CONNECTION, NCCL_MAX_NCHANNELS)";
        let count = self.count(kind);
        if let Some(Count { name, held, most }) = count
            && most != 0
            && held >= most
        {
            return format!(
                "this process alone has all that the device has ({name} {most}); {fewer}"
            );
        }
        let wanted = u64::from(self.asked) * SLOT_BYTES;
        if errno == Some(libc::ENOMEM)
            && !self.unbounded
            && self.memlock.soft.is_some_and(|limit| self.pinned.saturating_add(wanted) > limit)
        {
            return format!(
                "the process may not lock more memory (RLIMIT_MEMLOCK: {}, {} bytes pinned); raise it (ulimit -l, \
                 LimitMEMLOCK=)",
                self.memlock, self.pinned
            );
        }
        match (kind, count) {
            // Also what a device says of an argument that it does not take.
            (_, Some(Count { name, .. })) if errno == Some(libc::EINVAL) => format!(
                "the device takes no such queue, though its limits allow it: look at the kernel log; or other processes have \
                 the rest of {name}: `rdma resource show` counts them"
            ),
            (Kind::Device, _) | (_, None) => {
                "look at the kernel log and at the control group's rdma.max".to_owned()
            }
            (_, Some(Count { name, .. })) => format!(
                "other processes may have the rest of {name}, or the kernel is short of memory: `rdma resource show` counts \
                 them; {fewer}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(held: u32) -> Facts {
        Facts {
            counts: vec![
                Count { name: "max_pd", held: 1, most: 8 },
                Count { name: "max_cq", held: 3, most: 100 },
                Count { name: "max_qp", held, most: 7 },
                Count { name: "max_mr", held: 9, most: 1000 },
            ],
            deepest: (64, 4096),
            asked: 48,
            unbounded: true,
            ..Facts::default()
        }
    }

    fn says(facts: &Facts, kind: Kind, errno: i32, parts: &[&str]) {
        let text = facts.verdict(kind, Some(errno));
        for part in parts {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
        // NCCL's logger cuts what is longer than a kilobyte, and the verb comes before.
        assert!(text.len() < 600, "{text}");
    }

    #[test]
    fn each_limit_is_named_with_counts_and_remedy() {
        let held = "3 CQs of max_cq 100";
        says(
            &facts(7),
            Kind::Pair,
            libc::ENOMEM,
            &["alone has all", "max_qp 7", "NCHANNELS", held],
        );
        says(&facts(5), Kind::Pair, libc::ENOMEM, &["rest of max_qp", "5 QPs of max_qp 7", held]);
        says(&facts(5), Kind::Pair, libc::EINVAL, &["takes no such queue", "rest of max_qp", held]);
        let shallow = Facts { deepest: (16, 4096), ..facts(1) };
        says(
            &shallow,
            Kind::Pair,
            libc::EINVAL,
            &["16 slots (max_qp_wr)", "needs 48", "NCCL_IB_HCA"],
        );
        let small = Facts { deepest: (64, 40), ..facts(1) };
        says(&small, Kind::Completions, libc::EINVAL, &["40 entries (max_cqe)", "QPS_PER_CONN"]);
        let locked = Facts {
            unbounded: false,
            memlock: Limit { soft: Some(65536), hard: None },
            pinned: 64000,
            ..facts(1)
        };
        says(
            &locked,
            Kind::Pair,
            libc::ENOMEM,
            &["RLIMIT_MEMLOCK: soft 65536", "64000", "ulimit -l"],
        );
        says(&locked, Kind::Pair, libc::EINVAL, &["rest of max_qp"]);
        says(&Facts::default(), Kind::Device, libc::ENOMEM, &["rdma.max"]);
    }

    #[test]
    fn a_control_group_comes_first() {
        let group = RdmaUse {
            device: "mlx5_0".into(),
            resource: "hca_object".into(),
            current: Some(20),
            max: Some(20),
            group: "/jobs/rank".into(),
        };
        let facts = Facts { group: Some(group), ..facts(7) };
        says(&facts, Kind::Pair, libc::EAGAIN, &["/jobs/rank", "hca_object 20", "raise it"]);
    }

    #[test]
    fn only_what_makes_something_is_explained() {
        let machine = Machine { proc: crate::host::procfs::Proc::at("/no"), ..Machine::default() };
        for (verb, errno) in [("ibv_modify_qp", libc::ENOMEM), ("ibv_create_qp", libc::EIO)] {
            let e = Error::verb(verb, "x", errno);
            assert!(!is_scarcity(&e));
            assert_eq!(explain(e.clone(), "x", None, 1, &machine), e);
        }
        let e = explain(Error::verb("ibv_create_cq", "x", libc::EAGAIN), "x", None, 1, &machine);
        assert_eq!(e.errno(), Some(libc::EAGAIN));
        assert!(e.to_string().contains("(os error 11): look at"), "{e}");
    }
}
