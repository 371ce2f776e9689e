//! Rules of registering memory.

use super::super::Outcome;
use super::super::end::{Message, expect_size, place, stride, wait};
use super::super::side::Side;
use super::data::{ends, numbered};
use super::{broken, row};
use pinrail_client::failure::Result;
use pinrail_client::net::Member;
use std::sync::atomic::{AtomicBool, Ordering};

const SIZE: usize = 4096;

pub fn registration_ranges(side: &mut Side) -> Result<Outcome> {
    /// Bytes from a page's start, and lengths.
    const RANGES: [(usize, usize); 7] =
        [(0, 1), (1, 1), (3, 4097), (4095, 2), (4095, 8194), (17, 100_001), (4096, 4096)];
    const MOST: usize = 128 << 10;
    const BEGIN: usize = 4096;
    let message = |(offset, size): (usize, usize)| Message { offset: BEGIN + offset, size, tag: 0 };
    ends(
        side,
        BEGIN + MOST,
        |sender| {
            for (number, range) in RANGES.into_iter().enumerate() {
                let message = message(range);
                let registration = sender.register(message.offset, message.size)?;
                sender.memory.write(message.offset, message.size, number as u64);
                let request = loop {
                    if let Some(request) = sender.post_with(message, registration)? {
                        break request;
                    }
                };
                wait(side.net()?, request)?;
                side.net()?.deregister_send(sender.comm, registration)?;
            }
            Ok(Outcome::Pass)
        },
        |receiver| {
            for (number, range) in RANGES.into_iter().enumerate() {
                let message = message(range);
                let (offset, size) = (message.offset, message.size);
                let registration = receiver.register(offset, size)?;
                receiver.memory.poison(offset, size);
                let member = receiver.member_with(message, registration);
                let request = loop {
                    if let Some(request) = receiver.post_members(&[member])? {
                        break request;
                    }
                };
                expect_size(wait(side.net()?, request)?[0], size)?;
                receiver.memory.expect(offset, size, size, number as u64)?;
                side.net()?.deregister_recv(receiver.comm, registration)?;
            }
            Ok(Outcome::Pass)
        },
    )
}

pub fn overlapping_registrations(side: &mut Side) -> Result<Outcome> {
    const PAGE: usize = 4096;
    /// The same range three times, a part of it, and one that reaches beyond.
    const RANGES: [(usize, usize); 5] =
        [(0, 4 * PAGE), (0, 4 * PAGE), (PAGE, PAGE), (0, 4 * PAGE), (2 * PAGE, 6 * PAGE)];
    let message = Message { offset: 2 * PAGE + 100, size: PAGE, tag: 0 };
    ends(
        side,
        16 * PAGE,
        |sender| {
            let all = RANGES
                .iter()
                .map(|(offset, size)| sender.register(*offset, *size))
                .collect::<Result<Vec<_>>>()?;
            for (number, ended) in [0, 2, 4, 1].into_iter().enumerate() {
                side.net()?.deregister_send(sender.comm, all[ended])?;
                sender.memory.write(message.offset, message.size, number as u64);
                let request = loop {
                    if let Some(request) = sender.post_with(message, all[3])? {
                        break request;
                    }
                };
                wait(side.net()?, request)?;
            }
            side.net()?.deregister_send(sender.comm, all[3])?;
            Ok(Outcome::Pass)
        },
        |receiver| {
            let all = RANGES
                .iter()
                .map(|(offset, size)| receiver.register(*offset, *size))
                .collect::<Result<Vec<_>>>()?;
            let Message { offset, size, .. } = message;
            for (number, ended) in [0, 2, 4, 1].into_iter().enumerate() {
                side.net()?.deregister_recv(receiver.comm, all[ended])?;
                receiver.memory.poison(offset, size);
                let member = receiver.member_with(message, all[3]);
                let request = loop {
                    if let Some(request) = receiver.post_members(&[member])? {
                        break request;
                    }
                };
                wait(side.net()?, request)?;
                receiver.memory.expect(offset, size, size, number as u64)?;
            }
            side.net()?.deregister_recv(receiver.comm, all[3])?;
            Ok(Outcome::Pass)
        },
    )
}

pub fn subranges(side: &mut Side) -> Result<Outcome> {
    const TOTAL: usize = 1 << 20;
    // First, last and scattered bytes of one registration.
    let mut messages = Vec::new();
    for index in 0..32 {
        messages.push(Message {
            offset: place(0, 0) + index * 32_003,
            size: 1 + index * 97,
            tag: 0,
        });
    }
    ends(
        side,
        TOTAL,
        |sender| {
            numbered(sender, &messages)?;
            sender.send_all(&messages, 4)?;
            Ok(Outcome::Pass)
        },
        |receiver| {
            receiver.receive_all(&messages, 4)?;
            Ok(Outcome::Pass)
        },
    )
}

pub fn deregister_null(side: &mut Side) -> Result<Outcome> {
    let message = row(1, SIZE, 0)[0];
    ends(
        side,
        2 * stride(SIZE),
        |sender| {
            side.step("deregMr(NULL)")?;
            side.net()?.deregister_nothing(sender.comm)?;
            numbered(sender, &[message])?;
            sender.send_all(&[message], 1)?;
            Ok(Outcome::Pass)
        },
        |receiver| {
            receiver.receive_all(&[message], 1)?;
            Ok(Outcome::Pass)
        },
    )
}

/// Moves data in this thread while another one registers `spare` over and over.
fn busy(
    spare: Member,
    move_data: impl FnOnce() -> Result<()>,
    register: impl Fn(Member) -> Result<()> + Sync,
) -> Result<Outcome> {
    const LEAST: usize = 100;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let work = || -> Result<()> {
            let mut rounds = 0;
            while rounds < LEAST || !over.load(Ordering::Relaxed) {
                register(spare)?;
                rounds += 1;
                // The data have the first right to the core.
                std::thread::yield_now();
            }
            Ok(())
        };
        let thread = scope.spawn(work);
        let moved = move_data();
        over.store(true, Ordering::Relaxed);
        let registered = thread.join().unwrap_or_else(|_| broken("regMr", "the thread panicked"));
        moved.and(registered)
    })?;
    Ok(Outcome::Pass)
}

pub fn register_while_busy(side: &mut Side) -> Result<Outcome> {
    const COUNT: usize = 300;
    let messages = row(COUNT, SIZE, 6);
    // Behind all messages lies what the other thread registers: whole pages.
    let offset = place(COUNT + 1, SIZE).next_multiple_of(SIZE);
    let spare = Message { offset, size: 3 * SIZE, tag: 0 };
    let room = spare.offset + 2 * spare.size;
    let net = side.net()?;
    ends(
        side,
        room,
        |sender| {
            numbered(sender, &messages)?;
            let (comm, spare) = (sender.comm, sender.member(spare));
            busy(
                spare,
                || sender.send_all(&messages, 8),
                |spare| {
                    // SAFETY: the memory is never unmapped.
                    let made = unsafe { net.register_send(comm, spare.data, spare.size)? };
                    net.deregister_send(comm, made)
                },
            )
        },
        |receiver| {
            let (comm, spare) = (receiver.comm, receiver.member(spare));
            busy(
                spare,
                || receiver.receive_all(&messages, 8),
                |spare| {
                    // SAFETY: the memory is never unmapped.
                    let made = unsafe { net.register_recv(comm, spare.data, spare.size)? };
                    net.deregister_recv(comm, made)
                },
            )
        },
    )
}
