//! The products of routed experts, by the form that they are stored in. Owns the way from the states of
//! tokens to an expert's output; which experts, and what becomes of the outputs, is `feed_forward`'s.

use std::ops::Range;

use tierkeep_kernels::{MatmulJob, Matrix, Pool, ops};
use tierkeep_plans::catalogue::{ExpertForm, Projection};
use tierkeep_plans::spec::{Activation, ArchSpec};

use crate::compute::{Compute, each_row};
use crate::error::EngineError;
use crate::feed_forward::MAX_ACTIVE;
use crate::store::{Lease, Store};

/// Columns of a transposed matrix that one task computes, at most.
const COLUMNS: usize = 128;

/// Experts of one layer, which have all one form, and where they are.
#[derive(Clone, Copy)]
pub(crate) struct Leased<'a> {
    pub(crate) store: &'a Store,
    pub(crate) leases: &'a [Lease],
}

impl<'a> Leased<'a> {
    /// The matrices of a projection; the first stands for those that there are not.
    fn matrices(&self, projection: Projection) -> Result<[Matrix<'a>; MAX_ACTIVE], EngineError> {
        let mut all = [self.store.matrix(&self.leases[0], projection)?; MAX_ACTIVE];
        for (matrix, lease) in all.iter_mut().zip(self.leases).skip(1) {
            *matrix = self.store.matrix(lease, projection)?;
        }
        Ok(all)
    }

    fn form(&self) -> ExpertForm {
        self.store.form(&self.leases[0])
    }
}

/// The rows of `x` that belong to each expert, and so its rows of what is computed.
#[derive(Clone, Copy)]
pub(crate) enum Tokens<'a> {
    /// One row, which all of them take; each has a row of the result.
    One(&'a [f32]),
    /// Rows one after another: those of expert `i` from `starts[i]` to `starts[i + 1]`, counted from
    /// `starts[0]`.
    Of(&'a [f32], &'a [u32]),
}

impl<'a> Tokens<'a> {
    /// Rows of the result that an expert has.
    fn rows(self, expert: usize) -> Range<usize> {
        match self {
            Tokens::One(_) => expert..expert + 1,
            Tokens::Of(_, starts) => {
                (starts[expert] - starts[0]) as usize..(starts[expert + 1] - starts[0]) as usize
            }
        }
    }

    /// The expert of a row of the result.
    fn expert(self, row: usize) -> usize {
        match self {
            Tokens::One(_) => row,
            Tokens::Of(_, starts) => {
                starts.partition_point(|&start| (start - starts[0]) as usize <= row) - 1
            }
        }
    }

    /// What an expert takes, `width` elements a row.
    fn x(self, expert: usize, width: usize) -> &'a [f32] {
        match self {
            Tokens::One(x) => x,
            Tokens::Of(x, _) => {
                let rows = self.rows(expert);
                &x[rows.start * width..rows.end * width]
            }
        }
    }

    /// What a row of the result is made of.
    fn row(self, row: usize, width: usize) -> &'a [f32] {
        match self {
            Tokens::One(x) => x,
            Tokens::Of(x, _) => &x[row * width..(row + 1) * width],
        }
    }
}

/// Elements of an activation that one task computes.
const ACTIVATED: usize = 1024;

/// What stands between gate and up; the result is left in `gate`.
pub(crate) fn activate(compute: Compute<'_>, activation: Activation, gate: &mut [f32], up: &[f32]) {
    let kernels = compute.kernels;
    let part = |gate: &mut [f32], up: &[f32]| match activation {
        Activation::SwiGlu => kernels.silu_multiply(gate, up),
        Activation::ClampedSwiGlu { alpha, limit } => {
            kernels.clamped_swiglu(gate, up, alpha, limit);
        }
    };
    if gate.len() < 2 * ACTIVATED {
        part(gate, up);
    } else {
        compute.pool.for_each_chunk(gate, ACTIVATED, |i, gate| {
            part(gate, &up[i * ACTIVATED..i * ACTIVATED + gate.len()]);
        });
    }
}

/// The same where gate and up alternate in each row of `2 ff_size`; the results move together to the front of
/// `both`.
fn activate_pairs(pool: &Pool, activation: Activation, ff_size: usize, both: &mut [f32]) {
    pool.for_each_chunk(both, 2 * ff_size, |_, row| {
        for at in 0..row.len() / 2 {
            let (mut gate, up) = ([row[2 * at]], [row[2 * at + 1]]);
            match activation {
                Activation::SwiGlu => ops::silu_multiply(&mut gate, &up),
                Activation::ClampedSwiGlu { alpha, limit } => {
                    ops::clamped_swiglu(&mut gate, &up, alpha, limit);
                }
            }
            row[at] = gate[0];
        }
    });
    for row in 1..both.len() / (2 * ff_size) {
        both.copy_within(2 * row * ff_size..(2 * row + 1) * ff_size, row * ff_size);
    }
}

