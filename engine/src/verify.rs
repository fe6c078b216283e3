//! Verification against the reference's own answers: owns the reading of `oracle.json` and
//! `oracle.safetensors` in both of their forms, and the comparison.
//!
//! One form is a single case with a prompt, the best token after each of its positions, the greedy
//! continuation, and logits and layer outputs in `oracle.safetensors`. The other is a list of
//! `cases` with text, prompt and greedy continuation; its positions are those of the continuation.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tierkeep_plans::catalogue::header::{DType, HeaderError, read_header};

use crate::counters::Phase;
use crate::engine::{Engine, Observer, Unobserved};
use crate::error::EngineError;
use crate::generate::greedy;
use crate::shard_io::{ReadError, read_range};

/// Below this margin between the two best logits the order of float sums may decide.
pub const MARGIN: f32 = 1e-3;

/// Largest difference of logits allowed, as a share of the reference's largest absolute logit.
pub const LOGIT_TOLERANCE: f32 = 2e-4;

/// Why there is nothing to verify against.
#[derive(Debug, thiserror::Error)]
pub enum OracleError {
    /// No oracle.json.
    #[error("{} cannot be read: {source}; verify needs the reference's answers beside the model", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not an oracle.
    #[error("{} is not an oracle: {reason}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A damaged tensor file.
    #[error("{} {source}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: HeaderError,
    },
    /// Its data cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// One prompt and what the reference makes of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OracleCase {
    /// Text of the prompt, where the oracle has it.
    pub text: Option<String>,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Best token after each position of the prompt, and its margin.
    pub teacher_forcing: Vec<(u32, f32)>,
    /// Greedy continuation, and each token's margin.
    pub greedy: Vec<(u32, f32)>,
    /// Logits `(prompt, vocab)`, empty where the oracle has none.
    pub logits: Vec<f32>,
    /// Output of each decoder layer `(prompt, hidden)`, empty where the oracle has none.
    pub layers: Vec<Vec<f32>>,
}

