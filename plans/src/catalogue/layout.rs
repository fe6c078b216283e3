//! How a routed expert lies in its shards and in a slab of memory. Owns the merging of adjacent
//! tensors into single reads.

use super::{Part, Projection, Span, StoredType, TENSOR_ALIGN};
use crate::units::round_up;

/// Pieces that one expert can have: three matrices and their scales.
pub(super) const MAX_PIECES: usize = 6;

/// One read: a range of a shard and where it goes in the slab.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Index into the catalogue's shards.
    pub shard: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
    /// Where it starts in the slab, a multiple of [`TENSOR_ALIGN`].
    pub slab_offset: u64,
}

/// One matrix of an expert, by its place in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedMatrix {
    /// How it is stored.
    pub stored: StoredType,
    /// Where its weights start in the slab.
    pub weight_offset: u64,
    /// Where its row scales start in the slab; unused where the type has none.
    pub scales_offset: u64,
}

/// A routed expert: the reads that bring it, and its matrices in the slab that they fill.
///
/// Tensors that follow each other in a shard are one read: one for a whole expert where its
/// tensors are adjacent, as in our own containers and in most published ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertLayout {
    extents: [Extent; MAX_PIECES],
    n_extents: u8,
    /// `(expert_ff_size, hidden_size)`.
    pub gate: PlacedMatrix,
    /// `(expert_ff_size, hidden_size)`.
    pub up: PlacedMatrix,
    /// `(hidden_size, expert_ff_size)`.
    pub down: PlacedMatrix,
    /// Memory that it needs, a multiple of [`TENSOR_ALIGN`].
    pub slab_bytes: u64,
}

impl ExpertLayout {
    /// The reads, in file order.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents[..usize::from(self.n_extents)]
    }

    /// Bytes that a miss reads.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.extents().iter().map(|e| e.bytes).sum()
    }

    /// One of its matrices.
    #[must_use]
    pub fn matrix(&self, projection: Projection) -> &PlacedMatrix {
        match projection {
            Projection::Gate => &self.gate,
            Projection::Up => &self.up,
            Projection::Down => &self.down,
        }
    }
}

/// Pieces of one expert as they are found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ExpertPieces {
    pub(super) weights: [Option<(StoredType, Span)>; 3],
    pub(super) scales: [Option<Span>; 3],
}

/// The slot of a projection in [`ExpertPieces`].
pub(super) fn projection_index(projection: Projection) -> usize {
    match projection {
        Projection::Gate => 0,
        Projection::Up => 1,
        Projection::Down => 2,
    }
}

impl ExpertPieces {
    /// Lays the pieces out; `None` if a matrix is absent.
    pub(super) fn lay_out(&self) -> Option<ExpertLayout> {
        let mut pieces: [Option<(Span, usize, Part)>; MAX_PIECES] = [None; MAX_PIECES];
        let mut n_pieces = 0;
        for index in 0..3 {
            let weight = self.weights[index]?.1;
            pieces[n_pieces] = Some((weight, index, Part::Weight));
            n_pieces += 1;
            if let Some(scales) = self.scales[index] {
                pieces[n_pieces] = Some((scales, index, Part::RowScales));
                n_pieces += 1;
            }
        }
        let pieces = &mut pieces[..n_pieces];
        pieces.sort_by_key(|p| p.map(|(span, ..)| (span.shard, span.offset)));

        let mut extents = [Extent::default(); MAX_PIECES];
        let mut n_extents = 0_usize;
        let mut placed = [(0_u64, 0_u64); 3];
        for (span, index, part) in pieces.iter().flatten() {
            let continues = n_extents > 0 && {
                let last = extents[n_extents - 1];
                last.shard == span.shard && last.offset + last.bytes == span.offset
            };
            let at = if continues {
                let last = &mut extents[n_extents - 1];
                let at = last.slab_offset + last.bytes;
                last.bytes += span.bytes;
                at
            } else {
                let at = match n_extents {
                    0 => 0,
                    n => round_up(extents[n - 1].slab_offset + extents[n - 1].bytes, TENSOR_ALIGN),
                };
                extents[n_extents] = Extent {
                    shard: span.shard,
                    offset: span.offset,
                    bytes: span.bytes,
                    slab_offset: at,
                };
                n_extents += 1;
                at
            };
            match part {
                Part::Weight => placed[*index].0 = at,
                Part::RowScales => placed[*index].1 = at,
            }
        }
        let last = extents[n_extents - 1];
        let matrix = |index: usize| {
            self.weights[index].map(|(stored, _)| PlacedMatrix {
                stored,
                weight_offset: placed[index].0,
                scales_offset: placed[index].1,
            })
        };
        Some(ExpertLayout {
            extents,
            n_extents: n_extents as u8,
            gate: matrix(0)?,
            up: matrix(1)?,
            down: matrix(2)?,
            slab_bytes: round_up(last.slab_offset + last.bytes, TENSOR_ALIGN),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(shard: u32, offset: u64, bytes: u64) -> Span {
        Span { shard, offset, bytes }
    }

    #[test]
    fn adjacent_tensors_are_one_read() {
        let pieces = ExpertPieces {
            weights: [
                Some((StoredType::Bf16, span(0, 140, 20))),
                Some((StoredType::Bf16, span(0, 160, 20))),
                Some((StoredType::Bf16, span(0, 100, 40))),
            ],
            scales: [None; 3],
        };
        let layout = pieces.lay_out().unwrap();
        assert_eq!(layout.extents().len(), 1);
        assert_eq!(layout.read_bytes(), 80);
        assert_eq!(layout.slab_bytes, 128);
        assert_eq!(
            (layout.down.weight_offset, layout.gate.weight_offset, layout.up.weight_offset),
            (0, 40, 60)
        );
    }

    #[test]
    fn an_expert_split_over_shards_takes_one_read_for_each_piece() {
        let pieces = ExpertPieces {
            weights: [
                Some((StoredType::Int8, span(1, 8, 100))),
                Some((StoredType::Int8, span(1, 200, 100))),
                Some((StoredType::Int8, span(0, 900, 100))),
            ],
            scales: [Some(span(1, 108, 40)), None, None],
        };
        let layout = pieces.lay_out().unwrap();
        let at: Vec<_> =
            layout.extents().iter().map(|e| (e.shard, e.bytes, e.slab_offset)).collect();
        assert_eq!(at, [(0, 100, 0), (1, 140, 128), (1, 100, 320)]);
        assert_eq!(layout.gate.scales_offset, 228);
        assert_eq!(layout.slab_bytes, 448);
    }

    #[test]
    fn a_missing_matrix_is_seen() {
        assert!(ExpertPieces::default().lay_out().is_none());
    }
}
