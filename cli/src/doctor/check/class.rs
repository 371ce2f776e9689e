//! Traffic class and service level, and the class of the host that overrides them.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use crate::doctor::port::{Port, labels};

const CHECK: &str = "class";

/// The bits of a traffic class that switches overwrite to signal congestion.
const ECN_BITS: u8 = 3;

/// Looks at the ports that are used.
pub fn check(machine: &Machine, ports: &[Port]) -> Vec<Finding> {
    let settings = &machine.settings;
    let used: Vec<_> = ports.iter().filter(|port| port.is_used()).collect();
    let mut found = Vec::new();
    let classes: Vec<(&str, u8)> =
        [("NCCL_IB_TC", settings.tc), ("NCCL_IB_FIFO_TC", settings.fifo_tc)]
            .into_iter()
            .filter_map(|(name, class)| Some((name, class?)))
            .collect();
    for port in used.iter().filter(|port| port.ethernet) {
        let file = format!("tc/{}/traffic_class", port.number);
        let text = machine.sysfs.device_text(&port.device, &file).unwrap_or_default();
        let Some(global) = global_class(&text) else { continue };
        let place = format!("/sys/class/infiniband/{}/{file}: {global}", port.device);
        let other: Vec<_> =
            classes.iter().filter(|(_, class)| u32::from(*class) != global).collect();
        let asked: Vec<_> = other.iter().map(|(name, class)| format!("{name}={class}")).collect();
        found.push(if asked.is_empty() {
            Finding::advice(
                CHECK,
                format!("{} sends everything with traffic class {global}, whatever a job asks for", port.label),
                place,
                "nothing, if it is what the fabric wants; traffic classes of communicators have no effect",
            )
        } else {
            Finding::problem(
                CHECK,
                format!("the host's traffic class overrides {} on {}", asked.join(" and "), port.label),
                format!("{place}; asked for: {}", asked.join(", ")),
                format!(
                    "agree on one class: set the variables to {global}, or take the host's away (echo -1 > that file, as \
                     root)"
                ),
            )
        });
    }
    if !used.is_empty() && used.iter().all(|port| !port.ethernet) {
        for (name, class) in &classes {
            found.push(Finding::advice(
                CHECK,
                format!("{name} has little effect: every port that is used is InfiniBand"),
                format!("{name}={class}; {}", labels(used.iter().copied())),
                "use NCCL_IB_SL: InfiniBand switches go by the service level",
            ));
        }
    }
    for (name, class) in
        classes.iter().filter(|(_, class)| class & ECN_BITS == 1 || class & ECN_BITS == 3)
    {
        found.push(Finding::advice(
            CHECK,
            format!("{name}={class} sets the ECN bits in an unusual way"),
            format!("DSCP {}, ECN bits {}", class >> 2, class & ECN_BITS),
            format!(
                "a class is DSCP × 4 + 2 where congestion is signalled by ECN: {} for this DSCP",
                (class & !ECN_BITS) + 2
            ),
        ));
    }
    if found.is_empty() {
        let word = |class: Option<u8>| class.map_or_else(|| "not set".into(), |c| c.to_string());
        let evidence = format!(
            "NCCL_IB_TC {}, NCCL_IB_FIFO_TC {}, NCCL_IB_SL {}",
            word(settings.tc),
            word(settings.fifo_tc),
            word(settings.sl)
        );
        found.push(Finding::fine(CHECK, "nothing of the host overrides traffic classes", evidence));
    }
    found
}

/// Reads the line `Global tclass=106`, which drivers of NVIDIA's own packages show.
fn global_class(text: &str) -> Option<u32> {
    let value = text.lines().find_map(|line| line.trim().strip_prefix("Global tclass="))?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::global_class;

    #[test]
    fn the_class_of_the_host() {
        assert_eq!(global_class("Global tclass=106\nsrc_ip=1.1.1.1,tclass=3"), Some(106));
        for none in ["", "tclass=3", "Global tclass=", "Global tclass=-1"] {
            assert_eq!(global_class(none), None, "{none}");
        }
    }
}
