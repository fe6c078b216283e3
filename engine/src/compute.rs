//! What every part of the forward pass computes with: kernels, threads, dense weights, angles.

use tierkeep_kernels::{Kernels, MatmulJob, Pool, ops};

use crate::error::EngineError;
use crate::profile::Profile;
use crate::rope::Rope;
use crate::weights::{Bound, Weights};

/// Borrowed for one forward pass.
#[derive(Clone, Copy)]
pub(crate) struct Compute<'a> {
    pub(crate) kernels: Kernels,
    pub(crate) pool: &'a Pool,
    pub(crate) weights: &'a Weights,
    pub(crate) rope: &'a Rope,
    pub(crate) profile: &'a Profile,
}

/// Small operations over fewer elements are done by the calling thread: waking the others takes longer.
pub(crate) const SERIAL_ELEMENTS: usize = 16 << 10;

/// Calls `f(i, row)` for each row of `x`, side by side where there are enough elements.
pub(crate) fn each_row(
    pool: &Pool,
    x: &mut [f32],
    width: usize,
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    if x.len() < SERIAL_ELEMENTS {
        x.chunks_exact_mut(width).enumerate().for_each(|(i, row)| f(i, row));
    } else {
        pool.for_each_chunk(x, width, f);
    }
}

/// Adds `x` to `out`, rows of `width`.
pub(crate) fn add(pool: &Pool, out: &mut [f32], x: &[f32], width: usize) {
    each_row(pool, out, width, |i, row| {
        ops::add_scaled(row, 1.0, &x[i * width..(i + 1) * width]);
    });
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
        let w = self.weights.matrix(w)?;
        self.profile.touch_matrix(&w);
        self.pool.matmul(self.kernels, &w, x, batch, out);
        Ok(())
    }

    /// Several products of the same `x` at once, one after another in `out`.
    pub(crate) fn products<const N: usize>(
        &self,
        weights: [Bound; N],
        x: &[f32],
        batch: usize,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let mut jobs = [MatmulJob { w: self.weights.matrix(weights[0])?, x, batch }; N];
        for (job, bound) in jobs.iter_mut().zip(weights) {
            job.w = self.weights.matrix(bound)?;
            self.profile.touch_matrix(&job.w);
        }
        self.pool.matmul_many(self.kernels, &jobs, out);
        Ok(())
    }

    /// Adds a bias, where there is one, to each row of `x`; `norm` receives its elements.
    pub(crate) fn add_bias(
        &self,
        bias: Option<Bound>,
        x: &mut [f32],
        norm: &mut [f32],
    ) -> Result<(), EngineError> {
        let kernels = self.kernels;
        if let Some(bias) = bias {
            let bias = self.weights.vector(self.kernels, bias, norm)?;
            each_row(self.pool, x, bias.len(), |_, row| kernels.add_scaled(row, 1.0, bias));
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
        let (kernels, width) = (self.kernels, weight.len());
        each_row(self.pool, out, width, |i, out| {
            kernels.rms_norm(&x[i * width..(i + 1) * width], weight, eps, out);
        });
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
        let kernels = self.kernels;
        each_row(self.pool, x, stride, |_, row| {
            kernels.rms_norm_in_place(&mut row[..weight.len()], weight, eps);
        });
        Ok(())
    }
}
