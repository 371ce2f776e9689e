//! What the rounds add up to.

use super::row::{Row, Series, median};
use std::collections::BTreeMap;

/// Fewer rounds do not tell a difference from chance.
const ENOUGH: usize = 3;

/// Some values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// The lowest.
    pub least: f64,
    /// The highest.
    pub most: f64,
    /// How many there are.
    pub count: usize,
}

impl Spread {
    /// Of values, if there are any.
    pub fn of(values: &[f64]) -> Option<Self> {
        Some(Self {
            median: median(values)?,
            least: values.iter().copied().fold(f64::INFINITY, f64::min),
            most: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            count: values.len(),
        })
    }

    /// All of several ratios say the same: one side is faster.
    pub fn is_one_sided(&self) -> bool {
        self.count >= ENOUGH && (self.least > 1.0 || self.most < 1.0)
    }
}

/// The rows of both sides' runs of one round; a side that failed has none.
pub type Round = [Vec<Row>; 2];

/// One size of one series.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Bytes.
    pub size: u64,
    /// Type and operation.
    pub label: String,
    /// What was measured.
    pub series: Series,
    /// Microseconds of A and of B.
    pub time: [Option<Spread>; 2],
    /// GB/s of A and of B.
    pub bandwidth: [Option<Spread>; 2],
    /// How much faster B is, round by round; above 1: B is.
    pub ratio: Option<Spread>,
    /// Wrong results of A and of B in all rounds; `None`: never checked.
    pub wrong: [Option<f64>; 2],
}

/// What was measured, with the figures of both.
pub fn points(rounds: &[Round]) -> Vec<Point> {
    /// Values of one side: a median for each round where it has any.
    #[derive(Default)]
    struct Values {
        time: Vec<f64>,
        bandwidth: Vec<f64>,
        speed: Vec<Option<f64>>,
        wrong: Option<f64>,
    }
    let mut keys: BTreeMap<(Series, String, u64), [Values; 2]> = BTreeMap::new();
    for row in rounds.iter().flatten().flatten() {
        keys.entry((row.series, row.label.clone(), row.size)).or_default();
    }
    for ((series, label, size), sides) in &mut keys {
        for round in rounds {
            for (values, rows) in sides.iter_mut().zip(round) {
                // A program may print a size several times.
                let same: Vec<&Row> = rows
                    .iter()
                    .filter(|r| (r.series, &r.label, r.size) == (*series, label, *size))
                    .collect();
                let middle = |of: fn(&Row) -> Option<f64>| {
                    median(&same.iter().filter_map(|row| of(row)).collect::<Vec<_>>())
                };
                values.time.extend(middle(|row| row.time_us));
                values.bandwidth.extend(middle(|row| row.bandwidth_gbs));
                values.speed.push(middle(Row::speed));
                for wrong in same.iter().filter_map(|row| row.wrong) {
                    values.wrong = Some(values.wrong.unwrap_or(0.0) + wrong);
                }
            }
        }
    }
    keys.into_iter()
        .map(|((series, label, size), [a, b])| {
            let ratios: Vec<f64> =
                a.speed.iter().zip(&b.speed).filter_map(|(a, b)| Some((*b)? / (*a)?)).collect();
            Point {
                size,
                label,
                series,
                time: [Spread::of(&a.time), Spread::of(&b.time)],
                bandwidth: [Spread::of(&a.bandwidth), Spread::of(&b.bandwidth)],
                ratio: Spread::of(&ratios),
                wrong: [a.wrong, b.wrong],
            }
        })
        .collect()
}

/// What a series comes to.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Which.
    pub series: Series,
    /// Type and operation.
    pub label: String,
    /// The middle of the ratios of all sizes, and the lowest and highest of them.
    pub ratio: Spread,
    /// The sizes of the lowest and the highest.
    pub at: [u64; 2],
}

/// The series in short, in the order of the points.
pub fn summaries(points: &[Point]) -> Vec<Summary> {
    let mut all: Vec<Summary> = Vec::new();
    for group in points.chunk_by(|a, b| (a.series, &a.label) == (b.series, &b.label)) {
        let ratios: Vec<(f64, u64)> =
            group.iter().filter_map(|one| Some((one.ratio?.median, one.size))).collect();
        let values: Vec<f64> = ratios.iter().map(|(ratio, _)| *ratio).collect();
        let by = |a: &&(f64, u64), b: &&(f64, u64)| a.0.total_cmp(&b.0);
        if let (Some(ratio), Some(least), Some(most)) =
            (Spread::of(&values), ratios.iter().min_by(by), ratios.iter().max_by(by))
        {
            let (series, label) = (group[0].series, group[0].label.clone());
            all.push(Summary { series, label, ratio, at: [least.1, most.1] });
        }
    }
    all
}

