//! Any sequence of calls through several versions of the table at once, legal or not: each answers with a result that
//! exists, nothing crashes or hangs, messages of connections that were used as they should arrive whole, and when
//! everything is closed nothing is left.
//!
//! Illegal is what the plugin promises to notice: NULL, objects of another kind, closed ones where a call looks them up,
//! sizes, counts and tags of all kinds, requests of open communicators in any state, memory handles that are gone while work
//! is under way, closing in any order, and a device that breaks below.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pinrail_fuzz::bytes::Bytes;
use pinrail_fuzz::device;
use pinrail_fuzz::net::{Handle, Net, Ptr};
use std::ffi::c_int;
use std::ptr::null_mut;

const ROOM: usize = 1 << 16;
/// Messages use the second half of the memory, single calls the first.
const HALF: usize = ROOM / 2;
const MOST: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Context,
    Listener,
    Send,
    Recv,
    Region,
}

#[derive(Clone, Copy)]
struct Object {
    kind: Kind,
    pointer: Ptr,
    net: Net,
    /// Number of the connection whose two ends are known to belong together.
    link: Option<usize>,
}

#[derive(Default)]
struct World {
    objects: Vec<Object>,
    /// What was closed.
    gone: Vec<Ptr>,
    handles: Vec<(Handle, Net, c_int)>,
    /// Requests by the communicator that gave them out.
    requests: Vec<(Ptr, Ptr)>,
    /// Per connection: nobody has used it other than for whole messages.
    clean: Vec<bool>,
    /// The device was broken: nothing has to arrive any more.
    broken: bool,
    memory: Vec<u8>,
    messages: u32,
}

impl World {
    fn of(&self, kind: Kind) -> Vec<Object> {
        self.objects.iter().filter(|object| object.kind == kind).copied().collect()
    }

    fn pick(&self, kind: Kind, bytes: &mut Bytes<'_>) -> Option<Object> {
        let all = self.of(kind);
        (!all.is_empty()).then(|| all[bytes.below(all.len())])
    }

    /// Mostly one of the kind; else NULL, another live object, or, where it is looked up, one that is gone or never was.
    fn pointer(&self, kind: Kind, looked_up: bool, bytes: &mut Bytes<'_>) -> Ptr {
        let choice = bytes.byte();
        match choice % 8 {
            0 => null_mut(),
            1 if !self.objects.is_empty() => self.objects[bytes.below(self.objects.len())].pointer,
            2 if looked_up && !self.gone.is_empty() => self.gone[bytes.below(self.gone.len())],
            3 if looked_up => std::ptr::without_provenance_mut(bytes.number(8) as usize),
            _ => self.pick(kind, bytes).map_or(null_mut(), |object| object.pointer),
        }
    }

    fn net(&self, bytes: &mut Bytes<'_>) -> Net {
        Net::pick(bytes.below(4))
    }

    fn add(&mut self, kind: Kind, pointer: Ptr, net: Net, link: Option<usize>) {
        assert!(!pointer.is_null(), "{kind:?}: success without an object");
        self.objects.push(Object { kind, pointer, net, link });
    }

    /// A call has closed what was at an address: it must have been there, and of that kind.
    fn closed(&mut self, kind: Kind, pointer: Ptr) {
        let at = self.objects.iter().position(|object| object.pointer == pointer);
        let object = self.objects.swap_remove(at.expect("what was closed was open"));
        assert_eq!(object.kind, kind);
        if let Some(link) = object.link {
            self.clean[link] = false;
        }
        self.gone.push(pointer);
        self.requests.retain(|(_, owner)| *owner != pointer);
        // With the last of the others, handles that were forgotten may be gone too: then they are refused.
        if kind != Kind::Region && self.objects.iter().all(|object| object.kind == Kind::Region) {
            for region in std::mem::take(&mut self.objects) {
                region.net.dereg_mr(null_mut(), region.pointer);
                self.gone.push(region.pointer);
            }
        }
    }

    /// Someone may have used the connection of this end for more than whole messages.
    fn soil(&mut self, pointer: Ptr) {
        let link =
            self.objects.iter().find(|object| object.pointer == pointer).and_then(|o| o.link);
        if let Some(link) = link {
            self.clean[link] = false;
        }
    }

    fn context(&self, net: Net, bytes: &mut Bytes<'_>) -> Ptr {
        // Versions without contexts take none.
        if net.has_contexts() { self.pointer(Kind::Context, true, bytes) } else { null_mut() }
    }

