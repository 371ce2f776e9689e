//! Rules of sending, receiving and testing.

use super::super::Outcome;
use super::super::end::{
    Message, Receiver, Sender, UNTOUCHED, expect_size, place, poll, stride, wait,
};
use super::super::side::Side;
use super::{broken, row};
use pinrail_client::failure::Result;
use pinrail_client::net::{Member, Request};
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

pub fn optional_completion(side: &mut Side) -> Result<Outcome> {
    if side.version() < 9 {
        return Ok(Outcome::NotApplicable("NCCL takes the marker away before v9".into()));
    }
    let messages = row(20, SIZE, 2);
    ends(
        side,
        21 * stride(SIZE),
        |sender| {
            numbered(sender, &messages)?;
            sender.send_all(&messages, 4)?;
            Ok(Outcome::Pass)
        },
        |receiver| {
            for (number, message) in messages.iter().enumerate() {
                receiver.memory.poison(message.offset, SIZE);
                let request = loop {
                    if let Some(request) = receiver.post_optional(*message)? {
                        break request;
                    }
                };
                while !side.net()?.test(request, &mut [0; 64])? {
                    std::thread::yield_now();
                }
                // It may have been done before the data came.
                while !receiver.memory.holds(message.offset, SIZE, number as u64) {
                    std::thread::yield_now();
                }
            }
            Ok(Outcome::Pass)
        },
    )
}

pub fn both_directions(side: &mut Side) -> Result<Outcome> {
    const COUNT: usize = 100;
    let side = &*side;
    let messages = row(COUNT, SIZE, 1);
    let room = (COUNT + 1) * stride(SIZE);
    let (sender, receiver) = if side.sends() {
        (side.sender(room)?, side.receiver(room)?)
    } else {
        let receiver = side.receiver(room)?;
        (side.sender(room)?, receiver)
    };
    numbered(&sender, &messages)?;
    for message in &messages {
        receiver.memory.poison(message.offset, SIZE);
    }
    side.step("isend, irecv and test in turns")?;
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    let (mut sent, mut received) = (0, 0);
    while sent < COUNT || received < COUNT {
        if let Some(message) = messages.get(sends.len()).filter(|_| sends.len() - sent < 8) {
            sends.extend(sender.post(*message)?);
        }
        if let Some(message) =
            messages.get(receives.len()).filter(|_| receives.len() - received < 8)
        {
            receives.extend(receiver.post(&[*message])?);
        }
        if let Some(request) = sends.get(sent) {
            sent += usize::from(poll(side.net()?, *request)?.is_some());
        }
        if let Some(request) = receives.get(received)
            && let Some(sizes) = poll(side.net()?, *request)?
        {
            expect_size(sizes[0], SIZE)?;
            receiver.memory.expect(messages[received].offset, SIZE, SIZE, received as u64)?;
            received += 1;
        }
        std::thread::yield_now();
    }
    sender.close()?;
    receiver.close()?;
    Ok(Outcome::Pass)
}

pub fn another_thread(side: &mut Side) -> Result<Outcome> {
    const COUNT: usize = 50;
    let messages = row(COUNT, SIZE, 4);
    let room = (COUNT + 1) * stride(SIZE);
    let net = side.net()?;
    let finish = |request: Option<Request>| match request {
        Some(request) => wait(net, request).map(|_| true),
        None => Ok(false),
    };
    ends(
        side,
        room,
        |sender| {
            numbered(sender, &messages)?;
            let (comm, members) = (sender.comm, messages.iter().map(|m| sender.member(*m)));
            elsewhere(members.collect(), |member| {
                // SAFETY: the range is registered, and the memory is never unmapped.
                finish(unsafe { net.isend(comm, member)? })
            })
        },
        |receiver| {
            for message in &messages {
                receiver.memory.poison(message.offset, SIZE);
            }
            let (comm, members) = (receiver.comm, messages.iter().map(|m| receiver.member(*m)));
            elsewhere(members.collect(), |member| {
                // SAFETY: as above.
                finish(unsafe { net.irecv(comm, &[member])? })
            })?;
            for (number, message) in messages.iter().enumerate() {
                receiver.memory.expect(message.offset, SIZE, SIZE, number as u64)?;
            }
            Ok(Outcome::Pass)
        },
    )
}

/// Has another thread move each message, however often that must be tried.
fn elsewhere(
    members: Vec<Member>,
    attempt: impl Fn(Member) -> Result<bool> + Sync,
) -> Result<Outcome> {
    std::thread::scope(|scope| {
        let work = || -> Result<Outcome> {
            for member in members {
                while !attempt(member)? {
                    std::thread::yield_now();
                }
            }
            Ok(Outcome::Pass)
        };
        scope.spawn(work).join().unwrap_or_else(|_| broken("test", "the thread panicked"))
    })
}

pub fn flush(side: &mut Side) -> Result<Outcome> {
    const GPU_MEMORY: i32 = 2 | 4;
    let gpu = side.net()?.properties(side.device())?.ptr_support & GPU_MEMORY != 0;
    if !gpu {
        return Ok(Outcome::NotApplicable(
            "no GPU memory is offered, so that NCCL never flushes".into(),
        ));
    }
    let count = side.most_members()?;
    let messages: Vec<_> = row(count, SIZE, 0)
        .into_iter()
        .enumerate()
        .map(|(index, message)| Message { tag: index as i32, ..message })
        .collect();
    ends(
        side,
        (count + 1) * stride(SIZE),
        |sender| {
            numbered(sender, &messages)?;
            // Members of one receive may have to be there together.
            sender.send_all(&messages, messages.len())?;
            sender.send_all(&messages, 1)?;
            Ok(Outcome::Pass)
        },
        |receiver| {
            // All members at once, then one by one.
            let request = receiver.receive(&messages)?;
            wait(side.net()?, request)?;
            flush_one(side, receiver, &messages)?;
            for message in &messages {
                let request = receiver.receive(&[*message])?;
                wait(side.net()?, request)?;
                flush_one(side, receiver, &[*message])?;
            }
            Ok(Outcome::Pass)
        },
    )
}

fn flush_one(side: &Side, receiver: &Receiver<'_>, messages: &[Message]) -> Result<()> {
    side.step("iflush and test")?;
    let members: Vec<_> = messages.iter().map(|message| receiver.member(*message)).collect();
    // SAFETY: the ranges are registered with this comm.
    if let Some(request) = unsafe { side.net()?.iflush(receiver.comm, &members)? } {
        while !side.net()?.test_without_sizes(request)? {
            std::thread::yield_now();
        }
    }
    side.step("irecv and test")
}
