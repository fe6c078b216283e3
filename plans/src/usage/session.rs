//! What one run observes of its routing. Owns the counters and the bounded sample that the decode
//! path writes to, which allocate at construction only, and how far the session has been saved.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::import::ImportedCounts;
use crate::budget::Numerics;
use crate::units::{Bytes, LayerId};

/// Most accesses (token, layer, expert) that a sample keeps, in a session and in the file: 512 KiB
/// in memory, about 1 MB in the file, 420 tokens of GLM-5.2 and 2048 of OLMoE.
pub const MAX_SAMPLE_ACCESSES: usize = 1 << 18;

/// Stands in a sample for a choice that is no access, because what was chosen has no weights: no id of an
/// expert is so high. Those of a token and layer come after its experts.
pub const NO_ACCESS: u16 = u16::MAX;

/// Whose routing it is: the model and the shape of one token's routing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingShape {
    /// The catalogue's fingerprint of the model.
    pub fingerprint: String,
    /// The layers that route to experts, in the order of every per-layer array here.
    pub layers: Vec<LayerId>,
    /// Routed experts per layer.
    pub n_experts: u32,
    /// Routed experts per token and layer.
    pub n_experts_active: u32,
}

impl RoutingShape {
    /// Accesses of one token: `n_layers * n_experts_active`.
    #[must_use]
    pub fn accesses_per_token(&self) -> usize {
        self.layers.len().saturating_mul(self.n_experts_active as usize)
    }

    /// Length of a flat count array, `(n_layers, n_experts)`.
    pub(crate) fn counts_len(&self) -> usize {
        self.layers.len().saturating_mul(self.n_experts as usize)
    }
}

/// What one run predicted and what happened, for calibration of the next estimate. A rate is a
/// share from 0 to 1; `None` is unknown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRecord {
    /// Predicted decode speed that 9 runs in 10 exceed.
    pub predicted_tok_per_s_p10: Option<f64>,
    /// Predicted median decode speed.
    pub predicted_tok_per_s_p50: Option<f64>,
    /// Predicted decode speed that 1 run in 10 exceeds.
    pub predicted_tok_per_s_p90: Option<f64>,
    /// Predicted median decode speed before calibration by earlier runs: calibrating against
    /// calibrated predictions would undo itself.
    pub uncalibrated_tok_per_s: Option<f64>,
    /// Predicted median hit rate.
    pub predicted_hit_rate: Option<f64>,
    /// Measured decode speed.
    pub actual_tok_per_s: Option<f64>,
    /// Measured hit rate in decode, cold misses counted.
    pub actual_hit_rate: Option<f64>,
    /// Tokens that were decoded.
    pub decoded_tokens: Option<u64>,
    /// Memory budget of the run.
    pub budget_bytes: Option<Bytes>,
    /// Context length that was provided for, tokens.
    pub context_tokens: Option<u64>,
    /// Compute threads.
    pub n_threads: Option<u32>,
    /// How activations were computed; `None` is exact, as in every run before there was another way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numerics: Option<Numerics>,
}

impl RunRecord {
    /// The record with numbers that JSON cannot hold (NaN, infinity) made unknown.
    pub(super) fn finite(&self) -> Self {
        let finite = |value: Option<f64>| value.filter(|v| v.is_finite());
        Self {
            predicted_tok_per_s_p10: finite(self.predicted_tok_per_s_p10),
            predicted_tok_per_s_p50: finite(self.predicted_tok_per_s_p50),
            predicted_tok_per_s_p90: finite(self.predicted_tok_per_s_p90),
            uncalibrated_tok_per_s: finite(self.uncalibrated_tok_per_s),
            predicted_hit_rate: finite(self.predicted_hit_rate),
            actual_tok_per_s: finite(self.actual_tok_per_s),
            actual_hit_rate: finite(self.actual_hit_rate),
            ..self.clone()
        }
    }
}

/// Names a session, so that what it saves later replaces what it saved before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SessionId(pub(super) u64);

