//! The estimate: seconds per token from bytes, rates and expected hits. Pure; every rate that is not
//! a fact is named as assumed in the prediction's evidence.

mod moved;
mod rates;

use self::moved::Moved;
pub use self::rates::{CardRates, Compute, KernelRates, Rate, Rates, cards};
use crate::budget::{self, Holding, ModelBytes, Workload};
use crate::plan::{Prediction, Range, TermSeconds};
use crate::units::Bytes;

/// Seconds that a layer takes besides its products: norms, routing, waking the threads. Assumed.
const LAYER_OVERHEAD_S: f64 = 40e-6;
/// Seconds until a state that was sent to a card or asked back from it is there, its bytes not
/// counted: a launch and a wait. Assumed.
const CROSSING_S: f64 = 15e-6;
/// Factors on the speed at the tenth and the ninetieth percentile, before any run has been seen.
const UNSEEN_SPREAD: (f64, f64) = (0.55, 1.5);
/// The same when earlier runs calibrate the estimate.
const CALIBRATED_SPREAD: (f64, f64) = (0.8, 1.25);

/// What an earlier run says about the estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PastRun {
    /// What was predicted, before calibration, tokens/s.
    pub uncalibrated_tokens_per_s: f64,
    /// What was measured, tokens/s.
    pub actual_tokens_per_s: f64,
}

/// The factor that earlier runs put on the speed: the median of actual over predicted, 1 without
/// any.
#[must_use]
pub fn calibration(past: &[PastRun]) -> f64 {
    let mut ratios: Vec<f64> = past
        .iter()
        .map(|run| run.actual_tokens_per_s / run.uncalibrated_tokens_per_s)
        .filter(|ratio| ratio.is_finite() && *ratio > 0.0)
        .collect();
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied().unwrap_or(1.0)
}

/// Which share of the accesses to routed experts is expected where, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpectedHits {
    /// Found on some card.
    pub vram: f64,
    /// Found resident anywhere, cards included.
    pub hit_rate: Range,
    /// Not resident, but in the kernel's page cache.
    pub page_cache: f64,
}

/// What an estimate is of.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The model.
    pub sums: &'a ModelBytes<'a>,
    /// What is asked of the engine.
    pub workload: &'a Workload,
    /// Where everything lives.
    pub holding: Holding<'a>,
    /// What is expected of it.
    pub hits: ExpectedHits,
}

/// Names of the terms, as `binding` has them.
pub(crate) mod term {
    pub(super) const MEMORY: &str = "memory bandwidth";
    pub(super) const KERNELS: &str = "kernels";
    pub(crate) const MISSES: &str = "disk reads of missed experts";
    pub(super) const STREAMED: &str = "disk reads of streamed dense weights";
    pub(super) const PAGE_CACHE: &str = "copies from the page cache";
    pub(super) const VRAM: &str = "graphics memory";
    pub(super) const CROSSINGS: &str = "transfers to and from graphics cards";
    pub(super) const OVERHEAD: &str = "per-layer overhead";
}

/// Seconds of a token by term at a hit rate.
///
/// In main memory, for each way of storing weights, the larger of touched bytes over bandwidth and touched
/// weights over the kernels' rate for it, and the caches at half the context over bandwidth. The first are
/// the term of memory and the second that of the kernels; their sum is the time there. Touched are the dense
/// weights that are there (streamed ones pass through it) and the routed experts that are on no card. To it are added missed and streamed bytes over
/// the disk's rate at reads of their size, bytes on cards over their bandwidth, states that cross, and
/// a fixed time for each layer. Experts in main memory are computed on by the processor, never sent.
/// Where a layer's reads run under what it computes, the shorter of the two is not added: it is
/// [`Prediction::hidden_read_seconds`] and in no term.
#[must_use]
pub fn terms(view: &View<'_>, rates: &Rates, hit_rate: f64) -> Vec<TermSeconds> {
    seconds(&Moved::of(view), view, rates, hit_rate)
        .0
        .into_iter()
        .map(|(name, seconds)| TermSeconds { name: name.to_owned(), seconds })
        .collect()
}

