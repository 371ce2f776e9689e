//! The text of fault plans: what is understood, what is refused and how, and that rules survive being written down.

use proptest::prelude::*;
use softrnic::faults::parse::{Plan, show};
use softrnic::faults::rule::*;

fn devices() -> Vec<String> {
    vec!["softrnic0".into(), "softrnic1".into()]
}

fn one(text: &str) -> Rule {
    let plan = Plan::parse(text, &devices()).unwrap_or_else(|why| panic!("{text}: {why}"));
    let [rule] = &plan.rules[..] else { panic!("{text}: {} rules", plan.rules.len()) };
    rule.clone()
}

#[test]
fn words_mean_what_the_manual_says() {
    let all = Match::default;
    let cases = [
        ("->drop", all(), Stage::Start, Action::Drop),
        (
            "device=softrnic1 port=2 qp=#3 op=write,send side=remote bytes=1K..2M nth=4 p=0.5 -> drop at=end",
            Match {
                device: Some(1),
                port: Some(2),
                qp: Some(QpMatch::Ordinal(3)),
                ops: 0b101,
                side: Side::Remote,
                bytes: (1024, 2 << 20),
                skip: 3,
                times: 1,
                p: 0.5,
                ..all()
            },
            Stage::End,
            Action::Drop,
        ),
        (
            "qp=0x20003 skip=5 every=2 times=7 after=20ms -> delay=3us # why",
            Match {
                qp: Some(QpMatch::Number(0x2_0003)),
                skip: 5,
                every: 2,
                times: 7,
                quiet_ns: 20_000_000,
                ..all()
            },
            Stage::Start,
            Action::Delay { ns: 3000 },
        ),
        (
            "op=write-imm -> status=rem-access vendor=0x81 at=payload",
            Match { ops: 2, ..all() },
            Stage::Payload,
            Action::Status { status: 10, vendor: Some(0x81) },
        ),
        ("-> status=12", all(), Stage::Start, Action::Status { status: 12, vendor: None }),
        ("-> behind=2", all(), Stage::Start, Action::Behind { count: 2, ns: 10_000_000 }),
        ("-> behind=2 for=1s", all(), Stage::Start, Action::Behind { count: 2, ns: 1_000_000_000 }),
        ("-> shuffle", Match { ops: WRITES, ..all() }, Stage::Start, Action::Shuffle { piece: 0 }),
        (
            "-> corrupt",
            Match { ops: PAYLOADS, ..all() },
            Stage::Start,
            Action::Corrupt { bytes: 1 },
        ),
        ("-> kill-qp", all(), Stage::Start, Action::KillQp),
        ("-> cq-overrun", all(), Stage::Start, Action::CqOverrun),
        ("-> port-down", all(), Stage::Start, Action::PortDown { ns: None }),
        ("-> port-down for=1s", all(), Stage::Start, Action::PortDown { ns: Some(1_000_000_000) }),
        ("-> device-fatal", all(), Stage::Start, Action::DeviceFatal),
        (
            "-> gid=3/fe80::1",
            all(),
            Stage::Start,
            Action::Gid { index: 3, gid: [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1] },
        ),
        (
            "op=reg-mr nth=5 -> fail=ENOMEM",
            Match { ops: REG_MR, skip: 4, times: 1, ..all() },
            Stage::Start,
            Action::Fail { errno: 12 },
        ),
        (
            "op=create-qp,create-cq bytes=65.. -> fail=EINVAL",
            Match { ops: CREATE_QP | CREATE_CQ, bytes: (65, u64::MAX), ..all() },
            Stage::Start,
            Action::Fail { errno: 22 },
        ),
    ];
    for (text, when, stage, action) in cases {
        assert_eq!(one(text), Rule { when, stage, action }, "{text}");
    }
    let plan =
        Plan::parse("# a plan\nseed=0x10\n\n-> drop\n-> kill-qp\n", &devices()).expect("valid");
    assert_eq!((plan.seed, plan.rules.len()), (Some(16), 2));
}

