//! Which positions the indexer's scores select. Owns the rule for ties.
//!
//! Without a tie at the boundary the best `top_k` positions are a set that needs no rule. But the
//! scores are sums of rectified products, so that exact zeros are common, and then many positions
//! tie for the last places. The reference breaks such ties by the order in which its selection
//! algorithm happens to move elements, on a row as long as the sequence that it was given at once,
//! positions after the token's own being minus infinity. To give the reference's tokens the same
//! moves are made here, for ambiguous rows only; the row's length is that of the whole call of
//! [`crate::Engine::run`], so that the size of a prefill batch does not matter.

/// Selects `top_k` of the first `visible` positions by score, largest first, into the head of
/// `order`, ascending. Returns whether a tie had to be broken.
///
/// `scores` holds at least `visible` scores and `order` at least `row_len` entries, `row_len` being
/// no less than `visible`, which is more than `top_k`.
pub(super) fn best_positions(
    scores: &[f32],
    visible: usize,
    row_len: usize,
    top_k: usize,
    order: &mut [u32],
) -> bool {
    let score = |position: u32| scores[position as usize];
    let candidates = fill(&mut order[..visible]);
    candidates
        .select_nth_unstable_by(top_k - 1, |&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
    let last = score(candidates[top_k - 1]);
    let is_tied = candidates[top_k..].iter().any(|&p| score(p) == last);
    if is_tied {
        let row = fill(&mut order[..row_len.max(visible)]);
        let of = |position: u32| {
            let position = position as usize;
            if position < visible { scores[position] } else { f32::NEG_INFINITY }
        };
        partial_order(row, top_k, |a, b| of(a) > of(b));
    }
    order[..top_k].sort_unstable();
    is_tied
}

/// 0, 1, 2, ...
fn fill(order: &mut [u32]) -> &mut [u32] {
    for (position, slot) in order.iter_mut().enumerate() {
        *slot = position as u32;
    }
    order
}

/// Brings the `count` first elements of `row` by `before` to its head: quickselect around a median
/// of three with Hoare's partition, ending in an insertion sort of at most three elements. What
/// equal elements do follows from these moves and is relied upon.
fn partial_order(row: &mut [u32], count: usize, before: impl Fn(u32, u32) -> bool) {
    let nth = count - 1;
    let (mut low, mut high) = (0, row.len());
    while high - low > 3 {
        let middle = low + (high - low) / 2;
        let pivot = median_of(row, [low + 1, middle, high - 1], &before);
        row.swap(low, pivot);
        let cut = partition(row, low, high, &before);
        if cut <= nth { low = cut } else { high = cut }
    }
    for at in low + 1..high {
        let mut to = at;
        while to > low && before(row[to], row[to - 1]) {
            row.swap(to, to - 1);
            to -= 1;
        }
    }
}

/// The index among three whose element is in the middle; of equals the one that the order of
/// comparisons finds first.
fn median_of(row: &[u32], [a, b, c]: [usize; 3], before: &impl Fn(u32, u32) -> bool) -> usize {
    let before = |x: usize, y: usize| before(row[x], row[y]);
    match (before(a, b), before(b, c), before(a, c)) {
        (true, true, _) => b,
        (true, false, true) => c,
        (true, false, false) => a,
        (false, _, true) => a,
        (false, true, false) => c,
        (false, false, false) => b,
    }
}

/// Partitions `row[low + 1..high]` around the element at `low`; elements equal to it are exchanged,
/// not skipped. Returns where the second part begins.
fn partition(
    row: &mut [u32],
    low: usize,
    high: usize,
    before: &impl Fn(u32, u32) -> bool,
) -> usize {
    let pivot = row[low];
    let (mut left, mut right) = (low + 1, high);
    loop {
        // The pivot is a median, so that both scans meet an element that stops them.
        while left < high && before(row[left], pivot) {
            left += 1;
        }
        right -= 1;
        while right > low && before(pivot, row[right]) {
            right -= 1;
        }
        if left >= right {
            return left;
        }
        row.swap(left, right);
        left += 1;
    }
}

/// Orders by score, largest first; only tests need it whole.
#[cfg(test)]
fn by_score(scores: &[f32]) -> impl Fn(&u32, &u32) -> std::cmp::Ordering + '_ {
    |&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn select(scores: &[f32], row_len: usize, top_k: usize) -> (Vec<u32>, bool) {
        let mut order = vec![0; row_len];
        let tied = best_positions(scores, scores.len(), row_len, top_k, &mut order);
        (order[..top_k].to_vec(), tied)
    }

    /// Rows of small integers, and what torch 2.15's CPU `topk` selects on them, padded with minus
    /// infinity to the row's length.
    #[test]
    fn ties_fall_as_in_the_reference() {
        let text = include_str!("topk_ties.txt");
        let mut rows = 0;
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let [row_len, top_k, scores, expected] =
                line.split('|').collect::<Vec<_>>().try_into().unwrap();
            let numbers = |text: &str| -> Vec<f32> {
                text.split_whitespace().map(|n| n.parse().unwrap()).collect()
            };
            let (row_len, top_k) = (row_len.trim().parse().unwrap(), top_k.trim().parse().unwrap());
            let expected: Vec<u32> = numbers(expected).iter().map(|&p| p as u32).collect();
            assert_eq!(select(&numbers(scores), row_len, top_k), (expected, true), "{line}");
            rows += 1;
        }
        assert!(rows >= 100);
    }

    proptest! {
        #[test]
        fn selected_scores_are_the_largest(
            scores in prop::collection::vec((-3i32..4).prop_map(|s| s as f32), 2..60),
            top_k: prop::sample::Index,
            padding in 0usize..9,
        ) {
            let top_k = 1 + top_k.index(scores.len() - 1);
            let (selected, tied) = select(&scores, scores.len() + padding, top_k);
            prop_assert!(selected.windows(2).all(|w| w[0] < w[1]));
            let mut all: Vec<u32> = (0..scores.len() as u32).collect();
            all.sort_by(by_score(&scores));
            let sum = |positions: &[u32]| positions.iter().map(|&p| scores[p as usize]).sum::<f32>();
            prop_assert_eq!(sum(&selected), sum(&all[..top_k]));
            let boundary = scores[all[top_k - 1] as usize] == scores[all[top_k] as usize];
            prop_assert_eq!(tied, boundary);
            if !tied {
                all.truncate(top_k);
                all.sort_unstable();
                prop_assert_eq!(selected, all);
            }
        }
    }
}