    fn device(bytes: &mut Bytes<'_>) -> c_int {
        match bytes.byte() {
            other @ 0..=19 => c_int::from(other) - 8,
            other => c_int::from(other) % 3,
        }
    }

    fn size(bytes: &mut Bytes<'_>) -> usize {
        match bytes.byte() % 8 {
            0 => 0,
            1 => usize::MAX,
            2 => c_int::MAX as usize,
            3 => bytes.number(8) as usize,
            _ => bytes.number(2) as usize % HALF,
        }
    }

    /// An address with as much behind it as any legal size of the first half needs.
    fn address(&mut self, bytes: &mut Bytes<'_>) -> *mut u8 {
        match bytes.byte() {
            0 => null_mut(),
            other => self.memory[usize::from(other)..].as_mut_ptr(),
        }
    }

    fn open_pair(&mut self, bytes: &mut Bytes<'_>) {
        if self.of(Kind::Send).len() >= MOST {
            return;
        }
        let net = self.net(bytes);
        let context = match self.pick(Kind::Context, bytes) {
            Some(context) if net.has_contexts() => context.pointer,
            None if net.has_contexts() => return,
            _ => null_mut(),
        };
        match net.pair(context, bytes.below(3) as c_int) {
            Ok((send, recv)) => {
                let link = Some(self.clean.len());
                self.clean.push(true);
                self.add(Kind::Send, send, net, link);
                self.add(Kind::Recv, recv, net, link);
            }
            // Nobody has called init, there is no such fused device, or the device is broken.
            Err(code) => assert!(code > 0),
        }
    }

    /// A receive of some members and their sends; on a connection that nobody soiled every byte arrives.
    fn message(&mut self, bytes: &mut Bytes<'_>) {
        let Some(send) = self.pick(Kind::Send, bytes).filter(|send| send.link.is_some()) else {
            return;
        };
        let recv = self.objects.iter().find(|o| o.kind == Kind::Recv && o.link == send.link);
        let Some(recv) = recv.copied() else { return };
        let link = send.link.expect("asked above");
        let count = 1 + bytes.below(8);
        let (part, half) = (HALF / 2 / count, HALF / 2);
        let sizes: Vec<usize> = (0..count).map(|_| bytes.number(2) as usize % part).collect();
        let (mut from_mr, mut to_mr) = (null_mut(), null_mut());
        let memory = &mut self.memory[HALF..];
        let good = send.net.reg_mr(send.pointer, memory.as_mut_ptr(), half, 1, &raw mut from_mr)
            == 0
            && recv.net.reg_mr(recv.pointer, memory[half..].as_mut_ptr(), half, 1, &raw mut to_mr)
                == 0;
        if good {
            self.messages = self.messages.wrapping_add(1);
            let number = self.messages;
            let byte = |member: usize, at: usize| (at * 7 + member * 31) as u8 ^ number as u8;
            let (from, to) = memory.split_at_mut(half);
            to.fill(0);
            for (member, size) in sizes.iter().enumerate() {
                (0..*size).for_each(|at| from[member * part + at] = byte(member, at));
            }
            let arrived = exchange(send, recv, count, part, &sizes, from, to, from_mr, to_mr);
            let expected = self.clean[link] && !self.broken;
            assert!(arrived || !expected, "a message of {sizes:?} did not arrive");
            if arrived && expected {
                for (member, size) in sizes.iter().enumerate() {
                    let got = &to[member * part..][..part];
                    assert!(
                        (0..*size).all(|at| got[at] == byte(member, at)),
                        "member {member} of {sizes:?}"
                    );
                    assert!(
                        got[*size..].iter().all(|byte| *byte == 0),
                        "behind member {member} of {sizes:?}"
                    );
                }
            }
            // What did not end may still write there.
            self.clean[link] &= arrived;
        } else {
            assert!(self.broken || !self.clean[link], "registrations are refused");
        }
        for (object, handle) in [(send, from_mr), (recv, to_mr)] {
            assert_eq!(object.net.dereg_mr(object.pointer, handle), 0);
        }
    }

