//! Variables that do not have the effect that their author meant.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use nccl_net_pinrail::config::{Severity, Topic};

const CHECK: &str = "settings";

/// Tells what reading the settings had to tell.
pub fn check(machine: &Machine) -> Vec<Finding> {
    if !machine.knows_environment {
        return vec![Finding::unknown(
            CHECK,
            "the variables of the process cannot be told",
            format!("{} cannot be read", machine.proc.path("self/environ").display()),
            "capture it whole: pinrail doctor --bundle FILE does",
        )];
    }
    let settings = &machine.settings;
    let mut found: Vec<_> = machine
        .notices
        .iter()
        .map(|notice| {
            let remedy = match notice.topic {
                Topic::Clamped => "set it to a value in the range",
                Topic::Unparsable => "set it to a text of the accepted form, or unset it",
                Topic::Unknown => "correct the name, or unset it",
                Topic::NotApplicable => "unset it, unless other transports need it",
                Topic::Remark => {
                    "write down what is meant; pinrail settings shows what it amounts to"
                }
                Topic::Line => "correct the line, or put a # in front of it",
                Topic::File => "make the file readable, or let NCCL_CONF_FILE name another one",
            };
            if notice.severity() == Severity::Warn {
                Finding::problem(CHECK, &notice.text, value(machine, &notice.subject), remedy)
            } else {
                Finding::advice(CHECK, &notice.text, value(machine, &notice.subject), remedy)
            }
        })
        .collect();
    if settings.disabled() {
        found.push(Finding::problem(
            CHECK,
            "NCCL_IB_DISABLE turns pinrail off",
            "NCCL_IB_DISABLE=1, and NCCL_NET does not ask for pinrail by name",
            "unset NCCL_IB_DISABLE, or set NCCL_NET=pinrail",
        ));
    }
    if found.is_empty() {
        let given: Vec<_> = settings
            .given
            .iter()
            .map(|given| format!("{}={} ({})", given.name, given.effective, given.origin))
            .collect();
        let evidence = if given.is_empty() { "none is set".to_owned() } else { given.join(", ") };
        found.push(Finding::fine(CHECK, "every variable has the effect it asks for", evidence));
    }
    found
}

/// The variable as it was set.
fn value(machine: &Machine, name: &str) -> String {
    let value = machine.variable(name).map(|value| value.to_string_lossy().into_owned());
    value.map_or_else(
        || format!("{name}, not from the environment"),
        |value| format!("{name}={}", nccl_net_pinrail::config::printable(&value)),
    )
}
