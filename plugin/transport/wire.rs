//! What the two ends tell each other while connecting, as bytes.
//!
//! Wire types are separate from local ones and parsing is a fallible constructor: nothing read from a peer is used
//! before its magic, version and bounds were checked. Integers are little-endian; GIDs are in network order as verbs
//! gives them.
//!
//! After the TCP connection: the connector sends a [`Hello`], the listener answers with a [`Reply`] or a refusal, the
//! connector sends ready. One and a half round trips.

mod recovery;

pub use recovery::{Offer, Step};

use super::stripe::MAX_PARTS;
use super::subnet::Subnet;
use crate::error::{Error, Result};
use crate::memory::region::MAX_RAILS;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// Bytes of NCCL's opaque handle.
pub const HANDLE_BYTES: usize = 128;
/// Raised when a message or the meaning of shared memory changes.
pub const VERSION: u16 = 3;
/// Largest body of a message: a hello with 128 lanes is below 4 KiB.
pub const MAX_BODY: usize = 8192;

const HANDLE_MAGIC: u64 = u64::from_le_bytes(*b"PINRAILh");
const MESSAGE_MAGIC: u32 = u32::from_le_bytes(*b"PNRL");
/// Bytes before a message's body: magic, version, kind, length.
pub const HEADER_BYTES: usize = 12;
/// Where the checksum is: of what lies before it and behind the connector's own part.
const CHECKSUM: std::ops::Range<usize> = 48..56;
/// Where in the handle the connector keeps the name of its attempt.
const TOKEN: std::ops::Range<usize> = 56..64;
const MAX_TEXT: usize = 64;

/// What a listener tells the connector through NCCL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Where the listener waits.
    pub addr: SocketAddr,
    /// Tells this listener's connector from strangers.
    pub nonce: u64,
    /// Rails of the listener's device.
    pub rails: u8,
    /// Links behind the listener's most bonded port; 1 where none is bonded.
    pub links: u8,
    /// Subnets of the listener's rails in their order, where it chooses devices by subnet; else empty.
    pub subnets: Vec<Subnet>,
}

impl Handle {
    /// Writes the handle; the connector's own part is zero.
    pub fn write(&self, out: &mut [u8; HANDLE_BYTES]) {
        let mut w = Writer::default();
        w.u64(HANDLE_MAGIC);
        w.u16(VERSION);
        w.u8(self.rails);
        w.u8(if self.addr.is_ipv4() { 4 } else { 6 });
        w.u16(self.addr.port());
        let subnets = &self.subnets[..self.subnets.len().min(MAX_RAILS)];
        w.u8(subnets.len() as u8);
        w.u8(subnets.iter().enumerate().fold(0, |bits, (i, s)| bits | u8::from(s.is_ipv4()) << i));
        match self.addr {
            SocketAddr::V4(a) => w.bytes(&a.ip().to_ipv6_mapped().octets()),
            SocketAddr::V6(a) => w.bytes(&a.ip().octets()),
        }
        w.u32(if let SocketAddr::V6(a) = self.addr { a.scope_id() } else { 0 });
        w.u8(self.links);
        w.bytes(&[0; 3]);
        w.u64(self.nonce);
        debug_assert_eq!(w.0.len(), CHECKSUM.start);
        w.0.resize(TOKEN.end, 0);
        subnets.iter().for_each(|subnet| w.bytes(&subnet.bytes()));
        w.0.resize(HANDLE_BYTES, 0);
        out.copy_from_slice(&w.0);
        let sum = handle_checksum(out);
        out[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads a handle that NCCL passed on.
    ///
    /// # Errors
    /// It comes from another transport, another version of pinrail, or was damaged; the error says which.
    pub fn read(bytes: &[u8; HANDLE_BYTES]) -> Result<Self> {
        let mut r = Reader(bytes);
        if r.u64()? != HANDLE_MAGIC {
            return Err(Error::remote(
                "the connection handle was not made by pinrail: the peer uses another network plugin. Set \
                 NCCL_NET=pinrail on every rank to turn a fallback there into an error",
            ));
        }
        let version = r.u16()?;
        if version != VERSION {
            return Err(Error::remote(format!(
                "the peer's pinrail speaks protocol {version}, this one {VERSION}: install one version on every host"
            )));
        }
        let rails = r.u8()?;
        let family = r.u8()?;
        let port = r.u16()?;
        let (subnets, ipv4) = (usize::from(r.u8()?), r.u8()?);
        let ip = Ipv6Addr::from(r.array::<16>()?);
        let scope = r.u32()?;
        let links = r.u8()?;
        r.array::<3>()?;
        let nonce = r.u64()?;
        let damaged = || Error::remote("the connection handle was damaged on its way");
        if r.u64()? != handle_checksum(bytes)
            || rails == 0
            || usize::from(rails) > MAX_RAILS
            || links == 0
            || subnets > MAX_RAILS
        {
            return Err(damaged());
        }
        r.u64()?;
        let subnets = (0..subnets)
            .map(|i| Ok(Subnet::from_bytes(ipv4 >> i & 1 != 0, r.array()?)))
            .collect::<Result<_>>()?;
        let addr = match family {
            4 => SocketAddr::new(
                IpAddr::V4(ip.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED)),
                port,
            ),
            6 => SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope)),
            _ => return Err(damaged()),
        };
        Ok(Self { addr, nonce, rails, links, subnets })
    }
}

