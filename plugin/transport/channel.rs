//! The side channel: a TCP connection that carries the handshake and afterwards tells whether the peer lives.

use super::wire::{HEADER_BYTES, MAX_BODY, Message};
use crate::error::{Error, Result};
use crate::host::descriptors::Held;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A non-blocking connection with a buffer on either side.
#[derive(Debug)]
pub struct Channel {
    stream: TcpStream,
    received: Vec<u8>,
    unsent: Vec<u8>,
    peer: String,
    _descriptor: Held,
}

/// The state of an outgoing connection.
#[derive(Debug)]
pub enum Dial {
    /// The TCP handshake is under way.
    Pending(Socket, SocketAddr),
    /// Connected.
    Connected(Channel),
}

impl Dial {
    /// Starts connecting without waiting.
    ///
    /// # Errors
    /// No socket, or the connection is refused at once.
    pub fn start(addr: SocketAddr) -> Result<Self> {
        let fail = |e| Error::io(format_args!("connecting to {addr}"), &e);
        let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))
            .map_err(fail)?;
        socket.set_nonblocking(true).map_err(fail)?;
        match socket.connect(&addr.into()) {
            Ok(()) => Ok(Self::Connected(Channel::new(socket.into(), addr)?)),
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {
                Ok(Self::Pending(socket, addr))
            }
            Err(e) => Err(fail(e)),
        }
    }

    /// Goes on connecting.
    ///
    /// # Errors
    /// The connection failed; the errno tells transient reasons from final ones.
    pub fn step(self) -> Result<Self> {
        let Self::Pending(socket, addr) = self else { return Ok(self) };
        let fail = |e| Error::io(format_args!("connecting to {addr}"), &e);
        if let Some(e) = socket.take_error().map_err(fail)? {
            return Err(fail(e));
        }
        match socket.peer_addr() {
            Ok(_) => Ok(Self::Connected(Channel::new(socket.into(), addr)?)),
            Err(e) if e.kind() == ErrorKind::NotConnected => Ok(Self::Pending(socket, addr)),
            Err(e) => Err(fail(e)),
        }
    }
}

impl Channel {
    /// Takes over a connected stream.
    ///
    /// # Errors
    /// The socket options are refused.
    pub fn new(stream: TcpStream, peer: SocketAddr) -> Result<Self> {
        let channel = Self {
            stream,
            received: Vec::new(),
            unsent: Vec::new(),
            peer: peer.to_string(),
            _descriptor: Held::new(1),
        };
        let options = || {
            channel.stream.set_nonblocking(true)?;
            channel.stream.set_nodelay(true)?;
            // A host that vanished without a word is noticed by probes, well before RDMA timeouts add up.
            let probes = TcpKeepalive::new()
                .with_time(Duration::from_secs(10))
                .with_interval(Duration::from_secs(5))
                .with_retries(4);
            SockRef::from(&channel.stream).set_tcp_keepalive(&probes)
        };
        options().map_err(|e| Error::io(format_args!("socket options for {peer}"), &e))?;
        Ok(channel)
    }

    /// The peer's address.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The stream, for the event thread.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Queues a message and sends what the socket takes.
    ///
    /// # Errors
    /// The connection broke.
    pub fn send(&mut self, message: &Message) -> Result<()> {
        self.unsent.extend(message.encode());
        self.flush().map(|_| ())
    }

    /// Sends what is queued; whether all of it went.
    ///
    /// # Errors
    /// The connection broke.
    pub fn flush(&mut self) -> Result<bool> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(n) => drop(self.unsent.drain(..n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.broken("sending to", &e)),
            }
        }
        Ok(true)
    }

    /// The next message, if a whole one is here.
    ///
    /// # Errors
    /// The connection broke or ended, or the bytes are not a message.
    pub fn receive(&mut self) -> Result<Option<Message>> {
        loop {
            if let Some((message, len)) =
                Message::decode(&self.received).map_err(|e| e.context(&self.peer))?
            {
                self.received.drain(..len);
                return Ok(Some(message));
            }
            let mut buffer = [0; HEADER_BYTES + MAX_BODY];
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    return Err(Error::remote(format!(
                        "{} closed the connection while connecting",
                        self.peer
                    )));
                }
                Ok(n) => self.received.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.broken("receiving from", &e)),
            }
        }
    }

    fn broken(&self, doing: &str, e: &std::io::Error) -> Error {
        Error::io(format_args!("{doing} {}", self.peer), e).blamed(crate::error::Blame::Remote)
    }
}
