//! Rules of sending, receiving and testing.

use super::super::Outcome;
use super::super::end::{
    Message, Receiver, Sender, UNTOUCHED, expect_size, place, poll, stride, wait,
};
use super::super::side::Side;
use super::{broken, row};
use pinrail_client::failure::Result;
use std::collections::VecDeque;
use std::ffi::c_int;

const SIZE: usize = 4096;

/// Plays the two ends over one connection with `room` bytes each.
pub fn ends(
    side: &Side,
    room: usize,
    send: impl FnOnce(&Sender<'_>) -> Result<Outcome>,
    receive: impl FnOnce(&Receiver<'_>) -> Result<Outcome>,
) -> Result<Outcome> {
    if side.sends() {
        let sender = side.sender(room)?;
        side.step("isend and test")?;
        let outcome = send(&sender)?;
        sender.close()?;
        Ok(outcome)
    } else {
        let receiver = side.receiver(room)?;
        side.step("irecv and test")?;
        let outcome = receive(&receiver)?;
        receiver.close()?;
        Ok(outcome)
    }
}

/// Writes messages 0, 1, … to be sent.
pub fn numbered(sender: &Sender<'_>, messages: &[Message]) -> Result<()> {
    for (number, message) in messages.iter().enumerate() {
        sender.memory.write(message.offset, message.size, number as u64);
    }
    Ok(())
}

pub fn sizes(side: &mut Side) -> Result<Outcome> {
    const SIZES: [usize; 15] =
        [1, 2, 7, 8, 63, 64, 65, 1000, 4095, 4096, 4097, 65_536, 100_001, 1 << 20, (1 << 20) + 1];
    const MOST: usize = (1 << 20) + 1;
    // Every address modulo eight comes up.
    let message = |index: usize| Message {
        offset: place(0, MOST) + index % 8,
        size: SIZES[index],
        tag: index as i32,
    };
    ends(
        side,
        2 * stride(MOST),
        |sender| {
            for index in 0..SIZES.len() {
                let message = message(index);
                sender.memory.write(message.offset, message.size, index as u64);
                let request = sender.send(message)?;
                expect_size(wait(side.net()?, request)?[0], message.size)?;
            }
            Ok(Outcome::Pass)
        },
        |receiver| {
            for index in 0..SIZES.len() {
                let message = message(index);
                receiver.memory.poison(message.offset, message.size);
                let request = receiver.receive(&[message])?;
                expect_size(wait(side.net()?, request)?[0], message.size)?;
                receiver.memory.expect(message.offset, message.size, message.size, index as u64)?;
            }
            Ok(Outcome::Pass)
        },
    )
}

pub fn zero_bytes(side: &mut Side) -> Result<Outcome> {
    let mut messages = row(6, SIZE, 3);
    for index in [0, 2, 3, 5] {
        messages[index].size = 0;
    }
    ends(
        side,
        8 * stride(SIZE),
        |sender| {
            numbered(sender, &messages)?;
            for message in &messages {
                let request = sender.send(*message)?;
                wait(side.net()?, request)?;
            }
            Ok(Outcome::Pass)
        },
        |receiver| {
            receiver.memory.poison(place(0, SIZE), 6 * stride(SIZE));
            let rooms = row(6, SIZE, 3);
            for (index, message) in messages.iter().enumerate() {
                let request = receiver.receive(&[rooms[index]])?;
                expect_size(wait(side.net()?, request)?[0], message.size)?;
                receiver.memory.expect(message.offset, SIZE, message.size, index as u64)?;
            }
            Ok(Outcome::Pass)
        },
    )
}

pub fn shorter_send(side: &mut Side) -> Result<Outcome> {
    const SIZES: [usize; 4] = [1, 100, SIZE - 1, SIZE];
    let message = |index: usize| Message { offset: place(0, SIZE), size: SIZES[index], tag: 0 };
    ends(
        side,
        2 * stride(SIZE),
        |sender| {
            for index in 0..SIZES.len() {
                let message = message(index);
                sender.memory.write(message.offset, message.size, index as u64);
                let request = sender.send(message)?;
                wait(side.net()?, request)?;
            }
            Ok(Outcome::Pass)
        },
        |receiver| {
            for (index, size) in SIZES.into_iter().enumerate() {
                let room = Message { size: SIZE, ..message(index) };
                receiver.memory.poison(room.offset, SIZE);
                let request = receiver.receive(&[room])?;
                expect_size(wait(side.net()?, request)?[0], size)?;
                receiver.memory.expect(room.offset, SIZE, size, index as u64)?;
            }
            Ok(Outcome::Pass)
        },
    )
}

pub fn null_sizes(side: &mut Side) -> Result<Outcome> {
    let message = row(1, SIZE, 0)[0];
    let finish = |request| {
        while !side.net()?.test_without_sizes(request)? {
            std::thread::yield_now();
        }
        Ok(Outcome::Pass)
    };
    ends(
        side,
        2 * stride(SIZE),
        |sender| {
            numbered(sender, &[message])?;
            finish(sender.send(message)?)
        },
        |receiver| {
            receiver.memory.poison(message.offset, SIZE);
            let outcome = finish(receiver.receive(&[message])?)?;
            receiver.memory.expect(message.offset, SIZE, SIZE, 0)?;
            Ok(outcome)
        },
    )
}

pub fn sizes_bound(side: &mut Side) -> Result<Outcome> {
    let message = row(1, SIZE, 0)[0];
    let only_one = |sizes: &[c_int]| match sizes[1..].iter().position(|size| *size != UNTOUCHED) {
        None => Ok(Outcome::Pass),
        Some(at) => broken("test", format!("wrote size {} of a request with one", at + 2)),
    };
    ends(
        side,
        2 * stride(SIZE),
        |sender| {
            numbered(sender, &[message])?;
            let request = sender.send(message)?;
            only_one(&wait(side.net()?, request)?)
        },
        |receiver| {
            let request = receiver.receive(&[message])?;
            only_one(&wait(side.net()?, request)?)
        },
    )
}

pub fn would_block(side: &mut Side) -> Result<Outcome> {
    const COUNT: usize = 64;
    const SMALL: usize = 512;
    let messages = row(COUNT, SMALL, 5);
    ends(
        side,
        (COUNT + 1) * stride(SMALL),
        |sender| {
            numbered(sender, &messages)?;
            side.step("isend where nobody receives")?;
            let mut flying = VecDeque::new();
            for message in &messages {
                match sender.post(*message)? {
                    Some(request) => flying.push_back(request),
                    None => break,
                }
            }
            let rest = &messages[flying.len()..];
            // A network may have taken the first in; then it is gone for good.
            if let Some(first) = flying.front()
                && poll(side.net()?, *first)?.is_some()
            {
                flying.pop_front();
            }
            side.meet()?;
            side.step("isend and test")?;
            for request in flying {
                wait(side.net()?, request)?;
            }
            sender.send_all(rest, 8)?;
            Ok(Outcome::Pass)
        },
        |receiver| {
            side.meet()?;
            receiver.receive_all(&messages, 8)?;
            Ok(Outcome::Pass)
        },
    )
}

pub fn post_order(side: &mut Side) -> Result<Outcome> {
    const COUNT: usize = 200;
    let mut messages = row(COUNT, SIZE, 9);
    for (index, message) in messages.iter_mut().enumerate() {
        message.size = 1 + (index * 613) % SIZE;
    }
    ends(
        side,
        (COUNT + 1) * stride(SIZE),
        |sender| {
            numbered(sender, &messages)?;
            sender.send_all(&messages, 8)?;
            Ok(Outcome::Pass)
        },
        |receiver| {
            receiver.receive_all(&messages, 8)?;
            Ok(Outcome::Pass)
        },
    )
}

pub fn many_in_flight(side: &mut Side) -> Result<Outcome> {
    const SMALL: usize = 1000;
    // NCCL had 8 requests before 2.19, which is the first to take v7.
    let receives = if side.version() < 7 { 8 } else { 32 };
    let members = side.most_members()?;
    let count = receives * members;
    let messages: Vec<_> = row(count, SMALL, 0)
        .into_iter()
        .enumerate()
        .map(|(index, message)| Message { tag: (index % members) as i32, ..message })
        .collect();
    ends(
        side,
        (count + 1) * stride(SMALL),
        |sender| {
            numbered(sender, &messages)?;
            side.meet()?;
            let requests =
                messages.iter().map(|message| sender.send(*message)).collect::<Result<Vec<_>>>()?;
            for request in requests {
                wait(side.net()?, request)?;
            }
            Ok(Outcome::Pass)
        },
        |receiver| {
            let mut requests = Vec::new();
            for group in messages.chunks(members) {
                for message in group {
                    receiver.memory.poison(message.offset, SMALL);
                }
                match receiver.post(group)? {
                    Some(request) => requests.push(request),
                    None => {
                        let had = requests.len();
                        return broken(
                            "irecv",
                            format!("takes {had} receives of {members}, NCCL has {receives}"),
                        );
                    }
                }
            }
            side.meet()?;
            for (request, group) in requests.into_iter().zip(messages.chunks(members)) {
                let sizes = wait(side.net()?, request)?;
                for size in &sizes[..members] {
                    expect_size(*size, SMALL)?;
                }
                for message in group {
                    let number = message.offset / stride(SMALL);
                    receiver.memory.expect(message.offset, SMALL, SMALL, number as u64)?;
                }
            }
            Ok(Outcome::Pass)
        },
    )
}
