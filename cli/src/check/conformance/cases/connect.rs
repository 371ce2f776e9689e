//! Rules of making connections.

use super::super::Outcome;
use super::super::end::{Receiver, Sender, wait};
use super::super::side::{HANDLE_ROOM, Side};
use super::{broken, row};
use pinrail_client::failure::Result;
use pinrail_client::net::SendComm;
use pinrail_client::net::abi::HANDLE_BYTES;

/// Calls of something that must not wait.
const CALLS: usize = 100;
const SIZE: usize = 3000;

pub fn listen(side: &mut Side) -> Result<Outcome> {
    const BEHIND: u8 = 0xc3;
    let mut handles = Vec::new();
    let mut listeners = Vec::new();
    for _ in 0..2 {
        let mut handle = vec![BEHIND; HANDLE_ROOM];
        let listener = side.net()?.listen_into(side.device(), &mut handle)?;
        if let Some(at) = handle[HANDLE_BYTES..].iter().position(|byte| *byte != BEHIND) {
            let at = HANDLE_BYTES + at;
            return broken("listen", format!("byte {at} was written; a handle has {HANDLE_BYTES}"));
        }
        handles.push(handle);
        listeners.push(listener);
    }
    if handles[0] == handles[1] {
        return broken("listen", "two listeners have the same handle");
    }
    for listener in listeners {
        side.net()?.close_listener(listener)?;
    }
    Ok(Outcome::Pass)
}

pub fn accept_does_not_wait(side: &mut Side) -> Result<Outcome> {
    let (listener, _) = side.listen()?;
    side.step("accept where nobody connects")?;
    for _ in 0..CALLS {
        if side.net()?.accept(listener)?.is_some() {
            return broken("accept", "gave a connection that nobody made");
        }
    }
    side.step("closeListen")?;
    side.net()?.close_listener(listener)?;
    Ok(Outcome::Pass)
}

pub fn self_connection(side: &mut Side) -> Result<Outcome> {
    let side = &*side;
    let net = side.net()?;
    let (listener, mut handle) = side.listen()?;
    side.step("connect and accept in turns")?;
    let (mut send, mut recv) = (None, None);
    let (send, recv) = loop {
        if send.is_none() {
            send = net.connect(side.device(), &mut handle)?;
        }
        if recv.is_none() {
            recv = net.accept(listener)?;
        }
        if let (Some(send), Some(recv)) = (send, recv) {
            break (send, recv);
        }
        std::thread::yield_now();
    };
    net.close_listener(listener)?;
    let message = row(1, SIZE, 7)[0];
    let room = 2 * SIZE;
    let (sender, receiver) = (Sender::new(side, send, room)?, Receiver::new(side, recv, room)?);
    sender.memory.write(message.offset, SIZE, 0);
    receiver.memory.poison(message.offset, SIZE);
    side.step("irecv, isend and test")?;
    let receive = receiver.receive(&[message])?;
    // A send may need its receive to be polled, and the other way round.
    let (mut send, mut sent, mut received) = (None, false, false);
    while !(sent && received) {
        if send.is_none() {
            send = sender.post(message)?;
        }
        if let Some(request) = send.filter(|_| !sent) {
            sent = super::super::end::poll(net, request)?.is_some();
        }
        if !received {
            received = super::super::end::poll(net, receive)?.is_some();
        }
    }
    receiver.memory.expect(message.offset, SIZE, SIZE, 0)?;
    sender.close()?;
    receiver.close()?;
    Ok(Outcome::Pass)
}

pub fn foreign_handle(side: &mut Side) -> Result<Outcome> {
    let counted: Vec<u8> = (0..HANDLE_ROOM).map(|at| at as u8).collect();
    for handle in [vec![0; HANDLE_ROOM], vec![0xff; HANDLE_ROOM], vec![0x5a; HANDLE_ROOM], counted]
    {
        let mut handle = handle;
        side.step(&format!("connect to a handle of bytes {:#x}", handle[0]))?;
        for _ in 0..CALLS {
            match side.net()?.connect(side.device(), &mut handle) {
                Ok(None) => {}
                Ok(Some(_)) => return broken("connect", "gave a connection to nowhere"),
                Err(_) => break,
            }
        }
    }
    Ok(Outcome::Pass)
}

/// One message over a new connection.
fn one_message(side: &Side) -> Result<()> {
    let message = row(1, SIZE, 1)[0];
    if side.sends() {
        let sender = side.sender(2 * SIZE)?;
        exchange_sender(&sender, message)?;
        sender.close()
    } else {
        let receiver = side.receiver(2 * SIZE)?;
        exchange_receiver(&receiver, message)?;
        receiver.close()
    }
}

fn exchange_sender(sender: &Sender<'_>, message: super::Message) -> Result<()> {
    sender.side.step("isend and test")?;
    sender.memory.write(message.offset, message.size, 0);
    let request = sender.send(message)?;
    wait(sender.side.net()?, request).map(drop)
}

fn exchange_receiver(receiver: &Receiver<'_>, message: super::Message) -> Result<()> {
    receiver.side.step("irecv and test")?;
    receiver.receive_all(&[message], 1)
}

