//! How fast a loaded model is: the timing of prefill and decode at a context, and what was counted
//! meanwhile. Prints nothing, loads nothing, and judges nothing but whether enough experts were used.
//!
//! [`products`] times single products, [`stream`] makes token ids, [`statistics`] and [`summary`] sum up
//! repeats, [`sweep`] finds what a curve is drawn over.

pub mod products;
pub mod statistics;
pub mod stream;
pub mod summary;
pub mod sweep;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde::Serialize;
use tierkeep_plans::budget::{indexer_key_bytes, kv_cache_bytes};
use tierkeep_plans::plan::Plan;
use tierkeep_plans::units::Bytes;

use crate::counters::{AccessCounts, Phase, ReadCounts};
use crate::engine::{Engine, Observer};
use crate::error::EngineError;
use crate::generate::{Recorder, accesses};

/// Below this share of a model's experts a run on synthetic tokens is void: it was of another, smaller
/// model, whose weights the caches may have held.
pub const LEAST_SHARE_OF_EXPERTS: f64 = 0.8;

/// What is measured in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Tokens in the sequence when decoding begins.
    pub context: usize,
    /// The last of them, at most this many, are timed as prefill; those before them as filling.
    pub prompt: usize,
    /// Tokens that are decoded, one after another.
    pub decode: usize,
}

impl Work {
    /// Tokens that are timed as prefill.
    #[must_use]
    pub fn prefilled(self) -> usize {
        self.prompt.min(self.context)
    }

    /// Tokens that fill the sequence before.
    #[must_use]
    pub fn filled(self) -> usize {
        self.context - self.prefilled()
    }

    /// Tokens of the whole.
    #[must_use]
    pub fn tokens(self) -> usize {
        self.context.saturating_add(self.decode)
    }
}

/// Where a measurement is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// Tokens run.
    pub done: usize,
    /// Tokens of the whole.
    pub total: usize,
}

/// Different experts that were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distinct {
    /// Of the layer with the fewest.
    pub least: u32,
    /// Of the layer in the middle.
    pub median: u32,
    /// Of a layer's experts.
    pub of: u32,
    /// Over all layers, 0 to 1.
    pub share: f64,
}

impl Distinct {
    /// Of counts by layer; `of` experts in each.
    fn over(counts: impl IntoIterator<Item = u32>, of: u32) -> Self {
        let mut counts: Vec<u32> = counts.into_iter().collect();
        counts.sort_unstable();
        let all = u64::from(of) * counts.len() as u64;
        let used: u64 = counts.iter().copied().map(u64::from).sum();
        Self {
            least: counts.first().copied().unwrap_or(0),
            median: counts.get(counts.len().saturating_sub(1) / 2).copied().unwrap_or(0),
            of,
            share: if all > 0 { used as f64 / all as f64 } else { 0.0 },
        }
    }
}

/// What one measurement came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// What was asked for.
    pub work: Work,
    /// Time of the tokens that filled the sequence.
    pub fill: Duration,
    /// Time of the prompt.
    pub prefill: Duration,
    /// Time of each decode step.
    pub steps: Vec<Duration>,
    /// Accesses in prefill, filling included.
    pub prefill_accesses: AccessCounts,
    /// Accesses in decode.
    pub accesses: AccessCounts,
    /// Reads of the prompt, without filling.
    pub prefill_reads: ReadCounts,
    /// Reads in decode.
    pub reads: ReadCounts,
    /// Experts that were asked for, in either phase.
    pub distinct: Distinct,
    /// The same in decode alone.
    pub distinct_in_decode: Distinct,
}

impl Sample {
    /// Tokens per second of the prompt; `None` without one.
    #[must_use]
    pub fn prefill_tokens_per_s(&self) -> Option<f64> {
        per_s(self.work.prefilled(), self.prefill)
    }

    /// Tokens per second while the sequence was filled; `None` where nothing was to be filled.
    #[must_use]
    pub fn fill_tokens_per_s(&self) -> Option<f64> {
        per_s(self.work.filled(), self.fill)
    }

    /// Tokens per second in decode: steps over their time.
    #[must_use]
    pub fn decode_tokens_per_s(&self) -> Option<f64> {
        per_s(self.steps.len(), self.steps.iter().sum())
    }

    /// Bytes read for a decoded token, dense weights and rows of the embedding included.
    #[must_use]
    pub fn read_bytes_per_token(&self) -> f64 {
        self.reads.all().bytes as f64 / self.steps.len().max(1) as f64
    }
}

fn per_s(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}

/// Bytes that a decoded token touches, by the plan and the model's shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TouchedBytes {
    /// Weights: computed by the plan from the model's tensors.
    pub weights: Bytes,
    /// Caches of keys and values, and indexer keys, of the tokens there on the average of the run.
    pub caches: Bytes,
}

impl TouchedBytes {
    /// Of a step of `work` under a plan. An indexer's keys are all read; what it then selects of the
    /// cache is at most what is counted here.
    #[must_use]
    pub fn of(plan: &Plan, engine: &Engine, work: Work) -> Self {
        let positions = (work.context + work.decode.div_ceil(2)) as u64;
        let (spec, kv) = (engine.spec(), plan.engine.kv);
        let caches = kv_cache_bytes(spec, positions, kv)
            .saturating_add(indexer_key_bytes(spec, positions, kv));
        Self { weights: plan.prediction.touched_bytes_per_token, caches: Bytes(caches) }
    }

    /// Both.
    #[must_use]
    pub fn all(self) -> Bytes {
        self.weights + self.caches
    }
}

