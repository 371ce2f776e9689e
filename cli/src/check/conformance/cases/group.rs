//! Rules of receives of several members.

use super::super::Outcome;
use super::super::end::{Message, expect_size, place, stride, wait};
use super::super::side::Side;
use super::data::{ends, numbered};
use pinrail_client::failure::Result;
use pinrail_client::net::Request;

const SIZE: usize = 3000;

/// Several members do not come up.
fn single(side: &Side) -> Result<Option<Outcome>> {
    let most = side.most_members()?;
    let why = "maxRecvs is 1, so that NCCL has no receives of several members";
    Ok((most == 1).then(|| Outcome::NotApplicable(why.into())))
}

pub fn multi_receive(side: &mut Side) -> Result<Outcome> {
    if let Some(outcome) = single(side)? {
        return Ok(outcome);
    }
    let most = side.most_members()?;
    // Each length and tag once; the sender goes from the last to the first.
    let group = |count: usize| -> Vec<Message> {
        let message = |index: usize| Message {
            offset: place(index, SIZE),
            size: 1 + index * 313,
            tag: 1000 - 7 * index as i32,
        };
        (0..count).map(message).collect()
    };
    ends(
        side,
        (most + 1) * stride(SIZE),
        |sender| {
            for count in 1..=most {
                let messages = group(count);
                numbered(sender, &messages)?;
                let requests = messages
                    .iter()
                    .rev()
                    .map(|message| sender.send(*message))
                    .collect::<Result<Vec<_>>>()?;
                for request in requests {
                    wait(side.net()?, request)?;
                }
            }
            Ok(Outcome::Pass)
        },
        |receiver| {
            for count in 1..=most {
                let messages = group(count);
                for message in &messages {
                    receiver.memory.poison(message.offset, message.size);
                }
                let request = receiver.receive(&messages)?;
                let sizes = wait(side.net()?, request)?;
                for (number, (message, size)) in messages.iter().zip(sizes).enumerate() {
                    expect_size(size, message.size)?;
                    let (offset, size) = (message.offset, message.size);
                    receiver.memory.expect(offset, size, size, number as u64)?;
                }
            }
            Ok(Outcome::Pass)
        },
    )
}

pub fn later_tags(side: &mut Side) -> Result<Outcome> {
    if let Some(outcome) = single(side)? {
        return Ok(outcome);
    }
    let message = |index: usize| Message {
        offset: place(index, SIZE),
        size: 100 + index,
        tag: 10 + index as i32,
    };
    let messages = [message(0), message(1), message(2), message(3)];
    ends(
        side,
        5 * stride(SIZE),
        |sender| {
            numbered(sender, &messages)?;
            side.meet()?;
            // Two receives of two members are posted. The last message belongs to the second of them.
            let mut requests: [Option<Request>; 4] = [None; 4];
            for index in [3, 1, 0, 2, 3] {
                if requests[index].is_some() {
                    continue;
                }
                requests[index] = if index == 3 && requests[0].is_none() {
                    sender.post(messages[index])?
                } else {
                    Some(sender.send(messages[index])?)
                };
            }
            for request in requests.into_iter().flatten() {
                wait(side.net()?, request)?;
            }
            Ok(Outcome::Pass)
        },
        |receiver| {
            for message in &messages {
                receiver.memory.poison(message.offset, message.size);
            }
            let requests = [receiver.receive(&messages[..2])?, receiver.receive(&messages[2..])?];
            side.meet()?;
            for (first, request) in [0, 2].into_iter().zip(requests) {
                let sizes = wait(side.net()?, request)?;
                for (index, size) in [first, first + 1].into_iter().zip(sizes) {
                    let Message { offset, size: sent, .. } = messages[index];
                    expect_size(size, sent)?;
                    receiver.memory.expect(offset, sent, sent, index as u64)?;
                }
            }
            Ok(Outcome::Pass)
        },
    )
}
