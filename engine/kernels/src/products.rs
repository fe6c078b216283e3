//! Products that the threads of a pool compute together.
//!
//! Owns: which thread computes which rows, and the quantised activations of one call. Refuses: arithmetic,
//! waking and waiting.
#![expect(unsafe_code, reason = "threads write disjoint parts of results and of scratch")]

use std::{
    ops::Range,
    sync::{
        TryLockError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use crate::{
    Kernels, Matrix, Pool,
    element::ElementType,
    fast::{PANEL_ROWS, panel_scratch},
    pool::Disjoint,
    quantised::{Batch, Form},
};

/// Products of fewer weight bytes times columns run on the calling thread: waking the others
/// would take longer.
const SERIAL_COST: usize = 32 << 10;

/// Bounds of the weight bytes times columns that a worker takes at once.
const BLOCK_COST: Range<usize> = 16 << 10..1 << 20;

/// Blocks for each worker, so that one slowed by other processes does not hold up the rest.
const BLOCKS_PER_WORKER: usize = 8;

/// The most products that share a wake-up.
const MAX_JOBS: usize = 128;

/// Elements that are quantised on the calling thread: more are worth a wake-up.
const SERIAL_ELEMENTS: usize = 32 << 10;

/// Makes one vector of two, element by element, and leaves it in the first.
type Activation<'a> = &'a (dyn Fn(&mut [f32], &[f32]) + Sync);

/// Some products of one call of [`Pool::matmul_many`].
#[derive(Clone, Copy, Debug)]
pub struct MatmulJob<'a> {
    /// The weights, `(rows, cols)`.
    pub w: Matrix<'a>,
    /// The vectors, `(batch, cols)`.
    pub x: &'a [f32],
    /// Number of vectors.
    pub batch: usize,
}

impl MatmulJob<'_> {
    /// Length of the result, `(batch, rows)`.
    #[must_use]
    pub const fn out_len(&self) -> usize {
        self.batch * self.w.rows()
    }

    /// Weight bytes times columns.
    fn cost(&self) -> usize {
        self.w.row_bytes() * self.w.rows() * self.batch
    }

    /// Rows that make about `cost`.
    fn rows_per_block(&self, cost: usize) -> usize {
        let row = (self.w.row_bytes() * self.batch).max(1);
        (cost / row).max(1).next_multiple_of(if self.batch == 1 { 4 } else { PANEL_ROWS })
    }

    /// Whether both multiply the same vectors.
    fn has_vectors_of(&self, other: &Self) -> bool {
        std::ptr::eq(self.x, other.x) && self.batch == other.batch
    }
}

/// Bytes that begin at a line of a cache; they grow when a call needs more than there are.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Vec<u8>);

impl Scratch {
    const LINE: usize = 64;

    fn of(&mut self, len: usize) -> &mut [u8] {
        let needed = len + Self::LINE;
        if self.0.len() < needed {
            self.0.reserve_exact(needed - self.0.len());
            self.0.resize(needed, 0);
        }
        // Never fails for bytes, whatever it is allowed to do.
        let before = self.0.as_ptr().align_offset(Self::LINE).min(Self::LINE);
        &mut self.0[before..before + len]
    }
}

/// Bytes that [`Pool::reserve`] takes.
#[must_use]
pub const fn reserved_bytes(threads: usize, vectors: usize, cols: usize) -> usize {
    vectors + threads * panel_scratch(cols) + Scratch::LINE
}

/// Where each job's quantised vectors begin, in bytes of scratch.
struct Quantised {
    starts: [usize; MAX_JOBS],
    /// Which are the first to use their vectors, and how these are quantised.
    first: [Option<Form>; MAX_JOBS],
    len: usize,
    elements: usize,
    /// Bytes of scratch that each worker has besides.
    panel: usize,
}

impl Quantised {
    fn of(kernels: Kernels, jobs: &[MatmulJob<'_>]) -> Self {
        let mut all =
            Self { starts: [0; MAX_JOBS], first: [None; MAX_JOBS], len: 0, elements: 0, panel: 0 };
        for (index, job) in jobs.iter().enumerate() {
            let Some(form) = kernels.form(job.w.element()) else { continue };
            all.panel = all.panel.max(kernels.panel_scratch(&job.w, job.batch));
            let is_same = |other: &MatmulJob<'_>| {
                job.has_vectors_of(other) && kernels.form(other.w.element()) == Some(form)
            };
            match jobs[..index].iter().position(is_same) {
                Some(earlier) => all.starts[index] = all.starts[earlier],
                None => {
                    all.starts[index] = all.len;
                    all.first[index] = Some(form);
                    all.len += job.batch * form.column_bytes(job.w.cols());
                    all.elements += job.x.len();
                }
            }
        }
        all
    }
}

