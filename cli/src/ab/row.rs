//! One measurement, whoever printed it.

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Series {
    /// nccl-tests, the result beside the input.
    OutOfPlace,
    /// nccl-tests, the result over the input.
    InPlace,
    /// The bench, messages one after the other.
    Stream,
    /// The bench, half a round trip.
    Latency,
}

impl Series {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::OutOfPlace => "out-of-place",
            Self::InPlace => "in-place",
            Self::Stream => "stream",
            Self::Latency => "latency",
        }
    }
}

/// One measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Bytes.
    pub size: u64,
    /// What else tells it from others of that size: type and operation.
    pub label: String,
    /// What was measured.
    pub series: Series,
    /// Microseconds.
    pub time_us: Option<f64>,
    /// GB/s (10⁹ bytes), of a link: what nccl-tests calls bus bandwidth.
    pub bandwidth_gbs: Option<f64>,
    /// GB/s, of the operation.
    pub algorithm_gbs: Option<f64>,
    /// Wrong results; `None`: it was not checked.
    pub wrong: Option<f64>,
}

impl Row {
    /// Nothing measured yet.
    pub fn new(size: u64, label: String, series: Series) -> Self {
        Self {
            size,
            label,
            series,
            time_us: None,
            bandwidth_gbs: None,
            algorithm_gbs: None,
            wrong: None,
        }
    }

    /// How fast it was, in a unit that is the same for all rows of a series: a ratio of two is that of the speeds. The time
    /// has more digits than the bandwidth.
    pub fn speed(&self) -> Option<f64> {
        let positive = |value: Option<f64>| value.filter(|value| *value > 0.0);
        positive(self.time_us).map(|time| 1.0 / time).or_else(|| positive(self.bandwidth_gbs))
    }
}

/// The middle of some values; the mean of the two middle ones of an even number.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match (sorted.len() % 2, sorted.get(half)) {
        (_, None) => None,
        (1, Some(middle)) => Some(*middle),
        (_, Some(upper)) => Some((sorted[half - 1] + upper) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn middles() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn the_time_says_how_fast_and_else_the_bandwidth() {
        let mut row = Row::new(8, String::new(), Series::OutOfPlace);
        assert_eq!(row.speed(), None);
        row.bandwidth_gbs = Some(3.0);
        assert_eq!(row.speed(), Some(3.0));
        row.time_us = Some(4.0);
        assert_eq!(row.speed(), Some(0.25));
        row.time_us = Some(0.0);
        row.bandwidth_gbs = Some(0.0);
        assert_eq!(row.speed(), None, "a ratio to nothing is none");
    }
}
