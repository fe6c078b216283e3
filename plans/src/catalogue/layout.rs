//! How a routed expert lies in its shards and in a slab of memory. Owns the merging of adjacent
//! tensors into single reads, and the slices of tensors that hold all experts of a layer.

use serde::{Deserialize, Serialize};

use super::{Projection, Span, StoredType, TENSOR_ALIGN};
use crate::units::round_up;

/// Pieces that one expert can have: three matrices and their scales, or two and their scales and
/// biases.
pub(super) const MAX_PIECES: usize = 6;

/// Reads past the page cache begin and end at multiples of this, in the file and in memory: devices ask
/// for 512 or 4096.
pub const DIRECT_ALIGN: u64 = 4096;

/// One read: a range of a shard and where it goes in the slab.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

impl Extent {
    /// The whole blocks of [`DIRECT_ALIGN`] that hold it, as (first byte, length); the last one may reach
    /// past the end of the file.
    #[must_use]
    pub fn aligned(&self) -> (u64, u64) {
        let start = self.offset - self.offset % DIRECT_ALIGN;
        let end = round_up(self.offset.saturating_add(self.bytes), DIRECT_ALIGN);
        (start, end.saturating_sub(start))
    }
}

/// One matrix of an expert, by its place in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedMatrix {
    /// How it is stored.
    pub stored: StoredType,
    /// Where its weights start in the slab.
    pub weight_offset: u64,
    /// Where its scales start in the slab; unused where the type has none.
    pub scales_offset: u64,
    /// Bytes of weights and scales.
    pub bytes: u64,
}

/// How the matrices of an expert are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertForm {
    /// Three matrices: gate and up `(expert_ff_size, hidden_size)`, down
    /// `(hidden_size, expert_ff_size)`.
    Separate,
    /// Gate and up are one matrix `(2 * expert_ff_size, hidden_size)`, gate in the even rows and up in
    /// the odd ones; down as in [`ExpertForm::Separate`].
    Interleaved,
    /// The same with rows and columns exchanged: gate and up `(hidden_size, 2 * expert_ff_size)`, down
    /// `(expert_ff_size, hidden_size)`.
    InterleavedTransposed,
}

/// Biases of an expert whose gate and up are one, by their places in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertBiases {
    /// How they are stored.
    pub stored: StoredType,
    /// `(2 * expert_ff_size)`, interleaved as the rows are.
    pub gate_up_offset: u64,
    /// `(hidden_size)`.
    pub down_offset: u64,
    /// Bytes of both.
    pub bytes: u64,
}

/// A routed expert: the reads that bring it, and its matrices in the slab that they fill.
///
/// Tensors that follow each other in a shard are one read: one for a whole expert where its
/// tensors are adjacent, as in our own containers and in most published ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertLayout {
    pub(super) extents: [Extent; MAX_PIECES],
    pub(super) n_extents: u8,
    /// How its matrices are told apart.
    pub form: ExpertForm,
    /// See [`ExpertForm`].
    pub gate: PlacedMatrix,
    /// See [`ExpertForm`]; the same as `gate` where both are one.
    pub up: PlacedMatrix,
    /// See [`ExpertForm`].
    pub down: PlacedMatrix,
    /// Its biases, where the family has them.
    pub biases: Option<ExpertBiases>,
    /// Memory that it needs, a multiple of [`TENSOR_ALIGN`].
    pub slab_bytes: u64,
}

impl ExpertLayout {
    /// The reads, in file order.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        self.extents.get(..usize::from(self.n_extents)).unwrap_or(&self.extents)
    }

    /// Bytes that a miss reads.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.extents().iter().map(|e| e.bytes).sum()
    }

    /// Memory that it needs where it is read in whole blocks, a multiple of [`DIRECT_ALIGN`].
    #[must_use]
    pub fn aligned_slab_bytes(&self) -> u64 {
        self.extents().iter().fold(0, |sum: u64, extent| sum.saturating_add(extent.aligned().1))
    }

    /// The same expert in a slab whose reads are whole blocks of [`DIRECT_ALIGN`]: each extent's
    /// `slab_offset` is where its first block goes, and the matrices are where the bytes come to lie.
    #[must_use]
    pub fn aligned(&self) -> Self {
        let mut aligned = *self;
        let mut end = 0_u64;
        for extent in aligned.extents.iter_mut().take(usize::from(self.n_extents)) {
            extent.slab_offset = end;
            end = end.saturating_add(extent.aligned().1);
        }
        let moved = |offset: u64| {
            let pairs = self.extents().iter().zip(aligned.extents());
            let of = |old: &Extent| {
                offset.checked_sub(old.slab_offset).filter(|inside| *inside < old.bytes)
            };
            // A place in no extent is one that is not used: scales of a type without any.
            pairs
                .filter_map(|(old, new)| {
                    let shift = new.offset - new.aligned().0;
                    Some(new.slab_offset + shift + of(old)?)
                })
                .next()
                .unwrap_or(0)
        };
        let matrix = |m: &PlacedMatrix| PlacedMatrix {
            weight_offset: moved(m.weight_offset),
            scales_offset: moved(m.scales_offset),
            ..*m
        };
        Self {
            gate: matrix(&self.gate),
            up: matrix(&self.up),
            down: matrix(&self.down),
            biases: self.biases.map(|b| ExpertBiases {
                gate_up_offset: moved(b.gate_up_offset),
                down_offset: moved(b.down_offset),
                ..b
            }),
            slab_bytes: end,
            ..aligned
        }
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

    /// Its weights as (stored type, how many, bytes).
    pub fn bytes_by_type(&self) -> impl Iterator<Item = (StoredType, u64, u64)> {
        let up = match self.form {
            ExpertForm::Separate => Some(self.up),
            ExpertForm::Interleaved | ExpertForm::InterleavedTransposed => None,
        };
        let matrices = [Some(self.gate), up, Some(self.down)];
        let biases = self.biases.map(|b| (b.stored, 2, b.bytes));
        matrices.into_iter().flatten().map(|m| (m.stored, 1, m.bytes)).chain(biases)
    }
}

