//! What registrations take from forked children, by library, kernel and variables.

use super::library::folders;
use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use nccl_net_pinrail::config::{ForkCollateral, ForkPolicy};
use nccl_net_pinrail::host::fork::{Known, Library, Release, Variables};
use nccl_net_pinrail::host::kernel;

const CHECK: &str = "fork";

/// Looks at the library's release, the kernel and the variables.
pub fn check(machine: &Machine) -> Vec<Finding> {
    let library = library(machine);
    let copies = copies(machine);
    let set = |name| machine.variable(name).is_some();
    let variables = Variables {
        rdmav: set("RDMAV_FORK_SAFE"),
        ibv: set("IBV_FORK_SAFE"),
        huge_pages: set("RDMAV_HUGEPAGES_SAFE"),
    };
    let settings = &machine.settings;
    let release = kernel::release(&machine.proc).unwrap_or_else(|| "unknown".into());
    let evidence = format!(
        "kernel {release} copies pinned pages for a child: {copies}; {library}; {}; PINRAIL_FORK={}",
        variables.describe(&library, copies),
        settings.fork
    );
    let armed = variables.arm()
        || settings.fork == ForkPolicy::Arm
        || (settings.fork == ForkPolicy::Auto && copies == Known::No);
    let marks = armed && library.marks_when_armed(copies) == Known::Yes;
    vec![if copies == Known::No && settings.fork == ForkPolicy::Never && !variables.arm() {
        Finding::problem(
            CHECK,
            "after a fork a device's write can change what the child sees, or be lost for the parent",
            evidence,
            "set PINRAIL_FORK=auto, unless nothing ever forks",
        )
    } else if marks && copies == Known::Yes {
        Finding::problem(
            CHECK,
            "registered pages are taken from forked children without need",
            evidence,
            "unset RDMAV_FORK_SAFE and IBV_FORK_SAFE and leave PINRAIL_FORK at auto, or use rdma-core 51 or later; \
             docs/fork.md",
        )
    } else if marks && settings.fork_collateral == ForkCollateral::Register {
        Finding::problem(
            CHECK,
            "forked children lose what shares a page with registered memory",
            format!("{evidence}; PINRAIL_FORK_COLLATERAL=register"),
            "set PINRAIL_FORK_COLLATERAL=bounce; docs/fork.md",
        )
    } else if marks {
        Finding::advice(
            CHECK,
            "forked children do not have registered buffers",
            evidence,
            "nothing: memory that shares its pages is copied instead. docs/fork.md",
        )
    } else {
        Finding::fine(CHECK, "forked children have all memory of their parent", evidence)
    }]
}

/// The library, by its own word or by the name of its file.
fn library(machine: &Machine) -> Library {
    if let Some(file) = machine.verbs.as_ref().and_then(|facts| facts.file.clone()) {
        return Library::of(Some(file));
    }
    let file = folders(machine).into_iter().find_map(|folder| {
        let name = machine
            .names(&folder)
            .into_iter()
            .find(|name| Release::of_file(name.as_ref()).is_some())?;
        Some(folder.join(name))
    });
    Library::of(file)
}

/// Whether the kernel copies pinned pages, by the library's word or by the kernel's release.
fn copies(machine: &Machine) -> Known {
    let said = machine.verbs.as_ref().and_then(|facts| facts.copies_for_children);
    match said {
        Some(true) => return Known::Yes,
        // Without a device the kernel's RDMA part may not be loaded, and then there is nobody who could tell it.
        Some(false) if !machine.sysfs.devices().is_empty() => return Known::No,
        _ => {}
    }
    match release_of(&kernel::release(&machine.proc).unwrap_or_default()) {
        // Ordinary pages since 5.9, those of hugetlb since 5.12; told since 5.13.
        Some(release) if release >= (5, 12) => Known::Yes,
        Some(release) if release < (5, 9) => Known::No,
        _ => Known::Unknown,
    }
}

/// The numbers of a release such as `6.17.0-1014-nvidia`.
pub fn release_of(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::release_of;

    #[test]
    fn releases() {
        assert_eq!(release_of("6.17.0-1014-nvidia"), Some((6, 17)));
        assert_eq!(release_of("5.4"), Some((5, 4)));
        for bad in ["", "6", "x.1", "-"] {
            assert_eq!(release_of(bad), None, "{bad}");
        }
    }
}