/// The checksum of a handle, which covers all of it but itself and the connector's own part.
fn handle_checksum(bytes: &[u8; HANDLE_BYTES]) -> u64 {
    checksum(bytes[..CHECKSUM.start].iter().chain(&bytes[TOKEN.end..]))
}

/// The attempt that belongs to this handle buffer; `None` before the first call.
pub fn token(handle: &[u8; HANDLE_BYTES]) -> Option<u64> {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&handle[TOKEN]);
    Some(u64::from_le_bytes(bytes)).filter(|t| *t != 0)
}

/// Notes the attempt that belongs to this handle buffer; 0 for none.
pub fn set_token(handle: &mut [u8; HANDLE_BYTES], token: u64) {
    handle[TOKEN].copy_from_slice(&token.to_le_bytes());
}

/// FNV-1a: detects damage, not malice.
pub(super) fn checksum<'a>(bytes: impl Iterator<Item = &'a u8>) -> u64 {
    bytes
        .fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

/// Who is speaking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Process.
    pub pid: u32,
    /// Host name, shortened.
    pub host: String,
    /// Device and port names joined by `+`, shortened.
    pub device: String,
}

/// One rail's port and the key of the memory that the other side writes through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireRail {
    /// LID; 0 on RoCE.
    pub lid: u16,
    /// `IBV_LINK_LAYER_*`, unspecified told as InfiniBand.
    pub link_layer: u8,
    /// `IBV_MTU_*`, active.
    pub mtu: u8,
    /// Number of the port among the devices of its process.
    pub port: u8,
    /// Mb/s; 0 where it is not known.
    pub speed: u32,
    /// The GID that the other side addresses.
    pub gid: [u8; 16],
    /// Key of the FIFO (sender) or the size records (receiver).
    pub rkey: u32,
}

/// One lane's queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireLane {
    /// Queue pair number.
    pub qpn: u32,
    /// First packet sequence number that its owner sends.
    pub psn: u32,
    /// Vendor options: vendor, options, mask.
    pub ece: [u32; 3],
}

/// Either end's description of itself: body of hello and reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Who.
    pub identity: Identity,
    /// Base address of the memory that the other side writes.
    pub memory: u64,
    /// Bytes of one credit entry, chosen by the connector from the listener's rail count.
    pub stride: u8,
    /// Traffic class for both directions unless overridden.
    pub traffic_class: u8,
    /// Service level.
    pub sl: u8,
    /// Whether this end goes on when one of several rails fails.
    pub failover: bool,
    /// Whether it takes such a rail into use again; only with failover.
    pub recovery: bool,
    /// Rails.
    pub rails: Vec<WireRail>,
    /// Lanes.
    pub lanes: Vec<WireLane>,
}

impl End {
    /// Numbers of its ports, sorted.
    pub fn numbers(&self) -> Vec<u8> {
        let mut numbers: Vec<_> = self.rails.iter().map(|rail| rail.port).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Speeds of its ports in Mb/s, in the order of its rails.
    pub fn speeds(&self) -> Vec<u32> {
        self.rails.iter().map(|rail| rail.speed).collect()
    }
}

/// What the connector sends first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// From the handle.
    pub nonce: u64,
    /// The sending end.
    pub end: End,
}

