//! Which experts are pinned. Owns the candidates and their trial on held-out history; without a
//! trial that says otherwise nothing is pinned, because a pin takes a slot from recency.

use super::MIN_SAMPLE_TOKENS;
use super::replay::{Hits, LayerCache, RoutingSample};
use crate::units::LayerId;
use crate::usage::History;

/// Shares of a cap that may be pinned. One that pins all of a cap is tried only for layers with
/// fewer slots than a token's experts, where recency has nothing to say.
const FRACTIONS: [f64; 3] = [0.25, 0.5, 0.75];

/// What pins must gain over none on held-out history: half a percentage point, below which a
/// sample of a few hundred tokens cannot tell a gain from noise.
const MIN_GAIN: f64 = 0.005;

/// A newest session with fewer sampled tokens is not a trial of its own.
const MIN_HELD_OUT_TOKENS: usize = 32;

/// The chosen pins and why.
#[derive(Clone, Debug, PartialEq)]
pub struct PinChoice {
    /// Per entry of the caps, the pinned experts in ascending order.
    pub pins: Vec<Vec<u32>>,
    /// The share of every streamed layer's cap that is pinned.
    pub fraction: f64,
    /// Why, for the plan.
    pub evidence: String,
    /// Held-out hit rate with pins at this fraction; the one without where that is 0; unknown
    /// without a trial.
    pub hit_rate_with: Option<f64>,
    /// Held-out hit rate without pins.
    pub hit_rate_without: Option<f64>,
}

impl PinChoice {
    fn none(n_layers: usize, evidence: String, hit_rate: Option<f64>) -> Self {
        Self {
            pins: vec![Vec::new(); n_layers],
            fraction: 0.0,
            evidence,
            hit_rate_with: hit_rate,
            hit_rate_without: hit_rate,
        }
    }
}

/// The part of history that pins are chosen from in the trial, and the parts that warm the cache
/// and that are counted.
struct Trial {
    /// `(n_layers, n_experts)`.
    counts: Vec<f64>,
    sample: Vec<u16>,
    /// The first counted token.
    first_counted: usize,
    what: String,
}

/// Chooses one share of every cap to pin, and the pins: the most used experts by decayed counts.
///
/// Pins for the trial come from the older part of history and are replayed on the newer part, the
/// cache warmed by the older part's sample so that cold misses do not flatter pins. The newer part
/// is the newest session, or, where there is only one worth the name, the second half of the
/// sample. The final pins come from all of history. `caps` are slots by layer; a layer with a slot
/// for every expert, or that history does not know, gets no pins.
#[must_use]
pub fn choose_pins(
    history: Option<&History>,
    caps: &[(LayerId, u32)],
    n_experts: u32,
    n_experts_active: u32,
) -> PinChoice {
    let none = |evidence: &str| PinChoice::none(caps.len(), evidence.to_owned(), None);
    let history = match of_shape(history, n_experts, n_experts_active) {
        Ok(history) => history,
        Err(why_not) => return none(why_not),
    };
    let n_tokens = history.n_sample_tokens();
    if n_tokens < MIN_SAMPLE_TOKENS {
        return none(&format!(
            "no pins: {n_tokens} tokens of recorded routing, {MIN_SAMPLE_TOKENS} are needed to \
             judge them"
        ));
    }
    if caps.iter().all(|&(_, cap)| cap >= n_experts) {
        return none("no pins: every layer has a slot for each of its experts");
    }
    let places = places(history, caps);
    let any_below_top_k = caps.iter().any(|&(_, cap)| cap < n_experts_active);
    let candidates = FRACTIONS.into_iter().chain(any_below_top_k.then_some(1.0));
    let pins_of = |counts: &[f64], fraction: f64| pins_of(history, caps, &places, counts, fraction);
    let trial = trial(history);
    let without = judge(history, &trial, caps, &places, &pins_of(&trial.counts, 0.0));
    let Some(without) = without.rate() else {
        return none("no pins: the usage history knows none of these layers");
    };
    let (mut best, mut fraction) = (0.0, 0.0);
    for candidate in candidates {
        let pins = pins_of(&trial.counts, candidate);
        let rate = judge(history, &trial, caps, &places, &pins).rate().unwrap_or(0.0);
        if rate > best {
            (best, fraction) = (rate, candidate);
        }
    }
    let what = &trial.what;
    if best < without + MIN_GAIN {
        let evidence = format!(
            "no pins: on {what} recency alone hits {:.1} %, the best share of pins ({:.0} % of each \
             cap) {:.1} %",
            without * 100.0,
            fraction * 100.0,
            best * 100.0
        );
        return PinChoice::none(caps.len(), evidence, Some(without));
    }
    PinChoice {
        pins: pins_of(history.counts(), fraction),
        fraction,
        evidence: format!(
            "replayed: pins in {:.0} % of each cap hit {:.1} % on {what}, recency alone {:.1} %",
            fraction * 100.0,
            best * 100.0,
            without * 100.0
        ),
        hit_rate_with: Some(best),
        hit_rate_without: Some(without),
    }
}

