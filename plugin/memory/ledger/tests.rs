//! The order of pins, and what the books say afterwards. Ranges here are numbers: no memory is behind them.

use super::*;
use proptest::prelude::*;

fn ledger() -> &'static PinLedger {
    Box::leak(Box::default())
}

fn rails(names: &[&str]) -> Vec<Arc<str>> {
    names.iter().map(|name| Arc::from(*name)).collect()
}

fn registration(rail: &Arc<str>) -> Pin {
    Pin::registration(rail, "ibv_reg_mr")
}

fn cuda(contract: Claim) -> Pin {
    Pin { by: Pinner::Cuda, api: "cuMemHostRegister", contract, ends: Ender::Plugin }
}

const OWN: Range<usize> = 0x10000..0x14000;

#[test]
fn the_strongest_goes_first_on_every_rail() {
    let ledger = ledger();
    let rails = rails(&["a", "b"]);
    ledger.own(OWN, Purpose::Application);
    let weak = || ledger.pin(OWN, cuda(Claim::Known(PinContract::Pinned)), &rails);
    let missing = |result: Result<PinRecord, OrderError>| match result {
        Err(OrderError::WeakerFirst { missing, .. }) => missing,
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(weak()), "a, b");
    let first = ledger.pin(OWN, registration(&rails[0]), &rails).unwrap();
    assert_eq!(missing(weak()), "b");
    let second = ledger.pin(OWN, registration(&rails[1]), &rails).unwrap();
    let third = weak().unwrap();
    // With the strong pin gone the page may be moved again, and a weak one would be the first.
    drop((first, second, third));
    assert_eq!(missing(weak()), "a, b");
}

#[test]
fn what_is_not_known_to_be_strong_is_weak() {
    let ledger = ledger();
    ledger.own(OWN, Purpose::BounceArena);
    for contract in [
        Claim::Unknown,
        Claim::Assumed(PinContract::LongTermPinned),
        Claim::Known(PinContract::Resident),
        Claim::Known(PinContract::Mlocked),
        Claim::Known(PinContract::Referenced),
        Claim::Known(PinContract::Pinned),
    ] {
        let refused = ledger.pin(OWN, cuda(contract), &[]).unwrap_err();
        assert!(matches!(refused, OrderError::WeakerFirst { .. }), "{refused}");
        let error = Error::from(refused);
        assert_eq!(error.blame(), Blame::Internal);
        for part in ["bounce arena", "CUDA", "strongest contract first"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
    assert!(ledger.describe(OWN)[0].ends_with(": "), "a refused pin is not recorded");
}

#[test]
fn a_part_of_the_plugins_memory_is_the_plugins() {
    let ledger = ledger();
    ledger.own(OWN, Purpose::Credits);
    let inside = OWN.start + 0x1000..OWN.end;
    assert!(ledger.pin(inside.clone(), cuda(Claim::Unknown), &[]).is_err());
    let over = OWN.end - 1..OWN.end + 1;
    assert!(matches!(
        ledger.pin(over, cuda(Claim::Unknown), &[]),
        Err(OrderError::Straddles { .. })
    ));
    let record = ledger.pin(inside, registration(&Arc::from("a")), &[]).unwrap();
    assert!(ledger.pin(OWN, cuda(Claim::Unknown), &[]).is_ok());
    drop(record);
}

#[test]
fn memory_of_others_is_recorded_and_never_refused() {
    let ledger = ledger();
    let range = 0x50000..0x51000;
    let weak = ledger.pin(range.clone(), cuda(Claim::Assumed(PinContract::Pinned)), &[]).unwrap();
    let strong = ledger.pin(range.clone(), registration(&Arc::from("mlx5_0")), &[]).unwrap();
    let [line] = &ledger.describe(0x50fff..0x60000)[..] else { panic!("one line") };
    assert!(line.contains("assumed pinned by CUDA (cuMemHostRegister)"), "{line}");
    assert!(line.contains("long-term pinned by mlx5_0 (ibv_reg_mr)"), "{line}");
    assert_eq!(ledger.pinned_bytes(), 0x1000);
    assert!(ledger.describe(0x51000..0x60000).is_empty());
    drop((weak, strong));
    assert!(ledger.describe(range).is_empty());
    assert_eq!(ledger.pinned_bytes(), 0);
}

#[test]
fn the_quota_counts_each_registration() {
    let ledger = ledger();
    let range = 0x50000..0x52000;
    let rail = Arc::from("a");
    let both = [0, 1].map(|_| ledger.pin(range.clone(), registration(&rail), &[]).unwrap());
    assert_eq!(ledger.pinned_bytes(), 2 * 0x2000);
    drop(both);
}

proptest! {
    /// Whatever the order of calls: no weak pin is on the plugin's memory while no strong one has ever been, and the
    /// books are empty at the end.
    #[test]
    fn no_order_of_calls_gets_a_weak_pin_in_first(steps in prop::collection::vec((0..3_u8, any::<prop::sample::Index>()), 0..40)) {
        let ledger = ledger();
        let rail: Arc<str> = Arc::from("a");
        ledger.own(OWN, Purpose::Application);
        let (mut strong, mut weak): (Vec<PinRecord>, Vec<PinRecord>) = Default::default();
        for (step, pick) in steps {
            match step {
                0 => strong.push(ledger.pin(OWN, registration(&rail), &[]).unwrap()),
                1 => match ledger.pin(OWN, cuda(Claim::Known(PinContract::Pinned)), std::slice::from_ref(&rail)) {
                    Ok(record) => {
                        prop_assert!(!strong.is_empty());
                        weak.push(record);
                    }
                    Err(_) => prop_assert!(strong.is_empty()),
                },
                _ if !strong.is_empty() => drop(strong.swap_remove(pick.index(strong.len()))),
                _ => {}
            }
        }
        drop((strong, weak));
        prop_assert_eq!(ledger.pinned_bytes(), 0);
        ledger.disown(OWN.start);
        prop_assert!(ledger.describe(0..usize::MAX).is_empty());
    }
}

#[test]
fn what_is_held_by_now_is_told_apart_from_what_was_asked_for() {
    let ledger = ledger();
    let rail = rails(&["a"]).remove(0);
    ledger.own(OWN, Purpose::Credits);
    ledger.own(0x20000..0x21000, Purpose::Application);
    assert_eq!(ledger.owned(), [(OWN, Purpose::Credits), (0x20000..0x21000, Purpose::Application)]);
    let own = ledger.pin(OWN, registration(&rail), &[]).unwrap();
    let other = ledger.pin(0x20000..0x21000, registration(&rail), &[]).unwrap();
    other.taken();
    assert_eq!(ledger.registered_own(), [], "asked for, or an application's");
    own.taken();
    assert!(ledger.registered_own().iter().map(|(range, _)| range).eq([&OWN]));
    let given = ledger.pin(0x30000..0x31000, registration(&rail), &[]).unwrap();
    let by_cuda = ledger.pin(0x40000..0x41000, cuda(Claim::Unknown), &[]).unwrap();
    assert!(ledger.given().iter().eq([&(0x30000..0x31000)]), "what a device holds");
    drop((own, other, given, by_cuda));
    assert!(ledger.registered_own().is_empty() && ledger.given().is_empty());
}
