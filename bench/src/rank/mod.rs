//! One of the two processes of a sweep. It does what the sweep tells it over its standard input, which is a socket, and
//! ends when the sweep does.

pub mod check;
pub mod endpoint;
pub mod pingpong;
pub mod placed;
pub mod stream;

use crate::failure::{Failure, Result};
use crate::link::{Command, Reply};
use crate::net::{Handle, Listener, Net, log};
use endpoint::{Endpoint, pair};
use pinrail_client::worker::Service;
use placed::Placed;
use std::time::Duration;

/// Serves commands until the sweep closes the socket.
pub fn serve(rank: usize) -> Result<()> {
    let mut service = Service::begin(&format!("rank {rank}"))?;
    let mut state = State { rank, ..State::default() };
    while let Some(command) = service.command()? {
        let reply = state.perform(command).unwrap_or_else(|error| Reply::Failed {
            stage: error.stage().to_owned(),
            text: error.text().to_owned(),
        });
        if !service.answer(&reply)? {
            break;
        }
    }
    Ok(())
}

#[derive(Debug, Default)]
struct State {
    rank: usize,
    timeout: Duration,
    net: Option<Net>,
    device: i32,
    listener: Option<Listener>,
    endpoint: Option<Endpoint>,
}

impl State {
    fn perform(&mut self, command: Command) -> Result<Reply> {
        match command {
            Command::Open { plugin, abi, timeout_s, verbose } => {
                log::configure(&format!("rank {}: ", self.rank), verbose);
                self.timeout = Duration::from_secs(timeout_s);
                let net = Net::open(&plugin, abi)?;
                let devices = net.devices()?;
                let reply =
                    Reply::Opened { name: net.name().to_owned(), version: net.version(), devices };
                self.net = Some(net);
                Ok(reply)
            }
            Command::Listen { device } => {
                let (listener, handle) = self.net()?.listen(device)?;
                self.device = device;
                self.listener = Some(listener);
                Ok(Reply::Listening { handle: handle.to_vec() })
            }
            Command::Connect { handle, buffer, placement } => {
                let handle: Handle = handle
                    .try_into()
                    .map_err(|_| Failure::new("connect", "the handle is not 128 bytes"))?;
                let listener = self
                    .listener
                    .take()
                    .ok_or_else(|| Failure::new("connect", "nothing listens here"))?;
                let placed = placement.as_ref().map(Placed::new).transpose()?;
                let net = self.net()?;
                let (send, recv) = pair(net, self.device, listener, handle, self.timeout)?;
                let endpoint = Endpoint::new(net, send, recv, buffer, placed, self.timeout)?;
                let bounced_pages = endpoint.verify()?;
                self.endpoint = Some(endpoint);
                Ok(Reply::Connected { bounced_pages })
            }
            Command::Check(plan) => {
                let rank = self.rank;
                let (net, endpoint) = self.open()?;
                match rank {
                    0 => check::send(net, endpoint, &plan),
                    _ => check::receive(net, endpoint, &plan),
                }
            }
            Command::Stream(plan) => {
                let rank = self.rank;
                let (net, endpoint) = self.open()?;
                match rank {
                    0 => stream::send(net, endpoint, &plan),
                    _ => stream::receive(net, endpoint, &plan),
                }
            }
            Command::PingPong { size, count } => {
                let first = self.rank == 0;
                let (net, endpoint) = self.open()?;
                pingpong::play(net, endpoint, first, size, count)
            }
            Command::Close => {
                let endpoint = self.endpoint.take();
                let net = self.net.take();
                if let (Some(endpoint), Some(net)) = (endpoint, net.as_ref()) {
                    // Once more: a plugin may register memory when it is first used.
                    endpoint.verify()?;
                    endpoint.close(net)?;
                }
                net.map_or(Ok(()), Net::close)?;
                Ok(Reply::Done)
            }
        }
    }

    fn net(&self) -> Result<&Net> {
        self.net.as_ref().ok_or_else(|| Failure::new("start", "no plugin is open"))
    }

    /// The plugin and the connection.
    fn open(&mut self) -> Result<(&Net, &mut Endpoint)> {
        match (self.net.as_ref(), self.endpoint.as_mut()) {
            (Some(net), Some(endpoint)) => Ok((net, endpoint)),
            _ => Err(Failure::new("start", "there is no connection")),
        }
    }
}
