//! Property tests: everything written is read back, nothing read crashes.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

fn rail() -> impl Strategy<Value = WireRail> {
    any::<(u16, [u8; 3], u32, [u8; 16], u32)>().prop_map(
        |(lid, [link_layer, mtu, port], speed, gid, rkey)| WireRail {
            lid,
            link_layer,
            mtu,
            port,
            speed,
            gid,
            rkey,
        },
    )
}

fn lane() -> impl Strategy<Value = WireLane> {
    any::<(u32, u32, [u32; 3])>().prop_map(|(qpn, psn, ece)| WireLane { qpn, psn, ece })
}

fn end() -> impl Strategy<Value = End> {
    (
        any::<u32>(),
        "[a-z0-9.-]{0,64}",
        "[a-z0-9_:+]{0,128}",
        any::<(u64, u8, u8, u8, bool, bool)>(),
        vec(rail(), 1..=MAX_RAILS),
        vec(lane(), 1..=MAX_PARTS),
    )
        .prop_map(
            |(
                pid,
                host,
                device,
                (memory, stride, traffic_class, sl, failover, more),
                rails,
                lanes,
            )| {
                End {
                    identity: Identity { pid, host, device },
                    memory,
                    stride,
                    traffic_class,
                    sl,
                    failover,
                    recovery: failover && more,
                    rails,
                    lanes,
                }
            },
        )
}

fn step() -> impl Strategy<Value = Step> {
    let offer =
        || (rail(), vec(lane(), 1..=MAX_PARTS)).prop_map(|(rail, queues)| Offer { rail, queues });
    prop_oneof![
        Just(Step::Settled),
        offer().prop_map(Step::Probe),
        offer().prop_map(Step::Answer),
        offer().prop_map(Step::Lanes),
        offer().prop_map(Step::Ready),
        Just(Step::InUse),
        "[ -~]{0,200}".prop_map(Step::Failed),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        (any::<u64>(), end()).prop_map(|(nonce, end)| Message::Hello(Hello { nonce, end })),
        end().prop_map(Message::Reply),
        "[ -~]{0,200}".prop_map(Message::Refusal),
        Just(Message::Ready),
        vec(any::<(u8, u32)>(), 0..=MAX_PARTS).prop_map(Message::Bye),
        vec(any::<(u8, u32)>(), 0..=MAX_PARTS).prop_map(Message::Stopped),
        "[ -~]{0,200}".prop_map(Message::Failed),
        (any::<(u8, u8)>(), any::<u32>(), step())
            .prop_map(|(rails, attempt, step)| Message::Recovery { rails, attempt, step }),
    ]
}

proptest! {
    #[test]
    fn a_message_survives_any_cut(message in message(), tail in vec(any::<u8>(), 0..16)) {
        let mut bytes = message.encode();
        let len = bytes.len();
        prop_assert!(len <= HEADER_BYTES + MAX_BODY);
        for cut in [0, 1, 3, HEADER_BYTES - 1, HEADER_BYTES, len / 2, len - 1] {
            if cut < len {
                prop_assert_eq!(Message::decode(&bytes[..cut]).unwrap(), None);
            }
        }
        bytes.extend(tail);
        prop_assert_eq!(Message::decode(&bytes).unwrap(), Some((message, len)));
    }

    #[test]
    fn damage_is_an_error_or_another_message_but_never_a_crash(
        message in message(), at in any::<prop::sample::Index>(), value: u8,
    ) {
        let mut bytes = message.encode();
        let at = at.index(bytes.len());
        bytes[at] = value;
        let _ = Message::decode(&bytes);
    }

    #[test]
    fn garbage_is_never_a_crash(bytes in vec(any::<u8>(), 0..300)) {
        let _ = Message::decode(&bytes);
    }

    #[test]
    fn a_handle_round_trips(
        ip: [u8; 16], v6: bool, port: u16, scope: u32, nonce: u64, rails in 1..=8_u8, links in 1..=u8::MAX,
        gids in vec(any::<([u8; 16], bool)>(), 0..=MAX_RAILS),
    ) {
        let subnets = gids
            .iter()
            .filter_map(|(gid, mapped)| {
                let [.., a, b, c, d] = *gid;
                Subnet::of(&if *mapped { Ipv4Addr::new(a, b, c, d).to_ipv6_mapped().octets() } else { *gid })
            })
            .collect();
        let addr = if v6 {
            SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope))
        } else {
            SocketAddr::new(IpAddr::V4(Ipv4Addr::new(ip[0], ip[1], ip[2], ip[3])), port)
        };
        let handle = Handle { addr, nonce, rails, links, subnets };
        let mut bytes = [0xff; HANDLE_BYTES];
        handle.write(&mut bytes);
        prop_assert_eq!(token(&bytes), None);
        set_token(&mut bytes, 7);
        prop_assert_eq!(token(&bytes), Some(7));
        prop_assert_eq!(Handle::read(&bytes).unwrap(), handle);
    }

    #[test]
    fn a_damaged_handle_is_refused(at in 0..HANDLE_BYTES, flip in 1..=255_u8) {
        prop_assume!(!TOKEN.contains(&at));
        let handle = Handle {
            addr: "192.0.2.1:4000".parse().unwrap(),
            nonce: 1,
            rails: 1,
            links: 1,
            subnets: Subnet::of(&[9; 16]).into_iter().collect(),
        };
        let mut bytes = [0; HANDLE_BYTES];
        handle.write(&mut bytes);
        bytes[at] ^= flip;
        prop_assert!(Handle::read(&bytes).is_err());
    }
}

