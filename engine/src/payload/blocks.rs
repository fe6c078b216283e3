//! What is read in one piece: stored ranges of files cut into blocks of at most one buffer, in file
//! order, so that a disk with moving parts moves them little.

/// A range of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Position of the file in the list.
    pub(super) file: usize,
    /// First byte.
    pub(super) offset: u64,
    /// Length.
    pub(super) bytes: u64,
}

impl Block {
    /// The first `at` bytes, and the rest.
    pub(super) fn split(self, at: u64) -> (Self, Self) {
        let at = at.min(self.bytes);
        let second = Self { file: self.file, offset: self.offset + at, bytes: self.bytes - at };
        (Self { bytes: at, ..self }, second)
    }
}

/// Blocks of at most `most` bytes; borders inside a range lie on multiples of `most`, which direct
/// reads ask for.
pub(super) fn blocks(stored: &[Vec<(u64, u64)>], most: u64) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (file, ranges) in stored.iter().enumerate() {
        for &(start, end) in ranges {
            let mut offset = start;
            while offset < end {
                let border = (offset / most + 1).saturating_mul(most);
                let bytes = border.min(end) - offset;
                blocks.push(Block { file, offset, bytes });
                offset += bytes;
            }
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_every_stored_byte_once() {
        let stored = vec![vec![(0, 10), (25, 26), (28, 61)], vec![], vec![(0, 20)]];
        let blocks = blocks(&stored, 20);
        let ranges: Vec<(usize, u64, u64)> =
            blocks.iter().map(|b| (b.file, b.offset, b.offset + b.bytes)).collect();
        let expected = [(0, 0, 10), (0, 25, 26), (0, 28, 40), (0, 40, 60), (0, 60, 61), (2, 0, 20)];
        assert_eq!(ranges, expected);
    }

    #[test]
    fn a_split_loses_nothing() {
        let block = Block { file: 1, offset: 100, bytes: 30 };
        for at in [0, 1, 29, 30, 99] {
            let (first, second) = block.split(at);
            assert_eq!((first.offset, first.bytes + second.bytes), (100, 30));
            assert_eq!(second.offset, first.offset + first.bytes);
        }
    }
}
