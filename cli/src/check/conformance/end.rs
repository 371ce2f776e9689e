//! One end of a connection, with registered memory that stays mapped as long as the process lives: whatever a wrong
//! plugin does with it later, it does no harm to anything else.

use super::side::Side;
use pinrail_client::buffer::{Buffer, GUARD, POISON, fill, first_wrong, key};
use pinrail_client::failure::{Failure, Result};
use pinrail_client::net::abi::TEST_SIZES;
use pinrail_client::net::{Member, Net, RecvComm, Registration, Request, SendComm};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem::ManuallyDrop;

/// What entries of a size array hold that the plugin must not write.
pub const UNTOUCHED: c_int = 0x5a5a_5a5a;

/// Bytes from one message's memory to the next, for messages of at most `size` bytes.
pub fn stride(size: usize) -> usize {
    (size + 2 * GUARD).next_multiple_of(64)
}

/// Where message memory `slot` lies.
pub fn place(slot: usize, size: usize) -> usize {
    GUARD + slot * stride(size)
}

/// A message: where, how long, its tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Bytes into the memory.
    pub offset: usize,
    /// Its length; at a receiving end what fits.
    pub size: usize,
    /// Its tag.
    pub tag: i32,
}

/// Memory that is never unmapped.
#[derive(Debug)]
pub struct Memory(RefCell<ManuallyDrop<Buffer>>);

impl Memory {
    /// At least so many bytes.
    pub fn new(size: usize) -> Result<Self> {
        Ok(Self(RefCell::new(ManuallyDrop::new(Buffer::new(size)?))))
    }

    /// Its start and its size.
    pub fn range(&self) -> (*mut u8, usize) {
        let buffer = self.0.borrow();
        (buffer.base(), buffer.size())
    }

    fn at(&self, offset: usize, size: usize) -> *mut u8 {
        self.0.borrow().at(offset, size)
    }

    fn member(&self, message: Message, registration: Registration) -> Member {
        let Message { offset, size, tag } = message;
        Member { data: self.at(offset, size), size, tag, registration }
    }

    /// Works on the bytes of a range that no request covers.
    fn with<R>(&self, offset: usize, size: usize, work: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut buffer = self.0.borrow_mut();
        // SAFETY: the cases touch a message's bytes before it is posted and after it is done only.
        work(unsafe { buffer.bytes(offset, size) })
    }

    /// Writes message `number`, whose content follows from its length and number.
    pub fn write(&self, offset: usize, size: usize, number: u64) {
        self.with(offset, size, |bytes| fill(key(size, number), bytes));
    }

    /// Makes a range ready to receive: with its guards it holds what no message does.
    pub fn poison(&self, offset: usize, size: usize) {
        self.with(offset - GUARD, size + 2 * GUARD, |bytes| bytes.fill(POISON));
    }

    /// That message `number` of `size` bytes has arrived in a range of `room`, and nothing beside it.
    pub fn expect(&self, offset: usize, room: usize, size: usize, number: u64) -> Result<()> {
        let wrong = |text: String| Err(Failure::new("data", text));
        self.with(offset - GUARD, room + 2 * GUARD, |bytes| {
            let (before, rest) = bytes.split_at(GUARD);
            let (message, behind) = rest.split_at(size);
            if let Some(at) = first_wrong(key(size, number), message) {
                return wrong(format!("byte {at} of message {number} ({size} bytes) is wrong"));
            }
            if before.iter().chain(behind).any(|byte| *byte != POISON) {
                return wrong(format!("bytes beside message {number} ({size} bytes) were written"));
            }
            Ok(())
        })
    }

    /// Whether message `number` is there in whole.
    pub fn holds(&self, offset: usize, size: usize, number: u64) -> bool {
        // Fresh from memory each time: the device may be writing.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.with(offset, size, |bytes| first_wrong(key(size, number), bytes).is_none())
    }
}

/// A sending end.
#[derive(Debug)]
pub struct Sender<'a> {
    /// Its process.
    pub side: &'a Side,
    /// Its comm.
    pub comm: SendComm,
    /// Its memory.
    pub memory: Memory,
    /// The registration of all of it.
    pub registration: Registration,
}

/// A receiving end.
#[derive(Debug)]
pub struct Receiver<'a> {
    /// Its process.
    pub side: &'a Side,
    /// Its comm.
    pub comm: RecvComm,
    /// Its memory.
    pub memory: Memory,
    /// The registration of all of it.
    pub registration: Registration,
}

impl<'a> Sender<'a> {
    /// With registered memory.
    pub fn new(side: &'a Side, comm: SendComm, room: usize) -> Result<Self> {
        let memory = Memory::new(room)?;
        let (base, size) = memory.range();
        // SAFETY: the memory is never unmapped.
        let registration = unsafe { side.net()?.register_send(comm, base, size)? };
        Ok(Self { side, comm, memory, registration })
    }

    /// Registers a part of the memory once more.
    pub fn register(&self, offset: usize, size: usize) -> Result<Registration> {
        // SAFETY: the memory is never unmapped.
        unsafe { self.net()?.register_send(self.comm, self.memory.at(offset, size), size) }
    }

    /// One attempt to send. `None`: it would block.
    pub fn post(&self, message: Message) -> Result<Option<Request>> {
        self.post_with(message, self.registration)
    }

    /// One attempt to send under another registration.
    pub fn post_with(
        &self,
        message: Message,
        registration: Registration,
    ) -> Result<Option<Request>> {
        // SAFETY: the range is registered, and the memory is never unmapped.
        unsafe { self.net()?.isend(self.comm, self.memory.member(message, registration)) }
    }