impl SessionId {
    /// A name that no other session has: of the few that a history keeps apart, two meet by chance
    /// once in 10^17 times.
    pub(super) fn new() -> Self {
        Self(random())
    }
}

/// A number that no other process and no other call has.
pub(super) fn random() -> u64 {
    // The standard library seeds its hash tables from the system's random numbers.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    if let Ok(now) = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH) {
        hasher.write_u128(now.as_nanos());
    }
    hasher.finish()
}

/// How far a session has come.
#[derive(Clone, Debug, Default)]
pub(super) struct Mark {
    /// Access counts, `(n_layers, n_experts)`; empty at the beginning, where all are 0.
    counts: Vec<u64>,
    n_tokens: u64,
    /// Whether its run was known by then.
    has_run: bool,
}

/// What a session adds to a history under one name.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) id: SessionId,
    /// Where it begins.
    pub(super) origin: Mark,
    /// Access counts since then, `(n_layers, n_experts)`.
    pub(super) counts: Vec<u64>,
    /// The newest contiguous tokens since then.
    pub(super) sample: Vec<u16>,
    pub(super) run: Option<RunRecord>,
}

/// What one run observes. It can be saved as often as one likes: a history takes it in once, as it
/// was when it was saved last.
#[derive(Debug)]
pub struct Session {
    shape: RoutingShape,
    id: SessionId,
    /// Where the part that goes by `id` begins: at the beginning, unless what was saved under an
    /// earlier name has been folded away since.
    origin: Mark,
    /// The history that was saved to, and how far the session had come.
    saved: Option<(u64, Mark)>,
    /// `(n_layers, n_experts)`.
    counts: Vec<u64>,
    /// A ring of whole tokens, each `(n_layers, n_experts_active)`: replay needs contiguous
    /// tokens, so the sample is the newest window and not a random choice.
    ring: Vec<u16>,
    ring_capacity_tokens: usize,
    n_tokens: u64,
    run: Option<RunRecord>,
}

impl Session {
    /// An empty session. `layers` are those that route to experts, in the order in which
    /// [`Self::record_token`] will be given them.
    #[must_use]
    pub fn new(
        fingerprint: &str,
        layers: &[LayerId],
        n_experts: u32,
        n_experts_active: u32,
    ) -> Self {
        let shape = RoutingShape {
            fingerprint: fingerprint.to_owned(),
            layers: layers.to_vec(),
            n_experts,
            n_experts_active,
        };
        let per_token = shape.accesses_per_token();
        let ring_capacity_tokens = MAX_SAMPLE_ACCESSES.checked_div(per_token).unwrap_or(0);
        Self {
            id: SessionId::new(),
            origin: Mark::default(),
            saved: None,
            counts: vec![0; shape.counts_len()],
            ring: Vec::with_capacity(ring_capacity_tokens * per_token),
            ring_capacity_tokens,
            n_tokens: 0,
            run: None,
            shape,
        }
    }

    /// Records the routing of one decoded token: `experts` is `(n_layers, n_experts_active)`, each
    /// layer's experts in descending router weight, then [`NO_ACCESS`] as often as it chose what has no
    /// weights. Does not allocate.
    ///
    /// A slice of another length or an id that is no expert is a bug of the caller; release
    /// builds leave such a token out, because a wrong record is worse than none.
    pub fn record_token(&mut self, experts: &[u16]) {
        let per_token = self.shape.accesses_per_token();
        let n_experts = self.shape.n_experts;
        let is_valid = |&e: &u16| u32::from(e) < n_experts || e == NO_ACCESS;
        let valid = experts.len() == per_token && experts.iter().all(is_valid);
        debug_assert!(valid, "a token's routing has {per_token} ids below {n_experts}");
        if !valid || per_token == 0 {
            return;
        }
        let rows = self.counts.chunks_exact_mut(n_experts as usize);
        for (row, chosen) in rows.zip(experts.chunks_exact(self.shape.n_experts_active as usize)) {
            for &expert in chosen.iter().take_while(|&&expert| expert != NO_ACCESS) {
                row[usize::from(expert)] += 1;
            }
        }
        if self.ring.len() < self.ring_capacity_tokens * per_token {
            self.ring.extend_from_slice(experts);
        } else if self.ring_capacity_tokens > 0 {
            let slot = (self.n_tokens % self.ring_capacity_tokens as u64) as usize * per_token;
            self.ring[slot..slot + per_token].copy_from_slice(experts);
        }
        self.n_tokens += 1;
    }