/// Pins in a share (0 to 1) of every streamed layer's cap, whatever a replay says of it.
#[must_use]
pub fn pins_of_share(
    history: Option<&History>,
    caps: &[(LayerId, u32)],
    n_experts: u32,
    n_experts_active: u32,
    share: f64,
) -> PinChoice {
    let none = |evidence: &str| PinChoice::none(caps.len(), evidence.to_owned(), None);
    let history = match of_shape(history, n_experts, n_experts_active) {
        Ok(history) => history,
        Err(why_not) => return none(why_not),
    };
    let share = share.clamp(0.0, 1.0);
    PinChoice {
        pins: pins_of(history, caps, &places(history, caps), history.counts(), share),
        fraction: share,
        evidence: format!("asked for: pins in {:.0} % of each cap", share * 100.0),
        hit_rate_with: None,
        hit_rate_without: None,
    }
}

/// The history, if there is one of the model's shape; otherwise why there are no pins.
fn of_shape(
    history: Option<&History>,
    n_experts: u32,
    n_experts_active: u32,
) -> Result<&History, &'static str> {
    let history = history.ok_or("no pins: no usage history yet")?;
    let shape = history.shape();
    if (shape.n_experts, shape.n_experts_active) != (n_experts, n_experts_active) {
        return Err("no pins: the usage history is of another shape");
    }
    Ok(history)
}

/// Where history keeps each layer of the caps.
fn places(history: &History, caps: &[(LayerId, u32)]) -> Vec<Option<usize>> {
    let layers = &history.shape().layers;
    caps.iter().map(|(layer, _)| layers.iter().position(|l| l == layer)).collect()
}

/// The most used experts by `counts` in a fraction of every streamed layer's cap.
fn pins_of(
    history: &History,
    caps: &[(LayerId, u32)],
    places: &[Option<usize>],
    counts: &[f64],
    fraction: f64,
) -> Vec<Vec<u32>> {
    let shape = history.shape();
    let n_experts = shape.n_experts as usize;
    let chosen = caps.iter().zip(places).map(|(&(_, cap), place)| match place {
        Some(place) if cap < shape.n_experts => {
            let n = n_pins(cap, shape.n_experts_active, fraction);
            most_used(&counts[place * n_experts..][..n_experts], n)
        }
        Some(_) | None => Vec::new(),
    });
    chosen.collect()
}

/// The `n` experts with the largest counts above zero, ties by lower id; in ascending order of id.
#[must_use]
pub fn most_used(counts: &[f64], n: usize) -> Vec<u32> {
    let mut ranked: Vec<u32> = (0..counts.len() as u32).collect();
    ranked.retain(|&expert| counts[expert as usize] > 0.0);
    ranked.sort_by(|&a, &b| counts[b as usize].total_cmp(&counts[a as usize]));
    ranked.truncate(n);
    ranked.sort_unstable();
    ranked
}

/// A share of all of a cap is meant for layers with fewer slots than a token's experts; the others
/// keep a quarter for recency.
fn n_pins(cap: u32, n_experts_active: u32, fraction: f64) -> usize {
    let share = if cap < n_experts_active { fraction } else { fraction.min(0.75) };
    (f64::from(cap) * share) as usize
}

fn trial(history: &History) -> Trial {
    let shape = history.shape();
    let per_token = shape.accesses_per_token().max(1);
    let sample: Vec<u16> = history.segments().flat_map(|s| &s.experts).copied().collect();
    let n_tokens = sample.len() / per_token;
    let older = history.older_counts().to_vec();
    let older_tokens = older.iter().sum::<f64>() / per_token as f64;
    let newest = history.segments().next_back().filter(|s| s.session == history.n_sessions());
    let newest_tokens = newest.map_or(0, |s| s.experts.len() / per_token);
    if newest_tokens >= MIN_HELD_OUT_TOKENS && older_tokens >= MIN_SAMPLE_TOKENS as f64 {
        // Counts alone, such as imported ones, can be all that is older: then the newest session
        // warms the cache itself.
        let first_counted = match n_tokens - newest_tokens {
            0 => newest_tokens / 2,
            warm => warm,
        };
        let n_counted = n_tokens - first_counted;
        let what = format!("the newest session ({n_counted} held-out tokens)");
        return Trial { counts: older, sample, first_counted, what };
    }
    let first_counted = n_tokens / 2;
    let mut counts = vec![0.0; shape.counts_len()];
    let first_half = RoutingSample::new(
        &sample[..first_counted * per_token],
        shape.layers.len(),
        shape.n_experts as usize,
        shape.n_experts_active as usize,
    );
    for (layer, row) in counts.chunks_exact_mut(shape.n_experts as usize).enumerate() {
        for &expert in first_half.layer(layer).flatten() {
            row[usize::from(expert)] += 1.0;
        }
    }
    let what =
        format!("the second half of the sample ({} held-out tokens)", n_tokens - first_counted);
    Trial { counts, sample, first_counted, what }
}

/// Hits over the counted tokens of the trial in all layers that history knows.
fn judge(
    history: &History,
    trial: &Trial,
    caps: &[(LayerId, u32)],
    places: &[Option<usize>],
    pins: &[Vec<u32>],
) -> Hits {
    let shape = history.shape();
    let sample = RoutingSample::new(
        &trial.sample,
        shape.layers.len(),
        shape.n_experts as usize,
        shape.n_experts_active as usize,
    );
    let mut total = Hits::default();
    for ((&(_, cap), place), pins) in caps.iter().zip(places).zip(pins) {
        let Some(layer) = *place else { continue };
        let mut cache = LayerCache::new(shape.n_experts as usize, cap as usize, pins);
        for (token, experts) in sample.layer(layer).enumerate() {
            let hits = cache.access_token(experts);
            if token >= trial.first_counted {
                total += Hits { hits, accesses: experts.len() as u64 };
            }
        }
    }
    total
}
