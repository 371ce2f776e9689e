//! The checked pass: every byte of every message, the guards around it, and the size that `test` reports.
//!
//! Messages start at changing alignments, some are shorter than their receive, and the tags of a grouped receive are
//! sent in a different order for each group.

use super::endpoint::Endpoint;
use crate::buffer::{GUARD, POISON, fill, first_wrong, key};
use crate::failure::{Failure, Result};
use crate::link::{CheckPlan, Reply};
use crate::net::abi::TEST_SIZES;
use crate::net::{Member, Net, Request};
use std::collections::VecDeque;

/// Bytes from one message's memory to the next: two guards and room for the changing alignment.
pub fn stride(size: usize) -> usize {
    (size + 2 * GUARD + ALIGNMENTS).next_multiple_of(64)
}

const ALIGNMENTS: usize = 64;
const FIRST_TAG: i32 = 1000;

/// Where message `member` of `group` lies, how long it is, and its tag.
struct Message {
    offset: usize,
    length: usize,
    tag: i32,
    key: u64,
}

impl CheckPlan {
    fn message(&self, group: u64, member: usize) -> Message {
        let number = group * self.members as u64 + member as u64;
        let slot = (group as usize % self.slots) * self.members + member;
        // 8 messages in a row are aligned, then come odd addresses; every fourth message is short.
        let shift = if number % 16 < 8 { 0 } else { (number as usize * 13) % ALIGNMENTS };
        let short = number % 4 == 3;
        Message {
            offset: slot * stride(self.size) + GUARD + shift,
            length: if short { self.size - self.size / 3 } else { self.size },
            tag: FIRST_TAG + member as i32,
            key: key(self.size, number),
        }
    }
}

/// Rank 0: sends all messages.
pub fn send(net: &Net, endpoint: &mut Endpoint, plan: &CheckPlan) -> Result<Reply> {
    let stage = "isend of the checked pass";
    let total = plan.groups * plan.members as u64;
    let limit = plan.slots * plan.members;
    let mut in_flight: VecDeque<Request> = VecDeque::with_capacity(limit);
    let mut filled = 0;
    let mut posted = 0u64;
    let mut bytes = 0u64;
    let mut sizes = [0; TEST_SIZES];
    let mut patience = endpoint.patience();
    while posted < total || !in_flight.is_empty() {
        let mut moved = false;
        while posted < total && in_flight.len() < limit {
            let group = posted / plan.members as u64;
            // Groups start with a different member each, so that matching by tag is exercised.
            let turn = (posted + group) % plan.members as u64;
            let message = plan.message(group, turn as usize);
            if filled == posted {
                // SAFETY: at most `limit` messages are in flight, so this slot's previous message is done.
                let memory = unsafe { endpoint.outgoing().bytes(message.offset, message.length) };
                fill(message.key, memory);
                filled += 1;
            }
            let member = endpoint.outgoing_member(message.offset, message.length, message.tag);
            // SAFETY: the memory is registered and stays untouched until the request leaves `in_flight`.
            let Some(request) = (unsafe { net.isend(endpoint.send(), member)? }) else { break };
            in_flight.push_back(request);
            bytes += message.length as u64;
            posted += 1;
            moved = true;
        }
        while let Some(&oldest) = in_flight.front() {
            if !net.test(oldest, &mut sizes)? {
                break;
            }
            in_flight.pop_front();
            moved = true;
        }
        if moved {
            patience.progress();
        } else {
            patience.idle(stage, || format!("{posted} of {total} messages posted"))?;
        }
    }
    Ok(Reply::Checked { messages: posted, bytes, wrong_messages: 0, wrong: None })
}