    fn one_call(&mut self, bytes: &mut Bytes<'_>) {
        let net = self.net(bytes);
        let mut out: Ptr = null_mut();
        match bytes.below(24) {
            0 | 1 => self.open_pair(bytes),
            2..=4 => self.message(bytes),
            5 => {
                let nowhere = bytes.below(8) == 0 && net.has_contexts();
                let result = net.init(if nowhere { null_mut() } else { &raw mut out });
                if result == 0 && net.has_contexts() {
                    self.add(Kind::Context, out, net, None);
                }
            }
            6 if bytes.below(4) == 0 => {
                let net = Net::pick(3);
                let context = self.pointer(Kind::Context, true, bytes);
                if net.finalize(context) == 0 && !context.is_null() {
                    self.closed(Kind::Context, context);
                }
            }
            7 => {
                let mut count = -1;
                net.devices(if bytes.below(8) == 0 { null_mut() } else { &raw mut count });
                let mut properties = [u64::MAX; 32];
                net.properties(Self::device(bytes), Some(&mut properties));
                net.properties(Self::device(bytes), None);
            }
            8 => {
                let members: Vec<c_int> = (0..8).map(|_| Self::device(bytes)).collect();
                net.fuse(&members, bytes.byte() as i8 as c_int);
            }
            9 => {
                let (mut handle, nowhere) = ([0; 128], bytes.below(16));
                let (context, device) = (self.context(net, bytes), Self::device(bytes));
                let to = if nowhere == 1 { null_mut() } else { &raw mut handle };
                let result = net.listen(
                    context,
                    device,
                    to,
                    if nowhere == 2 { null_mut() } else { &raw mut out },
                );
                if result == 0 {
                    self.add(Kind::Listener, out, net, None);
                    self.handles.push((handle, net, device));
                }
            }
            10 | 11 => self.connect(bytes),
            12 => {
                let listener = self.pointer(Kind::Listener, true, bytes);
                let nowhere = bytes.below(16) == 0;
                let result = net.accept(listener, if nowhere { null_mut() } else { &raw mut out });
                if result == 0 && !out.is_null() {
                    self.add(Kind::Recv, out, net, None);
                }
            }
            13 => {
                let comm = self.pointer(
                    if bytes.byte() & 1 == 0 { Kind::Send } else { Kind::Recv },
                    true,
                    bytes,
                );
                let (data, kind) = (self.address(bytes), bytes.below(5) as c_int);
                // What is registered exists: the plugin may look at it.
                let size = bytes.number(2) as usize % HALF;
                let result = net.reg_mr(comm, data, size, kind, &raw mut out);
                if result == 0 {
                    self.add(Kind::Region, out, net, None);
                }
            }
            14 => {
                let comm = self.pointer(Kind::Recv, true, bytes);
                let (data, size, kind) =
                    (self.address(bytes), Self::size(bytes), bytes.below(6) as c_int);
                let result = net.reg_dmabuf(
                    comm,
                    data,
                    size,
                    kind,
                    bytes.number(8),
                    -1 - bytes.byte() as c_int,
                    &raw mut out,
                );
                assert_ne!(result, 0, "a descriptor that is none");
            }
            15 => {
                let (comm, handle) = (
                    self.pointer(Kind::Send, true, bytes),
                    self.pointer(Kind::Region, true, bytes),
                );
                if net.dereg_mr(comm, handle) == 0 && !handle.is_null() {
                    self.closed(Kind::Region, handle);
                }
            }
            16 | 17 => {
                let comm = self.pointer(Kind::Send, false, bytes);
                let handle = self.pointer(Kind::Region, false, bytes);
                let (data, size, tag) =
                    (self.address(bytes), Self::size(bytes), bytes.byte() as i8 as c_int);
                // Small messages may be read by the call itself.
                let data = if data.is_null() { self.memory.as_mut_ptr() } else { data };
                self.soil(comm);
                let nowhere = bytes.below(32) == 0;
                let result = net.isend(
                    comm,
                    data,
                    size,
                    tag,
                    handle,
                    if nowhere { null_mut() } else { &raw mut out },
                );
                if result == 0 && !out.is_null() {
                    self.requests.push((out, comm));
                }
            }
            18 | 19 => {
                let comm = self.pointer(Kind::Recv, false, bytes);
                let count = if bytes.below(8) == 0 {
                    bytes.byte() as i8 as c_int
                } else {
                    1 + bytes.below(8) as c_int
                };
                let len = usize::try_from(count).unwrap_or(0).max(1);
                let mut data: Vec<Ptr> = (0..len).map(|_| self.address(bytes).cast()).collect();
                let mut sizes: Vec<usize> = (0..len).map(|_| Self::size(bytes)).collect();
                let mut tags: Vec<c_int> = (0..len).map(|_| bytes.below(4) as c_int).collect();
                let mut handles: Vec<Ptr> =
                    (0..len).map(|_| self.pointer(Kind::Region, false, bytes)).collect();
                self.soil(comm);
                out = std::ptr::without_provenance_mut(bytes.below(2));
                let early = out;
                let result = net.irecv(
                    comm,
                    count,
                    &mut data,
                    &mut sizes,
                    &mut tags,
                    &mut handles,
                    &raw mut out,
                );
                if result == 0 && !out.is_null() {
                    assert_ne!(
                        out.addr(),
                        1,
                        "an optional receive was not taken, and nothing was written: {early:?}"
                    );
                    self.requests.push((out, comm));
                }
            }
            20 => {
                let comm = self.pointer(Kind::Recv, false, bytes);
                let count = 1 + bytes.below(8);
                let mut data: Vec<Ptr> = (0..count).map(|_| self.address(bytes).cast()).collect();
                let mut sizes: Vec<c_int> =
                    (0..count).map(|_| Self::size(bytes) as c_int).collect();
                let mut handles: Vec<Ptr> =
                    (0..count).map(|_| self.pointer(Kind::Region, false, bytes)).collect();
                self.soil(comm);
                let result = net.iflush(
                    comm,
                    count as c_int,
                    &mut data,
                    &mut sizes,
                    &mut handles,
                    &raw mut out,
                );
                if result == 0 && !out.is_null() {
                    self.requests.push((out, comm));
                }
            }
            21 => {
                let request = match bytes.byte() {
                    0 => null_mut(),
                    _ if self.requests.is_empty() => return,
                    other => self.requests[usize::from(other) % self.requests.len()].0,
                };
                let (mut done, mut sizes) = (-7, [-7; 16]);
                let nowhere = bytes.below(16) == 0;
                let sizes = if bytes.below(4) == 0 { null_mut() } else { sizes.as_mut_ptr() };
                let result =
                    net.test(request, if nowhere { null_mut() } else { &raw mut done }, sizes);
                assert!(result != 0 || nowhere || done == 0 || done == 1);
            }
            22 => self.close(net, bytes),
            _ if bytes.below(4) == 0 => self.break_something(bytes),
            _ => {}
        }
    }

