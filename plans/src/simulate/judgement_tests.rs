//! Pins and expected hit rates on histories whose right answer is known.

use super::*;
use crate::spec::Family;
use crate::units::LayerId;
use crate::usage::{History, Session, import_counts};

const N_EXPERTS: u32 = 32;
const K: u32 = 4;
const LAYERS: [LayerId; 2] = [LayerId(1), LayerId(2)];

/// A small generator, so that a trace is the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    /// `K` distinct experts, each drawn by `draw`.
    fn token(&mut self, mut draw: impl FnMut(&mut Self) -> u64) -> Vec<u16> {
        let mut experts = Vec::new();
        while experts.len() < LAYERS.len() * K as usize {
            let start = experts.len() / K as usize * K as usize;
            let expert = draw(self) as u16;
            if !experts[start..].contains(&expert) {
                experts.push(expert);
            }
        }
        experts
    }
}

fn session(n_tokens: usize, mut token: impl FnMut(usize) -> Vec<u16>) -> Session {
    let mut session = Session::new("model", &LAYERS, N_EXPERTS, K);
    for index in 0..n_tokens {
        session.record_token(&token(index));
    }
    session
}

fn history(sessions: &[Session]) -> History {
    let shape = Session::new("model", &LAYERS, N_EXPERTS, K).shape().clone();
    let mut history = History::new(shape);
    for session in sessions {
        history.merge(session).unwrap();
    }
    history
}

/// Six favourites take half the accesses, the rest is even: frequency beats recency.
fn favourites(seed: u64, n_tokens: usize, first: u64) -> Session {
    let mut random = Random(seed);
    session(n_tokens, |_| {
        random.token(|r| if r.below(2) == 0 { (first + r.below(6)) % 32 } else { r.below(32) })
    })
}

/// Topics of 8 experts that change every 40 tokens: recency beats frequency.
fn topics(seed: u64, n_tokens: usize) -> Session {
    let mut random = Random(seed);
    session(n_tokens, |index| {
        let topic = (index / 40) as u64 * 11;
        random.token(|r| (topic + r.below(8)) % 32)
    })
}

fn caps(cap: u32) -> [(LayerId, u32); 2] {
    LAYERS.map(|layer| (layer, cap))
}

#[test]
fn without_enough_history_nothing_is_pinned_and_the_reason_is_given() {
    let short = history(&[favourites(1, 63, 0)]);
    let counts_only = {
        let mut session = session(0, |_| Vec::new());
        let counts = import_counts("1 3 900000\n2 4 900000\n", 3, N_EXPERTS).unwrap();
        session.record_counts(&counts);
        history(&[session])
    };
    let enough = history(&[favourites(1, 200, 0)]);
    let cases = [
        (None, caps(8), "no pins: no usage history yet"),
        (
            Some(&short),
            caps(8),
            "no pins: 63 tokens of recorded routing, 64 are needed to judge them",
        ),
        (
            Some(&counts_only),
            caps(8),
            "no pins: 0 tokens of recorded routing, 64 are needed to judge them",
        ),
        (Some(&enough), caps(32), "no pins: every layer has a slot for each of its experts"),
        (
            Some(&enough),
            [(LayerId(7), 8), (LayerId(8), 8)],
            "no pins: the usage history knows none of these layers",
        ),
    ];
    for (history, caps, evidence) in cases {
        let choice = choose_pins(history, &caps, N_EXPERTS, K);
        assert_eq!(choice.evidence, evidence);
        assert_eq!(choice.pins, vec![Vec::<u32>::new(); 2]);
        assert_eq!((choice.fraction, choice.hit_rate_with), (0.0, None));
    }
    let choice = choose_pins(Some(&enough), &caps(8), N_EXPERTS + 1, K);
    assert_eq!(choice.evidence, "no pins: the usage history is of another shape");
}

#[test]
fn lasting_favourites_are_pinned() {
    for sessions in [
        vec![favourites(1, 300, 0)],
        vec![favourites(1, 300, 0), favourites(2, 300, 0)],
        // The newest session is too short for a trial of its own.
        vec![favourites(1, 300, 0), favourites(2, 10, 0)],
    ] {
        let history = history(&sessions);
        let choice = choose_pins(Some(&history), &caps(8), N_EXPERTS, K);
        let (with, without) = (choice.hit_rate_with.unwrap(), choice.hit_rate_without.unwrap());
        assert!(with > without + 0.005, "{choice:?}");
        assert!(choice.fraction > 0.0);
        for (layer, pins) in choice.pins.iter().enumerate() {
            assert_eq!(pins.len(), (8.0 * choice.fraction) as usize);
            assert!(pins.is_sorted());
            let row = &history.counts()[layer * 32..][..32];
            assert_eq!(*pins, most_used(row, pins.len()));
            assert!(pins.iter().all(|&e| e < 6), "favourites are 0 to 5: {pins:?}");
        }
        assert!(choice.evidence.starts_with("replayed: pins in "), "{}", choice.evidence);
    }
}

/// R5: what was used last month is not pinned when held-out new work does not use it.
#[test]
fn changed_work_pins_nothing() {
    let changed = history(&[favourites(1, 600, 0), favourites(2, 300, 16)]);
    let choice = choose_pins(Some(&changed), &caps(8), N_EXPERTS, K);
    assert_eq!(choice.fraction, 0.0, "{choice:?}");
    assert_eq!(choice.hit_rate_with, choice.hit_rate_without);
    assert!(choice.evidence.starts_with("no pins: on the newest session (300 held-out tokens)"));
    let topical = history(&[topics(1, 400), topics(2, 400)]);
    let choice = choose_pins(Some(&topical), &caps(10), N_EXPERTS, K);
    assert_eq!(choice.fraction, 0.0, "{choice:?}");
}

