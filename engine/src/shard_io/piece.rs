//! How the extents of an expert are cut into reads. Owns where a piece begins, in the file and in the slot,
//! and what of it is wanted; reads nothing.

use tierkeep_plans::budget::Reads;
use tierkeep_plans::catalogue::{DIRECT_ALIGN, Extent};
use tierkeep_plans::plan::IoMode;
use tierkeep_plans::units::round_up;

/// What one read brings of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) shard: u32,
    /// First byte in the file, and how many there is room for in the slot: whole blocks in direct reads.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Where it goes in the slot.
    pub(crate) place: u64,
    /// Bytes before the first that is wanted, and how many are.
    pub(crate) skip: u64,
    pub(crate) wanted: u64,
}

/// The pieces of an extent, ascending in file and slot and without gaps; cut at whole blocks of the file,
/// so that no page is asked for twice.
pub(crate) fn pieces(extent: &Extent, mode: IoMode, reads: Reads) -> impl Iterator<Item = Piece> {
    let extent = *extent;
    let (first, length) = match mode {
        IoMode::Direct => extent.aligned(),
        IoMode::Dropped | IoMode::Buffered => (extent.offset, extent.bytes),
    };
    let end = first.saturating_add(length);
    let wanted_end = extent.offset.saturating_add(extent.bytes);
    let from_block = wanted_end.saturating_sub(extent.offset - extent.offset % DIRECT_ALIGN);
    let step = round_up(from_block.div_ceil(reads.n_pieces(extent.bytes)), DIRECT_ALIGN);
    let mut start = first;
    std::iter::from_fn(move || {
        if start >= end {
            return None;
        }
        let cut = (start - start % DIRECT_ALIGN).saturating_add(step);
        // What would be left of blocks alone is not worth a read.
        let stop = if cut >= wanted_end { end } else { cut };
        let from = start.max(extent.offset);
        let piece = Piece {
            shard: extent.shard,
            offset: start,
            bytes: stop - start,
            place: extent.slab_offset + (start - first),
            skip: from - start,
            wanted: stop.min(wanted_end).saturating_sub(from),
        };
        start = stop;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierkeep_plans::units::Bytes;

    fn cut(offset: u64, bytes: u64, mode: IoMode, piece: Option<u64>) -> Vec<Piece> {
        let extent = Extent { shard: 3, offset, bytes, slab_offset: 8192 };
        let reads = Reads { depth: 4, bytes: piece.map(Bytes), begins_early: false };
        pieces(&extent, mode, reads).collect()
    }

    /// Every byte that is wanted is in one piece, in its place, for odd beginnings and sizes.
    #[test]
    fn pieces_are_the_extent() {
        for mode in [IoMode::Direct, IoMode::Dropped, IoMode::Buffered] {
            for piece in [None, Some(4096), Some(8192), Some(65_536)] {
                for (offset, bytes) in
                    [(0, 1), (5, 4096), (4095, 2), (8000, 100_000), (4096, 65_536)]
                {
                    let all = cut(offset, bytes, mode, piece);
                    let first = all[0].offset;
                    let (mut file, mut slot, mut wanted) = (first, 8192, offset);
                    for piece in &all {
                        assert_eq!((piece.shard, piece.offset, piece.place), (3, file, slot));
                        assert_eq!(piece.offset + piece.skip, wanted);
                        assert!(piece.wanted > 0 && piece.skip + piece.wanted <= piece.bytes);
                        (file, slot) = (file + piece.bytes, slot + piece.bytes);
                        wanted += piece.wanted;
                    }
                    assert_eq!(wanted, offset + bytes);
                    assert!(all[1..].iter().all(|p| p.offset.is_multiple_of(4096)));
                    if mode == IoMode::Direct {
                        assert!(first.is_multiple_of(4096) && file.is_multiple_of(4096));
                        assert!(all.iter().all(|p| p.place.is_multiple_of(4096)));
                    }
                    if piece.is_none() {
                        assert_eq!(all.len(), 1);
                    }
                }
            }
        }
        let sizes: Vec<u64> = cut(0, 3_500_000, IoMode::Direct, Some(1 << 20))
            .iter()
            .map(|piece| piece.bytes)
            .collect();
        assert_eq!(sizes, [1_167_360, 1_167_360, 1_167_360], "three of about a MiB");
    }
}
