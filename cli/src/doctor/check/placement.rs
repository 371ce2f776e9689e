//! Memory that a long-term pin must first move, and a driver that pins without saying for how long.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use nccl_net_pinrail::config::RegFallback;
use nccl_net_pinrail::host::kernel;
use nccl_net_pinrail::host::nvidia::{Driver, FILE as DRIVER, LongTerm, long_term_since};
use nccl_net_pinrail::host::placement::placement_risk;

const CHECK: &str = "placement";

/// Looks at the kernel's areas and at the driver.
pub fn check(machine: &Machine) -> Vec<Finding> {
    let driver = Driver::read(&machine.proc);
    let arch = machine.architecture();
    let release = kernel::release(&machine.proc).unwrap_or_else(|| "unknown".into());
    let shown = driver.as_ref().map_or_else(
        || "no NVIDIA driver".to_owned(),
        |driver| {
            format!(
                "NVIDIA driver {} ({}), pins declared long-term: {}",
                driver.version,
                driver.flavour(),
                driver.long_term(&arch).word()
            )
        },
    );
    let Some(risk) = placement_risk(&machine.proc) else {
        if let Some(lost) = machine.unread(&["meminfo", "zoneinfo", "cmdline"]) {
            let what = "whether memory lies where it cannot be registered cannot be told";
            return vec![Finding::unknown(CHECK, what, lost, "mount procfs, or capture it whole")];
        }
        let what = "no memory lies where it could not be registered";
        return vec![Finding::fine(CHECK, what, format!("kernel {release}; {shown}"))];
    };
    if machine.withholds(DRIVER) {
        let what =
            "some memory must be moved before it can be registered; by which driver cannot be told";
        let evidence = format!("{risk}; /proc/{DRIVER} cannot be read");
        return vec![Finding::unknown(CHECK, what, evidence, "capture it whole")];
    }
    let evidence = format!("{risk}; kernel {release} on {arch}; {shown}");
    let Some(driver) = driver else {
        let what = "some memory must be moved before it can be registered";
        let remedy = "nothing, unless registrations fail: pinrail pins its own memory first";
        return vec![Finding::advice(CHECK, what, evidence, remedy)];
    };
    let cure = "take the area away on the kernel's command line (kho=off, cma=0, no hugetlb_cma=)";
    if driver.long_term(&arch) == LongTerm::Yes {
        let what = "some memory must be moved before it can be registered; this driver moves it";
        let remedy = format!("nothing, unless registrations fail; then {cure}");
        return vec![Finding::advice(CHECK, what, evidence, remedy)];
    }
    let newer = long_term_since(&arch)
        .map_or_else(String::new, |branch| format!(", or a driver of branch {branch} or later"));
    let meanwhile = match machine.settings.reg_fallback {
        RegFallback::Bounce => {
            "until then pinrail copies such buffers (PINRAIL_REG_FALLBACK=bounce)"
        }
        RegFallback::Fail => "until then jobs end, because PINRAIL_REG_FALLBACK=fail",
    };
    vec![Finding::problem(
        CHECK,
        "buffers that CUDA pins may lie where they cannot be registered afterwards (ENOMEM)",
        evidence,
        format!("{cure}{newer}; {meanwhile}; docs/registration.md"),
    )]
}
