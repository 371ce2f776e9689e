//! Medians: this bench runs on shared machines, where one disturbed round must not decide.

/// The middle value; 0 for none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        count if count % 2 == 1 => sorted[count / 2],
        count => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
    }
}

/// The median of a round's value divided by the same round's reference: what both suffered cancels out.
pub fn paired_ratio(values: &[f64], references: &[f64]) -> f64 {
    let ratios: Vec<f64> = values
        .iter()
        .zip(references)
        .filter(|(_, reference)| **reference > 0.0)
        .map(|(value, reference)| value / reference)
        .collect();
    median(&ratios)
}

#[cfg(test)]
mod tests {
    use super::{median, paired_ratio};

    #[test]
    fn the_middle_value() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0, 1.0, 100.0]), 3.0);
        assert_eq!(median(&[4.0, 2.0]), 3.0);
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        assert_eq!(paired_ratio(&[1.0, 10.0, 4.0], &[2.0, 20.0, 4.0]), 0.5);
        assert_eq!(paired_ratio(&[1.0], &[0.0]), 0.0);
    }
}
