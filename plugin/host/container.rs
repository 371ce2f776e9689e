//! Whether the process lives in a container, whose limits come from the daemon that started it and
//! not from the files that an administrator of the host edits.

use super::procfs::Proc;

/// Inode numbers of the namespaces that the kernel boots with; they are fixed.
const FIRST_PID: u64 = 4_026_531_836;
const FIRST_CGROUP: u64 = 4_026_531_835;
const FIRST_USER: u64 = 4_026_531_837;

/// Words in the path of a control group, and who made it.
const RUNTIMES: [(&str, &str); 9] = [
    ("kubepods", "Kubernetes"),
    ("docker", "Docker"),
    ("libpod", "Podman"),
    ("cri-containerd", "containerd"),
    ("containerd", "containerd"),
    ("crio", "CRI-O"),
    ("lxc", "LXC"),
    ("garden", "Garden"),
    ("ecs", "ECS"),
];

/// What the namespaces and the control group of the process say; `None`: cannot be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Container {
    /// Path of the control group, as the process sees it.
    pub cgroup: Option<String>,
    /// Who made the control group, by its name.
    pub runtime: Option<&'static str>,
    /// The process has a pid or control group namespace of its own.
    pub own_namespace: Option<bool>,
    /// The process has a user namespace of its own, where capabilities mean nothing to the kernel's
    /// checks of limits.
    pub own_user_namespace: Option<bool>,
}

impl Container {
    /// What can be read about this process.
    pub fn read(proc: &Proc) -> Self {
        let own =
            |name: &str, first| Some(inode(&proc.link(&format!("self/ns/{name}"))?)? != first);
        let spaces = [own("cgroup", FIRST_CGROUP), own("pid", FIRST_PID)];
        let cgroup = proc.text("self/cgroup").and_then(|text| longest_path(&text));
        Self {
            runtime: cgroup.as_deref().and_then(runtime),
            cgroup,
            own_namespace: if spaces.contains(&Some(true)) {
                Some(true)
            } else {
                spaces.iter().flatten().next().copied()
            },
            own_user_namespace: own("user", FIRST_USER),
        }
    }

    /// Whether this is a container.
    pub fn inside(&self) -> Option<bool> {
        if self.runtime.is_some() { Some(true) } else { self.own_namespace }
    }
}

/// The number in `cgroup:[4026531835]`.
fn inode(link: &str) -> Option<u64> {
    link.split_once(":[")?.1.strip_suffix(']')?.parse().ok()
}

/// The most telling path in `/proc/self/cgroup`, whose lines are `number:controllers:path`.
fn longest_path(text: &str) -> Option<String> {
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.max_by_key(|path| path.len()).map(str::to_owned)
}

fn runtime(path: &str) -> Option<&'static str> {
    let named = |word: &str| {
        path.split('/').any(|part| {
            part.strip_prefix(word)
                .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
        })
    };
    RUNTIMES.iter().find(|(word, _)| named(word)).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree::Tree;
    use proptest::prelude::*;

    fn container(cgroup: &str, spaces: &[(&str, u64)]) -> Container {
        let tree = Tree::new(&[("self/cgroup", cgroup)]);
        for (name, inode) in spaces {
            tree.link(&format!("self/ns/{name}"), &format!("{name}:[{inode}]"));
        }
        Container::read(&Proc::at(tree.root()))
    }

    #[test]
    fn who_made_the_group() {
        for (path, expected) in [
            ("0::/docker/0123abcd", Some("Docker")),
            ("0::/system.slice/docker-0123.scope", Some("Docker")),
            (
                "0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-1.scope",
                Some("Kubernetes"),
            ),
            ("12:memory:/x\n0::/machine.slice/libpod-77.scope/container", Some("Podman")),
            ("0::/user.slice/user-0.slice/session-1.scope", None),
            ("0::/dockery", None),
            ("", None),
        ] {
            assert_eq!(container(path, &[]).runtime, expected, "{path}");
        }
    }

    #[test]
    fn namespaces_decide_where_the_name_does_not() {
        let inside = |spaces: &[(&str, u64)]| container("0::/", spaces).inside();
        assert_eq!(inside(&[("cgroup", FIRST_CGROUP), ("pid", FIRST_PID)]), Some(false));
        assert_eq!(inside(&[("cgroup", 4_026_532_000), ("pid", FIRST_PID)]), Some(true));
        assert_eq!(inside(&[("pid", 4_026_532_000)]), Some(true));
        assert_eq!(inside(&[]), None);
        let user = |inode| container("0::/", &[("user", inode)]).own_user_namespace;
        assert_eq!((user(FIRST_USER), user(4_026_532_001)), (Some(false), Some(true)));
        let bad = container("no colons", &[]);
        assert_eq!((bad.cgroup, bad.own_user_namespace), (None, None));
    }

    #[test]
    fn this_process_has_namespaces() {
        assert!(Container::read(&Proc::default()).own_user_namespace.is_some());
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in any::<String>()) {
            let _ = (inode(&text), longest_path(&text), runtime(&text));
        }
    }
}
