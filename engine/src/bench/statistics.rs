//! Medians, quantiles and spreads of repeated measurements. Pure; knows nothing of what was measured.

use serde::Serialize;

/// Repeats of one figure.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Repeats {
    /// The median: the middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
    /// How many there are.
    pub count: usize,
}

impl Repeats {
    /// Of values that are finite; `None` without any.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let (least, most) = (*sorted.first()?, *sorted.last()?);
        let count = sorted.len();
        let upper = *sorted.get(count / 2)?;
        let median = if count.is_multiple_of(2) {
            sorted.get(count / 2 - 1).map_or(upper, |lower| f64::midpoint(*lower, upper))
        } else {
            upper
        };
        Some(Self { median, least, most, count })
    }

    /// The width of all of them over the median: (most - least) / median; 0 where the median is 0.
    #[must_use]
    pub fn spread(&self) -> f64 {
        if self.median > 0.0 { (self.most - self.least) / self.median } else { 0.0 }
    }
}

/// A quantile (0 to 1) by nearest rank: the smallest value that at least this share of all do not
/// exceed. `None` without values.
#[must_use]
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads_by_hand() {
        // Sorted: 8, 10, 11, 20. Median (10 + 11) / 2, width 12.
        let even = Repeats::of([10.0, 20.0, 8.0, 11.0]).unwrap();
        assert_eq!((even.median, even.least, even.most, even.count), (10.5, 8.0, 20.0, 4));
        assert_eq!(even.spread(), 12.0 / 10.5);
        let odd = Repeats::of([3.0, 1.0, f64::NAN, 2.0]).unwrap();
        assert_eq!((odd.median, odd.count, odd.spread()), (2.0, 3, 1.0));
        assert_eq!(Repeats::of([5.0]).unwrap().spread(), 0.0);
        assert_eq!(Repeats::of([0.0, 0.0]).unwrap().spread(), 0.0);
        assert_eq!(Repeats::of([]), None);
        assert_eq!(Repeats::of([f64::INFINITY]), None);
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        let values: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        assert_eq!(quantile(&values, 0.5), Some(10.0));
        assert_eq!(quantile(&values, 0.95), Some(19.0));
        assert_eq!(quantile(&values, 1.0), Some(20.0));
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(quantile(&values[..1], 0.5), Some(20.0));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
