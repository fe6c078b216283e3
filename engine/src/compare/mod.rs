//! Two containers of one model over the same text: how far the second is from the first.
//!
//! Owns the order of the comparison: both engines go through a text in lockstep, some positions at a
//! time, each given the text's own tokens (teacher forcing), so that memory is bounded by the plans
//! and the logits of those positions. `metrics` owns what logits come to, `same` whether two models
//! are one. Plans nothing, prints nothing.

mod metrics;
mod same;

use std::ops::ControlFlow;

use serde::Serialize;
use tierkeep_plans::units::Bytes;

pub use self::metrics::{
    Disagreement, KlSummary, NotFinite, Place, Position, Side, Summary, Tally, position,
};
pub use self::same::{Difference, differences};
use crate::counters::Phase;
use crate::engine::{Engine, Observer};
use crate::error::EngineError;

/// Most positions whose logits are kept at a time: more would not make weights that are read for every
/// batch noticeably cheaper.
const MOST_KEPT: u64 = 512;
/// What the kept logits may take whatever the budget.
const KEPT_BYTES: u64 = 16 << 20;
/// Of a larger budget the kept logits may take this part.
const KEPT_PART: u64 = 32;

/// How a text is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Windows {
    /// Tokens of a window: what both sequences hold.
    pub context: usize,
    /// Tokens from the start of a window to that of the next, 1 to `context`. Both sequences begin anew
    /// there. A position is compared once, in the first window that has it.
    pub stride: usize,
}

/// One sequence of tokens to compare over.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// The group that it is summed up with, such as the file that it is from.
    pub group: usize,
    /// Its tokens.
    pub tokens: &'a [u32],
}

/// Where a comparison stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Positions compared.
    pub done: u64,
    /// Positions to compare.
    pub total: u64,
    /// Which model computes.
    pub side: Side,
    /// The layer that it has computed.
    pub layer: usize,
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Over everything; `None` where it was interrupted before the first position.
    pub all: Option<Summary>,
    /// By group, in their order.
    pub groups: Vec<Option<Summary>>,
    /// Whether it ended before the last position.
    pub interrupted: bool,
}

/// Why two models cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// They are not one model.
    #[error(
        "A and B are not one model: {}; compare containers that were made from the same checkpoint",
        list(.0)
    )]
    NotOneModel(Vec<Difference>),
    /// An engine failed.
    #[error("{} failed: {source}", name(*.side))]
    Engine {
        /// Whose.
        side: Side,
        /// How.
        source: EngineError,
    },
    /// Logits that no probabilities follow from.
    #[error(
        "{} gives a logit that is not finite, for token {token} after position {} of text {} in group {}: its weights are damaged or not what config.json says; check it with `tierkeep doctor`",
        name(*.side), .place.position, .place.text, .place.group
    )]
    NotFinite {
        /// Whose.
        side: Side,
        /// The first such token.
        token: usize,
        /// Where.
        place: Place,
    },
    /// The windows make no sense.
    #[error("a stride of {stride} tokens does not fit windows of {context}: give 1 to {context}")]
    Stride {
        /// What was asked for.
        stride: usize,
        /// The window.
        context: usize,
    },
    /// Nothing to compare over.
    #[error("there are no tokens to compare over: the text is empty")]
    Empty,
}

fn name(side: Side) -> &'static str {
    match side {
        Side::A => "A",
        Side::B => "B",
    }
}

