//! The counts against a model that keeps one for each page.

use proptest::prelude::*;

use super::*;

const PAGE: usize = 0x1000;
/// Pages of the model; its first lies at address `PAGE`.
const PAGES: usize = 24;

/// A kernel with holes, which marks what it can and then refuses, as Linux does.
#[derive(Debug, Default)]
struct Fake {
    holes: Vec<usize>,
    marked: Vec<bool>,
    calls: Vec<(char, usize, usize)>,
}

impl Fake {
    fn new(holes: &[usize]) -> Self {
        Self { holes: holes.to_vec(), marked: vec![false; PAGES], calls: Vec::new() }
    }

    fn mark(&mut self, first: usize, last: usize, value: bool) {
        assert_eq!((first % PAGE, last % PAGE), (0, PAGE - 1), "whole pages");
        for page in pages(first, last) {
            self.marked[page] = value && !self.holes.contains(&page);
        }
    }
}

/// The pages of the model in a range.
fn pages(first: usize, last: usize) -> std::ops::Range<usize> {
    let clamp = |page: usize| page.saturating_sub(1).min(PAGES);
    clamp(first / PAGE)..clamp(last / PAGE + 1)
}

impl Kernel for Fake {
    fn withhold(&mut self, first: usize, last: usize) -> Result<(), i32> {
        self.calls.push(('+', first / PAGE - 1, last / PAGE - 1));
        self.mark(first, last, true);
        let refused = pages(first, last).any(|page| self.holes.contains(&page));
        if refused { Err(libc::ENOMEM) } else { Ok(()) }
    }

    fn give_back(&mut self, first: usize, last: usize) {
        self.calls.push(('-', first / PAGE - 1, last / PAGE - 1));
        self.mark(first, last, false);
    }
}

fn bytes(first: usize, count: usize) -> (usize, usize) {
    ((first + 1) * PAGE, (first + 1 + count) * PAGE - 1)
}

impl Ranges {
    fn count(&self, page: usize) -> i64 {
        self.runs.range(..=(page + 1) * PAGE).next_back().map_or(0, |(_, count)| *count)
    }

    fn check(&self) {
        assert!(self.runs.contains_key(&0), "from the first address on");
        let counts: Vec<i64> = self.runs.values().copied().collect();
        assert!(counts.windows(2).all(|w| w[0] != w[1]), "neighbours differ: {:?}", self.runs);
    }
}

fn up(ranges: &mut Ranges, kernel: &mut Fake, first: usize, count: usize) -> Result<(), i32> {
    let (first, last) = bytes(first, count);
    ranges.withhold(first, last, kernel)
}

fn down(ranges: &mut Ranges, kernel: &mut Fake, first: usize, count: usize) {
    let (first, last) = bytes(first, count);
    ranges.give_back(first, last, kernel);
}

#[test]
fn the_kernel_is_told_at_the_first_and_the_last_only() {
    let (mut ranges, mut kernel) = (Ranges::default(), Fake::new(&[]));
    up(&mut ranges, &mut kernel, 2, 4).expect("mapped");
    up(&mut ranges, &mut kernel, 3, 2).expect("nested");
    up(&mut ranges, &mut kernel, 2, 4).expect("the same again");
    up(&mut ranges, &mut kernel, 5, 3).expect("overlapping");
    assert_eq!(kernel.calls, [('+', 2, 5), ('+', 6, 7)]);
    kernel.calls.clear();
    down(&mut ranges, &mut kernel, 2, 4);
    assert_eq!(kernel.calls, [], "somebody holds every page");
    down(&mut ranges, &mut kernel, 2, 4);
    assert_eq!(kernel.calls, [('-', 2, 2)], "the others are held by the nested and the last range");
    down(&mut ranges, &mut kernel, 3, 2);
    down(&mut ranges, &mut kernel, 5, 3);
    assert_eq!(kernel.calls, [('-', 2, 2), ('-', 3, 4), ('-', 5, 7)]);
    assert_eq!(ranges.runs.len(), 1, "one run is left");
}

#[test]
fn both_ends_of_the_address_space_can_be_named() {
    let (mut ranges, mut kernel) = (Ranges::default(), Fake::new(&[]));
    let top = usize::MAX - (PAGE - 1);
    ranges.withhold(top, usize::MAX, &mut kernel).expect("no holes there");
    assert_eq!(ranges.runs, BTreeMap::from([(0, 0), (top, 1)]));
    ranges.give_back(top, usize::MAX, &mut kernel);
    ranges.withhold(PAGE, usize::MAX, &mut kernel).expect("everything");
    ranges.give_back(PAGE, usize::MAX, &mut kernel);
    ranges.check();
    assert_eq!(ranges.runs.len(), 1);
}

#[test]
fn giving_back_too_often_costs_the_next_mark() {
    let (mut ranges, mut kernel) = (Ranges::default(), Fake::new(&[]));
    down(&mut ranges, &mut kernel, 0, 1);
    up(&mut ranges, &mut kernel, 0, 1).expect("mapped");
    assert!(kernel.calls.is_empty() && !kernel.marked[0]);
    up(&mut ranges, &mut kernel, 0, 1).expect("mapped");
    assert!(kernel.marked[0]);
}

