//! Whatever a completion queue gives back: requests complete or the connection fails, and the data path stays inside what
//! is its own.
//!
//! A connection over softrnic whose polls are tampered with as the input says: fields of real completions are changed,
//! others are made up, left out or told twice, or the queue is broken. As long as each is about work that was posted and
//! told once, no size is larger than what was asked for, whatever the completions say.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pinrail_fuzz::bytes::Bytes;
use pinrail_fuzz::device::{self, Poll};
use pinrail_fuzz::net::{Net, Ptr};
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// Of a completion: identifier, status, opcode, vendor's code, bytes, immediate, queue pair, and what is behind them.
#[repr(C)]
#[derive(Clone, Copy)]
struct Completion {
    id: u64,
    status: u32,
    opcode: u32,
    vendor: u32,
    len: u32,
    imm: u32,
    queue_pair: u32,
    rest: [u32; 4],
}
const _: () = assert!(size_of::<Completion>() == 48);

const ROOM: usize = 8192;
const MEMBERS: usize = 4;
const EDGE: u8 = 0xC3;

#[derive(Default)]
struct Lies {
    script: Vec<u8>,
    at: usize,
    seen: Vec<Completion>,
    /// Completions of work that was never posted, or is complete already: what they say is about something else.
    strange: bool,
}

impl Lies {
    fn byte(&mut self) -> u8 {
        self.at += 1;
        self.script.get(self.at - 1).copied().unwrap_or(0)
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// One that nobody caused: often close to one that was seen.
    fn made_up(&mut self) -> Completion {
        self.strange = true;
        let which = self.byte();
        let mut completion = Completion {
            id: u64::from(self.word()) | u64::from(self.byte()) << 56,
            status: 0,
            opcode: u32::from(self.byte()),
            vendor: 0,
            len: self.word(),
            imm: self.word(),
            queue_pair: self.word(),
            rest: [0; 4],
        };
        if which & 1 != 0 && !self.seen.is_empty() {
            completion = self.seen[usize::from(which >> 1) % self.seen.len()];
            self.change(&mut completion);
        }
        completion
    }

    fn change(&mut self, completion: &mut Completion) {
        let (kind, id) = (self.byte() % 9, completion.id);
        match kind {
            0 => completion.id ^= 1 << (self.byte() % 64),
            1 => completion.id = u64::from(self.word()) | u64::from(self.word()) << 32,
            2 => completion.status = u32::from(self.byte()),
            3 => completion.opcode = self.word(),
            4 => completion.len = self.word(),
            5 => completion.imm ^= 1 << (self.byte() % 32),
            6 => completion.imm = self.word(),
            7 => completion.queue_pair = self.word(),
            _ => {}
        }
        self.strange |= completion.id != id;
    }

    fn tell(&mut self, found: c_int, completions: &mut [Completion]) -> c_int {
        let Ok(mut found) = usize::try_from(found) else { return found };
        if self.at >= self.script.len() {
            return found as c_int;
        }
        self.seen.extend_from_slice(&completions[..found]);
        match self.byte() % 16 {
            0 if found > 0 => self.change(&mut completions[0]),
            1 if found > 0 => {
                let last = found - 1;
                self.change(&mut completions[last]);
            }
            2 if found > 0 => completions[0] = self.made_up(),
            3 | 4 if found < completions.len() => {
                completions[found] = self.made_up();
                found += 1;
            }
            5 if found > 0 => found -= 1,
            6 if found > 0 && found < completions.len() => {
                completions[found] = completions[0];
                self.strange = true;
                found += 1;
            }
            7 => completions[..found].reverse(),
            8 if self.byte() == 0x5a => return -1,
            _ => {}
        }
        found as c_int
    }
}

thread_local! {
    static LIES: RefCell<Lies> = RefCell::default();
}

unsafe extern "C" fn poll(
    real: Poll,
    queue: *mut c_void,
    room: c_int,
    completions: *mut c_void,
) -> c_int {
    // SAFETY: the arguments of the plugin's own call.
    let found = unsafe { real(queue, room, completions) };
    // SAFETY: an array of so many, zeroed or written before, of plain integers.
    let completions = unsafe { std::slice::from_raw_parts_mut(completions.cast(), room as usize) };
    LIES.with_borrow_mut(|lies| lies.tell(found, completions))
}

/// A request with what it may report.
struct Request {
    pointer: Ptr,
    asked: Vec<usize>,
}

struct Desk {
    net: Net,
    send: Ptr,
    recv: Ptr,
    from: Box<[u8; ROOM]>,
    to: Box<[u8; ROOM]>,
    from_mr: Ptr,
    to_mr: Ptr,
    requests: Vec<Request>,
}

impl Desk {
    fn receive(&mut self, bytes: &mut Bytes<'_>) {
        let count = 1 + bytes.below(MEMBERS);
        // The first and the last 64 bytes of each part belong to nobody.
        let part = ROOM / MEMBERS;
        let mut data: Vec<Ptr> =
            (0..count).map(|i| self.to[i * part + 64..].as_mut_ptr().cast()).collect();
        let mut sizes: Vec<usize> = (0..count).map(|_| bytes.below(8) * (part - 128) / 7).collect();
        let mut tags: Vec<c_int> = (0..count).map(|_| bytes.below(3) as c_int).collect();
        let (mut handles, mut request) = (vec![self.to_mr; count], null_mut());
        let asked = sizes.clone();
        let result = self.net.irecv(
            self.recv,
            count as c_int,
            &mut data,
            &mut sizes,
            &mut tags,
            &mut handles,
            &raw mut request,
        );
        if result == 0 && !request.is_null() {
            self.requests.push(Request { pointer: request, asked });
        }
    }