/// A size as people read it: `8`, `4K`, `1.5M`.
pub fn size(bytes: u64) -> String {
    for (unit, shift) in [("T", 40), ("G", 30), ("M", 20), ("K", 10)] {
        if bytes >= 1 << shift {
            let whole = bytes as f64 / (1_u64 << shift) as f64;
            let shown =
                if whole.fract() == 0.0 { format!("{whole}") } else { format!("{whole:.1}") };
            return shown + unit;
        }
    }
    bytes.to_string()
}

/// A figure with about four digits.
pub fn figure(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 1000.0 => 0,
        v if v >= 100.0 => 1,
        v if v >= 1.0 => 2,
        0.0 => 0,
        _ => 4,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(size: u64, series: Series, time: f64, bandwidth: f64) -> Row {
        let mut row = Row::new(size, "float".into(), series);
        (row.time_us, row.bandwidth_gbs, row.wrong) = (Some(time), Some(bandwidth), Some(0.0));
        row
    }

    fn round(a: &[f64], b: &[f64]) -> Round {
        [a, b].map(|times| {
            times.iter().map(|time| row(1024, Series::InPlace, *time, 1.0 / *time)).collect()
        })
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The machine slows down by a factor of 10; B is always twice as fast.
        let rounds = [round(&[2.0], &[1.0]), round(&[20.0], &[10.0]), round(&[200.0], &[100.0])];
        let all = points(&rounds);
        assert_eq!(all.len(), 1);
        let ratio = all[0].ratio.unwrap();
        assert_eq!((ratio.median, ratio.least, ratio.most, ratio.count), (2.0, 2.0, 2.0, 3));
        assert!(ratio.is_one_sided());
        assert_eq!(all[0].time[0].unwrap().median, 20.0);
        assert_eq!(all[0].wrong, [Some(0.0), Some(0.0)]);
    }

    #[test]
    fn a_side_that_failed_in_a_round_leaves_no_ratio_there() {
        let rounds = [round(&[2.0], &[]), round(&[2.0], &[4.0]), round(&[], &[])];
        let point = &points(&rounds)[0];
        assert_eq!(point.ratio.unwrap().count, 1);
        assert_eq!(point.ratio.unwrap().median, 0.5);
        assert_eq!(point.time[0].unwrap().count, 2);
        assert_eq!(points(&[round(&[1.0], &[])])[0].ratio, None);
        assert!(points(&[]).is_empty());
    }

    #[test]
    fn a_size_that_is_printed_several_times_counts_once() {
        let point = &points(&[round(&[1.0, 9.0, 2.0], &[2.0])])[0];
        assert_eq!(point.ratio.unwrap(), Spread { median: 1.0, least: 1.0, most: 1.0, count: 1 });
    }

    #[test]
    fn a_series_in_short() {
        let mut all = vec![
            row(8, Series::InPlace, 1.0, 1.0),
            row(16, Series::InPlace, 1.0, 1.0),
            row(8, Series::OutOfPlace, 1.0, 1.0),
        ];
        let a = all.clone();
        all[1].time_us = Some(2.0);
        let short = summaries(&points(&[[a, all]]));
        let shown: Vec<_> = short.iter().map(|s| (s.series, s.ratio.median, s.at)).collect();
        assert_eq!(shown, [(Series::OutOfPlace, 1.0, [8, 8]), (Series::InPlace, 0.75, [16, 8])]);
    }

    #[test]
    fn only_enough_rounds_that_agree_are_one_sided() {
        let of = |values: &[f64]| Spread::of(values).unwrap().is_one_sided();
        assert!(of(&[1.1, 1.2, 1.3]) && of(&[0.9, 0.8, 0.99]));
        assert!(!of(&[1.1, 1.2]) && !of(&[1.1, 0.9, 1.2]) && !of(&[1.0, 1.1, 1.2]));
    }

    #[test]
    fn sizes_and_figures_are_short() {
        let sizes = [8, 1024, 1536, 1 << 20, 3 << 29, 1 << 40].map(size);
        assert_eq!(sizes, ["8", "1K", "1.5K", "1M", "1.5G", "1T"]);
        let figures = [0.0, 0.00123, 1.234, 123.45, 12345.6].map(figure);
        assert_eq!(figures, ["0", "0.0012", "1.23", "123.5", "12346"]);
    }
}
