//! Model checks: each test runs in every interleaving and with every value that the memory model lets a load return.
//!
//! The writer stands for an adapter, or for the event thread; the reader is the plugin's own code in `sync`.

#[path = "../../../plugin/sync.rs"]
pub mod sync;

#[cfg(test)]
mod tests {
    use crate::sync::{
        AtomicU32, AtomicU64, HALF_WORDS, OBSERVE, Ordering, PUBLISH, fence, read_half,
    };
    use loom::sync::Arc;
    use loom::thread;

    type Half = [AtomicU64; HALF_WORDS];

    fn half() -> Half {
        std::array::from_fn(|_| AtomicU64::new(0))
    }

    /// The payload of an entry, recognisable by its sequence.
    fn payload(sequence: u64, index: usize) -> u64 {
        sequence * 100 + index as u64
    }

    /// An adapter's write of one half: the last word after the others, which have no order among them.
    fn write(half: &Half, sequence: u64, last: Ordering) {
        for index in (0..HALF_WORDS - 1).rev() {
            half[index].store(payload(sequence, index), Ordering::Relaxed);
        }
        half[HALF_WORDS - 1].store(sequence, last);
    }

    fn read(half: &Half, sequence: u64) -> Option<[u64; HALF_WORDS]> {
        read_half(|index| &half[index], |last| last == sequence)
    }

    fn assert_whole(words: [u64; HALF_WORDS], sequence: u64) {
        let expected = [0, 1, 2].map(|index| payload(sequence, index));
        assert_eq!(words[..3], expected, "a payload that is not of receive {sequence}");
    }

    /// One entry is written while it is looked for.
    fn one_entry(last: Ordering) {
        loom::model(move || {
            let half = Arc::new(half());
            let adapter = thread::spawn({
                let half = Arc::clone(&half);
                move || write(&half, 1, last)
            });
            if let Some(words) = read(&half, 1) {
                assert_whole(words, 1);
            }
            adapter.join().unwrap();
            assert_whole(read(&half, 1).expect("written"), 1);
        });
    }

    #[test]
    fn an_entry_that_is_seen_is_whole() {
        one_entry(PUBLISH);
    }

    /// Without the order the model finds the torn entry, so that its silence elsewhere means something.
    #[test]
    #[should_panic(expected = "a payload that is not of receive 1")]
    fn without_publication_an_entry_is_torn() {
        one_entry(Ordering::Relaxed);
    }

    /// Two halves, each with its own end: neither vouches for the other.
    #[test]
    fn an_entry_of_two_halves_that_is_seen_is_whole() {
        loom::model(|| {
            let halves = Arc::new([half(), half()]);
            let adapter = thread::spawn({
                let halves = Arc::clone(&halves);
                move || {
                    // An adapter may make the second visible first.
                    write(&halves[1], 1, PUBLISH);
                    write(&halves[0], 1, PUBLISH);
                }
            });
            if let (Some(first), Some(second)) = (read(&halves[0], 1), read(&halves[1], 1)) {
                assert_whole(first, 1);
                assert_whole(second, 1);
            }
            adapter.join().unwrap();
        });
    }

    /// A slot is written again once the receive that used it is complete; the completion comes after the sender's read.
    #[test]
    fn a_slot_that_is_written_again_is_never_mixed() {
        loom::model(|| {
            let shared = Arc::new((half(), AtomicU32::new(0)));
            let receiver = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let (half, complete) = &*shared;
                    write(half, 1, PUBLISH);
                    if complete.load(OBSERVE) == 1 {
                        write(half, 2, PUBLISH);
                    }
                }
            });
            let (half, complete) = &*shared;
            if let Some(words) = read(half, 1) {
                assert_whole(words, 1);
                complete.store(1, PUBLISH);
                if let Some(words) = read(half, 2) {
                    assert_whole(words, 2);
                }
            }
            receiver.join().unwrap();
        });
    }

    /// Size records: plain words, vouched for by a completion that was read before without any order.
    #[test]
    fn sizes_behind_a_completion_are_there() {
        loom::model(|| {
            let shared = Arc::new((AtomicU32::new(0), AtomicU32::new(0)));
            let adapter = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    shared.0.store(77, Ordering::Relaxed);
                    shared.1.store(1, PUBLISH);
                }
            });
            if shared.1.load(Ordering::Relaxed) == 1 {
                fence(OBSERVE);
                assert_eq!(shared.0.load(Ordering::Relaxed), 77);
            }
            adapter.join().unwrap();
        });
    }

    /// The gate: the data path looks without order; who finds it shut looks again and sees why.
    #[test]
    fn a_gate_that_is_shut_tells_why() {
        loom::model(|| {
            let shared = Arc::new((AtomicU32::new(0), AtomicU32::new(1)));
            let events = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    shared.0.store(3, Ordering::Relaxed);
                    shared.1.store(2, PUBLISH);
                }
            });
            let (reason, gate) = &*shared;
            if gate.load(Ordering::Relaxed) != 1 {
                assert_eq!(gate.load(OBSERVE), 2);
                assert_eq!(reason.load(Ordering::Relaxed), 3);
            }
            events.join().unwrap();
        });
    }
}
