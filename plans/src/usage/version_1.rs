//! Version 1 of the body of a usage file, read only: one row of counts for all sessions, and the part
//! of it that the newest one added. Owns its schema and what becomes of it in the present form.

use serde::Deserialize;

use super::format::{self, FormatError, SegmentBody, check};
use super::history::{Apart, Base, History, MAX_COUNT, fading, thousandths};
use super::session::{RoutingShape, RunRecord, SessionId, random};
use crate::units::LayerId;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    fingerprint: String,
    layers: Vec<LayerId>,
    n_experts: u32,
    n_experts_active: u32,
    n_sessions: u64,
    counts: Vec<Vec<f64>>,
    newest_counts: Vec<Vec<u64>>,
    segments: Vec<SegmentBody>,
    runs: Vec<RunRecord>,
}

/// The history in a body. The newest session is kept apart, under a name of its own; older counts,
/// which had faded when it was added, are as they were before, to a thousandth.
pub(super) fn history(json: &[u8]) -> Result<History, FormatError> {
    let body: Body = serde_json::from_slice(json)?;
    let shape = RoutingShape {
        fingerprint: body.fingerprint,
        layers: body.layers,
        n_experts: body.n_experts,
        n_experts_active: body.n_experts_active,
    };
    let counts = format::flat(&shape, &body.counts, "counts are not layers x experts")?;
    let newest =
        format::flat(&shape, &body.newest_counts, "newest counts are not layers x experts")?;
    format::check_counts(&counts)?;
    check(
        body.n_sessions <= MAX_COUNT && newest.iter().all(|&c| c <= MAX_COUNT),
        "a number is too large",
    )?;
    let n_accesses = format::check_segments(&shape, &body.segments, body.n_sessions)?;
    format::check_bounds(n_accesses, body.segments.len(), body.runs.len())?;

    let added: f64 = newest.iter().map(|&count| count as f64).sum();
    let has_newest = added > 0.0 && body.n_sessions > 0;
    let per_token = shape.accesses_per_token().max(1) as f64;
    let before = if has_newest { fading(added / per_token) } else { 1.0 };
    let older = counts.iter().zip(&newest).map(|(&all, &newest)| {
        // Rounding of large counts must not turn into a weight below zero.
        let count = (all - newest as f64).max(0.0) / before;
        thousandths(count).min(MAX_COUNT as f64)
    });
    let mut base = Base {
        n_sessions: body.n_sessions - u64::from(has_newest),
        counts: older.collect(),
        segments: body.segments.into_iter().map(SegmentBody::into_segment).collect(),
        runs: body.runs.into(),
    };
    let apart = has_newest.then(|| {
        let is_newest = base.segments.back().is_some_and(|s| s.session == body.n_sessions);
        let segment = if is_newest { base.segments.pop_back() } else { None };
        let segment = segment
            .unwrap_or_else(|| super::Segment { session: body.n_sessions, experts: Vec::new() });
        Apart { id: SessionId::new(), counts: newest, segment, run: None }
    });
    Ok(History::of_parts(shape, random(), base, apart.into_iter().collect()))
}