/// The first differences, and how many more there are.
fn list(differences: &[Difference]) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<String> = differences.iter().take(SHOWN).map(Difference::to_string).collect();
    let rest = differences.len().saturating_sub(SHOWN);
    let more = if rest > 0 { format!(", and {rest} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// Positions whose logits are kept at a time within a budget for everything.
#[must_use]
pub fn kept_positions(vocab_size: usize, budget: Bytes) -> usize {
    let row_bytes = (vocab_size as u64).saturating_mul(4).max(1);
    (KEPT_BYTES.max(budget.0 / KEPT_PART) / row_bytes).clamp(1, MOST_KEPT) as usize
}

/// Bytes of so many positions' logits.
#[must_use]
pub fn kept_bytes(vocab_size: usize, positions: usize) -> Bytes {
    Bytes((vocab_size as u64).saturating_mul(4).saturating_mul(positions as u64))
}

/// Compares the second engine with the first over every position of every sequence, keeping the logits
/// of at most `kept` positions. `watch` is called after each layer of either engine; breaking ends the
/// comparison with what it has until then.
///
/// # Errors
/// [`CompareError`].
pub fn compare(
    engines: [&mut Engine; 2],
    sequences: &[Sequence<'_>],
    windows: Windows,
    kept: usize,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Compared, CompareError> {
    let Windows { context, stride } = windows;
    if stride == 0 || stride > context {
        return Err(CompareError::Stride { stride, context });
    }
    let total: u64 = sequences.iter().map(|s| s.tokens.len() as u64).sum();
    if total == 0 {
        return Err(CompareError::Empty);
    }
    let [a, b] = &engines;
    let unlike = differences(a.spec(), b.spec());
    if !unlike.is_empty() {
        return Err(CompareError::NotOneModel(unlike));
    }
    let vocab = a.spec().vocab_size;
    let kept = kept.max(1);
    let n_groups = sequences.iter().map(|s| s.group + 1).max().unwrap_or(0);
    let mut work = Work {
        engines,
        kept: vec![0.0; vocab.saturating_mul(kept)],
        vocab,
        all: Tally::default(),
        groups: vec![Tally::default(); n_groups],
        total,
        watch,
    };
    let mut interrupted = false;
    let mut texts = vec![0; n_groups];
    for sequence in sequences {
        let text = texts[sequence.group];
        texts[sequence.group] += 1;
        match work.sequence(sequence, text, windows, kept) {
            Ok(()) => {}
            Err(CompareError::Engine { source: EngineError::Interrupted, .. }) => {
                interrupted = true;
                break;
            }
            Err(error) => return Err(error),
        }
    }
    let groups = work.groups.iter().map(Tally::summary).collect();
    Ok(Compared { all: work.all.summary(), groups, interrupted })
}

struct Work<'a> {
    engines: [&'a mut Engine; 2],
    /// The first engine's logits of the positions in work, `(positions, vocab)`.
    kept: Vec<f32>,
    vocab: usize,
    all: Tally,
    groups: Vec<Tally>,
    total: u64,
    watch: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

impl Work<'_> {
    fn sequence(
        &mut self,
        sequence: &Sequence<'_>,
        text: usize,
        windows: Windows,
        kept: usize,
    ) -> Result<(), CompareError> {
        let tokens = sequence.tokens;
        let (mut start, mut compared) = (0_usize, 0);
        while compared < tokens.len() {
            let end = tokens.len().min(start.saturating_add(windows.context));
            self.engines.iter_mut().for_each(|engine| engine.clear());
            // What an earlier window has compared is only context here.
            if start < compared {
                self.context_only(&tokens[start..compared])?;
            }
            for first in (compared..end).step_by(kept) {
                let chunk = &tokens[first..end.min(first + kept)];
                self.chunk(chunk, &tokens[first + 1..], (sequence.group, text, first, start))?;
            }
            compared = end;
            start += windows.stride;
        }
        Ok(())
    }

    fn context_only(&mut self, tokens: &[u32]) -> Result<(), CompareError> {
        let done = self.all.positions();
        let Self { engines: [a, b], watch, total, .. } = self;
        for (side, engine) in [(Side::A, a), (Side::B, b)] {
            let mut passing = Passing { watch: &mut **watch, done, total: *total, side };
            engine
                .run(tokens, Phase::Prefill, &mut passing)
                .map_err(|source| CompareError::Engine { side, source })?;
        }
        Ok(())
    }

    /// Some positions by the first engine, which are kept, then by the second.
    fn chunk(
        &mut self,
        tokens: &[u32],
        following: &[u32],
        (group, text, first, start): (usize, usize, usize, usize),
    ) -> Result<(), CompareError> {
        let done = self.all.positions();
        let Self { engines: [a, b], kept, vocab, all, groups, total, watch } = self;
        // The engine counts positions in the window, the text from its start.
        let in_window = first - start;
        let mut passing = Passing { watch: &mut **watch, done, total: *total, side: Side::A };
        let mut keeping = Keeping { passing: &mut passing, kept, first: in_window, vocab: *vocab };
        a.run(tokens, Phase::Prefill, &mut keeping)
            .map_err(|source| CompareError::Engine { side: Side::A, source })?;
        passing.side = Side::B;
        let mut comparing = Comparing {
            passing: &mut passing,
            kept,
            first: in_window,
            vocab: *vocab,
            following,
            place: Place { group, text, position: first },
            tallies: [all, &mut groups[group]],
            fault: None,
        };
        let ran = b.run(tokens, Phase::Prefill, &mut comparing);
        if let Some(fault) = comparing.fault {
            return Err(fault);
        }
        ran.map_err(|source| CompareError::Engine { side: Side::B, source })
    }
}

/// Hands layers on.
struct Passing<'a> {
    watch: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    done: u64,
    total: u64,
    side: Side,
}

impl Observer for Passing<'_> {
    fn layer(&mut self, layer: usize, _first: usize, _states: &[f32]) -> ControlFlow<()> {
        let Self { done, total, side, .. } = *self;
        (self.watch)(Progress { done, total, side, layer })
    }
}

/// Keeps the first engine's logits.
struct Keeping<'a, 'b> {
    passing: &'a mut Passing<'b>,
    kept: &'a mut [f32],
    first: usize,
    vocab: usize,
}

impl Observer for Keeping<'_, '_> {
    fn layer(&mut self, layer: usize, first: usize, states: &[f32]) -> ControlFlow<()> {
        self.passing.layer(layer, first, states)
    }

    fn wants_all_logits(&self) -> bool {
        true
    }

    fn logits(&mut self, position: usize, logits: &[f32]) {
        let at = (position - self.first) * self.vocab;
        if let Some(row) = self.kept.get_mut(at..at + self.vocab) {
            row.copy_from_slice(logits);
        }
    }
}

/// Compares the second engine's logits with those kept.
struct Comparing<'a, 'b> {
    passing: &'a mut Passing<'b>,
    kept: &'a [f32],
    first: usize,
    vocab: usize,
    /// The tokens that follow each position.
    following: &'a [u32],
    /// The first position of the chunk.
    place: Place,
    tallies: [&'a mut Tally; 2],
    fault: Option<CompareError>,
}

impl Observer for Comparing<'_, '_> {
    fn layer(&mut self, layer: usize, first: usize, states: &[f32]) -> ControlFlow<()> {
        self.passing.layer(layer, first, states)
    }

    fn batch(&mut self, _len: usize) -> ControlFlow<()> {
        if self.fault.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn wants_all_logits(&self) -> bool {
        true
    }

    fn logits(&mut self, position_in_window: usize, logits: &[f32]) {
        let at = position_in_window - self.first;
        let place = Place { position: self.place.position + at, ..self.place };
        let row = self.kept.get(at * self.vocab..(at + 1) * self.vocab);
        let (Some(row), None) = (row, &self.fault) else { return };
        match position(row, logits, self.following.get(at).copied()) {
            Ok(found) => {
                self.tallies.iter_mut().for_each(|tally| tally.add(place, &found));
                self.passing.done += 1;
            }
            Err(NotFinite { side, token }) => {
                self.fault = Some(CompareError::NotFinite { side, token, place });
            }
        }
    }
}
