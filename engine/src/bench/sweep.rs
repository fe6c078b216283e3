//! Values that a curve is drawn over where none are given. Pure.

use tierkeep_plans::units::Bytes;

/// Budgets are whole numbers of this.
const STEP: u64 = 1_000_000;

/// `count` budgets from `least` to `most`, evenly apart, ascending, the first no smaller and the last no
/// larger; fewer where they would be equal.
#[must_use]
pub fn budgets(least: Bytes, most: Bytes, count: usize) -> Vec<Bytes> {
    let first = least.0.div_ceil(STEP);
    let last = (most.0 / STEP).max(first);
    let gaps = (count.max(2) - 1) as u64;
    let mut budgets: Vec<Bytes> = (0..=gaps)
        .map(|at| first + (u128::from(last - first) * u128::from(at) / u128::from(gaps)) as u64)
        .map(|megabytes| Bytes(megabytes.saturating_mul(STEP)))
        .collect();
    budgets.dedup();
    budgets
}

/// 1, 2, 4 and so on, and all that may be used.
#[must_use]
pub fn threads(usable: u64) -> Vec<u64> {
    let usable = usable.max(1);
    let mut threads: Vec<u64> = std::iter::successors(Some(1_u64), |n| n.checked_mul(2))
        .take_while(|&n| n < usable)
        .collect();
    threads.push(usable);
    threads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_ascend_within_their_limits() {
        let megabytes = |least, most, count| -> Vec<u64> {
            budgets(Bytes(least), Bytes(most), count).iter().map(|b| b.0 / STEP).collect()
        };
        assert_eq!(megabytes(1_200_000, 9_900_000, 5), [2, 3, 5, 7, 9]);
        assert_eq!(megabytes(2_000_000, 3_000_000, 5), [2, 3]);
        // Nothing between them: the least that does.
        assert_eq!(megabytes(5_000_001, 5_000_002, 5), [6]);
    }

    #[test]
    fn threads_double_up_to_what_there_are() {
        assert_eq!(threads(0), [1]);
        assert_eq!(threads(2), [1, 2]);
        assert_eq!(threads(6), [1, 2, 4, 6]);
    }
}
