//! The products of routed experts, by the form that they are stored in. Owns the way from the states of
//! tokens to an expert's output; which experts, and what becomes of the outputs, is `feed_forward`'s.

use tierkeep_kernels::{MatmulJob, Matrix, ops};
use tierkeep_plans::catalogue::{ExpertForm, Projection};
use tierkeep_plans::spec::{Activation, ArchSpec};

use crate::compute::Compute;
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

/// What stands between gate and up; the result is left in `gate`.
pub(crate) fn activate(activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::SwiGlu => ops::silu_multiply(gate, up),
        Activation::ClampedSwiGlu { alpha, limit } => ops::clamped_swiglu(gate, up, alpha, limit),
    }
}

/// The same where gate and up alternate; the results move together to the front of `both`.
fn activate_pairs(activation: Activation, both: &mut [f32]) {
    for at in 0..both.len() / 2 {
        let (mut gate, up) = ([both[2 * at]], [both[2 * at + 1]]);
        activate(activation, &mut gate, &up);
        both[at] = gate[0];
    }
}

/// Fills `inner` `(experts, 2, m, expert_ff)`: the first half of each expert's part with
/// `activation(gate(x), up(x))` `(m, expert_ff)` of the same `x` `(m, hidden)`. `vector` receives biases.
pub(crate) fn inner(
    compute: Compute<'_>,
    spec: &ArchSpec,
    leased: Leased<'_>,
    (x, m): (&[f32], usize),
    inner: &mut [f32],
    vector: &mut [f32],
) -> Result<(), EngineError> {
    let ff_size = spec.expert_ff_size;
    let n = leased.leases.len();
    let gates = leased.matrices(Projection::Gate)?;
    match leased.form() {
        ExpertForm::Separate => {
            let ups = leased.matrices(Projection::Up)?;
            let mut jobs = [MatmulJob { w: gates[0], x, batch: m }; 2 * MAX_ACTIVE];
            for (pair, (gate, up)) in jobs.chunks_exact_mut(2).zip(gates.iter().zip(&ups)) {
                (pair[0].w, pair[1].w) = (*gate, *up);
            }
            compute.pool.matmul_many(compute.kernels, &jobs[..2 * n], inner);
            for part in inner.chunks_exact_mut(2 * m * ff_size) {
                let (gate, up) = part.split_at_mut(m * ff_size);
                activate(spec.activation, gate, up);
            }
            return Ok(());
        }
        ExpertForm::Interleaved => {
            let mut jobs = [MatmulJob { w: gates[0], x, batch: m }; MAX_ACTIVE];
            jobs.iter_mut().zip(&gates).for_each(|(job, gate)| job.w = *gate);
            compute.pool.matmul_many(compute.kernels, &jobs[..n], inner);
        }
        ExpertForm::InterleavedTransposed => {
            let width = 2 * ff_size;
            transposed(compute, &gates, (width, m), inner, |_, token| {
                &x[token * spec.hidden_size..(token + 1) * spec.hidden_size]
            });
        }
    }
    for (part, lease) in inner.chunks_exact_mut(2 * m * ff_size).zip(leased.leases) {
        if let Some([bias, _]) = leased.store.biases(lease)? {
            add(compute, &bias, part, vector);
        }
        activate_pairs(spec.activation, part);
    }
    Ok(())
}

/// Fills `output` `(experts, m, hidden)` from what [`inner()`] made. `vector` receives biases.
pub(crate) fn outputs(
    compute: Compute<'_>,
    spec: &ArchSpec,
    leased: Leased<'_>,
    (inner, m): (&[f32], usize),
    output: &mut [f32],
    vector: &mut [f32],
) -> Result<(), EngineError> {
    let (hidden, ff_size) = (spec.hidden_size, spec.expert_ff_size);
    let n = leased.leases.len();
    let of = |expert: usize| {
        let start = expert * 2 * m * ff_size;
        &inner[start..start + m * ff_size]
    };
    let downs = leased.matrices(Projection::Down)?;
    match leased.form() {
        ExpertForm::Separate | ExpertForm::Interleaved => {
            let mut jobs = [MatmulJob { w: downs[0], x: of(0), batch: m }; MAX_ACTIVE];
            for (at, (job, down)) in jobs.iter_mut().zip(&downs).take(n).enumerate() {
                (job.w, job.x) = (*down, of(at));
            }
            compute.pool.matmul_many(compute.kernels, &jobs[..n], output);
        }
        ExpertForm::InterleavedTransposed => {
            transposed(compute, &downs, (hidden, m), output, |expert, token| {
                &of(expert)[token * ff_size..(token + 1) * ff_size]
            });
        }
    }
    for (part, lease) in output.chunks_exact_mut(m * hidden).zip(leased.leases) {
        if let Some([_, bias]) = leased.store.biases(lease)? {
            add(compute, &bias, part, vector);
        }
    }
    Ok(())
}

/// `out (experts, m, width) = x * w` for matrices `(in, width)`: sums of weighted rows, rows ascending,
/// whatever the threads and the batch. One wake-up for all.
fn transposed<'x>(
    compute: Compute<'_>,
    matrices: &[Matrix<'_>],
    (width, m): (usize, usize),
    out: &mut [f32],
    x: impl Fn(usize, usize) -> &'x [f32] + Sync,
) {
    // The widest piece that rows of the output are a whole number of.
    let columns = (1..=COLUMNS.min(width)).rev().find(|&n| width.is_multiple_of(n)).unwrap_or(1);
    let per_row = width / columns;
    compute.pool.for_each_chunk(out, columns, |index, out| {
        let (row, first) = (index / per_row, index % per_row * columns);
        let (expert, token) = (row / m, row % m);
        out.fill(0.0);
        let columns = first..first + out.len();
        compute.kernels.accumulate_columns(&matrices[expert], columns, x(expert, token), out);
    });
}

/// Adds a bias to each row of `x`.
fn add(compute: Compute<'_>, bias: &Matrix<'_>, x: &mut [f32], vector: &mut [f32]) {
    let vector = &mut vector[..bias.cols()];
    compute.kernels.decode_row(bias, 0, vector);
    for row in x.chunks_exact_mut(vector.len()) {
        ops::add_scaled(row, 1.0, vector);
    }
}
