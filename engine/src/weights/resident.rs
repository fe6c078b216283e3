//! Dense weights as copies: what goes into which buffer, and the reads that fill them.

use tierkeep_plans::budget::Line;
use tierkeep_plans::catalogue::{Span, TENSOR_ALIGN};
use tierkeep_plans::units::round_up;

use crate::error::EngineError;
use crate::memory::{Account, Buffer};
use crate::shard_io::{ReadFor, ShardFiles};

/// Buffers that are to be allocated and filled.
pub(super) struct Copies {
    /// Length of each buffer so far.
    lengths: Vec<u64>,
    /// What is to be read: buffer, place in it, place on disk.
    reads: Vec<(usize, usize, Span)>,
}

impl Copies {
    /// So many buffers, each empty.
    pub(super) fn new(n_buffers: usize) -> Self {
        Self { lengths: vec![0; n_buffers], reads: Vec::new() }
    }

    /// Makes room for a part of a weight in a buffer; returns where it begins.
    pub(super) fn add(&mut self, buffer: usize, span: Span) -> usize {
        let start = self.lengths[buffer];
        self.lengths[buffer] = round_up(start + span.bytes, TENSOR_ALIGN);
        self.reads.push((buffer, start as usize, span));
        start as usize
    }

    /// Bytes that are to be read.
    pub(super) fn bytes(&self) -> u64 {
        self.reads.iter().map(|(_, _, span)| span.bytes).sum()
    }

    /// Allocates the buffers and reads what was bound; `progress` of each read's bytes.
    pub(super) fn read(
        self,
        account: &mut Account,
        files: &ShardFiles,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<Buffer>, EngineError> {
        let mut buffers = self
            .lengths
            .iter()
            .map(|&bytes| account.buffer(Line::DenseWeights, bytes))
            .collect::<Result<Vec<_>, _>>()?;
        for (buffer, start, span) in self.reads {
            let into = &mut buffers[buffer].bytes_mut()[start..start + span.bytes as usize];
            files.read(ReadFor::Dense, span.shard, span.offset, into)?;
            progress(span.bytes);
        }
        Ok(buffers)
    }
}
