//! Whatever a peer writes into the credit FIFO and the size records: reads stay inside, say what the words say, and
//! every length that can be advertised is cut into parts that fit.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nccl_net_pinrail::memory::ledger::Purpose;
use nccl_net_pinrail::memory::piece::Piece;
use nccl_net_pinrail::transport::fifo::{
    Credit, CreditFifo, Front, MEMBERS, SLOTS, SizeRecords, grid_and_records,
    grid_and_records_bytes, stride,
};
use nccl_net_pinrail::transport::stripe::{Imm, MAX_PARTS, Stripes};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes before the image of the memory: rails, width, member, slot, sequence.
const PREFIX: usize = 8;

fn grid(rails: usize) -> (Arc<Piece>, CreditFifo, SizeRecords) {
    let bytes = grid_and_records_bytes(stride(rails));
    let piece = Piece::unregistered(bytes, Purpose::Credits).expect("memory");
    let (fifo, records) = grid_and_records(&piece, stride(rails));
    (piece, fifo, records)
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for rails in [1, 3] {
        let (pages, fifo, records) = grid(rails);
        for slot in 0..2 {
            let sequence = slot as u32 + 1;
            for member in 0..MEMBERS {
                let credit = Credit {
                    addr: 0x7f00_0000_0000,
                    len: 1 << (4 * member),
                    tag: member as u32,
                    rkeys: [5; 8],
                    members: MEMBERS as u32,
                    sequence,
                };
                fifo.fill(slot, member, &credit);
                records.fill(slot, member, credit.len);
            }
            let mut seed = vec![rails as u8, 4, 1, slot as u8];
            seed.extend(sequence.to_le_bytes());
            seed.extend(
                (0..pages.len())
                    .step_by(8)
                    .flat_map(|at| pages.u64_at(at).load(Ordering::Relaxed).to_le_bytes())
                    .take(2 * MEMBERS * stride(rails)),
            );
            seeds.push(seed);
        }
    }
    seeds
}

fuzz_target!(
    init: pinrail_fuzz::plant("credit", seeds()),
    |data: &[u8]| {
        let Some((prefix, image)) = data.split_first_chunk::<PREFIX>() else { return };
        let [rails, width, member, slot, sequence @ ..] = *prefix;
        let sequence = u32::from_le_bytes(sequence);
        let (slot, member) = (usize::from(slot), usize::from(member));
        let (pages, fifo, records) = grid(usize::from(rails % 8) + 1);
        for (at, word) in (0..pages.len()).step_by(8).zip(image.chunks_exact(8)) {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            pages.u64_at(at).store(word, Ordering::Relaxed);
        }

        let at = fifo.offset(slot, member);
        assert!(at + fifo.stride() <= SLOTS * MEMBERS * fifo.stride());
        let read = fifo.read(slot, member, sequence);
        if let Some(credit) = read {
            assert_eq!(credit.sequence, sequence);
            let word = |offset| pages.u64_at(at + offset).load(Ordering::Relaxed).to_le_bytes();
            assert_eq!(credit.addr.to_le_bytes(), word(0));
            assert_eq!([credit.len, credit.tag].map(u32::to_le_bytes).as_flattened(), word(8));
            // It would be advertised again with the same words.
            fifo.fill(slot, member, &credit);
            assert_eq!(fifo.read(slot, member, sequence), Some(credit));
        }
        if fifo.is_short() {
            // The short way and the general way agree.
            let general = fifo.read(slot, 0, sequence);
            match fifo.front(slot, sequence) {
                Front::Empty => assert_eq!(general, None),
                Front::Several => assert!(general.is_some_and(|credit| credit.members != 1)),
                Front::One(head) => {
                    let credit = general.expect("an entry");
                    assert_eq!(credit.members, 1);
                    assert_eq!(head.addr(), credit.addr);
                    assert_eq!(head.len_and_tag(), (credit.len, credit.tag));
                    assert_eq!([head.rkey(0), head.rkey(1)], credit.rkeys[..2]);
                }
            }
        }
        let members = member % (MEMBERS + 1);
        assert!(records.read(slot, members)[members..].iter().all(|size| *size == 0));

        // A send is cut to what was advertised; whatever that was, the parts tile it and can be counted.
        let width = u32::from(width) % MAX_PARTS as u32 + 1;
        let len = read.map_or(sequence, |credit| credit.len).min(i32::MAX as u32);
        // Ports of three speeds that the sequence chooses.
        let speeds = [1 + (sequence & 0xff), 1 + (sequence >> 8 & 0xff), 1 + (sequence >> 16 & 0xff)];
        let stripes = Stripes::new(width as usize, width as usize, &speeds, &[0; 5]);
        let chunk = stripes.chunk(len);
        let count = stripes.parts(len, chunk, 0);
        assert!((1..=width).contains(&count));
        let mut next = 0;
        for part in 0..count {
            let (offset, bytes) = stripes.range(len, chunk, 0, part);
            assert_eq!(offset, next);
            next += bytes;
        }
        assert_eq!(next, len);
        let imm = Imm::new(sequence, count, true);
        assert!(imm.matches(sequence) && imm.parts() == count && imm.has_record());
        // And any immediate that a peer sends counts some parts.
        assert!((1..=MAX_PARTS as u32).contains(&Imm(sequence).parts()));
    }
);
