//! What is remembered of all runs. Owns the decay of counts and the bounds of samples and runs.

use std::collections::VecDeque;

use super::session::{MAX_SAMPLE_ACCESSES, RoutingShape, RunRecord, Session};

/// Decoded tokens of a session that halve what is older.
///
/// Decay is by session because work changes between sessions, not within them: the field's
/// measurement is 5.46 tok/s with fitted history and 2.78 with old history. A shorter session
/// decays less, in proportion, so that a run of ten tokens does not wipe out a month.
pub const DECAY_TOKENS: f64 = 256.0;

/// Most that older counts may weigh at a merge, in tokens' worth of accesses.
///
/// Without it a month of work outweighs new work for as many sessions as it takes halving to wear
/// it down. At 4096 tokens an average expert of the widest known layer (8 of 256) has 128
/// accesses, a standard error of 9 %: a larger weight adds inertia and no knowledge of the order.
pub const MAX_OLD_TOKENS: f64 = 4096.0;

/// Runs kept for calibration.
pub const MAX_RUNS: usize = 32;

/// Sample segments kept.
pub const MAX_SEGMENTS: usize = 64;

/// No count is larger: whole numbers below it are exact in f64. An imported text can say more.
pub(super) const MAX_COUNT: u64 = 1 << 53;

/// The share of the sample that a new session may take from older ones: a quarter, so that a
/// full sample speaks of four sessions or more.
const NEWEST_ACCESSES: usize = MAX_SAMPLE_ACCESSES / 4;

/// A contiguous window of tokens of one session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The session it is from, counted from 1 as in [`History::n_sessions`].
    pub session: u64,
    /// `(n_tokens, n_layers, n_experts_active)`, experts in descending router weight.
    pub experts: Vec<u16>,
}

/// A session of another model, or of another shape of the same fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the session is of model {found:?}, the history of model {expected:?} in another shape or of another model"
)]
pub struct ShapeMismatch {
    /// The history's fingerprint.
    pub expected: String,
    /// The session's fingerprint.
    pub found: String,
}

/// What is remembered of all runs of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct History {
    pub(super) shape: RoutingShape,
    pub(super) n_sessions: u64,
    /// Decayed counts, `(n_layers, n_experts)`, the newest session's in full.
    pub(super) counts: Vec<f64>,
    /// The newest session's part of `counts`: what is older can be told from it, so that pins can
    /// be judged on work that they were not chosen from.
    pub(super) newest_counts: Vec<u64>,
    /// Oldest first.
    pub(super) segments: VecDeque<Segment>,
    /// Oldest first.
    pub(super) runs: VecDeque<RunRecord>,
}

impl History {
    /// A history without sessions.
    #[must_use]
    pub fn new(shape: RoutingShape) -> Self {
        Self {
            n_sessions: 0,
            counts: vec![0.0; shape.counts_len()],
            newest_counts: vec![0; shape.counts_len()],
            segments: VecDeque::new(),
            runs: VecDeque::new(),
            shape,
        }
    }

    /// Takes a session in: older counts decay, its sample becomes the newest segment, its run the
    /// newest run. A session without accesses leaves its run only.
    ///
    /// # Errors
    /// The session is of another model or shape; the history is unchanged.
    pub fn merge(&mut self, session: &Session) -> Result<(), ShapeMismatch> {
        if session.shape() != &self.shape {
            return Err(ShapeMismatch {
                expected: self.shape.fingerprint.clone(),
                found: session.shape().fingerprint.clone(),
            });
        }
        if let Some(run) = session.run() {
            self.runs.push_back(run.finite());
            while self.runs.len() > MAX_RUNS {
                self.runs.pop_front();
            }
        }
        let added: f64 = session.counts().iter().map(|&c| c as f64).sum();
        if added > 0.0 {
            self.n_sessions += 1;
            self.decay(added);
            self.newest_counts.clear();
            // Half, so that the faded rest still fits below the bound.
            self.newest_counts.extend(session.counts().iter().map(|&c| c.min(MAX_COUNT / 2)));
            for (count, &new) in self.counts.iter_mut().zip(&self.newest_counts) {
                *count += new as f64;
            }
            self.add_segment(session.sample());
        }
        Ok(())
    }

    /// Fades the counts before a session with `added` accesses is added.
    fn decay(&mut self, added: f64) {
        let per_token = self.shape.accesses_per_token().max(1) as f64;
        let old_tokens = self.counts.iter().sum::<f64>() / per_token;
        let halvings = (added / per_token / DECAY_TOKENS).min(1.0);
        let bound = if old_tokens > MAX_OLD_TOKENS { MAX_OLD_TOKENS / old_tokens } else { 1.0 };
        let factor = 0.5f64.powf(halvings) * bound;
        for count in &mut self.counts {
            // Thousandths keep the file short, and let what is long unused become zero.
            *count = (*count * factor * 1000.0).round() / 1000.0;
        }
    }

    fn add_segment(&mut self, mut experts: Vec<u16>) {
        let per_token = self.shape.accesses_per_token();
        if per_token == 0 || experts.is_empty() {
            return;
        }
        let older: usize = self.segments.iter().map(|s| s.experts.len()).sum();
        let room = MAX_SAMPLE_ACCESSES.saturating_sub(older).max(NEWEST_ACCESSES);
        let surplus = experts.len().saturating_sub(room).next_multiple_of(per_token);
        experts.drain(..surplus.min(experts.len()));
        let mut excess = (older + experts.len()).saturating_sub(MAX_SAMPLE_ACCESSES);
        while excess > 0 || self.segments.len() >= MAX_SEGMENTS {
            let is_full = self.segments.len() >= MAX_SEGMENTS;
            let Some(oldest) = self.segments.front_mut() else { break };
            let cut = excess.next_multiple_of(per_token);
            if !is_full && cut < oldest.experts.len() {
                oldest.experts.drain(..cut);
                break;
            }
            excess = excess.saturating_sub(oldest.experts.len());
            self.segments.pop_front();
        }
        if !experts.is_empty() {
            self.segments.push_back(Segment { session: self.n_sessions, experts });
        }
    }

    /// The model and the shape of its routing.
    #[must_use]
    pub fn shape(&self) -> &RoutingShape {
        &self.shape
    }

    /// Sessions merged that had accesses.
    #[must_use]
    pub fn n_sessions(&self) -> u64 {
        self.n_sessions
    }

    /// Decayed access counts, `(n_layers, n_experts)`.
    #[must_use]
    pub fn counts(&self) -> &[f64] {
        &self.counts
    }

    /// Decayed access counts without the newest session's, `(n_layers, n_experts)`.
    #[must_use]
    pub fn older_counts(&self) -> Vec<f64> {
        let pairs = self.counts.iter().zip(&self.newest_counts);
        // Rounding of large counts must not turn into a weight below zero.
        pairs.map(|(&all, &newest)| (all - newest as f64).max(0.0)).collect()
    }

    /// Sample segments, oldest first.
    pub fn segments(&self) -> impl DoubleEndedIterator<Item = &Segment> + ExactSizeIterator {
        self.segments.iter()
    }

    /// Tokens in all segments.
    #[must_use]
    pub fn n_sample_tokens(&self) -> usize {
        let accesses: usize = self.segments.iter().map(|s| s.experts.len()).sum();
        accesses.checked_div(self.shape.accesses_per_token()).unwrap_or(0)
    }

    /// The last [`MAX_RUNS`] runs, oldest first.
    pub fn runs(&self) -> impl DoubleEndedIterator<Item = &RunRecord> + ExactSizeIterator {
        self.runs.iter()
    }
}
