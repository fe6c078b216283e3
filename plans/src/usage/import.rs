//! Usage counts as text lines of `layer expert count`, as other engines keep them. Owns that parser, and
//! its counterpart.

use serde::Serialize;

use super::history::History;
use super::session::RoutingShape;
use crate::units::LayerId;

/// Counts of another engine, by the model's own layer numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportedCounts {
    /// Width of a row.
    pub n_experts: u32,
    /// `(n_layers, n_experts)`, dense layers included and zero.
    pub counts: Vec<u64>,
}

impl ImportedCounts {
    /// The counts of a layer, empty where the layer is unknown.
    #[must_use]
    pub fn row(&self, layer: LayerId) -> &[u64] {
        let width = self.n_experts as usize;
        let start = (layer.0 as usize).saturating_mul(width);
        self.counts.get(start..start.saturating_add(width)).unwrap_or(&[])
    }

    /// What of it a history of this shape takes, and what it leaves out.
    #[must_use]
    pub fn taken(&self, shape: &RoutingShape) -> Taken {
        let mut taken = Taken::default();
        let n_layers = self.counts.len().checked_div(self.n_experts as usize).unwrap_or(0);
        for layer in (0..n_layers as u32).map(LayerId) {
            let row = self.row(layer);
            let accesses: u64 = row.iter().fold(0, |sum, &c| sum.saturating_add(c));
            if accesses == 0 {
                continue;
            }
            let experts = row.iter().filter(|&&count| count > 0).count() as u64;
            if shape.layers.contains(&layer) {
                taken.layers += 1;
                taken.experts += experts;
                taken.accesses = taken.accesses.saturating_add(accesses);
            } else {
                taken.left_out.push(LeftOut { layer, experts, accesses });
            }
        }
        taken
    }
}

/// What of imported counts belongs to layers that route to experts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Taken {
    /// Layers with counts.
    pub layers: u64,
    /// Experts with counts, summed over layers.
    pub experts: u64,
    /// The sum of the counts.
    pub accesses: u64,
    /// Layers that do not route to experts here: dense ones, and those of multi-token prediction.
    pub left_out: Vec<LeftOut>,
}

/// Counts of a layer that does not route to experts here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// The layer.
    pub layer: LayerId,
    /// Experts with counts.
    pub experts: u64,
    /// The sum of the counts.
    pub accesses: u64,
}

/// Why a text of counts was not imported. Lines are counted from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// Not three fields.
    #[error("line {line}: expected `layer expert count`, found {found} fields")]
    Fields {
        /// Where.
        line: usize,
        /// Fields on the line.
        found: usize,
    },
    /// Not a number.
    #[error("line {line}: {field} {text:?} is not a whole number from 0 to 2^64 - 1")]
    Number {
        /// Where.
        line: usize,
        /// `layer`, `expert` or `count`.
        field: &'static str,
        /// What stood there, its first characters.
        text: String,
    },
    /// A layer or an expert that the model does not have.
    #[error(
        "line {line}: {field} {found} does not exist, the model has {limit}; is this the history of another model?"
    )]
    OutOfRange {
        /// Where.
        line: usize,
        /// `layer` or `expert`.
        field: &'static str,
        /// The number found.
        found: u64,
        /// How many there are.
        limit: u32,
    },
}

/// Reads lines of `layer expert count`, numbers from 0. `#` starts a comment, blank lines are
/// allowed, repeated keys add up. `n_layers` counts every decoder layer, dense ones too, because
/// that is how the layers in such files are numbered.
///
/// # Errors
/// The first line that is not of this form or is outside the model.
pub fn import_counts(
    text: &str,
    n_layers: u32,
    n_experts: u32,
) -> Result<ImportedCounts, ImportError> {
    let width = n_experts as usize;
    let mut counts = vec![0u64; (n_layers as usize).saturating_mul(width)];
    // Editors of some systems begin a text with a mark of its encoding.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (index, content) in text.lines().enumerate() {
        let line = index + 1;
        let content = content.split('#').next().unwrap_or_default();
        let fields: Vec<&str> = content.split_whitespace().collect();
        let &[layer, expert, count] = fields.as_slice() else {
            if fields.is_empty() {
                continue;
            }
            return Err(ImportError::Fields { line, found: fields.len() });
        };
        let layer = index_below(line, "layer", layer, n_layers)?;
        let expert = index_below(line, "expert", expert, n_experts)?;
        let count = number(line, "count", count)?;
        let cell = &mut counts[layer * width + expert];
        *cell = cell.saturating_add(count);
    }
    Ok(ImportedCounts { n_experts, counts })
}

/// Decayed counts as such lines, rounded to whole numbers, those that round to 0 left out.
#[must_use]
pub fn render_counts(history: &History) -> String {
    let shape = history.shape();
    let mut text = "# layer expert count\n".to_owned();
    let width = (shape.n_experts as usize).max(1);
    for (layer, row) in shape.layers.iter().zip(history.counts().chunks(width)) {
        for (expert, count) in row.iter().map(|count| count.round() as u64).enumerate() {
            if count > 0 {
                text += &format!("{} {expert} {count}\n", layer.0);
            }
        }
    }
    text
}

fn number(line: usize, field: &'static str, text: &str) -> Result<u64, ImportError> {
    text.parse().map_err(|_| ImportError::Number {
        line,
        field,
        text: text.chars().take(40).collect(),
    })
}

fn index_below(
    line: usize,
    field: &'static str,
    text: &str,
    limit: u32,
) -> Result<usize, ImportError> {
    let found = number(line, field, text)?;
    if found >= u64::from(limit) {
        return Err(ImportError::OutOfRange { line, field, found, limit });
    }
    Ok(found as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_repeated_keys_add_up() {
        let text = "\u{feff}# layer expert count\n\n0 1 5\n 2\t3 7  # late\r\n0 1 6\n";
        let got = import_counts(text, 3, 4).unwrap();
        assert_eq!(got.row(LayerId(0)), [0, 11, 0, 0]);
        assert_eq!(got.row(LayerId(1)), [0; 4]);
        assert_eq!(got.row(LayerId(2)), [0, 0, 0, 7]);
        assert_eq!(got.row(LayerId(3)), [0u64; 0]);
    }

    #[test]
    fn a_bad_line_is_named() {
        let cases = [
            ("0 1\n", "line 1: expected `layer expert count`, found 2 fields"),
            ("#\n0 1 2 3\n", "line 2: expected `layer expert count`, found 4 fields"),
            ("0 1 2\n0 x 2\n", "line 2: expert \"x\" is not a whole number from 0 to 2^64 - 1"),
            ("0 1 -2\n", "line 1: count \"-2\" is not a whole number from 0 to 2^64 - 1"),
            (
                "3 1 2",
                "line 1: layer 3 does not exist, the model has 3; is this the history of another \
                 model?",
            ),
            (
                "\n\n0 4 2",
                "line 3: expert 4 does not exist, the model has 4; is this the history of another \
                 model?",
            ),
        ];
        for (text, message) in cases {
            assert_eq!(import_counts(text, 3, 4).unwrap_err().to_string(), message, "{text:?}");
        }
    }
}
