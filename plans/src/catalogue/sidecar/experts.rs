//! Layouts of experts as a few patterns and a place for each expert, and back. Owns the check that a
//! pattern is one that `layout` makes: what is read from a file is believed no more than a header.

use super::super::layout::{
    self, ExpertBiases, ExpertForm, ExpertLayout, FoundMatrix, PlacedMatrix,
};
use super::super::stored::Scales;
use super::super::{Shard, Span, StoredType, roles};
use crate::spec::ArchSpec;

/// Patterns looked back at for one that was met before; those of a model repeat at once.
const LOOK_BACK: usize = 16;

/// A layout at the start of the first file, and where its first byte really is.
pub(super) struct Placed {
    pub(super) pattern: u32,
    pub(super) shard: u32,
    pub(super) offset: u64,
}

/// Takes layouts apart. Offsets in the first file of an expert become relative to its first byte.
pub(super) fn take_apart(experts: &[ExpertLayout]) -> (Vec<ExpertLayout>, Vec<Placed>) {
    let mut patterns: Vec<ExpertLayout> = Vec::new();
    let mut placed = Vec::with_capacity(experts.len());
    for expert in experts {
        let mut pattern = *expert;
        let first = pattern.extents[0];
        let n_extents = usize::from(pattern.n_extents).min(pattern.extents.len());
        for extent in &mut pattern.extents[..n_extents] {
            if extent.shard == first.shard {
                extent.offset = extent.offset.saturating_sub(first.offset);
            }
            extent.shard = extent.shard.saturating_sub(first.shard);
        }
        let from = patterns.len().saturating_sub(LOOK_BACK);
        let known = patterns[from..].iter().rposition(|known| *known == pattern);
        let at = known.map_or(patterns.len(), |at| from + at);
        if known.is_none() {
            patterns.push(pattern);
        }
        placed.push(Placed { pattern: at as u32, shard: first.shard, offset: first.offset });
    }
    (patterns, placed)
}

/// Puts one layout together again; `None` if it leaves its files.
pub(super) fn put_together(
    patterns: &[ExpertLayout],
    placed: &Placed,
    shards: &[Shard],
) -> Option<ExpertLayout> {
    let mut expert = *patterns.get(placed.pattern as usize)?;
    for extent in expert.extents.get_mut(..usize::from(expert.n_extents))? {
        if extent.shard == 0 {
            extent.offset = extent.offset.checked_add(placed.offset)?;
        }
        extent.shard = extent.shard.checked_add(placed.shard)?;
        let end = extent.offset.checked_add(extent.bytes)?;
        if end > shards.get(extent.shard as usize)?.bytes {
            return None;
        }
    }
    Some(expert)
}

/// Whether a pattern is what `layout` makes of an expert of this architecture. It is made again of the
/// pieces that it says it has, and must come out the same.
pub(super) fn is_sound(pattern: &ExpertLayout, spec: &ArchSpec) -> bool {
    let is_fused = match pattern.form {
        ExpertForm::Separate => false,
        ExpertForm::Interleaved | ExpertForm::InterleavedTransposed => true,
    };
    is_fused == roles::has_fused_experts(spec.family)
        && pattern.biases.is_some() == (is_fused && spec.expert_biases)
        && made_again(pattern, spec).is_some_and(|again| again == *pattern)
}

fn made_again(pattern: &ExpertLayout, spec: &ArchSpec) -> Option<ExpertLayout> {
    let (hidden, ff) = (spec.hidden_size as u64, spec.expert_ff_size as u64);
    let matrix = |placed: &PlacedMatrix, shape| found(pattern, placed, shape);
    match pattern.form {
        ExpertForm::Separate => Some(layout::separate([
            matrix(&pattern.gate, (ff, hidden))?,
            matrix(&pattern.up, (ff, hidden))?,
            matrix(&pattern.down, (hidden, ff))?,
        ])),
        ExpertForm::Interleaved | ExpertForm::InterleavedTransposed => {
            let (gate_up, down) = match pattern.form {
                ExpertForm::Separate | ExpertForm::Interleaved => ((2 * ff, hidden), (hidden, ff)),
                ExpertForm::InterleavedTransposed => ((hidden, 2 * ff), (ff, hidden)),
            };
            let matrices = [matrix(&pattern.gate, gate_up)?, matrix(&pattern.down, down)?];
            let biases = match &pattern.biases {
                Some(biases) => Some((biases.stored, bias_spans(pattern, biases, hidden, ff)?)),
                None => None,
            };
            Some(layout::fused(pattern.form, matrices, biases))
        }
    }
}

/// A matrix by its pieces; `None` if it has not the bytes of its shape.
fn found(
    pattern: &ExpertLayout,
    placed: &PlacedMatrix,
    (rows, cols): (u64, u64),
) -> Option<FoundMatrix> {
    let stored = placed.stored;
    let weights = piece(pattern, placed.weight_offset, weight_bytes(stored, rows, cols)?)?;
    let scales = match placed.bytes.checked_sub(weights.bytes)? {
        0 => None,
        bytes => Some(piece(pattern, placed.scales_offset, bytes)?),
    };
    let is_whole = has_scales(stored, (rows, cols), scales.map_or(0, |s| s.bytes));
    is_whole.then_some(FoundMatrix { stored, weights, scales })
}

fn bias_spans(
    pattern: &ExpertLayout,
    biases: &ExpertBiases,
    hidden: u64,
    ff: u64,
) -> Option<[Span; 2]> {
    Some([
        piece(pattern, biases.gate_up_offset, weight_bytes(biases.stored, 1, 2 * ff)?)?,
        piece(pattern, biases.down_offset, weight_bytes(biases.stored, 1, hidden)?)?,
    ])
}

/// Where bytes of the slab come from.
fn piece(pattern: &ExpertLayout, slab_offset: u64, bytes: u64) -> Option<Span> {
    pattern.extents().iter().find_map(|extent| {
        let into = slab_offset.checked_sub(extent.slab_offset)?;
        let fits = into.checked_add(bytes)? <= extent.bytes;
        let offset = extent.offset.checked_add(into)?;
        fits.then_some(Span { shard: extent.shard, offset, bytes })
    })
}

/// Bytes of a matrix without its scales.
pub(super) fn weight_bytes(stored: StoredType, rows: u64, cols: u64) -> Option<u64> {
    stored.row_bytes(cols).checked_mul(rows)
}

/// Whether so many bytes can be the scales of a matrix.
pub(super) fn has_scales(stored: StoredType, (rows, cols): (u64, u64), bytes: u64) -> bool {
    if let StoredType::Packed(packed) = stored {
        // A group that holds a whole row is a row to the catalogue.
        return packed == packed.for_cols(cols)
            && packed.row_scale_bytes(cols).checked_mul(rows) == Some(bytes);
    }
    match stored.scales() {
        Scales::None => bytes == 0,
        // A scale a row without a type of its own is no stored type.
        Scales::Row => false,
        Scales::Block { .. } => {
            let count = stored.scales().count(rows, cols);
            count > 0 && count.checked_mul(stored.scale_bytes()) == Some(bytes)
        }
    }
}