/// Tokens in a second before calibration at a hit rate.
#[must_use]
pub fn tokens_per_s(view: &View<'_>, rates: &Rates, hit_rate: f64) -> f64 {
    let (terms, _) = seconds(&Moved::of(view), view, rates, hit_rate);
    1.0 / terms.iter().map(|(_, seconds)| seconds).sum::<f64>()
}

/// Share of the accesses to routed experts that are read, 0 to 1.
fn missed_share(view: &View<'_>, hit_rate: f64) -> f64 {
    if view.holding.hold_everything(&view.sums.model.spec) {
        return 0.0;
    }
    (1.0 - hit_rate - view.hits.page_cache.clamp(0.0, 1.0)).max(0.0)
}

/// The terms, and the seconds of reads that run under them.
fn seconds(
    moved: &Moved,
    view: &View<'_>,
    rates: &Rates,
    hit_rate: f64,
) -> (Vec<(&'static str, f64)>, f64) {
    let vram = view.hits.vram.clamp(0.0, 1.0);
    let time = moved.host.and(&moved.routed, 1.0 - vram).time(rates);
    let from_page_cache = view.hits.page_cache.clamp(0.0, 1.0);
    let missed_share = missed_share(view, hit_rate);
    let missed = moved.routed_bytes * missed_share;
    let resident = (hit_rate - vram).clamp(0.0, 1.0);
    let hidden = moved.windows.iter().fold(0.0, |sum, window| {
        let read = window.read_bytes * missed_share / rates.experts.per_s;
        sum + read.min(window.seconds(view, rates, resident))
    });
    // A copy reads and writes.
    let copies = 2.0 * moved.routed_bytes * from_page_cache / rates.memory.per_s;
    let state_bytes = view.sums.model.spec.hidden_size as f64 * 4.0;
    let mut on_cards = 0.0;
    let mut link = f64::INFINITY;
    let n_experts: u64 = view.holding.cards.iter().map(budget::CardPlacement::n_experts).sum();
    for (card, bytes) in view.holding.cards.iter().zip(&moved.card_bytes) {
        let Some(card_rates) = rates.cards.get(card.card as usize) else { continue };
        let share = card.n_experts() as f64 / n_experts.max(1) as f64;
        on_cards += (bytes + moved.routed_bytes * vram * share) / card_rates.memory.per_s;
        link = link.min(card_rates.link.per_s);
    }
    let all = [
        (term::MEMORY, time.memory),
        (term::KERNELS, time.kernels),
        (term::MISSES, (missed / rates.experts.per_s - hidden).max(0.0)),
        (term::STREAMED, moved.streamed_bytes as f64 / rates.layers.per_s),
        (term::PAGE_CACHE, copies),
        (term::VRAM, on_cards),
        (term::CROSSINGS, moved.crossings * (CROSSING_S + state_bytes / link)),
        (term::OVERHEAD, LAYER_OVERHEAD_S * view.sums.layers.len() as f64),
    ];
    (all.into_iter().filter(|(name, s)| *s > 0.0 || *name == term::MISSES).collect(), hidden)
}

/// Predicts a run.
///
/// `hit_evidence` is what the hits rest on, `past` what earlier runs say.
#[must_use]
pub fn estimate(
    view: &View<'_>,
    rates: &Rates,
    hit_evidence: &[String],
    past: &[PastRun],
) -> Prediction {
    let hit_rate = view.hits.hit_rate;
    let moved = Moved::of(view);
    let calibration = calibration(past);
    let (low, high) = if past.is_empty() { UNSEEN_SPREAD } else { CALIBRATED_SPREAD };
    let at = |hit: f64| seconds(&moved, view, rates, hit);
    let speed = |hit: f64| 1.0 / at(hit).0.iter().map(|(_, seconds)| seconds).sum::<f64>();
    let (terms, hidden) = at(hit_rate.p50);
    let longest = terms.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let binding = longest.map_or("", |(name, _)| name).to_owned();
    let on_cards: f64 = moved.card_bytes.iter().sum();
    let missed = moved.routed_bytes * missed_share(view, hit_rate.p50);
    Prediction {
        decode_tokens_per_s: Range {
            p10: speed(hit_rate.p10) * calibration * low,
            p50: speed(hit_rate.p50) * calibration,
            p90: speed(hit_rate.p90) * calibration * high,
        },
        hit_rate,
        touched_bytes_per_token: Bytes((moved.host.bytes() + on_cards + moved.routed_bytes) as u64),
        read_bytes_per_token: Bytes(missed as u64),
        streamed_bytes_per_token: Bytes(moved.streamed_bytes),
        hidden_read_seconds: hidden,
        binding,
        calibration,
        evidence: evidence(view, rates, &moved, hit_evidence, past),
        terms: terms
            .into_iter()
            .map(|(name, seconds)| TermSeconds { name: name.to_owned(), seconds })
            .collect(),
    }
}

/// What the figures rest on, every rate that took part.
fn evidence(
    view: &View<'_>,
    rates: &Rates,
    moved: &Moved,
    hit_evidence: &[String],
    past: &[PastRun],
) -> Vec<String> {
    let mut evidence: Vec<String> = hit_evidence.to_vec();
    evidence.push(rates.memory.evidence.clone());
    evidence.push(rates.experts.evidence.clone());
    if moved.streamed_bytes > 0 && rates.layers != rates.experts {
        evidence.push(format!("for streamed dense weights {}", rates.layers.evidence));
    }
    let on_host = 1.0 - view.hits.vram.clamp(0.0, 1.0);
    let multiplied = moved.host.and(&moved.routed, on_host);
    evidence.push(rates.kernels.evidence(multiplied.classes()));
    let mut named = Vec::new();
    for card in view.holding.cards {
        let Some(card) = rates.cards.get(card.card as usize) else { continue };
        for rate in [&card.memory, &card.link] {
            if !named.contains(&&rate.evidence) {
                named.push(&rate.evidence);
            }
        }
    }
    evidence.extend(named.into_iter().cloned());
    evidence.push(format!("per-layer overhead {:.0} us a layer: assumed", LAYER_OVERHEAD_S * 1e6));
    if !moved.windows.is_empty() {
        let resident = (view.hits.hit_rate.p50 - view.hits.vram).clamp(0.0, 1.0);
        let windows = moved.windows.iter().map(|window| window.seconds(view, rates, resident));
        let ms = windows.sum::<f64>() * 1e3;
        evidence.push(format!(
            "reads of missed experts run under {ms:.1} ms of other work a token (experts that are in \
             memory, shared ones, what comes between routing and experts), the larger of both counts \
             in each layer: computed"
        ));
    }
    if !view.holding.cards.is_empty() {
        let us = CROSSING_S * 1e6;
        evidence.push(format!("each transfer of a state {us:.0} us and its bytes: assumed"));
    }
    evidence.push(if past.is_empty() {
        "calibration none: no earlier run of this model here".to_owned()
    } else {
        format!("calibration x{:.2}: median of {} earlier runs", calibration(past), past.len())
    });
    evidence
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calibration_is_the_median_ratio() {
        let run = |predicted, actual| PastRun {
            uncalibrated_tokens_per_s: predicted,
            actual_tokens_per_s: actual,
        };
        assert_eq!(calibration(&[]), 1.0);
        assert_eq!(calibration(&[run(10.0, 5.0), run(10.0, 8.0), run(10.0, 20.0)]), 0.8);
        assert_eq!(calibration(&[run(0.0, 5.0)]), 1.0);
    }
}
