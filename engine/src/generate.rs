//! Greedy generation: prefill, then one token after another until something ends it.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use tierkeep_plans::spec::RouterSpec;
use tierkeep_plans::usage::{NO_ACCESS, Session};

use crate::counters::{Phase, ReadCounts};
use crate::engine::{Engine, Observer};
use crate::error::EngineError;

/// What generation reports while it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A layer of a batch of the prompt, or of a token that is being generated, has been run. Breaking
    /// here drops that batch or token; the sequence until then is kept.
    Layer {
        /// Which of the two.
        phase: Phase,
        /// The layer, from 0.
        layer: usize,
        /// Layers of the model.
        n_layers: usize,
    },
    /// Prompt tokens that have been run, of how many.
    Prefill {
        /// Tokens run.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A generated token; stop tokens are reported too.
    Token(u32),
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// The model said a stop token.
    StopToken,
    /// As many tokens as were asked for.
    Length,
    /// The planned context is full.
    ContextFull,
    /// The caller asked for it.
    Interrupted,
}

/// Takes in the routing of decoded tokens. It is called between two steps, so that what it does is
/// in no step's time.
pub trait Recorder {
    /// Experts of one decoded token, `(n_layers, n_experts_active)` over the layers that route, each
    /// layer's in descending router weight, then [`NO_ACCESS`] for each that has no weights.
    fn record_token(&mut self, experts: &[u16]);
}

impl Recorder for Session {
    fn record_token(&mut self, experts: &[u16]) {
        Self::record_token(self, experts);
    }
}

/// What was generated, and how long it took. The time that `events` takes is in none of the times:
/// neither printing nor saving a history is decoding.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Generated tokens, a stop token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub ended: Ended,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time for the prompt.
    pub prefill: Duration,
    /// Time from the start of the prompt until the first token was chosen; `None` without one.
    pub first_token: Option<Duration>,
    /// Time of each decode step after the first token.
    pub steps: Vec<Duration>,
    /// What had been read, and which slots were empty, when the prompt was done.
    pub prefilled: Mark,
}

/// Counts of an engine at a moment at which phases meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// Read from shards until then.
    pub reads: ReadCounts,
    /// Slots without an expert.
    pub empty_slots: u64,
}

impl Mark {
    /// The counts of now.
    #[must_use]
    pub fn of(engine: &Engine) -> Self {
        Self { reads: engine.read_counter().now(), empty_slots: engine.empty_slots().0 }
    }
}

impl Generation {
    /// Tokens per second in decode: steps over their time; `None` without a step.
    #[must_use]
    pub fn decode_tokens_per_s(&self) -> Option<f64> {
        let time: Duration = self.steps.iter().sum();
        (!self.steps.is_empty() && !time.is_zero())
            .then(|| self.steps.len() as f64 / time.as_secs_f64())
    }

    /// Tokens per second in prefill.
    #[must_use]
    pub fn prefill_tokens_per_s(&self) -> Option<f64> {
        (!self.prefill.is_zero()).then(|| self.prompt_tokens as f64 / self.prefill.as_secs_f64())
    }
}

/// The most likely token: the largest logit, ties by lower id.
///
/// # Errors
/// [`EngineError::NotANumber`] where logits are not numbers: what follows would be garbage.
pub fn greedy(logits: &[f32]) -> Result<u32, EngineError> {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    if logits.iter().any(|l| l.is_nan()) || !logits[best].is_finite() {
        return Err(EngineError::NotANumber);
    }
    Ok(best as u32)
}

/// Passes layers and batches on as events, and keeps the time that these take.
struct Watcher<'a> {
    phase: Phase,
    n_layers: usize,
    /// Tokens before the prompt.
    first: usize,
    /// Tokens of the prompt.
    total: usize,
    events: &'a mut dyn FnMut(Event) -> ControlFlow<()>,
    /// Time in `events`.
    aside: Duration,
}

impl Watcher<'_> {
    fn tell(&mut self, event: Event) -> ControlFlow<()> {
        let start = Instant::now();
        let flow = (self.events)(event);
        self.aside += start.elapsed();
        flow
    }
}

impl Observer for Watcher<'_> {
    fn layer(&mut self, layer: usize, _first: usize, _states: &[f32]) -> ControlFlow<()> {
        self.tell(Event::Layer { phase: self.phase, layer, n_layers: self.n_layers })
    }

    fn batch(&mut self, len: usize) -> ControlFlow<()> {
        match self.phase {
            Phase::Prefill => {
                self.tell(Event::Prefill { done: len - self.first, total: self.total })
            }
            Phase::Decode => ControlFlow::Continue(()),
        }
    }
}

