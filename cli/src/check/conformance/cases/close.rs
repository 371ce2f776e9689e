//! Rules of closing, and of peers that are gone.

use super::super::Outcome;
use super::super::end::{poll, stride};
use super::super::side::Side;
use super::row;
use pinrail_client::failure::Result;

const SIZE: usize = 4096;
const COUNT: usize = 4;
const ROOM: usize = (COUNT + 1) * (SIZE + 192);

pub fn close_order(side: &mut Side) -> Result<Outcome> {
    assert!(ROOM >= (COUNT + 1) * stride(SIZE), "room for all messages");
    let messages = row(COUNT, SIZE, 0);
    // First the sender closes alone, then the receiver, then both at once.
    for round in 0..3 {
        if side.sends() {
            let sender = side.sender(ROOM)?;
            side.step("isend and test")?;
            super::data::numbered(&sender, &messages)?;
            sender.send_all(&messages, COUNT)?;
            if round == 1 {
                side.step("waiting until the receiver has closed")?;
                side.hear()?;
            }
            sender.close()?;
            if round == 0 {
                side.tell(b"closed")?;
            }
        } else {
            let receiver = side.receiver(ROOM)?;
            side.step("irecv and test")?;
            receiver.receive_all(&messages, COUNT)?;
            if round == 0 {
                side.step("waiting until the sender has closed")?;
                side.hear()?;
            }
            receiver.close()?;
            if round == 1 {
                side.tell(b"closed")?;
            }
        }
    }
    Ok(Outcome::Pass)
}

pub fn close_in_flight(side: &mut Side) -> Result<Outcome> {
    let messages = row(COUNT, SIZE, 0);
    // What nobody matches, at either end in turn.
    for round in 0..2 {
        if side.sends() {
            let sender = side.sender(ROOM)?;
            if round == 0 {
                side.step("isend where nobody receives")?;
                for message in &messages {
                    if sender.post(*message)?.is_none() {
                        break;
                    }
                }
            }
            side.meet()?;
            sender.close()?;
        } else {
            let receiver = side.receiver(ROOM)?;
            if round == 1 {
                side.step("irecv where nobody sends")?;
                for message in &messages {
                    receiver.receive(&[*message])?;
                }
            }
            side.meet()?;
            receiver.close()?;
        }
    }
    // What was left behind must not be in the way.
    if side.sends() {
        let sender = side.sender(ROOM)?;
        side.step("isend and test")?;
        super::data::numbered(&sender, &messages)?;
        sender.send_all(&messages, COUNT)?;
        sender.close()?;
    } else {
        let receiver = side.receiver(ROOM)?;
        side.step("irecv and test")?;
        receiver.receive_all(&messages, COUNT)?;
        receiver.close()?;
    }
    Ok(Outcome::Pass)
}

pub fn receiver_outlives_sender(side: &mut Side) -> Result<Outcome> {
    let messages = row(2, SIZE, 0);
    if side.sends() {
        let sender = side.sender(ROOM)?;
        super::data::numbered(&sender, &messages)?;
        sender.send_all(&messages[..1], 1)?;
        side.hear()?;
        return side.die();
    }
    let receiver = side.receiver(ROOM)?;
    receiver.receive_all(&messages[..1], 1)?;
    let request = receiver.receive(&messages[1..])?;
    side.tell(b"die")?;
    side.step("test of a receive whose sender is dead")?;
    loop {
        match poll(side.net()?, request) {
            Ok(None) => std::thread::yield_now(),
            Ok(Some(_)) => return super::broken("test", "a receive ended that nobody sent for"),
            Err(_) => break,
        }
    }
    receiver.close()?;
    survived(side)
}

pub fn sender_outlives_receiver(side: &mut Side) -> Result<Outcome> {
    let messages = row(2, SIZE, 0);
    if !side.sends() {
        let receiver = side.receiver(ROOM)?;
        receiver.receive_all(&messages[..1], 1)?;
        side.hear()?;
        return side.die();
    }
    let sender = side.sender(ROOM)?;
    super::data::numbered(&sender, &messages)?;
    sender.send_all(&messages[..1], 1)?;
    side.tell(b"die")?;
    side.step("isend and test to a receiver that is dead")?;
    // Some sends may still be taken in, and even end; not for ever.
    let mut flying = None;
    loop {
        let outcome = match flying {
            None => sender.post(messages[1]).map(|request| flying = request),
            Some(request) => poll(side.net()?, request).map(|done| {
                if done.is_some() {
                    flying = None;
                }
            }),
        };
        if outcome.is_err() {
            break;
        }
        std::thread::yield_now();
    }
    sender.close()?;
    survived(side)
}

/// The plugin works on after its peer died: it is unloaded here, for there is nobody to meet any more.
fn survived(side: &mut Side) -> Result<Outcome> {
    side.step("listen after the peer died")?;
    let (listener, _) = side.listen()?;
    side.net()?.close_listener(listener)?;
    Ok(Outcome::Pass)
}