/// Rank 1: receives all messages and looks at every byte.
pub fn receive(net: &Net, endpoint: &mut Endpoint, plan: &CheckPlan) -> Result<Reply> {
    let stage = "irecv of the checked pass";
    let mut in_flight: VecDeque<Request> = VecDeque::with_capacity(plan.slots);
    let (mut posted, mut done) = (0u64, 0u64);
    let mut prepared = 0;
    let mut verdict = Verdict::default();
    let mut patience = endpoint.patience();
    while done < plan.groups {
        let mut moved = false;
        while posted < plan.groups && in_flight.len() < plan.slots {
            if prepared == posted {
                poison(endpoint, plan, posted);
                prepared += 1;
            }
            let members: Vec<Member> = (0..plan.members)
                .map(|index| {
                    let message = plan.message(posted, index);
                    endpoint.incoming_member(message.offset, plan.size, message.tag)
                })
                .collect();
            // SAFETY: the memory is registered and left alone until the request leaves `in_flight`.
            let Some(request) = (unsafe { net.irecv(endpoint.recv(), &members)? }) else { break };
            in_flight.push_back(request);
            posted += 1;
            moved = true;
        }
        while let Some(&oldest) = in_flight.front() {
            let mut sizes = [0; TEST_SIZES];
            if !net.test(oldest, &mut sizes)? {
                break;
            }
            in_flight.pop_front();
            if sizes[plan.members..].iter().any(|&size| size != 0) {
                return Err(Failure::new("test", "the plugin wrote sizes behind the last member"));
            }
            for (index, &size) in sizes[..plan.members].iter().enumerate() {
                verify(endpoint, plan, done, index, size, &mut verdict);
            }
            done += 1;
            moved = true;
        }
        if moved {
            patience.progress();
        } else {
            patience.idle(stage, || format!("{done} of {} receives done", plan.groups))?;
        }
    }
    let messages = plan.groups * plan.members as u64;
    let Verdict { bytes, wrong_messages, wrong } = verdict;
    Ok(Reply::Checked { messages, bytes, wrong_messages, wrong })
}

#[derive(Debug, Default)]
struct Verdict {
    bytes: u64,
    wrong_messages: u64,
    wrong: Option<String>,
}

fn poison(endpoint: &mut Endpoint, plan: &CheckPlan, group: u64) {
    for index in 0..plan.members {
        let start = plan.message(group, index).offset - GUARD;
        // SAFETY: the slot's previous receive is done and the new one is not posted yet.
        unsafe { endpoint.incoming().bytes(start, plan.size + 2 * GUARD) }.fill(POISON);
    }
}

fn verify(
    endpoint: &mut Endpoint,
    plan: &CheckPlan,
    group: u64,
    index: usize,
    reported: i32,
    verdict: &mut Verdict,
) {
    let message = plan.message(group, index);
    let start = message.offset - GUARD;
    // SAFETY: the receive of this slot is done and the next one is posted only after this check.
    let memory = unsafe { endpoint.incoming().bytes(start, plan.size + 2 * GUARD) };
    let (before, rest) = memory.split_at(GUARD);
    let (data, after) = rest.split_at(message.length);
    let untouched = |bytes: &[u8]| bytes.iter().position(|&byte| byte != POISON);
    let wrong = if usize::try_from(reported) != Ok(message.length) {
        Some(format!("{} bytes were sent, test says {reported}", message.length))
    } else if let Some(at) = first_wrong(message.key, data) {
        Some(format!("byte {at} of {} is wrong: {:#04x}", message.length, data[at]))
    } else if let Some(at) = untouched(before) {
        Some(format!("{} bytes before the receive were written", GUARD - at))
    } else {
        untouched(after).map(|at| format!("byte {at} behind the message was written"))
    };
    verdict.bytes += message.length as u64;
    if let Some(text) = wrong {
        verdict.wrong_messages += 1;
        verdict.wrong.get_or_insert_with(|| format!("receive {group}, member {index}: {text}"));
    }
}

#[cfg(test)]
mod tests {
    use super::{GUARD, stride};
    use crate::link::CheckPlan;

    #[test]
    fn messages_in_flight_never_overlap() {
        let plan = CheckPlan { size: 777, groups: 40, members: 3, slots: 4 };
        for first in 0..plan.groups {
            let mut ranges: Vec<(usize, usize)> = (first..first + 4)
                .flat_map(|group| (0..plan.members).map(move |member| (group, member)))
                .map(|(group, member)| {
                    let offset = plan.message(group, member).offset;
                    (offset - GUARD, offset + plan.size + GUARD)
                })
                .collect();
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?}");
            assert!(ranges.iter().all(|range| range.1 <= 12 * stride(plan.size)));
        }
    }
}
