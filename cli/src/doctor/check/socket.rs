//! The interface of the TCP side channel, chosen by the plugin's rule.

use crate::doctor::finding::Finding;
use crate::doctor::machine::Machine;
use nccl_net_pinrail::host::netif::{Wanted, choose, interfaces};

const CHECK: &str = "socket";

/// Looks at the interfaces of this process. A captured tree does not hold their addresses.
pub fn check(machine: &Machine) -> Option<Finding> {
    if !machine.live {
        return None;
    }
    let present = match interfaces() {
        Ok(present) => present,
        Err(error) => {
            let what = "the interfaces of this host cannot be listed";
            return Some(Finding::problem(
                CHECK,
                what,
                error.to_string(),
                "let the process open sockets",
            ));
        }
    };
    Some(match choose(&present, &Wanted::from_settings(&machine.settings)) {
        Ok(channel) => Finding::fine(
            CHECK,
            format!("connections are made over {}", channel.name),
            format!("{}; {}", channel.address.ip(), channel.reason),
        ),
        Err(error) => Finding::problem(
            CHECK,
            format!("there is no interface to make connections over: {}", error.why),
            format!("present: {}", error.present),
            "let NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY name what is here, or unset them",
        ),
    })
}