#[test]
fn caps_below_the_top_k_can_be_pinned_whole_and_whole_layers_never_are() {
    let history = history(&[favourites(1, 400, 0), favourites(2, 400, 0)]);
    let choice = choose_pins(Some(&history), &[(LAYERS[0], 3), (LAYERS[1], 32)], N_EXPERTS, K);
    assert_eq!(choice.fraction, 1.0, "{choice:?}");
    assert_eq!((choice.pins[0].len(), choice.pins[1].len()), (3, 0));
    let choice = choose_pins(Some(&history), &[(LAYERS[0], 3), (LAYERS[1], 8)], N_EXPERTS, K);
    assert!(choice.pins[1].len() <= 6, "a quarter is left to recency");
}

/// Imported counts are enough to choose from when a session of our own can judge them.
#[test]
fn imported_counts_are_judged_by_the_first_session() {
    let mut import = session(0, |_| Vec::new());
    let text: String =
        (1..=2).flat_map(|l| (0..6).map(move |e| format!("{l} {e} 500\n"))).collect();
    import.record_counts(&import_counts(&text, 3, N_EXPERTS).unwrap());
    let history = history(&[import, favourites(3, 200, 0)]);
    let choice = choose_pins(Some(&history), &caps(8), N_EXPERTS, K);
    assert!(choice.fraction > 0.0, "{choice:?}");
    assert!(choice.evidence.contains("the newest session (100 held-out tokens)"));
}

#[test]
fn most_used_breaks_ties_by_the_lower_id_and_never_takes_the_unused() {
    assert_eq!(most_used(&[1.0, 3.0, 0.0, 3.0, 2.0], 3), [1, 3, 4]);
    assert_eq!(most_used(&[1.0, 1.0, 1.0], 2), [0, 1]);
    assert_eq!(most_used(&[0.0, 0.5], 2), [1]);
}

fn expected(history: Option<&History>, caps: &[(LayerId, u32)], pins: &[Vec<u32>]) -> HitRate {
    let planned =
        PlannedCache { n_experts: N_EXPERTS, n_experts_active: K, caps, pins, fixed: &[] };
    expected_hit_rate(history, Family::Olmoe, &planned)
}

#[test]
fn with_history_the_hit_rate_is_replayed() {
    // Even routing: once warm, a cache of 16 of 32 hits close to half under any rule.
    let mut random = Random(5);
    let even = session(1200, |_| random.token(|r| r.below(32)));
    let even = history(&[even]);
    let rate = expected(Some(&even), &caps(16), &[]);
    assert!((rate.p50 - 0.5).abs() < 0.04, "{rate:?}");
    assert!(rate.p10 <= rate.p50 - 0.05 + 1e-9 && rate.p90 >= rate.p50 + 0.05 - 1e-9);
    assert_eq!(
        rate.evidence,
        "replayed: 900 tokens of 1 session in 14 windows after 300 that warm the cache; its cold \
         misses come on top"
    );
    // A layer with all its experts hits always, and counts for half.
    let half = expected(Some(&even), &[(LAYERS[0], 16), (LAYERS[1], 32)], &[]);
    assert!((half.p50 - (rate.p50 + 1.0) / 2.0).abs() < 0.02, "{half:?}");
    assert!(half.p90 - half.p10 < rate.p90 - rate.p10);
    // Pins count.
    let favoured = history(&[favourites(1, 400, 0), favourites(2, 400, 0)]);
    let pins = vec![vec![0, 1, 2, 3, 4, 5]; 2];
    let with = expected(Some(&favoured), &caps(8), &pins);
    assert!(with.p50 > expected(Some(&favoured), &caps(8), &[]).p50 + 0.02);
}

#[test]
fn without_history_the_prior_is_assumed_and_says_so() {
    let rate = expected(None, &caps(12), &[]);
    assert!((rate.p50 - 0.375f64.powf(0.39)).abs() < 1e-12);
    assert!(rate.p10 < rate.p50 && rate.p50 < rate.p90);
    assert_eq!(
        rate.evidence,
        "assumed: shipped prior for olmoe, hit = (cap / experts)^0.39 (from 0.55 to 0.30), fitted \
         to one published replay: 24 of 64 experts hit 68 %; no usage history"
    );
    let short = history(&[favourites(1, 63, 0)]);
    let rate = expected(Some(&short), &caps(12), &[]);
    assert!(rate.evidence.ends_with("63 tokens of recorded routing, 64 are needed"));
    let whole = expected(None, &caps(32), &[]);
    assert_eq!((whole.p10, whole.p50, whole.p90), (1.0, 1.0, 1.0));
    let mixed = expected(None, &[(LAYERS[0], 32), (LAYERS[1], 0)], &[]);
    assert_eq!((mixed.p10, mixed.p50, mixed.p90), (0.5, 0.5, 0.5));
}

#[test]
fn more_slots_are_expected_to_hit_more() {
    let history = history(&[favourites(1, 400, 0), topics(2, 400)]);
    for known in [None, Some(&history)] {
        let rates: Vec<f64> =
            (0..=32).step_by(4).map(|cap| expected(known, &caps(cap), &[]).p50).collect();
        assert!(rates.is_sorted(), "{rates:?}");
    }
}
