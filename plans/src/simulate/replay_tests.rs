//! The replays against hand-worked traces and naive models.

use proptest::prelude::*;

use super::*;

/// The rule as written, with a scan for everything.
struct NaiveCache {
    cap: usize,
    pins: Vec<u16>,
    /// Least recently used first.
    cached: Vec<u16>,
}

impl NaiveCache {
    fn access_token(&mut self, experts: &[u16]) -> u64 {
        let mut hits = 0;
        for (index, &expert) in experts.iter().enumerate() {
            let leased = &experts[..index];
            if self.pins.contains(&expert) {
                hits += 1;
            } else if let Some(place) = self.cached.iter().position(|&e| e == expert) {
                hits += 1;
                self.cached.remove(place);
                self.cached.push(expert);
            } else if self.cached.len() + self.pins.len() < self.cap {
                self.cached.push(expert);
            } else if let Some(place) = self.cached.iter().position(|e| !leased.contains(e)) {
                self.cached.remove(place);
                self.cached.push(expert);
            }
        }
        hits
    }
}

/// What was chosen and has no weights is neither a hit nor an access.
#[test]
fn what_is_no_access_is_not_replayed() {
    let none = crate::usage::NO_ACCESS;
    let experts = [0, 1, none, none, none, none, 1, none, none];
    let sample = RoutingSample::new(&experts, 1, 8, 3);
    assert_eq!(sample.layer(0).collect::<Vec<_>>(), [&[0, 1][..], &[], &[1]]);
    assert_eq!(replay(&sample, 0, 4, &[]), hits(1, 3));
    assert_eq!(replay_optimum(&sample, 0, 4), hits(1, 3));
}

/// The optimum by trying every choice: which resident, or the newcomer, is left out.
fn exhaustive_optimum(accesses: &[u16], resident: &mut Vec<u16>, cap: usize) -> u64 {
    let Some((&expert, rest)) = accesses.split_first() else { return 0 };
    if resident.contains(&expert) {
        return 1 + exhaustive_optimum(rest, resident, cap);
    }
    if resident.len() < cap {
        resident.push(expert);
        let best = exhaustive_optimum(rest, resident, cap);
        resident.pop();
        return best;
    }
    let mut best = exhaustive_optimum(rest, resident, cap);
    for place in 0..resident.len() {
        let left_out = std::mem::replace(&mut resident[place], expert);
        best = best.max(exhaustive_optimum(rest, resident, cap));
        resident[place] = left_out;
    }
    best
}

/// Whole tokens of distinct experts, `(n_tokens, n_layers, k)`, skewed as routing is.
fn routing(
    n_layers: usize,
    n_experts: u16,
    k: usize,
    max_tokens: usize,
) -> impl Strategy<Value = Vec<u16>> {
    let ids: Vec<u16> = (0..n_experts).collect();
    let chosen = Just(ids).prop_shuffle().prop_map(move |ids| ids[..k].to_vec());
    prop::collection::vec(chosen, 0..=max_tokens * n_layers).prop_map(move |mut rows| {
        rows.truncate(rows.len() / n_layers * n_layers);
        rows.concat()
    })
}

fn one_layer(experts: &[u16], k: usize) -> RoutingSample<'_> {
    RoutingSample::new(experts, 1, 8, k)
}

fn hits(hits: u64, accesses: u64) -> Hits {
    Hits { hits, accesses }
}

#[test]
fn recency_evicts_what_was_used_longest_ago() {
    // One expert a token, 2 slots: 0 and 1 miss, 0 hits, 2 evicts 1, 0 hits, 1 evicts 2, 2 evicts 0.
    let trace = [0, 1, 0, 2, 0, 1, 2];
    assert_eq!(replay(&one_layer(&trace, 1), 0, 2, &[]), hits(2, 7));
    // 1 is pinned and loaded, one slot is left: 0 - 1+ 0+ 2- 0- 1+ 2-
    assert_eq!(replay(&one_layer(&trace, 1), 0, 2, &[1]), hits(3, 7));
    // The first 2 bypasses, as 0 and 1 are asked for sooner: 0- 1- 0+ 2- 0+ 1+ 2-
    assert_eq!(replay_optimum(&one_layer(&trace, 1), 0, 2), hits(3, 7));
}

#[test]
fn a_token_never_evicts_its_own_experts() {
    // 2 slots, 3 experts a token: the third bypasses, since both slots are leased.
    let trace = [0, 1, 2, 0, 1, 2];
    assert_eq!(replay(&one_layer(&trace, 3), 0, 2, &[]), hits(2, 6));
    // The weakest first: 2 evicts 0 (the oldest), 1 is a hit, 0 finds both leased.
    let trace = [0, 1, 2, 2, 1, 0];
    assert_eq!(replay(&one_layer(&trace, 3), 0, 2, &[]), hits(1, 6));
    // One slot: 0 stays leased through each token, then is evicted by 3, which stays.
    let trace = [0, 1, 0, 1, 3, 1, 3, 1];
    assert_eq!(replay(&one_layer(&trace, 2), 0, 1, &[]), hits(2, 8));
}