/// Runs `prompt`, then generates up to `max_tokens` tokens greedily.
///
/// `events` may end it by breaking: after a layer, a batch or a token. Routing of decoded tokens goes
/// to `recorder`.
///
/// # Errors
/// [`EngineError`]; what was generated until then has been reported through `events`.
pub fn generate(
    engine: &mut Engine,
    prompt: &[u32],
    max_tokens: usize,
    stop_tokens: &[u32],
    mut recorder: Option<&mut dyn Recorder>,
    events: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<Generation, EngineError> {
    let mut generation = Generation {
        tokens: Vec::with_capacity(max_tokens.min(engine.context())),
        ended: Ended::Length,
        prompt_tokens: prompt.len(),
        prefill: Duration::ZERO,
        first_token: None,
        steps: Vec::with_capacity(max_tokens.min(engine.context())),
        prefilled: Mark::default(),
    };
    // The routing of a token as the usage history takes it; expert ids there are 16 bits wide.
    let mut routing: Vec<u16> = vec![0; engine.last_routing().len()];
    let wanted = engine.len() + prompt.len();
    if wanted > engine.context() {
        return Err(EngineError::ContextFull { wanted, context: engine.context() });
    }
    if prompt.is_empty() {
        return Err(EngineError::Empty);
    }
    let start = Instant::now();
    let mut watcher = Watcher {
        phase: Phase::Prefill,
        n_layers: engine.spec().n_layers,
        first: engine.len(),
        total: prompt.len(),
        events,
        aside: Duration::ZERO,
    };
    let run = engine.run(prompt, Phase::Prefill, &mut watcher);
    generation.prefill = start.elapsed().saturating_sub(watcher.aside);
    generation.prefilled = Mark::of(engine);
    match run {
        Err(EngineError::Interrupted) => {
            generation.ended = Ended::Interrupted;
            return Ok(generation);
        }
        other => other?,
    }
    watcher.phase = Phase::Decode;
    while generation.tokens.len() < max_tokens {
        let token = greedy(engine.logits())?;
        if generation.tokens.is_empty() {
            generation.first_token = Some(start.elapsed().saturating_sub(watcher.aside));
        }
        generation.tokens.push(token);
        if watcher.tell(Event::Token(token)).is_break() {
            generation.ended = Ended::Interrupted;
            break;
        }
        if stop_tokens.contains(&token) {
            generation.ended = Ended::StopToken;
            break;
        }
        if generation.tokens.len() == max_tokens {
            break;
        }
        if engine.len() == engine.context() {
            generation.ended = Ended::ContextFull;
            break;
        }
        let (step, aside) = (Instant::now(), watcher.aside);
        match engine.run(&[token], Phase::Decode, &mut watcher) {
            Err(EngineError::Interrupted) => {
                generation.ended = Ended::Interrupted;
                break;
            }
            other => other?,
        }
        generation.steps.push(step.elapsed().saturating_sub(watcher.aside - aside));
        if let Some(recorder) = &mut recorder {
            accesses(&engine.spec().router, engine.last_routing(), &mut routing);
            recorder.record_token(&routing);
        }
    }
    Ok(generation)
}

/// The accesses of a token as a usage history takes them, its routing being as [`Engine::last_routing`]
/// has it: experts without weights leave [`NO_ACCESS`] at the end of their layer.
pub(crate) fn accesses(router: &RouterSpec, routing: &[u32], into: &mut [u16]) {
    let k = router.n_experts_active;
    for (chosen, into) in routing.chunks_exact(k).zip(into.chunks_exact_mut(k)) {
        into.fill(NO_ACCESS);
        let experts = chosen.iter().filter(|&&expert| !router.is_zero(expert));
        for (into, expert) in into.iter_mut().zip(experts) {
            *into = *expert as u16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_weights_is_no_access() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/oracles/longcat_flash");
        let model = tierkeep_plans::catalogue::Catalogue::open(directory.as_ref()).unwrap();
        let router = model.spec.router;
        assert_eq!((router.n_experts, router.n_experts_active), (16, 5));
        let mut into = [7; 10];
        accesses(&router, &[20, 3, 16, 15, 0, 16, 17, 18, 19, 20], &mut into);
        let none = NO_ACCESS;
        assert_eq!(into, [3, 15, 0, none, none, none, none, none, none, none]);
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_refuses_garbage() {
        assert_eq!(greedy(&[1.0, 3.0, 3.0]).unwrap(), 1);
        assert_eq!(greedy(&[-1.0]).unwrap(), 0);
        assert!(greedy(&[1.0, f32::NAN]).is_err());
        assert!(greedy(&[f32::INFINITY, 0.0]).is_err());
    }
}