#[test]
fn the_manual_has_every_name_and_its_plan_is_one() {
    use softrnic::faults::parse::STATUSES;
    let readme = include_str!("../README.md");
    for name in OPS.iter().chain(&STATUSES[1..]).chain(&STAGES[1..]) {
        assert!(readme.contains(&format!("`{name}`")), "README.md lacks {name}");
    }
    let block = readme.split("```").find(|block| block.starts_with("\nseed=")).expect("a plan");
    let plan = Plan::parse(block, &devices()).expect("the plan of the manual");
    assert_eq!((plan.seed, plan.rules.len()), (Some(7), 6));
    // The first column of the table of actions, and what the error message offers.
    let table = readme.split("| action | what happens |").nth(1).expect("a table");
    let rows = table.split("\n\n").next().expect("an end").lines().skip(2);
    let wrong = Plan::parse("-> nothing", &devices()).expect_err("no action");
    for row in rows {
        let name = row.split(['`', '=']).nth(1).expect("a name");
        assert!(wrong.remedy.contains(name), "{name} is not in: {}", wrong.remedy);
    }
}

#[test]
fn every_mistake_is_named_with_its_line_and_remedy() {
    for (rule, what, remedy) in [
        ("op=write drop", "no -> in the rule", "write matchers -> action"),
        ("->", "no action", "write one of status=NAME"),
        ("-> explode", "no action", "kill-qp"),
        ("-> drop kill-qp", "drop and kill-qp in one rule", "write two rules"),
        ("-> drop=1", "drop=1", "takes no value"),
        ("-> drop hard", "hard does not belong right of ->", "at=start|half|payload|end"),
        ("colour=red -> drop", "colour does not belong left of ->", "device=NAME port=N"),
        ("op=write op=read -> drop", "op twice", "once"),
        ("op= -> drop", "op has no value", "write op=..."),
        ("op=wirte -> drop", "op=wirte is unknown", "write, write-imm, send"),
        ("device=mlx5_0 -> drop", "device=mlx5_0 is unknown", "softrnic0, softrnic1"),
        ("port=5 -> drop", "port=5 is out of range", "1 to 4"),
        ("port=one -> drop", "port=one is not a number", "port=5"),
        ("port=+1 -> drop", "port=+1 is not a number", "port=5"),
        ("qp=0 -> drop", "qp=0 is out of range", "1 to 16777215"),
        ("qp=#0 -> drop", "qp=0 is out of range", "1 to"),
        ("side=left -> drop", "side=left is unknown", "local, remote"),
        ("bytes=9..8 -> drop", "bytes=9..8 is empty", "smaller number first"),
        ("bytes=18000000000G -> drop", "too large", "below 2^64"),
        ("nth=0 -> drop", "nth=0 is out of range", "1 to"),
        ("nth=1 every=2 -> drop", "nth together with", "alone"),
        ("every=0 -> drop", "every=0", "1 to"),
        ("times=0 -> drop", "times=0", "1 to"),
        ("after=5 -> drop", "after=5 is not a time", "after=20ms"),
        ("p=1.5 -> drop", "p=1.5 is no probability", "p=0.01 to p=1"),
        ("p=0 -> drop", "p=0 is no probability", "p=1"),
        ("p=NaN -> drop", "p=NaN is no probability", "p=1"),
        ("-> status=success", "is no fault", "name an error"),
        ("-> status=24", "status=24 is out of range", "1 to 23"),
        ("-> status=broken", "status=broken is unknown", "retry-exc"),
        ("-> status", "status has no value", "status=..."),
        ("-> delay=1.5ms", "delay=1.5ms is not a time", "whole number"),
        ("-> delay=400000000000s", "is not a time", "ns, us, ms or s"),
        ("-> drop at=middle", "at=middle is unknown", "start, half, payload, end"),
        ("-> shuffle at=end", "at with shuffle", "leave at out"),
        ("-> shuffle=0", "shuffle=0", "1 to 1G"),
        ("-> corrupt=0", "corrupt=0", "1 to"),
        ("op=send,write -> shuffle", "does not fit op=send", "op=write,write-imm"),
        (
            "op=cmp-swap -> corrupt",
            "does not fit op=cmp-swap",
            "op=write,write-imm,send,send-imm,read",
        ),
        ("side=remote -> behind=1", "behind with side=remote", "plan of the sender"),
        ("-> gid=0", "gid=0 has no address", "gid=INDEX/ADDRESS"),
        ("-> gid=16/::1", "gid=16 is out of range", "0 to 15"),
        ("-> gid=0/home", "home is no address", "gid=0/10.0.0.9"),
        ("op=reg-mr -> drop", "a call and something else", "op=reg-mr"),
        ("op=reg-mr,write -> fail=ENOMEM", "a call and something else", "op=reg-mr"),
        ("-> fail=ENOMEM", "a call and something else", "op=reg-mr"),
        ("op=alloc-pd,write -> fail=ENOMEM", "a call and something else", "op=reg-mr"),
        ("op=create-qp port=1 -> fail=ENOMEM", "a call and something else", "op=reg-mr"),
        ("op=reg-mr qp=1 -> fail=ENOMEM", "a call and something else", "op=reg-mr"),
        ("op=reg-mr -> fail=EWHAT", "fail=EWHAT is not a number", "ENOMEM"),
        ("seed=many", "seed=many is not a number", "seed=5"),
        ("-> \u{7}drop", "no action", "write one of"),
        ("op=\u{1b}[31mread -> drop", "op=\\u{1b}[31mread is unknown", "write, write-imm"),
    ] {
        let text = format!("# first\n{rule}\n-> drop\n");
        let why = Plan::parse(&text, &devices()).expect_err(rule);
        assert_eq!(why.line, 2, "{rule}");
        assert!(why.what.contains(what), "{rule}: {why}");
        assert!(why.remedy.contains(remedy), "{rule}: {why}");
    }
    let many = "-> drop\n".repeat(65);
    assert_eq!(Plan::parse(&many, &devices()).expect_err("too many").line, 65);
    let twice = Plan::parse("seed=1\nseed=2", &devices()).expect_err("two seeds");
    assert_eq!(twice.line, 2);
}

