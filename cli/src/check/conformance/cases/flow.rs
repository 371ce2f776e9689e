//! Rules of what surrounds a transfer: markers, directions, threads, flushes.

use super::super::Outcome;
use super::super::end::{Message, Receiver, expect_size, poll, stride, wait};
use super::super::side::Side;
use super::data::{ends, numbered};
use super::{broken, row};
use pinrail_client::failure::Result;
use pinrail_client::net::{Member, Request};

const SIZE: usize = 4096;

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
