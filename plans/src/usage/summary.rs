//! What a history says, in figures: how even the work of each layer is, how much the newest session
//! differs from older ones, how good predictions were. Pure; shows nothing.

use serde::Serialize;

use super::history::History;
use super::session::RunRecord;
use crate::units::LayerId;

/// A history in figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Sessions that had accesses.
    pub n_sessions: u64,
    /// Tokens' worth of accesses of each session that is kept apart, undecayed, oldest first.
    pub newest_session_tokens: Vec<f64>,
    /// Accesses in all layers, decayed.
    pub accesses: f64,
    /// The same in tokens' worth: over layers and the top-k.
    pub tokens: f64,
    /// Tokens of recorded routing.
    pub sample_tokens: usize,
    /// Sessions that they are from.
    pub sample_sessions: usize,
    /// Routed experts per layer.
    pub n_experts: u32,
    /// Experts that are a tenth of a layer's, rounded up.
    pub n_busiest: u32,
    /// Each layer that routes to experts.
    pub layers: Vec<LayerSummary>,
    /// The last runs, oldest first.
    pub runs: Vec<RunSummary>,
}

/// How a layer's accesses are spread over its experts. Shares are from 0 to 1, of decayed accesses;
/// `None` where there are no accesses to say it of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerSummary {
    /// The layer.
    pub layer: LayerId,
    /// Experts that were asked for.
    pub n_asked: u32,
    /// Accesses, decayed.
    pub accesses: f64,
    /// Share of the busiest tenth of the experts, [`Summary::n_busiest`] of them.
    pub busiest_tenth: Option<f64>,
    /// How many experts, asked for equally often, would be as hard to guess: the exponential of the
    /// entropy `-sum p ln p`.
    pub effective_experts: Option<f64>,
    /// How much the newest session differs from the older ones: 1 less the overlap
    /// `sum min(p, q)` of both distributions.
    pub change: Option<f64>,
}

/// A run with the errors of its predictions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSummary {
    /// What was predicted and measured.
    #[serde(flatten)]
    pub record: RunRecord,
    /// Measured speed over the predicted median, less 1.
    pub speed_error: Option<f64>,
    /// Measured hit rate less the predicted one.
    pub hit_rate_error: Option<f64>,
}

/// One expert of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExpertUse {
    /// The expert.
    pub expert: u32,
    /// Accesses, decayed.
    pub accesses: f64,
    /// Their share of the layer's, 0 to 1.
    pub share: f64,
    /// The part of them that the newest session added.
    pub newest_accesses: f64,
}

impl Summary {
    /// Of a history.
    #[must_use]
    pub fn of(history: &History) -> Self {
        let shape = history.shape();
        let per_token = shape.accesses_per_token().max(1) as f64;
        let n_busiest = shape.n_experts.div_ceil(10);
        let layer = |(at, &layer): (usize, &LayerId)| {
            let (counts, older) = rows(history, at);
            of_layer(layer, counts, older, n_busiest as usize)
        };
        let layers: Vec<LayerSummary> = shape.layers.iter().enumerate().map(layer).collect();
        let accesses: f64 = layers.iter().map(|layer| layer.accesses).sum();
        let newest = history.accesses_of_newest_sessions().into_iter();
        Self {
            n_sessions: history.n_sessions(),
            newest_session_tokens: newest.map(|accesses| accesses as f64 / per_token).collect(),
            accesses,
            tokens: accesses / per_token,
            sample_tokens: history.n_sample_tokens(),
            sample_sessions: history.segments().len(),
            n_experts: shape.n_experts,
            n_busiest,
            layers,
            runs: history.runs().map(of_run).collect(),
        }
    }
}

/// Every expert of a layer that was asked for, the most used first, ties by lower id. `None`: the
/// layer does not route to experts.
#[must_use]
pub fn experts_of_layer(history: &History, layer: LayerId) -> Option<Vec<ExpertUse>> {
    let at = history.shape().layers.iter().position(|&l| l == layer)?;
    let (counts, older) = rows(history, at);
    let all: f64 = counts.iter().sum();
    let uses = counts.iter().zip(older).enumerate().filter(|(_, (count, _))| **count > 0.0);
    let mut uses: Vec<ExpertUse> = uses
        .map(|(expert, (&accesses, &older))| ExpertUse {
            expert: expert as u32,
            accesses,
            share: accesses / all,
            newest_accesses: accesses - older,
        })
        .collect();
    uses.sort_by(|a, b| b.accesses.total_cmp(&a.accesses));
    Some(uses)
}

/// Decayed counts of a layer by its place, with and without the newest session's.
fn rows(history: &History, at: usize) -> (&[f64], &[f64]) {
    let width = history.shape().n_experts as usize;
    let row = at.saturating_mul(width)..(at + 1).saturating_mul(width);
    let (counts, older) = (history.counts(), history.older_counts());
    (counts.get(row.clone()).unwrap_or_default(), older.get(row).unwrap_or_default())
}

