//! Whatever somebody writes as a fault plan of softrnic, or leaves in the shared memory where its rules lie: rules that
//! mean what they say, or an error of one line that names a line of the text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use softrnic::faults::parse::{MAX_RULES, Plan, show};
use softrnic::faults::rule::{Rule, WORDS};

fn seeds() -> Vec<Vec<u8>> {
    let actions = [
        "status=retry-exc vendor=0x81 at=half",
        "status=12",
        "drop at=end",
        "delay=20ms at=payload",
        "behind=3 for=1s",
        "shuffle",
        "shuffle=4K",
        "corrupt=7",
        "kill-qp",
        "cq-overrun",
        "port-down for=500us",
        "gid=1/fe80::1",
        "gid=0/10.0.0.9",
        "device-fatal at=start",
    ];
    let matchers = [
        "device=rnic0 port=2 op=write,write-imm bytes=1K..2M nth=3",
        "qp=#2 side=remote skip=4 every=5 times=6",
        "qp=0x1ff after=3s p=0.25 bytes=..9",
        "",
    ];
    let mut seeds: Vec<Vec<u8>> = actions
        .iter()
        .flat_map(|action| matchers.map(|m| format!("{m} -> {action}\n").into_bytes()))
        .collect();
    seeds.push(
        b"# a plan\nseed=0x7\nop=reg-mr bytes=4097.. nth=2 -> fail=ENOMEM # why\n\n".to_vec(),
    );
    seeds.push("-> drop\n".repeat(MAX_RULES + 1).into_bytes());
    seeds
}

fuzz_target!(
    init: pinrail_fuzz::plant("plan", seeds()),
    |data: &[u8]| {
        let devices = ["rnic0".to_owned(), "mlx5_1".to_owned()];
        let text = String::from_utf8_lossy(data);
        match Plan::parse(&text, &devices) {
            Ok(plan) => {
                assert!(plan.rules.len() <= MAX_RULES);
                for rule in &plan.rules {
                    let again = Plan::parse(&show(rule, &devices), &devices);
                    assert_eq!(again.expect("a rule that was written down").rules, [rule.clone()]);
                    assert_eq!(Rule::from_words(&rule.words()).as_ref(), Some(rule));
                }
            }
            Err(why) => {
                assert!((1..=text.lines().count()).contains(&why.line), "{why}");
                assert!(!why.what.is_empty() && !why.remedy.is_empty());
                assert!(!why.to_string().contains(char::is_control), "{why:?}");
            }
        }
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(data.chunks_exact(8)) {
            *word = u64::from_ne_bytes(std::array::from_fn(|i| bytes[i]));
        }
        if let Some(rule) = Rule::from_words(&words) {
            assert!(!show(&rule, &devices).contains(char::is_control));
        }
    }
);