/// A message after TCP connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Connector → listener, first.
    Hello(Hello),
    /// Listener → connector: the receiving end.
    Reply(End),
    /// Listener → connector: why not.
    Refusal(String),
    /// Connector → listener: the sender can receive credits.
    Ready,
    /// Either way: this end closed its communicator in order. With what it counted on each lane, where it counts.
    Bye(Vec<(u8, u32)>),
    /// Either way: this end takes nothing more from these lanes. With each the number of parts whose ends it has counted
    /// there.
    Stopped(Vec<(u8, u32)>),
    /// Either way: this end failed, and why.
    Failed(String),
    /// Either way: about bringing a rail back.
    Recovery {
        /// The sender's rail, and the receiver's.
        rails: (u8, u8),
        /// The sender's number of this attempt.
        attempt: u32,
        /// What is said.
        step: Step,
    },
}

impl Message {
    /// The message as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::default();
        let kind = match self {
            Self::Hello(hello) => {
                body.u64(hello.nonce);
                body.end(&hello.end);
                1
            }
            Self::Reply(end) => {
                body.end(end);
                2
            }
            Self::Refusal(text) => {
                body.text(text, 1024);
                3
            }
            Self::Ready => 4,
            Self::Bye(lanes) => {
                body.counts(lanes);
                5
            }
            Self::Stopped(lanes) => {
                body.counts(lanes);
                6
            }
            Self::Failed(text) => {
                body.text(text, 1024);
                7
            }
            Self::Recovery { rails, attempt, step } => {
                body.u8(rails.0);
                body.u8(rails.1);
                body.u32(*attempt);
                body.step(step);
                8
            }
        };
        let mut w = Writer::default();
        w.u32(MESSAGE_MAGIC);
        w.u16(VERSION);
        w.u16(kind);
        w.u32(body.0.len() as u32);
        w.bytes(&body.0);
        w.0
    }

    /// Reads one message from the front of `bytes`: the message and its length, or `None` when more is needed.
    ///
    /// # Errors
    /// The bytes are not a message of this protocol.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>> {
        // A stranger is recognised by its first bytes, without waiting for a whole header.
        let magic = MESSAGE_MAGIC.to_le_bytes();
        let seen = bytes.len().min(magic.len());
        if bytes[..seen] != magic[..seen] {
            return Err(Error::remote("not a pinrail peer"));
        }
        if bytes.len() < HEADER_BYTES {
            return Ok(None);
        }
        let mut r = Reader(bytes);
        r.u32()?;
        let version = r.u16()?;
        if version != VERSION {
            return Err(Error::remote(format!(
                "the peer's pinrail speaks protocol {version}, this one {VERSION}: install one version on every host"
            )));
        }
        let kind = r.u16()?;
        let len = r.u32()? as usize;
        if len > MAX_BODY {
            return Err(Error::remote(format!(
                "a message of {len} bytes; the limit is {MAX_BODY}"
            )));
        }
        let Some(body) = bytes.get(HEADER_BYTES..HEADER_BYTES + len) else { return Ok(None) };
        let mut r = Reader(body);
        let message = match kind {
            1 => Self::Hello(Hello { nonce: r.u64()?, end: r.end()? }),
            2 => Self::Reply(r.end()?),
            3 => Self::Refusal(r.text()?),
            4 => Self::Ready,
            5 => Self::Bye(r.counts()?),
            6 => Self::Stopped(r.counts()?),
            7 => Self::Failed(r.text()?),
            8 => Self::Recovery { rails: (r.u8()?, r.u8()?), attempt: r.u32()?, step: r.step()? },
            _ => return Err(Error::remote(format!("a message of unknown kind {kind}"))),
        };
        if !r.0.is_empty() {
            return Err(Error::remote(format!(
                "{} bytes too many in a message of kind {kind}",
                r.0.len()
            )));
        }
        Ok(Some((message, HEADER_BYTES + len)))
    }
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn counts(&mut self, lanes: &[(u8, u32)]) {
        let lanes = &lanes[..lanes.len().min(MAX_PARTS)];
        self.u8(lanes.len() as u8);
        for (lane, count) in lanes {
            self.u8(*lane);
            self.u32(*count);
        }
    }

    fn bytes(&mut self, b: &[u8]) {
        self.0.extend_from_slice(b);
    }
    fn u8(&mut self, v: u8) {
        self.0.push(v);
    }
    fn u16(&mut self, v: u16) {
        self.bytes(&v.to_le_bytes());
    }
    fn u32(&mut self, v: u32) {
        self.bytes(&v.to_le_bytes());
    }
    fn u64(&mut self, v: u64) {
        self.bytes(&v.to_le_bytes());
    }
    /// Text of at most `limit` bytes, cut at a character.
    fn text(&mut self, text: &str, limit: usize) {
        let limit = limit.min(u16::MAX.into());
        let cut =
            (0..=limit.min(text.len())).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
        self.u16(cut as u16);
        self.bytes(&text.as_bytes()[..cut]);
    }
    fn end(&mut self, end: &End) {
        self.u32(end.identity.pid);
        self.text(&end.identity.host, MAX_TEXT);
        self.text(&end.identity.device, 2 * MAX_TEXT);
        self.u64(end.memory);
        self.u8(end.stride);
        self.u8(end.traffic_class);
        self.u8(end.sl);
        self.u8(if end.failover { 1 | u8::from(end.recovery) << 1 } else { 0 });
        self.u8(end.rails.len() as u8);
        end.rails.iter().for_each(|rail| self.rail(rail));
        self.lanes(&end.lanes);
    }
    fn rail(&mut self, rail: &WireRail) {
        self.u16(rail.lid);
        self.u8(rail.link_layer);
        self.u8(rail.mtu);
        self.u8(rail.port);
        self.u32(rail.speed);
        self.bytes(&rail.gid);
        self.u32(rail.rkey);
    }
    fn lanes(&mut self, lanes: &[WireLane]) {
        self.u16(lanes.len() as u16);
        for lane in lanes {
            self.u32(lane.qpn);
            self.u32(lane.psn);
            lane.ece.iter().for_each(|v| self.u32(*v));
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn counts(&mut self) -> Result<Vec<(u8, u32)>> {
        let count = self.u8()?;
        (0..count).map(|_| Ok((self.u8()?, self.u32()?))).collect()
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, tail) = self
            .0
            .split_first_chunk::<N>()
            .ok_or_else(|| Error::remote("a message is cut short"))?;
        self.0 = tail;
        Ok(*head)
    }
    fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }
    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }
    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    /// Text for a log line: control characters are replaced, so that a peer cannot forge lines.
    fn text(&mut self) -> Result<String> {
        let len = usize::from(self.u16()?);
        let (head, tail) =
            self.0.split_at_checked(len).ok_or_else(|| Error::remote("a message is cut short"))?;
        self.0 = tail;
        let text = String::from_utf8_lossy(head);
        Ok(text.chars().map(|c| if c.is_control() { '?' } else { c }).collect())
    }
    fn end(&mut self) -> Result<End> {
        let pid = self.u32()?;
        let identity = Identity { pid, host: self.text()?, device: self.text()? };
        let memory = self.u64()?;
        let (stride, traffic_class, sl) = (self.u8()?, self.u8()?, self.u8()?);
        let (failover, recovery) = match self.u8()? {
            flags @ (0 | 1 | 3) => (flags != 0, flags == 3),
            other => return Err(Error::remote(format!("{other} where 0, 1 or 3 is expected"))),
        };
        let count = usize::from(self.u8()?);
        if count == 0 || count > MAX_RAILS {
            return Err(Error::remote(format!("{count} rails; the limit is {MAX_RAILS}")));
        }
        let rails = (0..count).map(|_| self.rail()).collect::<Result<_>>()?;
        let lanes = self.lanes()?;
        Ok(End { identity, memory, stride, traffic_class, sl, failover, recovery, rails, lanes })
    }
    fn rail(&mut self) -> Result<WireRail> {
        Ok(WireRail {
            lid: self.u16()?,
            link_layer: self.u8()?,
            mtu: self.u8()?,
            port: self.u8()?,
            speed: self.u32()?,
            gid: self.array()?,
            rkey: self.u32()?,
        })
    }
    fn lanes(&mut self) -> Result<Vec<WireLane>> {
        let count = usize::from(self.u16()?);
        if count == 0 || count > MAX_PARTS {
            return Err(Error::remote(format!("{count} queue pairs; the limit is {MAX_PARTS}")));
        }
        let mut lanes = Vec::with_capacity(count);
        for _ in 0..count {
            let (qpn, psn) = (self.u32()?, self.u32()?);
            lanes.push(WireLane { qpn, psn, ece: [self.u32()?, self.u32()?, self.u32()?] });
        }
        Ok(lanes)
    }
}

#[cfg(test)]
mod tests;