/// A matrix of an expert as it is found: how it is stored, its weights and its scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundMatrix {
    pub(super) stored: StoredType,
    pub(super) weights: Span,
    pub(super) scales: Option<Span>,
}

impl FoundMatrix {
    fn bytes(&self) -> u64 {
        self.weights.bytes + self.scales.map_or(0, |s| s.bytes)
    }

    fn placed(&self, weight_offset: u64, scales_offset: u64) -> PlacedMatrix {
        PlacedMatrix { stored: self.stored, weight_offset, scales_offset, bytes: self.bytes() }
    }
}

/// Lays out an expert of three matrices: gate, up, down.
pub(super) fn separate([gate, up, down]: [FoundMatrix; 3]) -> ExpertLayout {
    let spans = [
        Some(gate.weights),
        gate.scales,
        Some(up.weights),
        up.scales,
        Some(down.weights),
        down.scales,
    ];
    let placed = place(spans);
    let at = placed.at;
    ExpertLayout {
        extents: placed.extents,
        n_extents: placed.n_extents,
        form: ExpertForm::Separate,
        gate: gate.placed(at[0], at[1]),
        up: up.placed(at[2], at[3]),
        down: down.placed(at[4], at[5]),
        biases: None,
        slab_bytes: placed.slab_bytes,
    }
}

/// Lays out an expert whose gate and up are one matrix. `biases` are those of gate and up, then of
/// down, with how they are stored.
pub(super) fn fused(
    form: ExpertForm,
    [gate_up, down]: [FoundMatrix; 2],
    biases: Option<(StoredType, [Span; 2])>,
) -> ExpertLayout {
    let bias = |index: usize| biases.map(|(_, spans)| spans[index]);
    let spans =
        [Some(gate_up.weights), gate_up.scales, bias(0), Some(down.weights), down.scales, bias(1)];
    let placed = place(spans);
    let at = placed.at;
    let both = gate_up.placed(at[0], at[1]);
    ExpertLayout {
        extents: placed.extents,
        n_extents: placed.n_extents,
        form,
        gate: both,
        up: both,
        down: down.placed(at[3], at[4]),
        biases: biases.map(|(stored, spans)| ExpertBiases {
            stored,
            gate_up_offset: at[2],
            down_offset: at[5],
            bytes: spans.iter().map(|s| s.bytes).sum(),
        }),
        slab_bytes: placed.slab_bytes,
    }
}

/// Where the pieces of an expert come to lie.
struct Placement {
    extents: [Extent; MAX_PIECES],
    n_extents: u8,
    /// Of each piece, where it starts in the slab; 0 where there is none.
    at: [u64; MAX_PIECES],
    slab_bytes: u64,
}