/// Looks at the clock and at whether it is to go on, after each layer.
struct Watcher<'a> {
    first: usize,
    total: usize,
    watch: &'a mut dyn FnMut(At) -> ControlFlow<()>,
    /// Time in `watch`, which is no part of a measurement.
    aside: Duration,
}

impl Watcher<'_> {
    fn tell(&mut self, done: usize) -> ControlFlow<()> {
        let start = Instant::now();
        let flow = (self.watch)(At { done, total: self.total });
        self.aside += start.elapsed();
        flow
    }
}

impl Observer for Watcher<'_> {
    fn layer(&mut self, _layer: usize, first: usize, _states: &[f32]) -> ControlFlow<()> {
        self.tell(self.first + first)
    }
}

/// Runs `tokens` and returns the time that they took, without what `watch` took.
fn timed(
    engine: &mut Engine,
    tokens: &[u32],
    phase: Phase,
    (first, total): (usize, usize),
    watch: &mut dyn FnMut(At) -> ControlFlow<()>,
) -> Result<Duration, EngineError> {
    if tokens.is_empty() {
        return Ok(Duration::ZERO);
    }
    let mut watcher = Watcher { first, total, watch, aside: Duration::ZERO };
    let start = Instant::now();
    engine.run(tokens, phase, &mut watcher)?;
    Ok(start.elapsed().saturating_sub(watcher.aside))
}

/// Runs the work from an empty sequence, on `tokens` (as many as [`Work::tokens`]): filling, the prompt,
/// then one token after another. Which tokens are decoded is given and not chosen, so that two engines
/// can be given the same. Experts stay where they are from before.
///
/// `watch` may end it by breaking; routing of decoded tokens goes to `recorder`, between steps.
///
/// # Errors
/// [`EngineError`]; [`EngineError::Interrupted`] where `watch` broke.
pub fn measure(
    engine: &mut Engine,
    work: Work,
    tokens: &[u32],
    mut recorder: Option<&mut dyn Recorder>,
    watch: &mut dyn FnMut(At) -> ControlFlow<()>,
) -> Result<Sample, EngineError> {
    let wanted = work.tokens();
    if wanted > engine.context() {
        return Err(EngineError::ContextFull { wanted, context: engine.context() });
    }
    if tokens.len() < wanted || work.context == 0 {
        return Err(EngineError::Empty);
    }
    engine.clear();
    engine.restart_counters();
    let (filling, rest) = tokens.split_at(work.filled());
    let (prompt, decoded) = rest.split_at(work.prefilled());
    let fill = timed(engine, filling, Phase::Prefill, (0, wanted), watch)?;
    let filled = engine.read_counter().now();
    let prefill = timed(engine, prompt, Phase::Prefill, (0, wanted), watch)?;
    let prefilled = engine.read_counter().now();
    let mut steps = Vec::with_capacity(work.decode);
    let mut routed: Vec<u16> = vec![0; engine.last_routing().len()];
    for token in decoded.iter().take(work.decode) {
        let token = std::slice::from_ref(token);
        steps.push(timed(engine, token, Phase::Decode, (0, wanted), watch)?);
        if let Some(recorder) = recorder.as_deref_mut() {
            accesses(&engine.spec().router, engine.last_routing(), &mut routed);
            recorder.record_token(&routed);
        }
    }
    let counters = engine.counters();
    let n_experts = engine.spec().router.n_experts as u32;
    let layers = || engine.spec().expert_layers();
    Ok(Sample {
        work,
        fill,
        prefill,
        steps,
        prefill_accesses: counters.total(Phase::Prefill),
        accesses: counters.total(Phase::Decode),
        prefill_reads: prefilled.since(&filled),
        reads: engine.read_counter().now().since(&prefilled),
        distinct: Distinct::over(layers().map(|layer| counters.distinct(layer)), n_experts),
        distinct_in_decode: Distinct::over(
            layers().map(|layer| counters.distinct_in_decode(layer)),
            n_experts,
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_divided_by_hand() {
        let long = Work { context: 512, prompt: 128, decode: 32 };
        assert_eq!((long.filled(), long.prefilled(), long.tokens()), (384, 128, 544));
        let short = Work { context: 64, prompt: 128, decode: 1 };
        assert_eq!((short.filled(), short.prefilled(), short.tokens()), (0, 64, 65));
    }

    #[test]
    fn distinct_experts_by_hand() {
        // 4 layers of 8: 8, 2, 6, 4 used, so 20 of 32; in the middle, the lower of 4 and 6.
        let distinct = Distinct::over([8, 2, 6, 4], 8);
        assert_eq!(distinct, Distinct { least: 2, median: 4, of: 8, share: 0.625 });
        assert_eq!(Distinct::over([], 8).share, 0.0);
    }

    #[test]
    fn speeds_are_tokens_over_time() {
        let sample = Sample {
            work: Work { context: 12, prompt: 8, decode: 2 },
            fill: Duration::from_millis(500),
            prefill: Duration::from_secs(2),
            steps: vec![Duration::from_millis(100), Duration::from_millis(300)],
            prefill_accesses: AccessCounts::default(),
            accesses: AccessCounts::default(),
            prefill_reads: ReadCounts::default(),
            reads: ReadCounts {
                experts: crate::counters::Reads { bytes: 30, ..Default::default() },
                ..ReadCounts::default()
            },
            distinct: Distinct::default(),
            distinct_in_decode: Distinct::default(),
        };
        assert_eq!(sample.fill_tokens_per_s(), Some(8.0));
        assert_eq!(sample.prefill_tokens_per_s(), Some(4.0));
        assert_eq!(sample.decode_tokens_per_s(), Some(5.0));
        assert_eq!(sample.read_bytes_per_token(), 15.0);
    }
}