    fn send(&mut self, bytes: &mut Bytes<'_>) {
        let (size, tag, mut request) = (bytes.below(9) * 230, bytes.below(3) as c_int, null_mut());
        let result = self.net.isend(
            self.send,
            self.from.as_mut_ptr(),
            size,
            tag,
            self.from_mr,
            &raw mut request,
        );
        if result == 0 && !request.is_null() {
            self.requests.push(Request { pointer: request, asked: vec![size] });
        }
    }

    fn flush(&mut self) {
        let (mut data, mut request) = ([self.to.as_mut_ptr().cast()], null_mut());
        let result = self.net.iflush(
            self.recv,
            1,
            &mut data,
            &mut [64],
            &mut [self.to_mr],
            &raw mut request,
        );
        if result == 0 && !request.is_null() {
            self.requests.push(Request { pointer: request, asked: Vec::new() });
        }
    }

    fn test(&mut self, bytes: &mut Bytes<'_>) {
        if self.requests.is_empty() {
            return;
        }
        let at = bytes.below(self.requests.len());
        let (mut done, mut sizes) = (-7, [-7; 2 * MEMBERS]);
        let result = self.net.test(self.requests[at].pointer, &raw mut done, sizes.as_mut_ptr());
        if result == 0 && done == 0 {
            return;
        }
        let request = self.requests.swap_remove(at);
        if result != 0 {
            return;
        }
        assert_eq!(done, 1);
        let strange = LIES.with_borrow(|lies| lies.strange);
        for (size, asked) in sizes.iter().zip(&request.asked) {
            assert!(strange || (0..=*asked as c_int).contains(size), "{size} bytes of {asked}");
        }
        let others = request.asked.len().max(1);
        assert!(strange || sizes[others..].iter().all(|size| *size == -7));
    }

    fn edges(&self) {
        for part in self.to.chunks(ROOM / MEMBERS) {
            let (first, last) = (&part[..64], &part[part.len() - 64..]);
            assert!(first.iter().chain(last).all(|byte| *byte == EDGE), "beside a receive");
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let calls: Vec<u8> = (0..40).flat_map(|i| [i, i * 7, i * 3, i % 5, 255 - i]).collect();
    let mut seeds: Vec<Vec<u8>> = (0..16)
        .map(|kind| {
            let script: Vec<u8> = (0..60).flat_map(|i| [kind, i, i * 5, 1 << (i % 8)]).collect();
            [&[kind, script.len() as u8, 0][..], &script, &calls].concat()
        })
        .collect();
    seeds.push([&[4, 0, 0][..], &calls].concat());
    // A receive on a queue pair that there is not, of a connection over two rails.
    let late = [&[15; 6][..], &[0, 0, 42].repeat(5)].concat();
    seeds.push([&[1, late.len() as u8, 0][..], &late, &calls].concat());
    seeds
}

fuzz_target!(
    init: {
        device::settle("target/fuzz/libprovider.so", &[
            ("SOFTRNIC_DEVICES", "2"),
            ("SOFTRNIC_CMA", "all"),
            ("NCCL_IB_QPS_PER_CONNECTION", "2"),
            ("NCCL_IB_SPLIT_DATA_ON_QPS", "1"),
            ("NCCL_IB_RESILIENCY_PORT_FAILOVER", "1"),
            ("PINRAIL_FLUSH", "always"),
        ]);
        device::script(Some(poll));
        pinrail_fuzz::plant("completions", seeds());
    },
    |data: &[u8]| {
        let mut bytes = Bytes::new(data);
        let before = device::census();
        let (kind, mut context) = (bytes.byte(), null_mut());
        let net = Net::pick(3);
        assert_eq!(net.init(&raw mut context), 0);
        let device = if kind & 1 == 0 { 0 } else { net.fuse(&[0, 1], 2).expect("a fused device") };
        let (mut from, mut to) = (Box::new([0; ROOM]), Box::new([EDGE; ROOM]));
        let copied = (kind & 2 != 0, kind & 4 != 0);
        if copied.0 {
            device::hold(&mut from[..], true);
        }
        if copied.1 {
            device::hold(&mut to[..], true);
        }
        LIES.set(Lies::default());
        let (send, recv) = net.pair(context, device).expect("a connection");
        let (mut from_mr, mut to_mr) = (null_mut(), null_mut());
        assert_eq!(net.reg_mr(send, from.as_mut_ptr(), ROOM, 1, &raw mut from_mr), 0);
        assert_eq!(net.reg_mr(recv, to.as_mut_ptr(), ROOM, 1, &raw mut to_mr), 0);
        let mut desk = Desk { net, send, recv, from, to, from_mr, to_mr, requests: Vec::new() };

        let len = bytes.number(2) as usize;
        LIES.set(Lies { script: bytes.take(len).to_vec(), ..Lies::default() });
        while !bytes.is_empty() {
            match bytes.below(8) {
                0 | 1 => desk.receive(&mut bytes),
                2 | 3 => desk.send(&mut bytes),
                4 => desk.flush(),
                _ => desk.test(&mut bytes),
            }
        }
        assert_eq!(net.dereg_mr(send, from_mr), 0);
        assert_eq!(net.dereg_mr(recv, to_mr), 0);
        assert_eq!(net.close_send(send), 0);
        assert_eq!(net.close_recv(recv), 0);
        desk.edges();
        assert_eq!(net.finalize(context), 0);
        if copied.0 {
            device::hold(&mut desk.from[..], false);
        }
        if copied.1 {
            device::hold(&mut desk.to[..], false);
        }
        device::expect_nothing_left(before);
    }
);
