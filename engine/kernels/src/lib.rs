//! Products of stored weights with f32 activations, the small operations between them, and the
//! thread pool that runs them.
//!
//! Owns: the arithmetic and its order. Refuses: files, models, tensor names, memory budgets. It
//! never allocates after construction, never copies weights to f32 and never probes more of the
//! machine than its instruction sets.
//!
//! # The order of sums
//!
//! Results are equal bit for bit for every instruction set, thread count and batch width, because
//! the order of every sum is part of the interface:
//!
//! 1. A dot product keeps 32 lanes, all starting at +0. Lane `j` adds `w[i] * x[i]` for the `i`
//!    congruent to `j` modulo 32, in ascending `i`, multiplied and added separately (never fused).
//!    What is left when the length is no multiple of 32 goes to lanes 0, 1, ... likewise.
//! 2. The lanes are reduced in one tree: with `half` = 16, 8, 4, 2, 1 in turn, lane `j` becomes
//!    `lane[j] + lane[j + half]` for `j < half`. Lane 0 is the sum.
//! 3. For integers with one scale a row `w[i]` is the stored integer as f32; the sum is multiplied
//!    once by the row's scale.
//! 4. For integers with a scale for each group of a row, for e4m3 with a scale for each block, and for
//!    MXFP4, `w[i]` is the stored element as f32, which is exact, times the scale of its group, rounded to
//!    f32: what [`Kernels::decode_row`] gives. So such a matrix and an f32 matrix of the same values give
//!    the same bits.
//!
//! Scales of 16 and of 8 bits become f32 exactly, so that they give the bits of equal scales of 32. What
//! is not a number stays so; its payload is not promised.
//!
//! AVX2 holds the lanes in four registers, AVX-512 in two, scalar code in an array.

//!
//! # Fast arithmetic
//!
//! With [`Arithmetic::Fast`] a [`Pool`] multiplies packed integers with activations of 8 bits. A vector is cut
//! into groups of 64, each with `top / 127` for a scale, `top` being its largest magnitude, and
//! `round(x * (127 / top))`, ties to even, for elements. A row is cut into units of 64 elements, or of 32 where
//! its groups are of 32. The products of a unit are summed as integers, exactly; the sum times `(w * x)`, the
//! scales of its weights (1 where the row has one) and of its activations, is added to lane `unit % 4`, in
//! ascending order, nothing fused; the result is `(lane 0 + lane 2) + (lane 1 + lane 3)`, times the row's
//! scale where there is one. So these results are equal bit for bit as well, whatever the instruction set,
//! the threads and the batch. A group that holds what is not finite makes NaN of every sum that it is in.
//! All other types, and what [`Kernels`] computes without a pool, are as with [`Arithmetic::Exact`].

mod affinity;
mod arch;
mod convert;
mod element;
mod fast;
mod kernels;
mod matrix;
mod operations;
pub mod ops;
mod pool;
mod products;
mod quantised;
mod scale;
pub mod trial;

pub use affinity::{Held, hold_current_thread, release_current_thread};
pub use element::{BlockScale, ElementType, Group, Packed, PackedBits, ScaleType};
pub use kernels::{Arithmetic, Isa, IsaError, Kernels};
pub use matrix::{Matrix, MatrixError};
pub use pool::Pool;
pub use products::{MatmulJob, reserved_bytes};
pub use quantised::quantised_bytes;
pub use scale::ScaleSearch;

#[cfg(test)]
mod fast_tests;
