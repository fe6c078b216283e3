//! The usage file as bytes: its first line, the schema of version 2, its checks and its errors. No file
//! is touched here, and version 1 is `version_1`'s. `docs/usage-format.md` describes it for people.

use serde::{Deserialize, Serialize};

use super::history::{Apart, Base, History, MAX_COUNT, MAX_RUNS, MAX_SESSIONS_APART, Segment};
use super::sample::MAX_SEGMENTS;
use super::session::{MAX_SAMPLE_ACCESSES, NO_ACCESS, RoutingShape, RunRecord, SessionId};
use super::version_1;
use crate::units::LayerId;

/// The version that this build writes.
pub const FORMAT_VERSION: u32 = 2;

/// The oldest version that this build reads.
pub const OLDEST_VERSION: u32 = 1;

/// First word of every version's first line.
pub(super) const MAGIC: &str = "tierkeep-usage";

/// No history reaches this: the counts of 65,536 experts in nine rows and a full sample take less than
/// a tenth of it.
pub(super) const MAX_FILE_BYTES: u64 = 64 << 20;

/// The longest first line: words, a version, a hash and a length.
const MAX_HEADER_BYTES: usize = 256;

/// Why bytes are not a usable history.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The file could not be read at all.
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// Not a file, or a folder.
    #[error("is not a regular file")]
    NotAFile,
    /// Larger than a history can be.
    #[error("has {found} bytes, more than the {limit} that a usage file can have")]
    TooLarge {
        /// Bytes found.
        found: u64,
        /// Most allowed.
        limit: u64,
    },
    /// Does not begin as a usage file does.
    #[error("does not begin with \"tierkeep-usage\"")]
    NotUsage,
    /// The first line is not of the documented form.
    #[error("has a damaged first line")]
    Header,
    /// Another version's file.
    #[error(
        "is of format version {found}, this build reads versions {OLDEST_VERSION} to {FORMAT_VERSION}"
    )]
    Version {
        /// The version found.
        found: u32,
    },
    /// The body ends early, or goes on.
    #[error("has {found} bytes after its first line where {expected} were written")]
    Length {
        /// Bytes that the first line promises.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// The body is not what was written.
    #[error("has a body that does not match its checksum")]
    Checksum,
    /// The body is no history although its checksum is right.
    #[error("has a body that cannot be read: {0}")]
    Body(#[from] serde_json::Error),
    /// The body contradicts itself.
    #[error("contradicts itself: {what}")]
    Inconsistent {
        /// What is wrong.
        what: &'static str,
    },
    /// Another model's history.
    #[error("is the history of another model ({found}, expected {expected})")]
    OtherModel {
        /// This model's fingerprint.
        expected: String,
        /// The file's.
        found: String,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    fingerprint: String,
    layers: Vec<LayerId>,
    n_experts: u32,
    n_experts_active: u32,
    history_id: String,
    base: BaseBody,
    sessions: Vec<SessionBody>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BaseBody {
    n_sessions: u64,
    counts: Vec<Vec<f64>>,
    segments: Vec<SegmentBody>,
    runs: Vec<RunRecord>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SessionBody {
    id: String,
    counts: Vec<Vec<u64>>,
    sample: Vec<u16>,
    run: Option<RunRecord>,
}

/// A segment of the sample, as every version has it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SegmentBody {
    pub(super) session: u64,
    pub(super) experts: Vec<u16>,
}

/// The history as the bytes of a file.
///
/// # Errors
/// Only if JSON cannot be written, which no history is known to cause.
pub fn render(history: &History) -> Result<Vec<u8>, FormatError> {
    let width = (history.shape.n_experts as usize).max(1);
    let segment = |s: &Segment| SegmentBody { session: s.session, experts: s.experts.clone() };
    let body = Body {
        fingerprint: history.shape.fingerprint.clone(),
        layers: history.shape.layers.clone(),
        n_experts: history.shape.n_experts,
        n_experts_active: history.shape.n_experts_active,
        history_id: name(history.id),
        base: BaseBody {
            n_sessions: history.base.n_sessions,
            counts: history.base.counts.chunks(width).map(<[f64]>::to_vec).collect(),
            segments: history.base.segments.iter().map(segment).collect(),
            runs: history.base.runs.iter().cloned().collect(),
        },
        sessions: history
            .apart
            .iter()
            .map(|kept| SessionBody {
                id: name(kept.id.0),
                counts: kept.counts.chunks(width).map(<[u64]>::to_vec).collect(),
                sample: kept.segment.experts.clone(),
                run: kept.run.clone(),
            })
            .collect(),
    };
    let mut json = serde_json::to_vec(&body)?;
    json.push(b'\n');
    let hash = blake3::hash(&json).to_hex();
    let mut bytes =
        format!("{MAGIC} {FORMAT_VERSION} blake3={hash} bytes={}\n", json.len()).into_bytes();
    bytes.extend_from_slice(&json);
    Ok(bytes)
}

/// Names as they are written: 16 hexadecimal digits in lower case.
fn name(number: u64) -> String {
    format!("{number:016x}")
}

/// The number of a name that is written so and no other way.
fn number(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok().filter(|&number| name(number) == text)
}

/// Reads the bytes of a usage file of the model with this fingerprint.
///
/// # Errors
/// Whatever makes them unusable; nothing is repaired or guessed.
pub fn parse(bytes: &[u8], fingerprint: &str) -> Result<History, FormatError> {
    parse_any(bytes, fingerprint).map(|(_, history)| history)
}

/// The same with the version that the bytes are of.
pub(super) fn parse_any(bytes: &[u8], fingerprint: &str) -> Result<(u32, History), FormatError> {
    let (version, json) = checked_body(bytes)?;
    let history = match version {
        1 => version_1::history(json)?,
        FORMAT_VERSION => history_of(serde_json::from_slice(json)?)?,
        found => return Err(FormatError::Version { found }),
    };
    if history.shape.fingerprint != fingerprint {
        return Err(FormatError::OtherModel {
            expected: fingerprint.to_owned(),
            found: history.shape.fingerprint,
        });
    }
    Ok((version, history))
}

/// The version and the body, its length and checksum verified.
fn checked_body(bytes: &[u8]) -> Result<(u32, &[u8]), FormatError> {
    let prefix = bytes.get(..MAGIC.len()).unwrap_or(bytes);
    if prefix != MAGIC.as_bytes() {
        let cut_short = MAGIC.as_bytes().starts_with(bytes);
        return Err(if cut_short { FormatError::Header } else { FormatError::NotUsage });
    }
    let head = bytes.get(..MAX_HEADER_BYTES).unwrap_or(bytes);
    let end = head.iter().position(|&b| b == b'\n').ok_or(FormatError::Header)?;
    let line = std::str::from_utf8(&head[..end]).map_err(|_| FormatError::Header)?;
    let mut words = line.split(' ');
    if words.next() != Some(MAGIC) {
        return Err(FormatError::Header);
    }
    let version = words.next().and_then(decimal).ok_or(FormatError::Header)?;
    let version = u32::try_from(version).map_err(|_| FormatError::Header)?;
    if !(OLDEST_VERSION..=FORMAT_VERSION).contains(&version) {
        return Err(FormatError::Version { found: version });
    }
    let (hash, length) = match (words.next(), words.next(), words.next()) {
        (Some(hash), Some(length), None) => (hash, length),
        _ => return Err(FormatError::Header),
    };
    let hash = hash.strip_prefix("blake3=").ok_or(FormatError::Header)?;
    let expected = length.strip_prefix("bytes=").and_then(decimal).ok_or(FormatError::Header)?;
    let body = &bytes[end + 1..];
    if body.len() as u64 != expected {
        return Err(FormatError::Length { expected, found: body.len() as u64 });
    }
    if blake3::hash(body).to_hex().as_str() != hash {
        return Err(FormatError::Checksum);
    }
    Ok((version, body))
}

/// A number in the only form that [`render`] writes: no sign, no leading zero.
fn decimal(text: &str) -> Option<u64> {
    let value: u64 = text.parse().ok()?;
    (value.to_string() == text).then_some(value)
}

/// Refuses what contradicts itself.
pub(super) fn check(ok: bool, what: &'static str) -> Result<(), FormatError> {
    if ok { Ok(()) } else { Err(FormatError::Inconsistent { what }) }
}

/// Rows of a shape's counts as one.
pub(super) fn flat<T: Copy>(
    shape: &RoutingShape,
    rows: &[Vec<T>],
    what: &'static str,
) -> Result<Vec<T>, FormatError> {
    let width = shape.n_experts as usize;
    // Without experts there are no rows: `render` has nothing to cut them from.
    let n_rows = if width == 0 { 0 } else { shape.layers.len() };
    check(rows.len() == n_rows && rows.iter().all(|row| row.len() == width), what)?;
    Ok(rows.concat())
}

/// Checks decayed counts.
pub(super) fn check_counts(counts: &[f64]) -> Result<(), FormatError> {
    let range = 0.0..=MAX_COUNT as f64;
    check(counts.iter().all(|count| range.contains(count)), "a count is below 0 or too large")
}

/// Checks whole tokens of a sample.
pub(super) fn check_sample(shape: &RoutingShape, experts: &[u16]) -> Result<(), FormatError> {
    check(
        experts.len().checked_rem(shape.accesses_per_token()).unwrap_or(experts.len()) == 0,
        "a sample segment does not hold whole tokens",
    )?;
    check(
        experts.iter().all(|&e| u32::from(e) < shape.n_experts || e == NO_ACCESS),
        "a sampled expert does not exist",
    )
}

/// Checks segments of sessions up to `n_sessions`; returns their accesses.
pub(super) fn check_segments(
    shape: &RoutingShape,
    segments: &[SegmentBody],
    n_sessions: u64,
) -> Result<usize, FormatError> {
    let (mut total, mut last) = (0usize, 0);
    for segment in segments {
        check(!segment.experts.is_empty(), "a sample segment is empty")?;
        check_sample(shape, &segment.experts)?;
        check(
            last < segment.session && segment.session <= n_sessions,
            "sample segments are not in the order of sessions",
        )?;
        last = segment.session;
        total = total.saturating_add(segment.experts.len());
    }
    Ok(total)
}

/// Checks what bounds every version.
pub(super) fn check_bounds(
    n_sample_accesses: usize,
    n_segments: usize,
    n_runs: usize,
) -> Result<(), FormatError> {
    check(n_sample_accesses <= MAX_SAMPLE_ACCESSES, "the sample is larger than its bound")?;
    check(n_segments <= MAX_SEGMENTS, "there are more sample segments than allowed")?;
    check(n_runs <= MAX_RUNS, "there are more runs than allowed")
}

fn history_of(body: Body) -> Result<History, FormatError> {
    let shape = RoutingShape {
        fingerprint: body.fingerprint,
        layers: body.layers,
        n_experts: body.n_experts,
        n_experts_active: body.n_experts_active,
    };
    let BaseBody { n_sessions, counts, segments, runs } = body.base;
    let counts = flat(&shape, &counts, "counts are not layers x experts")?;
    check_counts(&counts)?;
    check(n_sessions <= MAX_COUNT, "a number is too large")?;
    check(body.sessions.len() <= MAX_SESSIONS_APART, "there are more sessions than allowed")?;
    let mut n_accesses = check_segments(&shape, &segments, n_sessions)?;
    let (mut n_segments, mut n_runs) = (segments.len(), runs.len());
    let mut apart = std::collections::VecDeque::with_capacity(body.sessions.len());
    for session in body.sessions {
        let id = number(&session.id).map(SessionId);
        let Some(id) = id.filter(|&id| apart.iter().all(|kept: &Apart| kept.id != id)) else {
            return Err(FormatError::Inconsistent { what: "a session has no name of its own" });
        };
        let counts = flat(&shape, &session.counts, "a session's counts are not layers x experts")?;
        check(counts.iter().all(|&c| c <= MAX_COUNT), "a number is too large")?;
        check_sample(&shape, &session.sample)?;
        n_accesses = n_accesses.saturating_add(session.sample.len());
        n_segments += usize::from(!session.sample.is_empty());
        n_runs += usize::from(session.run.is_some());
        // Numbered when the history is put together.
        let segment = Segment { session: 0, experts: session.sample };
        apart.push_back(Apart { id, counts, segment, run: session.run });
    }
    check_bounds(n_accesses, n_segments, n_runs)?;
    let id = number(&body.history_id)
        .ok_or(FormatError::Inconsistent { what: "the history has no name" })?;
    let segments = segments.into_iter().map(SegmentBody::into_segment).collect();
    let base = Base { n_sessions, counts, segments, runs: runs.into() };
    Ok(History::of_parts(shape, id, base, apart))
}

impl SegmentBody {
    pub(super) fn into_segment(self) -> Segment {
        Segment { session: self.session, experts: self.experts }
    }
}