pub fn connect_does_not_wait(side: &mut Side) -> Result<Outcome> {
    let message = row(1, SIZE, 1)[0];
    if side.sends() {
        let mut handle = side.hear()?;
        handle.resize(HANDLE_ROOM, 0);
        side.step("connect while the peer does not accept")?;
        let mut comm = None;
        for _ in 0..CALLS {
            comm = side.net()?.connect(side.device(), &mut handle)?;
            if comm.is_some() {
                break;
            }
        }
        side.tell(b"returned")?;
        let comm = comm.map_or_else(|| side.connect(&mut handle), Ok)?;
        let sender = Sender::new(side, comm, 2 * SIZE)?;
        exchange_sender(&sender, message)?;
        sender.close()?;
    } else {
        let (listener, handle) = side.listen()?;
        side.tell(&handle[..HANDLE_BYTES])?;
        side.step("waiting until connect has returned")?;
        side.hear()?;
        let comm = side.accept(listener)?;
        let receiver = Receiver::new(side, comm, 2 * SIZE)?;
        exchange_receiver(&receiver, message)?;
        receiver.close()?;
    }
    Ok(Outcome::Pass)
}

pub fn close_unaccepted(side: &mut Side) -> Result<Outcome> {
    if side.sends() {
        let mut handle = side.hear()?;
        handle.resize(HANDLE_ROOM, 0);
        side.step("connect to a listener that will be closed")?;
        // An error is what became of it, and as good as nothing.
        let poll = |handle: &mut [u8]| -> Result<Option<SendComm>> {
            for _ in 0..CALLS {
                match side.net()?.connect(side.device(), handle) {
                    Ok(None) => std::thread::yield_now(),
                    Ok(made) => return Ok(made),
                    Err(_) => return Ok(None),
                }
            }
            Ok(None)
        };
        let mut comm = poll(&mut handle)?;
        side.meet()?;
        side.step("waiting until the listener is closed")?;
        side.meet()?;
        side.step("connect to a listener that is closed")?;
        if comm.is_none() {
            comm = poll(&mut handle)?;
        }
        if let Some(comm) = comm {
            side.net()?.close_send(comm)?;
        }
    } else {
        let (listener, handle) = side.listen()?;
        side.tell(&handle[..HANDLE_BYTES])?;
        side.step("waiting until the peer has begun to connect")?;
        side.meet()?;
        side.step("closeListen without an accept")?;
        side.net()?.close_listener(listener)?;
        side.meet()?;
    }
    one_message(side)?;
    Ok(Outcome::Pass)
}

pub fn several_connections(side: &mut Side) -> Result<Outcome> {
    const COUNT: usize = 4;
    let side = &*side;
    let message = row(1, SIZE, 1)[0];
    if side.sends() {
        let mut senders = Vec::new();
        let mut handles = Vec::new();
        for _ in 0..COUNT {
            let mut handle = side.hear()?;
            handle.resize(HANDLE_ROOM, 0);
            handles.push(handle);
        }
        // All at once: the other end accepts the last first.
        side.step("connect to four listeners in turns")?;
        let mut comms = [None; COUNT];
        while comms.iter().any(Option::is_none) {
            for (comm, handle) in comms.iter_mut().zip(&mut handles) {
                if comm.is_none() {
                    *comm = side.net()?.connect(side.device(), handle)?;
                }
            }
            std::thread::yield_now();
        }
        for comm in comms.into_iter().flatten() {
            senders.push(Sender::new(side, comm, 2 * SIZE)?);
        }
        for (number, sender) in senders.iter().enumerate() {
            sender.memory.write(message.offset, SIZE, number as u64);
        }
        side.step("isend and test on four connections")?;
        let requests =
            senders.iter().map(|sender| sender.send(message)).collect::<Result<Vec<_>>>()?;
        for request in requests {
            wait(side.net()?, request)?;
        }
        side.meet()?;
        senders.into_iter().try_for_each(Sender::close)?;
    } else {
        let mut listeners = Vec::new();
        for _ in 0..COUNT {
            let (listener, handle) = side.listen()?;
            side.tell(&handle[..HANDLE_BYTES])?;
            listeners.push(listener);
        }
        let mut receivers = Vec::new();
        for listener in listeners.into_iter().rev() {
            let comm = side.accept(listener)?;
            receivers.push(Receiver::new(side, comm, 2 * SIZE)?);
        }
        receivers.reverse();
        side.step("irecv and test on four connections")?;
        let mut requests = Vec::new();
        for receiver in &receivers {
            receiver.memory.poison(message.offset, SIZE);
            requests.push(receiver.receive(&[message])?);
        }
        for (number, (receiver, request)) in receivers.iter().zip(requests).enumerate() {
            wait(side.net()?, request)?;
            receiver.memory.expect(message.offset, SIZE, SIZE, number as u64)?;
        }
        side.meet()?;
        receivers.into_iter().try_for_each(Receiver::close)?;
    }
    Ok(Outcome::Pass)
}