#[test]
fn another_version_is_named() {
    let mut bytes = Message::Ready.encode();
    bytes[4] = 9;
    let error = Message::decode(&bytes).unwrap_err().to_string();
    assert!(error.contains('9') && error.contains(&VERSION.to_string()), "{error}");
}

#[test]
fn a_stranger_is_recognised_by_one_byte() {
    assert!(Message::decode(b"G").is_err());
    assert!(Message::decode(b"P").unwrap().is_none());
}

#[test]
fn a_peer_cannot_forge_log_lines() {
    let lie = || "no\nNCCL WARN all is lost".to_owned();
    let bytes = Message::Refusal(lie()).encode();
    let Some((Message::Refusal(text), _)) = Message::decode(&bytes).unwrap() else { panic!() };
    assert!(!text.contains('\n'));
    let step = Step::Failed(lie());
    let bytes = Message::Recovery { rails: (0, 0), attempt: 1, step }.encode();
    let Some((Message::Recovery { step: Step::Failed(text), .. }, _)) =
        Message::decode(&bytes).unwrap()
    else {
        panic!()
    };
    assert!(!text.contains('\n'));
}

/// The body of a message about a recovery, with as much of it as there is of `bytes` behind rails and attempt.
fn recovery(bytes: &[u8]) -> Result<Option<(Message, usize)>> {
    let mut w = Writer::default();
    w.u32(MESSAGE_MAGIC);
    w.u16(VERSION);
    w.u16(8);
    w.u32(6 + bytes.len() as u32);
    w.bytes(&[0, 1, 9, 0, 0, 0]);
    w.bytes(bytes);
    Message::decode(&w.0)
}

#[test]
fn steps_of_a_recovery_are_bounded() {
    assert!(recovery(&[1]).unwrap().is_some());
    let error = |bytes: &[u8]| recovery(bytes).unwrap_err().to_string();
    for step in [0, 8, 255] {
        assert!(error(&[step]).contains("unknown step"));
    }
    assert!(error(&[]).contains("cut short"));
    assert!(error(&[1, 0]).contains("too many"));
    let offer = |queues: u16| [&[4][..], &[0; 29], &queues.to_le_bytes()].concat();
    assert!(error(&offer(0)).contains("0 queue pairs"));
    assert!(error(&offer(1)).contains("cut short"));
    assert!(error(&offer(MAX_PARTS as u16 + 1)).contains("the limit is"));
}

#[test]
fn recovery_is_not_had_without_failover() {
    let end = End {
        identity: Identity::default(),
        memory: 0,
        stride: 32,
        traffic_class: 0,
        sl: 0,
        failover: false,
        recovery: true,
        rails: vec![WireRail {
            lid: 0,
            link_layer: 0,
            mtu: 0,
            port: 0,
            speed: 0,
            gid: [0; 16],
            rkey: 0,
        }],
        lanes: vec![WireLane::default()],
    };
    let mut bytes = Message::Reply(end).encode();
    let Some((Message::Reply(read), _)) = Message::decode(&bytes).unwrap() else { panic!() };
    assert!(!read.failover && !read.recovery);
    // The flags lie before the rails, which end with the lanes.
    let flags = bytes.len() - 22 - 29 - 2;
    bytes[flags] = 2;
    assert!(Message::decode(&bytes).is_err());
}