fn times() -> impl Strategy<Value = u64> {
    prop_oneof![0..5000_u64, (0..1000_u64).prop_map(|ms| ms * 1_000_000)]
}

fn matches() -> impl Strategy<Value = Match> {
    let qp = prop_oneof![
        Just(None),
        (1..=0x00ff_ffff_u32).prop_map(|n| Some(QpMatch::Number(n))),
        (1..=u32::MAX).prop_map(|n| Some(QpMatch::Ordinal(n))),
    ];
    let place = (
        prop::option::of(0..2_u8),
        prop::option::of(1..=4_u8),
        qp,
        1..=REQUESTS,
        any::<bool>(),
        any::<(u64, u64)>(),
    );
    let order = (
        prop_oneof![Just(0), any::<u64>().prop_map(|n| n / 2)],
        1..9_u64,
        prop_oneof![Just(u64::MAX), 1..9_u64],
        times(),
        prop_oneof![Just(1.0), 0.001..1.0_f64],
    );
    (place, order).prop_map(|((device, port, qp, ops, remote, (a, b)), order)| {
        let (skip, every, times, quiet_ns, p) = order;
        let side = if remote { Side::Remote } else { Side::Local };
        let bytes = (a.min(b), a.max(b));
        Match { device, port, qp, ops, side, bytes, skip, every, times, quiet_ns, p }
    })
}