#[test]
fn caps_and_pins_at_their_ends() {
    let trace = [0, 1, 2, 0, 1, 2];
    assert_eq!(replay(&one_layer(&trace, 3), 0, 0, &[0]), hits(0, 6), "no slot, no pin");
    assert_eq!(replay(&one_layer(&trace, 3), 0, 8, &[]), hits(3, 6), "cold misses only");
    assert_eq!(replay(&one_layer(&trace, 3), 0, 2, &[0, 0, 9, 2, 1]), hits(4, 6), "0 and 2 fit");
    assert_eq!(replay(&one_layer(&[9, 9], 1), 0, 4, &[]), hits(0, 2), "no such expert");
    assert_eq!(replay(&one_layer(&trace, 3), 1, 4, &[]), hits(0, 0), "no such layer");
    assert_eq!(replay(&one_layer(&[], 3), 0, 4, &[]).rate(), None);
    assert_eq!(replay_optimum(&one_layer(&trace, 3), 0, 0), hits(0, 6));
    assert_eq!(RoutingSample::new(&[1, 2], 0, 8, 0).n_tokens(), 0);
}

#[test]
fn layers_of_a_sample_are_told_apart() {
    // (2 tokens, 2 layers, k = 2)
    let experts = [0, 1, 4, 5, 0, 2, 6, 7];
    let sample = RoutingSample::new(&experts, 2, 8, 2);
    let layer: Vec<_> = sample.layer(1).collect();
    assert_eq!(layer, [&[4, 5], &[6, 7]]);
    assert_eq!(sample.tokens(1, 9).layer(0).collect::<Vec<_>>(), [&[0, 2]]);
    assert_eq!(sample.tokens(5, 9).n_tokens(), 0);
    assert_eq!(replay(&sample, 0, 4, &[]), hits(1, 4));
    assert_eq!(replay(&sample, 1, 4, &[]), hits(0, 4));
}

proptest! {
    #[test]
    fn replay_equals_the_naive_model(
        experts in routing(2, 8, 3, 60),
        cap in 0usize..=8,
        pins in prop::sample::subsequence((0u16..8).collect::<Vec<_>>(), 0..=8),
        layer in 0usize..2,
    ) {
        let sample = RoutingSample::new(&experts, 2, 8, 3);
        let fitting: Vec<u16> = pins.iter().copied().take(cap).collect();
        let mut naive = NaiveCache { cap, pins: fitting, cached: Vec::new() };
        let expected: u64 = sample.layer(layer).map(|chosen| naive.access_token(chosen)).sum();
        let pins: Vec<u32> = pins.into_iter().map(u32::from).collect();
        let got = replay(&sample, layer, cap, &pins);
        prop_assert_eq!(got, hits(expected, sample.n_tokens() as u64 * 3));
        if pins.is_empty() {
            prop_assert!(replay_optimum(&sample, layer, cap).hits >= got.hits);
        }
    }

    #[test]
    fn the_optimum_is_optimal(experts in routing(1, 5, 1, 11), cap in 0usize..=4) {
        let sample = RoutingSample::new(&experts, 1, 5, 1);
        let expected = exhaustive_optimum(&experts, &mut Vec::new(), cap);
        prop_assert_eq!(replay_optimum(&sample, 0, cap), hits(expected, experts.len() as u64));
    }

    /// Recency has the stack property for one expert a token: more slots never hit less.
    #[test]
    fn more_slots_never_hit_less(experts in routing(1, 8, 1, 80), cap in 0usize..8) {
        let sample = RoutingSample::new(&experts, 1, 8, 1);
        prop_assert!(replay(&sample, 0, cap, &[]).hits <= replay(&sample, 0, cap + 1, &[]).hits);
        prop_assert!(
            replay_optimum(&sample, 0, cap).hits <= replay_optimum(&sample, 0, cap + 1).hits
        );
    }
}

/// Says what a million accesses cost; asserts nothing about time.
/// `cargo test --release -p tierkeep-plans cost_of_a_million -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn cost_of_a_million_accesses() {
    let (n_experts, k) = (256u64, 8);
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // The smaller of two is drawn more often towards 0.
        ((state >> 33) % n_experts).min((state >> 20) % n_experts) as u16
    };
    let experts: Vec<u16> = (0..1_000_000).map(|_| random()).collect();
    let sample = RoutingSample::new(&experts, 1, n_experts as usize, k);
    for cap in [4, 64, 128] {
        let start = std::time::Instant::now();
        let got = replay(&sample, 0, cap, &[]);
        let replay_time = start.elapsed();
        let start = std::time::Instant::now();
        let best = replay_optimum(&sample, 0, cap);
        println!(
            "cap {cap}: {got:?} in {replay_time:?}, optimum {best:?} in {:?}",
            start.elapsed()
        );
        assert!(got.hits <= best.hits);
    }
}
