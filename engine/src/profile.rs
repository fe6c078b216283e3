//! Where a token's time goes: a clock with laps, one for each stage of the forward pass.
//!
//! Owns the stages and the sums. A lap is the time since the last one, so that stages cannot overlap and
//! what no stage claims is the rest of the whole. Off, a lap is one branch. Measures; renders nothing.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use serde::Serialize;
use tierkeep_kernels::Matrix;

use crate::counters::Phase;

/// Parts of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Rows of the embedding, and the angles of positions.
    Embed,
    /// Norms before attention and before the feed-forward, and the sums of the residual stream.
    Norms,
    /// Queries, keys and values, their norms and rotations, their way into the cache, and the output
    /// projection.
    Projections,
    /// Scores of cached positions, softmax, weighted values; choosing positions, where an indexer does.
    Attention,
    /// The router's product and its choice.
    Router,
    /// Finding experts, waiting for their reads and for streamed layers.
    Lookup,
    /// Products and activations of routed experts, and their sum.
    Experts,
    /// Dense feed-forward and shared experts.
    Dense,
    /// The last norm and the head.
    Head,
    /// What a pass has besides.
    Other,
    /// Between two passes: choosing the token, text, whoever looks on.
    Outside,
}

impl Stage {
    /// All of them, in the order of a pass.
    pub const ALL: [Self; 11] = [
        Self::Embed,
        Self::Norms,
        Self::Projections,
        Self::Attention,
        Self::Router,
        Self::Lookup,
        Self::Experts,
        Self::Dense,
        Self::Head,
        Self::Other,
        Self::Outside,
    ];

    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embedding",
            Self::Norms => "norms and sums",
            Self::Projections => "attention projections",
            Self::Attention => "attention scores",
            Self::Router => "router",
            Self::Lookup => "expert lookup and reads",
            Self::Experts => "routed experts",
            Self::Dense => "dense and shared",
            Self::Head => "head",
            Self::Other => "other",
            Self::Outside => "between tokens",
        }
    }
}

/// One stage of one phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StageProfile {
    /// Which.
    pub stage: Stage,
    /// Time.
    pub seconds: f64,
    /// Of the phase's, 0 to 1.
    pub share: f64,
    /// Bytes of weights and caches that it went over, each counted once a pass.
    pub bytes: u64,
    /// Those over its time; `None` without any.
    pub bytes_per_s: Option<f64>,
}

/// One phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseProfile {
    /// Tokens that went through.
    pub tokens: u64,
    /// The whole: from its first token's begin to the next phase's or to now.
    pub seconds: f64,
    /// Its parts, which sum to the whole; `other` is the rest.
    pub stages: Vec<StageProfile>,
}

/// Both phases.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfileReport {
    /// The prompt.
    pub prefill: PhaseProfile,
    /// Generated tokens.
    pub decode: PhaseProfile,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    tokens: u64,
    whole: Duration,
    stages: [(Duration, u64); Stage::ALL.len()],
}

#[derive(Debug)]
struct Clock {
    last: Instant,
    phase: Phase,
    /// When the phase that runs began.
    began: Instant,
    sums: [Sums; 2],
}

/// The clock of an engine. Behind cells, for everything that computes borrows it.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    is_on: Cell<bool>,
    /// Bytes since the last lap.
    bytes: Cell<u64>,
    clock: RefCell<Option<Clock>>,
}

fn at(phase: Phase) -> usize {
    match phase {
        Phase::Prefill => 0,
        Phase::Decode => 1,
    }
}

impl Profile {
    /// Forgets everything, and begins to measure or stops.
    pub(crate) fn set(&self, is_on: bool) {
        self.is_on.set(is_on);
        self.bytes.set(0);
        self.clock.replace(None);
    }

    /// A pass of `tokens` begins; what was since the last one is between them.
    pub(crate) fn enter(&self, phase: Phase, tokens: usize) {
        if !self.is_on.get() {
            return;
        }
        let mut slot = self.clock.borrow_mut();
        let now = Instant::now();
        let clock = slot.get_or_insert_with(|| Clock {
            last: now,
            phase,
            began: now,
            sums: [Sums::default(); 2],
        });
        clock.lap(Stage::Outside, now, 0);
        if clock.phase != phase {
            let began = std::mem::replace(&mut clock.began, now);
            clock.sums[at(clock.phase)].whole += now - began;
            clock.phase = phase;
        }
        clock.sums[at(phase)].tokens += tokens as u64;
    }