/// Puts pieces into a slab in file order: those that follow each other in a shard stay together, and
/// each run is aligned.
fn place(spans: [Option<Span>; MAX_PIECES]) -> Placement {
    let mut order = [0_usize, 1, 2, 3, 4, 5];
    // Absent pieces come first, and are passed over.
    order.sort_unstable_by_key(|&piece| spans[piece].map(|span| (span.shard, span.offset)));
    let mut placement = Placement {
        extents: [Extent::default(); MAX_PIECES],
        n_extents: 0,
        at: [0; MAX_PIECES],
        slab_bytes: 0,
    };
    let mut n_extents = 0_usize;
    for piece in order {
        let Some(span) = spans[piece] else { continue };
        let end = match n_extents.checked_sub(1).map(|last| &mut placement.extents[last]) {
            Some(last) if last.shard == span.shard && last.offset + last.bytes == span.offset => {
                placement.at[piece] = last.slab_offset + last.bytes;
                last.bytes += span.bytes;
                continue;
            }
            Some(last) => last.slab_offset + last.bytes,
            None => 0,
        };
        let slab_offset = round_up(end, TENSOR_ALIGN);
        placement.at[piece] = slab_offset;
        placement.extents[n_extents] =
            Extent { shard: span.shard, offset: span.offset, bytes: span.bytes, slab_offset };
        n_extents += 1;
    }
    placement.n_extents = n_extents as u8;
    placement.slab_bytes = n_extents
        .checked_sub(1)
        .map(|last| placement.extents[last])
        .map_or(0, |last| round_up(last.slab_offset + last.bytes, TENSOR_ALIGN));
    placement
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(shard: u32, offset: u64, bytes: u64) -> Span {
        Span { shard, offset, bytes }
    }

    fn matrix(stored: StoredType, weights: Span, scales: Option<Span>) -> FoundMatrix {
        FoundMatrix { stored, weights, scales }
    }

    #[test]
    fn adjacent_tensors_are_one_read() {
        let layout = separate([
            matrix(StoredType::Bf16, span(0, 140, 20), None),
            matrix(StoredType::Bf16, span(0, 160, 20), None),
            matrix(StoredType::Bf16, span(0, 100, 40), None),
        ]);
        assert_eq!(layout.extents().len(), 1);
        assert_eq!(layout.read_bytes(), 80);
        assert_eq!(layout.slab_bytes, 128);
        assert_eq!(
            (layout.down.weight_offset, layout.gate.weight_offset, layout.up.weight_offset),
            (0, 40, 60)
        );
    }

    /// An odd expert: two runs in one shard, one in another.
    fn odd() -> ExpertLayout {
        separate([
            matrix(StoredType::INT8, span(1, 8, 5000), Some(span(1, 5008, 40))),
            matrix(StoredType::INT8, span(1, 12_288, 100), None),
            matrix(StoredType::INT8, span(0, 4000, 100), None),
        ])
    }

    #[test]
    fn whole_blocks_bring_the_same_bytes_to_other_places() {
        let (layout, aligned) = (odd(), odd().aligned());
        let at: Vec<_> = aligned.extents().iter().map(|e| (e.aligned(), e.slab_offset)).collect();
        assert_eq!(at, [((0, 8192), 0), ((0, 8192), 8192), ((12_288, 4096), 16_384)]);
        assert_eq!((aligned.slab_bytes, layout.aligned_slab_bytes()), (20_480, 20_480));
        assert_eq!(aligned.down.weight_offset, 4000);
        assert_eq!((aligned.gate.weight_offset, aligned.gate.scales_offset), (8200, 8200 + 5000));
        assert_eq!(aligned.up.weight_offset, 16_384);
        assert_eq!((aligned.read_bytes(), layout.read_bytes()), (5240, 5240));
        let aligned = separate([
            matrix(StoredType::Bf16, span(0, 8192, 4096), None),
            matrix(StoredType::Bf16, span(0, 12_288, 4096), None),
            matrix(StoredType::Bf16, span(0, 4096, 4096), None),
        ]);
        assert_eq!(aligned.aligned(), aligned, "what is aligned already stays as it is");
    }

    #[test]
    fn an_expert_split_over_shards_takes_one_read_for_each_piece() {
        let layout = separate([
            matrix(StoredType::INT8, span(1, 8, 100), Some(span(1, 108, 40))),
            matrix(StoredType::INT8, span(1, 200, 100), None),
            matrix(StoredType::INT8, span(0, 900, 100), None),
        ]);
        let at: Vec<_> =
            layout.extents().iter().map(|e| (e.shard, e.bytes, e.slab_offset)).collect();
        assert_eq!(at, [(0, 100, 0), (1, 140, 128), (1, 100, 320)]);
        assert_eq!(layout.gate.scales_offset, 228);
        assert_eq!(layout.slab_bytes, 448);
        assert_eq!(layout.bytes_by_type().map(|(_, _, bytes)| bytes).sum::<u64>(), 340);
    }

    #[test]
    fn slices_of_fused_tensors_are_a_read_each_unless_they_touch() {
        let gate_up = matrix(StoredType::MxFp4, span(0, 1000, 64), Some(span(0, 400, 4)));
        let down = matrix(StoredType::MxFp4, span(0, 1064, 32), Some(span(0, 500, 2)));
        let biases = (StoredType::Bf16, [span(0, 10, 8), span(0, 40, 4)]);
        let layout = fused(ExpertForm::Interleaved, [gate_up, down], Some(biases));
        let at: Vec<_> = layout.extents().iter().map(|e| (e.offset, e.bytes)).collect();
        assert_eq!(at, [(10, 8), (40, 4), (400, 4), (500, 2), (1000, 96)]);
        assert_eq!((layout.down.weight_offset, layout.down.scales_offset), (4 * 64 + 64, 3 * 64));
        assert_eq!(layout.biases.map(|b| (b.gate_up_offset, b.down_offset)), Some((0, 64)));
        assert_eq!(layout.read_bytes(), 114);
        let by_type: Vec<_> = layout.bytes_by_type().collect();
        assert_eq!(
            by_type,
            [(StoredType::MxFp4, 1, 68), (StoredType::MxFp4, 1, 34), (StoredType::Bf16, 2, 12)]
        );
    }
}