#[test]
fn a_refusal_in_the_middle_takes_the_earlier_runs_back() {
    let (mut ranges, mut kernel) = (Ranges::default(), Fake::new(&[5]));
    up(&mut ranges, &mut kernel, 4, 1).expect("mapped");
    up(&mut ranges, &mut kernel, 6, 1).expect("mapped");
    kernel.calls.clear();
    assert_eq!(up(&mut ranges, &mut kernel, 3, 6), Err(libc::ENOMEM));
    assert_eq!(kernel.calls, [('+', 3, 3), ('+', 5, 5), ('-', 3, 3)]);
    let counts: Vec<i64> = (2..10).map(|page| ranges.count(page)).collect();
    assert_eq!(counts, [0, 0, 1, -1, 1, 0, 0, 0], "only the refused run is one too low");
    ranges.check();
}

#[test]
fn a_refusal_at_the_end_of_a_range_reaches_as_far_as_its_run() {
    let (mut ranges, mut kernel) = (Ranges::default(), Fake::new(&[5]));
    up(&mut ranges, &mut kernel, 8, 1).expect("mapped");
    assert_eq!(up(&mut ranges, &mut kernel, 4, 3), Err(libc::ENOMEM));
    let counts: Vec<i64> = (3..10).map(|page| ranges.count(page)).collect();
    assert_eq!(counts, [0, -1, -1, -1, -1, 1, 0]);
    assert!(kernel.marked[4] && kernel.marked[6], "what the kernel marked before it refused");
    up(&mut ranges, &mut kernel, 7, 1).expect("mapped");
    assert!(!kernel.marked[7], "the next registration goes unmarked");
    ranges.check();
}

#[test]
fn a_refused_run_is_merged_with_an_equal_one_before_it() {
    let (mut ranges, mut kernel) = (Ranges::default(), Fake::new(&[5]));
    down(&mut ranges, &mut kernel, 4, 1);
    assert_eq!(up(&mut ranges, &mut kernel, 4, 2), Err(libc::ENOMEM));
    ranges.check();
    assert_eq!((ranges.count(4), ranges.count(5)), (-1, -1));
}

#[derive(Clone, Debug)]
enum Step {
    Up(usize, usize),
    /// Gives one of the ranges back that are still held, whichever comes at this place.
    Down(usize),
    /// Gives back what nobody may have withheld.
    Stray(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..PAGES).prop_flat_map(|first| (Just(first), 1..=PAGES - first));
    prop_oneof![
        5 => range().prop_map(|(first, count)| Step::Up(first, count)),
        4 => (0..64_usize).prop_map(Step::Down),
        1 => range().prop_map(|(first, count)| Step::Stray(first, count)),
    ]
}

proptest! {
    #[test]
    fn counts_and_marks_are_those_of_single_pages(
        steps in prop::collection::vec(step(), 1..80),
        stray in any::<bool>(),
    ) {
        let (mut ranges, mut kernel) = (Ranges::default(), Fake::new(&[]));
        let (mut counts, mut marked) = ([0_i64; PAGES], [false; PAGES]);
        let mut held = Vec::new();
        for step in steps {
            let (first, count, by) = match step {
                Step::Up(first, count) => { held.push((first, count)); (first, count, 1) }
                Step::Down(_) if held.is_empty() => continue,
                Step::Down(which) => {
                    let (first, count) = held.swap_remove(which % held.len());
                    (first, count, -1)
                }
                Step::Stray(first, count) if stray => (first, count, -1),
                Step::Stray(..) => continue,
            };
            kernel.calls.clear();
            if by > 0 {
                prop_assert_eq!(up(&mut ranges, &mut kernel, first, count), Ok(()));
            } else {
                down(&mut ranges, &mut kernel, first, count);
            }
            let mut told = 0;
            for page in first..first + count {
                let (before, after) = (counts[page], counts[page] + by);
                if (before, after) == (0, 1) || (before, after) == (1, 0) {
                    marked[page] = after == 1;
                    told += 1;
                }
                counts[page] = after;
            }
            let called: usize = kernel.calls.iter().map(|(_, from, to)| to - from + 1).sum();
            prop_assert_eq!(called, told, "each page that changes hands is named once, no other");
            prop_assert_eq!(&kernel.marked[..], &marked[..]);
            for (page, count) in counts.iter().enumerate() {
                prop_assert_eq!(ranges.count(page), *count);
            }
            ranges.check();
        }
        if !stray {
            for (first, count) in held {
                down(&mut ranges, &mut kernel, first, count);
            }
            prop_assert!(!kernel.marked.contains(&true), "nothing held, nothing withheld");
            prop_assert_eq!(ranges.runs.len(), 1);
        }
    }

    /// Whatever is refused, no count is ever too high.
    #[test]
    fn refusals_err_to_one_side(
        steps in prop::collection::vec(step(), 1..80),
        holes in prop::collection::vec(0..PAGES, 0..4),
    ) {
        let (mut ranges, mut kernel) = (Ranges::default(), Fake::new(&holes));
        let mut counts = [0_i64; PAGES];
        let mut held = Vec::new();
        for step in steps {
            match step {
                Step::Up(first, count) if up(&mut ranges, &mut kernel, first, count).is_ok() => {
                    counts[first..first + count].iter_mut().for_each(|c| *c += 1);
                    held.push((first, count));
                }
                Step::Down(which) if !held.is_empty() => {
                    let (first, count) = held.swap_remove(which % held.len());
                    down(&mut ranges, &mut kernel, first, count);
                    counts[first..first + count].iter_mut().for_each(|c| *c -= 1);
                }
                _ => {}
            }
            ranges.check();
            for (page, count) in counts.iter().enumerate() {
                prop_assert!(ranges.count(page) <= *count);
            }
        }
    }
}