fn of_layer(layer: LayerId, counts: &[f64], older: &[f64], n_busiest: usize) -> LayerSummary {
    let accesses: f64 = counts.iter().sum();
    let mut sorted = counts.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let busiest: f64 = sorted.iter().take(n_busiest).sum();
    let entropy = || -> f64 {
        let shares = counts.iter().map(|count| count / accesses).filter(|&p| p > 0.0);
        -shares.map(|p| p * p.ln()).sum::<f64>()
    };
    let newest: Vec<f64> = counts.iter().zip(older).map(|(all, old)| all - old).collect();
    let (n_newest, n_older) = (newest.iter().sum::<f64>(), older.iter().sum::<f64>());
    let overlap = || -> f64 {
        newest.iter().zip(older).map(|(new, old)| (new / n_newest).min(old / n_older)).sum()
    };
    LayerSummary {
        layer,
        n_asked: counts.iter().filter(|&&count| count > 0.0).count() as u32,
        accesses,
        busiest_tenth: (accesses > 0.0).then(|| (busiest / accesses).min(1.0)),
        effective_experts: (accesses > 0.0).then(|| entropy().exp()),
        change: (n_newest > 0.0 && n_older > 0.0).then(|| (1.0 - overlap()).clamp(0.0, 1.0)),
    }
}

fn of_run(record: &RunRecord) -> RunSummary {
    let both = |a: Option<f64>, b: Option<f64>| a.zip(b);
    let speed = both(record.actual_tok_per_s, record.predicted_tok_per_s_p50);
    let hits = both(record.actual_hit_rate, record.predicted_hit_rate);
    RunSummary {
        record: record.clone(),
        speed_error: speed.filter(|(_, p50)| *p50 > 0.0).map(|(actual, p50)| actual / p50 - 1.0),
        hit_rate_error: hits.map(|(actual, predicted)| actual - predicted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::{Session, import_counts, render_counts};

    fn history(sessions: &[&[[u16; 4]]]) -> History {
        let new = || Session::new("model", &[LayerId(3), LayerId(4)], 20, 2);
        let mut history = History::new(new().shape().clone());
        for tokens in sessions {
            let mut session = new();
            tokens.iter().for_each(|token| session.record_token(token));
            history.merge(&session).unwrap();
        }
        history
    }

    #[test]
    fn figures_follow_from_the_counts() {
        // Layer 3 asks for experts 0 and 1 alone, layer 4 for four of them equally often.
        let all = Summary::of(&history(&[&[[0, 1, 0, 1], [0, 1, 2, 3]]]));
        assert_eq!((all.n_sessions, all.tokens, all.n_busiest), (1, 2.0, 2));
        assert_eq!((all.newest_session_tokens.as_slice(), all.sample_tokens), (&[2.0][..], 2));
        let [a, b] = all.layers[..] else { panic!("{all:?}") };
        assert_eq!(
            (a.layer, a.n_asked, a.accesses, a.busiest_tenth),
            (LayerId(3), 2, 4.0, Some(1.0))
        );
        assert_eq!((b.n_asked, b.busiest_tenth, b.change), (4, Some(0.5), None));
        assert!((a.effective_experts.unwrap() - 2.0).abs() < 1e-12);
        assert!((b.effective_experts.unwrap() - 4.0).abs() < 1e-12);
        let none = Summary::of(&history(&[]));
        assert_eq!((none.tokens, none.layers[0].busiest_tenth), (0.0, None));
        assert_eq!(none.layers[0].effective_experts, None);
    }

    #[test]
    fn change_is_what_does_not_overlap() {
        // Half of layer 3 stays, none of layer 4.
        let all = Summary::of(&history(&[&[[0, 1, 4, 5]], &[[1, 2, 6, 7]]]));
        let change: Vec<f64> = all.layers.iter().map(|l| l.change.unwrap()).collect();
        assert!((change[0] - 0.5).abs() < 1e-9 && (change[1] - 1.0).abs() < 1e-9, "{change:?}");
        let uses = experts_of_layer(&history(&[&[[0, 1, 4, 5]], &[[1, 2, 6, 7]]]), LayerId(3));
        let uses = uses.unwrap();
        assert_eq!(uses.iter().map(|u| u.expert).collect::<Vec<_>>(), [1, 2, 0]);
        assert_eq!((uses[1].newest_accesses, uses[2].newest_accesses), (1.0, 0.0));
        assert_eq!(experts_of_layer(&history(&[]), LayerId(5)), None);
    }

    #[test]
    fn errors_of_predictions_are_signed() {
        let record = RunRecord {
            predicted_tok_per_s_p50: Some(4.0),
            actual_tok_per_s: Some(3.0),
            predicted_hit_rate: Some(0.5),
            actual_hit_rate: Some(0.625),
            ..RunRecord::default()
        };
        let run = of_run(&record);
        assert_eq!((run.speed_error, run.hit_rate_error), (Some(-0.25), Some(0.125)));
        assert_eq!(of_run(&RunRecord::default()).speed_error, None);
    }

    #[test]
    fn counts_are_written_as_they_are_imported() {
        let history = history(&[&[[0, 19, 0, 1]; 300], &[[2, 3, 2, 3]; 256]]);
        let text = render_counts(&history);
        let read = import_counts(&text, 5, 20).unwrap();
        for (place, layer) in [LayerId(3), LayerId(4)].into_iter().enumerate() {
            let counts = history.counts()[place * 20..][..20].iter().map(|c| c.round() as u64);
            assert_eq!(read.row(layer), counts.collect::<Vec<_>>());
        }
        assert_eq!(text.lines().nth(1), Some("3 0 150"));
    }
}