fn actions() -> impl Strategy<Value = Action> {
    prop_oneof![
        (1..=23_u8, any::<Option<u32>>())
            .prop_map(|(status, vendor)| Action::Status { status, vendor }),
        Just(Action::Drop),
        times().prop_map(|ns| Action::Delay { ns }),
        (1..=u32::MAX, times()).prop_map(|(count, ns)| Action::Behind { count, ns }),
        (0..=1_u32 << 30).prop_map(|piece| Action::Shuffle { piece }),
        (1..=u32::MAX).prop_map(|bytes| Action::Corrupt { bytes }),
        Just(Action::KillQp),
        Just(Action::CqOverrun),
        prop::option::of(times()).prop_map(|ns| Action::PortDown { ns }),
        (0..16_u8, any::<[u8; 16]>()).prop_map(|(index, gid)| Action::Gid { index, gid }),
        Just(Action::DeviceFatal),
        (1..=4095_u16).prop_map(|errno| Action::Fail { errno }),
    ]
}

/// A rule that the parser would let pass.
fn rules() -> impl Strategy<Value = Rule> {
    let stages =
        prop_oneof![Just(Stage::Start), Just(Stage::Half), Just(Stage::Payload), Just(Stage::End)];
    (matches(), stages, actions()).prop_map(|(mut when, mut stage, action)| {
        match action {
            Action::Shuffle { .. } => when.ops = when.ops & WRITES | 1,
            Action::Corrupt { .. } => when.ops = when.ops & PAYLOADS | 1,
            Action::Behind { .. } => when.side = Side::Local,
            Action::Fail { .. } => {
                (when.ops, when.side, when.port, when.qp) = (REG_MR, Side::Local, None, None);
            }
            _ => {}
        }
        if matches!(
            action,
            Action::Shuffle { .. }
                | Action::Corrupt { .. }
                | Action::Behind { .. }
                | Action::CqOverrun
                | Action::Gid { .. }
                | Action::Fail { .. }
        ) {
            stage = Stage::Start;
        }
        Rule { when, stage, action }
    })
}

proptest! {
    #[test]
    fn a_rule_survives_being_written_down(rule in rules()) {
        let text = show(&rule, &devices());
        prop_assert_eq!(one(&text), rule, "{}", text);
    }

    #[test]
    fn a_rule_survives_shared_memory(rule in rules()) {
        prop_assert_eq!(Rule::from_words(&rule.words()), Some(rule));
    }

    #[test]
    fn any_words_are_read_without_harm(words in any::<[u64; WORDS]>()) {
        if let Some(rule) = Rule::from_words(&words) {
            prop_assert!(!show(&rule, &devices()).is_empty());
        }
    }

    #[test]
    fn any_text_is_a_plan_or_an_error_with_a_line(text in "(([a-z]{1,6}=?[#0-9a-z./,]{0,6}|->|#|\\PC) ?){0,12}\n?") {
        match Plan::parse(&text, &devices()) {
            Ok(plan) => prop_assert!(plan.rules.len() <= text.lines().count()),
            Err(why) => {
                prop_assert!((1..=text.lines().count()).contains(&why.line));
                prop_assert!(!why.what.is_empty() && !why.remedy.is_empty());
            }
        }
    }

    #[test]
    fn one_changed_character_never_changes_a_rule_in_silence(rule in rules(), at in any::<prop::sample::Index>(), to in "[a-z0-9=# >-]") {
        let good = show(&rule, &devices());
        let mut text: Vec<char> = good.chars().collect();
        let at = at.index(text.len());
        text[at] = to.chars().next().expect("one");
        let text: String = text.into_iter().collect();
        // Either refused, or read as something that is written as what was meant by the changed text.
        if let Ok(plan) = Plan::parse(&text, &devices()) {
            for rule in &plan.rules {
                prop_assert_eq!(&one(&show(rule, &devices())), rule, "{}", text);
            }
        }
    }
}
