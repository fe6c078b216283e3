//! The hit rate to expect of a planned cache. Owns the replay over windows and the fall-back to
//! the shipped prior; never divides resident bytes by total bytes.

use super::MIN_SAMPLE_TOKENS;
use super::prior::{hit, prior};
use super::replay::{Hits, LayerCache, RoutingSample};
use crate::spec::Family;
use crate::units::LayerId;
use crate::usage::History;

/// Tokens of a window whose hit rate is one observation of the spread: a short answer's length.
const WINDOW_TOKENS: usize = 64;

/// The spread is at least this much to either side, in hit rate, where the sample speaks of more
/// than one session: work varies more than one sample shows.
const MIN_SPREAD: f64 = 0.03;

/// The same for a sample of a single session.
const MIN_SPREAD_ONE_SESSION: f64 = 0.05;

/// A plan's caches, as far as hits depend on them.
#[derive(Clone, Copy, Debug)]
pub struct PlannedCache<'a> {
    /// Routed experts per layer.
    pub n_experts: u32,
    /// Routed experts per token and layer.
    pub n_experts_active: u32,
    /// Slots by layer, of every layer that routes to experts in decode.
    pub caps: &'a [(LayerId, u32)],
    /// Pinned experts, per entry of `caps`; missing entries have none.
    pub pins: &'a [Vec<u32>],
    /// How many of the slots hold experts for good that were chosen without knowing their use, per
    /// entry of `caps`; missing entries have none. The prior counts these at their share of all.
    pub fixed: &'a [u32],
}

/// An expected hit rate in decode with a warm cache, over all layers, weighted by accesses.
#[derive(Clone, Debug, PartialEq)]
pub struct HitRate {
    /// 9 runs in 10 are expected above it.
    pub p10: f64,
    /// The median.
    pub p50: f64,
    /// 1 run in 10 is expected above it.
    pub p90: f64,
    /// `replayed: ...` or `assumed: ...`, for the plan.
    pub evidence: String,
}

/// What share of accesses the planned caches are expected to serve.
///
/// With recorded routing of 64 tokens or more the sample is replayed: the first quarter warms the
/// caches and the rest is counted, in windows whose quantiles are p10 and p90. The pins of a plan
/// come from the same history, so the replay may flatter them; their held-out gain is in
/// `PinChoice`. Without such a sample it is the shipped prior of the family. The same inputs give
/// the same answer.
#[must_use]
pub fn expected_hit_rate(
    history: Option<&History>,
    family: Family,
    planned: &PlannedCache<'_>,
) -> HitRate {
    let is_whole = |cap: u32| cap >= planned.n_experts;
    if planned.caps.iter().all(|&(_, cap)| is_whole(cap)) {
        return HitRate {
            p10: 1.0,
            p50: 1.0,
            p90: 1.0,
            evidence: "computed: every layer has a slot for each of its experts, so that only the \
                       first access of each misses"
                .to_owned(),
        };
    }
    let why_not = match history {
        None => "no usage history".to_owned(),
        Some(history) => match replayed(history, planned) {
            Ok(hit_rate) => return hit_rate,
            Err(why_not) => why_not,
        },
    };
    assumed(family, planned, &why_not)
}

fn assumed(family: Family, planned: &PlannedCache<'_>, why_not: &str) -> HitRate {
    let prior = prior(family, planned.n_experts);
    let mean = |exponent: f64| {
        let per_layer = planned.caps.iter().enumerate().map(|(index, &(_, cap))| {
            let fixed = planned.fixed.get(index).copied().unwrap_or(0).min(cap);
            hit_beside(exponent, fixed, cap, planned)
        });
        per_layer.sum::<f64>() / planned.caps.len().max(1) as f64
    };
    HitRate {
        p10: mean(prior.p10),
        p50: mean(prior.p50),
        p90: mean(prior.p90),
        evidence: format!(
            "assumed: shipped prior for {}, hit = (cap / experts)^{:.2} (from {:.2} to {:.2}), \
             {}; {why_not}",
            family.model_type(),
            prior.p50,
            prior.p10,
            prior.p90,
            prior.origin
        ),
    }
}