#[derive(Deserialize)]
struct RawCase {
    text: Option<String>,
    prompt: Vec<u32>,
    #[serde(default)]
    teacher_forcing_argmax: Vec<u32>,
    #[serde(default)]
    teacher_forcing_margin: Vec<f32>,
    greedy: Vec<u32>,
    greedy_margin: Vec<f32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawOracle {
    Cases { cases: Vec<RawCase> },
    One(RawCase),
}

/// Reads the oracle beside a model.
///
/// # Errors
/// [`OracleError`], naming the file.
pub fn read_oracle(directory: &Path) -> Result<Vec<OracleCase>, OracleError> {
    let path = directory.join("oracle.json");
    let bytes = fs::read(&path).map_err(|source| OracleError::Io { path: path.clone(), source })?;
    let parse = |reason: String| OracleError::Parse { path: path.clone(), reason };
    let raw: RawOracle = serde_json::from_slice(&bytes).map_err(|e| parse(e.to_string()))?;
    let raw = match raw {
        RawOracle::Cases { cases } => cases,
        RawOracle::One(case) => vec![case],
    };
    let mut cases = Vec::with_capacity(raw.len());
    for case in raw {
        let positions = case.teacher_forcing_argmax.len();
        let whole = case.greedy.len() == case.greedy_margin.len()
            && positions == case.teacher_forcing_margin.len()
            && (positions == 0 || positions == case.prompt.len())
            && !case.prompt.is_empty()
            && !case.greedy.is_empty();
        if !whole {
            return Err(parse("a case's lists do not have the same lengths".to_owned()));
        }
        cases.push(OracleCase {
            text: case.text,
            prompt: case.prompt,
            teacher_forcing: zip(case.teacher_forcing_argmax, case.teacher_forcing_margin),
            greedy: zip(case.greedy, case.greedy_margin),
            ..OracleCase::default()
        });
    }
    if cases.is_empty() {
        return Err(parse("it has no cases".to_owned()));
    }
    if let [case] = cases.as_mut_slice() {
        read_tensors(&directory.join("oracle.safetensors"), case)?;
    }
    Ok(cases)
}

fn zip(tokens: Vec<u32>, margins: Vec<f32>) -> Vec<(u32, f32)> {
    tokens.into_iter().zip(margins).collect()
}

/// Adds logits and layer outputs, where the file exists.
fn read_tensors(path: &Path, case: &mut OracleCase) -> Result<(), OracleError> {
    if !path.exists() {
        return Ok(());
    }
    let header = read_header(path)
        .map_err(|source| OracleError::Header { path: path.to_owned(), source })?;
    let read = |name: &str| -> Result<Option<Vec<f32>>, OracleError> {
        let Some(tensor) = header.tensors().find(|t| t.name == name) else { return Ok(None) };
        let rows = tensor.shape.first().copied();
        if tensor.dtype != DType::F32 || rows != Some(case.prompt.len() as u64) {
            return Err(OracleError::Parse {
                path: path.to_owned(),
                reason: format!("{name} is not F32 with one row for each prompt token"),
            });
        }
        let bytes = read_range(path, header.data_start + tensor.start, tensor.end - tensor.start)?;
        let floats = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Ok(Some(floats))
    };
    let logits = read("logits")?.unwrap_or_default();
    let mut layers = Vec::new();
    while let Some(layer) = read(&format!("layer.{}", layers.len()))? {
        layers.push(layer);
    }
    case.logits = logits;
    case.layers = layers;
    Ok(())
}

/// How one case compares.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CaseReport {
    /// Teacher-forced positions whose margin is above [`MARGIN`].
    pub positions: usize,
    /// How many of them have the reference's best token.
    pub positions_equal: usize,
    /// Positions at or under the margin.
    pub positions_under_margin: usize,
    /// How many of those are equal.
    pub under_margin_equal: usize,
    /// Greedy tokens of the reference.
    pub greedy: usize,
    /// How many were generated alike, from the first on.
    pub greedy_equal: usize,
    /// What was generated.
    pub generated: Vec<u32>,
    /// Greedy tokens equal when the cache is kept from token to token, as a run does. Differs from
    /// `greedy_equal` only where `selection_ties` is not 0.
    pub streamed_equal: usize,
    /// Selections of the sparse indexer that a tie decided. The reference breaks ties by the length
    /// of the sequence and computes it anew for every token; where there are any, so does
    /// `greedy_equal`.
    pub selection_ties: u64,
    /// Largest difference of a logit, as a share of the largest absolute logit; `None` where the
    /// oracle has no logits.
    pub logit_difference: Option<f32>,
    /// For each layer the largest difference of its output, as a share of its largest absolute
    /// value; empty where not asked for or not in the oracle.
    pub layer_differences: Vec<f32>,
}

impl CaseReport {
    /// Whether everything holds.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.positions_equal == self.positions
            && self.greedy_equal == self.greedy
            && self.logit_difference.is_none_or(|d| d <= LOGIT_TOLERANCE)
    }
}

/// Watches a prompt and keeps what is compared.
struct Watcher<'a> {
    case: &'a OracleCase,
    hidden_size: usize,
    best: Vec<u32>,
    largest_difference: f32,
    layer_differences: Vec<f32>,
    error: Option<EngineError>,
}

impl Observer for Watcher<'_> {
    fn layer(&mut self, layer: usize, first: usize, states: &[f32]) -> ControlFlow<()> {
        let Some(difference) = self.layer_differences.get_mut(layer) else {
            return ControlFlow::Continue(());
        };
        let start = first * self.hidden_size;
        if let Some(expected) = self.case.layers[layer].get(start..start + states.len()) {
            *difference = difference.max(largest_difference(states, expected));
        }
        ControlFlow::Continue(())
    }

    fn wants_all_logits(&self) -> bool {
        true
    }

    fn logits(&mut self, position: usize, logits: &[f32]) {
        match greedy(logits) {
            Ok(token) => self.best.push(token),
            Err(error) => self.error = Some(error),
        }
        let start = position * logits.len();
        if let Some(expected) = self.case.logits.get(start..start + logits.len()) {
            self.largest_difference =
                self.largest_difference.max(largest_difference(logits, expected));
        }
    }
}