    fn connect(&mut self, bytes: &mut Bytes<'_>) {
        if self.handles.is_empty() {
            return;
        }
        let at = bytes.below(self.handles.len());
        let (mut handle, net, device) = self.handles[at];
        match bytes.byte() {
            0 => handle[bytes.below(128)] ^= bytes.byte(),
            1 => handle = std::array::from_fn(|_| bytes.byte()),
            _ => {}
        }
        let context = self.context(net, bytes);
        let mut out = null_mut();
        let result = net.connect(context, device, &raw mut handle, &raw mut out);
        self.handles[at].0 = handle;
        if result == 0 && !out.is_null() {
            self.add(Kind::Send, out, net, None);
        }
        if self.handles.len() > MOST {
            self.handles.swap_remove(0);
        }
    }

    fn close(&mut self, net: Net, bytes: &mut Bytes<'_>) {
        let (kind, call): (Kind, fn(Net, Ptr) -> c_int) = match bytes.below(3) {
            0 => (Kind::Listener, Net::close_listen),
            1 => (Kind::Send, Net::close_send),
            _ => (Kind::Recv, Net::close_recv),
        };
        let pointer = self.pointer(kind, true, bytes);
        if call(net, pointer) == 0 {
            self.closed(kind, pointer);
        }
    }

    fn break_something(&mut self, bytes: &mut Bytes<'_>) {
        // A fault needs an open device.
        if self.of(Kind::Send).is_empty() {
            return;
        }
        self.broken = true;
        match bytes.below(6) {
            0 => device::kill_queue_pair(usize::from(bytes.byte())),
            1 => device::port(bytes.below(2), false),
            2 => device::port(bytes.below(2), true),
            3 => device::faults("op=reg-mr p=0.3 -> fail=ENOMEM"),
            4 => device::faults("p=0.1 -> drop at=end\np=0.05 -> status=loc-prot at=half"),
            _ => device::faults("nth=5 -> device-fatal"),
        }
    }

