//! The rules, each with the case that tries it. `docs/check.md` lists the same names and rules.

mod close;
mod connect;
mod data;
mod flow;
mod group;
mod load;
mod register;

use super::Outcome;
use super::end::{Message, place};
use super::side::Side;
use pinrail_client::failure::{Failure, Result};

/// A rule of the interface.
#[derive(Debug)]
pub struct Case {
    /// Its name, which never changes.
    pub name: &'static str,
    /// The rule.
    pub rule: &'static str,
    /// Processes that it takes.
    pub processes: usize,
    /// One of them dies of it.
    pub one_dies: bool,
    /// What each of them does.
    pub play: fn(&mut Side) -> Result<Outcome>,
}

macro_rules! dies {
    () => {
        false
    };
    ($word:ident) => {
        true
    };
}

macro_rules! cases {
    ($($name:ident in $module:ident by $processes:literal$(, $dies:ident)?: $rule:literal;)+) => {
        /// All cases, in the order in which things are needed.
        pub const CASES: &[Case] = &[$(
            Case {
                name: stringify!($name),
                rule: $rule,
                processes: $processes,
                one_dies: dies!($($dies)?),
                play: $module::$name,
            }
        ),+];
    };
}

cases! {
    name in load by 1: "the table's name is there before init and stays the same";
    devices in load by 1: "devices finds some, and the same number each time";
    properties_written in load by 1: "getProperties writes every field and nothing behind the struct";
    properties_stable in load by 1: "properties, names and paths stay the same and readable";
    properties_range in load by 1: "properties are values that NCCL can use";
    init_again in load by 1: "every communicator calls init; contexts end in any order";
    finalize_null in load by 1: "finalize takes NULL, which follows an init that failed";
    net_attr in load by 1: "setNetAttr takes what NCCL is about to do";
    reload in load by 1: "the library can be loaded, used and unloaded again in one process";
    listen in connect by 1: "listen gives a listener and writes no more than 128 bytes of handle";
    accept_does_not_wait in connect by 1: "accept gives NULL while nobody connects";
    self_connection in connect by 1: "one thread can connect to itself: neither call waits for the other";
    foreign_handle in connect by 1: "a handle of another network gives no connection and does no harm";
    connect_does_not_wait in connect by 2: "connect returns while the peer does not accept";
    close_unaccepted in connect by 2: "closeListen takes half an accept with it, and what follows works";
    several_connections in connect by 2: "connections are told apart, in whatever order they are accepted";
    sizes in data by 2: "every byte arrives where it should and nowhere else; both ends say the size";
    zero_bytes in data by 2: "a message of no bytes arrives in its turn";
    shorter_send in data by 2: "a message may be shorter than its receive, which says the size that came";
    null_sizes in data by 2: "test takes NULL for the sizes";
    sizes_bound in data by 2: "test writes a size for each member and none behind";
    would_block in data by 2: "isend returns where nobody receives yet, and loses nothing";
    post_order in data by 2: "messages of one tag match receives in the order of posting";
    many_in_flight in data by 2: "as many receives as NCCL posts can be in flight, and their sends";
    optional_completion in flow by 2: "a receive whose completion is optional has a request all the same";
    both_directions in flow by 2: "connections in both directions move at once, driven by one thread";
    another_thread in flow by 2: "one thread connects and closes, another one moves the data";
    flush in flow by 2: "a flush of received data ends, or has nothing to wait for";
    multi_receive in group by 2: "receives of several members match sends by tag, in any order of sending";
    later_tags in group by 2: "a send for a later receive waits, or arrives there";
    registration_ranges in register by 2: "memory of any address and length can be registered and used";
    overlapping_registrations in register by 2: "a range can be registered several times; one ends without the others";
    subranges in register by 2: "a registration serves any part of its range";
    deregister_null in register by 2: "deregMr takes NULL";
    register_while_busy in register by 2: "memory can be registered by another thread while data move";
    close_order in close by 2: "ends close in any order, and neither waits for the other";
    close_in_flight in close by 2: "ends close with requests in flight, after their registrations ended";
    receiver_outlives_sender in close by 2, one_dies: "a receive whose peer died ends with an error, in bounded time";
    sender_outlives_receiver in close by 2, one_dies: "a send whose peer died ends with an error, in bounded time";
}

/// Fails a case.
fn broken<T>(call: &str, text: impl Into<String>) -> Result<T> {
    Err(Failure::new(call, text))
}

/// `count` messages of `size` bytes in as many places, of one tag.
fn row(count: usize, size: usize, tag: i32) -> Vec<Message> {
    (0..count).map(|slot| Message { offset: place(slot, size), size, tag }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_documented() {
        let page = include_str!("../../../../../docs/check.md");
        for (index, case) in CASES.iter().enumerate() {
            assert!(CASES[..index].iter().all(|other| other.name != case.name), "{}", case.name);
            let row = format!("| `{}` | {} |", case.name, case.rule);
            assert!(page.contains(&row), "docs/check.md lacks: {row}");
        }
        let documented =
            page.lines().filter(|line| line.starts_with("| `") && line.contains("_")).count();
        assert!(documented >= CASES.iter().filter(|case| case.name.contains('_')).count());
    }
}
