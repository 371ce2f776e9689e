//! Whatever bytes a stranger sends to a listener, or another plugin leaves in NCCL's handle: an error or a message,
//! never more; and the answer does not depend on how the bytes were cut on their way.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nccl_net_pinrail::transport::subnet::Subnet;
use nccl_net_pinrail::transport::wire::{
    End, HANDLE_BYTES, HEADER_BYTES, Handle, Hello, Identity, MAX_BODY, Message, Offer, Step,
    WireLane, WireRail,
};

fn end(rails: usize, lanes: usize) -> End {
    let rail = WireRail {
        lid: 1,
        link_layer: 2,
        mtu: 5,
        port: 3,
        speed: 400_000,
        gid: [0xfe; 16],
        rkey: 0x0102_0304,
    };
    End {
        identity: Identity { pid: 7, host: "host-1".into(), device: "mlx5_0:1+mlx5_1:1".into() },
        memory: 0x7fff_0000_1000,
        stride: if rails <= 2 { 32 } else { 64 },
        traffic_class: 106,
        sl: 3,
        failover: rails > 1,
        recovery: rails > 2,
        rails: vec![rail; rails],
        lanes: vec![WireLane { qpn: 77, psn: 5, ece: [1, 2, 3] }; lanes],
    }
}

fn recovery(step: Step) -> Message {
    Message::Recovery { rails: (0, 1), attempt: 3, step }
}

fn seeds() -> Vec<Vec<u8>> {
    let end_of = end(1, 1);
    let offer = |queues| Offer { rail: end_of.rails[0], queues: vec![end_of.lanes[0]; queues] };
    let messages = [
        Message::Hello(Hello { nonce: 1, end: end(1, 1) }),
        Message::Hello(Hello { nonce: u64::MAX, end: end(8, 128) }),
        Message::Reply(end(2, 4)),
        Message::Refusal("no such listener".into()),
        Message::Ready,
        Message::Bye(Vec::new()),
        Message::Bye(vec![(3, 7)]),
        Message::Stopped(vec![(0, 1), (127, u32::MAX)]),
        Message::Failed("a work request failed".into()),
        recovery(Step::Settled),
        recovery(Step::Probe(offer(1))),
        recovery(Step::Answer(offer(1))),
        recovery(Step::Lanes(offer(128))),
        recovery(Step::Ready(offer(2))),
        recovery(Step::InUse),
        recovery(Step::Failed("the path is not well".into())),
    ];
    let mut seeds: Vec<_> = messages.iter().map(Message::encode).collect();
    seeds.push(seeds.concat());
    for addr in ["192.0.2.1:4000", "[fe80::1%3]:4000", "[2001:db8::1]:65535"] {
        let mut bytes = [0; HANDLE_BYTES];
        let handle = Handle {
            addr: addr.parse().expect("an address"),
            nonce: 9,
            rails: 2,
            links: 1,
            subnets: Subnet::of(&[7; 16]).into_iter().collect(),
        };
        handle.write(&mut bytes);
        seeds.push(bytes.to_vec());
    }
    seeds
}

fn message(data: &[u8]) {
    let mut rest = data;
    while let Ok(Some((message, len))) = Message::decode(rest) {
        assert!((HEADER_BYTES..=HEADER_BYTES + MAX_BODY).contains(&len) && len <= rest.len());
        // Anything shorter asks for more.
        for cut in [0, HEADER_BYTES, len / 2, len - 1] {
            if cut < len {
                assert!(matches!(Message::decode(&rest[..cut]), Ok(None)));
            }
        }
        // What was understood can be said again. Text may come out shortened once, not twice.
        let said = message.encode();
        let (again, all) = Message::decode(&said).expect("our own message").expect("all of it");
        assert_eq!(all, said.len());
        let (third, _) = Message::decode(&again.encode()).expect("ours").expect("all of it");
        assert_eq!(again, third);
        rest = &rest[len..];
    }
}

fuzz_target!(
    init: pinrail_fuzz::plant("handshake", seeds()),
    |data: &[u8]| {
        message(data);
        if let Some(bytes) = data.first_chunk::<HANDLE_BYTES>()
            && let Ok(handle) = Handle::read(bytes)
        {
            let mut again = [0; HANDLE_BYTES];
            handle.write(&mut again);
            assert_eq!(Handle::read(&again).expect("our own handle"), handle);
        }
    }
);
