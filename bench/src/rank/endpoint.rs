//! One rank's two comms and two buffers: a connection to the peer and one from it.

use super::placed::Placed;
use crate::buffer::{Buffer, fill};
use crate::failure::Result;
use crate::net::{Handle, Listener, Member, Net, RecvComm, Registration, SendComm};
use crate::patience::Patience;
use std::time::Duration;

/// Everything open between connect and close.
#[derive(Debug)]
pub struct Endpoint {
    send: SendComm,
    recv: RecvComm,
    outgoing: Buffer,
    incoming: Buffer,
    outgoing_mr: Registration,
    incoming_mr: Registration,
    placed: Option<Placed>,
    timeout: Duration,
}

impl Endpoint {
    /// Registers two buffers with the comms of [`pair`], after they were put where they shall lie.
    pub fn new(
        net: &Net,
        send: SendComm,
        recv: RecvComm,
        buffer: usize,
        placed: Option<Placed>,
        timeout: Duration,
    ) -> Result<Self> {
        let mut outgoing = Buffer::new(buffer)?;
        let mut incoming = Buffer::new(buffer)?;
        for memory in [&mut outgoing, &mut incoming] {
            let size = memory.size();
            // Pages of its own for all of it: untouched memory reads from one shared page of zeros, and the first write
            // to it would be measured.
            // SAFETY: nothing is in flight yet.
            fill(buffer as u64, unsafe { memory.bytes(0, size) });
        }
        if let Some(placed) = &placed {
            placed.prepare(&outgoing, &incoming)?;
        }
        // SAFETY: both buffers live in the endpoint until `close` has ended the registrations.
        let outgoing_mr = unsafe { net.register_send(send, outgoing.base(), outgoing.size())? };
        // SAFETY: as above.
        let incoming_mr = unsafe { net.register_recv(recv, incoming.base(), incoming.size())? };
        Ok(Self { send, recv, outgoing, incoming, outgoing_mr, incoming_mr, placed, timeout })
    }

    /// Proves that the buffers are reached as they shall be. The number of pages that are reached through copies; 0
    /// where nobody asked.
    pub fn verify(&self) -> Result<u64> {
        self.placed.as_ref().map_or(Ok(0), |placed| placed.verify(&self.outgoing, &self.incoming))
    }

    /// The comm to the peer.
    pub fn send(&self) -> SendComm {
        self.send
    }

    /// The comm from the peer.
    pub fn recv(&self) -> RecvComm {
        self.recv
    }

    /// The memory messages are sent from.
    pub fn outgoing(&mut self) -> &mut Buffer {
        &mut self.outgoing
    }

    /// The memory messages arrive in.
    pub fn incoming(&mut self) -> &mut Buffer {
        &mut self.incoming
    }

    /// A message to send.
    pub fn outgoing_member(&self, offset: usize, size: usize, tag: i32) -> Member {
        let data = self.outgoing.at(offset, size);
        Member { data, size, tag, registration: self.outgoing_mr }
    }

    /// A message to receive.
    pub fn incoming_member(&self, offset: usize, size: usize, tag: i32) -> Member {
        let data = self.incoming.at(offset, size);
        Member { data, size, tag, registration: self.incoming_mr }
    }

    /// A fresh deadline.
    pub fn patience(&self) -> Patience {
        Patience::new(self.timeout)
    }

    /// Ends the registrations and closes both comms.
    pub fn close(self, net: &Net) -> Result<()> {
        net.deregister_send(self.send, self.outgoing_mr)?;
        net.deregister_recv(self.recv, self.incoming_mr)?;
        if let Some(placed) = self.placed {
            placed.release(&self.outgoing, &self.incoming)?;
        }
        net.close_send(self.send)?;
        net.close_recv(self.recv)
    }
}

/// Connects to the handle and accepts on the listener, in turns: neither call may wait for the other. The listener is
/// closed afterwards, as NCCL does.
pub fn pair(
    net: &Net,
    device: i32,
    listener: Listener,
    mut handle: Handle,
    timeout: Duration,
) -> Result<(SendComm, RecvComm)> {
    let mut send = None;
    let mut recv = None;
    let mut patience = Patience::new(timeout);
    loop {
        if send.is_none() {
            send = net.connect(device, &mut handle)?;
        }
        if recv.is_none() {
            recv = net.accept(listener)?;
        }
        if let (Some(send), Some(recv)) = (send, recv) {
            net.close_listener(listener)?;
            return Ok((send, recv));
        }
        patience.idle("connect", || {
            let missing = if send.is_none() { "connect" } else { "accept" };
            format!("{missing} did not return a comm")
        })?;
    }
}
