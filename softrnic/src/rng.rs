//! A small generator with a written-down algorithm (SplitMix64): a seed means the same on every machine and for ever.

/// A generator.
#[derive(Clone, Copy, Debug)]
pub struct Rng(u64);

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Rng {
    /// A generator that starts at a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator for the `n`-th event of one of several independent streams of a seed.
    pub fn of(seed: u64, stream: u64, n: u64) -> Self {
        let mut outer = Self(seed ^ stream.wrapping_mul(STEP));
        Self(outer.draw() ^ n.wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        let wide = (u128::from(self.draw()) * u128::from(n)) >> 64;
        u64::try_from(wide).unwrap_or(0)
    }

    /// Whether an event of this probability happens.
    pub fn chance(&mut self, p: f64) -> bool {
        // 53 bits: every value is a double, 1.0 is never reached.
        let draw = (self.draw() >> 11) as f64 / (1_u64 << 53) as f64;
        draw < p
    }

    /// Puts a list into a random order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for end in (1..list.len()).rev() {
            let other = usize::try_from(self.below(end as u64 + 1)).unwrap_or(0);
            list.swap(end, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_algorithm_is_the_written_one() {
        // The first outputs of SplitMix64 for seed 0, as published with the algorithm.
        let mut rng = Rng::new(0);
        assert_eq!(rng.draw(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(rng.draw(), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn numbers_stay_below_their_limit_and_reach_all_of_it() {
        let mut rng = Rng::new(7);
        let mut seen = [false; 5];
        for _ in 0..1000 {
            seen[usize::try_from(rng.below(5)).expect("small")] = true;
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!(rng.below(0), 0);
        assert!(!rng.chance(0.0) && rng.chance(1.0));
    }

    #[test]
    fn a_shuffled_list_has_the_same_members() {
        let mut list: Vec<u32> = (0..50).collect();
        Rng::new(3).shuffle(&mut list);
        assert_ne!(list, (0..50).collect::<Vec<_>>());
        list.sort_unstable();
        assert_eq!(list, (0..50).collect::<Vec<_>>());
    }
}