impl Pool {
    /// Takes the memory that products with quantised activations need, so that none is allocated later:
    /// for calls whose distinct vectors take at most `vectors` bytes, [`crate::quantised_bytes`] each, and
    /// whose matrices have at most `cols` columns. Takes [`reserved_bytes`]. A call that needs more than was
    /// reserved allocates.
    pub fn reserve(&self, vectors: usize, cols: usize) {
        if let Ok(mut scratch) = self.scratch.lock() {
            scratch.of(vectors + self.threads() * panel_scratch(cols));
        }
    }

    /// `out = w * x` for each of `batch` vectors: `x` is `(batch, cols)`, `out` is `(batch, rows)`.
    ///
    /// Rows are split over the workers; small products run on the calling thread.
    ///
    /// # Panics
    ///
    /// When lengths do not agree.
    pub fn matmul(
        &self,
        kernels: Kernels,
        w: &Matrix<'_>,
        x: &[f32],
        batch: usize,
        out: &mut [f32],
    ) {
        self.matmul_many(kernels, &[MatmulJob { w: *w, x, batch }], out);
    }

    /// Several products under one wake-up, such as gate and up of all active experts.
    ///
    /// `out` holds the results one after another in the order of `jobs`, each `(batch, rows)`.
    ///
    /// # Panics
    ///
    /// When lengths do not agree.
    pub fn matmul_many(&self, kernels: Kernels, jobs: &[MatmulJob<'_>], out: &mut [f32]) {
        self.all_products(kernels, jobs, None, out);
    }

    /// As [`Pool::matmul_many`] for pairs of jobs, gate and up, of one shape each: under the same wake-up
    /// `activation(gate, up)` is called for pieces of both results, in the order of rows, and what it
    /// leaves in the first piece stands where the result of gate would. It must take element by element.
    ///
    /// # Panics
    ///
    /// When lengths do not agree, a job has no partner, or partners differ in shape.
    pub fn matmul_gated(
        &self,
        kernels: Kernels,
        jobs: &[MatmulJob<'_>],
        activation: impl Fn(&mut [f32], &[f32]) + Sync,
        out: &mut [f32],
    ) {
        for pair in jobs.chunks(2) {
            assert_eq!(pair.len(), 2, "gates against ups");
            let shape = |job: &MatmulJob<'_>| (job.w.rows(), job.batch);
            assert_eq!(shape(&pair[0]), shape(&pair[1]), "gate against up");
        }
        self.all_products(kernels, jobs, Some(&activation), out);
    }

    fn all_products(
        &self,
        kernels: Kernels,
        jobs: &[MatmulJob<'_>],
        activation: Option<Activation<'_>>,
        out: &mut [f32],
    ) {
        for job in jobs {
            assert_eq!(job.x.len(), job.batch * job.w.cols(), "x against batch times columns");
        }
        let len: usize = jobs.iter().map(MatmulJob::out_len).sum();
        assert_eq!(out.len(), len, "out against the sum of the results");
        let mut rest = out;
        // An even number of jobs, so that pairs stay together.
        const { assert!(MAX_JOBS.is_multiple_of(2)) }
        for jobs in jobs.chunks(MAX_JOBS) {
            let len = jobs.iter().map(MatmulJob::out_len).sum();
            let (own, next) = rest.split_at_mut(len);
            self.some_products(kernels, jobs, activation, own);
            rest = next;
        }
    }

    /// Products of at most [`MAX_JOBS`] jobs.
    fn some_products(
        &self,
        kernels: Kernels,
        jobs: &[MatmulJob<'_>],
        activation: Option<Activation<'_>>,
        out: &mut [f32],
    ) {
        let places = Quantised::of(kernels, jobs);
        let work = Work { kernels, jobs, activation, places: &places };
        if places.len == 0 {
            return self.multiply(&work, (&[], &mut []), out);
        }
        // Another caller's product may hold the scratch while it waits for its turn, which may be ours.
        let mut own = Scratch::default();
        let mut shared = match self.scratch.try_lock() {
            Ok(scratch) => Some(scratch),
            Err(TryLockError::Poisoned(scratch)) => Some(scratch.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let len = places.len + self.threads() * places.panel;
        let scratch = shared.as_deref_mut().unwrap_or(&mut own).of(len);
        let (vectors, panels) = scratch.split_at_mut(places.len);
        self.quantise(&work, vectors);
        self.multiply(&work, (vectors, panels), out);
    }

    /// Quantises the distinct vectors of the jobs.
    fn quantise(&self, work: &Work<'_>, scratch: &mut [u8]) {
        let Work { kernels, jobs, places, .. } = *work;
        let scratch = Disjoint::new(scratch);
        let threads = if places.elements < SERIAL_ELEMENTS { 1 } else { self.threads() };
        let task = |worker: usize| {
            for (index, job) in jobs.iter().enumerate() {
                let Some(form) = places.first[index] else { continue };
                let (cols, bytes) = (job.w.cols(), form.column_bytes(job.w.cols()));
                for column in (0..job.batch).filter(|column| column % threads == worker) {
                    let start = places.starts[index] + column * bytes;
                    // SAFETY: jobs with vectors of their own have bytes of their own, and each
                    // column is one worker's.
                    let out = unsafe { scratch.slice(start..start + bytes) };
                    kernels.quantise(&job.x[column * cols..(column + 1) * cols], form, out);
                }
            }
        };
        if threads == 1 { task(0) } else { self.run(task) }
    }

    fn multiply(&self, work: &Work<'_>, (vectors, panels): (&[u8], &mut [u8]), out: &mut [f32]) {
        let Work { jobs, activation, .. } = *work;
        let places = Places { vectors, panels: Disjoint::new(panels), out: Disjoint::new(out) };
        // Jobs whose rows are computed together.
        let together = if activation.is_some() { 2 } else { 1 };
        let cost: usize = jobs.iter().map(MatmulJob::cost).sum();
        if cost < SERIAL_COST || self.threads() == 1 {
            let mut offset = 0;
            for index in (0..jobs.len()).step_by(together) {
                work.rows(0, index, 0..jobs[index].w.rows(), offset, &places);
                offset += jobs[index].out_len() * together;
            }
            return;
        }
        let block =
            (cost / (self.threads() * BLOCKS_PER_WORKER)).clamp(BLOCK_COST.start, BLOCK_COST.end);
        let next = AtomicUsize::new(0);
        self.run(|worker| {
            // The first block of job `job`, and where its result begins.
            let (mut job, mut first, mut offset) = (0, 0, 0);
            loop {
                let index = next.fetch_add(1, Relaxed);
                loop {
                    let Some(of) = jobs.get(job) else { return };
                    let per_block = of.rows_per_block(block / together);
                    let blocks = of.w.rows().div_ceil(per_block);
                    if index < first + blocks {
                        let start = (index - first) * per_block;
                        let rows = start..(start + per_block).min(of.w.rows());
                        work.rows(worker, job, rows, offset, &places);
                        break;
                    }
                    first += blocks;
                    offset += of.out_len() * together;
                    job += together;
                }
            }
        });
    }
}

/// What one call computes.
struct Work<'a> {
    kernels: Kernels,
    jobs: &'a [MatmulJob<'a>],
    activation: Option<Activation<'a>>,
    places: &'a Quantised,
}

/// Where it comes from and goes to.
struct Places<'a> {
    /// Quantised vectors.
    vectors: &'a [u8],
    /// A part for each worker.
    panels: Disjoint<'a, u8>,
    out: Disjoint<'a, f32>,
}

impl Work<'_> {
    /// Rows of a job, and of its partner if it has one; their results begin at `offset`. Called once for
    /// each row of a job, and by one thread at a time for each worker.
    fn rows(
        &self,
        worker: usize,
        index: usize,
        rows: Range<usize>,
        offset: usize,
        places: &Places<'_>,
    ) {
        self.product(worker, index, rows.clone(), offset, places);
        let Some(activation) = self.activation else { return };
        let job = &self.jobs[index];
        self.product(worker, index + 1, rows.clone(), offset + job.out_len(), places);
        for column in 0..job.batch {
            let start = offset + column * job.w.rows() + rows.start;
            let ups = start + job.out_len();
            // SAFETY: both are results of these rows, which only this thread computes.
            let (gate, up) = unsafe {
                (
                    places.out.slice(start..start + rows.len()),
                    places.out.slice(ups..ups + rows.len()),
                )
            };
            activation(gate, up);
        }
    }

    fn product(
        &self,
        worker: usize,
        index: usize,
        rows: Range<usize>,
        offset: usize,
        places: &Places<'_>,
    ) {
        let MatmulJob { w, x, batch } = &self.jobs[index];
        let put = |row: usize, column: usize, value: f32| {
            // SAFETY: rows of a job are computed once and results of jobs do not overlap, so that
            // no other thread touches this element; `write` checks that it exists.
            unsafe { places.out.write(offset + column * w.rows() + row, value) }
        };
        match (self.kernels.form(w.element()), w.element()) {
            (Some(form), ElementType::Packed(packed)) => {
                let start = self.places.starts[index];
                let x = Batch::new(w.cols(), *batch, form, &places.vectors[start..]);
                let panel = worker * self.places.panel..(worker + 1) * self.places.panel;
                // SAFETY: each worker has a part of its own, and uses it for one product at a time.
                let panel = unsafe { places.panels.slice(panel) };
                self.kernels.matmul_rows_quantised((w, packed), rows, &x, panel, put);
            }
            _ => self.kernels.matmul_rows(w, rows, x, *batch, put),
        }
    }
}