    /// A message for whoever calls the plugin himself.
    pub fn member(&self, message: Message) -> Member {
        self.memory.member(message, self.registration)
    }

    /// Posts a send, however often that takes.
    pub fn send(&self, message: Message) -> Result<Request> {
        loop {
            if let Some(request) = self.post(message)? {
                return Ok(request);
            }
            std::thread::yield_now();
        }
    }

    /// Sends messages in this order, `window` at once.
    pub fn send_all(&self, messages: &[Message], window: usize) -> Result<()> {
        let mut flying: VecDeque<Request> = VecDeque::new();
        let mut next = messages.iter();
        let mut waiting = next.next();
        while waiting.is_some() || !flying.is_empty() {
            if let Some(message) = waiting.filter(|_| flying.len() < window)
                && let Some(request) = self.post(*message)?
            {
                flying.push_back(request);
                waiting = next.next();
                continue;
            }
            if let Some(request) = flying.front()
                && poll(self.net()?, *request)?.is_some()
            {
                flying.pop_front();
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Ends the registration and closes the comm.
    pub fn close(self) -> Result<()> {
        self.side.step("deregMr and closeSend")?;
        self.net()?.deregister_send(self.comm, self.registration)?;
        self.net()?.close_send(self.comm)
    }

    fn net(&self) -> Result<&'a Net> {
        self.side.net()
    }
}

impl<'a> Receiver<'a> {
    /// With registered memory.
    pub fn new(side: &'a Side, comm: RecvComm, room: usize) -> Result<Self> {
        let memory = Memory::new(room)?;
        let (base, size) = memory.range();
        // SAFETY: the memory is never unmapped.
        let registration = unsafe { side.net()?.register_recv(comm, base, size)? };
        Ok(Self { side, comm, memory, registration })
    }

    /// Registers a part of the memory once more.
    pub fn register(&self, offset: usize, size: usize) -> Result<Registration> {
        // SAFETY: the memory is never unmapped.
        unsafe { self.net()?.register_recv(self.comm, self.memory.at(offset, size), size) }
    }

    /// A member of a receive.
    pub fn member(&self, message: Message) -> Member {
        self.member_with(message, self.registration)
    }

    /// A member under another registration.
    pub fn member_with(&self, message: Message, registration: Registration) -> Member {
        self.memory.member(message, registration)
    }

    /// One attempt to receive. `None`: it would block.
    pub fn post(&self, messages: &[Message]) -> Result<Option<Request>> {
        let members: Vec<_> = messages.iter().map(|message| self.member(*message)).collect();
        self.post_members(&members)
    }

    /// One attempt to receive into members.
    pub fn post_members(&self, members: &[Member]) -> Result<Option<Request>> {
        // SAFETY: the ranges are registered, and the memory is never unmapped.
        unsafe { self.net()?.irecv(self.comm, members) }
    }

    /// One attempt to receive where NCCL does not need the completion.
    pub fn post_optional(&self, message: Message) -> Result<Option<Request>> {
        // SAFETY: as above.
        unsafe { self.net()?.irecv_optional(self.comm, self.member(message)) }
    }

    /// Posts a receive, however often that takes.
    pub fn receive(&self, messages: &[Message]) -> Result<Request> {
        loop {
            if let Some(request) = self.post(messages)? {
                return Ok(request);
            }
            std::thread::yield_now();
        }
    }

    /// Receives messages of known lengths in this order, `window` at once, and checks sizes and bytes. Message `i` is
    /// number `i`.
    pub fn receive_all(&self, messages: &[Message], window: usize) -> Result<()> {
        let mut flying: VecDeque<(Request, usize)> = VecDeque::new();
        let mut next = 0;
        while next < messages.len() || !flying.is_empty() {
            if let Some(message) = messages.get(next).filter(|_| flying.len() < window) {
                self.memory.poison(message.offset, message.size);
                if let Some(request) = self.post(&[*message])? {
                    flying.push_back((request, next));
                    next += 1;
                    continue;
                }
            }
            if let Some((request, index)) = flying.front()
                && let Some(sizes) = poll(self.net()?, *request)?
            {
                let message = messages[*index];
                expect_size(sizes[0], message.size)?;
                self.memory.expect(message.offset, message.size, message.size, *index as u64)?;
                flying.pop_front();
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Ends the registration and closes the comm.
    pub fn close(self) -> Result<()> {
        self.side.step("deregMr and closeRecv")?;
        self.net()?.deregister_recv(self.comm, self.registration)?;
        self.net()?.close_recv(self.comm)
    }

    fn net(&self) -> Result<&'a Net> {
        self.side.net()
    }
}

/// Asks once; the sizes if it is done.
pub fn poll(net: &Net, request: Request) -> Result<Option<[c_int; TEST_SIZES]>> {
    let mut sizes = [UNTOUCHED; TEST_SIZES];
    Ok(net.test(request, &mut sizes)?.then_some(sizes))
}

/// Asks until it is done.
pub fn wait(net: &Net, request: Request) -> Result<[c_int; TEST_SIZES]> {
    loop {
        if let Some(sizes) = poll(net, request)? {
            return Ok(sizes);
        }
        std::thread::yield_now();
    }
}

/// That a size is what was sent.
pub fn expect_size(have: c_int, want: usize) -> Result<()> {
    if usize::try_from(have) == Ok(want) {
        return Ok(());
    }
    let have = if have == UNTOUCHED { "nothing".to_owned() } else { have.to_string() };
    Err(Failure::new("test", format!("says {have} for a message of {want} bytes")))
}
