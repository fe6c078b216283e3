//! What every part of the forward pass computes with: kernels, threads, dense weights, angles.

use tierkeep_kernels::{Kernels, Pool, ops};

use crate::error::EngineError;
use crate::rope::Rope;
use crate::weights::{Bound, Weights};

/// Borrowed for one forward pass.
#[derive(Clone, Copy)]
pub(crate) struct Compute<'a> {
    pub(crate) kernels: Kernels,
    pub(crate) pool: &'a Pool,
    pub(crate) weights: &'a Weights,
    pub(crate) rope: &'a Rope,
}

/// The tokens that are in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    /// How many.
    pub(crate) len: usize,
    /// Position of the first.
    pub(crate) first: usize,
    /// Length of the sequence at the end of the call that this batch is part of.
    pub(crate) row_len: usize,
}

impl Batch {
    /// Positions that a token of the batch may see, its own included.
    pub(crate) fn visible(&self, token: usize) -> usize {
        self.first + token + 1
    }
}

impl Compute<'_> {
    /// `out (batch, rows) = w * x (batch, cols)`.
    pub(crate) fn product(
        &self,
        w: Bound,
        x: &[f32],
        batch: usize,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        self.pool.matmul(self.kernels, &self.weights.matrix(w)?, x, batch, out);
        Ok(())
    }

    /// Adds a bias, where there is one, to each row of `x`; `norm` receives its elements.
    pub(crate) fn add_bias(
        &self,
        bias: Option<Bound>,
        x: &mut [f32],
        norm: &mut [f32],
    ) -> Result<(), EngineError> {
        if let Some(bias) = bias {
            let bias = self.weights.vector(self.kernels, bias, norm)?;
            for row in x.chunks_exact_mut(bias.len()) {
                ops::add_scaled(row, 1.0, bias);
            }
        }
        Ok(())
    }

    /// RMS-normalises each row of `x` into the same row of `out`; `norm` receives the weights.
    pub(crate) fn rms_norm(
        &self,
        weight: Bound,
        eps: f32,
        x: &[f32],
        out: &mut [f32],
        norm: &mut [f32],
    ) -> Result<(), EngineError> {
        let weight = self.weights.vector(self.kernels, weight, norm)?;
        for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
            ops::rms_norm(x, weight, eps, out);
        }
        Ok(())
    }

    /// RMS-normalises the beginning of each row of `x`, as long as the weight, rows being `stride` long,
    /// in place.
    pub(crate) fn rms_norm_rows(
        &self,
        weight: Bound,
        eps: f32,
        x: &mut [f32],
        stride: usize,
        norm: &mut [f32],
    ) -> Result<(), EngineError> {
        let weight = self.weights.vector(self.kernels, weight, norm)?;
        for row in x.chunks_exact_mut(stride) {
            ops::rms_norm_in_place(&mut row[..weight.len()], weight, eps);
        }
        Ok(())
    }
}