    /// What was since the last lap belongs to `stage`.
    pub(crate) fn lap(&self, stage: Stage) {
        if self.is_on.get()
            && let Some(clock) = self.clock.borrow_mut().as_mut()
        {
            clock.lap(stage, Instant::now(), self.bytes.take());
        }
    }

    /// Bytes that the stage under way goes over.
    pub(crate) fn touch(&self, bytes: impl FnOnce() -> usize) {
        if self.is_on.get() {
            self.bytes.set(self.bytes.get() + bytes() as u64);
        }
    }

    /// A matrix that the stage under way goes over.
    pub(crate) fn touch_matrix(&self, w: &Matrix<'_>) {
        self.touch(|| matrix_bytes(w));
    }

    /// What was measured until now; `None` where nothing was.
    pub(crate) fn report(&self) -> Option<ProfileReport> {
        let clock = self.clock.borrow();
        let clock = clock.as_ref()?;
        let mut sums = clock.sums;
        sums[at(clock.phase)].whole += clock.last - clock.began;
        let [prefill, decode] = sums;
        Some(ProfileReport { prefill: prefill.report(), decode: decode.report() })
    }
}

impl Clock {
    fn lap(&mut self, stage: Stage, now: Instant, bytes: u64) {
        let (time, sum) = &mut self.sums[at(self.phase)].stages[stage as usize];
        *time += now - self.last;
        *sum += bytes;
        self.last = now;
    }
}

impl Sums {
    fn report(&self) -> PhaseProfile {
        let seconds = self.whole.as_secs_f64();
        let named: Duration = Stage::ALL
            .iter()
            .zip(&self.stages)
            .filter(|(stage, _)| **stage != Stage::Other)
            .map(|(_, (time, _))| *time)
            .sum();
        let stages = Stage::ALL.iter().zip(&self.stages).map(|(&stage, &(time, bytes))| {
            let time = match stage {
                Stage::Other => self.whole.saturating_sub(named),
                _ => time,
            };
            let seconds_of_stage = time.as_secs_f64();
            StageProfile {
                stage,
                seconds: seconds_of_stage,
                share: if seconds > 0.0 { seconds_of_stage / seconds } else { 0.0 },
                bytes,
                bytes_per_s: (bytes > 0 && seconds_of_stage > 0.0)
                    .then(|| bytes as f64 / seconds_of_stage),
            }
        });
        PhaseProfile { tokens: self.tokens, seconds, stages: stages.collect() }
    }
}

/// Stored bytes of a matrix, scales included.
fn matrix_bytes(w: &Matrix<'_>) -> usize {
    let element = w.element();
    let scales = element.scale_rows(0, w.rows()) * element.row_scale_bytes(w.cols());
    w.rows() * w.row_bytes() + scales
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn off_it_measures_nothing() {
        let profile = Profile::default();
        profile.enter(Phase::Prefill, 3);
        profile.lap(Stage::Head);
        assert_eq!(profile.report(), None);
    }

    #[test]
    fn stages_sum_to_the_whole_and_none_is_negative() {
        let profile = Profile::default();
        profile.set(true);
        for (phase, tokens) in [(Phase::Prefill, 5), (Phase::Decode, 1), (Phase::Decode, 1)] {
            profile.enter(phase, tokens);
            for stage in [Stage::Embed, Stage::Router, Stage::Other, Stage::Experts, Stage::Router]
            {
                profile.touch(|| 10);
                std::thread::sleep(Duration::from_micros(200));
                profile.lap(stage);
            }
        }
        let report = profile.report().unwrap();
        assert_eq!((report.prefill.tokens, report.decode.tokens), (5, 2));
        for (phase, passes) in [(&report.prefill, 1), (&report.decode, 2)] {
            let sum: f64 = phase.stages.iter().map(|stage| stage.seconds).sum();
            assert!((sum - phase.seconds).abs() < 1e-9, "{sum} of {}", phase.seconds);
            assert!(phase.stages.iter().all(|stage| stage.seconds >= 0.0));
            let router = phase.stages.iter().find(|s| s.stage == Stage::Router).unwrap();
            assert_eq!(router.bytes, 20 * passes);
            assert!(router.seconds >= 400e-6 * passes as f64);
            assert_eq!(phase.stages.iter().map(|s| s.bytes).sum::<u64>(), 50 * passes);
        }
        profile.set(false);
        assert_eq!(profile.report(), None);
    }
}
