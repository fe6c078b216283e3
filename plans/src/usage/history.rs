//! What is remembered of all runs: the newest sessions apart, as they were, and a base that the older
//! ones have been folded into. Owns the decay of counts, the order of sessions and the bounds of
//! what is kept; everything that is asked of a history follows from these parts.

use std::collections::VecDeque;

use super::sample;
use super::session::{Part, RoutingShape, RunRecord, Session, SessionId, random};

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

/// Sessions that are kept apart, so that each can still be saved again: more than run at once on
/// one machine. A session that saves again after so many others have is not counted twice either,
/// see [`History::merge`].
pub const MAX_SESSIONS_APART: usize = 8;

/// No count is larger: whole numbers below it are exact in f64. An imported text can say more.
pub(super) const MAX_COUNT: u64 = 1 << 53;

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

/// The sessions that are no longer kept apart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Base {
    /// Sessions folded that had accesses.
    pub(super) n_sessions: u64,
    /// Decayed counts, `(n_layers, n_experts)`, as they were when the newest of them was added.
    pub(super) counts: Vec<f64>,
    /// Oldest first.
    pub(super) segments: VecDeque<Segment>,
    /// Oldest first.
    pub(super) runs: VecDeque<RunRecord>,
}

/// A session that is kept apart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Apart {
    pub(super) id: SessionId,
    /// Accesses in decode, `(n_layers, n_experts)`.
    pub(super) counts: Vec<u64>,
    /// Its part of the sample. Its number is said by its place, once the history is settled.
    pub(super) segment: Segment,
    pub(super) run: Option<RunRecord>,
}

impl Apart {
    fn accesses(&self) -> f64 {
        self.counts.iter().map(|&count| count as f64).sum()
    }
}

/// What is remembered of all runs of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct History {
    pub(super) shape: RoutingShape,
    /// Tells this history from one that is begun anew in its place.
    pub(super) id: u64,
    pub(super) base: Base,
    /// In the order of their last saving, oldest first.
    pub(super) apart: VecDeque<Apart>,
    /// Decayed counts, the newest session's in full; follows from the parts.
    counts: Vec<f64>,
    /// The part of `counts` that is not the newest session's: so that pins can be judged on work
    /// that they were not chosen from.
    older_counts: Vec<f64>,
}

impl History {
    /// A history without sessions.
    #[must_use]
    pub fn new(shape: RoutingShape) -> Self {
        let base = Base {
            n_sessions: 0,
            counts: vec![0.0; shape.counts_len()],
            segments: VecDeque::new(),
            runs: VecDeque::new(),
        };
        Self::of_parts(shape, random(), base, VecDeque::new())
    }

    /// A history of parts whose sizes fit the shape.
    pub(super) fn of_parts(
        shape: RoutingShape,
        id: u64,
        base: Base,
        apart: VecDeque<Apart>,
    ) -> Self {
        let (counts, older_counts) = (Vec::new(), Vec::new());
        let mut history = Self { shape, id, base, apart, counts, older_counts };
        history.settle();
        history
    }

    /// Takes a session in as the newest one: older counts decay, its sample becomes the newest
    /// segment, its run the newest run. A session without accesses leaves its run only.
    ///
    /// A session that is taken in again replaces what it left before, and becomes the newest. So a
    /// history is what it would be if each session had been taken in once, at its last saving. Only
    /// where [`MAX_SESSIONS_APART`] others have come since is what a session left before part of
    /// the base already; then what is new is taken in as a further session.
    ///
    /// # Errors
    /// The session is of another model or shape; the history is unchanged.
    pub fn merge(&mut self, session: &Session) -> Result<(), ShapeMismatch> {
        self.take_in(session).map(drop)
    }

    /// The same; returns the part that was taken in.
    pub(super) fn take_in(&mut self, session: &Session) -> Result<Part, ShapeMismatch> {
        if session.shape() != &self.shape {
            return Err(ShapeMismatch {
                expected: self.shape.fingerprint.clone(),
                found: session.shape().fingerprint.clone(),
            });
        }
        let is_apart = self.apart.iter().any(|kept| kept.id == session.id());
        let mut part = if is_apart { session.same_part() } else { session.further_part(self.id) };
        self.apart.retain(|kept| kept.id != part.id);
        let mut counts = std::mem::take(&mut part.counts);
        // Half, so that the faded rest still fits below the bound.
        counts.iter_mut().for_each(|count| *count = (*count).min(MAX_COUNT / 2));
        let experts = std::mem::take(&mut part.sample);
        let run = part.run.as_ref().map(RunRecord::finite);
        let segment = Segment { session: 0, experts };
        let kept = Apart { id: part.id, counts, segment, run };
        if kept.run.is_some() || kept.accesses() > 0.0 {
            self.apart.push_back(kept);
        }
        while self.apart.len() > MAX_SESSIONS_APART {
            self.fold_oldest();
        }
        self.settle();
        Ok(part)
    }

    /// Makes the oldest session that is kept apart part of the base.
    fn fold_oldest(&mut self) {
        let Some(oldest) = self.apart.pop_front() else { return };
        let accesses = oldest.accesses();
        if accesses > 0.0 {
            let base = &mut self.base;
            fade(&mut base.counts, accesses, self.shape.accesses_per_token());
            add(&mut base.counts, &oldest.counts);
            base.n_sessions += 1;
            if !oldest.segment.experts.is_empty() {
                let session = base.n_sessions;
                base.segments.push_back(Segment { session, experts: oldest.segment.experts });
            }
        }
        self.base.runs.extend(oldest.run);
    }

