//! Version 1 of the usage file as bytes. Owns the schema, its checks and its errors; no file is
//! touched here. `docs/usage-format.md` describes it for people.

use serde::{Deserialize, Serialize};

use super::history::{History, MAX_COUNT, MAX_RUNS, MAX_SEGMENTS, Segment};
use super::session::{MAX_SAMPLE_ACCESSES, RoutingShape, RunRecord};
use crate::units::LayerId;

/// The version that this build writes and reads.
pub const FORMAT_VERSION: u32 = 1;

/// First word of every version's first line.
pub(super) const MAGIC: &str = "tierkeep-usage";

/// No history reaches this: 65,536 experts' counts and a full sample take less than a tenth of it.
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
    #[error("is of format version {found}, this build reads version {FORMAT_VERSION}")]
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
struct BodyV1 {
    fingerprint: String,
    layers: Vec<LayerId>,
    n_experts: u32,
    n_experts_active: u32,
    n_sessions: u64,
    counts: Vec<Vec<f64>>,
    newest_counts: Vec<Vec<u64>>,
    segments: Vec<SegmentV1>,
    runs: Vec<RunRecord>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SegmentV1 {
    session: u64,
    experts: Vec<u16>,
}

/// The history as the bytes of a version 1 file.
///
/// # Errors
/// Only if JSON cannot be written, which no history is known to cause.
pub fn render(history: &History) -> Result<Vec<u8>, FormatError> {
    let width = (history.shape.n_experts as usize).max(1);
    let body = BodyV1 {
        fingerprint: history.shape.fingerprint.clone(),
        layers: history.shape.layers.clone(),
        n_experts: history.shape.n_experts,
        n_experts_active: history.shape.n_experts_active,
        n_sessions: history.n_sessions,
        counts: history.counts.chunks(width).map(<[f64]>::to_vec).collect(),
        newest_counts: history.newest_counts.chunks(width).map(<[u64]>::to_vec).collect(),
        segments: history
            .segments
            .iter()
            .map(|s| SegmentV1 { session: s.session, experts: s.experts.clone() })
            .collect(),
        runs: history.runs.iter().cloned().collect(),
    };
    let mut json = serde_json::to_vec(&body)?;
    json.push(b'\n');
    let hash = blake3::hash(&json).to_hex();
    let mut bytes =
        format!("{MAGIC} {FORMAT_VERSION} blake3={hash} bytes={}\n", json.len()).into_bytes();
    bytes.extend_from_slice(&json);
    Ok(bytes)
}

/// Reads the bytes of a usage file of the model with this fingerprint.
///
/// # Errors
/// Whatever makes them unusable; nothing is repaired or guessed.
pub fn parse(bytes: &[u8], fingerprint: &str) -> Result<History, FormatError> {
    let json = checked_body(bytes)?;
    let body: BodyV1 = serde_json::from_slice(json)?;
    let history = history_of(body)?;
    if history.shape.fingerprint != fingerprint {
        return Err(FormatError::OtherModel {
            expected: fingerprint.to_owned(),
            found: history.shape.fingerprint,
        });
    }
    Ok(history)
}

/// The body, its length and checksum verified.
fn checked_body(bytes: &[u8]) -> Result<&[u8], FormatError> {
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
    if version != u64::from(FORMAT_VERSION) {
        let found = u32::try_from(version).map_err(|_| FormatError::Header)?;
        return Err(FormatError::Version { found });
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
    Ok(body)
}

/// A number in the only form that [`render`] writes: no sign, no leading zero.
fn decimal(text: &str) -> Option<u64> {
    let value: u64 = text.parse().ok()?;
    (value.to_string() == text).then_some(value)
}

fn history_of(body: BodyV1) -> Result<History, FormatError> {
    let check = |ok: bool, what: &'static str| {
        if ok { Ok(()) } else { Err(FormatError::Inconsistent { what }) }
    };
    let shape = RoutingShape {
        fingerprint: body.fingerprint,
        layers: body.layers,
        n_experts: body.n_experts,
        n_experts_active: body.n_experts_active,
    };
    let (n_layers, width) = (shape.layers.len(), shape.n_experts as usize);
    // Without experts there are no rows: `render` has nothing to cut them from.
    let n_rows = if width == 0 { 0 } else { n_layers };
    check(
        body.counts.len() == n_rows && body.counts.iter().all(|row| row.len() == width),
        "counts are not layers x experts",
    )?;
    check(
        body.newest_counts.len() == n_rows && body.newest_counts.iter().all(|r| r.len() == width),
        "newest counts are not layers x experts",
    )?;
    let counts = body.counts.concat();
    check(
        counts.iter().all(|c| (0.0..=MAX_COUNT as f64).contains(c)),
        "a count is below 0 or too large",
    )?;
    check(
        body.n_sessions <= MAX_COUNT
            && body.newest_counts.iter().flatten().all(|&c| c <= MAX_COUNT),
        "a number is too large",
    )?;
    let per_token = shape.accesses_per_token();
    let mut total = 0usize;
    let mut last_session = 0;
    for segment in &body.segments {
        total = total.saturating_add(segment.experts.len());
        check(!segment.experts.is_empty(), "a sample segment is empty")?;
        check(
            segment.experts.len().checked_rem(per_token) == Some(0),
            "a sample segment does not hold whole tokens",
        )?;
        check(
            segment.experts.iter().all(|&e| u32::from(e) < shape.n_experts),
            "a sampled expert does not exist",
        )?;
        check(
            last_session < segment.session && segment.session <= body.n_sessions,
            "sample segments are not in the order of sessions",
        )?;
        last_session = segment.session;
    }
    check(total <= MAX_SAMPLE_ACCESSES, "the sample is larger than its bound")?;
    check(body.segments.len() <= MAX_SEGMENTS, "there are more sample segments than allowed")?;
    check(body.runs.len() <= MAX_RUNS, "there are more runs than allowed")?;
    Ok(History {
        shape,
        n_sessions: body.n_sessions,
        counts,
        newest_counts: body.newest_counts.concat(),
        segments: body
            .segments
            .into_iter()
            .map(|s| Segment { session: s.session, experts: s.experts })
            .collect(),
        runs: body.runs.into(),
    })
}