    /// Adds counts of another engine in the layers that route to experts here; what lies in others
    /// is left out, as [`ImportedCounts::taken`] tells.
    pub fn record_counts(&mut self, imported: &ImportedCounts) {
        let width = self.shape.n_experts as usize;
        if width == 0 {
            return;
        }
        for (row, &layer) in self.counts.chunks_exact_mut(width).zip(&self.shape.layers) {
            for (count, &added) in row.iter_mut().zip(imported.row(layer)) {
                *count = count.saturating_add(added);
            }
        }
    }

    /// Sets what the run predicted and measured.
    pub fn set_run(&mut self, run: RunRecord) {
        self.run = Some(run);
    }

    /// The model and the shape of its routing.
    #[must_use]
    pub fn shape(&self) -> &RoutingShape {
        &self.shape
    }

    /// Access counts, `(n_layers, n_experts)`.
    #[must_use]
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Decoded tokens recorded, whether or not the sample still holds them.
    #[must_use]
    pub fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    /// What the run predicted and measured, if set.
    #[must_use]
    pub fn run(&self) -> Option<&RunRecord> {
        self.run.as_ref()
    }

    /// The newest contiguous tokens, oldest first: `(n_tokens, n_layers, n_experts_active)`.
    #[must_use]
    pub fn sample(&self) -> Vec<u16> {
        let mut sample = self.ring.clone();
        if self.ring_capacity_tokens > 0 && self.n_tokens > self.ring_capacity_tokens as u64 {
            let oldest = (self.n_tokens % self.ring_capacity_tokens as u64) as usize;
            sample.rotate_left(oldest * self.shape.accesses_per_token());
        }
        sample
    }

    /// The name under which it is saved now.
    pub(super) fn id(&self) -> SessionId {
        self.id
    }

    /// What it adds to the history `history` that does not keep it apart (any more): all of it, or,
    /// where that history has folded away what was saved before, what came since, by a new name.
    pub(super) fn further_part(&self, history: u64) -> Part {
        match &self.saved {
            Some((of, mark)) if *of == history => self.part(SessionId::new(), mark.clone()),
            // Another history is in the place of the one that was saved to: it knows nothing yet.
            Some(_) => self.part(self.id, Mark::default()),
            None => self.part(self.id, self.origin.clone()),
        }
    }

    /// What it adds by the name that it has.
    pub(super) fn same_part(&self) -> Part {
        self.part(self.id, self.origin.clone())
    }

    fn part(&self, id: SessionId, origin: Mark) -> Part {
        let counts = match origin.counts.as_slice() {
            [] => self.counts.clone(),
            before => {
                self.counts.iter().zip(before).map(|(all, old)| all.saturating_sub(*old)).collect()
            }
        };
        let mut sample = self.sample();
        let per_token = self.shape.accesses_per_token();
        let n_new = usize::try_from(self.n_tokens.saturating_sub(origin.n_tokens));
        let wanted = n_new.unwrap_or(usize::MAX).saturating_mul(per_token);
        sample.drain(..sample.len().saturating_sub(wanted));
        let run = self.run.clone().filter(|_| !origin.has_run);
        Part { id, origin, counts, sample, run }
    }

    /// Remembers that the part `id`, which begins at `origin`, is now in the history `history`.
    pub(super) fn set_saved(&mut self, history: u64, id: SessionId, origin: Mark) {
        let mark = Mark {
            counts: self.counts.clone(),
            n_tokens: self.n_tokens,
            has_run: self.run.is_some(),
        };
        self.id = id;
        self.origin = origin;
        self.saved = Some((history, mark));
    }
}