/// Largest absolute difference; infinite where either is not a number.
fn largest_difference(found: &[f32], expected: &[f32]) -> f32 {
    let difference = |(a, b): (&f32, &f32)| (a - b).abs();
    let worse = |worst: f32, d: f32| if d.is_nan() { f32::INFINITY } else { worst.max(d) };
    found.iter().zip(expected).map(difference).fold(0.0, worse)
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(f32::MIN_POSITIVE, |a, b| a.max(b.abs()))
}

/// Runs one case: its prompt (and, where the oracle has no teacher forcing, its continuation) with
/// the reference's tokens, then its prompt again with the engine's own.
///
/// # Errors
/// [`EngineError`].
pub fn verify_case(
    engine: &mut Engine,
    case: &OracleCase,
    with_layers: bool,
) -> Result<CaseReport, EngineError> {
    let mut tokens = case.prompt.clone();
    let (expected, first) = if case.teacher_forcing.is_empty() {
        let continued = case.greedy[..case.greedy.len() - 1].iter().map(|(token, _)| *token);
        tokens.extend(continued);
        (&case.greedy, case.prompt.len() - 1)
    } else {
        (&case.teacher_forcing, 0)
    };
    let layers = if with_layers { case.layers.len() } else { 0 };
    let mut watcher = Watcher {
        case,
        hidden_size: engine.spec().hidden_size,
        best: Vec::with_capacity(tokens.len()),
        largest_difference: 0.0,
        layer_differences: vec![0.0; layers],
        error: None,
    };
    engine.clear();
    engine.run(&tokens, Phase::Prefill, &mut watcher)?;
    if let Some(error) = watcher.error {
        return Err(error);
    }
    let mut report = CaseReport { greedy: case.greedy.len(), ..CaseReport::default() };
    for ((token, margin), found) in expected.iter().zip(&watcher.best[first..]) {
        let (all, equal) = if *margin > MARGIN {
            (&mut report.positions, &mut report.positions_equal)
        } else {
            (&mut report.positions_under_margin, &mut report.under_margin_equal)
        };
        *all += 1;
        *equal += usize::from(token == found);
    }
    if !case.logits.is_empty() {
        report.logit_difference = Some(watcher.largest_difference / largest(&case.logits));
    }
    report.layer_differences = watcher
        .layer_differences
        .iter()
        .zip(&case.layers)
        .map(|(difference, layer)| difference / largest(layer))
        .collect();
    let ties_before = engine.selection_ties();
    let equal = |generated: &[u32]| {
        generated.iter().zip(&case.greedy).take_while(|(a, (b, _))| *a == b).count()
    };
    report.generated = continuation(engine, case, false)?;
    report.streamed_equal = equal(&report.generated);
    report.selection_ties = engine.selection_ties() - ties_before;
    if report.selection_ties > 0 {
        report.generated = continuation(engine, case, true)?;
    }
    report.greedy_equal = equal(&report.generated);
    Ok(report)
}

/// Greedy tokens after a case's prompt, stop tokens not heeded. With `anew` the whole sequence is
/// run again for every token, as the reference does; otherwise the cache is kept.
fn continuation(
    engine: &mut Engine,
    case: &OracleCase,
    anew: bool,
) -> Result<Vec<u32>, EngineError> {
    engine.clear();
    engine.run(&case.prompt, Phase::Prefill, &mut Unobserved)?;
    let mut tokens = case.prompt.clone();
    loop {
        let token = greedy(engine.logits())?;
        tokens.push(token);
        if tokens.len() == case.prompt.len() + case.greedy.len() {
            return Ok(tokens.split_off(case.prompt.len()));
        }
        if anew {
            engine.clear();
            engine.run(&tokens, Phase::Prefill, &mut Unobserved)?;
        } else {
            engine.run(&[token], Phase::Decode, &mut Unobserved)?;
        }
    }
}