/// The prior's hit rate of a layer in which `fixed` of `cap` slots never change.
fn hit_beside(exponent: f64, fixed: u32, cap: u32, planned: &PlannedCache<'_>) -> f64 {
    let (n, active) = (planned.n_experts, planned.n_experts_active);
    if fixed >= n {
        return 1.0;
    }
    let share = f64::from(fixed) / f64::from(n.max(1));
    let active = (f64::from(active) * (1.0 - share)).ceil() as u32;
    share + (1.0 - share) * hit(exponent, cap - fixed, n - fixed, active)
}

/// The replay, or why there is none.
fn replayed(history: &History, planned: &PlannedCache<'_>) -> Result<HitRate, String> {
    let shape = history.shape();
    if (shape.n_experts, shape.n_experts_active) != (planned.n_experts, planned.n_experts_active) {
        return Err("the usage history is of another shape".to_owned());
    }
    let n_tokens = history.n_sample_tokens();
    if n_tokens < MIN_SAMPLE_TOKENS {
        return Err(format!(
            "{n_tokens} tokens of recorded routing, {MIN_SAMPLE_TOKENS} are needed"
        ));
    }
    let experts: Vec<u16> = history.segments().flat_map(|s| &s.experts).copied().collect();
    let sample = RoutingSample::new(
        &experts,
        shape.layers.len(),
        shape.n_experts as usize,
        shape.n_experts_active as usize,
    );
    let n_warm = n_tokens / 4;
    let n_counted = n_tokens - n_warm;
    // At least three windows, so that there is a spread; all of one length but for the last.
    let window_tokens = WINDOW_TOKENS.min(n_counted / 3).max(1);
    let n_windows = (n_counted / window_tokens).max(1);
    let mut windows = vec![Hits::default(); n_windows];
    let (mut n_known, mut n_streamed) = (0usize, 0usize);
    for (index, &(layer, cap)) in planned.caps.iter().enumerate() {
        let Some(place) = shape.layers.iter().position(|&l| l == layer) else { continue };
        n_known += 1;
        let is_whole = cap >= planned.n_experts;
        n_streamed += usize::from(!is_whole);
        let pins = planned.pins.get(index).map_or(&[][..], Vec::as_slice);
        let mut cache = LayerCache::new(shape.n_experts as usize, cap as usize, pins);
        for (token, experts) in sample.layer(place).enumerate() {
            let accesses = experts.len() as u64;
            let hits = if is_whole { accesses } else { cache.access_token(experts) };
            if let Some(counted) = token.checked_sub(n_warm) {
                let window = (counted / window_tokens).min(n_windows - 1);
                windows[window] += Hits { hits, accesses };
            }
        }
    }
    let mut total = Hits::default();
    windows.iter().for_each(|&window| total += window);
    let Some(p50) = total.rate() else {
        return Err("the usage history knows none of these layers".to_owned());
    };
    let n_sessions = history.segments().len();
    let floor = if n_sessions > 1 { MIN_SPREAD } else { MIN_SPREAD_ONE_SESSION };
    // Layers that cannot miss do not vary either.
    let floor = floor * n_streamed as f64 / n_known as f64;
    let mut rates: Vec<f64> = windows.iter().filter_map(|w| w.rate()).collect();
    rates.sort_by(f64::total_cmp);
    let unknown = match planned.caps.len() - n_known {
        0 => String::new(),
        n => format!(", {n} layers without history left out"),
    };
    Ok(HitRate {
        p10: quantile(&rates, 0.1).min(p50 - floor).max(0.0),
        p50,
        p90: quantile(&rates, 0.9).max(p50 + floor).min(1.0),
        evidence: format!(
            "replayed: {n_counted} tokens of {n_sessions} session{} in {n_windows} windows after \
             {n_warm} that warm the cache; its cold misses come on top{unknown}",
            if n_sessions == 1 { "" } else { "s" }
        ),
    })
}

/// By linear interpolation; `sorted` is not empty.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let place = q * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    below + (above - below) * place.fract()
}
