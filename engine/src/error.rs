//! What can go wrong in the engine.

use tierkeep_kernels::{IsaError, MatrixError};
use tierkeep_plans::budget::MAP_PAGE_BYTES;
use tierkeep_plans::plan::{Need, PlanError};

use crate::memory::MemoryError;
use crate::shard_io::ReadError;
use crate::support::Unsupported;

/// Why a plan cannot be executed. Each message names the thing and, where there is one, the remedy.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The plan does not belong to the model or contradicts itself.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The plan asks for what this engine cannot do.
    #[error("the plan asks for {need}, which this build's engine does not have yet: {remedy}")]
    Lacking {
        /// What is lacking.
        need: Need,
        /// How to plan without it.
        remedy: &'static str,
    },
    /// The model is planned and cannot be run by this build.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// Memory beyond the plan, or refused by the system.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A shard could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The plan asks for an instruction set that this machine lacks.
    #[error(
        "the plan asks for an instruction set that cannot be used: {0}; make it again with `tierkeep plan`"
    )]
    Isa(#[from] IsaError),
    /// The threads could not be started.
    #[error("the threads of the plan could not be started: {0}")]
    Threads(std::io::Error),
    /// A weight's bytes are not those of its shape; the catalogue should have seen this.
    #[error("a weight does not have the bytes of its shape: {0}")]
    Matrix(#[from] MatrixError),
    /// The catalogue lacks a tensor that the forward pass binds.
    #[error("tensor {tensor} is not in the catalogue")]
    Unbound {
        /// Its published name.
        tensor: String,
    },
    /// Pages of another size than plans count with.
    #[error(
        "the plan maps dense weights in pages of {MAP_PAGE_BYTES} bytes, this system's have {found}: plan with --dense resident"
    )]
    PageSize {
        /// The system's.
        found: u64,
    },
    /// A row of the head is larger than a buffer that dense weights are streamed through.
    #[error(
        "a row of the head needs {row_bytes} bytes, a stream buffer holds {buffer_bytes}: plan with a larger --ram"
    )]
    HeadRow {
        /// What a row needs.
        row_bytes: u64,
        /// What a buffer holds: the largest layer that is streamed.
        buffer_bytes: u64,
    },
    /// More was asked of the stream of dense weights than its pass has; a bug.
    #[error("the stream of dense weights ended before the pass did")]
    StreamEnded,
    /// A read of an expert that others compute under came to no end; a bug of ours or of the disk's code.
    #[error("the thread that was to read an expert did not bring it")]
    LaneEnded,
    /// More experts per token than this build is made for.
    #[error("the model routes a token to {found} experts, this build handles at most {cap}")]
    TooManyActive {
        /// What the config asks for.
        found: usize,
        /// The limit.
        cap: usize,
    },
    /// Weights, cache and buffers of different attention kinds; a bug.
    #[error("weights, cache and buffers are of different attention kinds")]
    MixedAttention,
    /// Logits that are not numbers.
    #[error(
        "the model's output is not a number: its weights are damaged or not what config.json says; check it with `tierkeep doctor MODEL`"
    )]
    NotANumber,
    /// The observer asked for it, between two batches.
    #[error("interrupted")]
    Interrupted,
    /// A batch that failed had entered a sliding window, which keeps no positions to go back to.
    #[error(
        "an earlier call failed after its tokens had entered a sliding window of this sequence: begin the sequence again"
    )]
    WindowLost,
    /// No tokens.
    #[error("there are no tokens to run: give a prompt")]
    Empty,
    /// A token id that the model does not have.
    #[error("token id {token} is not below the vocabulary's size of {vocab_size}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The sequence does not fit in the planned context.
    #[error(
        "the sequence needs {wanted} tokens of context, the plan has {context}: plan with --ctx {wanted}"
    )]
    ContextFull {
        /// Tokens needed.
        wanted: usize,
        /// Tokens planned.
        context: usize,
    },
}