/// Fills the first half of `inner` `(2, rows, expert_ff)` with `activation(gate(x), up(x))` `(rows, expert_ff)`,
/// expert after expert. `vector` receives biases.
pub(crate) fn inner(
    compute: Compute<'_>,
    spec: &ArchSpec,
    leased: Leased<'_>,
    tokens: Tokens<'_>,
    inner: &mut [f32],
    vector: &mut [f32],
) -> Result<(), EngineError> {
    let (hidden, ff_size) = (spec.hidden_size, spec.expert_ff_size);
    let n = leased.leases.len();
    let gates = leased.matrices(Projection::Gate)?;
    match leased.form() {
        ExpertForm::Separate => {
            let ups = leased.matrices(Projection::Up)?;
            let mut jobs = [MatmulJob { w: gates[0], x: &[], batch: 0 }; 2 * MAX_ACTIVE];
            for (at, job) in jobs.iter_mut().enumerate().take(2 * n) {
                let (expert, of) = if at < n { (at, &gates) } else { (at - n, &ups) };
                let x = tokens.x(expert, hidden);
                *job = MatmulJob { w: of[expert], x, batch: tokens.rows(expert).len() };
                compute.profile.touch_matrix(&job.w);
            }
            compute.pool.matmul_many(compute.kernels, &jobs[..2 * n], inner);
            let (gate, up) = inner.split_at_mut(inner.len() / 2);
            activate(compute, spec.activation, gate, up);
            return Ok(());
        }
        ExpertForm::Interleaved => {
            let mut jobs = [MatmulJob { w: gates[0], x: &[], batch: 0 }; MAX_ACTIVE];
            for (expert, job) in jobs.iter_mut().enumerate().take(n) {
                let x = tokens.x(expert, hidden);
                *job = MatmulJob { w: gates[expert], x, batch: tokens.rows(expert).len() };
                compute.profile.touch_matrix(&job.w);
            }
            compute.pool.matmul_many(compute.kernels, &jobs[..n], inner);
        }
        ExpertForm::InterleavedTransposed => {
            let x = |row: usize| (tokens.expert(row), tokens.row(row, hidden));
            gates.iter().take(n).for_each(|gate| compute.profile.touch_matrix(gate));
            transposed(compute, &gates, 2 * ff_size, inner, x);
        }
    }
    for (expert, lease) in leased.leases.iter().enumerate() {
        if let Some([bias, _]) = leased.store.biases(lease)? {
            let rows = tokens.rows(expert);
            let part = &mut inner[2 * ff_size * rows.start..2 * ff_size * rows.end];
            add(compute, &bias, part, vector);
        }
    }
    activate_pairs(compute.pool, spec.activation, ff_size, inner);
    Ok(())
}

/// Fills `output` `(rows, hidden)` from what [`inner()`] made. `vector` receives biases.
pub(crate) fn outputs(
    compute: Compute<'_>,
    spec: &ArchSpec,
    leased: Leased<'_>,
    (inner, tokens): (&[f32], Tokens<'_>),
    output: &mut [f32],
    vector: &mut [f32],
) -> Result<(), EngineError> {
    let (hidden, ff_size) = (spec.hidden_size, spec.expert_ff_size);
    let n = leased.leases.len();
    let downs = leased.matrices(Projection::Down)?;
    downs.iter().take(n).for_each(|down| compute.profile.touch_matrix(down));
    match leased.form() {
        ExpertForm::Separate | ExpertForm::Interleaved => {
            let mut jobs = [MatmulJob { w: downs[0], x: &[], batch: 0 }; MAX_ACTIVE];
            for (expert, job) in jobs.iter_mut().enumerate().take(n) {
                let rows = tokens.rows(expert);
                let x = &inner[rows.start * ff_size..rows.end * ff_size];
                *job = MatmulJob { w: downs[expert], x, batch: rows.len() };
            }
            compute.pool.matmul_many(compute.kernels, &jobs[..n], output);
        }
        ExpertForm::InterleavedTransposed => {
            let x = |row: usize| (tokens.expert(row), &inner[row * ff_size..(row + 1) * ff_size]);
            transposed(compute, &downs, hidden, output, x);
        }
    }
    for (expert, lease) in leased.leases.iter().enumerate() {
        if let Some([_, bias]) = leased.store.biases(lease)? {
            let rows = tokens.rows(expert);
            add(compute, &bias, &mut output[hidden * rows.start..hidden * rows.end], vector);
        }
    }
    Ok(())
}

/// `out (rows, width) = x * w` for matrices `(in, width)`, `x(row)` being the row's matrix and its input: sums of
/// weighted rows, rows ascending, whatever the threads and the batch. One wake-up for all.
fn transposed<'x>(
    compute: Compute<'_>,
    matrices: &[Matrix<'_>],
    width: usize,
    out: &mut [f32],
    x: impl Fn(usize) -> (usize, &'x [f32]) + Sync,
) {
    // The widest piece that rows of the output are a whole number of.
    let columns = (1..=COLUMNS.min(width)).rev().find(|&n| width.is_multiple_of(n)).unwrap_or(1);
    let per_row = width / columns;
    let kernels = compute.kernels;
    compute.pool.for_each_chunk(out, columns, |index, out| {
        let (row, first) = (index / per_row, index % per_row * columns);
        let (expert, x) = x(row);
        out.fill(0.0);
        let columns = first..first + out.len();
        kernels.accumulate_columns(&matrices[expert], columns, x, out);
    });
}

/// Adds a bias to each row of `x`.
fn add(compute: Compute<'_>, bias: &Matrix<'_>, x: &mut [f32], vector: &mut [f32]) {
    let vector = &mut vector[..bias.cols()];
    compute.kernels.decode_row(bias, 0, vector);
    let vector = &*vector;
    let kernels = compute.kernels;
    each_row(compute.pool, x, vector.len(), |_, row| {
        kernels.add_scaled(row, 1.0, vector);
    });
}