    /// Derives what follows from the parts, and holds the bounds.
    fn settle(&mut self) {
        self.number_sessions();
        self.share_sample();
        let n_runs_apart = self.apart.iter().filter(|kept| kept.run.is_some()).count();
        let n_runs = self.base.runs.len();
        self.base.runs.drain(..(n_runs + n_runs_apart).saturating_sub(MAX_RUNS).min(n_runs));

        let per_token = self.shape.accesses_per_token();
        let newest = self.apart.iter().rposition(|kept| kept.accesses() > 0.0);
        self.counts.clone_from(&self.base.counts);
        // Without a newest session apart everything is older.
        self.older_counts.clone_from(&self.base.counts);
        for (at, kept) in self.apart.iter().enumerate() {
            let accesses = kept.accesses();
            if accesses > 0.0 {
                fade(&mut self.counts, accesses, per_token);
                if newest == Some(at) {
                    self.older_counts.clone_from(&self.counts);
                }
                add(&mut self.counts, &kept.counts);
            }
        }
    }

    fn number_sessions(&mut self) {
        let mut session = self.base.n_sessions;
        for kept in &mut self.apart {
            session += u64::from(kept.accesses() > 0.0);
            kept.segment.session = session;
        }
    }

    /// Cuts every segment to its share of the sample; its oldest tokens go.
    fn share_sample(&mut self) {
        let per_token = self.shape.accesses_per_token();
        let apart = self.apart.iter_mut().map(|kept| &mut kept.segment);
        let mut segments: Vec<&mut Segment> = self.base.segments.iter_mut().chain(apart).collect();
        let tokens = |segment: &&mut Segment| segment.experts.len().checked_div(per_token);
        let has: Vec<usize> = segments.iter().map(|s| tokens(s).unwrap_or(0)).collect();
        for (segment, keeps) in segments.iter_mut().zip(sample::shares(&has, per_token)) {
            let surplus = segment.experts.len().saturating_sub(keeps * per_token);
            segment.experts.drain(..surplus);
        }
        self.base.segments.retain(|segment| !segment.experts.is_empty());
    }

    /// The model and the shape of its routing.
    #[must_use]
    pub fn shape(&self) -> &RoutingShape {
        &self.shape
    }

    /// Sessions merged that had accesses.
    #[must_use]
    pub fn n_sessions(&self) -> u64 {
        let apart = self.apart.iter().filter(|kept| kept.accesses() > 0.0).count();
        self.base.n_sessions.saturating_add(apart as u64)
    }

    /// Accesses of each session that is kept apart and had any, undecayed, oldest first.
    #[must_use]
    pub fn accesses_of_newest_sessions(&self) -> Vec<u64> {
        let accesses =
            |kept: &Apart| kept.counts.iter().fold(0u64, |sum, &c| sum.saturating_add(c));
        self.apart.iter().map(accesses).filter(|&accesses| accesses > 0).collect()
    }

    /// Decayed access counts, `(n_layers, n_experts)`.
    #[must_use]
    pub fn counts(&self) -> &[f64] {
        &self.counts
    }

    /// Decayed access counts without the newest session's, `(n_layers, n_experts)`.
    #[must_use]
    pub fn older_counts(&self) -> &[f64] {
        &self.older_counts
    }

    /// Sample segments, oldest first.
    pub fn segments(&self) -> impl DoubleEndedIterator<Item = &Segment> + ExactSizeIterator {
        let apart = self.apart.iter().map(|kept| &kept.segment);
        let all = self.base.segments.iter().chain(apart);
        all.filter(|s| !s.experts.is_empty()).collect::<Vec<_>>().into_iter()
    }

    /// Tokens in all segments.
    #[must_use]
    pub fn n_sample_tokens(&self) -> usize {
        let accesses: usize = self.segments().map(|s| s.experts.len()).sum();
        accesses.checked_div(self.shape.accesses_per_token()).unwrap_or(0)
    }

    /// The last [`MAX_RUNS`] runs, oldest first.
    pub fn runs(&self) -> impl DoubleEndedIterator<Item = &RunRecord> + ExactSizeIterator {
        let apart = self.apart.iter().filter_map(|kept| kept.run.as_ref());
        self.base.runs.iter().chain(apart).collect::<Vec<_>>().into_iter()
    }
}

/// By how much a session of so many tokens fades what is older, the bound of its weight apart.
pub(super) fn fading(session_tokens: f64) -> f64 {
    0.5f64.powf((session_tokens / DECAY_TOKENS).min(1.0))
}

/// Fades counts before a session with `added` accesses is added.
fn fade(counts: &mut [f64], added: f64, accesses_per_token: usize) {
    let per_token = accesses_per_token.max(1) as f64;
    let old_tokens = counts.iter().sum::<f64>() / per_token;
    let bound = if old_tokens > MAX_OLD_TOKENS { MAX_OLD_TOKENS / old_tokens } else { 1.0 };
    let factor = fading(added / per_token) * bound;
    for count in counts {
        *count = thousandths(*count * factor);
    }
}

fn add(counts: &mut [f64], added: &[u64]) {
    for (count, &new) in counts.iter_mut().zip(added) {
        *count = (*count + new as f64).min(MAX_COUNT as f64);
    }
}

/// Thousandths keep the file short, and let what is long unused become zero.
pub(super) fn thousandths(count: f64) -> f64 {
    (count * 1000.0).round() / 1000.0
}
