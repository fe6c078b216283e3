//! Greedy generation: prefill, then one token after another until something ends it.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use tierkeep_plans::usage::Session;

use crate::counters::Phase;
use crate::engine::{Engine, Observer, Unobserved};
use crate::error::EngineError;

/// What generation reports while it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
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
    /// layer's in descending router weight.
    fn record_token(&mut self, experts: &[u16]);
}

impl Recorder for Session {
    fn record_token(&mut self, experts: &[u16]) {
        Self::record_token(self, experts);
    }
}

/// What was generated, and how long it took.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Generated tokens, a stop token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub ended: Ended,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time for the prompt, and so to the first token.
    pub prefill: Duration,
    /// Time of each decode step after the first token.
    pub steps: Vec<Duration>,
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

/// Passes the batches of a prefill on as events; an interrupt is heeded between two batches.
struct PrefillWatcher<'a> {
    first: usize,
    total: usize,
    events: &'a mut dyn FnMut(Event) -> ControlFlow<()>,
}

impl Observer for PrefillWatcher<'_> {
    fn batch(&mut self, len: usize) -> ControlFlow<()> {
        (self.events)(Event::Prefill { done: len - self.first, total: self.total })
    }
}

/// Runs `prompt`, then generates up to `max_tokens` tokens greedily.
///
/// `events` may end it by breaking. Routing of decoded tokens goes to `recorder`.
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
        steps: Vec::with_capacity(max_tokens.min(engine.context())),
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
    let mut watcher = PrefillWatcher { first: engine.len(), total: prompt.len(), events };
    let run = engine.run(prompt, Phase::Prefill, &mut watcher);
    generation.prefill = start.elapsed();
    match run {
        Err(EngineError::Interrupted) => {
            generation.ended = Ended::Interrupted;
            return Ok(generation);
        }
        other => other?,
    }
    while generation.tokens.len() < max_tokens {
        let token = greedy(engine.logits())?;
        generation.tokens.push(token);
        if events(Event::Token(token)).is_break() {
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
        let step = Instant::now();
        engine.run(&[token], Phase::Decode, &mut Unobserved)?;
        generation.steps.push(step.elapsed());
        if let Some(recorder) = &mut recorder {
            for (into, expert) in routing.iter_mut().zip(engine.last_routing()) {
                *into = *expert as u16;
            }
            recorder.record_token(&routing);
        }
    }
    Ok(generation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_equals_and_refuses_garbage() {
        assert_eq!(greedy(&[1.0, 3.0, 3.0]).unwrap(), 1);
        assert_eq!(greedy(&[-1.0]).unwrap(), 0);
        assert!(greedy(&[1.0, f32::NAN]).is_err());
        assert!(greedy(&[f32::INFINITY, 0.0]).is_err());
    }
}