    /// Closes what is left, in an order by chance.
    fn end(&mut self, bytes: &mut Bytes<'_>) {
        while !self.objects.is_empty() {
            let Object { kind, pointer, net, .. } = self.objects[bytes.below(self.objects.len())];
            let result = match kind {
                Kind::Context => net.finalize(pointer),
                Kind::Listener => net.close_listen(pointer),
                Kind::Send => net.close_send(pointer),
                Kind::Recv => net.close_recv(pointer),
                Kind::Region => net.dereg_mr(null_mut(), pointer),
            };
            assert_eq!(result, 0, "closing {kind:?}");
            self.closed(kind, pointer);
        }
        // The last finalize ends attempts to connect that nobody has followed up.
        let (net, mut context) = (Net::pick(3), null_mut());
        assert_eq!(net.init(&raw mut context), 0);
        assert_eq!(net.finalize(context), 0);
    }
}

/// One receive and its sends, until all are done. False: it was refused or failed.
#[expect(clippy::too_many_arguments, reason = "both ends with all that they need")]
fn exchange(
    send: Object,
    recv: Object,
    count: usize,
    part: usize,
    sizes: &[usize],
    from: &mut [u8],
    to: &mut [u8],
    from_mr: Ptr,
    to_mr: Ptr,
) -> bool {
    const TURNS: usize = 20_000;
    let mut data: Vec<Ptr> = (0..count).map(|i| to[i * part..].as_mut_ptr().cast()).collect();
    let mut asked = vec![part; count];
    let mut tags: Vec<c_int> = (0..count as c_int).collect();
    let (mut handles, mut receive) = (vec![to_mr; count], null_mut());
    let result = recv.net.irecv(
        recv.pointer,
        count as c_int,
        &mut data,
        &mut asked,
        &mut tags,
        &mut handles,
        &raw mut receive,
    );
    if result != 0 || receive.is_null() {
        return false;
    }
    let (mut sends, mut posted, mut left) = (vec![null_mut(); count], 0, count + 1);
    let mut got = [-7; 16];
    // The device is inline: what can come has come after a few turns. A rail that fails takes its time.
    for _ in 0..TURNS {
        if posted < count {
            let at = from[posted * part..].as_mut_ptr();
            let result = send.net.isend(
                send.pointer,
                at,
                sizes[posted],
                posted as c_int,
                from_mr,
                &raw mut sends[posted],
            );
            if result != 0 {
                return false;
            }
            posted += usize::from(!sends[posted].is_null());
        }
        for request in sends.iter_mut().chain([&mut receive]).filter(|request| !request.is_null()) {
            let (mut done, mut sizes) = (-7, [-7; 16]);
            if send.net.test(*request, &raw mut done, sizes.as_mut_ptr()) != 0 {
                return false;
            }
            if done == 1 {
                *request = null_mut();
                left -= 1;
                got = sizes;
            }
        }
        if left == 0 {
            break;
        }
    }
    let _ = got;
    left == 0
}

fn seeds() -> Vec<Vec<u8>> {
    let init = [3, 5, 1];
    let pair = |net: u8| vec![net, 0, 0, net, 0, 1];
    let message =
        |count: u8| [&[0, 2, 0, count][..], &[200, 3].repeat(usize::from(count) + 1)].concat();
    let mut seeds = Vec::new();
    for net in 0..4 {
        seeds.push([&init[..], &pair(net), &message(0), &message(7), &message(3)].concat());
    }
    for call in 0..24 {
        let single: Vec<u8> =
            (0..30).flat_map(|i| [3, call, i * 9, i, i * 5, 200 - i, i, i * 3]).collect();
        seeds.push([&init[..], &pair(3), &message(1), &single].concat());
    }
    seeds
}

fuzz_target!(
    init: {
        device::settle("dist/softrnic/libibverbs.so.1", &[
            ("SOFTRNIC_DEVICES", "2"),
            ("NCCL_IB_QPS_PER_CONNECTION", "2"),
            ("NCCL_IB_RESILIENCY_PORT_FAILOVER", "1"),
            ("PINRAIL_FLUSH", "always"),
            ("NCCL_SOCKET_RETRY_CNT", "1"),
        ]);
        pinrail_fuzz::plant("calls", seeds());
    },
    |data: &[u8]| {
        let before = device::census();
        let mut world = World { memory: vec![0; ROOM], ..World::default() };
        let mut bytes = Bytes::new(data);
        while !bytes.is_empty() {
            world.one_call(&mut bytes);
        }
        world.end(&mut bytes);
        device::faults("");
        device::expect_nothing_left(before);
    }
);
